//! Faults on command: a store around another store, which refuses, stalls, loses and corrupts as it is told.
//!
//! Before: a test of the pager holds the [`Faults`]. After: the pager meets them through the plain [`Store`] trait.
//! Threads: any. Counts are taken one call at a time, so "the next 3 gets" are 3 whichever threads make them.
//! Units: counts are calls. Promise: what a call returns depends on no clock and no randomness; with no fault set,
//! every call is passed through.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ballast_base::PageIdx;

use ballast_base::store::{
    DurableStore, GetOutcome, Handle, IoContext, NearStore, PageBytes, PageKey, PutOutcome, Recovered, SlowStore,
    Store, StoreUsage,
};

/// How a put fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutFault {
    /// The put returns [`PutOutcome::Full`].
    Full,
    /// The put returns [`PutOutcome::Busy`].
    Busy,
}

/// The settings of a [`FaultyStore`]. Of several faults a call meets the stall first, then busy, lost, or corrupt.
#[derive(Debug, Default)]
pub struct Faults {
    script: Mutex<Script>,
    /// Notified at every change of `stall_puts`, `stall_gets` and `stalled`.
    stall_changed: Condvar,
}

#[derive(Debug, Default)]
struct Script {
    fail_puts: Option<PutFault>,
    busy_puts: u64,
    busy_gets: u64,
    lose: u64,
    corrupt: u64,
    lost_keys: HashSet<PageKey>,
    /// Gets of pages before this one return `Busy`.
    busy_below: PageIdx,
    /// Number of gets of each page that returned `Busy`.
    refused: HashMap<PageKey, u64>,
    stall_puts: bool,
    stall_gets: bool,
    stalled: usize,
    calls: Calls,
}

/// Calls that reached the store, stalled and failed ones included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Puts.
    pub puts: u64,
    /// Gets of pages.
    pub gets: u64,
    /// Gets of runs of pages, whose pages are counted, too.
    pub runs: u64,
    /// Frees.
    pub frees: u64,
}

/// Uses up one of `left`; returns false if none is left.
fn spend(left: &mut u64) -> bool {
    let had = *left > 0;
    *left -= u64::from(had);
    had
}

impl Faults {
    fn lock(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on every put fails like this; `None` ends it.
    pub fn fail_puts(&self, fault: Option<PutFault>) {
        self.lock().fail_puts = fault;
    }

    /// The next `n` puts return `Busy`.
    pub fn busy_puts(&self, n: u64) {
        self.lock().busy_puts = n;
    }

    /// The next `n` gets return `Busy`; the objects are unharmed.
    pub fn busy_gets(&self, n: u64) {
        self.lock().busy_gets = n;
    }

    /// From now on, gets of pages before this one return `Busy`, and no others.
    pub fn busy_below(&self, page: PageIdx) {
        self.lock().busy_below = page;
    }

    /// The next `n` gets lose their object: these and later gets of that key return `Absent` until it is freed.
    pub fn lose(&self, n: u64) {
        self.lock().lose = n;
    }

    /// The next `n` gets return `Corrupt`.
    pub fn corrupt(&self, n: u64) {
        self.lock().corrupt = n;
    }

    /// Puts wait, from now on, until `release`.
    pub fn stall_puts(&self) {
        self.lock().stall_puts = true;
    }

    /// Gets wait, from now on, until `release`.
    pub fn stall_gets(&self) {
        self.lock().stall_gets = true;
    }

    /// Lets every waiting call continue. From now on no call waits.
    pub fn release(&self) {
        let mut script = self.lock();
        (script.stall_puts, script.stall_gets) = (false, false);
        self.stall_changed.notify_all();
    }

    /// Wait until at least `n` calls are waiting in a stall.
    pub fn wait_until_stalled(&self, n: usize) {
        let missing = |script: &mut Script| script.stalled < n;
        let waited = self.stall_changed.wait_timeout_while(self.lock(), Duration::from_mins(5), missing);
        let (script, result) = waited.unwrap_or_else(PoisonError::into_inner);
        let stalled = script.stalled;
        drop(script);
        assert!(!result.timed_out(), "{stalled} calls wait in a stall, not {n}");
    }

    /// The calls that the store has received.
    pub fn calls(&self) -> Calls {
        self.lock().calls
    }

    /// The number of pages for which a get returned `Busy`, and the largest number of such gets of one page.
    pub fn refused(&self) -> (usize, u64) {
        let script = self.lock();
        (script.refused.len(), script.refused.values().copied().max().unwrap_or(0))
    }

    fn pass_stall(&self, stalls: fn(&Script) -> bool) -> MutexGuard<'_, Script> {
        let mut script = self.lock();
        if stalls(&script) {
            script.stalled += 1;
            self.stall_changed.notify_all();
            while stalls(&script) {
                script = self.stall_changed.wait(script).unwrap_or_else(PoisonError::into_inner);
            }
            script.stalled -= 1;
        }
        script
    }

    fn on_put(&self) -> Option<PutOutcome> {
        self.lock().calls.puts += 1;
        let mut script = self.pass_stall(|script| script.stall_puts);
        if spend(&mut script.busy_puts) {
            return Some(PutOutcome::Busy);
        }
        script.fail_puts.map(|fault| match fault {
            PutFault::Full => PutOutcome::Full,
            PutFault::Busy => PutOutcome::Busy,
        })
    }

    fn on_get(&self, key: PageKey) -> Option<GetOutcome> {
        self.lock().calls.gets += 1;
        let mut script = self.pass_stall(|script| script.stall_gets);
        if key.page < script.busy_below || spend(&mut script.busy_gets) {
            *script.refused.entry(key).or_default() += 1;
            Some(GetOutcome::Busy)
        } else if script.lost_keys.contains(&key) {
            Some(GetOutcome::Absent)
        } else if spend(&mut script.lose) {
            script.lost_keys.insert(key);
            Some(GetOutcome::Absent)
        } else if spend(&mut script.corrupt) {
            Some(GetOutcome::Corrupt)
        } else {
            None
        }
    }

    fn on_free(&self, key: PageKey) {
        let mut script = self.lock();
        script.calls.frees += 1;
        script.lost_keys.remove(&key);
    }
}

/// Any store, with faults.
#[derive(Debug)]
pub struct FaultyStore<S> {
    inner: S,
    faults: Arc<Faults>,
}

impl<S: Store> FaultyStore<S> {
    /// A store without faults around `inner`; the second value sets faults.
    pub fn new(inner: S) -> (Self, Arc<Faults>) {
        let faults = Arc::new(Faults::default());
        (Self { inner, faults: Arc::clone(&faults) }, faults)
    }

    /// The store inside, past all faults.
    pub fn inner(&self) -> &S {
        &self.inner
    }
}

impl<S: Store> Store for FaultyStore<S> {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        self.faults.on_put().unwrap_or_else(|| self.inner.put(key, bytes))
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, context: IoContext<'_>) -> GetOutcome {
        match self.faults.on_get(key) {
            None => self.inner.get(key, handle, out, context),
            Some(fault) => {
                // The contents of `out` are unspecified now: a caller that uses them should fail.
                out.fill(0xa5);
                fault
            }
        }
    }

    fn get_run(&self, pages: &[(PageKey, Handle)], out: &mut [PageBytes], context: IoContext<'_>) -> Vec<GetOutcome> {
        self.faults.lock().calls.runs += 1;
        let get = |(page, out): (&(PageKey, Handle), &mut PageBytes)| self.get(page.0, page.1, out, context);
        pages.iter().zip(out).map(get).collect()
    }

    fn free(&self, key: PageKey, handle: Handle) {
        self.faults.on_free(key);
        self.inner.free(key, handle);
    }

    fn tidy(&self) {
        self.inner.tidy();
    }

    fn usage(&self) -> StoreUsage {
        self.inner.usage()
    }
}

impl<S: DurableStore> DurableStore for FaultyStore<S> {
    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        self.inner.recover(live)
    }
}

impl<S: NearStore> NearStore for FaultyStore<S> {
    fn takes_room(&self, handle: Handle) -> bool {
        self.inner.takes_room(handle)
    }

    fn is_short(&self) -> bool {
        self.inner.is_short()
    }
}

impl<S: SlowStore> SlowStore for FaultyStore<S> {
    fn refuses(&self) -> bool {
        self.inner.refuses()
    }

    fn last_refusal(&self) -> Option<String> {
        self.inner.last_refusal()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NullStore;
    use ballast_base::Bytes;

    #[test]
    fn a_store_with_no_fault_set_passes_the_conformance_kit() {
        crate::conformance::run_near(&|| Box::new(FaultyStore::new(NullStore::new(Bytes(4 << 20))).0));
    }
}
