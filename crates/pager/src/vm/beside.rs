//! Beside: the stores of a VM that two engines have for a moment, while it moves from one to the other.
//!
//! Before: the other engine serves faults and does nothing else, so that no word comes to name a store. After: stores
//! whose engines know in their own memory what words name (a group's, a cluster's) know it here.
//! Threads: the VM's worker, beside fault workers of both engines, which free what they bring back.
//! Promise: reads words only. What words name can only become less meanwhile, so what was read names all that there is.

use std::collections::BTreeMap;
use std::io;

use ballast_base::PageIdx;

use super::Vm;
use crate::tier::live::LiveCopies;
use crate::tier::stores::Tier;
use ballast_page::copies::live_handle;

impl Vm {
    /// Use the stores from now on, as another engine does that serves faults and nothing else.
    ///
    /// # Errors
    /// Words could not be read.
    pub fn follow_stores(&self) -> io::Result<()> {
        self.tell_stores(|tier, live| tier.store.follow(&mut live.iter()))
    }

    /// That engine has closed the VM: the stores are this one's. Before [`Vm::start`], which may put pages into them.
    ///
    /// # Errors
    /// Words could not be read.
    pub fn own_stores(&self) -> io::Result<()> {
        self.tell_stores(|tier, live| tier.store.own(&mut live.iter()))?;
        // What that engine has freed is not charged any more.
        for tier in self.stores.tiers() {
            tier.store.usage();
        }
        Ok(())
    }

    fn tell_stores(&self, tell: impl Fn(&Tier, &LiveCopies)) -> io::Result<()> {
        let told: Vec<_> = self.stores.tiers().iter().filter(|tier| tier.store.is_told()).collect();
        if told.is_empty() {
            return Ok(());
        }
        let live = self.named()?;
        told.into_iter().for_each(|tier| tell(tier, live.get(&tier.number).unwrap_or(&LiveCopies::new())));
        Ok(())
    }

    /// What words name, by the number of the store.
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
