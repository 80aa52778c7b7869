//! Overdue: notices that a slow store does not return a page in time, and tells operators.
//!
//! Before: a worker asked a slow store for a page ([`ballast_page::copies::Source`]). After: an event if a worker has
//! waited for a page for the store's deadline, and another one when the store returns pages again.
//! Threads: any.
//! Promise: silence is not loss. The wait goes on until the store returns the page or reports that it has lost it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use ballast_page::copies::Watch;
use ballast_store::{GetOutcome, Handle, PageKey, SlowStore};
use ballast_sys::lock::Lock;

/// Reports an event to operators: kind and text.
pub(crate) type Tell = Arc<dyn Fn(&str, String) + Send + Sync>;

/// A page that no worker has asked for in this time is not waited for: its thread ended, or it was discarded.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(10);

/// A slow store, and the pages of it that workers wait for.
pub(crate) struct Overdue {
    store: Arc<dyn SlowStore>,
    name: &'static str,
    deadline: Duration,
    waiting: Mutex<Waiting>,
    tell: OnceLock<Tell>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// For each page: start of the wait, and the last request.
    pages: HashMap<(PageKey, Handle), (Instant, Instant)>,
    /// Start of the wait that was reported to operators.
    said: Option<Instant>,
}

impl std::fmt::Debug for Overdue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.store.fmt(f)
    }
}

impl Overdue {
    /// Reports a page for which a worker has waited for `deadline`.
    pub fn new(store: Arc<dyn SlowStore>, name: &'static str, deadline: Duration) -> Self {
        Self { store, name, deadline, waiting: Mutex::default(), tell: OnceLock::new() }
    }

    /// Sets the reporter. Only the first call has an effect: a VM that is opened again has the same operators.
    pub fn tell(&self, tell: &Tell) {
        let _ = self.tell.set(tell.clone());
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.locked()
    }

    /// A wait has ended: if operators were told and no page is overdue any more, tells them.
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

impl Watch for Overdue {
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

    fn were_asked(&self, pages: &[(PageKey, Handle)], outcomes: &[GetOutcome]) {
        if self.waiting().pages.is_empty() {
            return;
        }
        // No thread waits for a page that is read ahead: a fault on a busy one asks for it alone.
        for (page, outcome) in pages.iter().zip(outcomes) {
            if *outcome != GetOutcome::Busy || self.waiting().pages.contains_key(page) {
                self.was_asked(page.0, page.1, *outcome);
            }
        }
    }

    fn was_freed(&self, key: PageKey, handle: Handle) {
        let mut waiting = self.waiting();
        if waiting.pages.remove(&(key, handle)).is_some() {
            self.settle(waiting, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::store::RegionKey;
    use ballast_base::wire::VmId;
    use ballast_base::{Bytes, PageIdx};
    use ballast_testkit::NullStore;

    #[test]
    fn a_page_that_is_read_ahead_is_not_waited_for_until_a_fault_asks_for_it() {
        let overdue = Overdue::new(Arc::new(NullStore::new(Bytes(1 << 20))), "test", Duration::from_secs(5));
        let key = RegionKey { vm: VmId([1; 16]), number: 0 }.page(PageIdx(3));
        let page = (key, Handle::new(1).expect("40 bits"));
        let waited_for = || overdue.waiting().pages.len();
        overdue.were_asked(&[page], &[GetOutcome::Busy]);
        assert_eq!(waited_for(), 0);
        overdue.was_asked(page.0, page.1, GetOutcome::Busy);
        assert_eq!(waited_for(), 1);
        overdue.were_asked(&[page], &[GetOutcome::Busy]);
        assert_eq!(waited_for(), 1);
        overdue.were_asked(&[page], &[GetOutcome::Found]);
        assert_eq!(waited_for(), 0);
    }
}
