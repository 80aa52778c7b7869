//! Exec in place: this process becomes another program and keeps descriptors that the caller names.
//!
//! Before: the caller has recorded the numbers of its descriptors. After: the next program has them under these
//! numbers, the standard descriptors, and no others. If the exec fails, the caller continues as before.
//! Threads: one. Exec ends all other threads, and waits for each one that is in an uninterruptible system call.
//! Units: descriptors are numbers here, because an exec passes on numbers.

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;

/// Set whether this descriptor stays open in the next program.
pub fn keep(number: RawFd, stays: bool) -> io::Result<()> {
    // SAFETY: a flag of a descriptor that may or may not be open; no memory is passed.
    let done = unsafe { libc::fcntl(number, libc::F_SETFD, if stays { 0 } else { libc::FD_CLOEXEC }) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Another descriptor of the same file, with a number of this process's own, closed by the next exec.
pub fn duplicate(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: asks for a new descriptor; no memory is passed.
    let new = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, libc::STDERR_FILENO + 1) };
    if new < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just opened it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}

/// Close all descriptors that an exec passes on (not close-on-exec), except the standard ones.
///
/// # Errors
/// The kernel could not list them; then none is closed.
pub fn close_kept() -> io::Result<()> {
    let listed = std::fs::read_dir("/proc/self/fd")?;
    let numbers = listed.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<RawFd>().ok());
    for number in numbers.filter(|number| *number > libc::STDERR_FILENO).collect::<Vec<_>>() {
        // SAFETY: flags of a descriptor that may or may not be open; no memory is passed.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
        if flags >= 0 && flags & libc::FD_CLOEXEC == 0 {
            // SAFETY: every descriptor that this process opens is close-on-exec, here and in the standard library; so
            // no owner in this process knows this number.
            unsafe { libc::close(number) };
        }
    }
    Ok(())
}

/// Replace this program by `file`, with these arguments after this name. Returns only if that fails.
pub fn become_program(file: &OsStr, name: &OsStr, args: &[&OsStr]) -> io::Error {
    let strings = [file, name].into_iter().chain(args.iter().copied());
    let strings = strings.map(|string| CString::new(string.as_bytes()));
    let strings = match strings.collect::<Result<Vec<_>, _>>() {
        Ok(strings) => strings,
        Err(error) => return error.into(),
    };
    let argv: Vec<_> = strings[1..].iter().map(|string| string.as_ptr()).chain([std::ptr::null()]).collect();
    // SAFETY: strings that end with zeros, in a list that ends with a null pointer; all live during the call.
    unsafe { libc::execv(strings[0].as_ptr(), argv.as_ptr()) };
    io::Error::last_os_error()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::process::Command;

    #[test]
    fn a_program_that_is_not_there_leaves_this_one_as_it_was() {
        let error = become_program(OsStr::new("/no/such/program"), OsStr::new("x"), &[]);
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert_eq!(become_program(OsStr::new("a\0b"), OsStr::new("x"), &[]).kind(), io::ErrorKind::InvalidInput);
        keep(1 << 20, true).expect_err("not open");
        duplicate(1 << 20).expect_err("not open");
    }

    #[test]
    fn the_program_that_follows_has_what_was_kept_and_nothing_else() {
        // In a process of its own, which becomes another program.
        let out = Command::new(std::env::current_exe().expect("this test program"))
            .args(["--include-ignored", "--exact", "--nocapture", "exec::tests::child_becomes_a_shell"])
            .env("BALLAST_TEST_EXEC", "1")
            .output()
            .expect("run the test program");
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(said.contains("kept: bytes; lost: no"), "{said}\n{}", String::from_utf8_lossy(&out.stderr));
    }

    #[test]
    #[ignore = "run by the_program_that_follows_has_what_was_kept_and_nothing_else"]
    fn child_becomes_a_shell() {
        if std::env::var_os("BALLAST_TEST_EXEC").is_none() {
            return;
        }
        let (reader, mut writer) = io::pipe().expect("a pipe");
        writer.write_all(b"bytes\n").expect("write");
        let lost = std::fs::File::open("/dev/null").expect("open");
        keep(reader.as_raw_fd(), true).expect("open");
        let script = format!(
            "read word <&{}; test -e /proc/self/fd/{} && has=yes || has=no; echo \"kept: $word; lost: $has\"",
            reader.as_raw_fd(),
            lost.as_raw_fd()
        );
        let error = become_program(OsStr::new("/bin/sh"), OsStr::new("sh"), &[OsStr::new("-c"), OsStr::new(&script)]);
        panic!("{error}");
    }

    #[test]
    fn a_duplicate_is_the_same_file_and_outlives_the_number_it_was_made_of() {
        let (reader, mut writer) = io::pipe().expect("a pipe");
        let twin = duplicate(reader.as_raw_fd()).expect("open");
        drop(reader);
        writer.write_all(b"x").expect("there is a reader");
        let mut byte = [0];
        std::fs::File::from(twin).read_exact(&mut byte).expect("read");
        assert_eq!(&byte, b"x");
    }
}
