//! Orders to an engine whose keeper is this test: an engine without descriptors does not claim to serve a process; a
//! region that was added after the order to open its VM was sent comes with its own order. Needs root (userfaultfd).

mod common;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ballast_base::store::RAM_STORE;
use ballast_base::wire::{self, Span, StoreFiles, VmId};
use ballast_base::{Bytes, Extents, Hva, PAGE_SIZE};
use ballast_daemon::config::Config;
use ballast_daemon::settings::Settings;
use ballast_handover::failure::Failure;
use ballast_handover::orders::{Begin, Order, Report};
use ballast_handover::state_file::StateFile;
use ballast_store::{Budget, RamOptions, RamStore};
use ballast_sys::process::Process;
use ballast_sys::{Mapping, Uffd, memfd, scm, uffd};
use ballast_testkit::skip;
use rustix::event::{PollFd, PollFlags};

const VM: VmId = VmId([5; 16]);
const RAM: Bytes = Bytes(16 * PAGE_SIZE as u64);

struct Engine {
    child: Child,
    socket: Option<OwnedFd>,
}

impl Engine {
    fn start(dir: &std::path::Path) -> Self {
        let (socket, theirs) = scm::pair().expect("a pair");
        let child = Command::new(env!("CARGO_BIN_EXE_ballastd")).arg("engine").stdin(Stdio::from(theirs)).spawn();
        let engine = Self { child: child.expect("an engine"), socket: Some(socket) };
        let api = UnixListener::bind(dir.join("api.sock")).expect("a socket");
        api.set_nonblocking(true).expect("as the keeper's");
        let config = Config { runtime_dir: dir.to_owned(), ..Config::default() };
        let settings = wire::encode(&Settings::of(&config).expect("settings"));
        let begin = Begin { keeper_pid: std::process::id(), restarts: 0, since_unix_s: 0, settings };
        engine.order(&Order::Begin(begin), &[api.as_fd()]);
        engine
    }

    fn socket(&self) -> &OwnedFd {
        self.socket.as_ref().expect("its keeper lives")
    }

    fn process(&self) -> Process {
        Process::find(self.child.id()).expect("stat").expect("it runs")
    }

    fn order(&self, order: &Order, fds: &[BorrowedFd<'_>]) {
        scm::send(self.socket(), &wire::encode(order), fds).expect("it listens");
    }

    fn done(&self, order: &Order, fds: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        self.order(order, fds);
        loop {
            let received = scm::receive(self.socket()).expect("receive").expect("it runs");
            if let Report::Done { result, .. } = wire::decode(&received.bytes).expect("a report") {
                return result;
            }
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The order to open the VM, whose RAM is one file, with this many regions of its state file.
fn open_with(stores: Vec<StoreFiles>, regions: u32) -> Order {
    let (vmm, pinned) = ("test".into(), None);
    Order::OpenVm { vm: VM, vmm, pinned, may_pin: false, stores, files: 1, beside: false, regions }
}

#[test]
fn an_engine_that_cannot_take_the_descriptors_of_a_process_reports_it_as_unserved() {
    let (uffd, uffd_features) = match Uffd::create(uffd::REQUIRED_FEATURES) {
        Ok(made) => made,
        Err(error) => return skip("native", error),
    };
    let dir = tempfile::tempdir().expect("a directory");
    let engine = Engine::start(dir.path());
    let ram = memfd::create("ballast-test-ram", RAM).expect("RAM");
    let guest = Mapping::shared(&ram, 0, RAM.0 as usize).expect("mapped");
    let (state, arena) = vm_of(&ram);
    let process = engine.process();
    state.name_engine(process.pid, process.start);
    let stores = vec![StoreFiles { store: RAM_STORE, count: 1 }];
    let open = open_with(stores, 1);
    engine.order(&open, &[state.fd(), arena.as_fd(), ram.as_fd()]);
    engine.done(&Order::Tell { seq: 1, vm: VM }, &[]).expect("it is open");
    let (control, _client) = scm::pair().expect("a pair");
    let spans = vec![(Span { hva: Hva(guest.addr() as u64), len: RAM }, 0)];
    let view = Order::AddView { vm: VM, pid: std::process::id(), uffd_features, spans, unserved_since_ns: None };
    let fds = [uffd.as_fd(), control.as_fd()];
    // Its lowest three descriptors are open, and it can open no other.
    assert!(common::limit_descriptors(engine.child.id(), "3"));
    engine.order(&view, &fds);
    let why = engine.done(&Order::Tell { seq: 2, vm: VM }, &[]).expect_err("it does not serve that process");
    assert!(why.to_string().contains("is not served"), "{why}");
    let reach = Order::Reach { seq: 3, vm: VM, pid: std::process::id(), regions: vec![0] };
    engine.done(&reach, &[]).expect_err("it cannot touch pages that are far");
}

#[test]
fn a_vm_not_opened_for_lack_of_descriptors_is_closed_only_once_it_was_opened() {
    let dir = tempfile::tempdir().expect("a directory");
    let engine = Engine::start(dir.path());
    let ram = memfd::create("ballast-test-ram", RAM).expect("RAM");
    let (state, arena) = vm_of(&ram);
    let process = engine.process();
    state.name_engine(process.pid, process.start);
    let open = open_with(vec![StoreFiles { store: RAM_STORE, count: 1 }], 1);
    let open = || engine.order(&open, &[state.fd(), arena.as_fd(), ram.as_fd()]);
    let close = |seq| engine.done(&Order::CloseVm { seq, vm: VM }, &[]);
    engine.done(&Order::Tell { seq: 0, vm: VM }, &[]).expect_err("it has begun, and has not the VM");
    assert!(common::limit_descriptors(engine.child.id(), "3"));
    open();
    let why = engine.done(&Order::Tell { seq: 1, vm: VM }, &[]).expect_err("it has no descriptors of it");
    assert_eq!(close(2), Err(why), "what may be far of it would be dropped");
    assert!(common::limit_descriptors(engine.child.id(), "1024"));
    open();
    assert_eq!(close(3), Ok(()));
    assert_eq!(close(4), Ok(()), "nothing is left of it");
}

#[test]
fn a_thread_that_failed_to_open_a_vm_does_not_count_as_working_for_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let engine = Engine::start(dir.path());
    let ram = memfd::create("ballast-test-ram", RAM).expect("RAM");
    let (state, _arena) = vm_of(&ram);
    let process = engine.process();
    state.name_engine(process.pid, process.start);
    let (no_arena, _other) = scm::pair().expect("a pair");
    let open = open_with(vec![StoreFiles { store: RAM_STORE, count: 1 }], 1);
    engine.order(&open, &[state.fd(), no_arena.as_fd(), ram.as_fd()]);
    let why = engine.done(&Order::Tell { seq: 1, vm: VM }, &[]).expect_err("it is not open");
    assert!(why.to_string().contains("arena"), "{why}");
    assert_eq!(state.threads(), [0; 0], "a keeper would wait for the end of that thread");
}

#[test]
fn a_region_added_before_the_vm_is_opened_is_served_when_its_own_order_comes() {
    let (uffd, uffd_features) = match Uffd::create(uffd::REQUIRED_FEATURES) {
        Ok(made) => made,
        Err(error) => return skip("native", error),
    };
    let dir = tempfile::tempdir().expect("a directory");
    let engine = Engine::start(dir.path());
    let ram = ["first", "second"].map(|name| memfd::create(name, RAM).expect("RAM"));
    let (state, arena) = vm_of(&ram[0]);
    let guest = ram.each_ref().map(|file| Mapping::shared(file, 0, RAM.0 as usize).expect("mapped"));
    // The keeper has sent the order when it adds the second region; the engine reads it afterwards.
    add_region(&state, &ram[1]);
    let process = engine.process();
    state.name_engine(process.pid, process.start);
    let stores = vec![StoreFiles { store: RAM_STORE, count: 1 }];
    let fds = [state.fd(), arena.as_fd(), ram[0].as_fd()];
    let check = Order::CheckVm { seq: 1, vm: VM, stores: stores.clone(), files: 1, regions: 1 };
    engine.done(&check, &fds).expect("all files that the order is about have come");
    let check = Order::CheckVm { seq: 2, vm: VM, stores: stores.clone(), files: 1, regions: 2 };
    engine.done(&check, &fds).expect_err("a file did not come");
    engine.order(&open_with(stores, 1), &fds);
    let (control, _client) = scm::pair().expect("a pair");
    let span = |at: usize| Span { hva: Hva(guest[at].addr() as u64), len: RAM };
    let (pid, spans) = (std::process::id(), vec![(span(0), 0)]);
    let view = Order::AddView { vm: VM, pid, uffd_features, spans, unserved_since_ns: None };
    engine.order(&view, &[uffd.as_fd(), control.as_fd()]);
    let second = Order::AddRegion { vm: VM, pid, span: Some(span(1)), number: 1, files: 1 };
    engine.order(&second, &[ram[1].as_fd()]);
    engine.done(&Order::Tell { seq: 3, vm: VM }, &[]).expect("it is open, and all of it is served");
    let reach = Order::Reach { seq: 4, vm: VM, pid, regions: vec![0, 1] };
    engine.done(&reach, &[]).expect("the process is served in both regions");
    let pin = |vm| Order::Pin { seq: 5, vm, reason: "test".into() };
    engine.done(&pin(VM), &[]).expect("all of its pages are there");
    engine.done(&pin(VmId([6; 16])), &[]).expect_err("whether pages of a VM that is not open are far is unknown");
}

/// A VM with one region that no engine has opened, and its arena.
fn vm_of(ram: &OwnedFd) -> (StateFile, OwnedFd) {
    vm_with(VM, ram)
}

/// As [`vm_of`], with this id.
fn vm_with(id: VmId, ram: &OwnedFd) -> (StateFile, OwnedFd) {
    let (_store, arena) = RamStore::create(RamOptions::new(Budget::new(RAM))).expect("a store");
    let state = StateFile::create(id, "test").expect("a state file");
    add_region(&state, ram);
    (state, arena)
}

fn add_region(state: &StateFile, ram: &OwnedFd) {
    let id = memfd::file_id(ram).expect("stat");
    state.add_region(&[id], &Extents::one(Bytes(0), RAM).expect("good"), None).expect("a region");
}

fn view_of(pid: u32, uffd_features: u64) -> Order {
    Order::AddView { vm: VM, pid, uffd_features, spans: Vec::new(), unserved_since_ns: None }
}

#[test]
fn an_orphaned_engine_closes_no_vm_with_unknown_processes_while_one_has_its_ram() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut engine = Engine::start(dir.path());
    let ram = memfd::create("ballast-test-ram", RAM).expect("RAM");
    let (state, arena) = vm_of(&ram);
    let process = engine.process();
    state.name_engine(process.pid, process.start);
    engine.order(
        &open_with(vec![StoreFiles { store: RAM_STORE, count: 1 }], 1),
        &[state.fd(), arena.as_fd(), ram.as_fd()],
    );
    engine.done(&Order::Tell { seq: 1, vm: VM }, &[]).expect("it is open");
    let mut vmm = Command::new("sleep").arg("1000").stdin(Stdio::from(ram)).spawn().expect("a process");
    engine.socket = None;
    // Long enough for several of its turns, because nothing reports that it does nothing.
    std::thread::sleep(Duration::from_secs(1));
    assert!(engine.child.try_wait().expect("wait").is_none(), "it has closed the VM of a process that lives");
    vmm.kill().expect("kill it");
    vmm.wait().expect("reap it");
    common::until("the engine ends", || engine.child.try_wait().expect("wait").is_some());
}

#[test]
fn an_orphaned_engine_records_that_it_left_a_vm_if_its_keeper_did_not_read_that() {
    let other = VmId([6; 16]);
    let dir = tempfile::tempdir().expect("a directory");
    let mut engine = Engine::start(dir.path());
    let process = engine.process();
    let ram = [(); 2].map(|()| memfd::create("ballast-test-ram", RAM).expect("RAM"));
    let vms = [vm_of(&ram[0]), vm_with(other, &ram[1])];
    for ((state, arena), ram) in vms.iter().zip(&ram) {
        state.name_engine(process.pid, process.start);
        let mut open = open_with(vec![StoreFiles { store: RAM_STORE, count: 1 }], 1);
        if let Order::OpenVm { vm, .. } = &mut open {
            *vm = state.id();
        }
        engine.order(&open, &[state.fd(), arena.as_fd(), ram.as_fd()]);
    }
    engine.done(&Order::Tell { seq: 1, vm: other }, &[]).expect("it is open");
    engine.done(&Order::ServeFaults { seq: 2, vm: VM }, &[]).expect("it can");
    let [(state, _), _] = &vms;
    // Another process plays the engine that follows it.
    let next = Process::this().expect("this process");
    state.name_beside(next.pid, next.start);
    engine.order(&Order::HandOver { seq: 3, vm: VM }, &[]);
    // The report has come, and its keeper does not read it.
    let mut fds = [PollFd::new(engine.socket(), PollFlags::IN)];
    rustix::event::poll(&mut fds, None).expect("poll");
    engine.socket = None;
    // It lives, because it has another VM, whose RAM this process holds. The next engine waits until this is recorded.
    common::until("it is recorded", || state.leaving().is_none());
    assert_eq!(state.engine(), Some((next.pid, next.start)));
    assert!(engine.child.try_wait().expect("wait").is_none(), "it has a VM whose process lives");
}

#[test]
fn of_two_engines_whose_keeper_died_both_end_when_the_vm_is_gone() {
    let uffd_features = match Uffd::create(uffd::REQUIRED_FEATURES) {
        Ok((_, features)) => features,
        Err(error) => return skip("native", error),
    };
    for (is_followed, one_dies) in [(false, false), (true, false), (false, true)] {
        let dirs = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let mut engines = dirs.each_ref().map(|dir| Engine::start(dir.path()));
        let ram = memfd::create("ballast-test-ram", RAM).expect("RAM");
        let (state, arena) = vm_of(&ram);
        let fds = [state.fd(), arena.as_fd(), ram.as_fd()];
        let mut vmm = Command::new("sleep").arg("1000").spawn().expect("a process");
        let (control, client) = scm::pair().expect("a pair");
        let serve = |engine: &Engine, order: &Order| {
            engine.order(order, &fds);
            let (uffd, _) = Uffd::create(uffd::REQUIRED_FEATURES).expect("a userfaultfd");
            engine.order(&view_of(vmm.id(), uffd_features), &[uffd.as_fd(), control.as_fd()]);
        };
        let stores = vec![StoreFiles { store: RAM_STORE, count: 1 }];
        let [old, next] = engines.each_ref().map(Engine::process);
        state.name_engine(old.pid, old.start);
        serve(&engines[0], &open_with(stores.clone(), 1));
        engines[0].done(&Order::ServeFaults { seq: 1, vm: VM }, &[]).expect("it can");
        state.name_beside(next.pid, next.start);
        let Order::OpenVm { vm, vmm: name, pinned, may_pin, stores, files, regions, .. } = open_with(stores, 1) else {
            panic!("another order")
        };
        serve(&engines[1], &Order::OpenVm { vm, vmm: name, pinned, may_pin, stores, files, beside: true, regions });
        if is_followed {
            engines[1].done(&Order::Tell { seq: 2, vm: VM }, &[]).expect("it serves the process");
            assert!(state.is_followed());
        }
        if one_dies {
            engines[1].child.kill().expect("kill it");
        }
        engines.iter_mut().for_each(|engine| engine.socket = None);
        vmm.kill().expect("kill it");
        vmm.wait().expect("reap it");
        drop((client, ram));
        for engine in &mut engines {
            common::until("the engine ends", || engine.child.try_wait().expect("wait").is_some());
        }
    }
}
