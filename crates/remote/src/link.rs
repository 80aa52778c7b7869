//! One connection to a server.
//!
//! Before: `nodes` needs one. After: commands went out together, and all replies are there; or it is broken.
//! Threads: one at a time. Units: time.
//! Promise: whatever the server does, a call returns soon after its deadline. A connection on which anything failed is
//! never used again, so that a `WAIT` always follows the write it is about on the same connection: on a new one it
//! says that all is well though nothing was written.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::refusal::Addr;
use crate::resp::{Commands, REPLY_MAX, Replies, parse};

/// Our user and password for the servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Name of the user; without one it is the server's default user.
    pub user: Option<String>,
    /// A file whose first line is its password. It is read for each connection, so that it may be changed.
    pub password_file: Option<PathBuf>,
}

/// A connection to one node.
#[derive(Debug)]
pub struct Link {
    stream: TcpStream,
    /// What the socket has as its timeout: it is set anew only if another is wanted.
    timeout: Duration,
    buffer: Vec<u8>,
}

/// Bytes asked of the kernel at a time.
const READ_BYTES: usize = 64 << 10;

impl Link {
    /// Connect, and say who we are.
    ///
    /// # Errors
    /// The server cannot be reached, does not answer in time, or does not let us in.
    pub fn open(addr: &Addr, access: &Access, until: Instant) -> io::Result<Self> {
        let mut found = Err(io::Error::new(io::ErrorKind::NotFound, "its name has no address"));
        for at in (addr.host.as_str(), addr.port).to_socket_addrs()? {
            found = TcpStream::connect_timeout(&at, left(until)?);
            if found.is_ok() {
                break;
            }
        }
        let stream = found?;
        stream.set_nodelay(true)?;
        let mut link = Self { stream, timeout: Duration::ZERO, buffer: Vec::new() };
        let Some(file) = &access.password_file else { return Ok(link) };
        let text = std::fs::read_to_string(file)
            .map_err(|error| io::Error::new(error.kind(), format!("reading {}: {error}", file.display())))?;
        let password = text.lines().next().unwrap_or_default().as_bytes();
        let words = access.user.as_deref().map(|user| [b"AUTH", user.as_bytes(), password]);
        let login = words.map_or_else(|| Commands::one(&[b"AUTH", password]), |words| Commands::one(&words));
        match link.ask(&login, until)?.get(0).error() {
            None => Ok(link),
            Some(error) => Err(io::Error::new(io::ErrorKind::PermissionDenied, error)),
        }
    }

    /// Send commands and read a reply for each. After an error nobody knows which of them were carried out.
    ///
    /// # Errors
    /// The connection is broken, the deadline has passed, or what came is no reply.
    pub fn ask(&mut self, commands: &Commands, until: Instant) -> io::Result<Replies<'_>> {
        self.send(commands, until)?;
        self.receive(commands.count(), until)
    }

    /// Send commands whose replies are received later, all at once. They must be short: nobody reads them meanwhile.
    ///
    /// # Errors
    /// The connection is broken, or the deadline has passed.
    pub fn send(&mut self, commands: &Commands, until: Instant) -> io::Result<()> {
        self.set_timeout(left(until)?)?;
        self.stream.write_all(commands.bytes())
    }

    /// Read the replies to all that was sent, this many.
    ///
    /// # Errors
    /// As of [`Link::ask`].
    pub fn receive(&mut self, count: usize, until: Instant) -> io::Result<Replies<'_>> {
        self.buffer.clear();
        let (mut replies, mut at, mut len) = (Vec::with_capacity(count), 0, 0);
        loop {
            while replies.len() < count {
                match parse(&self.buffer[..len], at) {
                    Ok(Some((reply, next))) => {
                        replies.push(reply);
                        at = next;
                    }
                    Ok(None) => break,
                    Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error.to_string())),
                }
            }
            if replies.len() == count {
                break;
            }
            if len >= REPLY_MAX {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the server's reply does not end"));
            }
            self.set_timeout(left(until)?)?;
            if self.buffer.len() < len + READ_BYTES {
                self.buffer.resize(len + READ_BYTES, 0);
            }
            match self.stream.read(&mut self.buffer[len..]) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server hung up")),
                Ok(read) => len += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if at != len {
            // Whatever it is, it would be taken for the reply to what is asked next.
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the server says more than it was asked"));
        }
        Ok(Replies::new(&self.buffer[..len], replies))
    }

    /// Has the server hung up, or said something unasked, since it was used last?
    pub fn is_stale(&self) -> bool {
        let mut byte = [0];
        let waits = self.stream.set_nonblocking(true).and_then(|()| self.stream.peek(&mut byte));
        let quiet = waits.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        !quiet || self.stream.set_nonblocking(false).is_err()
    }

    /// The socket's timeout is what is left, or up to a quarter more, so that most calls need not set it.
    fn set_timeout(&mut self, left: Duration) -> io::Result<()> {
        if self.timeout < left || self.timeout > left + left / 4 {
            let timeout = (left + left / 8).max(Duration::from_millis(1));
            self.stream.set_read_timeout(Some(timeout))?;
            self.stream.set_write_timeout(Some(timeout))?;
            self.timeout = timeout;
        }
        Ok(())
    }
}

/// How long there is until then.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time")) } else { Ok(left) }
}
