//! Sockets without a name between QEMU and the preload library in it. One is a monitor, from which the library learns
//! guest-physical addresses (`vmm/preload/src/guest.rs`); one is the port of the agent in the guest
//! (`vmm/preload/src/agent.rs`), which the library's client gives to each engine.
//!
//! Before: QEMU is about to take this process's place. After: QEMU has both ends of each, by their numbers.
//! Promise: no other process can be at either end, in whatever namespaces QEMU runs.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;

use ballast_messages::PORT;
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

    pub fn give_monitor(&self, command: &mut Command) {
        self.give(command, "ballast-monitor", "BALLAST_MONITOR");
        command.args(["-mon", "chardev=ballast-monitor,mode=control"]);
    }

    pub fn give_agent_port(&self, command: &mut Command) {
        self.give(command, "ballast-agent", "BALLAST_AGENT");
        command.args(["-device", "virtio-serial-pci,id=ballast-serial", "-device"]);
        command.arg(format!("virtserialport,bus=ballast-serial.0,chardev=ballast-agent,name={PORT}"));
    }

    fn give(&self, command: &mut Command, id: &str, variable: &str) {
        let (library, qemu) = (self.library.as_raw_fd(), self.qemu.as_raw_fd());
        command.arg("-chardev").arg(format!("socket,id={id},fd={qemu}"));
        command.env(variable, format!("{library},{qemu}"));
    }
}
