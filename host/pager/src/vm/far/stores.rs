//! The stores of one VM, by the numbers by which words name them.
//!
//! Before: the engine opened them. After: `evict` puts pages into the first one, `spill` moves them on to slow ones,
//! and faults restore them from any.
//! Threads: any.
//! Promise: while a store cannot be opened, its pages wait, and nothing is lost.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use ballast_base::store::{IoContext, OnReply, Recovered, StoreSet};
use ballast_store::{
    DurableStore, GetOutcome, Handle, NearStore, PageBytes, PageKey, PutOutcome, SlowStore, Store, StoreUsage,
};
use ballast_sys::lock::Lock;

use crate::vm::far::overdue::{Overdue, Tell};
use ballast_page::copies::{Source, StoreOf};
use ballast_page::page_state::Word;

/// A store in this host's memory.
#[derive(Clone, Debug)]
pub struct NearTier {
    /// Its number in words.
    pub number: u8,
    /// Its name in messages.
    pub name: &'static str,
    /// The store.
    pub store: Arc<dyn NearStore>,
}

/// A store that may wait for a disk or a network: slow workers and spill do; a fault worker only begins a read.
#[derive(Clone, Debug)]
pub struct SlowTier {
    /// Its number in words.
    pub number: u8,
    /// Its name in messages.
    pub name: &'static str,
    /// The store.
    pub store: Arc<dyn SlowStore>,
    /// Watches the reads that workers wait for.
    overdue: Arc<Overdue>,
}

/// Any store of a VM.
#[derive(Clone, Copy, Debug)]
pub struct Tier<'a> {
    /// Its number in words.
    pub number: u8,
    /// Its name in messages.
    pub name: &'static str,
    /// The store.
    pub store: &'a dyn DurableStore,
    /// The store, if it may wait.
    pub slow: Option<&'a dyn SlowStore>,
}

/// Wait for a page of a slow store after which operators are told. The wait goes on.
pub const DEADLINE: Duration = Duration::from_secs(5);

impl SlowTier {
    /// A slow store with the deadline [`DEADLINE`].
    pub fn new(number: u8, name: &'static str, store: Arc<dyn SlowStore>) -> Self {
        Self::within(DEADLINE, number, name, store)
    }

    /// A slow store with another deadline.
    pub fn within(deadline: Duration, number: u8, name: &'static str, store: Arc<dyn SlowStore>) -> Self {
        let overdue = Arc::new(Overdue::new(store.clone(), name, deadline));
        Self { number, name, store, overdue }
    }
}

/// The stores of one VM.
#[derive(Clone, Debug)]
pub struct Stores {
    near: Vec<NearTier>,
    slow: Vec<SlowTier>,
}

impl Stores {
    /// Stores in the order in which pages go to them. Evicted pages go to the first near one; pages that have been far
    /// for long go to the first slow one that takes them.
    ///
    /// # Panics
    /// `near` is empty, or two stores have the same number.
    pub fn new(near: Vec<NearTier>, slow: Vec<SlowTier>) -> Self {
        assert!(!near.is_empty(), "evicted pages go nowhere");
        let stores = Self { near, slow };
        let mut numbers = HashSet::new();
        assert!(stores.tiers().all(|tier| numbers.insert(tier.number)), "two stores have one number: {stores:?}");
        stores
    }

    pub(crate) fn tell(&self, tell: &Tell) {
        self.slow.iter().for_each(|tier| tier.overdue.tell(tell));
    }

    /// Replaces the slow store of this number.
    #[must_use]
    pub fn with(mut self, tier: SlowTier) -> Self {
        self.slow.iter_mut().filter(|old| old.number == tier.number).for_each(|old| *old = tier.clone());
        self
    }

    /// All stores, the near ones first.
    pub fn tiers<'a>(&'a self) -> impl Iterator<Item = Tier<'a>> {
        let near = |tier: &'a NearTier| Tier { number: tier.number, name: tier.name, store: &*tier.store, slow: None };
        let slow = |tier: &'a SlowTier| Tier {
            number: tier.number,
            name: tier.name,
            store: &*tier.store,
            slow: Some(&*tier.store),
        };
        self.near.iter().map(near).chain(self.slow.iter().map(slow))
    }

    /// The store of evicted pages.
    pub fn first(&self) -> &NearTier {
        &self.near[0]
    }

    /// Stores that return at once.
    pub fn near(&self) -> &[NearTier] {
        &self.near
    }

    /// Stores that may wait.
    pub fn slow(&self) -> &[SlowTier] {
        &self.slow
    }

    /// The store with this number.
    pub fn get(&self, number: u8) -> Option<Tier<'_>> {
        self.tiers().find(|tier| tier.number == number)
    }

    /// The near store with this number.
    pub fn get_near(&self, number: u8) -> Option<&dyn NearStore> {
        self.near.iter().find(|tier| tier.number == number).map(|tier| &*tier.store)
    }

    fn get_slow(&self, number: u8) -> Option<&SlowTier> {
        self.slow.iter().find(|tier| tier.number == number)
    }

    /// Begins to read the copy of a far page: see [`SlowStore::begin`].
    pub fn begin(&self, key: PageKey, word: Word, watch: OnReply<'_>) -> bool {
        self.get_slow(word.store()).is_some_and(|tier| tier.store.begin(key, word.handle(), watch))
    }

    /// All stores, for reads in this context.
    pub const fn reads<'a>(&'a self, context: IoContext<'a>) -> Reads<'a> {
        Reads { stores: self, context: Some(context) }
    }

    /// The near stores, for reads of workers that must not wait.
    pub const fn reads_near(&self) -> Reads<'_> {
        Reads { stores: self, context: None }
    }

    /// Numbers of all stores that are not near, also unknown ones: their pages are not available at once.
    pub fn not_near(&self) -> StoreSet {
        self.near.iter().fold(StoreSet::ALL, |set, tier| set.without(tier.number))
    }
}

/// See [`Stores::reads`].
#[derive(Clone, Copy, Debug)]
pub struct Reads<'a> {
    stores: &'a Stores,
    /// `None`: only the near stores.
    context: Option<IoContext<'a>>,
}

impl StoreOf for Reads<'_> {
    fn store_of(&self, word: Word) -> Option<Source<'_>> {
        if let Some(store) = self.stores.get_near(word.store()) {
            return Some(Source { store, context: self.context.unwrap_or(IoContext::GUEST), watch: None });
        }
        let context = self.context?;
        let tier = self.stores.get_slow(word.store())?;
        Some(Source { store: &*tier.store, context, watch: Some(&*tier.overdue) })
    }
}

/// A store that is opened in the background, because its disk may not respond. Until it arrives, its pages wait.
#[derive(Debug, Default)]
pub struct LateStore {
    store: OnceLock<Arc<dyn SlowStore>>,
    /// Copies freed before the store arrived.
    freed: Mutex<Vec<(PageKey, Handle)>>,
    live: Mutex<Option<Vec<Handle>>>,
}

impl LateStore {
    /// A store that has not arrived.
    pub const fn new() -> Self {
        Self { store: OnceLock::new(), freed: Mutex::new(Vec::new()), live: Mutex::new(None) }
    }

    /// The store has been opened. It has all copies that words named when this value was made.
    pub fn arrive(&self, store: Arc<dyn SlowStore>) {
        let mut freed = self.freed.locked();
        for (key, handle) in std::mem::take(&mut *freed) {
            store.free(key, handle);
        }
        // Set under the lock, so that no other thread adds to the list any more.
        let _ = self.store.set(store);
    }

    /// Handles that words name in it, for a sweep before it arrives; `None` if the words were not read.
    pub fn take_live(&self) -> Option<Vec<Handle>> {
        self.live.locked().take()
    }

    fn store(&self) -> Option<&dyn SlowStore> {
        self.store.get().map(|store| &**store)
    }
}

impl Store for LateStore {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        self.store().map_or(PutOutcome::Busy, |store| store.put(key, bytes))
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, context: IoContext<'_>) -> GetOutcome {
        self.store().map_or(GetOutcome::Busy, |store| store.get(key, handle, out, context))
    }

    fn put_run(&self, first: PageKey, pages: &[PageBytes], outcomes: &mut Vec<PutOutcome>) {
        match self.store() {
            Some(store) => store.put_run(first, pages, outcomes),
            None => outcomes.resize(outcomes.len() + pages.len(), PutOutcome::Busy),
        }
    }

    fn get_run(&self, pages: &[(PageKey, Handle)], out: &mut [PageBytes], context: IoContext<'_>) -> Vec<GetOutcome> {
        match self.store() {
            Some(store) => store.get_run(pages, out, context),
            None => vec![GetOutcome::Busy; pages.len().min(out.len())],
        }
    }

    fn free(&self, key: PageKey, handle: Handle) {
        let mut freed = self.freed.locked();
        match self.store() {
            Some(store) => {
                drop(freed);
                store.free(key, handle);
            }
            None => freed.push((key, handle)),
        }
    }

    fn tidy(&self) {
        if let Some(store) = self.store() {
            store.tidy();
        }
    }

    fn usage(&self) -> StoreUsage {
        self.store().map_or_else(StoreUsage::default, |store| store.usage())
    }
}

impl DurableStore for LateStore {
    /// Before the store arrives, the handles are kept for the code that opens it: see [`LateStore::take_live`].
    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        if let Some(store) = self.store() {
            return store.recover(live);
        }
        let live = live.map(|(_, handle)| handle).collect();
        *self.live.locked() = Some(live);
        Ok(Recovered::default())
    }
}

impl SlowStore for LateStore {
    fn begin(&self, key: PageKey, handle: Handle, watch: OnReply<'_>) -> bool {
        self.store().is_some_and(|store| store.begin(key, handle, watch))
    }

    fn is_untidy(&self) -> bool {
        self.store().is_some_and(|store| store.is_untidy())
    }

    /// True before the store is open: its recovery may keep only the copies that words named when this value was made.
    fn must_recover(&self) -> bool {
        self.store().is_none_or(|store| store.must_recover())
    }

    fn refuses(&self) -> bool {
        self.store().is_none_or(|store| store.refuses())
    }

    fn last_refusal(&self) -> Option<String> {
        self.store().map_or_else(|| Some("its disk does not answer".into()), |store| store.last_refusal())
    }
}
