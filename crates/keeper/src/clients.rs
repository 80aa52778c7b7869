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
use ballast_sys::{meminfo, peer, process, scm};
use rustix::io::Errno;

use crate::client::Client;
use crate::client::ClientView;
use crate::closer::{self, MOST_STUCK, SentFd};
use crate::keeper::Keeper;
use crate::regions::{At, VmEntry};
use crate::store_files::Files;
use crate::waiting::{Answer, Asked};

/// Connections, attached or not.
const MOST_CLIENTS: usize = 4096;
/// Connections of a user who is not root: a quarter, so that three such users cannot keep all others out.
const MOST_OF_A_USER: usize = MOST_CLIENTS / 4;
/// RAM that all processes of such a user may announce, in times the host's memory. It costs the user nothing while it
/// is not touched, but each page of it that is discarded or watched costs the engine a word: 1/512 of it.
const RAM_OF_A_USER: u64 = 16;
/// Connections of one user that have not attached: some VMs that start or come back at the same time.
const MOST_UNATTACHED: usize = 64;
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

/// May this user have one more connection, given the users of all connections (and whether each is attached)?
fn has_room(uid: u32, clients: impl Iterator<Item = (u32, bool)>) -> Result<(), &'static str> {
    let (mut all, mut own, mut unattached) = (0, 0, 0);
    for (whose, attached) in clients {
        all += 1;
        own += usize::from(whose == uid);
        unattached += usize::from(whose == uid && !attached);
    }
    if all >= MOST_CLIENTS {
        Err("as many clients as there may be are connected")
    } else if uid != 0 && own >= MOST_OF_A_USER {
        Err("as many clients as one user may have are connected")
    } else if unattached >= MOST_UNATTACHED {
        Err("too many connections of this user have not attached")
    } else {
        Ok(())
    }
}

/// May a user's processes announce `more` RAM, on a host with this much memory?
fn has_memory(uid: u32, announced: u64, more: u64, host: u64) -> Result<(), String> {
    let most = host.saturating_mul(RAM_OF_A_USER);
    if uid == 0 || announced.saturating_add(more) <= most {
        return Ok(());
    }
    let [announced, more, most] = [announced, more, most].map(Bytes);
    Err(format!(
        "{more} of RAM and the {announced} of this user's other processes are more than the {most} one user may have"
    ))
}

impl Keeper {
    /// May this user's processes announce these regions, too?
    pub(crate) fn check_memory(&self, uid: u32, more: impl IntoIterator<Item = Bytes>) -> Result<(), String> {
        let views = self.clients.values().filter(|client| client.uid == uid).filter_map(|client| client.view.as_ref());
        let closing = self.closing_ram(uid).0;
        let announced =
            views.flat_map(|view| &view.spans).map(|(span, _)| span.len.0).fold(closing, u64::saturating_add);
        let more = more.into_iter().map(|len| len.0).fold(0, u64::saturating_add);
        has_memory(uid, announced, more, meminfo::bytes("MemTotal").unwrap_or(u64::MAX))
    }

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
                let region = span.map_or(0, |(_, number)| number + 1);
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
                (name.clone(), format!("VM {name} runs unmanaged: {why}"))
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
        if process::has_memory(pid) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_cannot_announce_more_ram_than_the_host_can_keep_account_of() {
        let host = 24 << 30;
        assert_eq!(has_memory(7, 15 * host, host, host), Ok(()));
        let why = has_memory(7, 15 * host, host + 1, host).expect_err("a byte more");
        assert!(why.contains("384.0 GiB") || why.contains("384 GiB"), "{why}");
        has_memory(7, u64::MAX, u64::MAX, host).expect_err("no overflow");
        assert_eq!(has_memory(0, u64::MAX, 1, host), Ok(()), "root's VMs are everybody's");
    }

    #[test]
    fn one_user_who_connects_and_says_nothing_keeps_nobody_else_out() {
        let silent = |uid, count| std::iter::repeat_n((uid, false), count);
        let attached = |uid, count| std::iter::repeat_n((uid, true), count);
        assert_eq!(has_room(1, silent(1, MOST_UNATTACHED - 1).chain(attached(1, 100))), Ok(()));
        has_room(1, silent(1, MOST_UNATTACHED)).expect_err("too many that have not attached");
        assert_eq!(has_room(2, silent(1, MOST_UNATTACHED)), Ok(()));
        has_room(0, silent(0, MOST_UNATTACHED)).expect_err("root may err, too");

        has_room(1, attached(1, MOST_OF_A_USER)).expect_err("more than one user's share");
        assert_eq!(has_room(2, attached(1, MOST_OF_A_USER)), Ok(()));
        assert_eq!(has_room(0, attached(0, MOST_CLIENTS - 1)), Ok(()), "root's VMs are everybody's");
        has_room(0, attached(0, MOST_CLIENTS)).expect_err("full");
    }
}
