//! A port for the agent in the guest: its guest's end is a virtio-serial port, its host's end a socket without a name.
//!
//! Before: QEMU is about to take this process's place. After: it has both ends of a socket, one for its port and one
//! for the preload library (`crates/preload/src/agent.rs`), whose client gives that to each engine.
//! Promise: no other process can be at the host's end, in whatever namespaces QEMU runs.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;

use ballast_guest::PORT;
use rustix::io::FdFlags;

/// Both ends of the socket.
#[derive(Debug)]
pub struct AgentPort {
    library: OwnedFd,
    qemu: OwnedFd,
}

impl AgentPort {
    /// Make a socket whose ends outlive `exec`.
    ///
    /// # Errors
    /// The kernel cannot make a socket.
    pub fn new() -> io::Result<Self> {
        let (library, qemu) = UnixStream::pair()?;
        let port = Self { library: library.into(), qemu: qemu.into() };
        for fd in [&port.library, &port.qemu] {
            rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
        }
        Ok(port)
    }

    /// Pass both ends to the program that this process becomes.
    pub fn give(&self, command: &mut Command) {
        let (library, qemu) = (self.library.as_raw_fd(), self.qemu.as_raw_fd());
        command.arg("-chardev").arg(format!("socket,id=ballast-agent,fd={qemu}"));
        command.args(["-device", "virtio-serial-pci,id=ballast-serial", "-device"]);
        command.arg(format!("virtserialport,bus=ballast-serial.0,chardev=ballast-agent,name={PORT}"));
        command.env("BALLAST_AGENT", format!("{library},{qemu}"));
    }
}
