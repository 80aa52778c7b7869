//! An upgrade with the real keeper and with engines that a test plays. In any order of events, no VM is given to one
//! engine while the other does more for it than serve its faults, and in the end one engine has all.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use ballast_base::wire::{self, VmId};
use ballast_handover::orders::{Order, Report, Stage as Shown};
use ballast_handover::state_file::StateFile;
use ballast_handover::table::Lost;
use ballast_sys::process::Process;
use ballast_sys::scm;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use crate::engine::{Engine, Who};
use crate::fence;
use crate::keeper::Keeper;
use crate::options::Options;
use crate::regions::At;
use crate::stage::Stage;
use crate::tests::attach_as;
use crate::waiting::{Answer, Asked};

const LOST: Lost = Lost { flags: 0, word: 0 };

/// Random numbers of a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// What an engine does for a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Does {
    All,
    /// It serves faults, and leaves.
    Leaves,
    /// It serves faults beside the one that leaves.
    Follows,
}

/// An engine that the test plays: a process that sleeps, and the other end of its socket.
struct Played {
    process: Process,
    socket: OwnedFd,
    /// Orders that it has not carried out.
    orders: Vec<(Order, Vec<OwnedFd>)>,
    /// VMs it has open.
    open: BTreeMap<VmId, (StateFile, Does)>,
    /// VMs whose faults it cannot serve alone.
    rigid: BTreeSet<VmId>,
    rests: bool,
    is_dead: bool,
    told: Option<Shown>,
}

impl Played {
    fn of(engine: &Engine) -> Self {
        // The process that sleeps never reads its end.
        let socket = pidfd_getfd(engine.child.pidfd(), 0, PidfdGetfdFlags::empty()).expect("its standard input");
        rustix::io::ioctl_fionbio(&socket, true).expect("non-blocking");
        Self {
            process: engine.process,
            socket,
            orders: Vec::new(),
            open: BTreeMap::new(),
            rigid: BTreeSet::new(),
            rests: false,
            is_dead: false,
            told: None,
        }
    }

    fn say(&self, report: &Report) {
        let _ = scm::send(&self.socket, &wire::encode(report), &[]);
    }

    fn done(&self, seq: u64, result: Result<(), &str>) {
        self.say(&Report::Done { seq, result: result.map_err(str::to_owned) });
    }

    fn listen(&mut self) {
        while let Ok(Some(received)) = scm::receive(&self.socket) {
            let order = wire::decode::<Order>(&received.bytes).expect("an order");
            self.orders.push((order, received.fds));
        }
    }
}

/// This process has been killed: it takes a moment to die.
fn die(process: Process) {
    let begun = Instant::now();
    while !process.is_dying() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it was not killed");
        std::thread::yield_now();
    }
}

/// What a played engine is allowed to do wrong.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Manners {
    Good,
    /// It says that it has opened what it has not.
    Lies,
    /// It refuses a VM that it looks at.
    Refuses,
    /// It cannot open a VM though it said so.
    Fails,
    /// It does nothing.
    Hangs,
}

struct World {
    keeper: Keeper,
    _dir: tempfile::TempDir,
    played: Vec<Played>,
}

impl World {
    fn new(vms: usize) -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let program = dir.path().join("engine");
        std::fs::write(&program, "#!/bin/sh\nexec sleep 1000\n").expect("write a script");
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("make it a program");
        std::fs::copy(&program, dir.path().join("other")).expect("another program");
        let (api, _) = scm::pair().expect("socket pair");
        let starter = ballast_sys::spawn::Starter::new().expect("a starter");
        let mut world =
            Self { keeper: Keeper::new(Options::default(), program, starter, api), _dir: dir, played: Vec::new() };
        world.keeper.keep_engine();
        world.play_new();
        for number in 0..vms {
            world.attach(number);
        }
        let engine = world.keeper.engine.as_mut().expect("an engine");
        engine.pulse.starting = None;
        world.act_all(Manners::Good);
        world
    }

    fn attach(&mut self, number: usize) -> VmId {
        let attach = attach_as(&format!("vm-{number}"), None);
        let entry = self.keeper.create(&attach, 0).expect("state and arena");
        let id = entry.state.id();
        self.keeper.vms.push(entry);
        self.keeper.hand_over(id, None);
        id
    }

    /// Take over the sockets of engines that the keeper has started.
    fn play_new(&mut self) {
        let next = self.keeper.upgrade.as_ref().map(|upgrade| &upgrade.next);
        for engine in self.keeper.engine.as_ref().into_iter().chain(next) {
            if self.played.iter().all(|played| played.process != engine.process) {
                self.played.push(Played::of(engine));
            }
        }
    }

    fn is_next(&self, at: usize) -> bool {
        let next = self.keeper.upgrade.as_ref().map(|upgrade| upgrade.next.process);
        next == Some(self.played[at].process)
    }

    /// Kill an engine and have it dead for certain; the keeper does not know yet.
    fn kill(&mut self, at: usize) {
        let pidfd = fence::kill(self.played[at].process).expect("kill");
        if let Some(pidfd) = pidfd {
            poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], None).expect("poll");
        }
        self.played[at].is_dead = true;
        self.played[at].open.clear();
    }

    /// Engines that the keeper has killed do nothing more.
    fn reap(&mut self) {
        for played in self.played.iter_mut().filter(|played| !played.is_dead && played.process.is_dying()) {
            played.is_dead = true;
            played.open.clear();
        }
    }

    /// The keeper's turn, as its loop takes it.
    fn keeper_turns(&mut self) {
        self.reap();
        self.keeper.hear(Who::Engine);
        self.keeper.hear(Who::Next);
        let is_dead = |process: Process| process.is_dying();
        if self.keeper.upgrade.as_ref().is_some_and(|upgrade| !upgrade.is_dead() && is_dead(upgrade.next.process)) {
            self.keeper.next_died();
        }
        if self.keeper.engine.as_ref().is_some_and(|engine| is_dead(engine.process)) {
            self.keeper.reap_engine();
            // Engines that die young are started ever more slowly.
            self.keeper.young_deaths = 0;
        }
        self.keeper.keep_engine();
        self.keeper.tend_fences();
        self.keeper.tend_upgrade();
        self.play_new();
        self.played.iter_mut().for_each(Played::listen);
    }

    /// This engine carries out its next order.
    fn act(&mut self, at: usize, manners: Manners) {
        self.reap();
        if self.played[at].is_dead || self.played[at].orders.is_empty() || manners == Manners::Hangs {
            return;
        }
        let (order, fds) = self.played[at].orders.remove(0);
        let others = self.played.iter().enumerate().filter(|(other, _)| *other != at);
        let others: BTreeMap<VmId, Does> = others
            .filter(|(_, engine)| !engine.is_dead)
            .flat_map(|(_, engine)| engine.open.iter().map(|(vm, (_, does))| (*vm, *does)))
            .collect();
        let me = &mut self.played[at];
        let process = me.process;
        match order {
            Order::CheckVm { seq, vm, .. } => {
                assert!(!me.open.contains_key(&vm));
                me.done(seq, if manners == Manners::Refuses { Err("it is too new") } else { Ok(()) });
            }
            Order::OpenVm { vm, beside, .. } => {
                assert!(!me.open.contains_key(&vm), "it was given twice");
                if manners == Manners::Good || manners == Manners::Refuses {
                    let state = StateFile::open(fds.into_iter().next().expect("a state file")).expect("open");
                    if state.engine() != Some((process.pid, process.start)) {
                        // An engine that finds this does nothing. The keeper has just killed it.
                        return die(process);
                    }
                    let other = others.get(&vm);
                    if beside {
                        assert!(matches!(other, None | Some(Does::Leaves)), "VM {vm}: the other engine does {other:?}");
                        state.open_beside(process.pid, process.start);
                        me.open.insert(vm, (state, Does::Follows));
                    } else {
                        assert_eq!(other, None, "VM {vm} was given to an engine while another one has it");
                        state.take_over(process.pid, process.start, LOST).expect("taken over");
                        me.open.insert(vm, (state, Does::All));
                    }
                }
            }
            Order::ServeFaults { seq, vm, .. } => {
                let can = !me.rigid.contains(&vm) && me.open.contains_key(&vm);
                if let Some((_, does)) = me.open.get_mut(&vm).filter(|_| can) {
                    assert_eq!(*does, Does::All);
                    *does = Does::Leaves;
                }
                me.done(seq, if can { Ok(()) } else { Err("it cannot do that alone") });
            }
            Order::Alone { vm } => {
                assert_eq!(others.get(&vm), None, "VM {vm} is not this engine's alone");
                if let Some((state, does)) = me.open.get_mut(&vm) {
                    assert_eq!((*does, state.leaving()), (Does::Follows, None));
                    *does = Does::All;
                }
            }
            Order::HandOver { seq, vm } => {
                let was_open = me.open.remove(&vm).is_some();
                me.done(seq, if was_open { Ok(()) } else { Err("it was not open") });
            }
            Order::Tell { seq, vm } => {
                let lies = manners == Manners::Lies;
                me.done(seq, if lies || me.open.contains_key(&vm) { Ok(()) } else { Err("it is not open") });
            }
            Order::CloseVm { seq, vm } => {
                assert_eq!(others.get(&vm), None, "VM {vm} is to end while another engine has it");
                me.open.remove(&vm);
                me.done(seq, Ok(()));
            }
            Order::Rest { seq } => {
                me.rests = true;
                me.done(seq, Ok(()));
            }
            Order::Resume => me.rests = false,
            Order::Serve => {
                me.rests = false;
                me.say(&Report::Serving);
            }
            Order::Leave => {
                assert!(me.open.is_empty(), "it leaves with VMs");
                self.kill(at);
            }
            Order::Ping => me.say(&Report::Pong),
            Order::Upgrading(now) => me.told = Some(now.stage),
            _ => {}
        }
    }

    fn act_all(&mut self, of_next: Manners) {
        for _ in 0..1000 {
            self.keeper_turns();
            let is_busy = |at: &usize| !self.played[*at].orders.is_empty() && !self.played[*at].is_dead;
            let busy: Vec<usize> = (0..self.played.len()).filter(is_busy).collect();
            for at in &busy {
                let manners = if self.is_next(*at) { of_next } else { Manners::Good };
                self.act(*at, manners);
            }
            if busy.is_empty() && self.keeper.upgrade.is_none() {
                return;
            }
        }
        if of_next != Manners::Hangs {
            panic!("no end: {:?}", self.keeper.last_upgrade);
        }
    }

    fn begin(&mut self) {
        let other = self._dir.path().join("other").display().to_string();
        self.keeper.begin_upgrade(other).expect("it begins");
        self.play_new();
    }

    /// One engine has all VMs, is the keeper's, and does not rest; no other engine is named.
    fn check_end(&self) -> usize {
        let engine = self.keeper.engine.as_ref().expect("an engine").process;
        // An engine that the keeper has just killed takes a moment to die.
        let others = self.played.iter().filter(|played| played.process != engine);
        others.for_each(|played| die(played.process));
        let alive: Vec<usize> = (0..self.played.len()).filter(|at| self.played[*at].process == engine).collect();
        let [only] = alive[..] else { panic!("{} engines live", alive.len()) };
        let last = &self.played[only];
        assert_eq!(last.process, engine);
        assert!(!last.rests, "it rests for ever");
        let known: BTreeSet<VmId> = self.keeper.vms.iter().map(|vm| vm.state.id()).collect();
        assert_eq!(last.open.keys().copied().collect::<BTreeSet<_>>(), known);
        assert!(last.open.values().all(|(_, does)| *does == Does::All), "{:?}", last.open);
        for vm in &self.keeper.vms {
            assert_eq!(vm.state.engine(), Some((engine.pid, engine.start)));
            assert!(vm.at == At::Engine && vm.fenced.is_none());
            assert_eq!(vm.state.leaving(), None);
        }
        assert_eq!(last.told, Some(self.keeper.last_upgrade.stage));
        only
    }
}

#[test]
fn every_vm_moves_to_the_engine_that_follows_and_back_again() {
    let mut world = World::new(9);
    let first = world.check_end();
    for round in 1..4 {
        world.begin();
        world.act_all(Manners::Good);
        let now = &world.keeper.last_upgrade;
        assert_eq!((now.number, now.stage, now.moved, now.checked), (round, Shown::Done, 9, 9), "{now:?}");
        assert_eq!(now.longest_gap_us, 0, "none was without an engine");
        assert_ne!(world.check_end(), first);
        assert_eq!(world.keeper.restarts, 0);
    }
}

#[test]
fn an_engine_that_refuses_or_lies_or_cannot_is_ended_and_the_other_one_has_all_vms() {
    for (manners, why) in [
        (Manners::Refuses, "cannot serve VM vm-"),
        (Manners::Lies, "has not opened it"),
        (Manners::Fails, "it is not open"),
    ] {
        let mut world = World::new(6);
        let first = world.check_end();
        world.begin();
        world.act_all(manners);
        let now = world.keeper.last_upgrade.clone();
        assert!(now.stage == Shown::Failed && now.message.contains(why), "{manners:?}: {now:?}");
        assert_eq!(world.check_end(), first);
        world.begin();
        world.act_all(Manners::Good);
        assert_eq!(world.keeper.last_upgrade.stage, Shown::Done, "after {manners:?}");
        assert_ne!(world.check_end(), first);
    }
}

#[test]
fn an_engine_that_says_nothing_is_not_waited_for_for_ever() {
    let mut world = World::new(2);
    let first = world.check_end();
    world.begin();
    world.act_all(Manners::Hangs);
    assert_eq!(world.keeper.upgrade.as_ref().map(|upgrade| upgrade.stage), Some(Stage::Checking));
    // As if that number of rounds had passed.
    for _ in 0..30 {
        if let Some(upgrade) = &mut world.keeper.upgrade {
            upgrade.age(Duration::from_secs(1));
        }
        world.keeper_turns();
    }
    world.act_all(Manners::Good);
    let now = &world.keeper.last_upgrade;
    assert!(now.stage == Shown::Failed && now.message.contains("in time"), "{now:?}");
    assert_eq!(world.check_end(), first);
}

#[test]
fn vms_that_come_all_the_time_do_not_keep_an_upgrade_from_its_end() {
    let mut world = World::new(2);
    world.begin();
    let (mut came, mut turns) = (0, 0);
    while world.keeper.upgrade.is_some() {
        came += 1;
        world.attach(10 + came);
        world.keeper_turns();
        for at in 0..world.played.len() {
            world.act(at, Manners::Good);
        }
        turns += 1;
        assert!(turns < 300, "no end: {:?}", world.keeper.last_upgrade);
    }
    world.act_all(Manners::Good);
    assert_eq!(world.keeper.last_upgrade.stage, Shown::Done);
    world.check_end();
}

#[test]
fn what_a_client_waits_for_is_asked_anew_when_the_move_that_broke_it_off_fails() {
    let mut world = World::new(1);
    world.begin();
    while !matches!(world.keeper.vms[0].at, At::Resting(_)) {
        world.keeper_turns();
        for at in 0..world.played.len() {
            if !matches!(world.keeper.vms[0].at, At::Resting(_)) {
                world.act(at, Manners::Good);
            }
        }
    }
    let (seq, vm) = (world.keeper.seq(), world.keeper.vms[0].state.id());
    let order = Order::Pin { seq, vm, reason: "test".into() };
    world.keeper.pending.insert(seq, Asked { client: 1, order, answer: Answer::Ok });
    world.kill(1);
    while world.keeper.upgrade.is_some() {
        world.keeper_turns();
    }
    world.played[0].done(seq, Err("it is on its way to another engine"));
    world.keeper_turns();
    let asked: Vec<u64> = world.keeper.pending.keys().copied().collect();
    let [again] = asked[..] else { panic!("it was refused") };
    assert_ne!(again, seq);
    world.played[0].listen();
    let is_asked = |(order, _): &(Order, _)| matches!(order, Order::Pin { seq, .. } if *seq == again);
    assert!(world.played[0].orders.iter().any(is_asked), "the engine was not asked again");
    world.played[0].done(again, Ok(()));
    world.keeper_turns();
    assert!(world.keeper.pending.is_empty());
    world.act_all(Manners::Good);
    world.check_end();
}

#[test]
fn only_one_upgrade_at_a_time_and_only_to_an_absolute_path() {
    let mut world = World::new(1);
    world.keeper.begin_upgrade("ballastd".into()).expect_err("relative");
    world.keeper.begin_upgrade("/nowhere/ballastd".into()).expect_err("not there");
    world.begin();
    let program = world.keeper.last_upgrade.program.clone();
    world.keeper.begin_upgrade(program).expect("asked for again");
    assert_eq!(world.played.len(), 2);
    world.keeper.begin_upgrade("/other/ballastd".into()).expect_err("one is under way");
    world.act_all(Manners::Good);
    world.check_end();
}

#[test]
fn no_vm_has_two_engines_and_one_has_all_in_the_end_when_any_process_dies_at_any_time() {
    let mut ends = BTreeMap::new();
    for seed in 1..=120 {
        let mut random = Random(0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(seed) | 1);
        let mut world = World::new(1 + random.below(6) as usize);
        world.begin();
        for vm in &world.keeper.vms {
            if random.below(4) == 0 {
                for engine in &mut world.played {
                    engine.rigid.insert(vm.state.id());
                }
            }
        }
        let (mut kills, mut attached) = (random.below(3), 100);
        for _ in 0..random.below(120) {
            match random.below(12) {
                0 if kills > 0 => {
                    let alive: Vec<_> = (0..world.played.len()).filter(|at| !world.played[*at].is_dead).collect();
                    if let Some(at) = alive.get(random.below(2) as usize) {
                        world.kill(*at);
                        kills -= 1;
                    }
                }
                1 if attached < 103 => {
                    attached += 1;
                    world.attach(attached);
                }
                2 if world.keeper.vms.len() > 1 => {
                    let at = random.below(world.keeper.vms.len() as u64) as usize;
                    let id = world.keeper.vms[at].state.id();
                    world.keeper.close_vm(id);
                }
                3..6 => world.keeper_turns(),
                _ => {
                    let at = random.below(world.played.len() as u64) as usize;
                    world.act(at, Manners::Good);
                }
            }
        }
        world.act_all(Manners::Good);
        world.check_end();
        *ends.entry(format!("{:?}", world.keeper.last_upgrade.stage)).or_insert(0) += 1;
    }
    assert!(ends.len() > 1, "the seeds come to one end only: {ends:?}");
}

impl Drop for World {
    fn drop(&mut self) {
        for played in &self.played {
            let _ = fence::kill(played.process);
        }
    }
}
