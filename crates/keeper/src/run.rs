//! The keeper: holds every descriptor, and sees to it that an engine runs.
//!
//! Before: systemd or a person starts `ballastd`. After: VMMs attach, engines come and go.
//! Threads: one, which waits in `poll` for clients, the engine's answers and the engine's death; nothing it does takes
//! long. What may take long ([`closer`], [`lost`]) has threads of its own that hold no keeper's state.
//! Promise: it never touches a page. An engine that dies, or no longer answers, is replaced at once and announced; when
//! the keeper itself dies, its engine serves on without reclaiming, and clients bring everything to the next keeper.
//!
//! [`clients`] listens to VMMs; [`attach`] makes VMs of them, with [`regions`] and [`lost`]; [`closing`] sees
//! them off; [`engine_child`] has the engine; [`fence`] knows when an engine that died can do no more to a VM.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use ballast_handover::orders::Order;
use ballast_sys::memory_error;
use ballast_sys::spawn::{Child, Starter};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use clients::{Asked, Clients};
pub use closer::{Closer, SentFd};
use closing::Closing;
use engine_child::{Engine, PING_EVERY};
use making::Making;
use options::Options;
use regions::VmEntry;

mod attach;
mod clients;
mod closer;
mod closing;
mod engine_child;
pub mod fence;
mod lost;
mod making;
pub mod options;
mod regions;

/// How long to wait at most while something must be looked at without anybody saying when.
const SOON: Duration = Duration::from_millis(20);

struct Keeper {
    file_stores: bool,
    /// What engines are to begin with: what the program was started with until an operator changed it.
    settings: Vec<u8>,
    program: PathBuf,
    starter: Starter,
    since_unix_s: u64,
    closer: Arc<Closer>,
    api: Arc<SentFd>,
    engine: Option<Engine>,
    /// Attaches that wait for their stores.
    making: Vec<Making>,
    /// Engines that died and have not been reaped: the kernel may keep threads of them.
    zombies: Vec<Child>,
    /// Readable when an engine of an earlier keeper, which was killed, is gone.
    dying: Vec<OwnedFd>,
    restarts: u64,
    /// Engines in a row that died before they served.
    young_deaths: u32,
    /// When and why the last engine went.
    died: Option<(Instant, String)>,
    /// Notes for the next engine's event list.
    unsaid: Vec<Order>,
    clients: Clients,
    next_client: u64,
    /// No connections are taken until then.
    accept_again: Option<Instant>,
    vms: Vec<VmEntry>,
    /// When the first pages of their state files are remembered next.
    remember_at: Instant,
    closing: Vec<Closing>,
    /// What clients wait for, by the number of the order.
    pending: BTreeMap<u64, Asked>,
    next_seq: u64,
}

/// Run until killed.
pub fn run(options: Options) -> anyhow::Result<()> {
    // Before anything else that an engine must not inherit.
    let starter = Starter::new().context("Opening /dev/null")?;
    std::fs::create_dir_all(&options.runtime_dir)
        .with_context(|| format!("Making the directory {}", options.runtime_dir.display()))?;
    let _lock = lock(&options.runtime_dir.join("keeper.lock"))?;
    raise_descriptor_limit();
    let errors_seen = memory_error::install().context("Preparing for memory errors")?;
    let attach = listen(&options.attach_socket, rustix::net::SocketType::SEQPACKET, options.attach_gid)?;
    let api = listen(&options.api_socket, rustix::net::SocketType::STREAM, options.reader_gid)?;
    let program = std::env::current_exe().context("Finding this program's own file")?;
    tracing::info!(attach = %options.attach_socket.display(), api = %options.api_socket.display(), "ready");
    Keeper::new(options, program, starter, api).serve(&attach, &errors_seen)
}

/// One keeper at a time: two would fight for the sockets. The lock is one that goes with the descriptor table, at once:
/// a `flock` would stay until a dead keeper has closed all files, and what a client sent may never close. An engine
/// that is just being started shares the table for a moment; so it is tried for a while.
fn lock(path: &Path) -> anyhow::Result<std::fs::File> {
    let file = std::fs::File::create(path).with_context(|| format!("Opening {}", path.display()))?;
    let begun = Instant::now();
    loop {
        match rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) if begun.elapsed() < Duration::from_secs(1) => {
                std::thread::sleep(SOON)
            }
            Err(error) => {
                return Err(error).with_context(|| format!("Locking {}: is another ballastd running?", path.display()));
            }
        }
    }
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
        // Of VMs that attach at once none is turned away; the kernel takes its own limit if that is lower.
        rustix::net::listen(&fd, 4096)?;
        Ok(fd)
    };
    bind().with_context(|| format!("Listening on {}", path.display()))
}

impl Keeper {
    fn new(options: Options, program: PathBuf, starter: Starter, api: OwnedFd) -> Self {
        let closer = Closer::new();
        Self {
            since_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            settings: options.engine,
            file_stores: options.file_stores,
            program,
            starter,
            api: Arc::new(SentFd::new(api, 0, closer.clone())),
            closer,
            engine: None,
            making: Vec::new(),
            zombies: Vec::new(),
            dying: Vec::new(),
            restarts: 0,
            young_deaths: 0,
            died: None,
            unsaid: Vec::new(),
            clients: Clients::new(),
            next_client: 0,
            accept_again: None,
            vms: Vec::new(),
            remember_at: Instant::now(),
            closing: Vec::new(),
            pending: BTreeMap::new(),
            next_seq: 0,
        }
    }

    fn serve(mut self, attach: &OwnedFd, errors_seen: &OwnedFd) -> anyhow::Result<()> {
        loop {
            self.keep_engine();
            self.tend_clients(Instant::now());
            self.closer.tend(closer::HANGS_AFTER);
            self.tell_losses(errors_seen);
            let is_searching = self.tend_vms(Instant::now());
            let fences = self.tend_fences();
            self.tend_making();
            let pause = if self.engine.is_none() || is_searching { SOON } else { fences.unwrap_or(PING_EVERY) };
            self.turn(attach, pause)?;
        }
    }

    /// Say which pages of state files this process met that memory errors had cost; the files go on with what it
    /// remembers.
    fn tell_losses(&mut self, errors_seen: &OwnedFd) {
        if rustix::io::read(errors_seen, &mut [0; 8]).is_err() {
            return;
        }
        let lost = self.vms.iter().filter(|vm| vm.state.losses().pages > 0).map(|vm| vm.state.name());
        for name in lost.collect::<Vec<_>>() {
            let message = format!("memory of the host failed under the state file of VM {name}; it was written again");
            self.note(name, "memory-error", message);
        }
    }

    /// Wait for one round of events, at most so long, and handle them.
    fn turn(&mut self, attach: &OwnedFd, pause: Duration) -> anyhow::Result<()> {
        let (keys, others): (Vec<u64>, Vec<_>) = clients::interests(&self.clients)
            .map(|(key, fd, flags)| (key, PollFd::from_borrowed_fd(fd, flags)))
            .unzip();
        let accepting = if self.accepts() { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = vec![PollFd::new(attach, accepting)];
        if let Some(engine) = &self.engine {
            fds.push(PollFd::from_borrowed_fd(engine.child.pidfd(), PollFlags::IN));
            fds.push(PollFd::new(&engine.socket, engine.interest()));
        }
        let first_client = fds.len();
        fds.extend(others);
        let first_dying = fds.len();
        fds.extend(self.dying.iter().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
        let timeout = Timespec { tv_sec: pause.as_secs() as _, tv_nsec: pause.subsec_nanos() as _ };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("Waiting for clients"),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let mut gone = ready[first_dying..].iter();
        self.dying.retain(|_| gone.next() == Some(&false));
        if first_client == 3 {
            if ready[2] {
                self.hear_engine();
                if let Some(engine) = &mut self.engine {
                    engine.flush();
                }
            }
            if ready[1] {
                self.reap_engine();
            }
        }
        for (key, _) in keys.into_iter().zip(&ready[first_client..first_dying]).filter(|(_, ready)| **ready) {
            // One that was heard before it may have had to do with this one's end.
            if self.clients.contains_key(&key) {
                self.hear_client(key);
            }
        }
        if ready[0] {
            self.accept(attach.as_fd());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
