//! The fence: makes sure that a killed engine can do nothing to a VM any more.
//!
//! Before: an engine died, or a client brings back a VM whose keeper died. After: no thread of the engine that the VM's
//! state file names can change anything of the VM, and another engine may have it.
//! Threads: any; nothing here waits.
//! Promise: only the kernel's statement is proof. If there is none, the VM waits and is checked again, because two
//! engines that repair the same words at the same time would lose bytes.
//!
//! A killed process runs none of its code any more, but an uninterruptible system call continues until it is over: for
//! example a call that needs the `mmap_lock` of a VMM whose own thread hangs with that lock. Such a thread delays its
//! own VM only: the VM's state file lists the threads that work for it (`ballast_handover::threads`). A thread that is
//! exiting has done its last call for any VM. A thread that sleeps in a call for the file store's disk does no harm
//! either: the next engine's store waits for such calls and for io_uring before it frees anything.

use std::io;
use std::os::fd::OwnedFd;

use ballast_handover::state_file::StateFile;
use ballast_sys::process::{Process, Thread};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Kills this process, if it still exists. Returns a descriptor that is readable when all of the process is gone;
/// `None` if it is gone already.
///
/// # Errors
/// The process may still exist and run: the kernel could not tell (no descriptors left), or did not kill it.
pub fn kill(process: Process) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = i32::try_from(process.pid).ok().filter(|pid| *pid > 0).and_then(Pid::from_raw) else {
        return Ok(None);
    };
    let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(Errno::SRCH) => return Ok(None),
        // Some kernels return this if another process's thread has the number by now; the start time decides.
        Err(error) if Process::find(process.pid)? == Some(process) => return Err(error.into()),
        Err(Errno::INVAL | Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if Process::find(process.pid)? != Some(process) {
        return Ok(None);
    }
    match pidfd_send_signal(&pidfd, Signal::KILL) {
        Ok(()) => Ok(Some(pidfd)),
        Err(Errno::SRCH) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The rest of a killed engine that matters to one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Left {
    /// No thread that could change anything of the VM.
    Nothing,
    /// These threads may be in a system call for it.
    Threads(Vec<u32>),
    /// It is unknown which threads work for the VM, because its engine has not recorded them: the whole process must
    /// go.
    All,
}

/// Kills the engines that this VM's state file names, unless they are `ours`. Returns what is left of them.
///
/// # Errors
/// As for [`kill`]; or the kernel could not tell what is left.
pub fn end_for(state: &StateFile, ours: impl IntoIterator<Item = Process>) -> io::Result<Left> {
    let ours: Vec<_> = ours.into_iter().collect();
    for (pid, start) in state.leaving().into_iter().chain(state.engine()) {
        let process = Process { pid, start };
        if !ours.contains(&process) {
            let left = end_one_for(state, process)?;
            if left != Left::Nothing {
                return Ok(left);
            }
        }
    }
    Ok(Left::Nothing)
}

fn end_one_for(state: &StateFile, process: Process) -> io::Result<Left> {
    let Some(pidfd) = kill(process)? else { return Ok(Left::Nothing) };
    // Not before the kill, after which the engine adds no thread.
    let Some(threads) = state.fence_threads(process.pid, process.start) else {
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default()))?;
        return Ok(if fds[0].revents().is_empty() { Left::All } else { Left::Nothing });
    };
    let mut left = Vec::new();
    for thread in threads {
        let its = Thread { pid: process.pid, thread };
        let is_harmless = its.is_over()? || its.sleeps()? && state.is_beside(thread);
        if !is_harmless {
            left.push(thread);
        }
    }
    Ok(if left.is_empty() { Left::Nothing } else { Left::Threads(left) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::wire::VmId;
    use std::process::{Child, Command};

    fn sleeping() -> (Child, Process) {
        let child = Command::new("sleep").arg("1000").spawn().expect("sleep");
        let process = Process::find(child.id()).expect("readable").expect("running");
        (child, process)
    }

    fn is_gone(pidfd: OwnedFd) {
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        poll(&mut fds, None).expect("poll");
    }

    #[test]
    fn only_the_process_that_is_meant_is_killed_and_one_that_is_gone_is_no_error() {
        let (mut child, process) = sleeping();
        assert!(kill(Process { start: process.start + 1, ..process }).expect("another process").is_none());
        assert!(child.try_wait().expect("wait").is_none(), "a process of another start time was ended");
        is_gone(kill(process).expect("kill it").expect("it was there"));
        assert!(process.is_dying(), "nobody has reaped it");
        assert!(!child.wait().expect("reap").success());
        for gone in [process, Process { pid: 0, start: 0 }, Process { pid: u32::MAX, start: 0 }] {
            assert!(kill(gone).expect("gone already").is_none());
        }
    }

    #[test]
    fn a_vm_waits_for_the_threads_of_its_own_list_and_for_no_other() {
        let (mut child, process) = sleeping();
        let state = StateFile::create(VmId([4; 16]), "test").expect("state");
        assert_eq!(end_for(&state, None).expect("nobody is named"), Left::Nothing);
        state.name_engine(process.pid, process.start);
        assert_eq!(end_for(&state, Some(process)).expect("ours"), Left::Nothing);
        assert!(child.try_wait().expect("wait").is_none(), "our own engine was ended");
        assert_eq!(end_for(&state, None).expect("kill it"), Left::Nothing, "no thread of it works for this VM");
        child.wait().expect("reap");

        let (mut child, process) = sleeping();
        state.name_engine(process.pid, process.start);
        state.open_as(process.pid, process.start);
        // The list names its first thread, which is gone when the process is.
        std::mem::forget(state.list(process.pid).expect("not fenced"));
        while end_for(&state, None).expect("kill it") != Left::Nothing {
            std::thread::yield_now();
        }
        assert!(process.is_dying());
        child.wait().expect("reap");
    }

    #[test]
    fn an_engine_that_has_not_said_who_works_for_whom_must_be_gone_entirely() {
        let (mut child, process) = sleeping();
        let state = StateFile::create(VmId([4; 16]), "test").expect("state");
        state.name_engine(process.pid, process.start);
        (0..1000).for_each(|_| std::mem::forget(state.list(process.pid).expect("not fenced")));
        while end_for(&state, None).expect("kill it") == Left::All {
            std::thread::yield_now();
        }
        is_gone(kill(process).expect("it is dead").expect("and not reaped"));
        child.wait().expect("reap");
    }

    #[test]
    fn without_descriptors_left_nobody_is_taken_for_gone() {
        // In a process of its own, because the limit applies to the whole process.
        let program = std::env::current_exe().expect("this test program");
        let (mut victim, _) = sleeping();
        let status = Command::new("sh")
            .args(["-c", "ulimit -n 64; exec \"$@\"", "sh"])
            .arg(program)
            .args(["--include-ignored", "--exact", "fence::tests::child_kills_without_descriptors"])
            .env("BALLAST_TEST_VICTIM", victim.id().to_string())
            .status();
        let alive = victim.try_wait().expect("wait").is_none();
        let _ = victim.kill();
        let _ = victim.wait();
        assert!(status.expect("run the test program").success() && alive);
    }

    #[test]
    #[ignore = "run by without_descriptors_left_nobody_is_taken_for_gone"]
    fn child_kills_without_descriptors() {
        let Ok(victim) = std::env::var("BALLAST_TEST_VICTIM") else { return };
        let process = Process::find(victim.parse().expect("a pid")).expect("readable").expect("running");
        let mut held = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            held.push(file);
        }
        let killed = kill(process);
        drop(held);
        assert!(killed.is_err(), "{killed:?}");
    }
}
