//! Takes the place of a VM's remote store, if the VM has pages in a cluster that the settings no longer name.
//!
//! Before: an operator removed `[remote]`, and an engine opens a VM whose state file names a cluster. After: operators
//! know it; a thread that touches one of those pages waits, as for a cluster that does not respond.
//! Threads: any; the slow workers wait in `get`. Units: pages.
//! Promise: no page counts as lost, and a waiting page costs a few requests a second.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use ballast_base::store::{Ends, IoContext, Recovered};
use ballast_pager::vm::Reporter;
use ballast_store::{
    Attach, DurableStore, GetOutcome, Handle, PageBytes, PageKey, PutOutcome, SlowStore, Store, StoreUsage,
};

const PAUSE: Duration = Duration::from_millis(100);

pub struct MissingStore {
    name: String,
    report: Reporter,
    pages: AtomicU64,
}

impl std::fmt::Debug for MissingStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MissingStore({:?} pages)", self.pages)
    }
}

impl MissingStore {
    pub fn new(name: String, report: Reporter) -> Self {
        Self { name, report, pages: AtomicU64::new(0) }
    }

    fn has(&self, pages: u64) {
        if self.pages.swap(pages, Relaxed) == 0 && pages > 0 {
            let text = format!(
                "{pages} pages of VM {} are in a cluster, and the settings have no [remote]: who touches one waits, \
                 and after a day or two another host may remove them. Put [remote] back and restart ballastd",
                self.name
            );
            (self.report)("remote-missing", text);
        }
    }
}

impl Store for MissingStore {
    fn put(&self, _: PageKey, _: &PageBytes) -> PutOutcome {
        PutOutcome::Busy
    }

    fn get(&self, _: PageKey, _: Handle, _: &mut PageBytes, context: IoContext<'_>) -> GetOutcome {
        if !matches!(context.ends, Ends::AtOnce(_)) {
            std::thread::sleep(PAUSE);
        }
        GetOutcome::Busy
    }

    fn get_run(&self, pages: &[(PageKey, Handle)], out: &mut [PageBytes], _: IoContext<'_>) -> Vec<GetOutcome> {
        std::thread::sleep(PAUSE);
        vec![GetOutcome::Busy; pages.len().min(out.len())]
    }

    /// The page stays in the cluster: an engine with `[remote]` sweeps it.
    fn free(&self, _: PageKey, _: Handle) {
        let _ = self.pages.fetch_update(Relaxed, Relaxed, |pages| Some(pages.saturating_sub(1)));
    }

    fn usage(&self) -> StoreUsage {
        StoreUsage { pages: self.pages.load(Relaxed), bytes: 0, budget_bytes: 0 }
    }
}

impl DurableStore for MissingStore {
    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        self.has(live.count() as u64);
        Ok(Recovered::default())
    }

    fn attach(&self) -> Option<&dyn Attach> {
        Some(self)
    }
}

impl SlowStore for MissingStore {
    fn last_refusal(&self) -> Option<String> {
        Some("the settings have no [remote]".into())
    }

    fn refuses(&self) -> bool {
        true
    }
}

impl Attach for MissingStore {
    fn attach_shared(&self, _: &mut dyn Iterator<Item = (PageKey, Handle)>) {}

    fn attach_exclusive(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        self.has(live.count() as u64);
    }
}
