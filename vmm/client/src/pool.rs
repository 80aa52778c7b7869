//! RAM from the pool: requests it, and gets parts of files that no other process has.
//!
//! Before: a VMM is about to have RAM. After: it maps these parts one after the other, and attaches with them. When its
//! last mapping and descriptor of them is gone, the memory returns to the pool.
//! Threads: the caller's, which waits: until enough is zeroed if need be, and while an engine is being replaced.
//! Promise: the returned memory is zero, as large as requested, and in pieces of whole huge pages or as much.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use ballast_base::pool::{Given, Take, check};
use ballast_base::wire;
use ballast_sys::scm;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::ram::RamExtent;

/// Longest time without a response: an engine may take as long to replace another one.
const SILENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

/// Why a VM gets no memory of the pool.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// There was no response. The setting causes it.
    #[error("asking for memory at {socket}: {source}; is ballastd running?")]
    Silent {
        /// The socket.
        socket: String,
        /// The kernel's last error.
        source: io::Error,
    },
    /// The pool has too little, or the request is impossible.
    #[error("the pool gave no memory: {0}")]
    Refused(String),
    /// The reply is invalid. A daemon of another version causes it.
    #[error("the pool's reply: {0}")]
    Answer(String),
}

/// Take memory.
///
/// # Errors
/// The pool refuses, or does not respond.
pub fn take(socket: &Path, wanted: &Take) -> Result<Vec<RamExtent>, PoolError> {
    let begun = Instant::now();
    loop {
        match ask(socket, wanted) {
            Ok(received) => return understand(wanted, received),
            // Memory from an engine that then died has no owner, and returns to the pool.
            Err(_) if begun.elapsed() < SILENCE => std::thread::sleep(PAUSE),
            Err(source) => return Err(PoolError::Silent { socket: socket.display().to_string(), source }),
        }
    }
}

fn ask(path: &Path, wanted: &Take) -> io::Result<scm::Received> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    scm::send(&socket, &wire::encode(wanted), &[])?;
    scm::receive(&socket)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

fn understand(wanted: &Take, scm::Received { bytes, fds }: scm::Received) -> Result<Vec<RamExtent>, PoolError> {
    let extents = match wire::decode(&bytes).map_err(|error| PoolError::Answer(error.to_string()))? {
        Given::Refused(why) => return Err(PoolError::Refused(why)),
        Given::Memory(extents) => extents,
    };
    check(&extents, wanted.size, wanted.pages, fds.len()).map_err(PoolError::Answer)?;
    let piece = |extent: &ballast_base::Extent| {
        let fd: OwnedFd = fds[usize::from(extent.file)].try_clone()?;
        Ok(RamExtent { fd, offset: extent.offset, len: extent.len })
    };
    let pieces = extents.iter().map(piece).collect::<io::Result<_>>();
    pieces.map_err(|error| PoolError::Answer(format!("duplicating a descriptor: {error}")))
}
