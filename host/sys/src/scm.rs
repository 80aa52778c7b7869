//! Datagrams with file descriptors over Unix sockets (SCM_RIGHTS).
//!
//! Before: two processes share a `SOCK_SEQPACKET` socket. After: one call sends or receives a whole message with its
//! descriptors.
//! Threads: any. Units: bytes. Promise: a message arrives whole or not at all, also if the peer dies.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

/// Most descriptors that one message may carry.
pub const MAX_FDS: usize = 64;
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
    whole(receive_any(socket, RecvFlags::empty())?)
}

/// As [`receive`], but fails with `WouldBlock` at once if there is no message.
pub fn try_receive(socket: impl AsFd) -> io::Result<Option<Received>> {
    whole(receive_any(socket, RecvFlags::DONTWAIT)?)
}

fn over_the_limit() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "message over the size or descriptor limit")
}

fn whole((received, flags): (Received, ReturnFlags)) -> io::Result<Option<Received>> {
    if flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(over_the_limit());
    }
    Ok(Some(received).filter(|received| !received.is_end()))
}

/// As [`receive`], for a reader that must know of a message even if its own table of descriptors is full. Returns
/// whether all descriptors came; if not, the message has none.
///
/// # Errors
/// A message longer than [`MAX_MESSAGE`] is an error and is dropped whole.
pub fn receive_or_bytes(socket: impl AsFd) -> io::Result<Option<(Received, bool)>> {
    let (mut received, flags) = receive_any(socket, RecvFlags::empty())?;
    if flags.contains(ReturnFlags::TRUNC) {
        return Err(over_the_limit());
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
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
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
        // More than the limit and what aligning adds, sent by a peer that does not use this code.
        let many = [extra.as_fd(); MAX_FDS + 8];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        rustix::net::sendmsg(&a, &[io::IoSlice::new(b"greedy")], &mut control, SendFlags::empty()).expect("send");
        assert_eq!(receive(&b).expect_err("too many descriptors").kind(), io::ErrorKind::InvalidData);
        assert_eq!(try_receive(&b).expect_err("empty").kind(), io::ErrorKind::WouldBlock);
        drop((a, first));
        // This receive waits, because a program that another test starts has a copy of `a` for a moment.
        assert!(receive(&b).expect("receive").is_none(), "a closed peer reads as the end");
    }
}
