//! Overdue: notices when a slow store does not return a page in time, and tells operators.
//!
//! Before: a worker asks a slow store for a page. After: it has the page, or the outcome is `Busy`. When a worker has
//! waited for a page as long as the store's deadline, an event says so, and another one says when that is over.
//! Threads: any. Promise: silence is not loss. The wait goes on until the store returns the page or reports that it has
//! lost it.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ballast_base::store::{Ending, OnReply, Recovered};
use ballast_store::{GetOutcome, Handle, PageBytes, PageKey, PutOutcome, Store, StoreUsage};

/// Tells operators something: a kind of event, and a sentence.
pub(crate) type Tell = Arc<dyn Fn(&str, String) + Send + Sync>;

/// A page that no worker asked for in this time: its thread is gone, or it was discarded.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(10);

/// A slow store, and the pages that workers wait for.
pub(crate) struct Overdue {
    store: Arc<dyn Store>,
    name: &'static str,
    deadline: Duration,
    waiting: Mutex<Waiting>,
    tell: OnceLock<Tell>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Since when it is waited for, and when it was last asked for.
    pages: HashMap<(PageKey, Handle), (Instant, Instant)>,
    /// Since when, if operators were told that the store is overdue.
    said: Option<Instant>,
}

impl std::fmt::Debug for Overdue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.store.fmt(f)
    }
}

impl Overdue {
    /// Operators are told when a page was waited for this long.
    pub fn new(store: Arc<dyn Store>, name: &'static str, deadline: Duration) -> Self {
        Self { store, name, deadline, waiting: Mutex::default(), tell: OnceLock::new() }
    }

    /// Sets who is told. Only the first call counts: a VM that is opened again has the same operators.
    pub fn tell(&self, tell: &Tell) {
        let _ = self.tell.set(tell.clone());
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A worker asked for this page, with this outcome.
    fn was_asked(&self, key: PageKey, handle: Handle, outcome: GetOutcome) {
        let (mut waiting, now) = (self.waiting(), Instant::now());
        if outcome == GetOutcome::Busy {
            let (since, asked) = waiting.pages.entry((key, handle)).or_insert((now, now));
            *asked = now;
            let since = *since;
            if now - since < self.deadline || waiting.said.is_some() {
                return;
            }
            waiting.said = Some(since);
            let (count, waited) = (waiting.pages.len(), now - since);
            drop(waiting);
            let PageKey { region, page } = key;
            let why = self.store.last_refusal().map(|why| format!(" ({why})")).unwrap_or_default();
            let text = format!(
                "the {} has not returned page {page} of region {} for {:.1} s; {count} pages are waited for, and go on \
                 waiting: nothing is lost{why}",
                self.name,
                region.number,
                waited.as_secs_f64()
            );
            return self.say("store-late", text);
        }
        waiting.pages.remove(&(key, handle));
        self.settle(waiting, now);
    }

    /// The page is there, or no worker waits for it any more: tells operators, if they were told of the wait.
    fn settle(&self, mut waiting: MutexGuard<'_, Waiting>, now: Instant) {
        if waiting.said.is_none() {
            return;
        }
        let deadline = self.deadline;
        waiting.pages.retain(|_, (_, asked)| now - *asked < FORGOTTEN_AFTER);
        if waiting.pages.values().any(|(since, _)| now - *since >= deadline) {
            return;
        }
        let Some(since) = waiting.said.take() else { return };
        drop(waiting);
        let text = format!("the {} returns pages again, after {:.1} s", self.name, (now - since).as_secs_f64());
        self.say("store-back", text);
    }

    fn say(&self, kind: &str, text: String) {
        if let Some(tell) = self.tell.get() {
            tell(kind, text);
        }
    }
}

impl Store for Overdue {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        self.store.put(key, bytes)
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes) -> GetOutcome {
        let outcome = self.store.get(key, handle, out);
        self.was_asked(key, handle, outcome);
        outcome
    }

    fn begin(&self, key: PageKey, handle: Handle, watch: OnReply<'_>) -> bool {
        self.store.begin(key, handle, watch)
    }

    fn get_begun(&self, key: PageKey, handle: Handle, out: &mut PageBytes, watch: OnReply<'_>) -> GetOutcome {
        let outcome = self.store.get_begun(key, handle, out, watch);
        if outcome == GetOutcome::Found {
            self.was_asked(key, handle, outcome);
        }
        outcome
    }

    fn put_run(&self, first: PageKey, pages: &[PageBytes], outcomes: &mut Vec<PutOutcome>) {
        self.store.put_run(first, pages, outcomes);
    }

    fn put_blobs(&self, first: PageKey, pages: &[PageBytes], blobs: &[Vec<u8>], outcomes: &mut Vec<PutOutcome>) {
        self.store.put_blobs(first, pages, blobs, outcomes);
    }

    fn begin_put(self: Arc<Self>, first: PageKey, pages: &[PageBytes], blobs: &[Vec<u8>]) -> Ending {
        self.store.clone().begin_put(first, pages, blobs)
    }

    fn get_run(&self, first: PageKey, handles: &[Handle], out: &mut [PageBytes], outcomes: &mut Vec<GetOutcome>) {
        let before = outcomes.len();
        self.store.get_run(first, handles, out, outcomes);
        // A worker that asks for a run waits for all of it.
        let worst = outcomes[before..].iter().find(|outcome| **outcome == GetOutcome::Busy);
        if let (Some(handle), Some(outcome)) = (handles.first(), worst.or(outcomes.get(before))) {
            self.was_asked(first, *handle, *outcome);
        }
    }

    fn get_some(&self, pages: &[(PageKey, Handle)], out: &mut [PageBytes], outcomes: &mut Vec<GetOutcome>) {
        let before = outcomes.len();
        self.store.get_some(pages, out, outcomes);
        if self.waiting().pages.is_empty() {
            return;
        }
        // Some of the pages are read ahead, and nobody waits for these: a fault on one that is busy asks for it alone.
        for ((key, handle), outcome) in pages.iter().zip(&outcomes[before..]) {
            if *outcome != GetOutcome::Busy || self.waiting().pages.contains_key(&(*key, *handle)) {
                self.was_asked(*key, *handle, *outcome);
            }
        }
    }

    fn free(&self, key: PageKey, handle: Handle) {
        self.store.free(key, handle);
        let mut waiting = self.waiting();
        if waiting.pages.remove(&(key, handle)).is_some() {
            self.settle(waiting, Instant::now());
        }
    }

    fn tidy(&self) {
        self.store.tidy();
    }

    fn is_untidy(&self) -> bool {
        self.store.is_untidy()
    }

    fn takes_room(&self, handle: Handle) -> bool {
        self.store.takes_room(handle)
    }

    fn is_short(&self) -> bool {
        self.store.is_short()
    }

    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        self.store.recover(live)
    }

    fn follow(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        self.store.follow(live);
    }

    fn own(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        self.store.own(live);
    }

    fn is_told(&self) -> bool {
        self.store.is_told()
    }

    fn must_recover(&self) -> bool {
        self.store.must_recover()
    }

    fn refuses(&self) -> bool {
        self.store.refuses()
    }

    fn last_refusal(&self) -> Option<String> {
        self.store.last_refusal()
    }

    fn usage(&self) -> StoreUsage {
        self.store.usage()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::store::RegionKey;
    use ballast_base::wire::VmId;
    use ballast_base::{Bytes, PAGE_SIZE, PageIdx};
    use ballast_testkit::{FaultyStore, NullStore};

    #[test]
    fn a_page_that_is_read_ahead_is_not_waited_for_until_a_fault_asks_for_it() {
        let (store, faults) = FaultyStore::new(NullStore::new(Bytes(1 << 20)));
        let overdue = Overdue::new(Arc::new(store), "test", Duration::from_secs(5));
        let key = RegionKey { vm: VmId([1; 16]), number: 0 }.page(PageIdx(3));
        let PutOutcome::Stored(handle) = overdue.put(key, &[7; PAGE_SIZE]) else { panic!("full") };
        let waited_for = || overdue.waiting().pages.len();
        let (mut out, mut outcomes) = ([[0; PAGE_SIZE]], Vec::new());
        faults.busy_gets(3);
        overdue.get_some(&[(key, handle)], &mut out, &mut outcomes);
        assert_eq!((outcomes[0], waited_for()), (GetOutcome::Busy, 0));
        assert_eq!((overdue.get(key, handle, &mut out[0]), waited_for()), (GetOutcome::Busy, 1));
        overdue.get_some(&[(key, handle)], &mut out, &mut outcomes);
        assert_eq!((outcomes[1], waited_for()), (GetOutcome::Busy, 1));
        overdue.get_some(&[(key, handle)], &mut out, &mut outcomes);
        assert_eq!((outcomes[2], waited_for()), (GetOutcome::Found, 0));
    }
}
