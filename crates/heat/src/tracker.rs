//! The tracker: when to watch what, and what the answers mean. The mind of the tracking lane.
//!
//! Before: the lane asks [`Tracker::next`] what to do, lets an [`crate::AccessSource`] do it, and hands the report to
//! [`Tracker::absorb`]. After: reclaim picks from the generations, the API shows ages.
//! Threads: one tracker per VM behind a lock ([`crate::VmHeat`]); the lane, reclaim and the API hold it for short.
//! Units: `now` is the time since tracking of this VM began. Promise: no clock, no I/O; the same reports in, the same
//! state out, so that a recording replays exactly.
//!
//! ```text
//! |<---------------- period, adapts ---------------->|
//! | coarse window: all units | fine: chosen ones |   | coarse ...
//! ```

mod answers;
mod tape;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Duration;

use crate::Pages;
use crate::chance::Counts;
use crate::generations::{GENERATIONS, Generations, Promotion};
use crate::inside::Inside;
use crate::pace::{Budget, Pace};
use crate::quota::Quota;
use crate::record::Frame;
use crate::sample::Dice;
use crate::source::{PageMap, Report, Seen, UnitId, Watch};
use crate::subpage::{Limits, Subpages, Verdict};
use crate::units::{Moment, Units};
use tape::Tape;

/// Scans and cycles that count as "recent": those of the working set and of a unit's skew.
pub const RECENT: u32 = 3;
/// What was learned of the inside of a unit is forgotten after this.
const KEEP_INSIDE: Duration = Duration::from_secs(600);
/// With no coarse cycle for this long, what is known is no longer news.
const STALE: Duration = Duration::from_secs(600);

/// How tracking works.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// From the start of one coarse cycle to that of the next, at least. It grows as the budget demands.
    pub period: Duration,
    /// The same, at most.
    pub longest_period: Duration,
    /// Part of the period in which all units are watched coarsely; fine batches fit into the rest.
    pub coarse_share: f64,
    /// Part of the period in which chosen units are watched finely, after that. 0: none are.
    pub fine_share: f64,
    /// Which units are watched finely, and how many at a time.
    pub subpages: Limits,
    /// What the coarse phase may cost, and the fine phase again.
    pub budget: Budget,
    /// How a touched unit is promoted.
    pub promotion: Promotion,
}

impl Default for Settings {
    /// A cycle each 2 s where that is cheap. Budgets: half of HugeScope's 3 % for each phase. A unit's pages are watched about
    /// as long as the unit was when it was found hot: in Blowfish's 100 ms, a unit of which every page is touched once a
    /// second looks like one that is nearly all cold.
    fn default() -> Self {
        Self {
            period: Duration::from_secs(2),
            longest_period: Duration::from_secs(60),
            coarse_share: 0.5,
            fine_share: 0.4,
            subpages: Limits::default(),
            budget: Budget { cpu: 0.015, guest: 0.015 },
            promotion: Promotion::Fair,
        }
    }
}

/// What a cycle is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// All units, as wholes: generations age by it.
    Coarse,
    /// Chosen units, page by page.
    Fine,
}

/// What the lane does next.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Start a cycle, end it after `window`, and hand in the report.
    Watch {
        /// To be handed back with the report.
        phase: Phase,
        /// What to watch.
        watch: Watch,
        /// How long.
        window: Duration,
    },
    /// Nothing for so long.
    Rest(Duration),
}

/// One VM's tracker.
#[derive(Debug)]
pub struct Tracker {
    settings: Settings,
    pub(crate) units: Units,
    pub(crate) generations: Generations,
    subpages: Subpages,
    coarse: Pace,
    fine: Pace,
    /// What fine cycles cost.
    quota: Quota,
    next_coarse: Duration,
    next_fine: Duration,
    /// When the running cycle began.
    pub(crate) begun: Duration,
    /// What looks into the same units saw of pages that looks before had missed.
    counts: Counts,
    /// How long the last fine cycle took.
    look: Duration,
    /// Begin and end of the last coarse cycles, the newest last; at most [`RECENT`].
    recent: VecDeque<(Duration, Duration)>,
    cycles: u64,
    fine_cycles: u64,
    /// Fine cycles there had been at the last coarse cycle and the one before.
    fine_before: [u64; 2],
    /// Grows with each report: whoever derived something from this state knows when to derive it anew.
    version: u64,
    tape: Tape,
}

impl Tracker {
    /// Nothing known yet. `seed` decides which pages are sampled.
    pub fn new(settings: Settings, seed: u64) -> Self {
        let pace = |shortest, longest| Pace::new(shortest, longest, settings.budget);
        Self {
            settings,
            units: Units::default(),
            generations: Generations::new(settings.promotion),
            subpages: Subpages::new(settings.subpages, Dice::new(seed)),
            coarse: pace(settings.period, settings.longest_period),
            fine: pace(settings.period, settings.longest_period),
            quota: Quota::default(),
            next_coarse: Duration::ZERO,
            next_fine: Duration::ZERO,
            begun: Duration::ZERO,
            counts: Counts::default(),
            look: Duration::ZERO,
            recent: VecDeque::new(),
            cycles: 0,
            fine_cycles: 0,
            fine_before: [0; 2],
            version: 0,
            tape: Tape::default(),
        }
    }

    /// The settings it was made with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What to do now. A step to watch is under way until its report is absorbed.
    pub fn next(&mut self, now: Duration, pages: &dyn Pages) -> Step {
        if now >= self.next_coarse {
            self.units.survey(pages, Moment::at(now), self.generations.youngest());
            self.begun = now;
            let period = self.coarse.period();
            self.next_coarse = now + period;
            let watch = Watch { coarse: self.units.present().collect(), fine: Vec::new() };
            return match watch.coarse.is_empty() {
                true => Step::Rest(period),
                false => {
                    Step::Watch { phase: Phase::Coarse, watch, window: period.mul_f64(self.settings.coarse_share) }
                }
            };
        }
        let window = self.coarse.period().mul_f64(self.settings.fine_share);
        // No later than the next coarse cycle, with which it must not overlap.
        let fits = |at: Duration| !window.is_zero() && at + window <= self.next_coarse;
        if !self.subpages.is_idle() && now >= self.next_fine && fits(now) {
            let units = &self.units;
            let mut purse = self.quota.purse(self.settings.budget, self.coarse.period());
            let unknown = self.quota.share();
            let pages_of = |unit| if units.present_pages(unit) > 0 { units.pages_of(unit) } else { 0 };
            let fine = self.subpages.batch(window, pages_of, |unit, watched| {
                let share = units.inside(unit).map_or(unknown, |inside| inside.share().share);
                purse.pay(watched as f64 * share, watched < units.pages_of(unit))
            });
            if !fine.is_empty() {
                self.begun = now;
                return Step::Watch { phase: Phase::Fine, watch: Watch { coarse: Vec::new(), fine }, window };
            }
        }
        let next_fine = self.next_fine.max(now + Duration::from_millis(1));
        let until = if !self.subpages.is_idle() && fits(next_fine) { next_fine } else { self.next_coarse };
        Step::Rest(until - now)
    }

    /// A cycle is over; `now` is its end. For a cycle that failed, hand in an empty report.
    pub fn absorb(&mut self, now: Duration, phase: Phase, report: &Report) {
        let at = Moment::at(now);
        self.version += 1;
        if self.tape.is_wanted(now) {
            let frame = Frame::Cycle(self.recorded(self.version, now, phase, report)).encode();
            self.tape.push(self.units.region_pages().collect(), self.version, frame);
        } else {
            self.tape = Tape::default();
        }
        if phase == Phase::Coarse {
            self.generations.advance();
        }
        if phase == Phase::Fine {
            self.counts.fade();
            self.look = now.saturating_sub(self.begun);
        }
        let mut reported = report.units.iter().map(|(unit, _)| *unit).peekable();
        if phase == Phase::Coarse {
            // What the cycle learned nothing of stays in its generation.
            for unit in self.units.present().collect::<Vec<_>>() {
                while reported.next_if(|seen| *seen < unit).is_some() {}
                if reported.peek() != Some(&unit) {
                    self.set_birth(unit, Generations::unseen);
                }
            }
        }
        for (unit, seen) in &report.units {
            self.absorb_unit(at, phase, *unit, seen);
        }
        match phase {
            Phase::Coarse => {
                self.cycles += 1;
                self.fine_before = [self.fine_cycles, self.fine_before[0]];
                // Tracking may have rested for long.
                self.recent.retain(|(_, end)| self.begun.saturating_sub(*end) <= STALE);
                self.recent.push_back((self.begun, now));
                if self.recent.len() > RECENT as usize {
                    self.recent.pop_front();
                }
                self.coarse.paid(report.cost);
                self.next_coarse = (self.begun + self.coarse.period()).max(now);
                self.units.forget_old(at, KEEP_INSIDE);
                self.begin_round();
            }
            Phase::Fine => {
                self.fine_cycles += 1;
                let units = &self.units;
                self.quota.learn(report, |unit| units.pages_of(unit));
                self.subpages.end_batch();
                self.fine.paid(report.cost);
                self.next_fine = (self.begun + self.fine.period().max(self.subpages.interval())).max(now);
            }
        }
    }

    fn set_birth(&mut self, unit: UnitId, of: impl Fn(&Generations, u32) -> u32) {
        if let Some(birth) = self.units.birth(unit) {
            self.units.regions[unit.region as usize].births[unit.unit as usize] = of(&self.generations, birth);
        }
    }

    fn absorb_unit(&mut self, at: Moment, phase: Phase, unit: UnitId, seen: &Seen) {
        if phase == Phase::Coarse {
            if !self.units.push(unit, seen.touched(), at) {
                return;
            }
            let blocks = if let Seen::Blocks { touched } = seen { Some(*touched) } else { None };
            let generation = self.generation(unit).unwrap_or(0);
            self.units.push_blocks(unit, blocks, generation);
            match blocks {
                _ if !seen.touched() => {}
                Some(_) => self.set_birth(unit, |generations, _| generations.youngest()),
                None => self.set_birth(unit, Generations::touched),
            }
        } else if seen.touched() {
            // Being watched more often than others must not make it younger: no entry, no promotion.
            self.units.touch(unit, at);
        }
        let Seen::Fine { watched, touched } = *seen else { return };
        let of = self.units.pages_of(unit);
        let here = PageMap::first(of);
        let (watched, touched) = (watched.and(here), touched.and(watched).and(here));
        match self.units.inside(unit) {
            Some(inside) => watched.iter().for_each(|page| self.counts.push(inside.misses(page), touched.get(page))),
            None => self.quota.looked(touched.count(), watched.count()),
        }
        if watched == here && of > 0 {
            self.units.push_scan(unit, at, watched, touched);
        } else if !watched.is_empty() {
            self.units.push_sample(unit, at, watched, touched);
        }
        // In a coarse cycle a source may give pages for free, and then the verdict is free as well.
        let verdict = self.subpages.judge(unit, touched.count(), watched.count(), of);
        if let Some(scanned) = self.units.scanned_mut(unit).filter(|_| verdict != Verdict::Suspect) {
            scanned.bloated = verdict == Verdict::Bloated;
        }
    }

    /// After a coarse cycle: which hot units to look into.
    fn begin_round(&mut self) {
        let mut hot = Vec::new();
        for unit in self.units.present() {
            let generation = self.units.birth(unit).map_or(GENERATIONS, |birth| self.generations.of(birth));
            // One that is young only because it is new, or cools down, has nothing hot inside.
            let touched = self.units.entry(unit).is_some_and(|entry| entry.age() < RECENT);
            if generation < 2 && touched {
                let inside = self.units.inside(unit);
                let bloated = match inside {
                    Some(Inside::Scanned(scanned)) if scanned.bloated => Some(scanned),
                    _ => None,
                };
                // Half done: only a second look can tell a few hot pages from many that are lukewarm.
                let is_done = bloated.is_none_or(|scanned| scanned.share_within(RECENT, 1).0 > 1);
                // The one looked into longest ago comes first, and of those that never were the second-youngest generation's.
                let scan = bloated.is_some() || inside.is_none() && self.quota.is_sparse();
                hot.push((is_done, inside.map(Inside::last), generation == 0, unit, scan));
            }
        }
        hot.sort_unstable();
        self.subpages.begin_round(hot.into_iter().map(|(.., unit, scan)| (unit, scan)));
    }

    /// Is what is known still news?
    pub fn is_fresh(&self, now: Duration) -> bool {
        self.recent.back().is_some_and(|(_, end)| now.saturating_sub(*end) <= STALE)
    }

    /// Coarse and fine cycles so far.
    pub fn cycles(&self) -> (u64, u64) {
        (self.cycles, self.fine_cycles)
    }

    /// Grows with each report.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// From one coarse cycle to the next, now.
    pub fn period(&self) -> Duration {
        self.coarse.period()
    }

    /// Shares that tracking took of late: of a CPU, and of the guest's time.
    pub fn spent(&self) -> Budget {
        let (coarse, fine) = (self.coarse.spent(), self.fine.spent());
        // Batches run only while there is something to look into.
        let fine = if self.fine_cycles > self.fine_before[1] { fine } else { Budget { cpu: 0.0, guest: 0.0 } };
        Budget { cpu: coarse.cpu + fine.cpu, guest: coarse.guest + fine.guest }
    }

    /// From the begin of the last [`RECENT`] coarse cycles to their end.
    pub fn recent_span(&self) -> Duration {
        match (self.recent.front(), self.recent.back()) {
            (Some((first, _)), Some((_, last))) => *last - *first,
            _ => Duration::ZERO,
        }
    }
}
