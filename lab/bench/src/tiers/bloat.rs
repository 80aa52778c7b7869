//! A guest whose hot pages are spread over more huge pages than fast memory holds (hot bloat), modelled.
//!
//! Before: a share of bloated memory is given. After: the product's tracker has seen touches of it, cycle by cycle, and
//! the product's plan of moves was carried out; the share of accesses that fast memory serves is known.
//! The guest is that of HugeScope's Figure 1: it has touched all of its memory once and accesses a tenth of it. Fast
//! memory is a fifth. A part of the accessed pages fills huge pages; in each bloated huge page, a tenth is accessed.
//! Units: huge pages of 512 pages; accesses a second. Promise: touches are drawn at random from the truth, and the
//! tracker learns nothing else; memory and time are modelled; [`COST`] says what a scan costs the guest.

use std::time::Duration;

use ballast_base::{MIB, PAGE_SIZE, PAGES_PER_UNIT, PageIdx, PageRange};
use ballast_heat::placement::{Unit, plan};
use ballast_heat::source::{BLOCK, Cost};
use ballast_heat::{CycleReport, PageMap, Pages, Phase, Seen, Settings, Step, Tracker, UnitId, Watch};
use ballast_testkit::random::Random;

/// 1/N of the pages is accessed; in a bloated huge page, too.
const ACCESSED: u64 = 10;
/// 1/N of the pages fits into fast memory.
const FAST: u64 = 5;
/// Accesses a second to each page that is accessed. 25 pages fill a MiB/s of cache lines.
const RATE: f64 = 100.0;
/// Most memory moved each way in a cycle: 256 MiB a second at a cycle in 2 s.
const MOST: u64 = 512 * MIB / PAGE_SIZE as u64;
/// *Sampled* sees the pages of 1/N of the units, as Thermostat splits 5 % of the huge pages.
const SAMPLED: u32 = 20;

/// Cost of a touch in a zap scan: of a unit mapped huge (measured: 5.6 us), and of one page (3 us, an estimate).
const COST: (Duration, Duration) = (Duration::from_nanos(5600), Duration::from_nanos(3000));

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Both phases of tracking, the page-size policy, and moves in both sizes.
    Ours,
    /// Whole huge pages, by whether they were touched (vTMM-like).
    Whole,
    /// As `Ours`, with a sample of a twentieth of the huge pages.
    Sampled,
}

impl Way {
    pub(crate) const ALL: [Self; 3] = [Self::Ours, Self::Whole, Self::Sampled];

    /// The suffix of its keys; those of `Ours` have none.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Self::Ours => "",
            Self::Whole => "_whole_pages",
            Self::Sampled => "_sampled_5pct",
        }
    }
}

/// The truth: how often each page of each unit is accessed.
#[derive(Clone, Debug)]
pub(crate) struct Truth {
    hot: Vec<PageMap>,
    /// Accesses a second to an accessed page, and to any page.
    rate: f64,
    stray: f64,
}

impl Truth {
    /// `bloat_pct` of the accessed pages are in bloated units; `stray_pct` of accesses go anywhere.
    pub(crate) fn new(units: u64, bloat_pct: u64, stray_pct: f64, rng: &mut Random) -> Self {
        let accessed = units * PAGES_PER_UNIT / ACCESSED;
        let each = PAGES_PER_UNIT / ACCESSED;
        let bloated = (accessed * bloat_pct / 100 / each).min(units);
        let full = (accessed * (100 - bloat_pct) / 100 / PAGES_PER_UNIT).min(units - bloated);
        let mut hot = vec![PageMap::NONE; units as usize];
        // Shuffled, so that heat does not depend on the order of the first touches.
        let mut order: Vec<usize> = (0..hot.len()).collect();
        (1..order.len()).rev().for_each(|last| order.swap(last, rng.below(last as u64 + 1) as usize));
        for (place, at) in order.into_iter().take((bloated + full) as usize).enumerate() {
            hot[at] = if (place as u64) < bloated { some(each, rng) } else { PageMap::ALL };
        }
        let pages: u64 = hot.iter().map(|hot| hot.count()).sum();
        let stray = RATE * pages as f64 * stray_pct / 100.0 / (units * PAGES_PER_UNIT) as f64;
        Self { hot, rate: RATE * (1.0 - stray_pct / 100.0), stray }
    }

    fn of(&self, unit: usize, pages: PageMap) -> f64 {
        self.hot[unit].and(pages).count() as f64 * self.rate + pages.count() as f64 * self.stray
    }

    pub(crate) fn units(&self) -> u64 {
        self.hot.len() as u64
    }

    pub(crate) fn all(&self) -> f64 {
        (0..self.hot.len()).map(|unit| self.of(unit, PageMap::ALL)).sum()
    }

    /// The largest share that fast memory can serve.
    pub(crate) fn oracle(&self) -> f64 {
        let room = self.hot.len() as u64 * PAGES_PER_UNIT / FAST;
        let hot = self.hot.iter().map(|hot| hot.count()).sum::<u64>().min(room);
        (hot as f64 * self.rate + room as f64 * self.stray) / self.all()
    }
}

/// A random set of this number of pages of a unit.
fn some(count: u64, rng: &mut Random) -> PageMap {
    let mut pages = PageMap::NONE;
    while pages.count() < count {
        pages.set(rng.below(PAGES_PER_UNIT));
    }
    pages
}

/// A region in which all memory is present.
struct All(u64);

impl Pages for All {
    fn regions(&self) -> u32 {
        1
    }
    fn len(&self, _: u32) -> u64 {
        self.0 * PAGES_PER_UNIT
    }
    fn next_present(&self, _: u32, pages: PageRange) -> Option<PageRange> {
        Some(pages.before(PageIdx(self.0 * PAGES_PER_UNIT))).filter(|pages| !pages.is_empty())
    }
    fn age(&self, _: u32, _: PageIdx) -> Option<u8> {
        None
    }
    fn set_age(&self, _: u32, _: PageIdx, _: u8) {}
}

pub(crate) struct Guest {
    way: Way,
    tracker: Tracker,
    rng: Random,
    now: Duration,
    slow: Vec<PageMap>,
    huge: Vec<bool>,
    /// Numbers of huge pages that were split, and joined again.
    pub(crate) changed: (u64, u64),
}

impl Guest {
    pub(crate) fn new(way: Way, units: u64, seed: u64) -> Self {
        let whole = Settings { is_placed: true, ..Settings::default() };
        let fine_share = if way == Way::Whole { 0.0 } else { whole.fine_share };
        let fast = units / FAST;
        Self {
            way,
            tracker: Tracker::new(Settings { fine_share, ..whole }),
            rng: Random(seed),
            now: Duration::ZERO,
            slow: (0..units).map(|unit| if unit < fast { PageMap::NONE } else { PageMap::ALL }).collect(),
            huge: vec![true; units as usize],
            changed: (0, 0),
        }
    }

    pub(crate) fn hits(&self, truth: &Truth) -> f64 {
        let fast = self.slow.iter().enumerate().map(|(unit, slow)| truth.of(unit, PageMap::ALL.without(*slow)));
        fast.sum::<f64>() / truth.all()
    }

    pub(crate) fn now(&self) -> Duration {
        self.now
    }

    /// Runs until the next coarse cycle has ended and its moves are done.
    pub(crate) fn cycle(&mut self, truth: &Truth) {
        let all = All(self.slow.len() as u64);
        loop {
            match self.tracker.next(self.now, &all) {
                Step::Rest(pause) => self.now += pause.max(Duration::from_micros(1)),
                Step::Watch { phase, watch, window } => {
                    self.now += window;
                    let report = self.report(truth, &watch, window.as_secs_f64());
                    self.tracker.absorb(self.now, phase, &report);
                    if phase == Phase::Coarse {
                        return self.place();
                    }
                }
            }
        }
    }

    /// Whether pages with this rate of accesses were touched in this time, drawn at random.
    fn is_touched(&mut self, rate: f64, seconds: f64) -> bool {
        let chance = 1.0 - (-rate * seconds).exp();
        (self.rng.word() >> 11) as f64 / ((1u64 << 53) as f64) < chance
    }

    fn report(&mut self, truth: &Truth, watch: &Watch, seconds: f64) -> CycleReport {
        let (mut report, mut faults) = (CycleReport::default(), 0);
        for id in &watch.coarse {
            let unit = id.unit as usize;
            let seen = if self.huge[unit] {
                Seen::Coarse { touched: self.is_touched(truth.of(unit, PageMap::ALL), seconds) }
            } else {
                let block = |block| PageMap::first((block + 1) * BLOCK).without(PageMap::first(block * BLOCK));
                let bits = (0..8).map(|at| u8::from(self.is_touched(truth.of(unit, block(at)), seconds)) << at);
                Seen::Blocks { touched: bits.fold(0, |all, bit| all | bit) }
            };
            faults += match seen {
                Seen::Blocks { touched } => touched.count_ones(),
                _ => u32::from(seen.touched()),
            };
            report.units.push((*id, seen));
        }
        report.cost.guest = COST.0 * faults;
        let way = self.way;
        for id in watch.fine.iter().filter(|id| way != Way::Sampled || id.unit % SAMPLED == SAMPLED / 2) {
            let unit = id.unit as usize;
            let mut touched = PageMap::NONE;
            for page in 0..PAGES_PER_UNIT {
                let rate = truth.stray + if truth.hot[unit].get(page) { truth.rate } else { 0.0 };
                if self.is_touched(rate, seconds) {
                    touched.set(page);
                }
            }
            report.cost.guest += COST.1 * touched.count() as u32;
            report.units.push((*id, Seen::Fine { touched }));
        }
        report.cost = Cost { cpu: report.cost.guest, ..report.cost };
        report
    }

    fn place(&mut self) {
        let unit = |(id, warmth): (UnitId, _)| {
            let number = id.unit as usize;
            Unit { id, here: PageMap::ALL, slow: self.slow[number], huge: self.huge[number], warmth }
        };
        let units: Vec<Unit> = self.tracker.warmth().into_iter().map(unit).collect();
        let plan = plan(&units, self.slow.len() as u64 * PAGES_PER_UNIT / FAST, MOST);
        for one in plan.moves {
            let unit = one.unit.unit as usize;
            if one.pages != PageMap::ALL && std::mem::take(&mut self.huge[unit]) {
                self.changed.0 += 1;
            }
            let slow = self.slow[unit];
            self.slow[unit] = if one.down { slow.or(one.pages) } else { slow.without(one.pages) };
        }
        for id in plan.join {
            self.huge[id.unit as usize] = true;
            self.changed.1 += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(way: Way, truth: &Truth) -> f64 {
        let mut guest = Guest::new(way, truth.units(), 7);
        (0..40).for_each(|_| guest.cycle(truth));
        guest.hits(truth)
    }

    #[test]
    fn on_bloated_memory_with_strays_ours_is_within_3_points_of_the_oracle_where_whole_pages_lose_30() {
        let truth = Truth::new(400, 50, 1.0, &mut Random(3));
        let oracle = truth.oracle();
        let (ours, whole) = (served(Way::Ours, &truth), served(Way::Whole, &truth));
        assert!(oracle - ours < 0.03 && oracle - whole > 0.3, "{oracle} {ours} {whole}");
        let mut even = Guest::new(Way::Ours, 400, 7);
        let truth = Truth::new(400, 0, 1.0, &mut Random(3));
        (0..40).for_each(|_| even.cycle(&truth));
        assert!(even.changed.0 < 3, "strays alone split {} huge pages", even.changed.0);
    }
}
