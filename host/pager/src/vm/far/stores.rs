//! The stores of one VM: a small ordered set, by the numbers by which words name them.
//!
//! Before: the engine opened them. After: `evict` puts pages into the first one, `spill` moves them on to slow ones,
//! and faults restore them from any. Threads: any.
//! Promise: a store that cannot be opened loses nothing: its pages wait.

use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use ballast_base::store::{OnReply, RAM_STORE, Recovered, StoreSet};
use ballast_store::{GetOutcome, Handle, PageBytes, PageKey, PutOutcome, Store, StoreUsage};

use crate::vm::far::overdue::{Overdue, Tell};
use ballast_page::copies::StoreOf;
use ballast_page::page_state::Word;

/// One store of a VM.
#[derive(Clone, Debug)]
pub struct Tier {
    /// Its number in words.
    pub number: u8,
    /// Its name in messages.
    pub name: &'static str,
    /// The store.
    pub store: Arc<dyn Store>,
    /// The same store, if it may wait for a disk or a network: then slow workers and spill ask it. A fault worker only
    /// begins to ask it.
    overdue: Option<Arc<Overdue>>,
}

/// How long a page of a slow store is waited for before operators are told. The wait goes on.
pub const DEADLINE: Duration = Duration::from_secs(5);

impl Tier {
    /// A store that returns at once.
    pub fn near(number: u8, name: &'static str, store: Arc<dyn Store>) -> Self {
        Self { number, name, store, overdue: None }
    }

    /// A store that may wait. If it does not return a page within [`DEADLINE`], that is an event.
    pub fn slow(number: u8, name: &'static str, store: Arc<dyn Store>) -> Self {
        Self::slow_within(DEADLINE, number, name, store)
    }

    /// The same with another deadline.
    pub fn slow_within(deadline: Duration, number: u8, name: &'static str, store: Arc<dyn Store>) -> Self {
        let overdue = Arc::new(Overdue::new(store, name, deadline));
        Self { number, name, store: overdue.clone(), overdue: Some(overdue) }
    }

    /// May it wait? A store that does not returns at once.
    pub fn is_slow(&self) -> bool {
        self.overdue.is_some()
    }
}

/// The stores of one VM.
#[derive(Clone, Debug)]
pub struct Stores(Vec<Tier>);

impl Stores {
    /// These stores, in the order in which pages go to them. Evicted pages go to the first, pages that have been far
    /// for long to the first slow one that takes them.
    ///
    /// # Panics
    /// If there is none, the first may wait, or two have the same number.
    pub fn new(tiers: Vec<Tier>) -> Self {
        assert!(tiers.first().is_some_and(|tier| !tier.is_slow()), "evicted pages go to a store that waits");
        let is_again = |(at, tier): (usize, &Tier)| tiers[..at].iter().any(|before| before.number == tier.number);
        assert!(!tiers.iter().enumerate().any(is_again), "two stores have one number: {tiers:?}");
        Self(tiers)
    }

    /// Sets who is told when a store is overdue.
    pub(crate) fn tell(&self, tell: &Tell) {
        self.0.iter().filter_map(|tier| tier.overdue.as_ref()).for_each(|overdue| overdue.tell(tell));
    }

    /// The RAM store alone.
    pub fn ram_only(ram: Arc<dyn Store>) -> Self {
        Self::new(vec![Tier::near(RAM_STORE, "RAM store", ram)])
    }

    /// The same with this one in the place of the one of its number.
    #[must_use]
    pub fn with(mut self, tier: Tier) -> Self {
        self.0.iter_mut().filter(|old| old.number == tier.number).for_each(|old| *old = tier.clone());
        self
    }

    /// All of them.
    pub fn tiers(&self) -> &[Tier] {
        &self.0
    }

    /// Where evicted pages go.
    pub fn first(&self) -> &Tier {
        &self.0[0]
    }

    /// Those that may wait.
    pub fn slow(&self) -> impl Iterator<Item = &Tier> {
        self.0.iter().filter(|tier| tier.is_slow())
    }

    /// Is there one that may wait?
    pub fn has_slow(&self) -> bool {
        self.slow().next().is_some()
    }

    /// The store with this number.
    pub fn get(&self, number: u8) -> Option<&Tier> {
        self.0.iter().find(|tier| tier.number == number)
    }

    /// The page of this word, which is far, is about to be got: see [`Store::begin`].
    pub fn begin(&self, key: PageKey, word: Word, watch: OnReply<'_>) -> bool {
        self.get(word.store()).is_some_and(|tier| tier.store.begin(key, word.handle(), watch))
    }

    /// Only stores that return at once: for workers that must not wait.
    pub fn near(&self) -> Near<'_> {
        Near(self)
    }

    /// Numbers of all other stores, known or not: a page of one is not available at once.
    pub fn not_near(&self) -> StoreSet {
        let near = self.0.iter().filter(|tier| !tier.is_slow());
        near.fold(StoreSet::ALL, |set, tier| set.without(tier.number))
    }
}

impl StoreOf for Stores {
    fn store_of(&self, word: Word) -> Option<&dyn Store> {
        self.get(word.store()).map(|tier| &*tier.store)
    }
}

/// See [`Stores::near`].
#[derive(Clone, Copy, Debug)]
pub struct Near<'a>(&'a Stores);

impl StoreOf for Near<'_> {
    fn store_of(&self, word: Word) -> Option<&dyn Store> {
        self.0.get(word.store()).filter(|tier| !tier.is_slow()).map(|tier| &*tier.store)
    }
}

/// A store that is opened beside everything else, because its disk may not respond. Until it is there, its pages wait,
/// and nothing is lost.
#[derive(Debug, Default)]
pub struct LateStore {
    store: OnceLock<Arc<dyn Store>>,
    /// Pages that were freed before it was there.
    freed: Mutex<Vec<(PageKey, Handle)>>,
    live: Mutex<Option<Vec<Handle>>>,
}

impl LateStore {
    /// With no store yet.
    pub const fn new() -> Self {
        Self { store: OnceLock::new(), freed: Mutex::new(Vec::new()), live: Mutex::new(None) }
    }

    /// The store is there. It contains all pages that the words named when this one was made.
    pub fn arrive(&self, store: Arc<dyn Store>) {
        let mut freed = self.freed.lock().unwrap_or_else(PoisonError::into_inner);
        for (key, handle) in std::mem::take(&mut *freed) {
            store.free(key, handle);
        }
        // With the lock, so that no other thread notes anything more.
        let _ = self.store.set(store);
    }

    /// The pages that the words name in it, for a sweep before it arrives; none if the words were not read.
    pub fn take_live(&self) -> Option<Vec<Handle>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn store(&self) -> Option<&dyn Store> {
        self.store.get().map(|store| &**store)
    }
}

impl Store for LateStore {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        self.store().map_or(PutOutcome::Busy, |store| store.put(key, bytes))
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes) -> GetOutcome {
        self.store().map_or(GetOutcome::Busy, |store| store.get(key, handle, out))
    }

    fn begin(&self, key: PageKey, handle: Handle, watch: OnReply<'_>) -> bool {
        self.store().is_some_and(|store| store.begin(key, handle, watch))
    }

    fn get_begun(&self, key: PageKey, handle: Handle, out: &mut PageBytes, watch: OnReply<'_>) -> GetOutcome {
        self.store().map_or(GetOutcome::Busy, |store| store.get_begun(key, handle, out, watch))
    }

    fn put_run(&self, first: PageKey, pages: &[PageBytes], outcomes: &mut Vec<PutOutcome>) {
        match self.store() {
            Some(store) => store.put_run(first, pages, outcomes),
            None => outcomes.resize(outcomes.len() + pages.len(), PutOutcome::Busy),
        }
    }

    fn get_run(&self, first: PageKey, handles: &[Handle], out: &mut [PageBytes], outcomes: &mut Vec<GetOutcome>) {
        match self.store() {
            Some(store) => store.get_run(first, handles, out, outcomes),
            None => outcomes.resize(outcomes.len() + handles.len().min(out.len()), GetOutcome::Busy),
        }
    }

    fn get_some(&self, pages: &[(PageKey, Handle)], out: &mut [PageBytes], outcomes: &mut Vec<GetOutcome>) {
        match self.store() {
            Some(store) => store.get_some(pages, out, outcomes),
            None => outcomes.resize(outcomes.len() + pages.len().min(out.len()), GetOutcome::Busy),
        }
    }

    fn free(&self, key: PageKey, handle: Handle) {
        let mut freed = self.freed.lock().unwrap_or_else(PoisonError::into_inner);
        match self.store() {
            Some(store) => {
                drop(freed);
                store.free(key, handle);
            }
            None => freed.push((key, handle)),
        }
    }

    /// Before the store is there, these are for the code that opens it: see [`LateStore::take_live`].
    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        if let Some(store) = self.store() {
            return store.recover(live);
        }
        let live = live.map(|(_, handle)| handle).collect();
        *self.live.lock().unwrap_or_else(PoisonError::into_inner) = Some(live);
        Ok(Recovered::default())
    }

    fn tidy(&self) {
        if let Some(store) = self.store() {
            store.tidy();
        }
    }

    fn is_untidy(&self) -> bool {
        self.store().is_some_and(|store| store.is_untidy())
    }

    fn takes_room(&self, handle: Handle) -> bool {
        self.store().is_none_or(|store| store.takes_room(handle))
    }

    fn is_short(&self) -> bool {
        self.store().is_some_and(|store| store.is_short())
    }

    /// Before the store is there it may be swept, for pages that words named when this one was made.
    fn must_recover(&self) -> bool {
        self.store().is_none_or(|store| store.must_recover())
    }

    fn refuses(&self) -> bool {
        self.store().is_none_or(|store| store.refuses())
    }

    fn last_refusal(&self) -> Option<String> {
        self.store().map_or_else(|| Some("its disk does not answer".into()), |store| store.last_refusal())
    }

    fn usage(&self) -> StoreUsage {
        self.store().map_or_else(StoreUsage::default, |store| store.usage())
    }
}
