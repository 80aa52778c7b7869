//! The peer that is our client: a thread in the process, on the other end of the control socket.
//!
//! Before: the keeper hands over the socket. After: the client zaps, forwards discards, and stops the VM if it must.
//! Threads: any; sequence numbers tell zaps of several workers apart.
//! Promise: a zap that is not acknowledged in time is an error. Parts that the client did not zap are reported.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ballast_base::wire::{self, AgentPort, ClientToEngine, EngineToClient, MAX_RANGES};
use ballast_sys::scm;

use super::peer::{Heard, Peer, Zap};
use crate::run::pool::{Notifier, blocking};

/// Most time a client may take to acknowledge a zap. A zap takes microseconds; a stopped VMM never acknowledges.
const ZAP_TIMEOUT: Duration = Duration::from_secs(5);

/// A client's reply to a zap: the parts it left alone, or an errno.
type Zapped = Result<Vec<wire::Range>, i32>;

/// What the client was asked.
#[derive(Debug, Default)]
struct Zaps {
    /// Zaps under way: `None` until the reply; then which ranges were not zapped.
    under_way: HashMap<u64, Option<Zapped>>,
    /// No thread reads replies any more.
    is_over: bool,
}

/// The client of one process.
#[derive(Debug)]
pub struct ClientPeer {
    control: OwnedFd,
    next_seq: AtomicU64,
    zaps: Mutex<Zaps>,
    answered: Condvar,
    on_answer: Notifier,
    disconnected: AtomicBool,
    /// The port of the guest's agent is asked for: the next messages may have a descriptor.
    wants_port: AtomicBool,
    agent_port: Mutex<Option<io::Result<Option<OwnedFd>>>>,
}

/// A zap that the client was asked for, part by part.
#[derive(Debug)]
struct Asked {
    peer: Arc<ClientPeer>,
    rest: VecDeque<Vec<wire::Range>>,
    /// The part that was sent, and the latest time for its reply.
    awaited: Option<(u64, Instant)>,
    kept: Vec<wire::Range>,
}

impl ClientPeer {
    /// The client at the other end of this socket. `epoch` makes the sequence numbers differ from those of earlier
    /// engines.
    pub fn new(control: OwnedFd, epoch: u64) -> Self {
        Self {
            control,
            next_seq: AtomicU64::new(epoch << 32),
            zaps: Mutex::default(),
            answered: Condvar::new(),
            on_answer: Notifier::default(),
            disconnected: AtomicBool::new(false),
            wants_port: AtomicBool::new(false),
            agent_port: Mutex::default(),
        }
    }

    /// Sends a message to the client. Never waits: if a client does not read its socket, only its own VM's requests
    /// fail.
    fn tell(&self, message: &EngineToClient) -> io::Result<()> {
        scm::try_send(&self.control, &wire::encode(message))
    }

    fn zaps(&self) -> MutexGuard<'_, Zaps> {
        self.zaps.lock().expect("no panic while held")
    }

    fn ask(self: Arc<Self>, ranges: &[wire::Range]) -> io::Result<Asked> {
        let rest = ranges.chunks(MAX_RANGES).map(<[_]>::to_vec).collect();
        let mut zap = Asked { peer: self, rest, awaited: None, kept: Vec::new() };
        zap.send_next(Instant::now())?;
        Ok(zap)
    }

    /// Its next message, and descriptors beside it, if it was asked for one.
    fn receive(&self) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        if self.wants_port.load(Ordering::Acquire) {
            let Some(received) = scm::try_receive(&self.control)? else { return Ok(None) };
            // The close of a socket that lingers would hold up this thread.
            received.fds.iter().for_each(scm::close_at_once);
            return Ok(Some((received.bytes, received.fds)));
        }
        Ok(scm::try_receive_bytes(&self.control)?.map(|bytes| (bytes, Vec::new())))
    }

    /// Takes the client's reply about the port of its guest's agent.
    fn port_told(&self, port: AgentPort, mut fds: Vec<OwnedFd>) {
        let port = match port {
            // It was taken back by the client meanwhile, or did not fit into our table: it is asked for again.
            AgentPort::Here if fds.is_empty() => return,
            AgentPort::Here if fds.len() > 1 => Err(io::Error::other("the VMM gave more than one port")),
            AgentPort::Here => Ok(fds.pop()),
            AgentPort::None => Ok(None),
            AgentPort::Unreachable(why) => Err(io::Error::other(why)),
        };
        self.wants_port.store(false, Ordering::Release);
        *self.agent_port.lock().expect("no panic while held") = Some(port);
    }

    /// Takes the client's reply to a zap. A reply to an earlier engine is not known here and is ignored.
    fn zapped(&self, seq: u64, answer: Zapped) {
        if let Some(slot) = self.zaps().under_way.get_mut(&seq) {
            *slot = Some(answer);
            self.answered.notify_all();
            self.on_answer.notify();
        }
    }
}

fn unheard() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the VMM is gone, or is not listened to")
}

impl Peer for ClientPeer {
    fn cannot_zap(&self) -> Option<String> {
        None
    }

    fn begin_zap(self: Arc<Self>, ranges: &[wire::Range]) -> io::Result<Box<dyn Zap>> {
        Ok(Box::new(self.ask(ranges)?))
    }

    fn zap(self: Arc<Self>, ranges: &[wire::Range]) -> io::Result<Vec<wire::Range>> {
        let mut zap = self.clone().ask(ranges)?;
        loop {
            if let Some(kept) = zap.poll(Instant::now())? {
                return Ok(kept);
            }
            let Some((seq, until)) = zap.awaited else { continue };
            let unanswered = |zaps: &mut Zaps| matches!(zaps.under_way.get(&seq), Some(None));
            let left = until.saturating_duration_since(Instant::now());
            blocking(|| {
                drop(self.answered.wait_timeout_while(self.zaps(), left, unanswered).expect("no panic while held"));
            });
        }
    }

    fn on_answer(&self) -> &Notifier {
        &self.on_answer
    }

    fn take_zaps(&self) {
        self.zaps().is_over = false;
    }

    fn give_up_zaps(&self) {
        *self.zaps() = Zaps { under_way: HashMap::new(), is_over: true };
        self.answered.notify_all();
        self.on_answer.notify();
    }

    fn input(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    fn hear(&self) -> io::Result<Heard> {
        let (bytes, fds) = match self.receive() {
            Ok(Some(received)) => received,
            Ok(None) => return Ok(Heard::Gone),
            // The client took its message back, or another process with the other end took it.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Heard::Nothing),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Ok(Heard::Nonsense(error.to_string())),
            Err(error) => return Err(error),
        };
        Ok(match wire::decode(&bytes) {
            Ok(ClientToEngine::Zapped { seq, error, kept }) => {
                self.zapped(seq, error.map_or(Ok(kept), Err));
                Heard::Reply
            }
            Ok(ClientToEngine::Discard { seq, ranges }) => Heard::Discard { seq, ranges },
            Ok(ClientToEngine::Pong { .. }) => Heard::Reply,
            Ok(ClientToEngine::AgentPort(port)) => {
                self.port_told(port, fds);
                Heard::AgentPort
            }
            Err(error) => Heard::Nonsense(error.to_string()),
        })
    }

    fn discarded(&self, seq: u64, error: Option<String>) -> io::Result<()> {
        self.tell(&EngineToClient::DiscardDone { seq, error })
    }

    /// One that does not hear it goes on asking.
    fn settled(&self, range: wire::Range) {
        let _ = self.tell(&EngineToClient::Settled { range });
    }

    fn ask_agent_port(&self) -> io::Result<()> {
        self.wants_port.store(true, Ordering::Release);
        self.tell(&EngineToClient::AgentPort)
    }

    fn take_agent_port(&self) -> Option<io::Result<Option<OwnedFd>>> {
        self.agent_port.lock().expect("no panic while held").take()
    }

    fn stop_vm(&self, reason: &str) -> io::Result<()> {
        self.tell(&EngineToClient::FailStop { reason: reason.to_owned() })
    }

    fn disconnect(&self) {
        self.disconnected.store(true, Ordering::Release);
        self.give_up_zaps();
    }

    fn is_disconnected(&self) -> bool {
        self.disconnected.load(Ordering::Acquire)
    }

    /// The keeper sees the end, by the attach socket.
    fn has_ended(&self) -> bool {
        false
    }
}

impl Zap for Asked {
    fn poll(&mut self, now: Instant) -> io::Result<Option<Vec<wire::Range>>> {
        while let Some((seq, until)) = self.awaited {
            let answer = {
                let mut zaps = self.peer.zaps();
                match zaps.under_way.get(&seq) {
                    Some(None) if now < until => return Ok(None),
                    Some(None) => Err(io::Error::new(io::ErrorKind::TimedOut, "the VMM did not answer a zap in time")),
                    Some(Some(_)) => Ok(zaps.under_way.remove(&seq).flatten().expect("looked at just now")),
                    None => Err(unheard()),
                }
            };
            self.kept.extend(answer?.map_err(io::Error::from_raw_os_error)?);
            self.send_next(now)?;
        }
        Ok(Some(std::mem::take(&mut self.kept)))
    }

    fn until(&self) -> Option<Instant> {
        self.awaited.map(|(_, until)| until)
    }
}

impl Asked {
    /// Asks for the next part, if one is left.
    fn send_next(&mut self, now: Instant) -> io::Result<()> {
        self.awaited = None;
        let Some(ranges) = self.rest.pop_front() else { return Ok(()) };
        let seq = self.peer.next_seq.fetch_add(1, Ordering::Relaxed);
        {
            let mut zaps = self.peer.zaps();
            if zaps.is_over {
                return Err(unheard());
            }
            zaps.under_way.insert(seq, None);
        }
        self.awaited = Some((seq, now + ZAP_TIMEOUT));
        self.peer.tell(&EngineToClient::Zap { seq, ranges })
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if let Some((seq, _)) = self.awaited {
            self.peer.zaps().under_way.remove(&seq);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::Hva;

    #[test]
    fn a_zap_that_begins_when_nobody_reads_replies_fails_at_once() {
        let (ours, theirs) = scm::pair().expect("socketpair");
        let peer = Arc::new(ClientPeer::new(theirs, 1));
        let range = [(Hva(4096), 4096)];
        let mut under_way = peer.clone().begin_zap(&range).expect("asked");
        peer.give_up_zaps();
        let broken = |error: io::Error| assert_eq!(error.kind(), io::ErrorKind::BrokenPipe, "{error}");
        under_way.poll(Instant::now()).map(drop).map_err(broken).expect_err("given up");
        peer.clone().begin_zap(&range).map(drop).map_err(broken).expect_err("nobody listens");
        peer.clone().zap(&range).map(drop).map_err(broken).expect_err("nobody listens");
        // The VM is opened again, with the same view.
        peer.take_zaps();
        let mut asked = peer.clone().begin_zap(&range).expect("asked");
        let next = || scm::receive(&ours).expect("receive").expect("open");
        let seqs = [next(), next()].map(|said| match wire::decode(&said.bytes) {
            Ok(EngineToClient::Zap { seq, .. }) => seq,
            said => panic!("{said:?}"),
        });
        peer.zapped(seqs[0], Err(1));
        assert_eq!(asked.poll(Instant::now()).expect("not over"), None, "a reply to the zap before");
        peer.zapped(seqs[1], Ok(Vec::new()));
        assert_eq!(asked.poll(Instant::now()).expect("done"), Some(Vec::new()));
    }

    #[test]
    fn a_port_is_one_descriptor() {
        let (ours, theirs) = scm::pair().expect("socketpair");
        let peer = ClientPeer::new(theirs, 1);
        peer.ask_agent_port().expect("asked");
        for (count, is_port) in [(2, false), (1, true)] {
            let said = wire::encode(&ClientToEngine::AgentPort(AgentPort::Here));
            scm::send(&ours, &said, &[ours.as_fd(); 2][..count]).expect("sent");
            peer.wants_port.store(true, Ordering::Release);
            peer.hear().expect("heard");
            assert_eq!(peer.take_agent_port().expect("a reply").is_ok(), is_port, "{count}");
        }
    }
}
