//! A monitor of QEMU for the preload library, which asks it for guest-physical addresses.
//!
//! Before: QEMU is about to take this process's place. After: it has both ends of a socket, one for its monitor and one
//! for the library (`vmm/preload/src/guest.rs`).
//! Promise: no other process can reach this monitor; it has no path and no port.

use std::io;
use std::process::Command;

use super::ends::Ends;

/// Both ends of the socket.
#[derive(Debug)]
pub struct Monitor(Ends);

impl Monitor {
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
        command.arg("-chardev").arg(format!("socket,id=ballast-monitor,fd={qemu}"));
        command.args(["-mon", "chardev=ballast-monitor,mode=control"]);
        command.env("BALLAST_MONITOR", format!("{library},{qemu}"));
    }
}
