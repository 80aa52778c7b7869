//! A storm: VMs come, are stopped, moved between CPUs, parked and killed, by a seed. In any combination, the faults of
//! another VM are served, no byte is wrong, and all resources are released. Real processes, a real FUSE server. Needs
//! root; `BALLAST_KILLS` sets the number of steps (default 30), `STORM_SEED` repeats a run.

mod common;

use ballast_testkit::random::Random;
use ballast_testvm::fuse::{Fuse, Held};
use common::guest::Guest;
use common::parking::{fuse, park, parkable};
use common::{Daemon, kill, signal_process, until};
use rustix::process::{Pid, Signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const MOST_GUESTS: usize = 4;
const RAM: u64 = 16 << 20;

fn steps() -> u32 {
    std::env::var("BALLAST_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(30)
}

fn count(pid: u32, what: &str) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, Iterator::count)
}

struct Tossed<'a> {
    name: String,
    /// Whether it can be parked; `parked` while it is. Dropped before the guest, because a parked guest cannot die.
    can_park: bool,
    parked: Option<Held<'a>>,
    guest: Guest,
    is_stopped: bool,
}

impl Tossed<'_> {
    fn signal(&mut self, signal: Signal) {
        signal_process(self.guest.pid(), signal);
        self.is_stopped = signal == Signal::STOP;
    }

    fn scatter(&self, rng: &mut Random) {
        let all = sched_getaffinity(None).expect("affinity");
        let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect();
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", self.guest.pid())) else { return };
        for task in tasks.flatten().filter_map(|task| task.file_name().to_str()?.parse().ok()) {
            let mut only = CpuSet::new();
            only.set(rng.of(&cpus));
            let _ = sched_setaffinity(Pid::from_raw(task), &only);
        }
    }

    /// Lets it run to its end, where each byte is checked.
    fn finish(mut self) {
        drop(self.parked.take());
        self.signal(Signal::CONT);
        let stat = format!("/proc/{}/stat", self.guest.pid());
        let has_ended = || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") Z "));
        // A guest that has ended by itself reports why, below.
        if !has_ended() {
            self.guest.tell("stop\n");
        }
        // If its faults are not served, it never ends.
        until("it ends", has_ended);
        self.guest.finish();
    }
}

struct Storm<'a> {
    rng: Random,
    fuse: &'a Fuse,
    daemon: Daemon,
    bystander: Guest,
    others: Vec<Tossed<'a>>,
    started: usize,
}

impl<'a> Storm<'a> {
    fn begin(fuse: &'a Fuse) -> Self {
        let daemon = Daemon::start("quarantine_ms = 5\n");
        let bystander = Guest::start(&daemon, "bystander", "--workload uniform --ram 16M --limit 6M --threads 2");
        let rng = Random::seeded("STORM_SEED");
        let mut storm = Self { rng, fuse, daemon, bystander, others: Vec::new(), started: 0 };
        storm.bystander_is_served();
        storm
    }

    fn bystander_is_served(&mut self) {
        let restored = || self.daemon.api.vm("bystander").map_or(0, |vm| vm.faults.restore);
        let before = restored();
        until("pages of the bystander come back", || restored() > before);
    }

    fn start(&mut self) {
        self.started += 1;
        let name = format!("vm-{}", self.started);
        let (threads, can_park) = (self.rng.of(&[1, 2, 5]), self.rng.index(3) == 0);
        let args = format!("--workload uniform --ram 16M --limit 6M --threads {threads} --seed {}", self.started);
        let shards = self.rng.of(&["1", "3"]);
        let guest = match can_park {
            true => parkable(&self.daemon, self.fuse, &name, &args),
            false => Guest::start_with(&self.daemon, &name, &args, &[("BALLAST_FAULT_WORKERS", shards)]),
        };
        // The guest fills its memory once it is attached. If the keeper died before that, it would report an error.
        until("it has been filled", || self.daemon.api.vm(&name).is_ok_and(|vm| vm.reclaim.evicted_pages > 0));
        self.others.push(Tossed { name, guest, is_stopped: false, can_park, parked: None });
    }

    fn step(&mut self) {
        let may_start = self.others.len() < MOST_GUESTS && self.others.iter().all(|other| other.parked.is_none());
        if self.others.is_empty() || may_start && self.rng.index(3) == 0 {
            return self.start();
        }
        let at = self.rng.index(self.others.len());
        let is_anyone_parked = self.others.iter().any(|other| other.parked.is_some());
        let what = self.rng.index(8);
        let other = &mut self.others[at];
        match what {
            0 => {
                other.signal(Signal::KILL);
                self.release();
                self.others.swap_remove(at);
            }
            1 => {
                self.release();
                self.others.swap_remove(at).finish();
            }
            2 | 3 => other.signal(if other.is_stopped { Signal::CONT } else { Signal::STOP }),
            4 => other.scatter(&mut self.rng),
            // A parked guest does not respond.
            5 if other.parked.is_none() => {
                let limit = self.rng.of(&[None, Some(RAM / 8), Some(RAM / 2)]);
                // The VM may be gone, or not be there again yet.
                let _ = self.daemon.api.set_limit(&other.name, limit);
            }
            _ if other.parked.is_some() => other.parked = None,
            _ if other.can_park && !other.is_stopped && !is_anyone_parked => {
                other.can_park = false;
                other.parked = Some(park(self.fuse, &mut other.guest, 1));
            }
            _ => other.scatter(&mut self.rng),
        }
    }

    /// Unparks all guests. While one is parked, the file server does not respond, but a process that ends waits for it.
    fn release(&mut self) {
        self.others.iter_mut().for_each(|other| other.parked = None);
    }

    fn end(mut self) -> Daemon {
        self.release();
        self.others.into_iter().for_each(Tossed::finish);
        self.bystander.finish();
        self.daemon
    }
}

#[test]
fn vms_that_hang_move_and_die_delay_no_fault_and_leave_nothing_behind() {
    let Some(fuse) = fuse() else { return };
    let mut storm = Storm::begin(&fuse);
    let (keeper, engine) = (storm.daemon.keeper_pid(), storm.daemon.engine_pid().expect("an engine"));
    let keeps = || [count(keeper, "fd"), count(engine, "fd")];
    let before = keeps();
    for _ in 0..steps() {
        storm.step();
        storm.bystander_is_served();
    }
    let daemon = storm.end();
    until("all VMs are gone", || daemon.api.vms().is_ok_and(|vms| vms.is_empty()));
    assert_eq!(daemon.engine_pid(), Some(engine), "it is still the same engine\n{}", daemon.log());
    until("memory is given back", || daemon.host().store_bytes == 0);
    // The bystander was there before. A spare thread, which has a descriptor, ends when it is not needed.
    until("descriptors are given back", || {
        let now = keeps();
        now[0] <= before[0] && now[1] <= before[1] + 4
    });
    let threads = std::thread::available_parallelism().map_or(1, |cpus| cpus.get()) * 4 + 16;
    until("threads are given back", || count(engine, "task") <= threads);
    let log = daemon.log();
    assert!(!log.contains("panicked") && !log.contains("fault-forgotten"), "{log}");
}

#[test]
fn vms_that_hang_move_and_die_lose_no_byte_though_engine_and_keeper_also_die() {
    let Some(fuse) = fuse() else { return };
    let mut storm = Storm::begin(&fuse);
    for step in 0..steps() {
        storm.step();
        if step % 4 == 3 {
            let engine = storm.daemon.engine_pid().expect("an engine");
            match storm.rng.index(4) {
                0 => storm.daemon.kill_and_restart_keeper(false),
                1 => storm.daemon.kill_and_restart_keeper(true),
                _ => kill(engine),
            }
            storm.daemon.wait_for_engine_after(engine);
        }
        storm.bystander_is_served();
    }
    storm.end();
}
