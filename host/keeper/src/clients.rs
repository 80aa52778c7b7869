//! Clients: connections of VMMs, from accept to end, and their limits.
//!
//! Before: a process connected to the attach socket. After: its messages were carried out, one at a time.
//! Threads: the keeper's one.
//! Promise: a client harms itself only. Its connections, requests and unread replies are bounded per user and per
//! client, and every descriptor it sends becomes a [`SentFd`] at once, so that none can delay the keeper.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ballast_base::Bytes;
use ballast_base::text::ascii;
use ballast_base::wire::{self, ClientToKeeper, KeeperToClient, MAX_REGIONS, VmId};
use ballast_handover::orders::Order;
use ballast_sys::{Uffd, peer, process, scm};
use rustix::io::Errno;

use crate::bounds::has_room;
use crate::client::Client;
use crate::client::ClientView;
use crate::closer::{self, MOST_STUCK, SentFd};
use crate::keeper::Keeper;
use crate::regions::{At, VmEntry};
use crate::store_files::Files;
use crate::waiting::{Answer, Asked};

/// How long a connection may take to attach. A client sends its attach message right after it connected.
const TIME_TO_ATTACH: Duration = Duration::from_secs(10);
/// Connections taken before the existing ones are served again, which attaches them.
const BURST: usize = 16;
/// Messages of one client that were refused, or whose reply it did not take, before the keeper hangs up. A client that
/// is refused connects again; only a client that sends invalid messages reaches this limit.
const MOST_FAULTS: u32 = 16;
/// Time between two looks for files of unplugged regions: a client may be gone before its unplug is done.
pub const FORGET_EVERY: Duration = Duration::from_secs(10);
/// Pause of the listening socket, which stays readable, when there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

impl Keeper {
    /// Is it time to take connections?
    pub(crate) fn accepts(&self) -> bool {
        !self.is_hushed() && self.accept_again.is_none_or(|at| Instant::now() >= at)
    }

    pub(crate) fn accept(&mut self, listener: BorrowedFd<'_>) {
        for _ in 0..BURST {
            let socket = match rustix::net::accept_with(listener, rustix::net::SocketFlags::CLOEXEC) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error) => {
                    // No user's fault: it counts as root's, so the lines have a bound.
                    self.complaints.log(0, 0, format_args!("Accepting a client: {error}"));
                    self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            };
            let peer = peer::credentials(&socket);
            let uid = peer.as_ref().map_or(u32::MAX, |peer| peer.uid);
            let socket = SentFd::new(socket, uid, self.closer.clone());
            let pid = match peer.map(|peer| peer.pid) {
                Ok(Some(pid)) => pid.get(),
                Ok(None) => {
                    let why = "refusing a connection: its process is in no PID namespace that ballastd sees; run \
                               ballastd in the host's";
                    self.complaints.log(0, uid, format_args!("{why}"));
                    self.refuse_unseen(socket, why);
                    continue;
                }
                Err(error) => {
                    self.complaints.log(0, uid, format_args!("refusing a connection: who it is of: {error}"));
                    continue;
                }
            };
            let known = self.clients.values().map(|client| (client.uid, client.view.is_some()));
            let room = has_room(uid, known).and_then(|()| {
                let stuck = self.closer.stuck(uid, closer::HANGS_AFTER) >= MOST_STUCK;
                if stuck { Err("descriptors that this user sent cannot be closed") } else { Ok(()) }
            });
            if let Err(why) = room {
                self.complaints.log(pid, uid, format_args!("refusing a connection: {why}"));
                socket.hang_up();
                continue;
            }
            if let Err(error) = rustix::io::ioctl_fionbio(&socket, true) {
                tracing::warn!("Making a client socket non-blocking: {error}");
                continue;
            }
            let client =
                Client { socket, pid, uid, view: None, since: Instant::now(), faults: 0, owed: VecDeque::new() };
            self.clients.insert(self.next_client, client);
            self.next_client += 1;
        }
    }

    /// A process that this one cannot see is told why, and hung up on.
    fn refuse_unseen(&self, socket: SentFd, why: &str) {
        let answer = wire::encode(&KeeperToClient::Refused(why.into()));
        // Best effort: one that does not take it sees the connection end.
        if rustix::io::ioctl_fionbio(&socket, true).is_ok() {
            let _ = scm::send(&socket, &answer, &[]);
        }
        socket.hang_up();
    }

    /// Hang up on connections that never attached, and drop files that no engine will ask for.
    pub(crate) fn tend_clients(&mut self, now: Instant) {
        let due = |vm: &&VmEntry| vm.looks_at.is_some_and(|at| at <= now);
        let due: Vec<VmId> = self.vms.iter().filter(due).map(|vm| vm.state.id()).collect();
        due.into_iter().for_each(|vm| self.forget_removed(vm, now));
        let silent = |client: &Client| client.view.is_none() && now - client.since > TIME_TO_ATTACH;
        let late: Vec<u64> = self.clients.iter().filter(|(_, client)| silent(client)).map(|(key, _)| *key).collect();
        for key in late {
            self.drop_client(key, "did not attach in time");
        }
    }

    pub(crate) fn hear_client(&mut self, key: u64) {
        let client = &self.clients[&key];
        if client.view.is_none() && self.closer.stuck(client.uid, closer::HANGS_AFTER) >= MOST_STUCK {
            return self.drop_client(key, "is of a user whose descriptors cannot be closed");
        }
        let (uid, closer) = (client.uid, self.closer.clone());
        let sent = |fds: Vec<std::os::fd::OwnedFd>| -> Vec<SentFd> {
            fds.into_iter().map(|fd| SentFd::new(fd, uid, closer.clone())).collect()
        };
        let refused = match scm::receive_or(&client.socket, |fds| drop(sent(fds))) {
            Ok(Some(received)) => self.obey(key, &received.bytes, sent(received.fds)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(error) if error.kind() == ErrorKind::InvalidData => Err(error.to_string()),
            Ok(None) => return self.drop_client(key, "is gone"),
            Err(error) => return self.drop_client(key, &error.to_string()),
        };
        if let Err(reason) = refused {
            self.refuse(key, reason);
        }
    }

    /// Refuse a client's request.
    pub(crate) fn refuse(&mut self, key: u64, reason: String) {
        if let Some(client) = self.clients.get_mut(&key) {
            self.complaints.log(client.pid, client.uid, format_args!("refused: {reason}"));
            client.faults += 1;
        }
        self.answer(key, KeeperToClient::Refused(reason));
        if self.clients.get(&key).is_some_and(|client| client.faults > MOST_FAULTS) {
            self.drop_client(key, "sends nothing but nonsense, or takes no answers");
        }
    }

    fn obey(&mut self, key: u64, bytes: &[u8], fds: Vec<SentFd>) -> Result<(), String> {
        let message = wire::decode::<ClientToKeeper>(bytes).map_err(|error| error.to_string())?;
        let brings = matches!(message, ClientToKeeper::Attach(_) | ClientToKeeper::AddRegion { .. });
        if !brings && !fds.is_empty() {
            return Err(format!("{} descriptors came with a message that needs none", fds.len()));
        }
        match message {
            ClientToKeeper::Attach(attach) => self.attach(key, &attach, fds),
            ClientToKeeper::AddRegion { region, files } => {
                let len = region.span.len;
                let Err(why) = self.add_region(key, region, files, fds) else { return Ok(()) };
                let Ok(entry) = self.entry_of(key) else { return Err(why) };
                let (name, is_full) = (entry.state.name(), entry.state.regions().len() >= MAX_REGIONS);
                let message = format!("{len} of RAM plugged into VM {name} are not managed: {why}");
                if !is_full {
                    self.note(name, "ram-unmanaged", message);
                    return Err(why);
                }
                // A VMM that plugs RAM all its life does nothing wrong. There are few lines about one that does nothing
                // else.
                if let Some(left_out) = self.complaints.next(self.clients[&key].uid, Instant::now()) {
                    self.note(name, "ram-unmanaged", message + &crate::complaints::left_out(left_out));
                }
                self.answer(key, KeeperToClient::Refused(why));
                Ok(())
            }
            ClientToKeeper::RemoveRegion(hva) => {
                let view = self.clients[&key].view.as_ref().ok_or("attach first")?;
                let span = view.spans.iter().find(|(span, _)| span.hva == hva);
                let region = span.map(|(_, number)| *number);
                self.entry_of(key)?.looks_at.get_or_insert(Instant::now() + FORGET_EVERY);
                self.ask_engine(key, Answer::Ok, |seq, vm, pid| Order::RemoveRegion { seq, vm, pid, hva, region })
            }
            ClientToKeeper::Pin(reason) => {
                if reason.len() > 256 {
                    return Err("the reason is longer than 256 bytes".into());
                }
                let reason = ascii(&reason);
                self.entry_of(key)?.pinned = Some(reason.clone());
                self.ask_engine(key, Answer::Ok, |seq, vm, _| Order::Pin { seq, vm, reason })
            }
            ClientToKeeper::Unmanaged { name, len, why } => self.unmanaged(key, name, len, &why),
            ClientToKeeper::Device => {
                let device = Uffd::device().map_err(|error| format!("Opening /dev/userfaultfd: {error}"))?;
                self.send(key, &KeeperToClient::Device, &[device.as_fd()]);
                Ok(())
            }
            ClientToKeeper::MayPin => {
                self.entry_of(key)?.may_pin = true;
                self.ask_engine(key, Answer::Ok, |seq, vm, _| Order::MayPin { seq, vm })
            }
            ClientToKeeper::GuestRanges { hva, ranges } => {
                let view = self.clients[&key].view.as_ref().ok_or("attach first")?;
                let span = view.spans.iter().find(|(span, _)| span.hva == hva);
                let (_, number) = *span.ok_or_else(|| format!("no RAM region begins at {hva}"))?;
                let state = &self.entry_of(key)?.state;
                state.set_guest_ranges(number, &ranges).map_err(|error| error.to_string())?;
                self.answer(key, KeeperToClient::Ok);
                Ok(())
            }
        }
    }

    /// RAM of a guest, or a whole VM, is not managed: note it. There are few lines about a user who does nothing else.
    fn unmanaged(&mut self, key: u64, name: String, len: Bytes, why: &str) -> Result<(), String> {
        if why.len() > 256 {
            return Err("the reason is longer than 256 bytes".into());
        }
        let why = wire::shown_name(why);
        let uid = self.clients[&key].uid;
        let (name, message) = match self.entry_of(key) {
            Ok(entry) => {
                let (name, before) = (entry.state.name(), entry.state.unmanaged());
                entry.state.set_unmanaged(len);
                self.answer(key, KeeperToClient::Ok);
                if len <= before {
                    return Ok(());
                }
                (name.clone(), format!("{len} of the RAM of VM {name} are not managed: {why}"))
            }
            Err(_) => {
                wire::check_name(&name)?;
                let pid = self.clients[&key].pid;
                (name.clone(), format!("process {pid} of user {uid}, which calls itself {name}, runs unmanaged: {why}"))
            }
        };
        if let Some(left_out) = self.complaints.next(uid, Instant::now()) {
            self.note(name, "ram-unmanaged", message + &crate::complaints::left_out(left_out));
        }
        Ok(())
    }

    /// Reply to a client's last request, after all of its earlier ones have their replies.
    pub(crate) fn answer(&mut self, key: u64, answer: KeeperToClient) {
        if let Some(client) = self.clients.get_mut(&key) {
            client.owed.push_back(Some(answer));
            self.send_owed(key);
        }
    }

    /// Send the replies that wait for no engine.
    fn send_owed(&mut self, key: u64) {
        let next = |client: &mut Client| client.owed.pop_front_if(|reply| reply.is_some()).flatten();
        while let Some(reply) = self.clients.get_mut(&key).and_then(next) {
            self.send(key, &reply, &[]);
        }
    }

    /// Send a reply; a client that does not read its replies is marked.
    fn send(&mut self, key: u64, answer: &KeeperToClient, fds: &[BorrowedFd<'_>]) {
        let Some(client) = self.clients.get_mut(&key) else { return };
        if let Err(error) = scm::send(&client.socket, &wire::encode(answer), fds) {
            self.complaints.log(client.pid, client.uid, format_args!("answering a client: {error}"));
            client.faults += 1;
        }
    }

    /// The engine has carried out, or refused, the order that a client waits for.
    pub(crate) fn answered(&mut self, seq: u64, asked: &Asked, result: Result<(), String>) {
        let Asked { client: key, order, answer } = asked;
        // Also if it failed: its process unmaps it all the same.
        if let Order::RemoveRegion { vm, hva, .. } = order {
            self.forget_region(*key, *vm, *hva);
        }
        match (result, answer) {
            (Err(reason), Answer::Ok) => self.settle(*key, seq, KeeperToClient::Refused(reason)),
            (Ok(()), Answer::Ok) => self.settle(*key, seq, KeeperToClient::Ok),
            // A client asks an engine for nothing before it attaches, so this comes first.
            (Ok(()), Answer::Attached) => {
                self.answer_attached(*key);
                if let Some(client) = self.clients.get_mut(key) {
                    client.owed.pop_front_if(|reply| reply.is_none());
                }
                self.send_owed(*key);
            }
            (Err(reason), Answer::Attached) => self.refuse_attached(*key, &reason),
        }
    }

    /// The reply to the request that had this order is known.
    fn settle(&mut self, key: u64, seq: u64, reply: KeeperToClient) {
        // Orders have ascending numbers, also when they are asked again (`ask_again`).
        let before = self.pending.range(..seq).filter(|(_, asked)| asked.client == key).count();
        let Some(client) = self.clients.get_mut(&key) else { return };
        if let Some(owed) = client.owed.iter_mut().filter(|owed| owed.is_none()).nth(before) {
            *owed = Some(reply);
        }
        self.send_owed(key);
    }

    /// Tell a client that it is attached, and give it its VM's escrow.
    pub(crate) fn answer_attached(&mut self, key: u64) {
        let escrow =
            self.entry_of(key).and_then(|entry| Ok((entry.state.id(), Files::counts(&entry.stores), entry.escrow()?)));
        match escrow {
            Ok((vm, stores, escrow)) => {
                self.give_escrow(key, &KeeperToClient::Attached { vm, stores, is_first: false }, &escrow);
            }
            // Without escrow it could not come back after this keeper's death.
            Err(reason) => self.refuse_attached(key, &reason),
        }
    }

    /// Tell a client that it is attached.
    pub(crate) fn give_escrow(&mut self, key: u64, attached: &KeeperToClient, escrow: &[OwnedFd]) {
        self.send(key, attached, &escrow.iter().map(AsFd::as_fd).collect::<Vec<_>>());
    }

    /// It passed the checks when it attached, and failed after all.
    fn refuse_attached(&mut self, key: u64, reason: &str) {
        self.send(key, &KeeperToClient::Refused(reason.to_owned()), &[]);
        self.drop_client(key, reason);
    }

    pub(crate) fn drop_client(&mut self, key: u64, why: &str) {
        let Some(client) = self.clients.remove(&key) else { return };
        client.socket.hang_up();
        self.pending.retain(|_, asked| asked.client != key);
        // Closing its socket freed descriptors, if they were short.
        self.accept_again = None;
        let Some(view) = client.view else {
            tracing::debug!(pid = client.pid, "a process that did not attach {why}");
            return;
        };
        let (vm, pid) = (view.vm, client.pid);
        // A process that ends has no memory any more when its sockets close.
        // One that is pinned has all of its pages: it has executed another program, as it announced.
        let is_pinned = self.vm(vm).is_some_and(|entry| entry.pinned.is_some());
        if process::has_memory(pid) && !is_pinned {
            let name = self.vm(vm).map_or_else(|| vm.to_string(), |entry| entry.state.name());
            let message = format!(
                "process {pid} {why}, and runs on without a connection: it has executed another program past the C \
                 library, or closed what is not its own. Ballast has lost sight of its RAM, which may read as zeros \
                 there until far pages are written back"
            );
            self.note(name, "sight-lost", message);
        }
        self.order(&Order::RemoveView { vm, pid }, &[]);
        // The engine may remove a region that another process has unplugged.
        if let Some(entry) = self.vms.iter_mut().find(|entry| entry.state.id() == vm) {
            entry.looks_at.get_or_insert(Instant::now() + FORGET_EVERY);
            entry.keep_control(view.control);
        }
        if self.views_of(vm).next().is_none() {
            let name = self.vm(vm).map(|vm| vm.state.name());
            tracing::info!(vm = name, pid, "the VM's process {why}: forgetting the VM");
            self.close_vm(vm);
        }
    }

    /// Processes of a VM.
    pub(crate) fn views_of(&self, vm: VmId) -> impl Iterator<Item = (u32, &ClientView)> {
        let views = self.clients.values().filter_map(|client| Some((client.pid, client.view.as_ref()?)));
        views.filter(move |(_, view)| view.vm == vm)
    }

    /// Reply to a client when it can touch these regions of its VM (see [`Order::Reach`]).
    pub(crate) fn answer_when_served(&mut self, key: u64, regions: Vec<u32>, answer: Answer) -> Result<(), String> {
        self.ask_engine(key, answer, |seq, vm, pid| Order::Reach { seq, vm, pid, regions })
    }

    /// Give the engine an order that the client waits for.
    fn ask_engine(
        &mut self,
        key: u64,
        answer: Answer,
        order: impl FnOnce(u64, VmId, u32) -> Order,
    ) -> Result<(), String> {
        let client = self.clients.get_mut(&key).ok_or("this client is gone")?;
        let vm = client.view.as_ref().ok_or("attach first")?.vm;
        client.owed.push_back(None);
        let seq = self.next_seq;
        self.next_seq += 1;
        let order = order(seq, vm, client.pid);
        // An engine that gets the VM later, or alone, also gets the pending orders then.
        if self.vm(vm).is_some_and(|vm| vm.is_handed_over() && vm.at != At::Both) {
            self.order(&order, &[]);
        }
        self.pending.insert(seq, Asked { client: key, order, answer });
        Ok(())
    }
}
