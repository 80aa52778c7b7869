//! A monitor of QEMU for the preload library, which asks it for guest-physical addresses.
//!
//! Before: QEMU is about to take this process's place. After: it has both ends of a socket, one for its monitor and one
//! for the library (`crates/preload/src/guest.rs`).
//! Promise: no other process can reach this monitor; it has no path and no port.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;

use rustix::io::FdFlags;

/// Both ends of the socket.
#[derive(Debug)]
pub struct Monitor {
    library: OwnedFd,
    qemu: OwnedFd,
}

impl Monitor {
    /// Make a socket whose ends outlive `exec`.
    ///
    /// # Errors
    /// The kernel cannot make a socket.
    pub fn new() -> io::Result<Self> {
        let (library, qemu) = UnixStream::pair()?;
        let monitor = Self { library: library.into(), qemu: qemu.into() };
        for fd in [&monitor.library, &monitor.qemu] {
            rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
        }
        Ok(monitor)
    }

    /// Pass both ends to the program that this process becomes.
    pub fn give(&self, command: &mut Command) {
        let (library, qemu) = (self.library.as_raw_fd(), self.qemu.as_raw_fd());
        command.arg("-chardev").arg(format!("socket,id=ballast-monitor,fd={qemu}"));
        command.args(["-mon", "chardev=ballast-monitor,mode=control"]);
        command.env("BALLAST_MONITOR", format!("{library},{qemu}"));
    }
}
