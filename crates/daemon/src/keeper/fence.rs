//! Fence: which engine may be about to touch a VM, and how to be sure that it no longer is.
//!
//! Before: a client brings back a VM whose keeper died. After: the engine that its state file names is gone, all threads.
//! Promise: "gone" is only ever what the kernel said. When it cannot be known, the answer is an error and the client asks
//! again: two engines that mend the same words at the same time would lose bytes.

use std::io;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// How long a killed engine may take to be gone. One with much memory takes tenths of a second; the client asks again.
const DYING: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// A process, told by its start time from a later one with the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Process {
    /// The process.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start: u64,
}

impl Process {
    /// The process that has this pid now; `None` if there is none.
    pub fn find(pid: u32) -> io::Result<Option<Self>> {
        let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat,
            // It ended before the file was opened, or before it was read.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => return Ok(None),
            Err(error) => return Err(error),
        };
        // The second field may hold anything, spaces and parentheses included, up to the last closing one.
        let start = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().nth(19)?.parse().ok());
        let start = start.ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat has no start time")))?;
        Ok(Some(Self { pid, start }))
    }

    /// This process.
    pub fn this() -> io::Result<Self> {
        Self::find(std::process::id())?.ok_or_else(|| io::Error::other("/proc does not show this process"))
    }
}

/// Kill this process, if it is still there, and wait until it is gone.
///
/// # Errors
/// It may still be there: the kernel could not say (no descriptors left), or it does not die in time.
pub fn end(process: Process) -> io::Result<()> {
    let Some(pid) = i32::try_from(process.pid).ok().filter(|pid| *pid > 0).and_then(Pid::from_raw) else {
        return Ok(());
    };
    let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(Errno::SRCH) => return Ok(()),
        // Some kernels say so when the number is a thread's of another process by now; its start time decides.
        Err(error) if Process::find(process.pid)? == Some(process) => return Err(error.into()),
        Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if Process::find(process.pid)? != Some(process) {
        return Ok(());
    }
    tracing::warn!(pid = process.pid, "ending the engine that the last keeper left behind");
    match pidfd_send_signal(&pidfd, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => return Err(error.into()),
    }
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    match poll(&mut fds, Some(&DYING)) {
        Ok(_) if !fds[0].revents().is_empty() => Ok(()),
        Ok(_) | Err(Errno::INTR) => Err(io::Error::new(io::ErrorKind::TimedOut, "it was killed and is not gone yet")),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn only_the_process_that_is_meant_is_ended_and_one_that_is_gone_is_no_error() {
        let mut child = Command::new("sleep").arg("1000").spawn().expect("sleep");
        let process = Process::find(child.id()).expect("readable").expect("running");
        end(Process { start: process.start + 1, ..process }).expect("another process");
        assert!(child.try_wait().expect("wait").is_none(), "a process of another start time was ended");
        end(process).expect("end it");
        assert!(!child.wait().expect("reap").success());
        end(process).expect("gone already");
        end(Process { pid: 0, start: 0 }).expect("nobody");
        end(Process { pid: u32::MAX, start: 0 }).expect("nobody");
    }

    #[test]
    fn without_descriptors_left_nobody_is_taken_for_gone() {
        // In a process of its own, because the limit is the whole process's.
        let program = std::env::current_exe().expect("this test program");
        let mut victim = Command::new("sleep").arg("1000").spawn().expect("sleep");
        let status = Command::new("sh")
            .args(["-c", "ulimit -n 64; exec \"$@\"", "sh"])
            .arg(program)
            .args(["--include-ignored", "--exact", "keeper::fence::tests::child_ends_without_descriptors"])
            .env("BALLAST_TEST_VICTIM", victim.id().to_string())
            .status();
        let alive = victim.try_wait().expect("wait").is_none();
        let _ = victim.kill();
        let _ = victim.wait();
        assert!(status.expect("run the test program").success() && alive);
    }

    #[test]
    #[ignore = "run by without_descriptors_left_nobody_is_taken_for_gone"]
    fn child_ends_without_descriptors() {
        let Ok(victim) = std::env::var("BALLAST_TEST_VICTIM") else { return };
        let process = Process::find(victim.parse().expect("a pid")).expect("readable").expect("running");
        let mut held = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            held.push(file);
        }
        let ended = end(process);
        drop(held);
        assert!(ended.is_err(), "{ended:?}");
    }
}
