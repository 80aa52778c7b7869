//! A process that connected, and its view.
//!
//! Before: `clients` took its connection. After: the keeper knows its user, and which parts of a VM it maps.
//! Threads: the keeper's one.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use ballast_base::wire::{KeeperToClient, Span, VmId};
use rustix::event::PollFlags;

use crate::closer::SentFd;

/// Most requests of one client that are under way. Our client makes one at a time, but may give up waiting for it.
const MOST_PENDING: usize = 8;

/// A process that connected. It has a `view` once it attached.
pub struct Client {
    pub socket: SentFd,
    pub pid: u32,
    pub uid: u32,
    pub view: Option<ClientView>,
    pub since: Instant,
    pub faults: u32,
    /// What it gets for its requests, from the first on that an engine has not carried out (`None`): the client counts
    /// replies, so none may overtake another.
    pub owed: VecDeque<Option<KeeperToClient>>,
}

/// The view of a process that attached.
pub struct ClientView {
    pub vm: VmId,
    /// In the client's order.
    pub uffds: Vec<Arc<SentFd>>,
    pub uffd_features: u64,
    pub control: Arc<SentFd>,
    pub spans: Vec<(Span, u32)>,
}

impl Client {
    /// The events to wait for on its socket. After too many requests at once, its next messages wait.
    pub fn interest(&self) -> PollFlags {
        if self.owed.len() < MOST_PENDING { PollFlags::IN } else { PollFlags::empty() }
    }
}

/// Connections by key, in no order.
pub type Clients = HashMap<u64, Client>;

/// The events to wait for on each connection.
pub fn interests(clients: &Clients) -> impl Iterator<Item = (u64, BorrowedFd<'_>, PollFlags)> {
    clients.iter().map(|(key, client)| (*key, client.socket.as_fd(), client.interest()))
}
