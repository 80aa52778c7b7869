//! The keeper's loop: the events that it waits for, and its checks in between.
//!
//! Before: `ballastd` is started, or another program became it. After: it is killed, or becomes another program.
//! Threads: the keeper's one, which waits in `poll` for clients, the engine's replies and the engine's death.
//! Promise: no two keepers have one runtime directory. No call of the loop waits for another process.
//!
//! | Event | Read by | Changes |
//! |---|---|---|
//! | a process connects | `client` | the connections |
//! | a client's message, or its end | `clients`, `attach` | its connection, its VM |
//! | an engine's message | `engine_child` | what the order was about: a client's wait, an upgrade, a VM that ends |
//! | an engine's death, or its silence | `engine_child`, `upgrade` | the engines; then the place of each VM |
//! | a killed engine of an earlier keeper is gone | `engine_child` | the place of each VM that waits for that |
//! | a search or a deadline is over | `resume`, `upgrade`, `making`, `replace` | the VM; the upgrade; the attach |

use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ballast_sys::memory_error;
use ballast_sys::presence;
use ballast_sys::priority::run_beside;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::engine::{PING_EVERY, Who};
use crate::engines::Engines;
use crate::keeper::{Keeper, SOON, Standing};
use crate::options::Options;
use crate::program::Program;
use crate::replace::{self, Follow};
use crate::vms::Vm;

/// How long to try to get the lock.
const LOCKS_WITHIN: Duration = Duration::from_secs(1);

/// Runs a new keeper until it is killed.
pub fn run(options: Options) -> anyhow::Result<()> {
    // Whatever the umask is, no other user may write there.
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(&options.runtime_dir);
    made.with_context(|| format!("Making the directory {}", options.runtime_dir.display()))?;
    // Never closed, because the lock would go with it.
    let lock = lock(&options.runtime_dir.join("keeper.lock"), LOCKS_WITHIN)?.into_raw_fd();
    raise_descriptor_limit();
    let errors_seen = memory_error::install().context("Preparing for memory errors")?;
    let attach = listen(&options.attach_socket, rustix::net::SocketType::SEQPACKET, options.attach_gid)?;
    let api = listen(&options.api_socket, rustix::net::SocketType::STREAM, options.reader_gid)?;
    let program = std::env::current_exe().and_then(Program::own).context("Finding this program's own file")?;
    tracing::info!(attach = %options.attach_socket.display(), api = %options.api_socket.display(), "ready");
    let engines = Engines::new(program, options.engine.clone(), api);
    let mut keeper = Keeper::new(options, engines);
    keeper.standing = Some(Standing { lock, attach: Arc::new(attach) });
    keeper.serve(&errors_seen)
}

/// Continues as the keeper that the previous program was: in this process, with its record. Runs until killed.
pub fn follow(follow: &Follow) -> anyhow::Result<()> {
    raise_descriptor_limit();
    let errors_seen = memory_error::install().context("Preparing for memory errors")?;
    let keeper = replace::follow(follow)?;
    run_beside();
    keeper.serve(&errors_seen)
}

/// One keeper at a time: two would fight for the sockets. The lock belongs to the open file, and no other user can open
/// that file, so nobody else can hold the lock. A client that sends the file takes nothing from this process; a lock of
/// the process (`F_SETLK`) would go when any descriptor of the file is closed. An engine that is being started has a
/// copy of the descriptor for a moment, so the lock is tried for a while.
fn lock(path: &Path, at_most: Duration) -> anyhow::Result<std::fs::File> {
    let options = std::fs::File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = options.with_context(|| format!("Opening {}", path.display()))?;
    file.set_permissions(PermissionsExt::from_mode(0o600))
        .with_context(|| format!("Making {} ours alone", path.display()))?;
    let begun = Instant::now();
    loop {
        match presence::alone(&file, 0) {
            Ok(true) => return Ok(file),
            Ok(false) if begun.elapsed() < at_most => std::thread::sleep(SOON),
            Ok(false) => bail!("Locking {}: is another ballastd running?", path.display()),
            Err(error) => return Err(error).with_context(|| format!("Locking {}", path.display())),
        }
    }
}

/// Raises the limit of descriptors, because every VM takes a handful.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!("Raising the descriptor limit: {error}");
    }
}

/// Listens at this path, without blocking. At any moment there is a socket under the name, the old or the new one, and
/// never with a wrong mode: the new one replaces the old one when it is ready.
pub fn listen(path: &Path, kind: rustix::net::SocketType, gid: Option<u32>) -> anyhow::Result<OwnedFd> {
    let bind = || -> std::io::Result<OwnedFd> {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, socket_with};
        let new = path.with_extension("new");
        match std::fs::remove_file(&new) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let fd = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
        rustix::net::bind(&fd, &SocketAddrUnix::new(&new)?)?;
        let mode = if gid.is_some() { 0o660 } else { 0o600 };
        if let Some(gid) = gid {
            std::os::unix::fs::chown(&new, None, Some(gid))?;
        }
        std::fs::set_permissions(&new, PermissionsExt::from_mode(mode))?;
        // A long queue, so that VMs that attach at once are not refused; the kernel's own limit may be lower.
        rustix::net::listen(&fd, 4096)?;
        std::fs::rename(&new, path)?;
        Ok(fd)
    };
    bind().with_context(|| format!("Listening on {}", path.display()))
}

impl Keeper {
    fn serve(mut self, errors_seen: &OwnedFd) -> anyhow::Result<()> {
        let attach = self.standing.as_ref().context("No listening socket")?.attach.clone();
        loop {
            self.keep_engines();
            self.tend_clients(Instant::now());
            self.tell_losses(errors_seen);
            let is_searching = self.tend_vms(Instant::now());
            let fences = self.tend_fences();
            self.tend_making();
            let upgrade = self.tend_upgrade();
            let replacing = self.tend_replacing();
            let soonest = fences.into_iter().chain(upgrade).chain(replacing).min();
            let is_soon = self.engines.get(Who::Engine).is_none() || is_searching;
            let pause = if is_soon { SOON } else { soonest.unwrap_or(PING_EVERY) };
            self.turn(&attach, pause)?;
        }
    }

    /// Reports which pages of state files this process found lost to memory errors; the files have the remembered
    /// contents now.
    fn tell_losses(&mut self, errors_seen: &OwnedFd) {
        if rustix::io::read(errors_seen, &mut [0; 8]).is_err() {
            return;
        }
        let lost = self.vms.iter().filter(|vm| vm.held.state().losses().pages > 0).map(Vm::name);
        for name in lost.collect::<Vec<_>>() {
            let message = format!("memory of the host failed under the state file of VM {name}; it was written again");
            self.note(name, "memory-error", message);
        }
    }

    /// Waits for one round of events, for at most `pause`, and handles them.
    fn turn(&mut self, attach: &OwnedFd, pause: Duration) -> anyhow::Result<()> {
        let is_heard = !self.is_hushed();
        let interests = self.clients.interests().filter(|_| is_heard);
        let (keys, others): (Vec<u64>, Vec<_>) =
            interests.map(|(key, fd, flags)| (key, PollFd::from_borrowed_fd(fd, flags))).unzip();
        let accepting = if is_heard && self.clients.accept_now() { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = vec![PollFd::new(attach, accepting)];
        let mut engines = Vec::new();
        for who in [Who::Engine, Who::Next] {
            if let Some(engine) = self.engines.get(who) {
                engines.push((who, engine.process(), fds.len()));
                fds.push(PollFd::from_borrowed_fd(engine.pidfd(), PollFlags::IN));
                let (socket, flags) = engine.interest();
                fds.push(PollFd::from_borrowed_fd(socket, flags));
            }
        }
        let first_client = fds.len();
        fds.extend(others);
        let first_dying = fds.len();
        fds.extend(self.engines.dying().map(|pidfd| PollFd::from_borrowed_fd(pidfd, PollFlags::IN)));
        let timeout = Timespec { tv_sec: pause.as_secs() as _, tv_nsec: pause.subsec_nanos() as _ };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // The limit of descriptors was lowered below the number that `poll` waits for.
            Err(rustix::io::Errno::INVAL) => {
                raise_descriptor_limit();
                std::thread::sleep(SOON);
                return Ok(());
            }
            Err(error) => return Err(error).context("Waiting for clients"),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        self.engines.forget_dying(&ready[first_dying..]);
        for (who, ..) in engines.iter().filter(|(.., at)| ready[at + 1]) {
            self.hear(*who);
            self.engines.flush(*who);
        }
        // The next engine first: if both are dead, neither may replace the other. It may have replaced the other by
        // now.
        for (who, process, _) in engines.into_iter().rev().filter(|(.., at)| ready[*at]) {
            if self.engines.process(who) == Some(process) {
                match who {
                    Who::Next => self.next_died(),
                    Who::Engine => self.reap_engine(),
                }
            }
        }
        for (key, _) in keys.into_iter().zip(&ready[first_client..first_dying]).filter(|(_, ready)| **ready) {
            self.hear_client(key);
        }
        if ready[0] {
            self.clients.accept(attach.as_fd());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_is_in_a_file_for_its_owner_alone_and_survives_a_close_of_that_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("keeper.lock");
        std::fs::write(&path, "").expect("write");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).expect("chmod");
        let held = lock(&path, Duration::ZERO).expect("nobody has it");
        assert_eq!(held.metadata().expect("stat").permissions().mode() & 0o777, 0o600);
        // As if a client had sent it.
        drop(std::fs::File::open(&path).expect("open"));
        let refused = lock(&path, Duration::ZERO).expect_err("it is held");
        assert!(refused.to_string().contains("another ballastd"), "{refused}");
        drop(held);
        lock(&path, LOCKS_WITHIN).expect("it went with its opening");
    }
}
