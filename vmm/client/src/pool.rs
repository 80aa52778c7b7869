//! RAM from the pool: requests it, and gets parts of files that no other process has.
//!
//! Before: a VMM needs RAM. After: it maps these parts one after the other, and attaches with them. When its last
//! mapping and descriptor of them is closed, the memory returns to the pool.
//! Threads: the caller's, which waits until enough memory is zeroed, and while an engine is being replaced.
//! Promise: the memory is zero, as large as requested, and in pieces of whole huge pages.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use ballast_base::pool::{Given, Take, check};
use ballast_base::{Invalid, wire};
use ballast_sys::scm;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::ram::RamExtent;

/// Longest time without a response: the replacement of an engine may take that long.
const SILENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

/// Takes memory from the pool.
pub fn take(socket: &Path, wanted: &Take) -> Result<Vec<RamExtent>, Invalid> {
    let begun = Instant::now();
    loop {
        match ask(socket, wanted) {
            Ok(received) => return understand(wanted, received),
            // If an engine died after it took memory, that memory has no owner and returns to the pool.
            Err(_) if begun.elapsed() < SILENCE => std::thread::sleep(PAUSE),
            Err(error) => {
                let socket = socket.display();
                return Err(format!("asking for memory at {socket}: {error}; is ballastd running?").into());
            }
        }
    }
}

fn ask(path: &Path, wanted: &Take) -> io::Result<scm::Received> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    scm::send(&socket, &wire::encode(wanted), &[])?;
    scm::receive(&socket)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

fn understand(wanted: &Take, scm::Received { bytes, fds }: scm::Received) -> Result<Vec<RamExtent>, Invalid> {
    // For example from a daemon of another version.
    let wrong = |why: &dyn std::fmt::Display| Invalid::from(format!("the pool's reply: {why}"));
    let extents = match wire::decode(&bytes).map_err(|error| wrong(&error))? {
        Given::Refused(why) => return Err(format!("the pool gave no memory: {why}").into()),
        Given::Memory(extents) => extents,
    };
    check(&extents, wanted.size, wanted.pages, fds.len()).map_err(|why| wrong(&why))?;
    let piece = |extent: &ballast_base::Extent| {
        let fd: OwnedFd = fds[usize::from(extent.file)].try_clone()?;
        Ok(RamExtent { fd, offset: extent.offset, len: extent.len })
    };
    let pieces = extents.iter().map(piece).collect::<io::Result<_>>();
    pieces.map_err(|error| wrong(&format_args!("duplicating a descriptor: {error}")))
}
