//! One connection to a server.
//!
//! Before: `nodes` needs one. After: commands went out together, and all replies are there; or it is broken.
//! Threads: one at a time. Units: time.
//! Promise: whatever the server does, a call returns soon after its deadline. A connection on which anything failed is
//! never used again, so that a `WAIT` always follows the write it is about on the same connection: on a new one it
//! says that all is well though nothing was written.

use std::io;
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Instant;

use crate::refusal::Addr;
use crate::resolve::resolve;
use crate::resp::{Commands, REPLY_MAX, Replies, parse};
use crate::stream::{Stream, Tls, left};

/// Our user and password for the servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Name of the user; without one it is the server's default user.
    pub user: Option<String>,
    /// A file whose first line is its password. It is read for each connection, so that it may be changed.
    pub password_file: Option<PathBuf>,
    /// Connections are under TLS, with these files.
    pub tls: Option<Tls>,
}

/// A connection to one node.
#[derive(Debug)]
pub struct Link {
    stream: Stream,
    buffer: Vec<u8>,
}

/// Bytes asked of the kernel at a time.
const READ_BYTES: usize = 64 << 10;

impl Link {
    /// Connect, and say who we are.
    ///
    /// # Errors
    /// The server cannot be reached, does not answer in time, is not who it should be, or does not let us in.
    pub fn open(addr: &Addr, access: &Access, until: Instant) -> io::Result<Self> {
        let mut found = Err(io::Error::new(io::ErrorKind::NotFound, "its name has no address"));
        for at in resolve(addr, until)? {
            found = TcpStream::connect_timeout(&at, left(until)?);
            if found.is_ok() {
                break;
            }
        }
        let socket = found?;
        socket.set_nodelay(true)?;
        let stream = Stream::new(socket, addr, access.tls.as_ref(), until)?;
        let mut link = Self { stream, buffer: Vec::new() };
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
        self.stream.send(commands.bytes(), until)
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
            if self.buffer.len() < len + READ_BYTES {
                self.buffer.resize(len + READ_BYTES, 0);
            }
            match self.stream.receive(&mut self.buffer[len..], until)? {
                0 => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server hung up")),
                read => len += read,
            }
        }
        if at != len {
            // Whatever it is, it would be taken for the reply to what is asked next.
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the server says more than it was asked"));
        }
        Ok(Replies::new(&self.buffer[..len], replies))
    }

    /// Has the server hung up, or said something unasked, since it was used last?
    pub fn is_stale(&mut self) -> bool {
        self.stream.is_stale()
    }
}
