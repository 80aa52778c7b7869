//! Clients: the connections of VMMs, and the order of the replies to each.
//!
//! Before: a process connected to the attach socket. After: the keeper has its messages and its user, knows which parts
//! of a VM it maps, and the process has a reply to each request.
//! Threads: the keeper's one.
//! Promise: a client's requests and unread replies are bounded, and every descriptor it sends becomes a [`SlowFd`] at
//! once, so that its close does not delay the keeper. A client counts its replies, so none overtakes the reply to an
//! earlier request.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use ballast_base::Hva;
use ballast_base::wire::{ClientToKeeper, KeeperToClient, Span, VmId, WireError, decode, encode};
use ballast_handover::kept::{Kept, KeptAsk, KeptClient, KeptView};
use ballast_handover::orders::Order;
use ballast_sys::{peer, scm};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use crate::taken;
use ballast_sys::slow_fd::SlowFd;

/// How long a connection may take to attach. A client sends its attach message right after it connected.
const TIME_TO_ATTACH: Duration = Duration::from_secs(10);
/// Most connections that are taken before the existing ones are served again.
const BURST: usize = 16;
/// Most messages of one client that were refused, or whose reply it did not take, before the keeper hangs up. A refused
/// client of ours connects again; only a client that sends invalid messages reaches this limit.
const MOST_FAULTS: u32 = 16;
/// Most requests of one client that are under way. Our client makes one at a time, but may give up waiting for it.
const MOST_PENDING: usize = 8;
/// Pause of the listening socket, which stays readable, when no descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

#[derive(Default)]
pub(crate) struct Clients {
    known: HashMap<u64, Client>,
    next_key: u64,
    /// Orders for which clients wait, by number.
    waits: BTreeMap<u64, Wait>,
    /// No connections are taken before this time.
    accept_again: Option<Instant>,
}

struct Client {
    socket: OwnedFd,
    peer: Peer,
    view: Option<ClientView>,
    since: Instant,
    faults: u32,
    /// Its replies in order, from the first that is not yet known, because an engine has not carried out the request
    /// (`None`).
    owed: VecDeque<Option<KeeperToClient>>,
}

struct Wait {
    client: u64,
    /// The order for whose end it waits; a new engine is given it again.
    order: Order,
    answer: Answer,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    pub pid: u32,
    pub uid: u32,
}

/// The message to a client when the order for which it waits has been carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Ok,
    Attached,
}

pub(crate) struct ClientView {
    pub vm: VmId,
    /// In the client's order.
    pub uffds: Vec<Arc<SlowFd>>,
    pub uffd_features: u64,
    pub control: Arc<SlowFd>,
    pub spans: Vec<(Span, u32)>,
}

impl ClientView {
    pub fn region_at(&self, hva: Hva) -> Option<u32> {
        self.spans.iter().find(|(span, _)| span.hva == hva).map(|(_, number)| *number)
    }
}

pub(crate) enum Heard {
    Message(ClientToKeeper, Vec<SlowFd>),
    Nothing,
    /// Bytes that are no valid message.
    Nonsense(anyhow::Error),
    /// The connection has ended, or must end, for this reason.
    End(String),
}

fn again(client: &KeptClient, kept: &Kept) -> anyhow::Result<Client> {
    let KeptClient { key, socket, pid, uid, faults, ref view } = *client;
    let view = view.as_ref().map(|view| {
        let uffds = view.uffds.iter().map(|number| Ok(Arc::new(taken::sent(*number)?)));
        anyhow::Ok(ClientView {
            vm: view.vm,
            uffds: uffds.collect::<anyhow::Result<_>>()?,
            uffd_features: view.uffd_features,
            control: Arc::new(taken::sent(view.control)?),
            spans: view.spans.clone(),
        })
    });
    // Its replies in order: those that wait for an engine, and later ones that wait behind them.
    let reply = |bytes: &Vec<u8>| if bytes.is_empty() { Ok(None) } else { decode(bytes).map(Some) };
    let owed: Result<_, WireError> = match kept.owed.iter().find(|(client, _)| *client == key) {
        Some((_, replies)) => replies.iter().map(reply).collect(),
        None => Ok(kept.pending.iter().filter(|ask| ask.client == key).map(|_| None).collect()),
    };
    Ok(Client {
        socket: taken::fd(socket)?,
        peer: Peer { pid, uid },
        view: view.transpose()?,
        since: Instant::now(),
        faults,
        owed: owed.context("Reading what a client is owed")?,
    })
}

impl Clients {
    pub fn of(kept: &Kept) -> anyhow::Result<Self> {
        let mut clients = Self { next_key: kept.next_client, ..Self::default() };
        for ask in &kept.pending {
            let order = decode(&ask.order).context("Reading what a client waits for")?;
            let answer = if ask.attaches { Answer::Attached } else { Answer::Ok };
            clients.waits.insert(ask.seq, Wait { client: ask.client, order, answer });
        }
        for client in &kept.clients {
            let again = again(client, kept)?;
            clients.known.insert(client.key, again);
        }
        Ok(clients)
    }

    pub fn record(&self, kept: &mut Kept) {
        let number = |fd: &SlowFd| fd.as_fd().as_raw_fd();
        kept.next_client = self.next_key;
        kept.pending.extend(self.waits.iter().map(|(seq, wait)| KeptAsk {
            seq: *seq,
            client: wait.client,
            order: encode(&wait.order),
            attaches: wait.answer == Answer::Attached,
        }));
        for (key, client) in &self.known {
            if client.owed.iter().any(Option::is_some) {
                let replies = client.owed.iter().map(|reply| reply.as_ref().map_or_else(Vec::new, encode));
                kept.owed.push((*key, replies.collect()));
            }
            kept.clients.push(KeptClient {
                key: *key,
                socket: client.socket.as_raw_fd(),
                pid: client.peer.pid,
                uid: client.peer.uid,
                faults: client.faults,
                view: client.view.as_ref().map(|view| KeptView {
                    vm: view.vm,
                    uffds: view.uffds.iter().map(|fd| number(fd)).collect(),
                    uffd_features: view.uffd_features,
                    control: number(&view.control),
                    spans: view.spans.clone(),
                }),
            });
        }
    }

    pub fn accept_now(&self) -> bool {
        self.accept_again.is_none_or(|at| Instant::now() >= at)
    }

    pub fn accept(&mut self, listener: BorrowedFd<'_>) {
        for _ in 0..BURST {
            let socket = match rustix::net::accept_with(listener, rustix::net::SocketFlags::CLOEXEC) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error) => {
                    tracing::warn!("Accepting a client: {error}");
                    self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            };
            let peer = peer::credentials(&socket);
            let uid = peer.as_ref().map_or(u32::MAX, |peer| peer.uid);
            let pid = match peer.map(|peer| peer.pid) {
                Ok(Some(pid)) => pid.get(),
                Ok(None) => {
                    let why = "refusing a connection: its process is in no PID namespace that ballastd sees; run \
                               ballastd in the host's";
                    tracing::warn!(uid, "{why}");
                    refuse_unseen(&socket, why);
                    continue;
                }
                Err(error) => {
                    tracing::warn!("refusing a connection: who it is of: {error}");
                    continue;
                }
            };
            if let Err(error) = rustix::io::ioctl_fionbio(&socket, true) {
                tracing::warn!("Making a client socket non-blocking: {error}");
                continue;
            }
            self.add(socket, Peer { pid, uid });
        }
    }

    /// Returns the key of the new connection.
    pub fn add(&mut self, socket: OwnedFd, peer: Peer) -> u64 {
        let client = Client { socket, peer, view: None, since: Instant::now(), faults: 0, owed: VecDeque::new() };
        self.known.insert(self.next_key, client);
        self.next_key += 1;
        self.next_key - 1
    }

    /// The events to wait for on each connection. A client with too many requests under way is not read.
    pub fn interests(&self) -> impl Iterator<Item = (u64, BorrowedFd<'_>, PollFlags)> {
        self.known.iter().map(|(key, client)| {
            let flags = if client.owed.len() < MOST_PENDING { PollFlags::IN } else { PollFlags::empty() };
            (*key, client.socket.as_fd(), flags)
        })
    }

    /// The next message of this client; [`Heard::Nothing`] if it is gone.
    pub fn hear(&self, key: u64) -> Heard {
        let Some(client) = self.known.get(&key) else { return Heard::Nothing };
        match scm::receive(&client.socket) {
            Ok(Some(received)) => {
                let fds = received.fds.into_iter().map(SlowFd::from).collect();
                match decode(&received.bytes) {
                    Ok(message) => Heard::Message(message, fds),
                    Err(error) => Heard::Nonsense(error.into()),
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Heard::Nothing,
            Err(error) if error.kind() == ErrorKind::InvalidData => Heard::Nonsense(error.into()),
            Ok(None) => Heard::End("is gone".into()),
            Err(error) => Heard::End(error.to_string()),
        }
    }

    /// Connections that have not attached in time.
    pub fn late(&self, now: Instant) -> Vec<u64> {
        let is_late = |client: &Client| client.view.is_none() && now - client.since > TIME_TO_ATTACH;
        self.known.iter().filter(|(_, client)| is_late(client)).map(|(key, _)| *key).collect()
    }

    pub fn peer(&self, key: u64) -> Option<Peer> {
        self.known.get(&key).map(|client| client.peer)
    }

    pub fn view(&self, key: u64) -> Option<&ClientView> {
        self.known.get(&key)?.view.as_ref()
    }

    pub fn views_of(&self, vm: VmId) -> impl Iterator<Item = (u32, &ClientView)> {
        let views = self.known.values().filter_map(|client| Some((client.peer.pid, client.view.as_ref()?)));
        views.filter(move |(_, view)| view.vm == vm)
    }

    pub fn attach(&mut self, key: u64, view: ClientView) {
        if let Some(client) = self.known.get_mut(&key) {
            client.view = Some(view);
        }
    }

    pub fn map(&mut self, key: u64, span: Span, region: u32) {
        if let Some(view) = self.known.get_mut(&key).and_then(|client| client.view.as_mut()) {
            view.spans.push((span, region));
        }
    }

    pub fn unmap(&mut self, key: u64, hva: Hva) {
        if let Some(view) = self.known.get_mut(&key).and_then(|client| client.view.as_mut()) {
            view.spans.retain(|(span, _)| span.hva != hva);
        }
    }

    /// Refuses a client's request. Returns whether too many were refused.
    pub fn refuse(&mut self, key: u64, reason: String) -> bool {
        let Some(client) = self.known.get_mut(&key) else { return false };
        tracing::warn!(client.peer.pid, client.peer.uid, "refused: {reason}");
        client.faults += 1;
        self.answer(key, KeeperToClient::Refused(reason));
        self.known.get(&key).is_some_and(|client| client.faults > MOST_FAULTS)
    }

    /// Replies to a client's last request, after the replies to all of its earlier ones.
    pub fn answer(&mut self, key: u64, reply: KeeperToClient) {
        if let Some(client) = self.known.get_mut(&key) {
            client.owed.push_back(Some(reply));
            self.send_owed(key);
        }
    }

    /// Sends the replies that wait for no engine.
    fn send_owed(&mut self, key: u64) {
        let next = |client: &mut Client| client.owed.pop_front_if(|reply| reply.is_some()).flatten();
        while let Some(reply) = self.known.get_mut(&key).and_then(next) {
            self.send(key, &reply, &[]);
        }
    }

    /// Sends a reply out of turn, to a client without other requests. A reply that the client does not take counts as a
    /// fault.
    pub fn send(&mut self, key: u64, reply: &KeeperToClient, fds: &[BorrowedFd<'_>]) {
        let Some(client) = self.known.get_mut(&key) else { return };
        if let Err(error) = scm::send(&client.socket, &encode(reply), fds) {
            tracing::warn!(client.peer.pid, client.peer.uid, "answering a client: {error}");
            client.faults += 1;
        }
    }

    /// Makes this client wait for an order with this number, and for this answer when it has been carried out. Returns
    /// the order; `None` if the client is gone or not attached.
    pub fn wait(
        &mut self,
        key: u64,
        answer: Answer,
        seq: u64,
        order: impl FnOnce(u64, VmId, u32) -> Order,
    ) -> Option<Order> {
        let client = self.known.get_mut(&key)?;
        let order = order(seq, client.view.as_ref()?.vm, client.peer.pid);
        client.owed.push_back(None);
        self.waits.insert(seq, Wait { client: key, order: order.clone(), answer });
        Some(order)
    }

    pub fn waits_for(&self, seq: u64) -> Option<(u64, &Order, Answer)> {
        self.waits.get(&seq).map(|wait| (wait.client, &wait.order, wait.answer))
    }

    pub fn orders_of(&self, vm: VmId) -> impl Iterator<Item = &Order> {
        self.waits.values().map(|wait| &wait.order).filter(move |order| order.vm() == Some(vm))
    }

    /// Gives new numbers to the orders for this VM, because an engine may still report the old ones as aborted.
    pub fn number_again(&mut self, vm: VmId, mut number: impl FnMut() -> u64) {
        let of_vm = self.waits.extract_if(.., |_, wait| wait.order.vm() == Some(vm)).collect::<Vec<_>>();
        for (_, mut wait) in of_vm {
            let seq = number();
            wait.order.number(seq);
            self.waits.insert(seq, wait);
        }
    }

    /// Ends the wait for the order with this number: its client gets this reply in turn; `None` if it already has its
    /// reply.
    pub fn settle(&mut self, seq: u64, reply: Option<KeeperToClient>) {
        let Some(Wait { client: key, .. }) = self.waits.remove(&seq) else { return };
        // A client's orders have ascending numbers, also after they were numbered again.
        let before = self.waits.range(..seq).filter(|(_, wait)| wait.client == key).count();
        let Some(client) = self.known.get_mut(&key) else { return };
        let at = client.owed.iter().enumerate().filter(|(_, reply)| reply.is_none()).nth(before).map(|(at, _)| at);
        match (at, reply) {
            (Some(at), None) => drop(client.owed.remove(at)),
            (Some(at), reply) => client.owed[at] = reply,
            (None, _) => {}
        }
        self.send_owed(key);
    }

    /// Ends a connection and its waits. Returns its process, and its view if it was attached.
    pub fn end(&mut self, key: u64) -> Option<(Peer, Option<ClientView>)> {
        let client = self.known.remove(&key)?;
        let _ = shutdown(&client.socket, Shutdown::Both);
        self.waits.retain(|_, wait| wait.client != key);
        // Its socket's descriptor is free now, in case descriptors were short.
        self.accept_again = None;
        Some((client.peer, client.view))
    }
}

/// Tells a process that this one cannot see why it is refused, and hangs up.
fn refuse_unseen(socket: &OwnedFd, why: &str) {
    let answer = encode(&KeeperToClient::Refused(why.into()));
    // Best effort: a process that does not take the reply sees the connection end.
    if rustix::io::ioctl_fionbio(socket, true).is_ok() {
        let _ = scm::send(socket, &answer, &[]);
    }
}

#[cfg(test)]
impl Clients {
    pub fn count(&self) -> usize {
        self.known.len()
    }

    pub fn faults(&self, key: u64) -> u32 {
        self.known[&key].faults
    }

    pub fn numbers(&self) -> Vec<u64> {
        self.waits.keys().copied().collect()
    }

    /// Waits for an order that no client asked for.
    pub fn wait_for(&mut self, seq: u64, order: Order) {
        self.waits.insert(seq, Wait { client: u64::MAX, order, answer: Answer::Ok });
    }
}
