//! A connection to the API, from which bytes are read and no descriptors.
//!
//! Before: a connection was accepted. After: hyper has its bytes; it is closed on a thread of the closer.
//! Threads: the API's one, which never waits: the close of a descriptor that a peer sent may take for ever.
//! Promise: a peer that sends a descriptor loses its connection, and delays nobody.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use ballast_keeper::{Closer, HANGS_AFTER, MOST_STUCK, SentFd};
use ballast_sys::scm;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

/// The connection.
pub(super) struct Stream {
    inner: Option<UnixStream>,
    uid: u32,
    closer: Arc<Closer>,
}

impl Stream {
    pub(super) fn new(inner: UnixStream, closer: Arc<Closer>) -> Self {
        let uid = inner.peer_cred().map_or(u32::MAX, |peer| peer.uid());
        Self { inner: Some(inner), uid, closer }
    }

    pub(super) fn inner(&self) -> &UnixStream {
        self.inner.as_ref().expect("there until dropped")
    }

    /// Do descriptors that its user sent not close?
    pub(super) fn is_stuck(&self) -> bool {
        self.closer.stuck(self.uid, HANGS_AFTER) >= MOST_STUCK
    }

    fn pinned(&mut self) -> Pin<&mut UnixStream> {
        Pin::new(self.inner.as_mut().expect("there until dropped"))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Some(Ok(stream)) = self.inner.take().map(UnixStream::into_std) else { return };
        SentFd::new(stream.into(), self.uid, self.closer.clone()).hang_up();
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let stream = self.inner();
        loop {
            ready!(stream.poll_read_ready(cx))?;
            let out = buffer.initialize_unfilled();
            match stream.try_io(Interest::READABLE, || scm::try_read_plain(stream, out)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => {
                    buffer.advance(read?);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.pinned().poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.pinned().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.pinned().poll_shutdown(cx)
    }
}
