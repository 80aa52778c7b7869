//! The accounts of a VM: counters of what happened to its pages, and where they are.
//!
//! Before: a lane moved pages. After: the counters in the state file say so.
//! Threads: any. Units: pages. Promise: gauges move with the words; [`Vm::census`] is the slow truth to hold them against.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::Ordering;

use ballast_base::{Bytes, PageCount, PageIdx};

use super::Vm;
use crate::away;
use crate::fault::Served;
use crate::page_state::State;
use crate::region::Region;
use crate::stats::Counter;

impl Vm {
    /// Count a served fault, and keep the gauges, which count the pages of its granule.
    pub(crate) fn count(&self, served: Served, pages: u64) {
        let stats = self.stats();
        match served {
            Served::Mapped => stats.add(Counter::FaultMinor, 1),
            Served::Fresh => stats.add(Counter::FaultFresh, 1),
            Served::Zeroed => {
                stats.add(Counter::ZeroedPages, pages);
                stats.add(Counter::FaultZero, 1);
                stats.sub(Counter::Zero, pages);
            }
            Served::Restored | Served::Filled { .. } => {
                stats.add(Counter::RestoredPages, pages);
                stats.add(Counter::FaultRestore, 1);
                stats.sub(Counter::Far, pages);
            }
            Served::Poisoned { newly } => {
                if newly {
                    stats.sub(Counter::Far, pages);
                    stats.add(Counter::Poisoned, pages);
                }
            }
            Served::Failed => stats.add(Counter::Poisoned, pages),
            Served::Later => stats.add(Counter::FaultDeferred, 1),
            Served::Gone => {}
        }
    }

    /// Count pages that were touched on their way out.
    pub(crate) fn count_rescued(&self, rescued: bool, pages: u64) {
        if rescued {
            self.stats().add(Counter::Rescued, pages);
            self.stats().sub(Counter::Quarantined, pages);
        }
    }

    /// These granules, from this one on, are back. Their words had these stamps of when they went. Answers for how many
    /// milliseconds they were away, all together.
    pub(crate) fn came_back(
        &self,
        region: &Region,
        first: PageIdx,
        granule: u64,
        since: impl Iterator<Item = u8>,
    ) -> u64 {
        let (now_ms, mut away_ms, mut back_milli_hz) = (away::now_ms(), 0, 0);
        for (at, since) in since.enumerate() {
            let page = PageIdx(first.0 + at as u64 * granule);
            let this_ms = region.departures().away_ms(page.0, since, now_ms);
            self.recent.push((region.number, page), this_ms);
            away_ms += this_ms;
            back_milli_hz += away::milli_hz(this_ms);
        }
        self.stats().add(Counter::AwayMs, away_ms);
        self.stats().add(Counter::BackMilliHz, back_milli_hz);
        away_ms
    }

    /// How many pages may come in that will most likely be touched next: half of what faults may bring in, because others fault,
    /// too.
    pub(crate) fn room_ahead(&self) -> u64 {
        let unlimited = || if self.over_limit.load(Ordering::Relaxed) { 0 } else { u64::MAX };
        self.gate.room().map_or_else(unlimited, |room| room / 2)
    }

    /// Say what operators should know of a fault that was served: a page was lost, or somebody else touched it.
    pub(crate) fn tell(&self, served: Served, region: u32, page: PageIdx) {
        match served {
            Served::Poisoned { newly: true } => {
                let text = "the guest gets a memory error when it touches it";
                self.report("page-lost", format!("the store lost page {page} of region {region}: {text}"));
            }
            Served::Failed => {
                let text = "memory of the host failed: the guest gets a memory error when it touches";
                self.report("memory-error", format!("{text} page {page} of region {region}"));
            }
            Served::Filled { zeros } => {
                // Said at the 1st, 2nd, 4th, 8th ... time.
                let times = self.filled.fetch_add(1, Ordering::Relaxed) + 1;
                if times.is_power_of_two() {
                    let found = match zeros {
                        true => {
                            "zeros, which the page's bytes have replaced: a process that is not of the VM reads its RAM"
                        }
                        false => "bytes, which the guest gets: a process that is not of the VM writes to its RAM",
                    };
                    let text = format!("page {page} of region {region} was far, and in its file were {found}");
                    self.report("far-filled", format!("{text} ({times} pages so far)"));
                }
            }
            _ => {}
        }
    }

    /// DRAM the RAM files use; a file that holds several regions counts once.
    pub fn resident(&self) -> io::Result<PageCount> {
        let mut seen = HashSet::new();
        let mut pages = PageCount(0);
        for region in self.regions() {
            if !region.is_removed() && seen.insert(region.file_id()) {
                pages += region.file_resident()?;
            }
        }
        Ok(pages)
    }

    /// Where its memory is, by the counters.
    pub fn whereabouts(&self) -> Whereabouts {
        let stats = self.stats();
        let [far, zero, poisoned] = [Counter::Far, Counter::Zero, Counter::Poisoned].map(|gauge| stats.get(gauge));
        let resident = self.resident().unwrap_or_default();
        Whereabouts::divide(self.size(), [far, zero, poisoned].map(PageCount), resident)
    }

    /// Where a region's is, by its words.
    pub fn whereabouts_of(&self, region: &Region) -> io::Result<Whereabouts> {
        let states = self.count_states(region)?;
        let [far, restoring, zero, poisoned] =
            [State::Far, State::Restoring, State::Zero, State::Poisoned].map(|state| states[state as usize]);
        let away = [far + restoring, zero, poisoned].map(PageCount);
        Ok(Whereabouts::divide(region.pages(), away, region.file_resident()?))
    }

    /// Count every page by its word and its file, slowly and exactly: `(size, resident, far, zero, untouched, poisoned)`.
    /// Every page is in exactly one of the last five. For tests; exact only while nothing moves.
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

    /// Pages of a region by the state of their words, indexed by `State as usize`. Reads every word that was ever written.
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
pub struct Whereabouts {
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

impl Whereabouts {
    /// Nothing is known of it but its size.
    pub fn uncounted(size: PageCount) -> Self {
        Self { size: size.bytes(), untouched: size.bytes(), ..Self::default() }
    }

    fn divide(size: PageCount, [far, zero, poisoned]: [PageCount; 3], resident: PageCount) -> Self {
        let mut left = size.bytes();
        // A page that is counted twice while it moves shrinks what is counted later, never the sum. What is in DRAM is measured
        // and comes first.
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
