//! One connection to a server.
//!
//! Before: `nodes` needs a connection. After: commands were sent together and all replies have arrived, or the
//! connection is broken. Threads: one at a time. Units: time.
//! Promise: a call returns soon after its deadline, whatever the server does. After any failure a connection is never
//! used again. So a `WAIT` always follows its write on the same connection. On a new connection, `WAIT` would report
//! success although nothing was written.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ballast_store::IoContext;

use crate::refusal::Addr;
use crate::resolve::resolve;
use crate::resp::{Commands, Malformed, REPLY_MAX, Replies, Reply, parse};
use crate::stream::{FIRST_WAIT, Stream, Tls, connect, gives_way, is_giving_way};

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

/// The time at which a call gives up. Bytes that come extend it, at 1 MB/s.
#[derive(Clone, Copy, Debug)]
pub struct Deadline<'a> {
    /// The context of the call: the call ends at its time if no bytes come.
    pub context: IoContext<'a>,
    /// The longest extension.
    pub more: Duration,
}

impl<'a> Deadline<'a> {
    /// The context after this many bytes came.
    fn after(self, bytes: usize) -> IoContext<'a> {
        let more = self.more.min(Duration::from_micros(bytes as u64));
        IoContext { until: self.context.until.map(|until| until + more), ..self.context }
    }
}

impl<'a> From<IoContext<'a>> for Deadline<'a> {
    fn from(context: IoContext<'a>) -> Self {
        Self { context, more: Duration::ZERO }
    }
}

#[derive(Debug)]
pub struct Link {
    stream: Stream,
    /// The first `len` bytes are replies that no caller has taken.
    buffer: Vec<u8>,
    len: usize,
}

/// Bytes read from the kernel at a time.
const READ_BYTES: usize = 64 << 10;
/// Reads of a call that never waits: without a bound, a server that sends as fast as it is read would hold the caller.
const READS: usize = 8;

impl Link {
    /// Connects and authenticates. Fails if the server cannot be reached, does not reply in time, has a wrong
    /// certificate, or rejects the user.
    pub fn open(addr: &Addr, access: &Access, context: IoContext<'_>) -> io::Result<Self> {
        let mut found = Err(io::Error::new(io::ErrorKind::NotFound, "its name has no address"));
        for at in resolve(addr, context)? {
            found = connect(at, context);
            if found.as_ref().err().is_none_or(is_giving_way) {
                break;
            }
        }
        let socket = found?;
        socket.set_nodelay(true)?;
        let stream = Stream::new(socket, addr, access.tls.as_ref(), context)?;
        let mut link = Self { stream, buffer: Vec::new(), len: 0 };
        let Some(file) = &access.password_file else { return Ok(link) };
        let text = std::fs::read_to_string(file)
            .map_err(|error| io::Error::new(error.kind(), format!("reading {}: {error}", file.display())))?;
        let password = text.lines().next().unwrap_or_default().as_bytes();
        let words = access.user.as_deref().map(|user| [b"AUTH", user.as_bytes(), password]);
        let login = words.map_or_else(|| Commands::one(&[b"AUTH", password]), |words| Commands::one(&words));
        match link.ask(&login, context)?.get(0).error() {
            None => Ok(link),
            Some(error) => Err(io::Error::new(io::ErrorKind::PermissionDenied, error)),
        }
    }

    /// Sends commands and reads a reply for each. Fails if the connection is broken, the deadline has passed, or the
    /// bytes received are no reply; then it is unknown which commands were executed.
    pub fn ask<'c>(&mut self, commands: &Commands, deadline: impl Into<Deadline<'c>>) -> io::Result<Replies<'_>> {
        let deadline = deadline.into();
        self.send(commands, deadline.context)?;
        self.receive(commands.count(), deadline)
    }

    /// Sends commands whose replies are received later, all at once. The replies must be short: nobody reads them yet.
    pub fn send(&mut self, commands: &Commands, context: IoContext<'_>) -> io::Result<()> {
        self.stream.send(commands.bytes(), context)
    }

    /// As [`Link::send`], but never waits: it fails if not all is taken at once. Then the connection must be closed.
    pub fn send_at_once(&mut self, commands: &Commands) -> io::Result<()> {
        self.stream.send_at_once(commands.bytes())
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.fd()
    }

    /// Receives the bytes of short replies that have come, and never waits; there may be more to read. Returns whether
    /// this many replies are complete: then [`Link::receive`] does not wait either. A failed connection must be closed.
    pub fn has_received(&mut self, count: usize) -> io::Result<bool> {
        for _ in 0..READS {
            if self.parse(count)?.0.len() == count {
                return Ok(true);
            }
            // An array is parsed from its start each time.
            if self.len >= READ_BYTES || self.len > 0 && self.buffer[0] == b'*' {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the server's reply is too long"));
            }
            self.make_room()?;
            match self.stream.receive_now(&mut self.buffer[self.len..])? {
                None => return Ok(false),
                Some(0) => return Err(hung_up()),
                Some(read) => self.len += read,
            }
        }
        Ok(self.parse(count)?.0.len() == count)
    }

    /// Reads this many replies, which must be all that are outstanding. Fails as [`Link::ask`] does.
    pub fn receive<'c>(&mut self, count: usize, deadline: impl Into<Deadline<'c>>) -> io::Result<Replies<'_>> {
        let (deadline, begun) = (deadline.into(), Instant::now());
        let (mut replies, mut at) = self.parse(count)?;
        while replies.len() < count {
            if deadline.context.is_wanted() && begun.elapsed() >= FIRST_WAIT {
                return Err(gives_way());
            }
            self.make_room()?;
            match self.stream.receive(&mut self.buffer[self.len..], deadline.after(self.len))? {
                0 => return Err(hung_up()),
                read => self.len += read,
            }
            at = self.parse_on(&mut replies, at, count)?;
        }
        let len = std::mem::take(&mut self.len);
        if at != len {
            // Otherwise these bytes would be taken for the reply to the next command.
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the server says more than it was asked"));
        }
        Ok(Replies::new(&self.buffer[..len], replies))
    }

    fn parse(&self, count: usize) -> io::Result<(Vec<Reply>, usize)> {
        let mut replies = Vec::with_capacity(count);
        let at = self.parse_on(&mut replies, 0, count)?;
        Ok((replies, at))
    }

    /// Parses from `at` on, until there are this many replies or bytes are missing.
    fn parse_on(&self, replies: &mut Vec<Reply>, mut at: usize, count: usize) -> io::Result<usize> {
        let invalid = |error: Malformed| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
        while replies.len() < count {
            let Some((reply, next)) = parse(&self.buffer[..self.len], at).map_err(invalid)? else { break };
            replies.push(reply);
            at = next;
        }
        Ok(at)
    }

    /// Makes room for the next bytes in the buffer. It does not shrink, because new space would have to be zeroed.
    fn make_room(&mut self) -> io::Result<()> {
        if self.len >= REPLY_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the server's reply does not end"));
        }
        if self.buffer.len() < self.len + READ_BYTES {
            self.buffer.resize(self.len + READ_BYTES, 0);
        }
        Ok(())
    }

    /// Returns whether the server has closed the connection or sent unrequested bytes since the last use.
    pub fn is_stale(&mut self) -> bool {
        self.stream.is_stale()
    }
}

fn hung_up() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the server hung up")
}
