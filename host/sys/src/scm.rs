//! Datagrams with file descriptors over Unix sockets (SCM_RIGHTS).
//!
//! Before: two processes share a `SOCK_SEQPACKET` socket. After: one call sends or receives a whole message with its
//! descriptors.
//! Threads: any. Units: bytes. Promise: a message arrives whole or not at all, also if the peer dies.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
};

/// Most descriptors that one message may carry.
pub const MAX_FDS: usize = 64;
/// The kernel's own limit (`SCM_MAX_FD`). The buffer has space for all of them, because the kernel closes those that do
/// not fit, and a close may block.
const KERNEL_MAX_FDS: usize = 253;
/// Most bytes that one message may carry.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// A received message.
#[derive(Debug)]
pub struct Received {
    /// The message.
    pub bytes: Vec<u8>,
    /// Its descriptors, close-on-exec.
    pub fds: Vec<OwnedFd>,
}

impl Received {
    /// The peer has closed.
    fn is_end(&self) -> bool {
        self.bytes.is_empty() && self.fds.is_empty()
    }
}

/// A connected pair of sequenced-packet sockets.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Send one message with descriptors. Blocks while the peer's queue is full, unless the socket is non-blocking.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_with(socket, bytes, fds, SendFlags::NOSIGNAL)
}

/// Send one message without descriptors, or fail with `WouldBlock` at once if the peer's queue is full.
pub fn try_send(socket: impl AsFd, bytes: &[u8]) -> io::Result<()> {
    send_with(socket, bytes, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

fn send_with(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
    if bytes.len() > MAX_MESSAGE || fds.len() > MAX_FDS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("message of {} bytes and {} descriptors is over the limit", bytes.len(), fds.len()),
        ));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("descriptors do not fit the control buffer"));
    }
    loop {
        match rustix::net::sendmsg(&socket, &[io::IoSlice::new(bytes)], &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Receive one message. `Ok(None)` means the peer has closed.
///
/// # Errors
/// A message longer than [`MAX_MESSAGE`] or with more descriptors than [`MAX_FDS`] is an error and is dropped whole.
pub fn receive(socket: impl AsFd) -> io::Result<Option<Received>> {
    receive_or(socket, drop)
}

/// The same as [`receive_bytes`], but it fails with `WouldBlock` at once if there is no message.
///
/// # Errors
/// As for [`receive_bytes`].
pub fn try_receive_bytes(socket: impl AsFd) -> io::Result<Option<Vec<u8>>> {
    plain(&socket, RecvFlags::DONTWAIT)?;
    bytes_of(socket, RecvFlags::DONTWAIT)
}

/// Read bytes of a stream whose peer sends no descriptors, on a thread that must not wait for the close of any; fails
/// with `WouldBlock` at once if there are none. `Ok(0)` means the peer has closed.
///
/// # Errors
/// The next bytes bring descriptors: they stay in the socket, and are closed with it.
pub fn try_read_plain(socket: impl AsFd, out: &mut [u8]) -> io::Result<usize> {
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let peeked = loop {
        let mut slices = [io::IoSliceMut::new(out)];
        match rustix::net::recvmsg(&socket, &mut slices, &mut RecvAncillaryBuffer::default(), flags) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    refuse_any(peeked.flags)?;
    // No more than that: what has come since may bring descriptors.
    let len = peeked.bytes;
    loop {
        match rustix::net::recv(&socket, &mut out[..len], RecvFlags::DONTWAIT) {
            Err(rustix::io::Errno::INTR) => {}
            other => return Ok(other?.1),
        }
    }
}

/// Have the kernel refuse descriptors to this socket and, if it listens, to all of its connections (`SO_PASSRIGHTS`).
/// Before Linux 6.16, or if another process has the socket and sets it again, [`try_read_plain`] and [`receive_bytes`]
/// have to.
pub fn refuse_descriptors(socket: impl AsFd) {
    const SO_PASSRIGHTS: libc::c_int = 83;
    let (fd, no) = (socket.as_fd().as_raw_fd(), 0 as libc::c_int);
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the value is a number that lives during the call, and its length is right.
    unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const no).cast(), len) };
}

/// The close of this descriptor does not linger, if it is a socket.
pub fn close_at_once(fd: impl AsFd) {
    // Any other descriptor has no such option, and is not asked itself.
    let _ = rustix::net::sockopt::set_socket_linger(fd, None);
}

/// Shut a socket, and drop what is in it up to the first message with descriptors. Returns whether there is none: then
/// the close of the socket waits for nothing.
pub fn shut_and_empty(socket: impl AsFd) -> bool {
    let _ = rustix::net::shutdown(&socket, Shutdown::Both);
    let is_stream = rustix::net::sockopt::socket_type(&socket) == Ok(SocketType::STREAM);
    // An empty message looks like the end. No more messages can be in the queue than this, and none comes any more.
    let most = if is_stream { 0 } else { longest_queue() };
    let (mut empty, mut bytes) = (0, [0; 4096]);
    while empty <= most {
        if plain(&socket, RecvFlags::DONTWAIT).is_err() {
            return false;
        }
        match rustix::net::recv(&socket, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => empty += 1,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    true
}

/// The most messages that wait in a socket of this system.
fn longest_queue() -> usize {
    let read = std::fs::read_to_string("/proc/sys/net/unix/max_dgram_qlen");
    read.ok().and_then(|text| text.trim().parse::<usize>().ok()).unwrap_or(4096) + 1
}

/// Shut a socket, and give each descriptor in it that was not received to `close`: the close of the socket would wait
/// for each of them.
pub fn take_descriptors(socket: impl AsFd, mut close: impl FnMut(OwnedFd)) {
    let _ = rustix::net::shutdown(&socket, Shutdown::Both);
    while let Ok((received, flags)) = receive_any(&socket, RecvFlags::DONTWAIT) {
        let is_last = received.is_end() && !flags.contains(ReturnFlags::CTRUNC);
        received.fds.into_iter().for_each(&mut close);
        if is_last {
            return;
        }
    }
}

/// Receive one message, or fail with `WouldBlock` at once if there is none. `Ok(None)` means the peer has closed.
///
/// # Errors
/// As [`receive`].
pub fn try_receive(socket: impl AsFd) -> io::Result<Option<Received>> {
    whole(receive_any(socket, RecvFlags::DONTWAIT)?, drop)
}

/// Receive one message of a peer that sends no descriptors, on a thread that must not wait for the close of any. If
/// the peer sends some all the same, that is an error, and the message stays in the socket: they are closed with it.
/// `Ok(None)` means the peer has closed.
///
/// # Errors
/// A message with descriptors; one longer than [`MAX_MESSAGE`], which is dropped whole.
pub fn receive_bytes(socket: impl AsFd) -> io::Result<Option<Vec<u8>>> {
    plain(&socket, RecvFlags::empty())?;
    bytes_of(socket, RecvFlags::empty())
}

/// Does the next message in this socket, if there is one, bring descriptors?
///
/// # Errors
/// It is no socket that is connected.
pub fn has_descriptors(socket: impl AsFd) -> io::Result<bool> {
    match plain(socket, RecvFlags::DONTWAIT) {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(true),
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(false),
    }
}

/// Does the next message bring no descriptors?
fn plain(socket: impl AsFd, flags: RecvFlags) -> io::Result<()> {
    let flags = flags | RecvFlags::PEEK;
    loop {
        match rustix::net::recvmsg(&socket, &mut [], &mut RecvAncillaryBuffer::default(), flags) {
            Err(rustix::io::Errno::INTR) => {}
            other => return refuse_any(other?.flags),
        }
    }
}

fn refuse_any(flags: ReturnFlags) -> io::Result<()> {
    if flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "descriptors came with a message that needs none"));
    }
    Ok(())
}

fn bytes_of(socket: impl AsFd, flags: RecvFlags) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let (_, len) = loop {
        match rustix::net::recv(&socket, &mut bytes[..], flags | RecvFlags::TRUNC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    if len > MAX_MESSAGE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "message over the size limit"));
    }
    bytes.truncate(len);
    Ok((len > 0).then_some(bytes))
}

/// The same as [`receive`] for a thread that must not close descriptors of unknown origin. Those of a message that is
/// dropped go to `refuse`, because a close (of a socket that lingers, a file of a dead server) can block without end.
pub fn receive_or(socket: impl AsFd, refuse: impl FnOnce(Vec<OwnedFd>)) -> io::Result<Option<Received>> {
    whole(receive_any(socket, RecvFlags::empty())?, refuse)
}

fn whole(
    (received, flags): (Received, ReturnFlags),
    refuse: impl FnOnce(Vec<OwnedFd>),
) -> io::Result<Option<Received>> {
    if flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) || received.fds.len() > MAX_FDS {
        refuse(received.fds);
        return Err(io::Error::new(io::ErrorKind::InvalidData, "message over the size or descriptor limit"));
    }
    Ok(Some(received).filter(|received| !received.is_end()))
}

/// The same as [`receive`] for a reader that must know of a message even if its own table of descriptors is full.
/// Returns whether all descriptors came; if not, the message has none.
///
/// # Errors
/// A message longer than [`MAX_MESSAGE`] or with more descriptors than [`MAX_FDS`] is an error and is dropped whole.
pub fn receive_or_bytes(socket: impl AsFd) -> io::Result<Option<(Received, bool)>> {
    let (mut received, flags) = receive_any(socket, RecvFlags::empty())?;
    if flags.contains(ReturnFlags::TRUNC) || received.fds.len() > MAX_FDS {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "message over the size or descriptor limit"));
    }
    let is_whole = !flags.contains(ReturnFlags::CTRUNC);
    if is_whole && received.is_end() {
        return Ok(None);
    }
    if !is_whole {
        received.fds.clear();
    }
    Ok(Some((received, is_whole)))
}

/// Receive one message, or as much of it as fits.
fn receive_any(socket: impl AsFd, flags: RecvFlags) -> io::Result<(Received, ReturnFlags)> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNEL_MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let answer = loop {
        let mut slices = [io::IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(&socket, &mut slices, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| if let RecvAncillaryMessage::ScmRights(fds) = message { Some(fds) } else { None })
        .flatten()
        .collect();
    bytes.truncate(answer.bytes);
    Ok((Received { bytes, fds }, answer.flags))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::{is_alone, with_descriptors};

    #[test]
    fn a_message_whose_descriptors_have_no_place_is_refused_or_comes_without_any() {
        if !is_alone("scm::tests::a_message_whose_descriptors_have_no_place_is_refused_or_comes_without_any") {
            return;
        }
        let (a, b) = pair().expect("socketpair");
        let send_three = || send(&a, b"three", &[a.as_fd(); 3]).expect("send");
        send_three();
        let error = with_descriptors(1, || receive(&b)).expect_err("one place for three");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        send_three();
        let (received, is_whole) = with_descriptors(1, || receive_or_bytes(&b)).expect("receive").expect("open");
        assert_eq!((received.bytes.as_slice(), received.fds.len(), is_whole), (b"three".as_slice(), 0, false));
        send_three();
        let (received, is_whole) = receive_or_bytes(&b).expect("receive").expect("open");
        assert_eq!((received.fds.len(), is_whole), (3, true));
        drop((a, received));
        assert!(receive_or_bytes(&b).expect("receive").is_none(), "a closed peer reads as the end");
    }

    #[test]
    fn a_message_with_descriptors_that_nobody_wants_is_refused_and_they_are_closed_with_its_socket() {
        let (a, b) = pair().expect("socketpair");
        let weak = std::os::unix::net::UnixStream::pair().expect("pair");
        weak.1.set_nonblocking(true).expect("non-blocking");
        let is_closed = || matches!(std::io::Read::read(&mut &weak.1, &mut [0]), Ok(0));
        send(&a, b"plain", &[]).expect("send");
        send(&a, b"not wanted", &[weak.0.as_fd()]).expect("send");
        drop(weak.0);
        assert_eq!(receive_bytes(&b).expect("receive").expect("open"), b"plain");
        for _ in 0..2 {
            let error = receive_bytes(&b).expect_err("it brings a descriptor");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        assert!(!is_closed(), "this thread closed it");
        drop(b);
        let mut waits = [rustix::event::PollFd::new(&weak.1, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut waits, None).expect("poll");
        assert!(is_closed());
        let (a, b) = pair().expect("socketpair");
        drop(a);
        // This one waits: a program that another test starts has a copy of `a` for a moment.
        assert!(receive_bytes(&b).expect("receive").is_none(), "a closed peer reads as the end");
    }

    #[test]
    fn a_message_arrives_whole_with_its_descriptors() {
        let (a, b) = pair().expect("socketpair");
        let extra = crate::memfd::create("ballast-test", ballast_base::Bytes(4096)).expect("memfd");
        send(&a, b"first", &[extra.as_fd(), a.as_fd()]).expect("send");
        send(&a, b"second", &[]).expect("send");
        let first = receive(&b).expect("receive").expect("open");
        assert_eq!((first.bytes.as_slice(), first.fds.len()), (b"first".as_slice(), 2));
        let same = crate::memfd::file_id(&first.fds[0]).expect("stat") == crate::memfd::file_id(&extra).expect("stat");
        assert!(same, "the descriptor names another file");
        assert_eq!(receive(&b).expect("receive").expect("open").bytes, b"second");
        // More than the limit, sent by a peer that does not use this code.
        let many: Vec<_> = (0..MAX_FDS + 1).map(|_| extra.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNEL_MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        rustix::net::sendmsg(&a, &[io::IoSlice::new(b"greedy")], &mut control, SendFlags::empty()).expect("send");
        let mut refused = 0;
        let error = receive_or(&b, |fds| refused = fds.len()).expect_err("too many descriptors");
        assert_eq!((error.kind(), refused), (io::ErrorKind::InvalidData, MAX_FDS + 1));
        // One message without descriptors, and one with a descriptor that was not expected.
        send(&a, b"plain", &[]).expect("send");
        assert_eq!(try_receive_bytes(&b).expect("receive").expect("open"), b"plain");
        let weak = std::os::unix::net::UnixStream::pair().expect("pair");
        send(&a, b"not wanted", &[weak.0.as_fd()]).expect("send");
        drop(weak.0);
        assert_eq!(try_receive_bytes(&b).expect_err("a descriptor").kind(), io::ErrorKind::InvalidData);
        take_descriptors(&b, drop);
        let end = std::io::Read::read(&mut &weak.1, &mut [0]).expect("read");
        assert_eq!(end, 0, "the descriptor was kept");
        let (a, b) = pair().expect("socketpair");
        assert_eq!(try_receive_bytes(&b).expect_err("empty").kind(), io::ErrorKind::WouldBlock);
        drop((a, first));
        // This one waits: a program that another test starts has a copy of `a` for a moment.
        assert!(receive(&b).expect("receive").is_none(), "a closed peer reads as the end");
        assert!(try_receive_bytes(&b).expect("receive").is_none(), "a closed peer reads as the end");
    }

    #[test]
    fn bytes_of_a_stream_that_bring_a_descriptor_are_not_read() {
        let (a, b) = std::os::unix::net::UnixStream::pair().expect("pair");
        let mut out = [0; 64];
        assert_eq!(try_read_plain(&b, &mut out).expect_err("empty").kind(), io::ErrorKind::WouldBlock);
        send(&a, b"one ", &[]).expect("send");
        send(&a, b"two", &[]).expect("send");
        let len = try_read_plain(&b, &mut out).expect("plain");
        assert_eq!(&out[..len], b"one two");
        send(&a, b"three", &[]).expect("send");
        send(&a, b"four", &[a.as_fd()]).expect("send");
        for _ in 0..2 {
            let error = try_read_plain(&b, &mut out).expect_err("the second message brings one");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        let mut taken = 0;
        take_descriptors(&b, |_| taken += 1);
        assert_eq!(taken, 1);
        drop((a, b));
        let (a, b) = std::os::unix::net::UnixStream::pair().expect("pair");
        drop(a);
        assert_eq!(try_read_plain(&b, &mut out).expect("the end"), 0);
    }
}
