//! A socket between QEMU and the preload library in it, without a name: one end for each.
//!
//! Before: QEMU is about to take this process's place. After: it has both ends, by their numbers.
//! Promise: no other process can be at either end.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use rustix::io::FdFlags;

/// Both ends of a socket; they outlive `exec`.
#[derive(Debug)]
pub struct Ends {
    library: OwnedFd,
    qemu: OwnedFd,
}

impl Ends {
    pub fn new() -> io::Result<Self> {
        let (library, qemu) = UnixStream::pair()?;
        let ends = Self { library: library.into(), qemu: qemu.into() };
        for fd in [&ends.library, &ends.qemu] {
            rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
        }
        Ok(ends)
    }

    /// The numbers of the library's end and of QEMU's.
    pub fn numbers(&self) -> (RawFd, RawFd) {
        (self.library.as_raw_fd(), self.qemu.as_raw_fd())
    }
}
