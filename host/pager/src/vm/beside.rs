//! The stores of a VM while two engines serve it: a hand-over moves it from one to the other.
//!
//! Before: the other engine only serves faults, so no word begins to name a copy. After: a store whose engine keeps in
//! its own memory which copies words name (a group's, a cluster's) knows them here.
//! Threads: the VM's worker, beside fault workers of both engines, which free copies of restored pages.
//! Promise: only reads words. The set of named copies can only shrink, so the set that was read contains it.

use std::collections::BTreeMap;
use std::io;

use ballast_base::PageIdx;
use ballast_store::Attach;

use super::Vm;
use crate::vm::far::live::LiveCopies;
use ballast_page::copies::live_handle;

impl Vm {
    /// Attaches the stores, beside another engine that only serves faults.
    ///
    /// # Errors
    /// Words could not be read.
    pub fn follow_stores(&self) -> io::Result<()> {
        self.attach_stores(|store, live| store.attach_shared(&mut live.iter()))
    }

    /// The other engine has closed the VM: takes the stores over. Call it before [`Vm::start`], which may put pages.
    ///
    /// # Errors
    /// Words could not be read.
    pub fn own_stores(&self) -> io::Result<()> {
        self.attach_stores(|store, live| store.attach_exclusive(&mut live.iter()))?;
        // Copies that the other engine freed are no longer charged.
        for tier in self.stores.tiers() {
            tier.store.usage();
        }
        Ok(())
    }

    /// Returns whether a word was lost to a memory error, also if the other engine's mapping met it.
    ///
    /// # Errors
    /// Words could not be read.
    pub fn has_lost_words(&self) -> io::Result<bool> {
        for (region, record) in self.regions().into_iter().zip(self.state.regions()) {
            if region.is_removed() {
                continue;
            }
            for pages in self.state.written_words(&record)? {
                if region.granules(pages).any(|first| region.word(first).is_lost()) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn attach_stores(&self, attach: impl Fn(&dyn Attach, &LiveCopies)) -> io::Result<()> {
        let to: Vec<_> = self.stores.tiers().filter_map(|tier| Some((tier.number, tier.store.attach()?))).collect();
        if to.is_empty() {
            return Ok(());
        }
        let live = self.named()?;
        to.into_iter().for_each(|(number, store)| attach(store, live.get(&number).unwrap_or(&LiveCopies::new())));
        Ok(())
    }

    /// The copies that words name, by store number.
    fn named(&self) -> io::Result<BTreeMap<u8, LiveCopies>> {
        let mut live = BTreeMap::<u8, LiveCopies>::new();
        for (region, record) in self.regions().into_iter().zip(self.state.regions()) {
            if region.is_removed() {
                continue;
            }
            for pages in self.state.written_words(&record)? {
                for first in region.granules(pages) {
                    let granule = region.granule(first);
                    for (page, index) in (first.0..).zip(0..granule.pages() as usize) {
                        let word = granule.word_of(index);
                        if let Some(handle) = live_handle(word).filter(|_| !word.is_lost()) {
                            live.entry(word.store()).or_default().note(region.key(PageIdx(page)), handle);
                        }
                    }
                }
            }
        }
        Ok(live)
    }
}
