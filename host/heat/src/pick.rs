//! Pick: which pages reclaim takes next, the coldest first.
//!
//! Before: reclaim says how many pages it wants. After: it puts those proposed into quarantine, the last test.
//! Threads: a VM's reclaim worker owns its source. Units: a round offers each unit with pages in memory once.
//! Promise: a call proposes no page twice, checks each page at most once, and proposes more than wanted only to
//! complete a granule. It looks at a bounded number of units and pages, however large the VM: what it evicts next may
//! be what a fault waits for. The next call goes on where it ended.
//!
//! Cold is what has order 0 or 1 in the table of `offer`. With tracking, a round is made once for each coarse cycle,
//! because nothing else makes memory cold, and used when all of it is made. Without it, everything has order 0, and
//! rounds go through memory by address, as a clock hand does: each part is used as soon as it is made.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use ballast_base::{PAGES_PER_UNIT, PageIdx, PageRange};

use crate::age::Age;
use crate::shared::VmHeat;
use crate::source::UnitId;
use crate::tracker::Tracker;
use crate::{ColdRun, Pages, Pick};

mod offer;
#[cfg(test)]
mod tests;

use offer::{BLOAT, Offer, offer};

/// Units that a call puts into the round: 8 GiB, some milliseconds of asking the kernel which are in memory.
const MOST_UNITS: u64 = 4096;
/// Pages that a call checks: 256 MiB, some milliseconds where none may go. An offer counts as one more.
const MOST_PAGES: u64 = 64 << 10;

/// Proposes pages to reclaim: the seam between *how much* (reclaim) and *which* (heat).
#[derive(Debug)]
pub struct HeatSource {
    heat: Arc<VmHeat>,
    /// The next one first.
    round: BinaryHeap<Reverse<Offer>>,
    /// Number of coarse cycles when the round was begun; `None` without tracking.
    made_at: Option<u64>,
    /// The unit from which on none is in the round yet: region and number. `None` when all are.
    making: Option<(u32, u64)>,
}

impl HeatSource {
    /// Starts without a round.
    pub fn new(heat: Arc<VmHeat>) -> Self {
        Self { heat, round: BinaryHeap::new(), made_at: None, making: None }
    }

    /// Propose up to about `want` pages, coldest first, into `out`. Fewer come if fewer are cold; calling again goes
    /// on from there. No page is proposed twice while it stays in quarantine, because then it is not Resident.
    ///
    /// Returns whether there may be more at once: the call ended because it has looked at as much as one may.
    pub fn pick(&mut self, pages: &dyn Pages, want: u64, pick: Pick, out: &mut Vec<ColdRun>) -> bool {
        let heat = self.heat.clone();
        let tracker = heat.lock();
        let cycle = tracker.is_fresh(heat.now()).then(|| tracker.cycles().0);
        let over = self.round.is_empty() && (cycle.is_none() || pick == Pick::Any);
        let is_next = match (self.made_at, self.making) {
            (_, None) => over || cycle != self.made_at,
            // One that is being made is used before the next is begun, however short the cycles are.
            (Some(_), Some(_)) => false,
            (None, Some(_)) => cycle.is_some(),
        };
        if is_next {
            self.round.clear();
            (self.made_at, self.making) = (cycle, Some((0, 0)));
        }
        let is_tracked = self.made_at.is_some();
        if is_tracked || self.round.is_empty() {
            let has_more = self.make_round(&tracker, pages);
            if is_tracked && has_more {
                return true;
            }
        }
        let mut limits = Limits { wanted: want, checks: MOST_PAGES };
        while limits.wanted > 0 {
            let Some(Reverse(offer)) = self.round.peek().copied() else { return self.making.is_some() };
            if pick == Pick::Cold && offer.order > BLOAT {
                return false;
            }
            if limits.checks == 0 {
                return true;
            }
            self.round.pop();
            if let Some(rest) = sweep(&tracker, pages, offer, &mut limits, out) {
                self.round.push(Reverse(rest));
            }
        }
        false
    }

    /// Returns whether the call before proposed nothing because it does not know yet which pages are the coldest.
    pub fn is_sorting(&self) -> bool {
        self.made_at.is_some() && self.making.is_some()
    }

    /// Go on with the round that is being made. Returns whether there is more of it to make.
    fn make_round(&mut self, tracker: &Tracker, pages: &dyn Pages) -> bool {
        let (tracked, mut offers) = (self.made_at.is_some(), Vec::new());
        let mut looks = MOST_UNITS;
        while let Some((region, unit)) = self.making {
            if region >= pages.regions() {
                self.making = None;
            } else if unit >= pages.len(region).div_ceil(PAGES_PER_UNIT) {
                self.making = Some((region + 1, 0));
            } else if looks == 0 {
                return true;
            } else {
                looks -= 1;
                self.making = Some((region, unit + 1));
                if pages.next_present(region, PageRange::of_unit(unit)).is_some() {
                    let unit = UnitId { region, unit: unit as u32 };
                    offer(tracker, unit, tracked, pages.granule(region), &mut offers);
                    self.round.extend(offers.drain(..).map(Reverse));
                }
            }
        }
        false
    }
}

/// How much a call may still propose, and check.
struct Limits {
    wanted: u64,
    checks: u64,
}

/// Propose the pages of one offer until there are enough, or as many as may be were checked. Returns what is left.
fn sweep(
    tracker: &Tracker,
    pages: &dyn Pages,
    offer: Offer,
    limits: &mut Limits,
    out: &mut Vec<ColdRun>,
) -> Option<Offer> {
    let region = offer.unit.region;
    limits.checks = limits.checks.saturating_sub(1);
    if region >= pages.regions() {
        return None;
    }
    let wanted = offer.wanted(tracker);
    let base = PageIdx::first_of_unit(offer.unit.unit.into()).0;
    let stop = pages.len(region).min(base + PAGES_PER_UNIT);
    let granule = pages.granule(region);
    let mut page = (base + u64::from(offer.from)).next_multiple_of(granule);
    while page < stop {
        if limits.wanted == 0 || limits.checks == 0 {
            return Some(Offer { from: (page - base) as u16, ..offer });
        }
        // By their words first: most pages that may not go are known so, without asking the kernel.
        let (first, most) = (page, limits.wanted.min(limits.checks));
        let mut may_go = true;
        while may_go && page < stop && page - first < most {
            limits.checks = limits.checks.saturating_sub(1);
            may_go = wanted.get(page - base) && is_candidate(pages, region, PageIdx(page));
            page += if may_go { granule } else { 0 };
        }
        let mut run = PageRange::new(PageIdx(first), PageIdx(page.min(stop)));
        // A page that was never touched is Resident, too.
        while let Some(present) = (!run.is_empty()).then(|| pages.next_present(region, run)).flatten() {
            limits.wanted = limits.wanted.saturating_sub(present.count());
            push_run(out, region, present);
            run = run.from(present.end());
        }
        page += if may_go { 0 } else { granule };
    }
    None
}

/// Returns whether the page is Resident, unlocked and without credit. Skipping it uses up one round of its credit.
pub fn is_candidate(pages: &dyn Pages, region: u32, page: PageIdx) -> bool {
    let Some(byte) = pages.age(region, page) else { return false };
    let age = Age::from_byte(byte);
    if age.credit > 0 {
        pages.set_age(region, page, Age { credit: age.credit - 1, ..age }.byte());
        return false;
    }
    true
}

/// Add pages to runs; to the last run if they follow it.
pub fn push_run(out: &mut Vec<ColdRun>, region: u32, pages: PageRange) {
    match out.last_mut() {
        Some(run) if run.region == region && run.pages.end() == pages.start() => {
            run.pages = PageRange::new(run.pages.start(), pages.end());
        }
        _ => out.push(ColdRun { region, pages }),
    }
}
