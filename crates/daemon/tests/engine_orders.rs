//! Orders to an engine whose keeper is this test: an engine that has no descriptors left does not claim to serve a
//! process. Needs root (userfaultfd).

mod common;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};

use ballast_base::store::RAM_STORE;
use ballast_base::wire::{self, Span, StoreFiles, VmId};
use ballast_base::{Bytes, Extents, Hva, PAGE_SIZE};
use ballast_daemon::config::Config;
use ballast_daemon::settings::Settings;
use ballast_handover::orders::{Begin, Order, Report};
use ballast_handover::state_file::StateFile;
use ballast_needs::skip;
use ballast_store::{Budget, RamOptions, RamStore};
use ballast_sys::process::Process;
use ballast_sys::{Mapping, Uffd, memfd, scm, uffd};

const VM: VmId = VmId([5; 16]);
const RAM: Bytes = Bytes(16 * PAGE_SIZE as u64);

/// An engine of this build.
struct Engine {
    child: Child,
    socket: OwnedFd,
}

impl Engine {
    fn start(dir: &std::path::Path) -> Self {
        let (socket, theirs) = scm::pair().expect("a pair");
        let child = Command::new(env!("CARGO_BIN_EXE_ballastd")).arg("engine").stdin(Stdio::from(theirs)).spawn();
        let engine = Self { child: child.expect("an engine"), socket };
        let api = UnixListener::bind(dir.join("api.sock")).expect("a socket");
        let config = Config { runtime_dir: dir.to_owned(), ..Config::default() };
        let settings = wire::encode(&Settings::of(&config));
        let begin = Begin { keeper_pid: std::process::id(), restarts: 0, since_unix_s: 0, settings };
        engine.order(&Order::Begin(begin), &[api.as_fd()]);
        engine
    }

    fn order(&self, order: &Order, fds: &[BorrowedFd<'_>]) {
        scm::send(&self.socket, &wire::encode(order), fds).expect("it listens");
    }

    /// Give it an order that is reported, and wait for the result.
    fn done(&self, order: &Order) -> Result<(), String> {
        self.order(order, &[]);
        loop {
            let received = scm::receive(&self.socket).expect("receive").expect("it runs");
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

#[test]
fn an_engine_that_cannot_take_the_descriptors_of_a_process_says_that_it_does_not_serve_it() {
    let (uffd, uffd_features) = match Uffd::create(uffd::REQUIRED_FEATURES) {
        Ok(made) => made,
        Err(error) => return skip("native", error),
    };
    let dir = tempfile::tempdir().expect("a directory");
    let engine = Engine::start(dir.path());
    let ram = memfd::create("ballast-test-ram", RAM).expect("RAM");
    let guest = Mapping::shared(&ram, 0, RAM.0 as usize).expect("mapped");
    let (_store, arena) = RamStore::create(RamOptions::new(Budget::new(RAM))).expect("a store");
    let state = StateFile::create(VM, "test").expect("a state file");
    let id = memfd::file_id(&ram).expect("stat");
    state.add_region(&[id], &Extents::one(Bytes(0), RAM).expect("good"), None).expect("a region");
    let process = Process::find(engine.child.id()).expect("stat").expect("it runs");
    state.name_engine(process.pid, process.start);
    let stores = vec![StoreFiles { store: RAM_STORE, count: 1 }];
    let open =
        Order::OpenVm { vm: VM, vmm: "test".into(), pinned: None, may_pin: false, stores, files: 1, beside: false };
    engine.order(&open, &[state.fd(), arena.as_fd(), ram.as_fd()]);
    engine.done(&Order::Tell { seq: 1, vm: VM }).expect("it is open");
    let (control, _client) = scm::pair().expect("a pair");
    let spans = vec![(Span { hva: Hva(guest.addr() as u64), len: RAM }, 0)];
    let view = Order::AddView { vm: VM, pid: std::process::id(), uffd_features, spans, unserved_since_ns: None };
    let fds = [uffd.as_fd(), control.as_fd()];
    // Its lowest three descriptors are open: there is no place for another one.
    assert!(common::limit_descriptors(engine.child.id(), "3"));
    engine.order(&view, &fds);
    let why = engine.done(&Order::Tell { seq: 2, vm: VM }).expect_err("it does not serve that process");
    assert!(why.contains("is not served"), "{why}");
    let reach = Order::Reach { seq: 3, vm: VM, pid: std::process::id(), regions: vec![0] };
    engine.done(&reach).expect_err("it cannot touch pages that are far");
}
