//! Tells whether two processes run in one address space.
//!
//! Before: a process was seen to map guest RAM. After: it is known whether its touches are an attached VMM's, because
//! the two have the same page tables and so the same userfaultfds.
//! Threads: any, but the kernel takes a lock of both processes, which a process that hangs may hold for long.

use std::io;

/// Do these processes share their memory (`CLONE_VM`)? False if one of them is gone.
///
/// # Errors
/// The kernel cannot tell (it has no `kcmp`: `CONFIG_KCMP`), or does not let this user ask.
pub fn same_memory(a: u32, b: u32) -> io::Result<bool> {
    const KCMP_VM: libc::c_int = 1;
    let (first, second) = (a as libc::pid_t, b as libc::pid_t);
    // SAFETY: plain numbers; the call reads nothing of ours.
    match unsafe { libc::syscall(libc::SYS_kcmp, first, second, KCMP_VM, 0, 0) } {
        -1 => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ESRCH) => Ok(false),
            error => Err(error),
        },
        // Two ending processes both have no memory any more, which counts as shared memory and does no harm.
        answer => Ok(answer == 0),
    }
}

/// Does the kernel have `kcmp`?
pub fn is_available() -> bool {
    same_memory(std::process::id(), std::process::id()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_program_has_memory_of_its_own_and_a_process_that_is_gone_has_none() {
        if ballast_testkit::missing("kcmp", (!is_available()).then_some("the kernel has no kcmp")) {
            return;
        }
        let me = std::process::id();
        let mut other = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
        assert!(same_memory(me, me).expect("asked"));
        assert!(!same_memory(me, other.id()).expect("asked"));
        other.kill().expect("end it");
        other.wait().expect("reap it");
        assert!(!same_memory(me, other.id()).expect("gone, which is no error"));
    }
}
