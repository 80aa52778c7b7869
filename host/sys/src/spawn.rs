//! Starts a program that is known by its pidfd.
//!
//! Before: the keeper wants an engine. After: the program runs, with one descriptor of the caller's as standard input.
//! Threads: any; the caller waits until the program's `exec`, and no longer.
//! Promise: the program has the standard descriptors, those that are not close-on-exec, and no others. It begins at the
//! caller's nice value, even if threads that the caller starts do not (`priority`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus};

use rustix::process::{Pid, PidfdFlags, WaitOptions, getpriority_process, pidfd_open, setpriority_process};

/// A program that was started. Dropping this neither ends nor reaps it.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    pidfd: OwnedFd,
}

impl Child {
    /// Start the program of this file, by this name, with these arguments, and `stdin` as its standard input.
    pub fn start(file: &Path, name: &Path, args: &[&str], stdin: BorrowedFd<'_>) -> io::Result<Self> {
        let mut child =
            Command::new(file).arg0(name.as_os_str()).args(args).stdin(stdin.try_clone_to_owned()?).spawn()?;
        let pid = Pid::from_child(&child);
        if let Some(nice) = getpriority_process(None).ok().filter(|nice| *nice < 0) {
            let _ = setpriority_process(Some(pid), nice);
        }
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { pid, pidfd }),
            Err(error) => {
                child.kill()?;
                child.wait()?;
                Err(error.into())
            }
        }
    }

    /// A child of this process that was started before an exec, by its pid and pidfd.
    pub fn known(pid: u32, pidfd: OwnedFd) -> io::Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the number is no pid"))?;
        Ok(Self { pid, pidfd })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.pid.as_raw_nonzero().get() as u32
    }

    /// Its pidfd: readable when it is dead.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Reap it, if it is dead and not reaped yet.
    pub fn try_wait(&self) -> io::Result<Option<ExitStatus>> {
        let ended = rustix::process::waitpid(Some(self.pid), WaitOptions::NOHANG)?;
        Ok(ended.map(|(_, status)| ExitStatus::from_raw(status.as_raw())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scm;
    use rustix::event::{PollFd, PollFlags, poll};
    use std::os::fd::AsRawFd;

    fn start(program: &str, args: &[&str], stdin: &OwnedFd) -> io::Result<Child> {
        Child::start(Path::new(program), Path::new("a name"), args, stdin.as_fd())
    }

    fn ended(child: &Child) -> ExitStatus {
        poll(&mut [PollFd::new(&child.pidfd, PollFlags::IN)], None).expect("poll");
        child.try_wait().expect("ours").expect("dead")
    }

    #[test]
    fn a_program_has_its_standard_descriptors_and_no_other() {
        let (ours, theirs) = scm::pair().expect("a pair");
        let open = std::fs::File::open("/dev/null").expect("open");
        // A number that the program does not take for a descriptor of its own.
        let open = rustix::io::fcntl_dupfd_cloexec(&open, 500).expect("dup");
        let child = start("/bin/sh", &["-c", "exec >&0; ls /proc/self/fd | tr '\\n' ' '"], &theirs).expect("started");
        let said = scm::receive(&ours).expect("received").expect("open");
        let said: Vec<u32> =
            String::from_utf8_lossy(&said.bytes).split_whitespace().filter_map(|fd| fd.parse().ok()).collect();
        assert!(!said.contains(&(open.as_raw_fd() as u32)), "{said:?}");
        assert!([0, 1, 2].iter().all(|standard| said.contains(standard)), "{said:?}");
        assert!(ended(&child).success());
    }

    #[test]
    fn a_program_begins_at_the_nice_value_of_the_thread_that_started_it() {
        let body = || {
            crate::priority::run_first();
            let nice = getpriority_process(None).expect("nice");
            let (ours, theirs) = scm::pair().expect("a pair");
            // The nice value is set right after the exec.
            let script = format!("until test $(nice) = {nice}; do :; done; echo so >&0");
            let child = start("/bin/sh", &["-c", &script], &theirs).expect("started");
            let said = scm::receive(&ours).expect("received").expect("open");
            assert_eq!(String::from_utf8_lossy(&said.bytes).trim(), "so");
            assert!(ended(&child).success());
        };
        std::thread::spawn(body).join().expect("joined");
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error_and_leaves_no_process() {
        let (_ours, theirs) = scm::pair().expect("a pair");
        let error = start("/no/such/program", &[], &theirs).expect_err("started");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert_eq!(ended(&start("/bin/false", &[], &theirs).expect("started")).code(), Some(1));
    }
}
