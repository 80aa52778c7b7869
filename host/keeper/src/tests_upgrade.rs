//! An upgrade with the real keeper and with engines that a test plays. In any order of events, no VM is given to one
//! engine while the other does more for it than serve its faults, and in the end one engine has all VMs.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ballast_base::wire::{self, VmId};
use ballast_handover::failure::Failure;
use ballast_handover::orders::{Order, Report};
use ballast_handover::state_file::StateFile;
use ballast_handover::upgrading::Stage as Shown;
use ballast_sys::process::Process;
use ballast_sys::{memfd, scm};
use ballast_testkit::program::install_script;
use ballast_testkit::random::Random;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use crate::admit::Escrow;
use crate::client::Peer;
use crate::engine::{Engine, Who};
use crate::fence;
use crate::keeper::{Keeper, Standing};
use crate::place::At;
use crate::program::Program;
use crate::stage::Stage;
use crate::store_files::Files;
use crate::tests::{LOST, attach_as, keeper_of};
use crate::upgrading;
use crate::vms::Vm;
use ballast_sys::slow_fd::SlowFd;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Does {
    All,
    /// It serves faults, and will leave.
    Leaves,
    /// It serves faults beside the engine that leaves.
    Follows,
}

struct Played {
    process: Process,
    socket: OwnedFd,
    orders: Vec<(Order, Vec<OwnedFd>)>,
    open: BTreeMap<VmId, (StateFile, Does)>,
    /// VMs for which it refuses [`Order::ServeFaults`].
    rigid: BTreeSet<VmId>,
    rests: bool,
    is_dead: bool,
    hangs: bool,
    told: Option<Shown>,
}

impl Played {
    fn of(engine: &Engine) -> Self {
        // The process that sleeps never reads its end.
        let socket = pidfd_getfd(engine.pidfd(), 0, PidfdGetfdFlags::empty()).expect("its standard input");
        rustix::io::ioctl_fionbio(&socket, true).expect("non-blocking");
        Self {
            process: engine.process(),
            socket,
            orders: Vec::new(),
            open: BTreeMap::new(),
            rigid: BTreeSet::new(),
            rests: false,
            is_dead: false,
            hangs: false,
            told: None,
        }
    }

    fn say(&self, report: &Report) {
        let _ = scm::send(&self.socket, &wire::encode(report), &[]);
    }

    fn done(&self, seq: u64, result: Result<(), &str>) {
        self.say(&Report::Done { seq, result: result.map_err(Failure::from) });
    }

    fn listen(&mut self) {
        while let Ok(Some(received)) = scm::receive(&self.socket) {
            let order = wire::decode::<Order>(&received.bytes).expect("an order");
            self.orders.push((order, received.fds));
        }
    }
}

/// Waits until this process, which has been killed, is dead.
fn die(process: Process) {
    let begun = Instant::now();
    while !process.is_dying() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it was not killed");
        std::thread::yield_now();
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Rest,
    Check,
    ServeFaults,
    Open,
    Tell,
    HandOver,
    Alone,
    Serve,
}

impl Kind {
    fn of(order: &Order) -> Option<Self> {
        Some(match order {
            Order::Rest { .. } => Self::Rest,
            Order::CheckVm { .. } => Self::Check,
            Order::ServeFaults { .. } => Self::ServeFaults,
            Order::OpenVm { .. } => Self::Open,
            Order::Tell { .. } => Self::Tell,
            Order::HandOver { .. } => Self::HandOver,
            Order::Alone { .. } => Self::Alone,
            Order::Serve => Self::Serve,
            _ => return None,
        })
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum How {
    Hangs,
    Dies,
    /// It reports that it cannot, and continues.
    Refuses,
}

/// A failure of the engine with this number, at an order of this kind, after a number of others.
#[derive(Clone, Copy, Debug)]
struct Fault {
    at: usize,
    kind: Kind,
    how: How,
    after: u32,
}

/// A VM whose processes are gone, and may come back with its files.
struct Gone {
    id: VmId,
    state: OwnedFd,
    arena: OwnedFd,
}

struct World {
    keeper: Keeper,
    _dir: tempfile::TempDir,
    played: Vec<Played>,
    fault: Option<Fault>,
}

impl World {
    fn new(vms: usize) -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let program = dir.path().join("engine");
        install_script(&program, "exec sleep 1000");
        install_script(&dir.path().join("other"), "exec sleep 1000");
        let keeper = keeper_of(program);
        let mut world = Self { keeper, _dir: dir, played: Vec::new(), fault: None };
        world.keeper.keep_engines();
        world.play_new();
        for number in 0..vms {
            world.attach(number);
        }
        world.act_all();
        world
    }

    fn vm(&self, at: usize) -> &Vm {
        self.keeper.vms.iter().nth(at).expect("there are so many")
    }

    fn attach(&mut self, number: usize) -> VmId {
        let attach = attach_as(&format!("vm-{number}"), None);
        let peer = Peer { pid: std::process::id(), uid: 0 };
        let vm = self.keeper.create(&attach, peer).expect("state and arena");
        let id = vm.id();
        self.keeper.vms.add(vm);
        self.keeper.hand_over(id, None);
        id
    }

    fn cut(&mut self, id: VmId) -> Gone {
        let held = &self.keeper.vms.get(id).expect("it is there").held;
        let reopen = |fd: &dyn AsFd| memfd::reopen(fd.as_fd(), true).expect("reopen");
        let arena = held.stores()[0].iter().next().expect("an arena").as_fd();
        let gone = Gone { id, state: reopen(&held.state().fd()), arena: reopen(&arena) };
        self.keeper.close_vm(id);
        gone
    }

    /// The VM comes back, unless it is told to come later.
    fn come_back(&mut self, gone: Gone) -> Result<(), Gone> {
        if self.keeper.vms.must_wait(Some(gone.id), &[]).is_some() {
            return Err(gone);
        }
        let sent = SlowFd::from;
        let escrow = Escrow { state: sent(gone.state), stores: vec![Files::ram(sent(gone.arena))] };
        let vm = self.keeper.resume(&attach_as("back", Some(gone.id)), escrow, 0).expect("resumed");
        self.keeper.vms.add(vm);
        self.keeper.hand_over(gone.id, None);
        Ok(())
    }

    /// Continues until `what` is true. By the clock: the kernel may take any number of turns to end a killed process.
    fn until(&mut self, what: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_mins(1) {
            for at in 0..self.played.len() {
                if what(self) {
                    return;
                }
                self.act(at);
            }
            self.keeper_turns();
            std::thread::yield_now();
        }
        panic!("it never comes to that: {:?}", self.keeper.upgrades.last());
    }

    /// The number of an upgrade's first question of this kind.
    fn question(&self, is_it: impl Fn(upgrading::Asked) -> bool) -> Option<u64> {
        self.keeper.upgrades.questions().filter(|(_, asked)| is_it(*asked)).map(|(seq, _)| seq).min()
    }

    /// Takes over the sockets of engines that the keeper has started.
    fn play_new(&mut self) {
        for engine in [Who::Engine, Who::Next].into_iter().filter_map(|who| self.keeper.engines.get(who)) {
            if self.played.iter().all(|played| played.process != engine.process()) {
                self.played.push(Played::of(engine));
            }
        }
    }

    /// Kills an engine and waits until it is dead; the keeper does not know yet.
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

    /// One turn of the keeper, as its loop takes it.
    fn keeper_turns(&mut self) {
        self.reap();
        self.keeper.hear(Who::Engine);
        self.keeper.hear(Who::Next);
        if self.keeper.engines.process(Who::Next).is_some_and(Process::is_dying) {
            self.keeper.next_died();
        }
        if self.keeper.engines.process(Who::Engine).is_some_and(Process::is_dying) {
            self.keeper.reap_engine();
            // Otherwise engines that die young are started ever more slowly.
            self.keeper.engines.forget_deaths();
        }
        self.keeper.keep_engines();
        self.keeper.tend_fences();
        self.keeper.tend_upgrade();
        self.play_new();
        self.played.iter_mut().for_each(Played::listen);
    }

    fn fails(&mut self, at: usize) -> bool {
        let kind = Kind::of(&self.played[at].orders[0].0);
        let Some(fault) = self.fault.as_mut().filter(|fault| fault.at == at && Some(fault.kind) == kind) else {
            return false;
        };
        if fault.after > 0 {
            fault.after -= 1;
            return false;
        }
        match fault.how {
            How::Hangs => self.played[at].hangs = true,
            How::Dies => self.kill(at),
            How::Refuses => {
                let me = &mut self.played[at];
                match me.orders.remove(0).0 {
                    Order::CheckVm { seq, .. } | Order::ServeFaults { seq, .. } | Order::Tell { seq, .. } => {
                        me.done(seq, Err("it cannot"));
                    }
                    order => panic!("{order:?} is not refused"),
                }
            }
        }
        self.fault = None;
        true
    }

    /// Continues until the upgrade is over, however long that takes. An engine that hangs is ended afterwards, as its
    /// silence would end it.
    fn end_in_time(&mut self) {
        for _ in 0..100_000 {
            self.keeper_turns();
            let can = |at: &usize| !(self.played[*at].is_dead || self.played[*at].hangs);
            let busy: Vec<_> = (0..self.played.len()).filter(can).collect();
            let busy: Vec<_> = busy.into_iter().filter(|at| !self.played[*at].orders.is_empty()).collect();
            busy.iter().for_each(|at| self.act(*at));
            if self.keeper.upgrades.stage().is_none() {
                let hang = (0..self.played.len()).find(|at| self.played[*at].hangs && !self.played[*at].is_dead);
                if let Some(at) = hang {
                    self.kill(at);
                }
                return self.act_all();
            }
            let waits = self.keeper.vms.iter().any(|vm| vm.place.fenced().is_some());
            if busy.is_empty() && !waits {
                self.keeper.upgrades.age(Duration::from_secs(1));
            }
        }
        panic!("no end: {:?}", self.keeper.upgrades.last());
    }

    fn act(&mut self, at: usize) {
        self.reap();
        let me = &self.played[at];
        if me.is_dead || me.hangs || me.orders.is_empty() {
            return;
        }
        if self.fails(at) {
            return;
        }
        let (order, fds) = self.played[at].orders.remove(0);
        if let Order::OpenVm { vm, .. } | Order::CloseVm { vm, .. } = &order {
            // An engine that is no longer the keeper's must have been killed before another one gets its VM.
            let ours = self.keeper.engines.ours();
            let has_it = |played: &&mut Played| !played.is_dead && played.open.contains_key(vm);
            for played in self.played.iter_mut().filter(has_it).filter(|played| !ours.contains(&played.process)) {
                die(played.process);
                played.is_dead = true;
                played.open.clear();
            }
        }
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
                me.done(seq, Ok(()));
            }
            Order::OpenVm { vm, beside, .. } => {
                assert!(!me.open.contains_key(&vm), "it was given twice");
                let state = StateFile::open(fds.into_iter().next().expect("a state file")).expect("open");
                if state.engine() != Some((process.pid, process.start)) {
                    // Such an engine does nothing: the keeper has just killed it.
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
                me.done(seq, if me.open.contains_key(&vm) { Ok(()) } else { Err("it is not open") });
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

    fn act_all(&mut self) {
        let mut turns = 0;
        while turns < 1000 {
            self.keeper_turns();
            let is_busy = |at: &usize| !self.played[*at].orders.is_empty() && !self.played[*at].is_dead;
            let busy: Vec<usize> = (0..self.played.len()).filter(is_busy).collect();
            busy.iter().for_each(|at| self.act(*at));
            // The kernel takes a moment to end a killed process.
            if self.keeper.vms.iter().any(|vm| vm.place.fenced().is_some()) {
                std::thread::yield_now();
                continue;
            }
            if busy.is_empty() && self.keeper.upgrades.stage().is_none() {
                return;
            }
            turns += 1;
        }
        panic!("no end: {:?}", self.keeper.upgrades.last());
    }

    fn begin(&mut self) {
        let other = self._dir.path().join("other").display().to_string();
        self.keeper.begin_upgrade(other).expect("it begins");
        self.play_new();
    }

    /// Installs another file under the name of the program that upgrades start.
    fn install_other(&self) {
        let new = self._dir.path().join("new");
        install_script(&new, "exec sleep 1000");
        std::fs::rename(new, self._dir.path().join("other")).expect("install");
    }

    /// Checks that one engine has all VMs, is the keeper's, and does not rest, and that no other engine is named.
    fn check_end(&self) -> usize {
        let engine = self.keeper.engines.process(Who::Engine).expect("an engine");
        // An engine that the keeper has just killed takes a moment to die.
        let others = self.played.iter().filter(|played| played.process != engine);
        others.for_each(|played| die(played.process));
        let alive: Vec<usize> = (0..self.played.len()).filter(|at| self.played[*at].process == engine).collect();
        let [only] = alive[..] else { panic!("{} engines live", alive.len()) };
        let last = &self.played[only];
        assert_eq!(last.process, engine);
        assert!(!last.rests, "it rests for ever");
        let known: BTreeSet<VmId> = self.keeper.vms.iter().map(Vm::id).collect();
        assert_eq!(last.open.keys().copied().collect::<BTreeSet<_>>(), known);
        assert!(last.open.values().all(|(_, does)| *does == Does::All), "{:?}", last.open);
        for vm in self.keeper.vms.iter() {
            assert_eq!(vm.held.state().engine(), Some((engine.pid, engine.start)));
            assert!(vm.place.at() == At::Engine && vm.place.fenced().is_none());
            assert_eq!(vm.leaving(), None);
        }
        assert_eq!(last.told, Some(self.keeper.upgrades.last().stage));
        only
    }
}

#[test]
fn every_vm_moves_to_the_engine_that_follows_and_back_again() {
    let mut world = World::new(9);
    let first = world.check_end();
    for round in 1..4 {
        world.begin();
        world.act_all();
        let now = world.keeper.upgrades.last();
        assert_eq!((now.number, now.stage, now.moved, now.checked), (round, Shown::Done, 9, 9), "{now:?}");
        assert_eq!(now.longest_gap_us, 0, "none was without an engine");
        assert_ne!(world.check_end(), first);
        assert_eq!(world.keeper.engines.restarts(), 0);
    }
}

#[test]
fn vms_that_come_all_the_time_do_not_keep_an_upgrade_from_its_end() {
    let mut world = World::new(2);
    world.begin();
    let (mut came, mut turns) = (0, 0);
    while world.keeper.upgrades.stage().is_some() {
        came += 1;
        world.attach(10 + came);
        world.keeper_turns();
        for at in 0..world.played.len() {
            world.act(at);
        }
        turns += 1;
        assert!(turns < 300, "no end: {:?}", world.keeper.upgrades.last());
    }
    world.act_all();
    assert_eq!(world.keeper.upgrades.last().stage, Shown::Done);
    world.check_end();
}

#[test]
fn what_a_client_waits_for_is_asked_again_when_the_move_that_broke_it_off_fails() {
    let mut world = World::new(1);
    world.begin();
    let rests = |world: &World| matches!(world.vm(0).place.at(), At::Resting(_));
    while !rests(&world) {
        world.keeper_turns();
        for at in 0..world.played.len() {
            if !rests(&world) {
                world.act(at);
            }
        }
    }
    let (seq, vm) = (world.keeper.engines.number(), world.vm(0).id());
    let order = Order::Pin { seq, vm, reason: "test".into() };
    world.keeper.clients.wait_for(seq, order);
    world.kill(1);
    while world.keeper.upgrades.stage().is_some() {
        world.keeper_turns();
    }
    world.played[0].done(seq, Err("it is on its way to another engine"));
    world.keeper_turns();
    let [again] = world.keeper.clients.numbers()[..] else { panic!("it was refused") };
    assert_ne!(again, seq);
    world.played[0].listen();
    let is_asked = |(order, _): &(Order, _)| matches!(order, Order::Pin { seq, .. } if *seq == again);
    assert!(world.played[0].orders.iter().any(is_asked), "the engine was not asked again");
    world.played[0].done(again, Ok(()));
    world.keeper_turns();
    assert!(world.keeper.clients.numbers().is_empty());
    world.act_all();
    world.check_end();
}

#[test]
fn only_one_upgrade_at_a_time_and_only_to_an_absolute_path() {
    let mut world = World::new(1);
    world.keeper.begin_upgrade("ballastd".into()).expect_err("relative");
    world.keeper.begin_upgrade("/nowhere/ballastd".into()).expect_err("not there");
    world.begin();
    let program = world.keeper.upgrades.last().program.clone();
    world.keeper.begin_upgrade(program.clone()).expect("asked for again");
    assert_eq!(world.played.len(), 2);
    world.install_other();
    let said = world.keeper.begin_upgrade(program).expect_err("another file has the name by now").to_string();
    assert!(said.contains("is under way"), "{said}");
    world.keeper.begin_upgrade("/other/ballastd".into()).expect_err("one is under way");
    world.act_all();
    world.check_end();
}

#[test]
fn no_vm_has_two_engines_and_one_has_all_in_the_end_when_any_process_dies_at_any_time() {
    let mut ends = BTreeMap::new();
    for seed in 1..=120 {
        println!("seed {seed}");
        let mut random = Random(seed);
        let mut world = World::new(1 + random.below(6) as usize);
        world.begin();
        for vm in world.keeper.vms.iter() {
            if random.below(4) == 0 {
                for engine in &mut world.played {
                    engine.rigid.insert(vm.id());
                }
            }
        }
        let (mut kills, mut attached, mut gone) = (random.below(3), 100, Vec::new());
        for _ in 0..random.below(120) {
            match random.below(14) {
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
                2 if world.keeper.vms.iter().count() > 1 => {
                    let at = random.below(world.keeper.vms.iter().count() as u64) as usize;
                    let id = world.vm(at).id();
                    world.keeper.close_vm(id);
                }
                3..6 => world.keeper_turns(),
                6 if world.keeper.vms.iter().count() > 0 && gone.len() < 2 => {
                    let at = random.below(world.keeper.vms.iter().count() as u64) as usize;
                    let id = world.vm(at).id();
                    gone.push(world.cut(id));
                }
                7 => {
                    if let Some(back) = gone.pop() {
                        gone.extend(world.come_back(back).err());
                    }
                }
                _ => {
                    let at = random.below(world.played.len() as u64) as usize;
                    world.act(at);
                }
            }
        }
        world.act_all();
        world.check_end();
        *ends.entry(format!("{:?}", world.keeper.upgrades.last().stage)).or_insert(0) += 1;
    }
    assert!(ends.len() > 1, "the seeds come to one end only: {ends:?}");
}

/// `opened`: whether the new engine has opened the VM before its processes come back.
fn comes_back_while_it_is_opened(rigid: bool, opened: bool) {
    let mut world = World::new(1);
    let first = world.check_end();
    world.begin();
    let id = world.vm(0).id();
    if rigid {
        world.played[0].rigid.insert(id);
    }
    world.until(|world| {
        let is_open = world.played[1].open.contains_key(&id);
        let is_told = world.question(|asked| matches!(asked, upgrading::Asked::Opened(_))).is_some();
        is_told && (is_open || !opened)
    });
    // The keeper does not read the engine's messages before the VM is back.
    while opened && world.played[1].orders.iter().any(|(order, _)| matches!(order, Order::Tell { .. })) {
        world.act(1);
    }
    let mut gone = world.cut(id);
    while let Err(later) = world.come_back(gone) {
        gone = later;
        world.keeper_turns();
        for at in 0..2 {
            world.act(at);
        }
    }
    world.act_all();
    let now = world.keeper.upgrades.last();
    assert_eq!((now.stage, now.message.as_str()), (Shown::Done, ""), "rigid {rigid}, opened {opened}: {now:?}");
    assert_ne!(world.check_end(), first);
}

#[test]
fn a_vm_that_goes_and_comes_back_while_it_is_opened_does_not_roll_an_upgrade_back() {
    for rigid in [false, true] {
        for opened in [false, true] {
            comes_back_while_it_is_opened(rigid, opened);
        }
    }
}

#[test]
fn a_vm_of_two_engines_that_ends_while_it_waits_for_the_end_of_one_is_closed_by_the_other_before_it_is_opened_again() {
    let mut waited = false;
    // A killed process takes a moment to end. If it takes none, the VM does not wait.
    for _ in 0..20 {
        let mut world = World::new(1);
        world.begin();
        world.until(|world| world.vm(0).place.at() == At::Both);
        let id = world.vm(0).id();
        world.keeper.upgrade_fails("test");
        waited |= world.vm(0).place.fenced().is_some();
        world.keeper.close_vm(id);
        world.act_all();
        world.until(|world| world.keeper.vms.closing().next().is_none());
        world.act_all();
        assert_eq!(world.check_end(), 0);
        if waited {
            return;
        }
    }
}

#[test]
fn a_vm_that_is_refused_and_gone_by_then_or_another_one_does_not_fail_the_upgrade() {
    for comes_back in [false, true] {
        let mut world = World::new(2);
        let first = world.check_end();
        world.begin();
        let id = world.vm(0).id();
        let seq = world.question(|asked| matches!(asked, upgrading::Asked::Check(vm) if vm == id)).expect("asked");
        world.played[1].listen();
        world.played[1].orders.retain(|(order, _)| !matches!(order, Order::CheckVm { vm, .. } if *vm == id));
        let gone = world.cut(id);
        if comes_back {
            assert!(world.come_back(gone).is_ok(), "it need not wait");
        }
        world.played[1].done(seq, Err("its memory was freed"));
        world.act_all();
        assert_eq!(world.keeper.upgrades.last().stage, Shown::Done, "{:?}", world.keeper.upgrades.last());
        assert_ne!(world.check_end(), first);
    }
}

#[test]
fn whichever_engine_fails_at_whatever_order_one_has_all_vms_in_the_end() {
    let next = [Kind::Rest, Kind::Check, Kind::Open, Kind::Tell, Kind::Alone, Kind::Serve].map(|kind| (1, kind));
    let old = [Kind::Rest, Kind::ServeFaults, Kind::HandOver].map(|kind| (0, kind));
    for (at, kind) in next.into_iter().chain(old) {
        for how in [How::Hangs, How::Dies, How::Refuses] {
            if how == How::Refuses && !matches!(kind, Kind::Check | Kind::Tell | Kind::ServeFaults) {
                continue;
            }
            for (rigid, after) in [(false, 0), (false, 2), (true, 0), (true, 2)] {
                if after > 0 && matches!(kind, Kind::Rest | Kind::Serve) || rigid && kind == Kind::Alone {
                    continue;
                }
                let mut world = World::new(5);
                let first = world.check_end();
                world.begin();
                let ids: Vec<_> = world.keeper.vms.iter().map(Vm::id).collect();
                world.played[0].rigid.extend(ids.iter().filter(|_| rigid));
                world.fault = Some(Fault { at, kind, how, after });
                world.end_in_time();
                let case = format!("{at} {how:?} at {kind:?}, rigid {rigid}, after {after}");
                assert!(world.fault.is_none(), "{case}: it did not come to that");
                let (end, now) = (world.check_end(), world.keeper.upgrades.last().clone());
                match (at, kind, how) {
                    // No order reaches it that it would refuse.
                    (0, Kind::ServeFaults, How::Refuses) => assert!(now.stage == Shown::Done && end == 1, "{case}"),
                    // The new engine is in its place.
                    (0, Kind::ServeFaults | Kind::HandOver, How::Dies) => {
                        assert!(now.stage == Shown::Done && end == 1, "{case}: {now:?}");
                    }
                    // Neither engine is left; or the old one is, which hung, and its silence ended it.
                    (0, ..) => assert!(now.stage == Shown::Failed && end > 1, "{case}: {now:?}"),
                    _ => {
                        let why = match (kind, how) {
                            (Kind::Check, How::Refuses) => "cannot serve VM vm-",
                            (_, How::Hangs) => "in time",
                            _ => "",
                        };
                        assert!(now.stage == Shown::Failed && now.message.contains(why), "{case}: {now:?}");
                        assert_eq!(end, first, "{case}");
                        world.begin();
                        world.act_all();
                        assert_eq!(world.keeper.upgrades.last().stage, Shown::Done, "after {case}");
                        assert_ne!(world.check_end(), first);
                    }
                }
            }
        }
    }
}

#[test]
fn an_engine_that_talks_without_end_keeps_nobody_waiting() {
    let mut world = World::new(3);
    world.begin();
    let socket = world.played[1].socket.try_clone().expect("dup");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let pong = wire::encode(&Report::Pong);
            while !stop.load(Ordering::Relaxed) {
                let _ = scm::send(&socket, &pong, &[]);
            }
        });
        while world.keeper.upgrades.stage().is_some() {
            world.keeper_turns();
            for at in 0..2 {
                // Its message may not fit into the socket; then there would be nothing to wait for.
                let order = world.played[at].orders.first();
                if at == 0 || order.is_some_and(|(order, _)| !matches!(order, Order::Serve)) {
                    world.act(at);
                }
            }
            world.keeper.upgrades.age(Duration::from_secs(1));
        }
        stop.store(true, Ordering::Relaxed);
    });
    world.act_all();
    assert_eq!(world.keeper.upgrades.last().stage, Shown::Failed);
    assert_eq!(world.check_end(), 0);
}

#[test]
fn a_keeper_does_not_become_a_program_whose_engines_do_not_come_to_serve() {
    let mut world = World::new(2);
    let program = world.keeper.engines.program().path().to_owned();
    let (attach, _other) = scm::pair().expect("socket pair");
    let lock = attach.as_raw_fd();
    world.keeper.standing = Some(Standing { lock, attach: Arc::new(attach) });
    world.begin();
    let is_moving = |world: &World| world.keeper.upgrades.stage() == Some(Stage::Moving);
    world.until(is_moving);
    world.kill(0);
    world.until(|world| world.keeper.upgrades.stage().is_none());
    // This process has other threads, so there is no exec.
    let waits = world.keeper.replacing.is_some();
    assert_eq!((waits, world.keeper.engines.last_program().map(Program::path)), (true, Some(&*program)));
    assert_ne!(world.keeper.engines.program().path(), program);
    let other = world.keeper.engines.program().path().display().to_string();
    world.keeper.begin_upgrade(other.clone()).expect("it is what the keeper becomes");
    world.install_other();
    world.keeper.begin_upgrade(other).expect_err("the keeper becomes another file of this name");
    world.kill(1);
    world.until(|world| {
        world.keeper.engines.process(Who::Engine).is_some_and(|engine| engine != world.played[1].process)
    });
    assert_eq!(
        world.keeper.engines.program().path(),
        program,
        "engines are started from what they were started from before"
    );
    let now = world.keeper.upgrades.last().clone();
    assert!(world.keeper.replacing.is_none() && now.stage == Shown::Done, "{now:?}");
    assert_eq!(now.keeper, Some(Err("engines of it do not come to serve".into())));
    world.act_all();
    world.check_end();
}

impl Drop for World {
    fn drop(&mut self) {
        for played in &self.played {
            let _ = fence::kill(played.process);
        }
    }
}
