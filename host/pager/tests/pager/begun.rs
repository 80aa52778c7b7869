//! Pages of a store on a disk or a network: the fault worker serves them when the reply comes, and a slow worker
//! otherwise. Against the real kernel. Needs root (userfaultfd).

use crate::common;

use std::collections::HashMap;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ballast_base::Bytes;
use ballast_base::store::{Ends, FILE_STORE, IoContext, OnReply, SlowStore};
use ballast_base::units::MIB;
use ballast_pager::vm::Hold;
use ballast_pager::vm::far::stores::SlowTier;
use ballast_pager::vm::stats::Counter;
use ballast_store::{DiskFault, GetOutcome, Handle, PageBytes, PageKey, PutOutcome, Store};
use ballast_testkit::NullStore;
use common::third::THIRD;
use common::{AMPLE, LIMIT, QUICK, RAM, Rig, SOON, churn, faulty_disk, until};

const EIO: i32 = 5;

/// How the server of a store replies to requests that were begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Replies {
    /// With the page, at once.
    Pages,
    Nothing,
    /// With a refusal, at once.
    Refusals,
    HangsUp,
}

/// A store whose server is at the other end of a socket for each request.
#[derive(Debug)]
struct Network {
    inner: NullStore,
    replies: Replies,
    /// Requests under way, by page: both ends.
    under_way: Mutex<HashMap<PageKey, (UnixStream, Option<UnixStream>)>>,
    begun: AtomicU64,
    /// Pages requested by a thread that may wait.
    got: AtomicU64,
}

impl Network {
    fn new(replies: Replies) -> Self {
        Self {
            inner: NullStore::new(AMPLE),
            replies,
            under_way: Mutex::default(),
            begun: AtomicU64::new(0),
            got: AtomicU64::new(0),
        }
    }
}

store_over! { inner, Network,
    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, context: IoContext<'_>) -> GetOutcome {
        let mut under_way = self.under_way.lock().expect("no panic");
        if let (Ends::AtOnce(watch), Replies::Nothing) = (context.ends, self.replies) {
            under_way.get(&key).into_iter().for_each(|(ours, _)| watch(ours.as_fd()));
            return GetOutcome::Busy;
        }
        let is_there = under_way.remove(&key).is_some() && self.replies == Replies::Pages;
        if !matches!(context.ends, Ends::AtOnce(_)) {
            self.got.fetch_add(1, Ordering::AcqRel);
        } else if !is_there {
            return GetOutcome::Busy;
        }
        self.inner.get(key, handle, out, context)
    }
}

impl SlowStore for Network {
    fn begin(&self, key: PageKey, _: Handle, watch: OnReply<'_>) -> bool {
        let (ours, mut servers) = UnixStream::pair().expect("sockets");
        watch(ours.as_fd());
        let servers = match self.replies {
            Replies::HangsUp => None,
            Replies::Nothing => Some(servers),
            Replies::Pages | Replies::Refusals => {
                servers.write_all(b"!").expect("write");
                Some(servers)
            }
        };
        self.begun.fetch_add(1, Ordering::AcqRel);
        self.under_way.lock().expect("no panic").insert(key, (ours, servers));
        true
    }
}

/// Moves most pages to this store, and then stops. Returns one page of each 64 KiB there, so that none is read ahead.
fn make_far(rig: &Rig, store: u8) -> Vec<u64> {
    rig.squeeze_into(store, LIMIT);
    rig.hold_still();
    rig.set_limit(None);
    let windows = rig.pages / 16;
    (0..windows).map(|at| at * 2531 % windows * 16).filter(|page| rig.is_in(store, *page)).collect()
}

fn touch(rig: &Rig, pages: &[u64], store: u8) {
    std::thread::scope(|scope| {
        let read = |pages: &[u64]| assert!(pages.iter().all(|page| rig.holds(*page, 1)), "a byte was lost");
        pages.chunks(pages.len() / 3 + 1).for_each(|pages| drop(scope.spawn(move || read(pages))));
    });
    until("all are back", || !pages.iter().any(|page| rig.is_in(store, *page)));
}

#[test]
fn pages_of_a_file_have_their_bytes_if_begun_reads_are_late_short_or_fail() {
    let Some((store, faults)) = faulty_disk() else { return };
    let rig = Rig::tiered(RAM, AMPLE, QUICK, vec![SlowTier::new(FILE_STORE, "file store", store)], SOON).filled();
    for _ in 0..3 {
        let pages = make_far(&rig, FILE_STORE);
        assert!(pages.len() > 50);
        // As many quick reads as failing ones, so no block fails so often that its page is given up.
        for fault in [
            DiskFault::Takes(Duration::from_millis(1)),
            DiskFault::Short(512),
            DiskFault::Takes(Duration::from_millis(5)),
            DiskFault::Errno(EIO),
            DiskFault::Late,
            DiskFault::Takes(Duration::from_millis(15)),
        ] {
            faults.fail_reads(6, DiskFault::Takes(Duration::ZERO));
            faults.fail_reads(4, fault);
        }
        touch(&rig, &pages, FILE_STORE);
        faults.forget();
        rig.check_census();
        rig.vm.hold(Hold::Shared, None);
        rig.check_bytes();
    }
}

/// The RAM store is so small that pages move to the file at once, each time to other blocks.
#[test]
fn pages_that_move_while_others_are_read_from_their_blocks_keep_the_last_write() {
    const FAULTS: u64 = 2000;
    const THREADS: u64 = 8;
    let mut made = Vec::new();
    for _ in 0..2 {
        let Some((store, faults)) = faulty_disk() else { return };
        for _ in 0..100 {
            faults.fail_reads(30, DiskFault::Takes(Duration::ZERO));
            faults.fail_reads(10, DiskFault::Takes(Duration::from_millis(1)));
            faults.fail_reads(1, DiskFault::Short(512));
        }
        let tier = SlowTier::new(FILE_STORE, "file store", store.clone());
        let rig = Rig::tiered(RAM, Bytes(2 * MIB), Duration::from_millis(1), vec![tier], Duration::from_millis(2));
        rig.set_limit(Some(LIMIT));
        made.push((rig, store, faults));
    }
    let is_done = || made.iter().all(|(rig, ..)| rig.vm.stats().get(Counter::FaultFile) > FAULTS);
    std::thread::scope(|scope| {
        for (rig, ..) in &made {
            (0..THREADS).for_each(|thread| drop(scope.spawn(move || churn(rig, thread, THREADS, is_done))));
        }
    });
    for (rig, store, faults) in &made {
        faults.forget();
        rig.count_exactly();
        // The spill worker may still be freeing the last empty area.
        until("the blocks are those of its pages", || store.validate().is_ok());
        assert_eq!(rig.vm.stats().get(Counter::Poisoned), 0);
    }
}

#[test]
fn a_fault_worker_serves_a_page_when_its_reply_comes_and_a_slow_worker_otherwise() {
    for replies in [Replies::Pages, Replies::Nothing, Replies::Refusals, Replies::HangsUp] {
        let store = Arc::new(Network::new(replies));
        let rig = Rig::tiered(RAM, AMPLE, QUICK, vec![SlowTier::new(THIRD, "network", store.clone())], SOON).filled();
        let pages = make_far(&rig, THIRD);
        let counts = || [&store.begun, &store.got].map(|count| count.load(Ordering::Acquire));
        let before = counts();
        touch(&rig, &pages, THIRD);
        let (begun, got, far) = (counts()[0] - before[0], counts()[1] - before[1], pages.len() as u64);
        assert!(far > 50 && begun * 2 > far, "{replies:?}: {begun} requests for {far} pages");
        match replies {
            Replies::Pages => assert!(got * 2 < far, "{got} of {far} pages were waited for elsewhere"),
            _ => assert!(got * 2 > far, "{replies:?}: {got} of {far}"),
        }
        rig.check_census();
        rig.vm.hold(Hold::Shared, None);
        rig.check_bytes();
    }
}
