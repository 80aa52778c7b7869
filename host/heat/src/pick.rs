//! Pick: the pages that reclaim takes next, the coldest first.
//!
//! Before: reclaim wants a number of pages. After: it puts the proposed ones into quarantine, the last test.
//! Threads: a VM's reclaim worker owns its source. Units: a round offers each unit with pages in memory once.
//! Promise: a call proposes no page twice, checks each page at most once, and proposes more than wanted only to
//! complete a granule. It examines a bounded number of units and pages, however large the VM: faults may wait for the
//! next evictions. The next call continues where the last one stopped.
//!
//! Cold pages are those of order 0 or 1 in the table of `offer`. With tracking, a round is made once for each coarse
//! cycle, because nothing else makes memory cold, and used when it is complete. Without tracking, all pages have order
//! 0, and a round goes through the units in random order, some [`AT_ONCE`] at a time: each such part has units from all
//! over each region, and is used as soon as it is made.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use ballast_base::{PAGES_PER_UNIT, PageIdx, PageRange};

use crate::age::Age;
use crate::shared::VmHeat;
use crate::source::UnitId;
use crate::tracker::Tracker;
use crate::units::AT_ONCE;
use crate::{ColdRun, Pages, Pick};

mod offer;
#[cfg(test)]
mod tests;

use offer::{BLOAT, Offer, Round, offer};

/// Most pages that a call checks: 256 MiB, some milliseconds if none is a candidate. An offer counts as one page.
const MOST_PAGES: u64 = 64 << 10;

/// Proposes pages to reclaim: the seam between *how much* (reclaim) and *which* (heat).
#[derive(Debug)]
pub struct HeatSource {
    heat: Arc<VmHeat>,
    /// The next offer is on top.
    round: BinaryHeap<Reverse<Offer>>,
    rounds: u64,
    /// Number of coarse cycles at the start of the round; `None` without tracking.
    made_at: Option<u64>,
    /// `None` when all units were put into the round.
    making: Option<Making>,
}

/// How far a round is made: part `part` of `parts` has each unit of which the number is `part` modulo `parts`. The
/// number of parts stays while memory is plugged in, so that no unit is in two of them; some new units may be in none.
#[derive(Clone, Copy, Debug)]
struct Making {
    part: u64,
    parts: u64,
    /// The next unit to put into the round.
    region: u32,
    unit: u64,
}

impl HeatSource {
    /// Begins without a round.
    pub fn new(heat: Arc<VmHeat>) -> Self {
        Self { heat, round: BinaryHeap::new(), rounds: 0, made_at: None, making: None }
    }

    /// Proposes up to about `want` pages, coldest first, in `out`; fewer if fewer are cold. The next call continues
    /// with the pages after them. No page is proposed again while it is in quarantine, because then it is not Resident.
    ///
    /// Returns whether another call may find more at once: this one ended because it had examined as much as it may.
    pub fn pick(&mut self, pages: &dyn Pages, want: u64, pick: Pick, out: &mut Vec<ColdRun>) -> bool {
        let heat = self.heat.clone();
        let tracker = heat.lock();
        let cycle = tracker.is_fresh(heat.now()).then(|| tracker.cycles().0);
        let over = self.round.is_empty() && (cycle.is_none() || pick == Pick::Any);
        let is_next = match (self.made_at, self.making) {
            (_, None) => over || cycle != self.made_at,
            // A round that is being made is used before the next begins, however short the cycles are.
            (Some(_), Some(_)) => false,
            (None, Some(_)) => cycle.is_some(),
        };
        if is_next {
            self.round.clear();
            self.rounds += 1;
            let all: u64 = (0..pages.regions()).map(|region| pages.len(region).div_ceil(PAGES_PER_UNIT)).sum();
            let parts = all.div_ceil(AT_ONCE).max(1);
            (self.made_at, self.making) = (cycle, Some(Making { part: 0, parts, region: 0, unit: 0 }));
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

    /// Returns whether the last call proposed nothing because the coldest pages are not known yet.
    pub fn is_sorting(&self) -> bool {
        self.made_at.is_some() && self.making.is_some()
    }

    /// Continues to make the round. Returns whether more of it is left to make.
    fn make_round(&mut self, tracker: &Tracker, pages: &dyn Pages) -> bool {
        let round = Round { number: self.rounds, is_tracked: self.made_at.is_some() };
        let mut offers = Vec::new();
        let mut looks = AT_ONCE;
        while let Some(next) = &mut self.making {
            if next.region >= pages.regions() {
                let part = next.part + 1;
                *next = Making { part, parts: next.parts, region: 0, unit: part };
                if part < next.parts {
                    return true;
                }
                self.making = None;
            } else if next.unit >= pages.len(next.region).div_ceil(PAGES_PER_UNIT) {
                (next.region, next.unit) = (next.region + 1, next.part);
            } else if looks == 0 {
                return true;
            } else {
                looks -= 1;
                let unit = UnitId { region: next.region, unit: next.unit as u32 };
                next.unit += next.parts;
                if pages.next_present(unit.region, PageRange::of_unit(unit.unit.into())).is_some() {
                    offer(tracker, unit, round, pages.granule(unit.region), &mut offers);
                    self.round.extend(offers.drain(..).map(Reverse));
                }
            }
        }
        false
    }
}

/// Number of pages that a call may still propose, and check.
struct Limits {
    wanted: u64,
    checks: u64,
}

/// Proposes pages of one offer until a limit is reached. Returns the rest of the offer.
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
        // The words are checked first: they exclude most pages that may not be evicted, without asking the kernel.
        let (first, most) = (page, limits.wanted.min(limits.checks));
        let mut may_go = true;
        while may_go && page < stop && page - first < most {
            limits.checks = limits.checks.saturating_sub(1);
            may_go = wanted.get(page - base) && is_candidate(pages, region, PageIdx(page));
            page += if may_go { granule } else { 0 };
        }
        let mut run = PageRange::new(PageIdx(first), PageIdx(page.min(stop)));
        // A page that was never touched is Resident, too: the kernel is asked which pages are in the file.
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

/// Adds pages to the last run if they follow it; otherwise as a new run.
pub fn push_run(out: &mut Vec<ColdRun>, region: u32, pages: PageRange) {
    match out.last_mut() {
        Some(run) if run.region == region && run.pages.end() == pages.start() => {
            run.pages = PageRange::new(run.pages.start(), pages.end());
        }
        _ => out.push(ColdRun { region, pages }),
    }
}
