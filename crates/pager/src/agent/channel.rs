//! The socket to an agent: the other end of its VMM's virtio-serial port.
//!
//! Before: a VMM listens on the socket of its process id. After: bytes from and to the guest, as far as either side
//! takes them.
//! Threads: the listener notes that there is input; all else is the task of the VM's. Promise: nothing here waits; what
//! the guest does not take is dropped beyond a bound; nobody but the VMM's own process is talked to.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex};

use ballast_guest::socket_name;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::told::Told;
use crate::run::listener::{Listener, Rearm, Source, Watched};

/// What may wait until the guest takes it: some messages of the longest.
const BEHIND: usize = 256 << 10;

/// What the listener has.
struct Socket {
    fd: OwnedFd,
    told: Arc<Told>,
    /// There is input, and it is not listened to until this is dropped.
    input: Mutex<Option<Rearm>>,
}

impl Source for Socket {
    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn ready(&self, then: Rearm) {
        *self.input.lock().expect("no panic while held") = Some(then);
        self.told.notifier.notify();
    }
}

/// What reading came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// This number of bytes.
    Bytes(usize),
    /// Nothing is there; who has input later is notified.
    Nothing,
    /// The VMM has closed it.
    Gone,
}

/// A connection to the port of an agent.
pub(crate) struct Channel {
    socket: Arc<Socket>,
    _watched: Watched,
    out: Vec<u8>,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").field("behind", &self.out.len()).finish_non_exhaustive()
    }
}

impl Channel {
    /// To the port of this VMM; `None` if it shows none, or has no time.
    ///
    /// # Errors
    /// Somebody else listens there, or the kernel gives no descriptor.
    pub fn connect(pid: u32, told: &Arc<Told>) -> io::Result<Option<Self>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let address = SocketAddrUnix::new_abstract_name(socket_name(pid).as_bytes())?;
        match rustix::net::connect(&fd, &address) {
            Ok(()) => {}
            // Nobody listens, or the line of those who wait is full.
            Err(Errno::CONNREFUSED | Errno::AGAIN | Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        // A name in the abstract name space is anybody's: what counts is who listens.
        let peer = rustix::net::sockopt::socket_peercred(&fd)?;
        let owner = std::fs::metadata(format!("/proc/{pid}"))?.uid();
        let (its, peers) = (peer.pid.as_raw_pid() as u32, peer.uid.as_raw());
        if its != pid || peers != owner {
            let text = format!("process {its} of user {peers} listens on the socket of the agent of process {pid}");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        let socket = Arc::new(Socket { fd, told: told.clone(), input: Mutex::default() });
        let watched = Listener::of_process()?.watch(socket.clone())?;
        Ok(Some(Self { socket, _watched: watched, out: Vec::new() }))
    }

    /// What the guest says.
    ///
    /// # Errors
    /// The socket is broken.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<Read> {
        loop {
            return match rustix::net::recv(&self.socket.fd, &mut *buffer, RecvFlags::empty()) {
                Ok((0, _)) => Ok(Read::Gone),
                Ok((count, _)) => Ok(Read::Bytes(count.min(buffer.len()))),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {
                    // Listened to again. What has come meanwhile is told at once.
                    drop(self.socket.input.lock().expect("no panic while held").take());
                    Ok(Read::Nothing)
                }
                Err(error) => Err(error.into()),
            };
        }
    }

    /// Say this, unless the guest is far behind. Returns whether it is said, as soon as the guest takes it.
    pub fn send(&mut self, bytes: &[u8]) -> bool {
        let fits = self.out.len() + bytes.len() <= BEHIND;
        if fits {
            self.out.extend_from_slice(bytes);
        }
        fits
    }

    /// Give the guest what it takes now.
    ///
    /// # Errors
    /// The VMM has closed the socket.
    pub fn flush(&mut self) -> io::Result<()> {
        let mut sent = 0;
        while sent < self.out.len() {
            match rustix::net::send(&self.socket.fd, &self.out[sent..], SendFlags::NOSIGNAL) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(error.into()),
            }
        }
        self.out.drain(..sent);
        Ok(())
    }
}
