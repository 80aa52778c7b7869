//! The service thread, the only thread of a client: zaps on request, watches the keeper, reconnects.
//!
//! Before: `Builder::attach` starts it. After: the engine reclaims, because this thread drops the PTEs.
//! Threads: `ballast-client`, with all signals blocked. It never touches guest RAM, so it cannot wait for a userfault
//! itself.
//! Promise: no message makes it zap anything outside announced RAM, no wait is unbounded, and the death of a keeper or
//! an engine is only a pause.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::wire::{self, Attach, ClientToEngine, ClientToKeeper, EngineToClient, KeeperToClient, MAX_RANGES};
use ballast_base::{Bytes, Hva};
use ballast_sys::lock::Lock;
use ballast_sys::scm;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::agent_port::AgentPort;
use crate::control::Pair;
use crate::error::{AttachError, chain};
use crate::link::{Asked, Escrow, Phase};
use crate::shared::{Shared, announce, cut};

/// Refusals after which the VM is also offered without its unconfirmed RAM.
const REFUSALS: u32 = 3;
/// Most messages from one socket before the others have their turn.
const BURST: usize = 64;

struct Pending {
    socket: Arc<OwnedFd>,
    pair: Arc<Pair>,
    until: Instant,
    /// The message does not contain unconfirmed regions.
    in_part: bool,
}

/// State that only this thread uses.
struct Service<'a> {
    shared: &'a Shared,
    pending: Option<Pending>,
    retry_at: Instant,
    /// The operator was told that the keeper is absent.
    told_gone: bool,
    /// The operator was told of a refused resume, or of an invalid reply.
    told_refused: bool,
    told_garbage: bool,
    /// The operator was told that descriptors or memory are short for another attach.
    told_short: bool,
    /// The operator was told that the keeper asks to wait.
    told_later: bool,
    /// Refusals by keepers since the last successful attach.
    refusals: u32,
    /// The next attach message will not contain unconfirmed regions.
    leaves_out: bool,
}

fn system(what: &'static str) -> impl Fn(io::Error) -> AttachError {
    move |source| AttachError::System { what, source }
}

/// Whether this process, or the host, is short of a resource for another attach.
fn is_short(error: &AttachError) -> bool {
    let (AttachError::Connect { source, .. } | AttachError::System { source, .. }) = error else { return false };
    matches!(Errno::from_io_error(source), Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS))
}

/// Runs the service thread. Returns only if the first attach fails: the thread is then not needed.
pub(crate) fn run(shared: &Shared) {
    let mut service = Service {
        shared,
        pending: None,
        retry_at: Instant::now(),
        told_gone: false,
        told_refused: false,
        told_garbage: false,
        told_short: false,
        told_later: false,
        refusals: 0,
        leaves_out: false,
    };
    while shared.link.phase() != Phase::Failed {
        service.turn();
    }
}

impl Service<'_> {
    fn turn(&mut self) {
        let now = Instant::now();
        if self.shared.link.phase() == Phase::Down && self.pending.is_none() && now >= self.retry_at {
            match self.begin() {
                Ok(pending) => self.pending = Some(pending),
                Err(error) => self.failed(error),
            }
            return;
        }
        if self.pending.as_ref().is_some_and(|pending| now >= pending.until) {
            self.pending = None;
            return self.failed(AttachError::NoAnswer("did not answer in time"));
        }

        let current = self.shared.control.pair();
        let socket = match &self.pending {
            Some(pending) => Some(pending.socket.clone()),
            None => self.shared.link.socket(),
        };
        // Before the first attach has succeeded nothing is zapped, because if it fails, nobody will serve a fault here.
        let pending = self.pending.as_ref().filter(|_| !self.shared.link.first());
        let controls: Vec<Arc<Pair>> = current.into_iter().chain(pending.map(|pending| pending.pair.clone())).collect();
        let mut fds: Vec<PollFd<'_>> = controls
            .iter()
            .map(|pair| pair.ours.as_fd())
            .chain(socket.iter().map(|socket| socket.as_fd()))
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let wake_at = match (&self.pending, &socket) {
            (Some(pending), _) => Some(pending.until),
            (None, None) => Some(self.retry_at),
            (None, Some(_)) => None,
        };
        let timeout = wake_at.map(|at| timespec(at.saturating_duration_since(now) + Duration::from_millis(1)));
        if let Err(error) = rustix::event::poll(&mut fds, timeout.as_ref())
            && error != rustix::io::Errno::INTR
        {
            announce(&format!("waiting for messages: {error}"));
            std::thread::sleep(Duration::from_millis(100));
            return;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        // The keeper's messages come first, so that a later zap finds the regions confirmed.
        if let (Some(socket), Some(true)) = (socket, ready.get(controls.len())) {
            self.serve_keeper(&socket);
        }
        for (pair, _) in controls.iter().zip(&ready).filter(|(_, ready)| **ready) {
            self.serve_engine(pair);
        }
    }

    /// Connects, and sends the attach message with the current state.
    fn begin(&mut self) -> Result<Pending, AttachError> {
        let shared = self.shared;
        let path = &shared.socket;
        let is_first = shared.link.first();
        let connect = || -> io::Result<OwnedFd> {
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
            // Where hundreds of VMs start at once, the first attach waits for space in the keeper's queue. A later
            // attach does not wait but is repeated, because this thread must serve an engine.
            rustix::io::ioctl_fionbio(&socket, !is_first)?;
            set_socket_timeout(&socket, Timeout::Send, Some(shared.timing.handshake))?;
            rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
            rustix::io::ioctl_fionbio(&socket, true)?;
            Ok(socket)
        };
        let socket = connect().map_err(|source| AttachError::Connect { path: path.clone(), source })?;
        let pair = Pair::new().map_err(system("making the control socket"))?;

        let mut link = shared.link.begin();
        let table = shared.table.locked();
        let in_part = self.leaves_out && table.is_confirmed_in_part();
        let (regions, files) = table.describe(!in_part);
        let escrow = link.escrow.as_ref().filter(|_| link.vm.is_some());
        let message = Attach {
            name: shared.name.clone(),
            uuid: shared.uuid,
            limit: shared.limit.map(Bytes),
            vmm: shared.vmm.clone(),
            uffd_features: shared.features,
            shards: shared.uffds.len() as u8,
            pinned: link.pinned.clone(),
            may_pin: link.may_pin,
            files: u8::try_from(files.len()).unwrap_or(u8::MAX),
            regions,
            resume: link.vm,
            stores: escrow.map_or_else(Vec::new, |escrow| escrow.stores.clone()),
        };
        message.validate().map_err(AttachError::Config)?;
        let mut fds: Vec<_> = shared.uffds.iter().map(AsFd::as_fd).chain([pair.theirs.as_fd()]).collect();
        fds.extend(files);
        fds.extend(escrow.iter().flat_map(|escrow| &escrow.files).map(AsFd::as_fd));
        let bytes = wire::encode(&ClientToKeeper::Attach(message));
        scm::send(&socket, &bytes, &fds).map_err(|source| AttachError::Connect { path: path.clone(), source })?;
        link.phase = Phase::Pending;
        let until = Instant::now() + shared.timing.handshake;
        Ok(Pending { socket: Arc::new(socket), pair: Arc::new(pair), until, in_part })
    }

    /// Handles a failed attempt: reports the first, and repeats others later.
    fn failed(&mut self, error: AttachError) {
        if let AttachError::Later(_) = &error {
            // The VM waits for any time: without Ballast it would read zeros where pages are still far.
            self.later(&chain(&error));
        } else if self.shared.link.first() {
            return self.shared.link.fail(error);
        }
        // RAM that was plugged without a keeper may be the reason. A VM with far pages needs a keeper more than it
        // needs that RAM to be managed, but the reason may pass: so every other attempt leaves the RAM out.
        let is_refused = matches!(error, AttachError::Refused(_));
        self.refusals += u32::from(is_refused);
        self.leaves_out = is_refused && self.refusals >= REFUSALS && !self.leaves_out;
        // An error that needs a person is retried slowly. A missing keeper is not such an error.
        let slow = match &error {
            AttachError::Refused(_) | AttachError::Protocol(_) | AttachError::Config(_) => true,
            AttachError::Connect { source, .. } => source.kind() == io::ErrorKind::PermissionDenied,
            _ => false,
        };
        if slow && !self.told_refused {
            self.told_refused = true;
            announce(&format!(
                "{}. Until it is attached again, far pages stay far and the guest may hang. Trying every {:?}",
                chain(&error),
                self.shared.timing.refused_pause
            ));
        }
        if is_short(&error) {
            self.short(&chain(&error));
        }
        let timing = self.shared.timing;
        self.retry_at = Instant::now() + if slow { timing.refused_pause } else { timing.again };
        self.shared.link.down();
    }

    fn serve_keeper(&mut self, socket: &Arc<OwnedFd>) {
        let (received, is_whole) = match scm::receive_or_bytes(socket.as_fd()) {
            Ok(Some(received)) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return self.garbage(&error.to_string()),
            Ok(None) | Err(_) => return self.keeper_gone(),
        };
        let message = wire::decode::<KeeperToClient>(&received.bytes);
        let Some(pending) = self.pending.take() else {
            return match message {
                Ok(KeeperToClient::Ok) => self.answered(Ok(Asked::Done)),
                Ok(KeeperToClient::Later(reason)) => {
                    self.later(&reason);
                    self.answered(Ok(Asked::Again(reason)));
                }
                Ok(KeeperToClient::Refused(reason)) => self.answered(Err(reason)),
                Ok(KeeperToClient::Attached { .. } | KeeperToClient::Device) => {
                    self.garbage("a reply without a request");
                }
                Err(error) => self.garbage(&error.to_string()),
            };
        };
        match message {
            Ok(KeeperToClient::Attached { vm, stores, is_first }) => {
                let whole = received.fds.len() == 1 + wire::count_files(&stores) && wire::check_stores(&stores).is_ok();
                let escrow = (whole && !stores.is_empty()).then_some(Escrow { stores, files: received.fds });
                let known = self.shared.link.vm();
                if known.is_some_and(|known| known != vm) {
                    return self.failed(AttachError::Refused(format!("it replied for another VM, {vm}")));
                }
                if known.is_none() && escrow.is_none() {
                    return self.failed(match is_whole {
                        true => AttachError::NoAnswer("sent no state and arena files"),
                        false => system("receiving the VM's files")(Errno::MFILE.into()),
                    });
                }
                if !is_whole {
                    // The files that it has already stay valid.
                    self.short(&chain(&system("receiving the VM's files again")(Errno::MFILE.into())));
                }
                if pending.in_part {
                    self.leave_out();
                }
                self.shared.table.locked().attached(known.is_none(), is_first);
                self.shared.control.replace(pending.pair);
                self.shared.link.up(pending.socket, vm, escrow);
                if self.told_gone || self.told_refused {
                    announce("attached to the keeper again");
                }
                self.refusals = 0;
                (self.told_gone, self.told_refused, self.told_garbage) = (false, false, false);
                self.told_short &= !is_whole;
            }
            Ok(KeeperToClient::Refused(reason)) => self.failed(AttachError::Refused(reason)),
            Ok(KeeperToClient::Later(reason)) => self.failed(AttachError::Later(reason)),
            Ok(KeeperToClient::Ok | KeeperToClient::Device) => {
                self.failed(AttachError::NoAnswer("sent a wrong reply"));
            }
            Err(error) => self.failed(AttachError::Protocol(error)),
        }
    }

    fn answered(&self, answer: Result<Asked, String>) {
        self.shared.link.answer(answer, |hva| self.shared.table.locked().confirm(hva));
    }

    /// Handles that the keeper took the VM without its unconfirmed regions, which have no far pages.
    fn leave_out(&mut self) {
        for region in self.shared.table.locked().take_unconfirmed() {
            let (hva, len) = (region.hva(), region.ram.span.len);
            announce(&format!("RAM of {len} at {hva} is not managed: the keeper refused the VM with it"));
        }
    }

    fn keeper_gone(&mut self) {
        if self.pending.take().is_some() {
            return self.failed(AttachError::NoAnswer("hung up"));
        }
        if !self.told_gone {
            self.told_gone = true;
            announce(&format!("the keeper is gone; reconnecting to {}", self.shared.socket.display()));
        }
        self.retry_at = Instant::now() + self.shared.timing.again;
        self.shared.link.down();
    }

    fn later(&mut self, why: &str) {
        if !self.told_later {
            self.told_later = true;
            announce(&format!("{why}; waiting"));
        }
    }

    fn short(&mut self, why: &str) {
        if !self.told_short {
            self.told_short = true;
            announce(&format!("{why}. If this process may have more descriptors (`prlimit --nofile`), this ends"));
        }
    }

    fn garbage(&mut self, what: &str) {
        if !self.told_garbage {
            self.told_garbage = true;
            announce(&format!("ignoring a message: {what}"));
        }
    }

    /// Handles messages on a control socket. This process has both ends, so it does not see the end of an engine.
    fn serve_engine(&mut self, pair: &Pair) {
        for _ in 0..BURST {
            let received = match scm::receive(&pair.ours) {
                Ok(Some(received)) => received,
                Ok(None) => return,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => return self.garbage(&error.to_string()),
            };
            let answer = match wire::decode(&received.bytes) {
                Ok(EngineToClient::Zap { seq, ranges }) => {
                    let (error, kept) = match zap(self.shared, &ranges) {
                        Ok(kept) => (None, kept),
                        Err(errno) => (Some(errno), Vec::new()),
                    };
                    ClientToEngine::Zapped { seq, error, kept }
                }
                Ok(EngineToClient::Ping { seq }) => ClientToEngine::Pong { seq },
                Ok(EngineToClient::DiscardDone { seq, error }) => {
                    self.shared.control.discard_done(seq, error.map_or(Ok(()), Err));
                    continue;
                }
                Ok(EngineToClient::AgentPort) => {
                    self.give_agent_port(pair);
                    continue;
                }
                Ok(EngineToClient::Settled { range }) => {
                    self.shared.table.locked().settled(range);
                    continue;
                }
                Ok(EngineToClient::FailStop { reason }) => {
                    let handler = self.shared.fail_stop.locked().clone();
                    handler(&reason);
                    continue;
                }
                Err(error) => {
                    self.garbage(&error.to_string());
                    continue;
                }
            };
            self.replied(pair.send(&answer));
        }
    }

    fn replied(&mut self, sent: io::Result<bool>) {
        match sent {
            Ok(true) => {}
            Ok(false) => self.garbage("its sender reads no replies"),
            Err(error) => self.garbage(&format!("replying to it: {error}")),
        }
    }

    fn give_agent_port(&mut self, pair: &Pair) {
        let port = self.shared.agent_port.as_ref().map(AgentPort::open);
        let (answer, port) = match port {
            None => (wire::AgentPort::None, None),
            Some(Ok(port)) => (wire::AgentPort::Here, Some(port)),
            Some(Err(error)) => (wire::AgentPort::Unreachable(cut(error.to_string())), None),
        };
        let fds: Vec<_> = port.iter().map(AsFd::as_fd).collect();
        self.replied(pair.send_with(&ClientToEngine::AgentPort(answer), &fds));
    }
}

/// Drops the PTEs of these ranges. Returns the parts that were left alone: those outside announced RAM, and those that
/// the kernel did not zap. EINVAL: more ranges than an engine may send; nothing was zapped.
fn zap(shared: &Shared, ranges: &[wire::Range]) -> Result<Vec<wire::Range>, i32> {
    if ranges.len() > MAX_RANGES {
        return Err(libc::EINVAL);
    }
    // The gate comes before the table: see `zapped.rs`.
    let gate = shared.gate.zap();
    let mut table = shared.table.locked();
    table.note_zapped(ranges);
    drop(gate);
    // `left`: for each range, the parts that must not be zapped. `ours`, `of`: each part to zap, and its range's index.
    let (mut left, mut ours, mut of) = (Vec::new(), Vec::new(), Vec::new());
    for (number, range) in ranges.iter().enumerate() {
        let (parts, holes) = table.split(*range);
        left.push(holes);
        of.extend(parts.iter().map(|_| number));
        ours.extend(parts.into_iter().map(|(hva, len)| (hva.0 as usize, len as usize)));
    }
    // SAFETY: each range is page-aligned and whole inside announced RAM, which was checked to be a MAP_SHARED mapping
    // of its file when announced and has not been unmapped since (the table's lock is held, and unmapping takes the
    // range off the table first). So the bytes stay in the file.
    for (index, _) in unsafe { ballast_sys::zap::zap(&ours) } {
        left[of[index]].push((Hva(ours[index].0 as u64), ours[index].1 as u64));
    }
    let mut kept = Vec::new();
    for (number, (range, left)) in ranges.iter().zip(left).enumerate() {
        // Each later range needs space for one entry; a range in too many pieces counts as left alone.
        let room = MAX_RANGES - (ranges.len() - number - 1) - kept.len();
        if left.len() <= room { kept.extend(left) } else { kept.push(*range) }
    }
    Ok(kept)
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}
