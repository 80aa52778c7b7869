//! The peer of a view: our client in the view's process, where a thread reads the other end of the control socket.
//!
//! Before: the keeper passes the socket on. After: the client zaps, forwards discards, and stops the VM if it must.
//! Threads: any; sequence numbers tell zaps of several workers apart. Units: ranges of the process's addresses.
//! Promise: a zap without an acknowledgement in time is an error. Ranges that the client did not zap are reported.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ballast_base::wire::{self, AgentPort, ClientToEngine, EngineToClient, MAX_RANGES};
use ballast_sys::scm;

use crate::run::pool::{Notifier, blocking};

/// Longest time for a client to acknowledge a zap. A zap takes microseconds; a stopped VMM never acknowledges.
const ZAP_TIMEOUT: Duration = Duration::from_secs(5);

/// A client's reply to a zap: the parts it left alone, or an errno.
type Zapped = Result<Vec<wire::Range>, i32>;

#[derive(Debug)]
pub(crate) enum Heard {
    Nothing,
    /// A reply, which the peer has recorded.
    Reply,
    /// A reply for [`ClientPeer::take_agent_port`].
    AgentPort,
    /// Memory is about to be freed; the client waits for [`ClientPeer::discarded`].
    Discard {
        /// Number for the reply.
        seq: u64,
        ranges: Vec<wire::Range>,
    },
    Nonsense(String),
    Gone,
}

#[derive(Debug, Default)]
struct Zaps {
    /// Zaps under way, by sequence number: `None` until the reply.
    under_way: HashMap<u64, Option<Zapped>>,
    /// No thread reads replies: zaps fail at once.
    is_over: bool,
}

/// The client of one process, at the other end of a control socket.
#[derive(Debug)]
pub struct ClientPeer {
    control: OwnedFd,
    next_seq: AtomicU64,
    zaps: Mutex<Zaps>,
    answered: Condvar,
    on_answer: Notifier,
    disconnected: AtomicBool,
    agent_port: Mutex<Option<io::Result<Option<OwnedFd>>>>,
}

/// A zap under way. The client gets its ranges in messages of at most `MAX_RANGES`, one at a time.
#[derive(Debug)]
pub(crate) struct Zap {
    peer: Arc<ClientPeer>,
    rest: VecDeque<Vec<wire::Range>>,
    /// Sequence number of the message that was sent, and the latest time for its reply.
    awaited: Option<(u64, Instant)>,
    kept: Vec<wire::Range>,
}

impl ClientPeer {
    /// The client at the other end of this socket. `epoch` keeps sequence numbers apart from those of other engines.
    pub fn new(control: OwnedFd, epoch: u64) -> Self {
        Self {
            control,
            next_seq: AtomicU64::new(epoch << 32),
            zaps: Mutex::default(),
            answered: Condvar::new(),
            on_answer: Notifier::default(),
            disconnected: AtomicBool::new(false),
            agent_port: Mutex::default(),
        }
    }

    /// Sends a message. Never waits: if the client does not read its socket, only requests of its own VM fail.
    fn tell(&self, message: &EngineToClient) -> io::Result<()> {
        scm::try_send(&self.control, &wire::encode(message))
    }

    fn zaps(&self) -> MutexGuard<'_, Zaps> {
        self.zaps.lock().expect("no panic while held")
    }

    /// Begins to zap these ranges; poll the result when [`ClientPeer::on_answer`] is notified. Fails if the client
    /// cannot be asked; some ranges may then have been zapped, which is harmless.
    pub(crate) fn begin_zap(self: Arc<Self>, ranges: &[wire::Range]) -> io::Result<Zap> {
        let rest = ranges.chunks(MAX_RANGES).map(<[_]>::to_vec).collect();
        let mut zap = Zap { peer: self, rest, awaited: None, kept: Vec::new() };
        zap.send_next(Instant::now())?;
        Ok(zap)
    }

    fn port_told(&self, port: AgentPort, mut fds: Vec<OwnedFd>) {
        let port = match port {
            // Our descriptor table was full, or the client withdrew the descriptor: the engine asks again.
            AgentPort::Here if fds.is_empty() => return,
            AgentPort::Here if fds.len() > 1 => Err(io::Error::other("the VMM gave more than one port")),
            AgentPort::Here => Ok(fds.pop()),
            AgentPort::None => Ok(None),
            AgentPort::Unreachable(why) => Err(io::Error::other(why)),
        };
        *self.agent_port.lock().expect("no panic while held") = Some(port);
    }

    /// Records the client's reply to a zap. The reply to a zap of an earlier engine is unknown here, and ignored.
    fn zapped(&self, seq: u64, answer: Zapped) {
        if let Some(slot) = self.zaps().under_way.get_mut(&seq) {
            *slot = Some(answer);
            self.answered.notify_all();
            self.on_answer.notify();
        }
    }

    /// Zaps these ranges, and waits for the result: the parts that could not be zapped, which may still be mapped.
    /// Fails if the client cannot be asked, if its answer is an error or late, and if the process has ended.
    pub(crate) fn zap(self: Arc<Self>, ranges: &[wire::Range]) -> io::Result<Vec<wire::Range>> {
        let mut zap = self.clone().begin_zap(ranges)?;
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

    /// Notified when a zap was answered, or the process has ended.
    pub(crate) fn on_answer(&self) -> &Notifier {
        &self.on_answer
    }

    /// A thread reads the client's messages from now on.
    pub(crate) fn take_zaps(&self) {
        self.zaps().is_over = false;
    }

    /// No thread reads the client's messages any more: threads that wait for replies return, and later zaps fail.
    pub(crate) fn give_up_zaps(&self) {
        *self.zaps() = Zaps { under_way: HashMap::new(), is_over: true };
        self.answered.notify_all();
        self.on_answer.notify();
    }

    /// Receives the client's next message. Does not wait. Fails if the socket fails.
    pub(crate) fn hear(&self) -> io::Result<Heard> {
        let scm::Received { bytes, fds } = match scm::try_receive(&self.control) {
            Ok(Some(received)) => received,
            Ok(None) => return Ok(Heard::Gone),
            // Another reader has the message: a client can keep a duplicate of our end.
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

    pub(crate) fn discarded(&self, seq: u64, error: Option<String>) -> io::Result<()> {
        self.tell(&EngineToClient::DiscardDone { seq, error })
    }

    /// Tells the client that this range, whole units of a region, is in memory and has no copy, until the next zap
    /// there. A client that misses the message goes on asking for each discard.
    pub(crate) fn settled(&self, range: wire::Range) {
        let _ = self.tell(&EngineToClient::Settled { range });
    }

    /// Asks for the host's end of the agent's port; the reply is [`Heard::AgentPort`].
    pub(crate) fn ask_agent_port(&self) -> io::Result<()> {
        self.tell(&EngineToClient::AgentPort)
    }

    /// Takes the reply: a connected socket, or `None` if the VMM has no such port.
    pub(crate) fn take_agent_port(&self) -> Option<io::Result<Option<OwnedFd>>> {
        self.agent_port.lock().expect("no panic while held").take()
    }

    /// Stops the VM: its memory cannot be kept right.
    pub(crate) fn stop_vm(&self, reason: &str) -> io::Result<()> {
        self.tell(&EngineToClient::FailStop { reason: reason.to_owned() })
    }

    /// The process has ended, or is treated as if it had: no thread waits for a reply any more.
    pub fn disconnect(&self) {
        self.disconnected.store(true, Ordering::Release);
        self.give_up_zaps();
    }

    /// Returns whether [`ClientPeer::disconnect`] was called.
    pub fn is_disconnected(&self) -> bool {
        self.disconnected.load(Ordering::Acquire)
    }
}

/// Readable when there is a message.
impl AsFd for ClientPeer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }
}

fn unheard() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the VMM is gone, or its messages are not read")
}

impl Zap {
    /// Once the zap is done, the parts that could not be zapped; `None` before. Fails like [`ClientPeer::zap`].
    pub fn poll(&mut self, now: Instant) -> io::Result<Option<Vec<wire::Range>>> {
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

    /// Time at which the zap fails for lack of an answer.
    pub fn until(&self) -> Option<Instant> {
        self.awaited.map(|(_, until)| until)
    }

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

impl Drop for Zap {
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
        // The VM is opened again, with its old view.
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
            peer.hear().expect("heard");
            assert_eq!(peer.take_agent_port().expect("a reply").is_ok(), is_port, "{count}");
        }
    }
}
