//! A process of a VM that runs no client of ours: we have its userfaultfd and the RAM file, and nothing else of it.
//!
//! Before: this test program starts itself again as that process, with a socket as its standard input. After: it has
//! read, through faults that are served here, what was far, and its end was seen by nobody's word.
//! Threads: in that process none of ours. Promise: no sleeps; that nothing is reclaimed is shown by what the VM
//! says, and by counters after a request that the reclaim worker has carried out.

mod common;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ballast_base::{Bytes, Hva, MIB, PAGE_SIZE};
use ballast_page::page_state::State;
use ballast_pager::vm::Hold;
use ballast_pager::vm::process_peer::ProcessPeer;
use ballast_pager::vm::shard::Shards;
use ballast_pager::vm::stats::Counter;
use ballast_pager::vm::view::View;
use ballast_sys::{Mapping, Uffd, scm, uffd};

use common::{Rig, mapped_at, until};

const ENV: &str = "BALLAST_TEST_PROCESS";
const RAM: Bytes = Bytes(8 * MIB);
const LIMIT: Bytes = Bytes(4 * MIB);
const QUICK: Duration = Duration::from_millis(20);
/// What it is asked for: a page, and whether to write to it.
const READ: u8 = b'r';
const WRITE: u8 = b'w';

/// Not a test of its own: what the other process runs, until its socket ends or it is killed.
#[test]
fn process() {
    if std::env::var_os(ENV).is_none() {
        return;
    }
    // SAFETY: standard input is open as long as this process runs.
    let socket = unsafe { BorrowedFd::borrow_raw(0) };
    let ram = scm::receive(socket).expect("receive").expect("RAM").fds.remove(0);
    let guest = Mapping::shared(&ram, 0, RAM.0 as usize).expect("map");
    let (uffd, _) = Uffd::create(uffd::REQUIRED_FEATURES).expect("userfaultfd");
    scm::send(socket, &(guest.addr() as u64).to_le_bytes(), &[uffd.as_fd()]).expect("send");
    while let Some(asked) = scm::receive(socket).expect("receive") {
        let page = usize::from(u16::from_le_bytes([asked.bytes[1], asked.bytes[2]]));
        let mut bytes = [0; PAGE_SIZE];
        if asked.bytes[0] == WRITE {
            guest.copy_in(page * PAGE_SIZE, &[asked.bytes[3]; PAGE_SIZE]);
        }
        guest.copy_out(page * PAGE_SIZE, &mut bytes);
        scm::send(socket, &bytes, &[]).expect("send");
    }
}

/// The process, ended with this.
struct Process {
    child: Child,
    socket: OwnedFd,
}

impl Process {
    /// One that maps the RAM of this rig, as one more view.
    fn join(rig: &Rig) -> Self {
        let (socket, theirs) = scm::pair().expect("socketpair");
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "process", "--nocapture"])
            .env(ENV, "1")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .expect("start the process");
        let region = rig.vm.region(0).expect("region");
        scm::send(&socket, b"ram", &[region.files()[0].as_fd()]).expect("send");
        let mut answer = scm::receive(&socket).expect("receive").expect("a userfaultfd");
        let at = Hva(u64::from_le_bytes(answer.bytes.try_into().expect("an address")));
        let shards = Shards::new(vec![Uffd::from(answer.fds.remove(0))]).expect("one");
        let peer = Arc::new(ProcessPeer::open(child.id()).expect("pidfd"));
        let view = Arc::new(View::new(child.id(), shards, uffd::REQUIRED_FEATURES, peer));
        rig.vm.add_view(view, &mapped_at(at, RAM)).expect("view");
        Self { child, socket }
    }

    /// What it reads in this page, after it has written this byte all over it.
    fn ask(&self, what: u8, page: u64, byte: u8) -> Vec<u8> {
        let [low, high] = (page as u16).to_le_bytes();
        scm::send(&self.socket, &[what, low, high, byte], &[]).expect("send");
        scm::receive(&self.socket).expect("receive").expect("it lives").bytes
    }

    fn read(&self, page: u64) -> Vec<u8> {
        self.ask(READ, page, 0)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        self.child.wait().expect("wait");
    }
}

fn squeezed() -> Rig {
    let rig = Rig::new(RAM, Bytes(64 * MIB), QUICK);
    rig.fill_all();
    rig.squeeze(LIMIT);
    rig
}

fn filled(page: u64) -> Vec<u8> {
    ballast_testkit::pages::half_compressible(1 << 32 | page).to_vec()
}

#[test]
fn a_process_without_a_client_reads_far_pages_through_its_userfaultfd_alone() {
    let rig = squeezed();
    let far = rig.vm.stats().get(Counter::Far);
    assert!(far > 0);
    let process = Process::join(&rig);
    for page in 0..rig.pages {
        assert_eq!(process.read(page), filled(page), "page {page}");
    }
    rig.wait_until_none_is_far();
    // What either writes the other reads.
    assert_eq!(process.ask(WRITE, 3, 0x77), [0x77; PAGE_SIZE]);
    assert_eq!(rig.word(3).load(std::sync::atomic::Ordering::Acquire), 0x7777_7777_7777_7777);
    rig.fill(3, 1);
    assert_eq!(process.read(3), filled(3));
    rig.check_bytes();
}

#[test]
fn while_a_process_maps_it_in_which_nothing_can_be_zapped_nothing_goes_and_the_vm_says_why() {
    let rig = squeezed();
    let process = Process::join(&rig);
    let why = rig.vm.held().expect("it is held");
    let said = format!("process {} maps it and runs no client of Ballast", process.child.id());
    assert!(rig.vm.is_held_for(Hold::NoZap) && why.starts_with(&said), "{why}");
    rig.wait_for_quarantine();
    for page in 0..rig.pages {
        process.read(page);
    }
    let zapped = rig.vm.stats().get(Counter::Zapped);
    // A lower limit is looked at, and changes nothing.
    let before = rig.vm.resident().expect("stat");
    rig.set_limit(Some(Bytes(MIB)));
    rig.vm.restore_for(Hold::Kept, "the test says so".into()).expect("all is there");
    rig.vm.hold(Hold::Kept, None);
    assert_eq!(rig.vm.stats().get(Counter::Zapped), zapped);
    assert_eq!(rig.vm.resident().expect("stat"), before);
    assert!((0..rig.pages).all(|page| rig.state_of(page) == State::Resident));
}

#[test]
fn the_end_of_a_process_without_a_client_is_seen_and_then_the_vm_is_reclaimed_from_again() {
    let rig = squeezed();
    let process = Process::join(&rig);
    for page in 0..rig.pages {
        assert_eq!(process.read(page), filled(page));
    }
    let pid = process.child.id();
    drop(process);
    until("its end is seen", || rig.vm.held().is_none());
    assert!(rig.vm.views().iter().all(|view| view.pid != pid) && rig.reported("gone"));
    until("resident is at the limit", || rig.resident() <= LIMIT);
    rig.check_bytes();
}

#[test]
fn a_process_without_a_client_whose_memory_cannot_be_kept_right_is_killed() {
    use std::os::unix::process::ExitStatusExt;
    let rig = squeezed();
    let mut process = Process::join(&rig);
    rig.vm.fail_stop("the test says so");
    let status = process.child.wait().expect("wait");
    assert_eq!(status.signal(), Some(9), "{status}");
    until("its end is seen", || rig.vm.held().is_none());
}

#[test]
fn a_process_that_is_not_there_can_be_no_peer() {
    let mut child = Command::new("true").spawn().expect("start");
    child.wait().expect("wait");
    for pid in [child.id(), 0, u32::MAX] {
        assert!(ProcessPeer::open(pid).is_err(), "{pid}");
    }
}
