//! VMs that could not be opened, and which failures may pass.
//!
//! Before: an order about a VM failed. After: the reason is known to those that ask about the VM; if it may pass, the
//! keeper gives this engine the VM again (`Report::Lost`).
//! Threads: the VMs' workers. Promise: a lack of descriptors, memory or threads is never final.

use std::io;

use rustix::io::Errno;

/// Why a VM could not be opened.
pub(super) struct Unopened {
    pub text: String,
    /// Another try may succeed.
    pub may_pass: bool,
}

/// Did it fail because this process, or the host, has too little of something that it may have later: descriptors,
/// memory, threads?
pub(super) fn may_pass(error: &(dyn std::error::Error + 'static)) -> bool {
    const SHORT: [Errno; 6] = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::AGAIN, Errno::NOSPC, Errno::NOBUFS];
    let errno = |cause: &(dyn std::error::Error + 'static)| {
        let own = cause.downcast_ref::<Errno>().copied();
        own.or_else(|| Errno::from_io_error(cause.downcast_ref::<io::Error>()?))
    };
    std::iter::successors(Some(error), |cause| cause.source()).filter_map(errno).any(|errno| SHORT.contains(&errno))
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn a_lack_of_memory_may_pass_at_any_depth_and_damage_does_not() {
        let of = |errno: Errno| Err::<(), _>(io::Error::from(errno)).context("Mapping").context("Opening the arena");
        assert!(may_pass(of(Errno::NOMEM).expect_err("an error").as_ref()));
        assert!(may_pass(anyhow::Error::new(Errno::MFILE).as_ref()));
        assert!(!may_pass(of(Errno::BADF).expect_err("an error").as_ref()));
        assert!(!may_pass(anyhow::anyhow!("its header is damaged").as_ref()));
    }
}
