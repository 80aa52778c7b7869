//! A port for the agent in the guest: its guest's end is a virtio-serial port, its host's end a socket without a name.
//!
//! Before: QEMU is about to take this process's place. After: it has both ends of a socket, one for its port and one
//! for the preload library (`vmm/preload/src/agent.rs`), whose client gives that to each engine.
//! Promise: no other process can be at the host's end, in whatever namespaces QEMU runs.

use std::io;
use std::process::Command;

use ballast_messages::PORT;

use super::ends::Ends;

/// Both ends of the socket.
#[derive(Debug)]
pub struct AgentPort(Ends);

impl AgentPort {
    /// Make a socket whose ends outlive `exec`.
    ///
    /// # Errors
    /// The kernel cannot make a socket.
    pub fn new() -> io::Result<Self> {
        Ends::new().map(Self)
    }

    /// Pass both ends to the program that this process becomes.
    pub fn give(&self, command: &mut Command) {
        let (library, qemu) = self.0.numbers();
        command.arg("-chardev").arg(format!("socket,id=ballast-agent,fd={qemu}"));
        command.args(["-device", "virtio-serial-pci,id=ballast-serial", "-device"]);
        command.arg(format!("virtserialport,bus=ballast-serial.0,chardev=ballast-agent,name={PORT}"));
        command.env("BALLAST_AGENT", format!("{library},{qemu}"));
    }
}
