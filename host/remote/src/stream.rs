//! The byte stream of a connection, plain or under TLS.
//!
//! Before: `link` has commands to send. After: the kernel has the bytes, or the server's bytes have arrived.
//! Threads: one at a time. Units: bytes, time.
//! Promise: each call returns soon after its deadline, whatever the server does. A server that transfers a byte now and
//! then is treated like a silent one. Under TLS no command is sent before the server has shown a certificate of the
//! configured authority for the expected name.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_store::{Ends, IoContext};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use crate::refusal::Addr;

/// Files for TLS. They are read for each connection, so that they can be changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// Certificates (PEM) of the authorities that sign the servers' certificates.
    pub ca_file: PathBuf,
    /// Our own certificate and its key (PEM), if servers ask for one.
    pub own: Option<(PathBuf, PathBuf)>,
    /// Name in the servers' certificates; `None`: the host in each server's address.
    pub name: Option<String>,
}

/// Most reads of unrequested records in one call.
const UNASKED: usize = 16;

/// Every request has an earlier deadline.
const LONGEST: Duration = Duration::from_secs(10);

/// How long a thread waits for a server before it gives up a lock that other threads want ([`Ends::Wanted`]).
pub const FIRST_WAIT: Duration = Duration::from_millis(100);

/// The error of a call that ended because other threads want a lock of the caller. It says nothing about the server.
pub fn gives_way() -> io::Error {
    io::Error::other(GivesWay)
}

/// Returns whether this error is that of [`gives_way`].
pub fn is_giving_way(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|why| why.is::<GivesWay>())
}

#[derive(Debug, thiserror::Error)]
#[error("others wait for a lock that this thread has")]
struct GivesWay;

/// Decides after a wait without a result: an error, or another wait.
fn over(context: IoContext<'_>) -> io::Result<()> {
    if context.is_wanted() { Err(gives_way()) } else { left(context).map(drop) }
}

pub fn step(context: IoContext<'_>) -> io::Result<Duration> {
    let left = left(context)?;
    Ok(if matches!(context.ends, Ends::Never) { left } else { left.min(FIRST_WAIT) })
}

/// Connects, or returns an error if the server cannot be reached in time.
pub fn connect(at: SocketAddr, context: IoContext<'_>) -> io::Result<TcpStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(
        if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 },
        SocketType::STREAM,
        flags,
        None,
    )?;
    match rustix::net::connect(&socket, &at) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    loop {
        let wait = Timespec::try_from(step(context)?).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&wait)) {
            Ok(0) => over(context)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => break,
        }
    }
    rustix::net::sockopt::socket_error(&socket)??;
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

#[derive(Debug)]
pub struct Stream {
    socket: TcpStream,
    /// Current timeout of the socket. It is set again only if it must change.
    timeout: Duration,
    tls: Option<Box<ClientConnection>>,
}

fn of_file(path: &Path, error: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{}: {error}", path.display()))
}

fn invalid(error: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {error}"))
}

impl Tls {
    /// Begins the TLS session of a connection; nothing is sent yet.
    fn begin(&self, addr: &Addr) -> io::Result<ClientConnection> {
        let certificates = |path: &Path| -> io::Result<Vec<CertificateDer<'static>>> {
            let all = CertificateDer::pem_file_iter(path).map_err(|error| of_file(path, error))?;
            let all: Vec<_> = all.collect::<Result<_, _>>().map_err(|error| of_file(path, error))?;
            if all.is_empty() { Err(of_file(path, "there is no certificate in it")) } else { Ok(all) }
        };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.ca_file)? {
            roots.add(certificate).map_err(|error| of_file(&self.ca_file, error))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(invalid)?.with_root_certificates(roots);
        let config = match &self.own {
            None => config.with_no_client_auth(),
            Some((certificate, key)) => {
                let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| of_file(key, error))?;
                let own = config.with_client_auth_cert(certificates(certificate)?, secret);
                own.map_err(|error| of_file(certificate, error))?
            }
        };
        let name = self.name.as_ref().unwrap_or(&addr.host).clone();
        let name = ServerName::try_from(name).map_err(invalid)?;
        ClientConnection::new(Arc::new(config), name).map_err(invalid)
    }
}

impl Stream {
    /// Returns a stream over this connection. With TLS, the server has shown a valid certificate.
    pub fn new(socket: TcpStream, addr: &Addr, tls: Option<&Tls>, context: IoContext<'_>) -> io::Result<Self> {
        let tls = tls.map(|tls| tls.begin(addr)).transpose()?.map(Box::new);
        let mut stream = Self { socket, timeout: Duration::ZERO, tls };
        while stream.tls.as_ref().is_some_and(|tls| tls.is_handshaking()) {
            stream.flush(context)?;
            let waits = stream.tls.as_ref().is_some_and(|tls| tls.wants_read() && tls.is_handshaking());
            if waits && stream.take(context)? == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the server closed the connection; it may expect TLS",
                ));
            }
        }
        stream.flush(context)?;
        Ok(stream)
    }

    /// Sends all bytes. Fails if the connection is broken, or the deadline has passed.
    pub fn send(&mut self, mut bytes: &[u8], context: IoContext<'_>) -> io::Result<()> {
        while !bytes.is_empty() {
            let Some(tls) = &mut self.tls else {
                bytes = &bytes[self.write(context, |mut socket| socket.write(bytes))?..];
                continue;
            };
            // TLS takes only as much as its buffer holds.
            let taken = tls.writer().write(bytes)?;
            bytes = &bytes[taken..];
            self.flush(context)?;
        }
        Ok(())
    }

    /// Sends all bytes, and never waits: it fails if not all are taken at once. Then the connection must be closed.
    pub fn send_at_once(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(tls) = &mut self.tls else {
            let sent = rustix::net::send(&self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
            return if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) };
        };
        self.socket.set_nonblocking(true)?;
        tls.writer().write_all(bytes)?;
        while tls.wants_write() {
            tls.write_tls(&mut &self.socket)?;
        }
        self.socket.set_nonblocking(false)
    }

    /// Receives some bytes of the server, or 0 if it has closed the connection. Fails as [`Stream::send`] does.
    pub fn receive(&mut self, buffer: &mut [u8], context: IoContext<'_>) -> io::Result<usize> {
        if self.tls.is_none() {
            return self.within(context, |mut socket| socket.read(buffer));
        }
        loop {
            match self.tls.as_mut().map_or(Ok(0), |tls| tls.reader().read(buffer)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
            if self.take(context)? == 0 {
                return Ok(0);
            }
            // TLS may have to send a key update.
            self.flush(context)?;
        }
    }

    /// As [`Stream::receive`], but never waits. Returns `None` if nothing has come.
    pub fn receive_now(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let read = match &mut self.tls {
            None => {
                rustix::net::recv(&self.socket, buffer, RecvFlags::DONTWAIT).map(|(read, _)| read).map_err(Into::into)
            }
            Some(tls) => {
                self.socket.set_nonblocking(true)?;
                let read = read_now(tls, &mut self.socket, buffer);
                self.socket.set_nonblocking(false)?;
                read
            }
        };
        match read {
            Ok(read) => Ok(Some(read)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the descriptor that has input when the server has sent something.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns whether the server has closed the connection, or sent something unrequested.
    pub fn is_stale(&mut self) -> bool {
        if self.socket.set_nonblocking(true).is_err() {
            return true;
        }
        let mut byte = [0];
        let quiet = match &mut self.tls {
            None => self.socket.peek(&mut byte),
            Some(tls) => read_unasked(tls, &mut self.socket),
        };
        let quiet = quiet.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        !quiet || self.socket.set_nonblocking(false).is_err()
    }

    fn flush(&mut self, context: IoContext<'_>) -> io::Result<()> {
        while let Some(mut tls) = self.tls.take_if(|tls| tls.wants_write()) {
            let wrote = self.write(context, |mut socket| tls.write_tls(&mut socket));
            self.tls = Some(tls);
            wrote?;
        }
        Ok(())
    }

    /// Reads bytes of the server once and passes them to TLS.
    fn take(&mut self, context: IoContext<'_>) -> io::Result<usize> {
        let Some(mut tls) = self.tls.take() else { return Ok(0) };
        let read = self.within(context, |mut socket| tls.read_tls(&mut socket));
        let processed = tls.process_new_packets();
        self.tls = Some(tls);
        let read = read?;
        if let Err(error) = processed {
            // This sends the TLS alert with the reason to the server, if it still reads.
            let _ = self.flush(context);
            let _ = self.socket.shutdown(Shutdown::Both);
            return Err(invalid(error));
        }
        Ok(read)
    }

    fn write(
        &mut self,
        context: IoContext<'_>,
        write: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        match self.within(context, write)? {
            0 => Err(io::ErrorKind::WriteZero.into()),
            wrote => Ok(wrote),
        }
    }

    /// Makes one system call that waits until the deadline at most.
    fn within(
        &mut self,
        context: IoContext<'_>,
        mut call: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            self.set_timeout(step(context)?)?;
            match call(&self.socket) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => over(context)?,
                done => return done,
            }
        }
    }

    /// Sets the socket's timeout to the time left, or up to a quarter more, so that most calls need not change it.
    fn set_timeout(&mut self, left: Duration) -> io::Result<()> {
        if self.timeout < left || self.timeout > left + left / 4 {
            let timeout = (left + left / 8).max(Duration::from_millis(1));
            self.socket.set_read_timeout(Some(timeout))?;
            self.socket.set_write_timeout(Some(timeout))?;
            self.timeout = timeout;
        }
        Ok(())
    }
}

/// Reads records that the server sent unrequested. Returns the error `WouldBlock` if none of them has data. Records
/// without data are about sessions and keys. A server that sends them without end counts as one that sent data.
fn read_unasked(tls: &mut ClientConnection, socket: &mut TcpStream) -> io::Result<usize> {
    for _ in 0..UNASKED {
        match tls.read_tls(socket)? {
            0 => return Ok(0),
            _ => match tls.process_new_packets() {
                Ok(state) if state.plaintext_bytes_to_read() == 0 && !tls.wants_write() => {}
                _ => return Ok(1),
            },
        }
    }
    Ok(1)
}

/// Reads the bytes of records that have come. Returns the error `WouldBlock` if none of them is complete.
fn read_now(tls: &mut ClientConnection, socket: &mut TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    for _ in 0..UNASKED {
        match tls.reader().read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            read => return read,
        }
        if tls.read_tls(socket)? == 0 {
            return Ok(0);
        }
        tls.process_new_packets().map_err(invalid)?;
    }
    Err(invalid("the server sends records without end"))
}

/// Returns the time left until the deadline; [`LONGEST`] without one.
pub fn left(context: IoContext<'_>) -> io::Result<Duration> {
    let left = context.until.map_or(LONGEST, |until| until.saturating_duration_since(Instant::now()));
    if left.is_zero() { Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time")) } else { Ok(left) }
}
