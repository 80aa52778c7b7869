//! Descriptors that are closed on a thread of their own, because that may take long.
//!
//! Before: this process has a descriptor that may be the last one of a large RAM file (its close takes seconds), of a
//! userfaultfd (it waits for the memory map of a VMM, which may hang) or of a file on a disk that hangs. After: it is
//! closed, or a separate thread waits for its close.
//! Threads: one for each close. Promise: dropping a [`SlowFd`] does not wait, as long as the host has a thread left.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A descriptor whose close may take long.
#[derive(Debug)]
pub struct SlowFd(Option<OwnedFd>);

impl From<OwnedFd> for SlowFd {
    fn from(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }
}

impl AsFd for SlowFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("there until dropped").as_fd()
    }
}

impl Drop for SlowFd {
    fn drop(&mut self) {
        let fd = self.0.take();
        // If no thread can be started, this closes it here.
        let _ = std::thread::Builder::new().name("close".into()).spawn(move || drop(fd));
    }
}
