//! Reports a VM that runs unmanaged to the keeper, so that operators know.
//!
//! Before: attaching failed, or guest RAM is private, and the operator allowed that. After: the keeper has an event.
//! Threads: the caller's.
//! Promise: it does not wait; there is no reply.

use std::io;
use std::os::fd::OwnedFd;

use ballast_base::Bytes;
use ballast_base::wire::{self, ClientToKeeper};
use ballast_sys::scm;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::builder::{DEFAULT_SOCKET, SOCKET_VARIABLE, own_name};
use crate::shared::cut;
use crate::visit;

/// Tells the keeper that the VM of this name runs unmanaged, and why.
pub fn report_unmanaged(name: Option<&str>, why: &str) -> io::Result<()> {
    let _quiet = visit::enter();
    let name = name.map_or_else(own_name, wire::shown_name);
    let path = std::env::var_os(SOCKET_VARIABLE).unwrap_or_else(|| DEFAULT_SOCKET.into());
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(&path)?)?;
    let why = cut(why.chars().filter(|c| !c.is_control()).collect());
    let message = ClientToKeeper::Unmanaged { name, len: Bytes(0), why };
    scm::send(&socket, &wire::encode(&message), &[])
}
