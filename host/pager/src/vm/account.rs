//! The memory breakdown of a VM, from its counters or from its words.
//!
//! Before: the ledger books each move. After: API and policies read how many pages are in which state.
//! Threads: any. Units: pages.
//! Promise: the parts sum to the whole.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ballast_base::{Bytes, PageCount};
use ballast_sys::memfd::FileId;

use super::Vm;
use crate::vm::memory::Counted;
use crate::vm::region::Region;
use crate::vm::stats::Counter;
use ballast_page::page_state::State;

/// A pass that counts, searches, or coalesces pages is followed by a rest of this many times its length: 5% of a CPU.
pub(crate) const SHARE: u32 = 20;

impl Vm {
    /// Pages that readahead may restore now: half of the throttle's credits; the other half is for threads that fault.
    pub(crate) fn readahead_credits(&self) -> u64 {
        let unlimited = || if self.mail.over_limit.load(Ordering::Relaxed) { 0 } else { u64::MAX };
        self.mail.throttle.credits().map_or_else(unlimited, |credits| credits / 2)
    }

    /// DRAM that the VM's regions use, without regions that were unplugged before their far pages were restored:
    /// nothing can be reclaimed there.
    ///
    /// If the regions cover a file completely, the kernel knows its size in DRAM at once; reclaim calls this in every
    /// round. If other regions have a part of the file, the extents are counted, for at most 5% of a CPU ([`SHARE`]);
    /// between two counts, any change of the whole file's size is attributed to this VM's regions.
    pub fn resident(&self) -> io::Result<PageCount> {
        self.resident_by(true, |_| true)
    }

    /// Like [`Vm::resident`], for a thread that must not wait for the VMM. Before Linux 6.5 counting a part of a file
    /// takes a lock of the file; there, this returns the last count plus the change of the whole file since.
    pub fn resident_at_once(&self) -> io::Result<PageCount> {
        self.resident_at_once_in(|_| true)
    }

    /// Like [`Vm::resident_at_once`], of these files only.
    pub fn resident_at_once_in(&self, is_one: impl Fn(FileId) -> bool) -> io::Result<PageCount> {
        self.resident_by(false, is_one)
    }

    fn resident_by(&self, may_wait: bool, is_one: impl Fn(FileId) -> bool) -> io::Result<PageCount> {
        let mut regions: Vec<_> = self.regions().into_iter().filter(|region| !region.is_removed()).collect();
        let views = self.views();
        if !views.is_empty() {
            regions.retain(|region| views.iter().any(|view| view.base(region.number).is_some()));
        }
        let (mut seen, mut pages) = (HashSet::new(), PageCount(0));
        for file in regions.iter().flat_map(|region| region.files()) {
            if !is_one(file.id) || !seen.insert(file.id) {
                continue;
            }
            let (whole, size) = file.usage()?;
            let ours = Bytes(regions.iter().map(|region| region.ram.of_file(file.id).0).sum());
            if ours >= size {
                pages += whole;
                continue;
            }
            let now = Instant::now();
            let counted = self.memory.counted(file.id).filter(|counted| counted.ours == ours);
            let may_count = may_wait || regions.iter().all(|region| region.ram.counts_at_once(file.id));
            match counted {
                Some(counted) if now < counted.until || !may_count => {
                    pages += counted.estimate(whole);
                    continue;
                }
                None if !may_count => {
                    pages += whole.min(ours.pages_floor());
                    continue;
                }
                _ => {}
            }
            let found = regions
                .iter()
                .try_fold(PageCount(0), |sum, region| Ok::<_, io::Error>(sum + region.ram.count(file.id)?))?;
            let until = now + now.elapsed() * (1 + SHARE);
            self.memory.set_counted(file.id, Counted { ours, found, whole, until });
            pages += found;
        }
        Ok(pages)
    }

    /// The VM's memory breakdown, by its counters.
    pub fn memory_breakdown(&self) -> MemoryBreakdown {
        let stats = self.stats();
        let [far, zero, poisoned] = [Counter::Far, Counter::Zero, Counter::Poisoned].map(|gauge| stats.get(gauge));
        let resident = self.resident_at_once().unwrap_or_default();
        MemoryBreakdown::divide(self.size(), [far, zero, poisoned].map(PageCount), resident)
    }

    /// A region's memory breakdown, by its words.
    pub fn memory_breakdown_of(&self, region: &Region) -> io::Result<MemoryBreakdown> {
        let states = self.count_states(region)?;
        let [far, restoring, zero, poisoned] =
            [State::Far, State::Restoring, State::Zero, State::Poisoned].map(|state| states[state as usize]);
        let not_resident = [far + restoring, zero, poisoned].map(PageCount);
        Ok(MemoryBreakdown::divide(region.pages(), not_resident, region.resident()?))
    }

    /// Pages of a region by state, indexed by `State as usize`. Reads every word that was ever written.
    fn count_states(&self, region: &Region) -> io::Result<[u64; State::COUNT]> {
        let mut counts = [0; State::COUNT];
        if let Some(record) = self.state.regions().get(region.number as usize) {
            for pages in self.state.written_words(record)? {
                for page in region.granules(pages) {
                    counts[region.word(page).state() as usize] += region.granule_pages();
                }
            }
        }
        Ok(counts)
    }
}

/// The division of a VM's or a region's memory; the parts sum to `size`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryBreakdown {
    /// All of it.
    pub size: Bytes,
    /// In DRAM.
    pub resident: Bytes,
    /// In a store.
    pub far: Bytes,
    /// Known zero.
    pub zero: Bytes,
    /// Lost.
    pub poisoned: Bytes,
    /// Never touched, or discarded.
    pub untouched: Bytes,
}

impl MemoryBreakdown {
    /// A breakdown in which only the size is known.
    pub fn uncounted(size: PageCount) -> Self {
        Self { size: size.bytes(), untouched: size.bytes(), ..Self::default() }
    }

    fn divide(size: PageCount, [far, zero, poisoned]: [PageCount; 3], resident: PageCount) -> Self {
        let mut left = size.bytes();
        // A page that is counted twice while it moves shrinks a part that comes later, never the sum. The resident part
        // is measured, and comes first.
        let [resident, far, zero, poisoned] = [resident, far, zero, poisoned].map(|part| {
            let taken = part.bytes().min(left);
            left = Bytes(left.0 - taken.0);
            taken
        });
        Self { size: size.bytes(), resident, far, zero, poisoned, untouched: left }
    }
}
