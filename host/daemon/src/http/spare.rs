//! Spare descriptors: when the engine has no others left, operators still reach the API.
//!
//! Before: a connection could not be accepted. After: two spare ones are free, for it and for what it asks; there is a
//! line about it now and then. They are kept again once a connection was accepted without them. Threads: the API's one.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Descriptors that are kept.
const SPARE: usize = 16;
/// Descriptors for one connection.
const FOR_ONE: usize = 2;
/// Time between two lines.
const SAID_EVERY: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Spare {
    fds: Vec<OwnedFd>,
    said: Option<Instant>,
    /// The next connection is accepted with descriptors that were given.
    has_given: bool,
}

impl Spare {
    /// A connection was accepted from this listener.
    pub(super) fn accepted(&mut self, listener: impl AsFd) {
        if !std::mem::take(&mut self.has_given) {
            self.fill(listener);
        }
    }

    /// Keep as many as there may be. `any` is a descriptor to duplicate.
    pub(super) fn fill(&mut self, any: impl AsFd) {
        while self.fds.len() < SPARE
            && let Ok(fd) = any.as_fd().try_clone_to_owned()
        {
            self.fds.push(fd);
        }
    }

    /// A connection could not be accepted. Returns whether that may be tried again at once.
    pub(super) fn give(&mut self, error: &std::io::Error) -> bool {
        use rustix::io::Errno;
        if self.said.is_none_or(|at| at.elapsed() >= SAID_EVERY) {
            self.said = Some(Instant::now());
            tracing::warn!(%error, spare = self.fds.len(), "accepting an API connection");
        }
        let is_short =
            [Errno::MFILE, Errno::NFILE].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()));
        if !is_short || self.fds.is_empty() {
            return false;
        }
        self.fds.truncate(self.fds.len().saturating_sub(FOR_ONE));
        self.has_given = true;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spare_descriptors_are_given_two_at_a_time_and_only_for_want_of_descriptors() {
        let mut spare = Spare::default();
        spare.fill(std::io::stdin());
        assert_eq!(spare.fds.len(), SPARE);
        assert!(!spare.give(&std::io::ErrorKind::ConnectionAborted.into()));
        let short = std::io::Error::from(rustix::io::Errno::MFILE);
        for left in (0..SPARE / FOR_ONE).rev() {
            assert!(spare.give(&short));
            assert_eq!(spare.fds.len(), left * FOR_ONE);
        }
        assert!(!spare.give(&short));
    }

    #[test]
    fn what_was_given_for_a_connection_is_kept_again_only_after_the_next_one() {
        let mut spare = Spare::default();
        spare.fill(std::io::stdin());
        let short = std::io::Error::from(rustix::io::Errno::MFILE);
        for connections in 1..3 {
            assert!(spare.give(&short));
            spare.accepted(std::io::stdin());
            assert_eq!(spare.fds.len(), SPARE - connections * FOR_ONE, "it has them for what it asks");
        }
        spare.accepted(std::io::stdin());
        assert_eq!(spare.fds.len(), SPARE);
    }
}
