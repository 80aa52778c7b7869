//! A ballastd for one test: real keeper, real engine, in a temporary directory; killed at the end of the test.

#![allow(dead_code)]

pub mod agent;
pub mod guest;
pub mod parking;
pub mod pooled;
pub mod raw;
pub mod soak;
pub mod upgrades;
pub mod vmm;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ballast_api::{Client, Event, HostStat, VmStat};
use ballast_base::Bytes;
use ballast_store::{Budget, FileOptions, FileStore};
pub use ballast_testkit::missing;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

/// A short quarantine, so that pages move all the time and events meet every state.
pub const QUICK: &str = "quarantine_ms = 5\n";
/// A guest with half-compressible data and busy threads: hot pages stay, others are evicted and restored.
pub const BUSY: &str = "--workload uniform --ram 48M --limit 16M --threads 2 --zero-fraction 0.1";

/// Shared by each thread that starts a process. A thread that holds it exclusively knows that no child has a copy of
/// its descriptors, as each child has between fork and exec.
pub static FORKS: RwLock<()> = RwLock::new(());

pub fn may_fork() -> RwLockReadGuard<'static, ()> {
    FORKS.read().unwrap_or_else(PoisonError::into_inner)
}

/// A killed engine is gone within this time, unless a VMM that hangs keeps one of its threads.
const GOES_WITHIN: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// A delay of 0 to 40 ms that varies with the round, independent of a clock's phase.
pub fn moment(round: u32) -> Duration {
    Duration::from_micros(u64::from(round).wrapping_mul(7919) % 40_000)
}

pub struct Daemon {
    dir: tempfile::TempDir,
    keeper: Child,
    pub api: Client,
}

impl Daemon {
    /// Starts a daemon with this configuration (TOML, without `runtime_dir`).
    pub fn start(config: &str) -> Self {
        Self::start_within(config, None)
    }

    /// Like [`Self::start`]; `None`, with a message, without userfaultfd.
    pub fn with_uffd(config: &str) -> Option<Self> {
        (!raw::no_uffd()).then(|| Self::start(config))
    }

    /// Like [`Self::start`], with at most this number of descriptors.
    pub fn start_within(config: &str, descriptors: Option<u32>) -> Self {
        let dir = tempfile::Builder::new().prefix("ballast-test-").tempdir().expect("temporary directory");
        std::fs::write(dir.path().join("ballastd.toml"), config).expect("write the configuration");
        let api = Client::new(dir.path().join("api.sock")).expect("client").retry_for(Duration::from_secs(30));
        let keeper = spawn_keeper(dir.path(), descriptors);
        let daemon = Self { dir, keeper, api };
        until("the daemon opens its API socket", || daemon.dir().join("api.sock").exists());
        daemon.host();
        daemon
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn attach_socket(&self) -> PathBuf {
        self.dir().join("attach.sock")
    }

    pub fn host(&self) -> HostStat {
        self.api.host().expect("ask the daemon")
    }

    /// The daemon's figures of a VM. Waits for the VM, because a new engine may not have opened it yet.
    pub fn vm(&self, name: &str) -> VmStat {
        let start = Instant::now();
        loop {
            match self.api.vm(name) {
                Ok(vm) => return vm,
                Err(_) if start.elapsed() < Duration::from_secs(60) => std::thread::sleep(Duration::from_millis(5)),
                Err(error) => panic!("VM {name}: {error}\n{}", self.log()),
            }
        }
    }

    pub fn ballast(&self) -> Command {
        let mut command = Command::new(built("ballast"));
        command.arg("--socket").arg(self.dir().join("api.sock"));
        command
    }

    pub fn kill_engine(&self) -> u32 {
        let pid = self.engine_pid().expect("an engine runs");
        kill(pid);
        pid
    }

    pub fn wait_for_engine_after(&self, old: u32) {
        until("another engine answers", || self.api.host().is_ok_and(|host| host.engine_pid != old));
    }

    pub fn replace_engine(&self) {
        self.wait_for_engine_after(self.kill_engine());
    }

    pub fn kill_keeper(&mut self) {
        soak::killed();
        self.keeper.kill().expect("kill the keeper");
        self.keeper.wait().expect("reap the keeper");
    }

    pub fn wait_for_keeper_to_die(&mut self) {
        until("the keeper dies", || self.keeper.try_wait().expect("reap the keeper").is_some());
    }

    pub fn signal_keeper(&self, signal: Signal) {
        signal_process(self.keeper.id(), signal);
    }

    pub fn keeper_pid(&self) -> u32 {
        self.keeper.id()
    }

    pub fn engines(&self) -> Vec<u32> {
        let keeper = self.keeper_pid();
        let children = std::fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).unwrap_or_default();
        // A killed engine may still exist, while the kernel keeps one of its threads.
        children.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).filter(|pid| is_running(*pid)).collect()
    }

    pub fn engine_pid(&self) -> Option<u32> {
        self.engines().first().copied()
    }

    pub fn restart_keeper(&mut self) {
        self.keeper = spawn_keeper(self.dir.path(), None);
    }

    /// Kills the keeper, if `with_engine` also its engine, and starts a keeper again. Returns when its engine answers.
    pub fn kill_and_restart_keeper(&mut self, with_engine: bool) {
        let engine = self.engine_pid().expect("an engine");
        self.kill_and_restart_keeper_of(engine, with_engine);
    }

    /// Like [`Self::kill_and_restart_keeper`], when `engine` is the keeper's engine.
    pub fn kill_and_restart_keeper_of(&mut self, engine: u32, with_engine: bool) {
        self.kill_keeper();
        if with_engine {
            kill(engine);
        }
        self.restart_keeper();
        self.wait_for_engine_after(engine);
    }

    /// By round, kills the engine alone, the keeper alone (the next keeper ends its engine), or both. Returns when the
    /// next engine answers.
    pub fn kill_any(&mut self, round: u32) {
        match round % 3 {
            0 => self.replace_engine(),
            kills => self.kill_and_restart_keeper(kills == 2),
        }
    }

    pub fn restart_with(&mut self, config: &str) {
        std::fs::write(self.dir().join("ballastd.toml"), config).expect("write the configuration");
        self.kill_and_restart_keeper(true);
    }

    pub fn goes_to_file_and_back(&self, name: &str) {
        let mut first = None;
        until("pages go to the file and come back", || {
            let Ok(vm) = self.api.vm(name) else { return false };
            let now = (vm.reclaim.spilled_pages, vm.faults.file);
            let then = *first.get_or_insert(now);
            now.0 > then.0 && now.1 > then.1
        });
    }

    pub fn events(&self, kind: &str) -> Vec<Event> {
        let mut events = self.api.events().unwrap_or_default();
        events.retain(|event| event.kind == kind);
        events
    }

    pub fn has_event_of(&self, vm: &str, kind: &str) -> bool {
        self.events(kind).iter().any(|event| event.vm.as_deref() == Some(vm))
    }

    pub fn evicts(&self, name: &str) {
        until("pages go out and come back", || {
            let vm = self.vm(name);
            vm.reclaim.evicted_pages > 0 && vm.faults.restore > 0
        });
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir().join("log")).unwrap_or_default()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("keeper and engines wrote:\n{}\nVMs: {:#?}", self.log(), self.api.vms());
        }
        // Waits for the end of all engines, because their VMs' memory, huge pages for instance, would be missing in the
        // next test.
        let named = |pid: u32| pidfd_open(Pid::from_raw(pid as i32)?, PidfdFlags::empty()).ok();
        let engines: Vec<_> = self.engines().into_iter().filter_map(named).collect();
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
        for engine in engines {
            let _ = pidfd_send_signal(&engine, Signal::KILL);
            let _ = poll(&mut [PollFd::new(&engine, PollFlags::IN)], Some(&GOES_WITHIN));
        }
    }
}

fn spawn_keeper(dir: &Path, descriptors: Option<u32>) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(dir.join("log")).expect("open the log");
    let limit = descriptors.map_or(String::new(), |most| format!("ulimit -n {most}; "));
    let told = std::env::var("BALLAST_LOG").unwrap_or_else(|_| "info,ballast_keeper=debug".into());
    let _forks = may_fork();
    // The shell becomes the keeper, and is this process's child.
    Command::new("sh")
        .env("BALLAST_LOG", told)
        .args(["-c", &format!("{limit}exec \"$@\""), "sh"])
        .arg(env!("CARGO_BIN_EXE_ballastd"))
        .arg("--config")
        .arg(dir.join("ballastd.toml"))
        .arg("--runtime-dir")
        .arg(dir)
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("start ballastd")
}

/// Sets the most descriptors of a process. Returns whether that was possible.
pub fn limit_descriptors(pid: u32, most: &str) -> bool {
    let _forks = may_fork();
    let set = Command::new("prlimit").args([format!("--pid={pid}"), format!("--nofile={most}:")]).output();
    set.expect("prlimit").status.success()
}

pub fn built(name: &str) -> PathBuf {
    let file = PathBuf::from(env!("CARGO_BIN_EXE_ballastd")).with_file_name(name);
    assert!(file.is_file(), "{} is not built: run `cargo build --workspace` first", file.display());
    file
}

pub fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

pub fn kill(pid: u32) {
    soak::killed();
    signal_process(pid, Signal::KILL);
}

pub fn signal_process(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid as i32) {
        let _ = kill_process(pid, signal);
    }
}

/// Stops a process, and waits until each of its threads has stopped, which a signal does not wait for.
pub fn stop_process(pid: u32) {
    signal_process(pid, Signal::STOP);
    let has_stopped = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['T', 'Z', 'X']))
    };
    until("all of its threads have stopped", || {
        std::fs::read_dir(format!("/proc/{pid}/task")).expect("it is there").flatten().all(has_stopped)
    });
}

/// The result of a thread. Panics if the thread panicked, or does not end.
pub fn joined<T>(what: &str, thread: JoinHandle<T>) -> T {
    until(what, || thread.is_finished());
    thread.join().expect("no panic")
}

pub fn spilling(store_budget: &str, dir: &Path) -> String {
    let dir = dir.display();
    format!("{QUICK}store_budget = \"{store_budget}\"\n[spill]\ndir = \"{dir}\"\nbudget = \"256M\"\nafter_s = 1\n")
}

/// Whether there can be no file store here; prints the reason.
pub fn no_disk() -> bool {
    let made = FileStore::create(&std::env::temp_dir(), FileOptions::new(Budget::new(Bytes(2 << 20))));
    missing("disk", made.err().map(|error| error.to_string()))
}

/// Panics after five minutes.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(300), "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
