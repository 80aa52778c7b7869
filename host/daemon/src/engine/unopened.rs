//! VMs that could not be opened, and the failures that may pass.
//!
//! Before: an order about a VM failed. After: callers that ask about the VM get the reason. If the failure may pass,
//! the keeper gives this engine the VM again (`Report::Lost`).
//! Threads: the VMs' workers.
//! Promise: a lack of descriptors or threads is never final, and a lack of memory is not final for opening a VM.

use std::error::Error;
use std::io;

use rustix::io::Errno;

pub(super) struct Unopened {
    pub text: String,
    pub may_pass: bool,
}

/// Whether this engine, or the host, lacks descriptors or threads. A single process of a VM cannot cause that, unlike
/// ENOMEM, which the kernel also returns for a process that has too many mappings or is gone.
pub(super) fn lacks_handles(error: &(dyn Error + 'static)) -> bool {
    is_one_of(error, &[Errno::MFILE, Errno::NFILE, Errno::AGAIN])
}

/// Whether opening a VM, which involves no process, failed for lack of a resource that may be free later: descriptors,
/// threads or memory.
pub(super) fn may_pass(error: &(dyn Error + 'static)) -> bool {
    lacks_handles(error) || is_one_of(error, &[Errno::NOMEM, Errno::NOSPC, Errno::NOBUFS])
}

fn is_one_of(error: &(dyn Error + 'static), these: &[Errno]) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let own = error.downcast_ref::<Errno>().copied();
        let errno = own.or_else(|| Errno::from_io_error(error.downcast_ref::<io::Error>()?));
        if errno.is_some_and(|errno| these.contains(&errno)) {
            return true;
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn a_lack_of_memory_may_pass_at_any_depth_but_damage_does_not() {
        let of = |errno: Errno| Err::<(), _>(io::Error::from(errno)).context("Mapping").context("Opening the arena");
        assert!(may_pass(of(Errno::NOMEM).expect_err("an error").as_ref()));
        assert!(may_pass(anyhow::Error::new(Errno::MFILE).as_ref()));
        assert!(lacks_handles(of(Errno::AGAIN).expect_err("an error").as_ref()));
        assert!(!lacks_handles(of(Errno::NOMEM).expect_err("an error").as_ref()), "a process has too many mappings");
        assert!(!may_pass(of(Errno::BADF).expect_err("an error").as_ref()));
        assert!(!may_pass(anyhow::anyhow!("its header is damaged").as_ref()));
    }
}
