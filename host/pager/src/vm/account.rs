//! Where the memory of a VM is: by its counters, by its words, and page by page.
//!
//! Before: the ledger booked every move. After: the API and the policies know how much is resident, far, zero,
//! untouched, lost.
//! Threads: any. Units: pages. Promise: the parts sum to the whole.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ballast_base::{Bytes, PageCount, PageIdx};
use ballast_sys::memfd::FileId;

use super::Vm;
use crate::vm::memory::Counted;
use crate::vm::region::Region;
use crate::vm::stats::Counter;
use ballast_page::page_state::State;

/// After counting or searching pages in vain, a worker rests this many times as long as that took.
pub(crate) const SHARE: u32 = 20;

impl Vm {
    /// How many pages readahead may restore: half of the credits, because other threads fault, too.
    pub(crate) fn readahead_credits(&self) -> u64 {
        let unlimited = || if self.mail.over_limit.load(Ordering::Relaxed) { 0 } else { u64::MAX };
        self.mail.throttle.credits().map_or_else(unlimited, |credits| credits / 2)
    }

    /// May this many pages be brought back that no thread waits for? Up to the limit.
    pub(crate) fn may_prefetch(&self, pages: u64) -> io::Result<bool> {
        if let Some(spare) = self.mail.throttle.spare() {
            return Ok(spare >= pages as i64);
        }
        let Some(limit) = self.effective_limit() else { return Ok(true) };
        Ok((self.resident()? + PageCount(pages)).bytes() <= limit)
    }

    /// DRAM that its regions use, but for those that were unplugged before what was far went back: nothing can be
    /// reclaimed there. Where they have all of a file, that is what the file uses: the kernel knows it at once, and
    /// reclaim asks in every round. If others have a part of the file, the extents are counted, for at most
    /// [`SHARE`] of a CPU; in between, the change of the file as a whole is attributed to these regions.
    pub fn resident(&self) -> io::Result<PageCount> {
        self.resident_by(true, |_| true)
    }

    /// The same for a thread that must not wait for the VMM. Before Linux 6.5 counting a part of a file waits for a
    /// lock of the file: then this is the last count, with the change of the whole file since.
    pub fn resident_at_once(&self) -> io::Result<PageCount> {
        self.resident_at_once_in(|_| true)
    }

    /// The same of these files alone.
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
            let ours = Bytes(regions.iter().map(|region| region.of_file(file.id).0).sum());
            if ours >= size {
                pages += whole;
                continue;
            }
            let now = Instant::now();
            let counted = self.memory.counted(file.id).filter(|counted| counted.ours == ours);
            let may_count = may_wait || regions.iter().all(|region| region.counts_at_once(file.id));
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
                .try_fold(PageCount(0), |sum, region| Ok::<_, io::Error>(sum + region.count(file.id)?))?;
            let until = now + now.elapsed() * (1 + SHARE);
            self.memory.set_counted(file.id, Counted { ours, found, whole, until });
            pages += found;
        }
        Ok(pages)
    }

    /// How its memory is divided, by the counters.
    pub fn memory_breakdown(&self) -> MemoryBreakdown {
        let stats = self.stats();
        let [far, zero, poisoned] = [Counter::Far, Counter::Zero, Counter::Poisoned].map(|gauge| stats.get(gauge));
        let resident = self.resident_at_once().unwrap_or_default();
        MemoryBreakdown::divide(self.size(), [far, zero, poisoned].map(PageCount), resident)
    }

    /// How a region's memory is divided, by its words.
    pub fn memory_breakdown_of(&self, region: &Region) -> io::Result<MemoryBreakdown> {
        let states = self.count_states(region)?;
        let [far, restoring, zero, poisoned] =
            [State::Far, State::Restoring, State::Zero, State::Poisoned].map(|state| states[state as usize]);
        let not_resident = [far + restoring, zero, poisoned].map(PageCount);
        Ok(MemoryBreakdown::divide(region.pages(), not_resident, region.resident()?))
    }

    /// Count every page by its word and its file, slowly and exactly: `(size, resident, far, zero, untouched,
    /// poisoned)`. Every page is in exactly one of the last five. For tests; exact only while nothing moves.
    pub fn census(&self) -> io::Result<Census> {
        let mut census = Census::default();
        for region in self.regions() {
            for page in (0..region.pages().0).map(PageIdx) {
                census.size += PageCount(1);
                let present = region.is_present(page)?;
                let bin = match region.word(page).state() {
                    _ if present => &mut census.resident,
                    State::Far | State::Restoring => &mut census.far,
                    State::Zero => &mut census.zero,
                    State::Poisoned => &mut census.poisoned,
                    State::Resident | State::Quarantine | State::Evicting => &mut census.untouched,
                };
                *bin += PageCount(1);
            }
        }
        Ok(census)
    }

    /// Pages of a region by the state of their words, indexed by `State as usize`. Reads every word that was ever
    /// written.
    pub fn count_states(&self, region: &Region) -> io::Result<[u64; State::COUNT]> {
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

/// How the memory of a VM, or of a region, is divided; the parts sum to the whole.
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
    /// With the size only; all other fields are unknown.
    pub fn uncounted(size: PageCount) -> Self {
        Self { size: size.bytes(), untouched: size.bytes(), ..Self::default() }
    }

    fn divide(size: PageCount, [far, zero, poisoned]: [PageCount; 3], resident: PageCount) -> Self {
        let mut left = size.bytes();
        // A page that is counted twice while it moves shrinks the parts that are counted later, never the sum. The DRAM
        // part is measured and comes first.
        let [resident, far, zero, poisoned] = [resident, far, zero, poisoned].map(|part| {
            let taken = part.bytes().min(left);
            left = Bytes(left.0 - taken.0);
            taken
        });
        Self { size: size.bytes(), resident, far, zero, poisoned, untouched: left }
    }
}

/// Where every page of a VM is. See [`Vm::census`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// All pages.
    pub size: PageCount,
    /// In their file.
    pub resident: PageCount,
    /// In a store.
    pub far: PageCount,
    /// Known zero.
    pub zero: PageCount,
    /// Never touched, or discarded.
    pub untouched: PageCount,
    /// Lost.
    pub poisoned: PageCount,
}
