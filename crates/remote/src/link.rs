//! One connection to a server.
//!
//! Before: `nodes` needs a connection. After: commands were sent together and all replies have arrived, or the
//! connection is broken. Threads: one at a time. Units: time.
//! Promise: a call returns soon after its deadline, whatever the server does. After any failure a connection is never
//! used again. So a `WAIT` always follows its write on the same connection. On a new connection, `WAIT` would report
//! success although nothing was written.

use std::io;
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Instant;

use crate::refusal::Addr;
use crate::resolve::resolve;
use crate::resp::{Commands, REPLY_MAX, Replies, parse};
use crate::stream::{Stream, Tls, left};

/// User, password and TLS files for the servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Name of the user; `None` is the server's default user.
    pub user: Option<String>,
    /// File with the password in its first line. It is read for each connection, so that the password can be changed.
    pub password_file: Option<PathBuf>,
    /// Files for TLS; `None`: connections are not encrypted.
    pub tls: Option<Tls>,
}

/// A connection to one node.
#[derive(Debug)]
pub struct Link {
    stream: Stream,
    buffer: Vec<u8>,
}

/// Bytes read from the kernel at a time.
const READ_BYTES: usize = 64 << 10;

impl Link {
    /// Connects and authenticates.
    ///
    /// # Errors
    /// The server cannot be reached, does not reply in time, has a wrong certificate, or rejects the user.
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

    /// Sends commands and reads a reply for each. After an error it is unknown which commands were executed.
    ///
    /// # Errors
    /// The connection is broken, the deadline has passed, or the bytes received are no reply.
    pub fn ask(&mut self, commands: &Commands, until: Instant) -> io::Result<Replies<'_>> {
        self.send(commands, until)?;
        self.receive(commands.count(), until)
    }

    /// Sends commands whose replies are received later, all at once. The replies must be short, because no thread reads
    /// them meanwhile.
    ///
    /// # Errors
    /// The connection is broken, or the deadline has passed.
    pub fn send(&mut self, commands: &Commands, until: Instant) -> io::Result<()> {
        self.stream.send(commands.bytes(), until)
    }

    /// The same, but never waits.
    ///
    /// # Errors
    /// The connection is broken, or does not take all of it at once. It must not be used again.
    pub fn send_at_once(&mut self, commands: &Commands) -> io::Result<()> {
        self.stream.send_at_once(commands.bytes())
    }

    /// Reads this many replies, which must be all that are outstanding.
    ///
    /// # Errors
    /// The same as of [`Link::ask`].
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
            // Otherwise these bytes would be taken for the reply to the next command.
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the server says more than it was asked"));
        }
        Ok(Replies::new(&self.buffer[..len], replies))
    }

    /// Returns whether the server has closed the connection or sent unrequested bytes since the last use.
    pub fn is_stale(&mut self) -> bool {
        self.stream.is_stale()
    }
}
