//! Program: the file that engines are started from, even if another file has its name by now.
//!
//! Before: the keeper was started, or an operator named a program. After: engines are started from the file that had
//! the name at that moment.
//! Threads: the keeper's one.
//! Promise: a file that was installed later, and was refused or never tried, runs only when an operator asks for it.
//! Guests get a new engine even when the file has been removed.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_sys::spawn::Child;
use rustix::fs::{Mode, OFlags};

#[derive(Clone, Debug)]
pub(crate) struct Program {
    path: PathBuf,
    /// Its file, opened with `O_PATH`, only to be run.
    file: Arc<OwnedFd>,
}

impl Program {
    /// The program that has this name now.
    pub fn at(path: PathBuf) -> std::io::Result<Self> {
        let file = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { path, file: Arc::new(file) })
    }

    /// The program of this process, which was started by this name.
    pub fn own(path: PathBuf) -> std::io::Result<Self> {
        Ok(Self { path, ..Self::at("/proc/self/exe".into())? })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn is_file_of(&self, other: &Self) -> bool {
        let id = |program: &Self| rustix::fs::fstat(&*program.file).map(|stat| (stat.st_dev, stat.st_ino)).ok();
        id(self).is_some_and(|this| Some(this) == id(other))
    }

    pub fn number(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub fn start(&self, args: &[&str], stdin: BorrowedFd<'_>) -> std::io::Result<Child> {
        // Also the path that a script's interpreter gets, which has none of our descriptors.
        let file = format!("/proc/{}/fd/{}", std::process::id(), self.number());
        Child::start(Path::new(&file), &self.path, args, stdin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_sys::scm;
    use ballast_testkit::program::install_script;
    use std::os::fd::AsFd;

    #[test]
    fn a_program_is_the_file_that_had_the_name_also_when_another_has_it_or_none() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("program");
        let install = |text: &str| {
            let new = dir.path().join("new");
            install_script(&new, &format!("printf '{text} %s' \"$1\" >&0"));
            std::fs::rename(&new, &path).expect("install");
        };
        install("first");
        let first = Program::at(path.clone()).expect("it is there");
        assert!(first.is_file_of(&Program::at(path.clone()).expect("it is there")));
        install("second");
        let second = Program::at(path.clone()).expect("it is there");
        assert!(!first.is_file_of(&second) && first.path() == second.path());
        std::fs::remove_file(&path).expect("remove");
        Program::at(path.clone()).expect_err("it is gone");
        for (program, says) in [(&first, "first engine"), (&second, "second engine"), (&first, "first engine")] {
            let (ours, theirs) = scm::pair().expect("a pair");
            program.start(&["engine"], theirs.as_fd()).expect("started");
            let said = scm::receive(&ours).expect("received").expect("open");
            assert_eq!(String::from_utf8_lossy(&said.bytes), says);
        }
    }

    #[test]
    fn the_program_of_this_process_is_its_file() {
        let path = std::env::current_exe().expect("this test program");
        let own = Program::own("/another/name".into()).expect("it runs");
        assert!(own.is_file_of(&Program::at(path).expect("it is there")) && own.path() == Path::new("/another/name"));
    }
}
