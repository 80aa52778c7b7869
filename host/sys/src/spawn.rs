//! Starts a program that inherits none of this process's descriptors, not even for the moment before its `exec`.
//!
//! Before: the keeper wants an engine. After: the program runs, with one descriptor of the caller's as standard input.
//! Threads: any; the caller waits until the program's `exec`, and no longer. The program begins at the caller's nice
//! value, even if threads that the caller starts do not (`priority`).
//! Promise: the child never copies or closes descriptors of this process. A child of `fork` has a copy of each and
//! closes most of them in `exec`, and a close can wait for a server that does not reply (the file systems FUSE and
//! overlay flush). This child shares the table until it makes its own, of the standard descriptors and one more.
//!
//! Linux before 6.11 (and stable kernels of that time) copies the first 64 descriptors all the same, and closes them.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Pid, WaitOptions};

/// A program that was started. Dropping this neither ends nor reaps it.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    pidfd: OwnedFd,
}

impl Child {
    /// A child of this process that was started before an exec, by its pid and pidfd.
    ///
    /// # Errors
    /// The number is no pid.
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
    ///
    /// # Errors
    /// It was reaped already.
    pub fn try_wait(&self) -> io::Result<Option<ExitStatus>> {
        let ended = rustix::process::waitpid(Some(self.pid), WaitOptions::NOHANG)?;
        Ok(ended.map(|(_, status)| ExitStatus::from_raw(status.as_raw())))
    }
}

/// Starts programs. Keeps one low descriptor number free for their standard input.
#[derive(Debug)]
pub struct Starter {
    slot: OwnedFd,
}

/// Where a child reports why its `exec` failed: a page that both processes map.
struct Failure(*mut AtomicI32);

impl Failure {
    const LEN: usize = 4096;

    fn new() -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a null hint without MAP_FIXED lets the kernel choose a free range; nothing is replaced.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), Self::LEN, prot, flags)? };
        Ok(Self(base.cast()))
    }

    fn errno(&self) -> &AtomicI32 {
        // SAFETY: a page of ours, aligned and zeroed by the kernel, mapped as long as `self` lives.
        unsafe { &*self.0 }
    }
}

impl Drop for Failure {
    fn drop(&mut self) {
        // SAFETY: the page that `new` mapped, to which no reference exists any more.
        let _ = unsafe { rustix::mm::munmap(self.0.cast(), Self::LEN) };
    }
}

impl Starter {
    /// Reserve the lowest free descriptor number. Call it before this process has a descriptor that no child may have:
    /// only larger numbers are kept from children.
    ///
    /// # Errors
    /// `/dev/null` cannot be opened.
    pub fn new() -> io::Result<Self> {
        let slot = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { slot })
    }

    /// Start this program with these arguments, this environment, and `stdin` as its standard input.
    ///
    /// # Errors
    /// The errors of `fork` and of the `exec`.
    pub fn start(&mut self, program: &Path, args: &[&str], stdin: BorrowedFd<'_>) -> io::Result<Child> {
        self.start_as(program, program, args, stdin)
    }

    /// The same with the program of this file, by this name.
    ///
    /// # Errors
    /// As for [`Starter::start`].
    pub fn start_as(&mut self, file: &Path, name: &Path, args: &[&str], stdin: BorrowedFd<'_>) -> io::Result<Child> {
        let string = |bytes: &[u8]| CString::new(bytes).map_err(io::Error::from);
        let (file, name) = (string(file.as_os_str().as_bytes())?, string(name.as_os_str().as_bytes())?);
        let args = args.iter().map(|arg| string(arg.as_bytes())).collect::<io::Result<Vec<_>>>()?;
        let variable = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            string(&[name.as_bytes(), b"=", value.as_bytes()].concat())
        };
        let variables = std::env::vars_os().map(variable).collect::<io::Result<Vec<_>>>()?;
        let pointers = |strings: &[&CString]| -> Vec<*const libc::c_char> {
            strings.iter().map(|string| string.as_ptr()).chain([std::ptr::null()]).collect()
        };
        let argv = pointers(&std::iter::once(&name).chain(&args).collect::<Vec<_>>());
        let envp = pointers(&variables.iter().collect::<Vec<_>>());
        let failure = Failure::new()?;
        let null = self.slot.try_clone()?;
        rustix::io::dup3(stdin, &mut self.slot, rustix::io::DupFlags::CLOEXEC)?;
        let mut pidfd: libc::c_int = -1;
        // The caller sleeps until the child has left the table, so the slot can be reused when this returns.
        let flags = libc::CLONE_FILES | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
        let slot = self.slot.as_raw_fd();
        let nice = rustix::process::getpriority_process(None).unwrap_or_default();
        // SAFETY: without CLONE_VM and without a stack of its own this is `fork`: the child runs on copies of all
        // memory. Its pointers stay valid there, and until `exec` it makes system calls and nothing else: it takes no
        // lock and allocates nothing. The kernel writes one number, the pidfd.
        let forked = unsafe { libc::syscall(libc::SYS_clone, flags as libc::c_ulong, 0, &raw mut pidfd, 0, 0) };
        if forked == 0 {
            // SAFETY: in the child, with strings that end with zeros and lists that end with null pointers.
            unsafe { become_program(slot, nice, file.as_ptr(), argv.as_ptr(), envp.as_ptr(), failure.errno()) }
        }
        let error = io::Error::last_os_error();
        rustix::io::dup3(&null, &mut self.slot, rustix::io::DupFlags::CLOEXEC)?;
        // It fails if there is no descriptor left for the pidfd, for one.
        let forked = i32::try_from(forked).ok().filter(|forked| *forked > 0);
        let Some(pid) = forked.and_then(Pid::from_raw) else { return Err(error) };
        // SAFETY: the call has just opened it for us.
        let child = Child { pid, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } };
        match failure.errno().load(Ordering::Acquire) {
            0 => Ok(child),
            errno => {
                // The child exits at once, so this does not wait long.
                let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
                Err(io::Error::from_raw_os_error(errno))
            }
        }
    }
}

/// Runs in the child: leaves the shared descriptor table, takes its standard input, becomes the program.
///
/// # Safety
/// The process has one thread, and no other process uses its memory. `file` is a C string; `argv` and `envp` are lists
/// of C strings that end with a null pointer.
unsafe fn become_program(
    slot: libc::c_int,
    nice: libc::c_int,
    file: *const libc::c_char,
    argv: *const *const libc::c_char,
    envp: *const *const libc::c_char,
    failed: &AtomicI32,
) -> ! {
    let first = slot as libc::c_uint + 1;
    // SAFETY: system calls about this process and its descriptors; the lists are as the caller promised. A close with
    // UNSHARE makes a table of the remaining descriptors and does not touch the others.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, nice);
        if libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE) == 0
            && libc::dup2(slot, 0) == 0
        {
            libc::execve(file, argv, envp);
        }
        failed.store(*libc::__errno_location(), Ordering::Release);
        libc::_exit(127)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::{is_alone, with_descriptors};
    use crate::scm;
    use rustix::event::{PollFd, PollFlags, poll};

    fn ended(child: &Child) -> ExitStatus {
        poll(&mut [PollFd::new(&child.pidfd, PollFlags::IN)], None).expect("poll");
        child.try_wait().expect("ours").expect("dead")
    }

    #[test]
    fn a_program_has_its_standard_descriptors_and_no_other_whatever_this_process_holds() {
        let mut starter = Starter::new().expect("a starter");
        let (ours, theirs) = scm::pair().expect("a pair");
        // Also those that an `exec` would leave open.
        let open = std::fs::File::open("/dev/null").expect("open");
        // A number above the starter's, whatever other tests closed since.
        let open = rustix::io::fcntl_dupfd_cloexec(&open, starter.slot.as_raw_fd() + 1).expect("dup");
        rustix::io::fcntl_setfd(&open, rustix::io::FdFlags::empty()).expect("fcntl");
        let script = "exec >&0; ls /proc/self/fd | tr '\\n' ' '";
        let args = ["-c", script];
        for _ in 0..2 {
            let child = starter.start(Path::new("/bin/sh"), &args, theirs.as_fd()).expect("started");
            let said = scm::receive(&ours).expect("received").expect("open");
            let said: Vec<u32> =
                String::from_utf8_lossy(&said.bytes).split_whitespace().filter_map(|fd| fd.parse().ok()).collect();
            assert!(!said.contains(&(open.as_raw_fd() as u32)), "{said:?}");
            assert!([0, 1, 2].iter().all(|standard| said.contains(standard)), "{said:?}");
            assert!(ended(&child).success());
        }
        drop(open);
    }

    #[test]
    fn without_a_descriptor_for_its_pidfd_a_program_is_not_started_and_that_is_an_error() {
        let name = "spawn::tests::without_a_descriptor_for_its_pidfd_a_program_is_not_started_and_that_is_an_error";
        if !is_alone(name) {
            return;
        }
        let mut starter = Starter::new().expect("a starter");
        let (_ours, theirs) = scm::pair().expect("a pair");
        // Whether the copy of the starter's descriptor has a place, and the pidfd has none; or neither has.
        let mut refused = 0;
        for more in 0..3 {
            let started = with_descriptors(more, || starter.start(Path::new("/bin/true"), &[], theirs.as_fd()));
            match started {
                Ok(child) => assert!(ended(&child).success()),
                Err(error) => {
                    assert_eq!(error.raw_os_error(), Some(libc::EMFILE), "{error}");
                    refused += 1;
                }
            }
        }
        // Numbers further up may be taken by what this process inherited.
        assert!(refused >= 2);
        let child = starter.start(Path::new("/bin/true"), &[], theirs.as_fd()).expect("as before");
        assert!(ended(&child).success());
    }

    #[test]
    fn a_program_begins_at_the_nice_value_of_the_thread_that_started_it() {
        let body = || {
            crate::priority::run_first();
            let nice = rustix::process::getpriority_process(None).expect("nice");
            let mut starter = Starter::new().expect("a starter");
            let (ours, theirs) = scm::pair().expect("a pair");
            let child = starter.start(Path::new("/bin/sh"), &["-c", "nice >&0"], theirs.as_fd()).expect("started");
            let said = scm::receive(&ours).expect("received").expect("open");
            assert_eq!(String::from_utf8_lossy(&said.bytes).trim(), nice.to_string());
            assert!(ended(&child).success());
        };
        std::thread::spawn(body).join().expect("joined");
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error_and_leaves_no_process() {
        let mut starter = Starter::new().expect("a starter");
        let (_ours, theirs) = scm::pair().expect("a pair");
        let error = starter.start(Path::new("/no/such/program"), &[], theirs.as_fd()).expect_err("started");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert_eq!(
            ended(&starter.start(Path::new("/bin/false"), &[], theirs.as_fd()).expect("started")).code(),
            Some(1)
        );
    }
}
