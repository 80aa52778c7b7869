//! Pages of a store on a disk or a network: the fault worker has them when the reply comes, and a slow worker if none
//! does. Against the real kernel. Needs root (userfaultfd).

mod common;

use std::collections::HashMap;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ballast_base::store::OnReply;
use ballast_base::units::MIB;
use ballast_base::{Bytes, PAGE_SIZE, PageIdx};
use ballast_page::copies::store_number;
use ballast_pager::tier::stores::Tier;
use ballast_pager::vm::Hold;
use ballast_pager::vm::stats::Counter;
use ballast_store::{GetOutcome, Handle, NullStore, PageBytes, PageKey, PutOutcome, Recovered, Store, StoreUsage};
use common::third::THIRD;
use common::{Rig, until};

const QUICK: Duration = Duration::from_millis(20);
const SOON: Duration = Duration::from_millis(10);
const RAM: Bytes = Bytes(32 * MIB);
const LIMIT: Bytes = Bytes(8 * MIB);
const AMPLE: Bytes = Bytes(64 * MIB);

/// How the server of a store replies to requests that were begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Replies {
    /// With the page, at once.
    Pages,
    /// Not at all.
    Nothing,
    /// With something else, at once.
    Refusals,
    /// It has hung up.
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
    /// Pages that a thread asked for that may wait.
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

impl Store for Network {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        self.inner.put(key, bytes)
    }

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

    fn get_begun(&self, key: PageKey, handle: Handle, out: &mut PageBytes, watch: OnReply<'_>) -> GetOutcome {
        let mut under_way = self.under_way.lock().expect("no panic");
        if self.replies == Replies::Nothing {
            under_way.get(&key).into_iter().for_each(|(ours, _)| watch(ours.as_fd()));
            return GetOutcome::Busy;
        }
        match (under_way.remove(&key), self.replies) {
            (Some(_), Replies::Pages) => self.inner.get(key, handle, out),
            _ => GetOutcome::Busy,
        }
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes) -> GetOutcome {
        self.got.fetch_add(1, Ordering::AcqRel);
        self.under_way.lock().expect("no panic").remove(&key);
        self.inner.get(key, handle, out)
    }

    fn free(&self, key: PageKey, handle: Handle) {
        self.inner.free(key, handle);
    }

    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        self.inner.recover(live)
    }

    fn usage(&self) -> StoreUsage {
        self.inner.usage()
    }
}

#[test]
fn a_fault_worker_has_a_page_when_its_reply_comes_and_a_slow_worker_gets_it_if_none_does() {
    for replies in [Replies::Pages, Replies::Nothing, Replies::Refusals, Replies::HangsUp] {
        let store = Arc::new(Network::new(replies));
        let rig = Rig::tiered(RAM, AMPLE, QUICK, vec![Tier::slow(THIRD, "network", store.clone())], SOON);
        rig.fill_all();
        let region = rig.vm.region(0).expect("region");
        let is_far = |page: &u64| store_number(region.word(PageIdx(*page))) == Some(THIRD);
        rig.squeeze(LIMIT);
        until("what is far is there", || {
            let far = rig.vm.stats().get(Counter::Far);
            far > (RAM.0 - LIMIT.0) / PAGE_SIZE as u64 / 2
                && (0..rig.pages).filter(is_far).count() as u64 * 10 > far * 9
        });
        rig.vm.hold(Hold::Shared, Some("test".into()));
        rig.wait_for_quarantine();
        rig.set_limit(None);
        // A page of each 64 KiB, in no order: none comes with another.
        let windows = rig.pages / 16;
        let pages: Vec<u64> = (0..windows).map(|at| at * 2531 % windows * 16).filter(is_far).collect();
        let counts = || [&store.begun, &store.got].map(|count| count.load(Ordering::Acquire));
        let before = counts();
        std::thread::scope(|scope| {
            let read = |pages: &[u64]| assert!(pages.iter().all(|page| rig.holds(*page, 1)), "a byte was lost");
            pages.chunks(pages.len() / 3 + 1).for_each(|pages| drop(scope.spawn(move || read(pages))));
        });
        until("all are back", || !pages.iter().any(is_far));
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
