//! `/dev/userfaultfd` from the keeper, for a VMM of another user, or in a container or mount namespace without it.
//!
//! Before: this process could not create a userfaultfd. After: it has the keeper's open device. The kernel checks
//! permission when the device is opened; the address space is that of the process that creates the userfaultfd.
//! Threads: the caller's.
//! Promise: waits for the keeper for at most the time of a handshake.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use ballast_base::wire::{self, ClientToKeeper, KeeperToClient};
use ballast_sys::scm;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::error::AttachError;

/// Asks the keeper at this socket for the device. `Ok(None)`: the keeper has none, and its log says why.
pub(crate) fn of_keeper(path: &Path, at_most: Duration) -> Result<Option<OwnedFd>, AttachError> {
    let open = || -> std::io::Result<OwnedFd> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        set_socket_timeout(&socket, Timeout::Send, Some(at_most))?;
        set_socket_timeout(&socket, Timeout::Recv, Some(at_most))?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        scm::send(socket.as_fd(), &wire::encode(&ClientToKeeper::Device), &[])?;
        Ok(socket)
    };
    let failed = |source| AttachError::Connect { path: path.to_owned(), source };
    let socket = open().map_err(failed)?;
    let Some(mut received) = scm::receive(&socket).map_err(failed)? else {
        return Err(AttachError::NoAnswer("hung up"));
    };
    match wire::decode::<KeeperToClient>(&received.bytes)? {
        KeeperToClient::Device => Ok(received.fds.pop()),
        _ => Ok(None),
    }
}
