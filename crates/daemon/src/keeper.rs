//! The keeper: holds every descriptor, and sees to it that an engine runs.
//!
//! Before: systemd or a person starts `ballastd`. After: VMMs attach, engines come and go.
//! Threads: one. It waits in `poll` for clients, the engine's answers and the engine's death; nothing it does takes long.
//! Promise: it never touches a page. An engine that dies, or no longer answers, is replaced at once and announced; when
//! the keeper itself dies, its engine serves on without reclaiming, and clients bring everything to the next keeper.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use ballast_base::PageCount;
use ballast_base::wire::{self, Attach, ClientToKeeper, KeeperToClient, RegionInfo, VmId};
use ballast_pager::state_file::StateFile;
use ballast_store::{Budget, RamOptions, RamStore};
use ballast_sys::memfd::{self, FileId};
use ballast_sys::scm::{self, Received};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::admit;
use crate::config::Config;
use crate::engine::monotonic_ns;
use crate::orders::{Begin, Order, Report};

/// How often the engine is asked whether it is there, and how long it may stay silent before it is replaced.
const PING_EVERY: Duration = Duration::from_secs(1);
const SILENCE: Duration = Duration::from_secs(15);
/// Engines that die before they serve, one after the other, are started again ever more slowly, up to this.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Number of an order whose answer nobody waits for.
const UNASKED: u64 = u64::MAX;
/// Connections that may wait to say who they are.
const MOST_CLIENTS: usize = 4096;

/// Run until killed.
pub fn run(config: Config) -> anyhow::Result<()> {
    std::fs::create_dir_all(&config.runtime_dir)
        .with_context(|| format!("Making the directory {}", config.runtime_dir.display()))?;
    let _lock = lock(&config.runtime_dir.join("keeper.lock"))?;
    raise_descriptor_limit();
    let attach = listen(&config.attach_socket(), rustix::net::SocketType::SEQPACKET, config.attach_gid)?;
    let api = listen(&config.api_socket(), rustix::net::SocketType::STREAM, config.reader_gid)?;
    let program = std::env::current_exe().context("Finding this program's own file")?;
    tracing::info!(attach = %config.attach_socket().display(), api = %config.api_socket().display(), "ready");
    Keeper {
        since_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        config,
        program,
        api,
        engine: None,
        restarts: 0,
        young_deaths: 0,
        died: None,
        clients: HashMap::new(),
        next_client: 0,
        vms: Vec::new(),
        pending: HashMap::new(),
        next_seq: 0,
    }
    .serve(&attach)
}

/// One keeper at a time: two would fight for the sockets.
fn lock(path: &Path) -> anyhow::Result<std::fs::File> {
    let file = std::fs::File::create(path).with_context(|| format!("Opening {}", path.display()))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
        .with_context(|| format!("Locking {}: is another ballastd running?", path.display()))?;
    Ok(file)
}

/// Every VM costs a handful of descriptors.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!("Raising the descriptor limit: {error}");
    }
}

fn listen(path: &Path, kind: rustix::net::SocketType, gid: Option<u32>) -> anyhow::Result<OwnedFd> {
    let bind = || -> std::io::Result<OwnedFd> {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, socket_with};
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let fd = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
        rustix::net::bind(&fd, &SocketAddrUnix::new(path)?)?;
        let mode = if gid.is_some() { 0o660 } else { 0o600 };
        if let Some(gid) = gid {
            std::os::unix::fs::chown(path, None, Some(gid))?;
        }
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))?;
        rustix::net::listen(&fd, 128)?;
        Ok(fd)
    };
    bind().with_context(|| format!("Listening on {}", path.display()))
}

struct Engine {
    child: Child,
    pidfd: OwnedFd,
    socket: OwnedFd,
    serving: bool,
    heard: Instant,
    pinged: Instant,
}

/// A process that connected. It has a `view` once it attached.
struct Client {
    socket: OwnedFd,
    pid: u32,
    view: Option<ClientView>,
}

struct ClientView {
    vm: VmId,
    uffd: OwnedFd,
    uffd_features: u64,
    control: OwnedFd,
    spans: Vec<(RegionInfo, u32)>,
}

struct VmEntry {
    state: StateFile,
    arena: OwnedFd,
    /// By region number; `None` for a region that was unplugged.
    ram: Vec<Option<(OwnedFd, FileId)>>,
    vmm: String,
    pinned: Option<String>,
    may_pin: bool,
}

struct Keeper {
    config: Config,
    program: PathBuf,
    since_unix_s: u64,
    api: OwnedFd,
    engine: Option<Engine>,
    restarts: u64,
    /// Engines in a row that died before they served.
    young_deaths: u32,
    /// When and why the last engine went.
    died: Option<(Instant, String)>,
    clients: HashMap<u64, Client>,
    next_client: u64,
    vms: Vec<VmEntry>,
    /// Orders that a client waits for.
    pending: HashMap<u64, (u64, Order)>,
    next_seq: u64,
}

impl Keeper {
    fn serve(mut self, attach: &OwnedFd) -> anyhow::Result<()> {
        loop {
            self.keep_engine();
            let keys: Vec<u64> = self.clients.keys().copied().collect();
            let mut fds = vec![PollFd::new(attach, PollFlags::IN)];
            if let Some(engine) = &self.engine {
                fds.push(PollFd::new(&engine.pidfd, PollFlags::IN));
                fds.push(PollFd::new(&engine.socket, PollFlags::IN));
            }
            let first_client = fds.len();
            fds.extend(keys.iter().map(|key| PollFd::new(&self.clients[key].socket, PollFlags::IN)));
            let pause = if self.engine.is_some() { PING_EVERY } else { Duration::from_millis(20) };
            let timeout = rustix::event::Timespec { tv_sec: pause.as_secs() as _, tv_nsec: pause.subsec_nanos() as _ };
            match poll(&mut fds, Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("Waiting for clients"),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(fds);
            if first_client == 3 {
                if ready[2] {
                    self.hear_engine();
                }
                if ready[1] {
                    self.bury_engine("died");
                }
            }
            for (key, ready) in keys.into_iter().zip(&ready[first_client..]) {
                if *ready {
                    self.hear_client(key);
                }
            }
            if ready[0] {
                self.accept(attach.as_fd());
            }
        }
    }

    // ---- the engine ----

    /// Start an engine if there is none and it is time; ping the one there is.
    fn keep_engine(&mut self) {
        let Some(engine) = &mut self.engine else {
            let wait = self.died.as_ref().filter(|_| self.young_deaths > 0).map_or(Duration::ZERO, |(died, _)| {
                let pause = Duration::from_millis(10) * (1 << self.young_deaths.min(7));
                pause.min(LONGEST_PAUSE).saturating_sub(died.elapsed())
            });
            if wait.is_zero()
                && let Err(error) = self.start_engine()
            {
                tracing::error!("Starting the engine: {error:#}; trying again");
                self.young_deaths += 1;
                self.died.get_or_insert((Instant::now(), "could not be started".into())).0 = Instant::now();
            }
            return;
        };
        let now = Instant::now();
        if now - engine.heard > SILENCE {
            tracing::error!(pid = engine.child.id(), "the engine is alive but does not answer: replacing it");
            let _ = pidfd_send_signal(&engine.pidfd, Signal::KILL);
            let _ = engine.child.wait();
            self.bury_engine("did not answer");
        } else if now - engine.pinged >= PING_EVERY {
            engine.pinged = now;
            self.order(&Order::Ping, &[]);
        }
    }

    fn start_engine(&mut self) -> anyhow::Result<()> {
        let (ours, theirs) = scm::pair().context("Making a socket")?;
        rustix::io::ioctl_fionbio(&ours, true).context("Making a socket non-blocking")?;
        let child = Command::new(&self.program)
            .arg("engine")
            .stdin(Stdio::from(theirs))
            .spawn()
            .with_context(|| format!("Running {} engine", self.program.display()))?;
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).context("Opening the engine's pidfd")?;
        let now = Instant::now();
        tracing::info!(pid = child.id(), "engine started");
        self.engine = Some(Engine { child, pidfd, socket: ours, serving: false, heard: now, pinged: now });
        let begin = Begin {
            keeper_pid: std::process::id(),
            restarts: self.restarts,
            since_unix_s: self.since_unix_s,
            store_budget: self.config.store_budget(),
            compression: self.config.compression,
            quarantine_ms: self.config.quarantine_ms,
            reader_gid: self.config.reader_gid,
        };
        self.order(&Order::Begin(begin), &[self.api.as_fd()]);
        let died = self.died.take();
        if let Some((at, how)) = &died {
            let message =
                format!("the engine {how}; its successor took over after {:.1} ms", at.elapsed().as_secs_f64() * 1e3);
            self.order(&Order::Note { vm: None, kind: "engine-replaced".into(), message }, &[]);
        }
        for vm in 0..self.vms.len() {
            self.open_vm(vm);
        }
        for client in self.clients.values() {
            if let Some(view) = &client.view {
                let since = died.as_ref().map(|(at, _)| monotonic_ns() - at.elapsed().as_nanos() as u64);
                self.add_view(client.pid, view, since);
            }
        }
        for (_, order) in self.pending.values() {
            self.order(order, &[]);
        }
        self.order(&Order::Serve, &[]);
        Ok(())
    }

    /// Send an order. An engine that does not take it is as good as dead; the next round sees to it.
    fn order(&self, order: &Order, fds: &[BorrowedFd<'_>]) {
        let Some(engine) = &self.engine else { return };
        let bytes = wire::encode(order);
        // The queue of a datagram socket is short. An engine that is busy opening VMs gets a moment; one that hangs is
        // replaced by `keep_engine`, because it also stops answering pings.
        for _ in 0..2000 {
            match scm::send(&engine.socket, &bytes, fds) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    let mut ready = [PollFd::new(&engine.socket, PollFlags::OUT)];
                    let _ = poll(&mut ready, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 5_000_000 }));
                }
                Err(error) => return tracing::warn!("Giving the engine an order: {error}"),
                Ok(()) => return,
            }
        }
        tracing::error!(pid = engine.child.id(), "the engine takes no orders: replacing it");
        let _ = pidfd_send_signal(&engine.pidfd, Signal::KILL);
    }

    fn open_vm(&self, index: usize) {
        let vm = &self.vms[index];
        let mut fds = vec![vm.state.fd(), vm.arena.as_fd()];
        fds.extend(vm.ram.iter().map(|ram| ram.as_ref().map_or(vm.state.fd(), |(fd, _)| fd.as_fd())));
        let order =
            Order::OpenVm { vm: vm.state.id(), vmm: vm.vmm.clone(), pinned: vm.pinned.clone(), may_pin: vm.may_pin };
        self.order(&order, &fds);
    }

    fn add_view(&self, pid: u32, view: &ClientView, unserved_since_ns: Option<u64>) {
        let order = Order::AddView {
            vm: view.vm,
            pid,
            uffd_features: view.uffd_features,
            spans: view.spans.clone(),
            unserved_since_ns,
        };
        self.order(&order, &[view.uffd.as_fd(), view.control.as_fd()]);
    }

    fn hear_engine(&mut self) {
        let Some(engine) = &mut self.engine else { return };
        let Ok(Some(received)) = scm::receive(&engine.socket) else { return };
        engine.heard = Instant::now();
        match wire::decode::<Report>(&received.bytes) {
            Ok(Report::Pong) => {}
            Ok(Report::Serving) => {
                engine.serving = true;
                self.young_deaths = 0;
            }
            Ok(Report::Done { seq, result }) => {
                if let Some((client, order)) = self.pending.remove(&seq) {
                    if let (Order::RemoveRegion { vm, hva, .. }, Ok(())) = (&order, &result) {
                        self.forget_region(client, *vm, *hva);
                    }
                    self.answer(client, &result.map_or_else(KeeperToClient::Refused, |()| KeeperToClient::Ok), &[]);
                }
            }
            Err(error) => tracing::error!("The engine sent nonsense: {error}"),
        }
    }

    fn bury_engine(&mut self, how: &str) {
        let Some(mut engine) = self.engine.take() else { return };
        let status = engine.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        let how = format!("{how} ({status})");
        tracing::error!(pid = engine.child.id(), "the engine {how}: starting another");
        self.restarts += 1;
        self.young_deaths += u32::from(!engine.serving);
        self.died = Some((Instant::now(), how));
    }

    // ---- clients ----

    fn accept(&mut self, listener: BorrowedFd<'_>) {
        while let Ok(socket) = rustix::net::accept_with(listener, rustix::net::SocketFlags::CLOEXEC) {
            let Ok(peer) = rustix::net::sockopt::socket_peercred(&socket) else { continue };
            if self.clients.len() >= MOST_CLIENTS {
                tracing::warn!("{MOST_CLIENTS} clients are connected: refusing another");
                continue;
            }
            if let Err(error) = rustix::io::ioctl_fionbio(&socket, true) {
                tracing::warn!("Making a client socket non-blocking: {error}");
                continue;
            }
            let pid = peer.pid.as_raw_nonzero().get() as u32;
            self.clients.insert(self.next_client, Client { socket, pid, view: None });
            self.next_client += 1;
        }
    }

    fn hear_client(&mut self, key: u64) {
        let received = match scm::receive(&self.clients[&key].socket) {
            Ok(Some(received)) => received,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
            Ok(None) => return self.drop_client(key, "is gone"),
            Err(error) => return self.drop_client(key, &error.to_string()),
        };
        let Received { bytes, fds } = received;
        let refused = match wire::decode::<ClientToKeeper>(&bytes) {
            Err(error) => Err(error.to_string()),
            Ok(ClientToKeeper::Attach(attach)) => self.attach(key, attach, fds),
            Ok(ClientToKeeper::AddRegion(info)) => self.add_region(key, info, fds),
            Ok(ClientToKeeper::RemoveRegion(hva)) => {
                self.ask_engine(key, |seq, vm, pid| Order::RemoveRegion { seq, vm, pid, hva })
            }
            Ok(ClientToKeeper::Pin(reason)) => self.pin(key, reason),
            Ok(ClientToKeeper::MayPin) => self.may_pin(key),
        };
        if let Err(reason) = refused {
            tracing::warn!(pid = self.clients[&key].pid, "refused: {reason}");
            self.answer(key, &KeeperToClient::Refused(reason), &[]);
        }
    }

    fn answer(&self, key: u64, answer: &KeeperToClient, fds: &[BorrowedFd<'_>]) {
        let Some(client) = self.clients.get(&key) else { return };
        if let Err(error) = scm::send(&client.socket, &wire::encode(answer), fds) {
            tracing::warn!(pid = client.pid, "Answering a client: {error}");
        }
    }

    fn drop_client(&mut self, key: u64, why: &str) {
        let Some(Client { pid, view: Some(view), .. }) = self.clients.remove(&key) else { return };
        self.pending.retain(|_, (client, _)| *client != key);
        let vm = view.vm;
        self.order(&Order::RemoveView { vm, pid }, &[]);
        if !self.clients.values().any(|client| client.view.as_ref().is_some_and(|view| view.vm == vm)) {
            tracing::info!(
                vm = self.vm(vm).map(|vm| vm.state.name()),
                pid,
                "the VM's process {why}: forgetting the VM"
            );
            self.order(&Order::CloseVm { vm }, &[]);
            self.vms.retain(|entry| entry.state.id() != vm);
        }
    }

    fn vm(&self, id: VmId) -> Option<&VmEntry> {
        self.vms.iter().find(|vm| vm.state.id() == id)
    }

    fn attach(&mut self, key: u64, attach: Attach, fds: Vec<OwnedFd>) -> Result<(), String> {
        if self.clients[&key].view.is_some() {
            return Err("this process is attached already".into());
        }
        let mut admitted = admit::admit(&attach, fds)?;
        if attach.resume.is_some_and(|id| self.vm(id).is_some()) {
            return Err("that VM is attached; only one that is not can be resumed".into());
        }
        let ids: HashSet<FileId> = admitted.ram.iter().map(|(_, id)| *id).collect();
        let shares = |vm: &VmEntry| vm.ram.iter().flatten().any(|(_, id)| ids.contains(id));
        let sharing = self.vms.iter().position(shares);
        let index = match (sharing, admitted.resumed.take()) {
            (Some(index), _) => index,
            (None, resumed) => {
                if self.vms.iter().any(|vm| vm.state.name() == attach.name) {
                    return Err(format!("a VM named {:?} is attached already", attach.name));
                }
                let entry = match resumed {
                    Some((state, arena)) => {
                        let ours = self.engine.as_ref().map(|engine| engine.child.id());
                        resume(&attach, state, arena, ours)?
                    }
                    None => create(&attach)?,
                };
                self.vms.push(entry);
                self.vms.len() - 1
            }
        };
        let is_new = sharing.is_none();
        let spans = match number_regions(&mut self.vms[index], &attach.regions, &mut admitted.ram, is_new) {
            Ok(spans) => spans,
            Err(reason) => {
                if is_new {
                    self.vms.pop();
                }
                return Err(reason);
            }
        };
        if let Some(reason) = &attach.pinned {
            self.vms[index].pinned = Some(reason.clone());
        }
        self.vms[index].may_pin |= attach.may_pin;
        let vm = self.vms[index].state.id();
        let pid = self.clients[&key].pid;
        if self.clients.values().any(|other| other.pid == pid && other.view.as_ref().is_some_and(|view| view.vm == vm))
        {
            return Err("this process is attached to that VM already".into());
        }
        let view = ClientView {
            vm,
            uffd: admitted.uffd,
            uffd_features: attach.uffd_features,
            control: admitted.control,
            spans,
        };
        if is_new {
            self.open_vm(index);
        } else {
            // A new engine would learn these from OpenVm; the one that runs must be told.
            if let Some(reason) = attach.pinned.clone() {
                self.order(&Order::Pin { seq: UNASKED, vm, reason }, &[]);
            }
            if attach.may_pin {
                self.order(&Order::MayPin { seq: UNASKED, vm }, &[]);
            }
        }
        self.add_view(pid, &view, None);
        self.clients.get_mut(&key).expect("checked above").view = Some(view);
        let entry = &self.vms[index];
        tracing::info!(vm = entry.state.name(), id = %vm, pid, regions = attach.regions.len(), "attached");
        let escrow = [entry.state.fd(), entry.arena.as_fd()].map(|fd| memfd::reopen(fd, false));
        let [Ok(state), Ok(arena)] = escrow else {
            return Err("the kernel would not open the state files read-only".into());
        };
        self.answer(key, &KeeperToClient::Attached(vm), &[state.as_fd(), arena.as_fd()]);
        Ok(())
    }

    fn add_region(&mut self, key: u64, info: RegionInfo, mut fds: Vec<OwnedFd>) -> Result<(), String> {
        let client = self.clients.get_mut(&key).expect("the caller looked it up");
        let Some(view) = &mut client.view else { return Err("attach first".into()) };
        let (Some(fd), true) = (fds.pop(), fds.is_empty()) else {
            return Err("a new region needs exactly one descriptor".into());
        };
        let mut all: Vec<RegionInfo> = view.spans.iter().map(|(span, _)| *span).collect();
        all.push(info);
        wire::check_regions(&all)?;
        let mut ram = [admit::check_ram(&info, fd)?];
        let entry = self.vms.iter_mut().find(|vm| vm.state.id() == view.vm).ok_or("the VM is gone")?;
        // Another view may have brought the region already.
        let known = find_region(entry, &info, ram[0].1, &[]);
        if known.is_some_and(|number| view.spans.iter().any(|(_, mapped)| *mapped == number)) {
            return Err(format!("region {} is mapped by this process already", info.hva));
        }
        let vm = view.vm;
        let foreign =
            |other: &VmEntry| other.state.id() != vm && other.ram.iter().flatten().any(|(_, id)| *id == ram[0].1);
        if self.vms.iter().any(foreign) {
            return Err(format!("region {} is RAM of another VM", info.hva));
        }
        let entry = self.vms.iter_mut().find(|entry| entry.state.id() == vm).ok_or("the VM is gone")?;
        let number = match known {
            Some(number) => number,
            None => append_region(entry, &info, &mut ram[0])?,
        };
        view.spans.push((info, number));
        let pid = client.pid;
        let entry = self.vm(vm).ok_or("the VM is gone")?;
        let Some((fd, _)) = entry.ram.get(number as usize).and_then(Option::as_ref) else {
            return Err(format!("region {} was unplugged", info.hva));
        };
        let fd = fd.as_fd();
        self.order(&Order::AddRegion { vm, pid, info, number }, &[fd]);
        self.answer(key, &KeeperToClient::Ok, &[]);
        Ok(())
    }

    fn forget_region(&mut self, key: u64, vm: VmId, hva: ballast_base::Hva) {
        let Some(view) = self.clients.get_mut(&key).and_then(|client| client.view.as_mut()) else { return };
        let Some(at) = view.spans.iter().position(|(span, _)| span.hva == hva) else { return };
        let (_, number) = view.spans.remove(at);
        let vm = self.vms.iter_mut().find(|entry| entry.state.id() == vm);
        if let Some(ram) = vm.and_then(|vm| vm.ram.get_mut(number as usize)) {
            *ram = None;
        }
    }

    fn pin(&mut self, key: u64, reason: String) -> Result<(), String> {
        if reason.len() > 256 {
            return Err("the reason is longer than 256 bytes".into());
        }
        let id = self.clients[&key].view.as_ref().ok_or("attach first")?.vm;
        if let Some(vm) = self.vms.iter_mut().find(|vm| vm.state.id() == id) {
            vm.pinned = Some(reason.clone());
        }
        self.ask_engine(key, |seq, vm, _| Order::Pin { seq, vm, reason })
    }

    fn may_pin(&mut self, key: u64) -> Result<(), String> {
        let id = self.clients[&key].view.as_ref().ok_or("attach first")?.vm;
        if let Some(vm) = self.vms.iter_mut().find(|vm| vm.state.id() == id) {
            vm.may_pin = true;
        }
        self.ask_engine(key, |seq, vm, _| Order::MayPin { seq, vm })
    }

    /// Give the engine an order that the client waits for.
    fn ask_engine(&mut self, key: u64, order: impl FnOnce(u64, VmId, u32) -> Order) -> Result<(), String> {
        let client = &self.clients[&key];
        let Some(view) = &client.view else { return Err("attach first".into()) };
        let seq = self.next_seq;
        self.next_seq += 1;
        let order = order(seq, view.vm, client.pid);
        self.order(&order, &[]);
        self.pending.insert(seq, (key, order));
        Ok(())
    }
}

/// A VM nobody has seen before.
fn create(attach: &Attach) -> Result<VmEntry, String> {
    let mut id = [0; 16];
    let filled = rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty());
    if filled != Ok(id.len()) {
        return Err("the kernel gave no random numbers for the VM's id".into());
    }
    let state = StateFile::create(VmId(id), &attach.name).map_err(|error| format!("{error}"))?;
    state.set_limit(attach.limit);
    // The engine opens the store again, with the budget that counts.
    let budget = Budget::new(ballast_base::Bytes(0));
    let (_, arena) = RamStore::create(RamOptions::new(budget)).map_err(|error| format!("Making the store: {error}"))?;
    rustix::fs::fchmod(&arena, rustix::fs::Mode::from_raw_mode(0o600)).map_err(|error| error.to_string())?;
    Ok(VmEntry { state, arena, ram: Vec::new(), vmm: attach.vmm.clone(), pinned: None, may_pin: false })
}

/// A VM whose keeper died, or whose attach socket was cut. The engine of an earlier keeper may still be serving it: that
/// one must be gone before another begins. Our own engine was told to close the VM before this, and takes orders in turn.
fn resume(attach: &Attach, state: OwnedFd, arena: OwnedFd, ours: Option<u32>) -> Result<VmEntry, String> {
    let state = StateFile::open(state).map_err(|error| error.to_string())?;
    if Some(state.id()) != attach.resume {
        return Err("the state file is another VM's".into());
    }
    if let Some((pid, start)) = state.engine().filter(|(pid, _)| Some(*pid) != ours) {
        end_engine(pid, start).map_err(|error| format!("Ending the engine of the last keeper: {error}"))?;
    }
    let ram = state.regions().iter().map(|_| None).collect();
    Ok(VmEntry { state, arena, ram, vmm: attach.vmm.clone(), pinned: None, may_pin: false })
}

/// Kill the process `pid` if it is still the one that started at `start`, and wait until it is gone.
fn end_engine(pid: u32, start: u64) -> std::io::Result<()> {
    let Some(pid) = Pid::from_raw(pid as i32) else { return Ok(()) };
    let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(()) };
    if start_time(pid.as_raw_nonzero().get() as u32) != Some(start) {
        return Ok(());
    }
    tracing::warn!(pid = pid.as_raw_nonzero().get(), "ending the engine that the last keeper left behind");
    match pidfd_send_signal(&pidfd, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => return Err(error.into()),
    }
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 }))?;
    if fds[0].revents().is_empty() {
        return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, "it does not die"));
    }
    Ok(())
}

/// When a process started, in clock ticks since boot; what tells it from a later one with the same pid.
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field may hold anything, spaces and parentheses included, up to the last closing one.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Give every region of an attach its number. A second view's regions must all be known; a new or resumed VM's are
/// matched with those of its state file, and what is new is added.
fn number_regions(
    vm: &mut VmEntry,
    regions: &[RegionInfo],
    ram: &mut Vec<(OwnedFd, FileId)>,
    may_add: bool,
) -> Result<Vec<(RegionInfo, u32)>, String> {
    let mut spans = Vec::new();
    for (info, mut file) in regions.iter().zip(ram.drain(..)) {
        let number = match find_region(vm, info, file.1, &spans) {
            Some(number) => number,
            None if may_add => append_region(vm, info, &mut file)?,
            None => {
                let name = vm.state.name();
                return Err(format!(
                    "region {} is not RAM of VM {name:?}, whose other RAM this process maps",
                    info.hva
                ));
            }
        };
        vm.ram[number as usize].get_or_insert(file);
        spans.push((*info, number));
    }
    if may_add {
        // On resume: what this process does not map any more was unplugged while no keeper ran.
        for (number, ram) in vm.ram.iter().enumerate() {
            if ram.is_none() {
                vm.state.remove_region(number as u32);
            }
        }
    }
    Ok(spans)
}

fn find_region(vm: &VmEntry, info: &RegionInfo, file: FileId, taken: &[(RegionInfo, u32)]) -> Option<u32> {
    let same = |(number, record): &(usize, ballast_pager::state_file::RegionRecord)| {
        !record.removed
            && record.file == file
            && record.file_offset == info.file_offset
            && record.pages.bytes() == info.len
            && !taken.iter().any(|(_, other)| *other == *number as u32)
    };
    vm.state.regions().into_iter().enumerate().find(same).map(|(number, _)| number as u32)
}

fn append_region(vm: &mut VmEntry, info: &RegionInfo, file: &mut (OwnedFd, FileId)) -> Result<u32, String> {
    let pages: PageCount = info.len.pages_floor();
    let shares_bytes = vm.state.regions().into_iter().any(|record| {
        let other = RegionInfo { hva: info.hva, len: record.pages.bytes(), file_offset: record.file_offset };
        !record.removed && record.file == file.1 && admit::overlap(info, &other)
    });
    if shares_bytes {
        return Err(format!("region {} overlaps, in its file, another region of this VM", info.hva));
    }
    let number = vm.state.add_region(file.1, info.file_offset, pages).map_err(|error| error.to_string())?;
    let fd = file.0.try_clone().map_err(|error| format!("Duplicating a descriptor: {error}"))?;
    vm.ram.push(Some((fd, file.1)));
    Ok(number)
}
