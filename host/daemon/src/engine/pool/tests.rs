//! The pool of an engine: parts that cannot be opened or fail, and VMMs that wait for memory.

use std::cell::Cell;
use std::process::Command;

use ballast_base::MIB;
use ballast_base::pool::{Nodes, Pages, Take};
use ballast_pool::Far;
use ballast_sys::lock::Lock;
use ballast_sys::memfd;
use ballast_testkit::skip;

use super::*;

#[test]
fn parts_and_sockets_that_fail_are_tried_again_and_the_other_part_works() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let place = Pooling { dir: at("pool"), socket: at("later/pool.sock"), gid: None };
    std::fs::create_dir_all(at("pool/gib")).expect("make");
    std::fs::write(at("pool/gib/state"), "no state").expect("write");
    let service = PoolService::new(place.clone());
    *service.state.locked() = State::Ours(Box::new(Parts::open(&place.dir).expect("one part is enough")));
    let mut listens = false;
    for _ in 0..2 {
        let missing = service.complete(&place, &mut listens);
        assert!(missing[0].contains("pages of 1 GiB cannot be used: the state of the pool"), "{missing:?}");
        assert!(missing[1].contains("Listening on") && !listens, "{missing:?}");
    }
    let stat = service.stat();
    assert!(stat.notes.iter().any(|note| note.contains("Listening on")), "{stat:?}");
    assert!(stat.gib.is_some_and(|gib| gib.notes[0].contains("cannot be used")));
    let mut lend = LendRequest { when_short: true, ..LendRequest::default() };
    let said = |lend: &LendRequest| service.lend(lend).expect_err("there is nothing to lend").to_string();
    assert!(said(&lend).contains("nothing is reserved"), "the other part does not work");
    lend.pages = PoolPages::Gib;
    assert!(said(&lend).contains("cannot be used"));
    std::fs::remove_file(at("pool/gib/state")).expect("remove");
    std::fs::create_dir(at("later")).expect("make");
    assert_eq!(service.complete(&place, &mut listens), Vec::<String>::new());
    assert!(at("later/pool.sock").exists());
    assert!(listens && service.stat().notes.is_empty() && said(&lend).contains("nothing is reserved"));
}

#[test]
fn a_part_that_fails_stops_neither_the_other_part_nor_the_zeroing() {
    let dir = tempfile::tempdir().expect("a directory");
    let place = Pooling { dir: dir.path().join("pool"), socket: dir.path().join("pool.sock"), gid: None };
    let service = PoolService::new(place.clone());
    *service.state.locked() = State::Ours(Box::new(Parts::open(&place.dir).expect("open")));
    for file in ["pool/lending.json", "pool/gib/lending.json"] {
        std::fs::write(dir.path().join(file), "no limits").expect("write");
    }
    let long_ago = Instant::now().checked_sub(AGAIN_EVERY).expect("the host is up");
    let (mut looked, mut again, mut lenders) = (None, long_ago, Page::ALL.map(|_| Lender::default()));
    let mut round = |lenders: &mut [Lender; 2]| {
        let said = service.round(&mut looked, &mut again, None, lenders, &Events::default());
        assert!(looked.is_some() && again > long_ago, "it did not come to what is to be zeroed");
        said
    };
    let said = round(&mut lenders).expect_err("it is damaged").to_string();
    assert!(said.contains("what may be lent"), "{said}");
    let State::Ours(parts) = &mut *service.state.locked() else { panic!("it is ours") };
    for (page, reserve) in parts.each() {
        let done = lenders[page as usize].adjust(reserve, 0);
        assert!(matches!(done, Ok(None)), "the part of {page} was not tried: it would be now");
    }
}

/// A pool of one node in files of 16 MiB, all of it zeroed. Pages that the kernel gave for it are returned on drop.
struct Own {
    service: Arc<PoolService>,
    dir: tempfile::TempDir,
    _one: MutexGuard<'static, ()>,
}

/// One test at a time: they share the kernel's free huge pages, and one test takes all of these.
static ONE: Mutex<()> = Mutex::new(());

impl Own {
    fn new(mib: u64) -> Option<Self> {
        let dir = tempfile::tempdir().expect("a directory");
        let place = Pooling { dir: dir.path().join("pool"), socket: dir.path().join("pool.sock"), gid: None };
        let service = PoolService::new(place.clone());
        let one = ONE.locked();
        let own = Self { service, dir, _one: one };
        if !rustix::process::geteuid().is_root() {
            skip("root", "only root mounts file systems and reserves huge pages");
            return None;
        }
        *own.service.state.locked() = State::Ours(Box::new(Parts::open(&place.dir).expect("open")));
        let file_bytes = Some(16 * MIB);
        let request = PoolRequest { bytes: Some(mib * MIB), file_bytes, ..PoolRequest::default() };
        let nodes = own.service.reserve(&request).map(|_| own.stat().nodes).unwrap_or_default();
        if nodes.len() != 1 || nodes[0].reserved_bytes != mib * MIB {
            skip("memory", format!("nodes: {nodes:?}"));
            return None;
        }
        own.work();
        Some(own)
    }

    fn stat(&self) -> PoolStat {
        self.service.stat()
    }

    /// Does the work of the pool's thread, until all is zeroed.
    fn work(&self) {
        while self.stat().nodes[0].dirty_bytes > 0 {
            self.round(true);
        }
    }

    /// `again`: also slices that found no page before.
    fn round(&self, again: bool) {
        let mut lenders = Page::ALL.map(|_| Lender::default());
        let before = if again { AGAIN_EVERY } else { Duration::ZERO };
        let mut before = Instant::now().checked_sub(before).expect("the host is up");
        let least = Some(Duration::from_millis(1));
        let done = self.service.round(&mut None, &mut before, least, &mut lenders, &Events::default());
        done.expect("nothing fails");
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let all = LendRequest { bytes: 1 << 40, ..LendRequest::default() };
        if let State::Ours(parts) = &mut *self.service.state.locked() {
            parts.each().for_each(|(_, part)| drop(part.tend()));
        }
        let _ = self.service.lend(&all);
        for files in ["pool/2M", "pool/gib/1G"] {
            let _ = Command::new("umount").arg("-l").arg(self.dir.path().join(files)).output();
        }
    }
}

#[test]
fn a_vm_waits_for_memory_of_one_that_is_gone_unless_its_vmm_hangs_up() {
    let Some(own) = Own::new(16) else { return };
    let all = Take { name: "vm".into(), size: Bytes(16 * MIB), pages: Pages::Slices, nodes: Nodes::Any };
    let first = Cell::new(Some(own.service.take(&all, || panic!("it is there")).expect("it is there")));
    let said = own.service.take(&all, || true).expect_err("it hung up").to_string();
    assert!(said.contains("does not wait"), "{said}");
    // The first VM has got its memory, and is gone, before the thread that sent it continues.
    let goes_on = || {
        drop(first.take());
        own.work();
        false
    };
    let second = own.service.take(&all, goes_on).expect("it comes back");
    drop(second);
}

#[test]
fn memory_promised_to_others_is_refused_when_all_is_zeroed() {
    let Some(own) = Own::new(352) else { return };
    let take = |mib: u64, pages| {
        let wanted = Take { name: "vm".into(), size: Bytes(mib * MIB), pages, nodes: Nodes::Any };
        let tries = Cell::new(0);
        let tried = || {
            tries.set(tries.get() + 1);
            assert!(tries.get() < 10, "it waits for what does not come");
            own.work();
            false
        };
        let handed = own.service.take(&wanted, tried);
        handed.map(|mut handed| std::mem::take(&mut handed.grant.files)).map_err(|error| error.to_string())
    };
    // More than is set aside in advance.
    let on_demand = take(330, Pages::OnDemand).expect("it is there");
    own.work();
    // 22 MiB are left, but the rest of its second file would be kept from others.
    let said = take(20, Pages::Slices).expect_err("it would take 32 MiB");
    assert!(said.contains("330 MiB are promised to VMs on demand"), "{said}");
    own.work();
    take(16, Pages::Slices).expect("one file is left");
    drop(on_demand);
}

#[test]
fn a_vm_waits_for_pages_that_another_program_got_before_they_were_zeroed() {
    let Some(own) = Own::new(16) else { return };
    let all = Take { name: "vm".into(), size: Bytes(16 * MIB), pages: Pages::Slices, nodes: Nodes::Any };
    drop(own.service.take(&all, || panic!("it is there")).expect("it is there"));
    if let State::Ours(parts) = &mut *own.service.state.locked() {
        assert_eq!(parts.of(Page::Huge).expect("it is open").tend().expect("tend"), 1);
    }
    let free = Bytes(ballast_pool::Host::default().pages(0).expect("pages").free << 21);
    let hog = memfd::create_huge("ballast-hog", free).expect("a file");
    memfd::allocate(&hog, 0, free.0).expect("all free pages");
    let hog = Cell::new(Some(hog));
    while own.stat().waiting_bytes < 16 * MIB {
        own.round(false);
    }
    let goes_on = || {
        drop(hog.take());
        own.work();
        false
    };
    drop(own.service.take(&all, goes_on).expect("they come back"));
}

#[test]
fn a_promise_is_taken_back_if_a_simultaneous_change_leaves_too_little() {
    let Some(own) = Own::new(32) else { return };
    let far = Arc::new(Mutex::new(Vec::new()));
    let (next, numa) = (far.clone(), own.stat().nodes[0].numa);
    // The amounts that VMs can have far, one for each request.
    let next = move || {
        let far = Bytes(next.lock().expect("whole").pop().unwrap_or(0) * MIB);
        Far { all: far, nodes: [(numa, far)].into() }
    };
    own.service.demand.link(demand::Links { far: Box::new(next), short: Box::new(|| ()) });
    let more = PoolRequest { bytes: Some(32 * MIB), overcommit_percent: Some(150), ..PoolRequest::default() };
    own.service.reserve(&more).expect("more may be promised");
    let take = |mib: u64, of: [u64; 2]| {
        *far.lock().expect("whole") = vec![of[1], of[0]];
        let wanted = Take { name: "vm".into(), size: Bytes(mib * MIB), pages: Pages::OnDemand, nodes: Nodes::Any };
        own.service.take(&wanted, || panic!("it waits"))
    };
    let promised = || own.stat().promised_bytes / MIB;
    let all = take(32, [0, 0]).expect("all that there is");
    // The memory can go far when the promise is made, and cannot when the promise is checked again.
    let said = take(8, [32, 0]).expect_err("it could not be kept").to_string();
    assert!(said.contains("cannot be promised") && promised() == 32, "{said}");
    let other = take(8, [32, 32]).expect("it can be kept");
    assert_eq!(promised(), 40);
    drop((all, other));
}
