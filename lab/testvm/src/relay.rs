//! A relay of TCP connections that delivers all bytes late: a network between programs of one machine.
//!
//! Before: a server listens on a port of 127.0.0.1. After: its clients connect to the port of the relay.
//! Threads: one that accepts, and two for each connection, one per direction. Units: the latency is that of one
//! direction; bandwidth is the machine's. Each direction also takes the time in which two idle CPUs wake up.
//! Promise: bytes come in order and unchanged, none earlier than the latency after it was sent, until the relay is
//! dropped. At most [`MOST`] bytes of a direction are under way.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Bytes of one direction that are under way.
const MOST: usize = 16 << 20;
/// Bytes read at once.
const CHUNK: usize = 256 << 10;

/// A relay to one server.
#[derive(Debug)]
pub(crate) struct Relay {
    port: u16,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    is_closing: AtomicBool,
    /// Both sides of each connection, which its threads have.
    streams: Mutex<Vec<Weak<TcpStream>>>,
}

impl Relay {
    /// Relay connections to this port, in each direction with this latency.
    ///
    /// # Errors
    /// There is no port, or no thread.
    pub(crate) fn start(listener: TcpListener, to: u16, latency: Duration) -> io::Result<Self> {
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared::default());
        let accept = {
            let shared = Arc::clone(&shared);
            move || {
                for client in listener.incoming() {
                    if shared.is_closing.load(Ordering::Acquire) {
                        return;
                    }
                    // A client that cannot be connected is closed.
                    let _ = client.and_then(|client| shared.connect(client, to, latency));
                }
            }
        };
        let acceptor = Some(std::thread::Builder::new().name("relay".into()).spawn(accept)?);
        Ok(Self { port, shared, acceptor })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.is_closing.store(true, Ordering::Release);
        // It accepts one more, and sees that.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        for stream in self.shared.streams.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = stream.upgrade().map(|stream| stream.shutdown(Shutdown::Both));
        }
    }
}

impl Shared {
    fn connect(&self, client: TcpStream, to: u16, latency: Duration) -> io::Result<()> {
        let server = TcpStream::connect(("127.0.0.1", to))?;
        for stream in [&client, &server] {
            stream.set_nodelay(true)?;
        }
        let (client, server) = (Arc::new(client), Arc::new(server));
        let both = [&client, &server].map(Arc::downgrade);
        for (from, to) in [(client.clone(), server.clone()), (server, client)] {
            let carry = move || {
                let _ = carry(&from, &to, latency);
                // The other direction ends with it.
                let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
            };
            std::thread::Builder::new().name("relay".into()).spawn(carry)?;
        }
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.extend(both);
        Ok(())
    }
}

/// Carry bytes in one direction until either side closes.
fn carry(mut from: &TcpStream, mut to: &TcpStream, latency: Duration) -> io::Result<()> {
    // A timer of a thread may otherwise be 50 us late.
    rustix::thread::set_current_timer_slack(NonZeroU64::new(1))?;
    let mut under_way: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let (mut bytes, mut is_open) = (0, true);
    while is_open || !under_way.is_empty() {
        let due = under_way.front().map(|(due, _)| due.saturating_duration_since(Instant::now()));
        if due == Some(Duration::ZERO) {
            let (_, chunk) = under_way.pop_front().expect("it is due");
            bytes -= chunk.len();
            to.write_all(&chunk)?;
            continue;
        }
        let events = if is_open && bytes < MOST { PollFlags::IN } else { PollFlags::empty() };
        let timeout = due.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
        let mut polled = [PollFd::new(&from, events)];
        // What is closed has input for ever.
        let polled = if is_open { &mut polled[..] } else { &mut [] };
        if poll(polled, timeout.as_ref())? > 0 {
            let mut chunk = vec![0; CHUNK];
            match from.read(&mut chunk)? {
                0 => is_open = false,
                read => {
                    chunk.truncate(read);
                    bytes += read;
                    under_way.push_back((Instant::now() + latency, chunk));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: Duration = Duration::from_millis(3);

    #[test]
    fn bytes_come_in_order_unchanged_and_not_before_the_latency() {
        let server = TcpListener::bind("127.0.0.1:0").expect("a port");
        let to = server.local_addr().expect("its address").port();
        let relay = Relay::start(TcpListener::bind("127.0.0.1:0").expect("a port"), to, LATENCY).expect("a relay");
        let sent: Vec<u8> = (0..3_000_000u32).map(|at| (at % 251) as u8).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut client, _) = server.accept().expect("the relay connects");
                let mut bytes = vec![0; sent.len()];
                client.read_exact(&mut bytes).expect("all come");
                client.write_all(&bytes).expect("all return");
            });
            let mut client = TcpStream::connect(("127.0.0.1", relay.port)).expect("the relay listens");
            let begun = Instant::now();
            client.write_all(&sent).expect("all are sent");
            let mut back = vec![0; sent.len()];
            client.read_exact(&mut back).expect("all return");
            assert!(begun.elapsed() >= 2 * LATENCY, "{:?}", begun.elapsed());
            assert!(back == sent, "other bytes");
        });
        let mut client = TcpStream::connect(("127.0.0.1", relay.port)).expect("the relay listens");
        drop(relay);
        assert_eq!(client.read(&mut [0]).unwrap_or(0), 0, "it is closed with the relay");
    }
}
