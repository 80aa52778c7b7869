//! The tracker: decides what to watch and when, and evaluates the reports.
//!
//! Before: the tracking worker asks [`Tracker::next`] for a step, lets an [`crate::AccessSource`] carry it out, and
//! passes the report to [`Tracker::absorb`]. After: reclaim picks by the generations, the API shows ages.
//! Threads: one tracker per VM behind a lock ([`crate::VmHeat`]), which the worker, reclaim and the API hold briefly.
//! Units: `now` is the time since tracking of this VM began.
//! Promise: no clock and no I/O; equal reports give equal state.
//!
//! ```text
//! |<---------------- period, adapts ---------------->|
//! | coarse window: all units | fine: chosen ones |   | coarse ...
//! ```
//!
//! The hot units get a fine scan, those whose last one is longest ago first. Each phase keeps its cost within the
//! budget: the coarse one by its period, the fine one by the number of units and by a pause.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Duration;

use crate::Pages;
use crate::entry::RECENT;
use crate::moment::Moment;
use crate::placement::Warmth;
use crate::scanned::Scanned;
use crate::source::{Cost, CycleReport, MOST_FINE, PageMap, Phase, Seen, UnitId, Watch};
use crate::units::{self, Surveyed, Units};

/// A fine scan is forgotten after this time, and without a coarse cycle for this time knowledge is stale.
const STALE: Duration = Duration::from_secs(600);
/// The longest window of a coarse cycle: in a longer one everything would be touched.
const LONGEST_WINDOW: Duration = Duration::from_secs(30);
/// The shortest rest.
const SHORT: Duration = Duration::from_millis(1);
/// Aim slightly below the budget, so that noise does not exceed it.
const AIM: f64 = 0.9;
/// Units in the first fine cycle.
const FIRST_FINE: usize = 32;
/// Number of cycles over which a unit's rate is measured.
const RATE_CYCLES: u32 = 8;

/// Settings of tracking.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Shortest time from the start of one coarse cycle to the start of the next. It grows to keep the budget.
    pub period: Duration,
    /// Part of the period in which all units are watched as a whole.
    pub coarse_share: f64,
    /// Part of the shortest period in which chosen units are watched page by page, after that. 0: never.
    pub fine_share: f64,
    /// Most cost of each of the two phases, as a share of one CPU and of the guest's time.
    pub budget: f64,
    /// Memory is placed by its warmth, so relative warmth matters and idle time does not: coarse windows stay short.
    pub is_placed: bool,
}

impl Default for Settings {
    /// A cycle every 2 s if that is cheap. Budgets: half of HugeScope's 3 % for each phase. The pages of a unit are
    /// watched for about as long as the unit was when it was found hot: in Blowfish's 100 ms, a unit of which each page
    /// is touched once a second seems nearly all cold.
    fn default() -> Self {
        Self { period: Duration::from_secs(2), coarse_share: 0.5, fine_share: 0.4, budget: 0.015, is_placed: false }
    }
}

/// The next step of the tracking worker.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Start a cycle, end it after `window`, and absorb the report.
    Watch {
        /// To be passed on with the report.
        phase: Phase,
        /// Units to watch.
        watch: Watch,
        /// Length of the cycle.
        window: Duration,
    },
    /// Do nothing for this time.
    Rest(Duration),
}

/// Cost of tracking, as shares of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spent {
    /// Share of one CPU.
    pub cpu: f64,
    /// Share of the time for which guest threads wait.
    pub guest: f64,
}

impl Spent {
    fn new(cost: Cost, time: Duration) -> Self {
        let share = |spent: Duration| spent.as_secs_f64() / time.max(SHORT).as_secs_f64();
        Self { cpu: share(cost.cpu), guest: share(cost.guest) }
    }
}

/// One VM's tracker.
#[derive(Debug)]
pub struct Tracker {
    settings: Settings,
    pub(crate) units: Units,
    /// Time from the start of one coarse cycle to the start of the next.
    period: Duration,
    next_coarse: Duration,
    next_fine: Duration,
    /// Start of the running cycle.
    begun: Duration,
    /// Start and end of the last coarse cycles, the newest last; at most [`RECENT`].
    recent: VecDeque<(Duration, Duration)>,
    /// Hot units that wait for a fine scan.
    round: VecDeque<UnitId>,
    /// Number of units that a fine cycle may watch.
    batch: usize,
    cycles: u64,
    fine_cycles: u64,
    /// Number of fine cycles at the last coarse cycle and at the one before.
    fine_before: [u64; 2],
    coarse_spent: Spent,
    fine_spent: Spent,
    last_fine: Option<Duration>,
}

impl Tracker {
    /// A tracker without knowledge.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            units: Units::default(),
            period: settings.period,
            next_coarse: Duration::ZERO,
            next_fine: Duration::ZERO,
            begun: Duration::ZERO,
            recent: VecDeque::new(),
            round: VecDeque::new(),
            batch: FIRST_FINE,
            cycles: 0,
            fine_cycles: 0,
            fine_before: [0; 2],
            coarse_spent: Spent::default(),
            fine_spent: Spent::default(),
            last_fine: None,
        }
    }

    /// The next step. A cycle lasts until its report is absorbed.
    pub fn next(&mut self, now: Duration, pages: &dyn Pages) -> Step {
        if self.begin_survey(now, pages) {
            units::survey(pages).for_each(|part| self.survey(now, &part));
        }
        self.step(now)
    }

    /// Returns whether all units must be surveyed before [`Self::step`], because a coarse cycle is due.
    pub fn begin_survey(&mut self, now: Duration, pages: &dyn Pages) -> bool {
        let is_due = now >= self.next_coarse && !self.is_fine_due(now);
        if is_due {
            self.units.layout((0..pages.regions()).map(|region| pages.len(region)).collect::<Vec<_>>().into_iter());
        }
        is_due
    }

    /// Counts a part of the survey.
    pub fn survey(&mut self, now: Duration, part: &Surveyed) {
        self.units.survey(part, Moment::at(now));
    }

    /// Like [`Self::next`], after the survey. A due fine cycle runs between two coarse ones, however long plans take.
    pub fn step(&mut self, now: Duration) -> Step {
        if self.is_fine_due(now) {
            let mut fine: Vec<UnitId> = Vec::new();
            while fine.len() < self.batch
                && let Some(unit) = self.round.pop_front()
            {
                fine.extend(Some(unit).filter(|unit| self.units.present_pages(*unit) > 0));
            }
            if fine.is_empty() {
                return Step::Rest(SHORT);
            }
            fine.sort_unstable();
            self.begun = now;
            let watch = Watch { coarse: Vec::new(), fine };
            return Step::Watch { phase: Phase::Fine, watch, window: self.fine_window() };
        }
        if now >= self.next_coarse {
            self.begun = now;
            self.next_coarse = now + self.period;
            let watch = Watch { coarse: self.units.present().collect(), fine: Vec::new() };
            return match watch.coarse.is_empty() {
                true => Step::Rest(self.period),
                false => Step::Watch { phase: Phase::Coarse, watch, window: self.coarse_window() },
            };
        }
        let next_fine = self.next_fine.max(now + SHORT);
        let until = if self.may_be_fine(next_fine) { next_fine } else { self.next_coarse };
        Step::Rest(until.min(self.next_coarse) - now)
    }

    fn is_fine_due(&self, now: Duration) -> bool {
        now >= self.next_fine && self.may_be_fine(now)
    }

    /// Returns whether a fine cycle may begin at `at`. It must end before the next coarse cycle is due, unless no fine
    /// cycle ran since the last coarse one, which is recent.
    fn may_be_fine(&self, at: Duration) -> bool {
        let window = self.fine_window();
        let is_starved = self.fine_cycles == self.fine_before[0] && self.is_fresh(at);
        !self.round.is_empty() && !window.is_zero() && (at + window <= self.next_coarse || is_starved)
    }

    /// If memory is placed, the window stays as short as in the shortest period: a guest with expensive cycles touches
    /// much, and in a longer window also its cold units. Fine cycles tell the rest apart.
    fn coarse_window(&self) -> Duration {
        let period = if self.settings.is_placed { self.settings.period } else { self.period };
        period.mul_f64(self.settings.coarse_share).min(LONGEST_WINDOW)
    }

    fn fine_window(&self) -> Duration {
        self.settings.period.mul_f64(self.settings.fine_share)
    }

    /// Takes in the report of a cycle that ended at `now`; of a failed cycle, an empty report.
    pub fn absorb(&mut self, now: Duration, phase: Phase, report: &CycleReport) {
        let at = Moment::at(now);
        match phase {
            Phase::Coarse => {
                // A unit that the cycle did not report stays in its generation.
                report.units.iter().for_each(|(unit, seen)| self.units.push(*unit, seen, at));
                self.cycles += 1;
                self.fine_before = [self.fine_cycles, self.fine_before[0]];
                // Tracking may have been off for long.
                let stale = self.stale();
                self.recent.retain(|(_, end)| self.begun.saturating_sub(*end) <= stale);
                self.recent.push_back((self.begun, now));
                if self.recent.len() > RECENT as usize {
                    self.recent.pop_front();
                }
                self.coarse_spent = Spent::new(report.cost, self.period);
                // The period grows fast: a guest in base pages costs many times as much as a guest in huge pages.
                let [least, most] = [0.8, 4.0].map(|factor| self.period.mul_f64(factor));
                self.period = self.pays(report.cost).clamp(least, most).max(self.settings.period);
                self.next_coarse = (self.begun + self.period).max(now);
                self.units.forget_old(at, STALE);
                self.begin_round();
            }
            Phase::Fine => {
                self.fine_cycles += 1;
                let pages = report.units.iter().filter_map(|(unit, seen)| match seen {
                    Seen::Fine { touched } => Some((*unit, *touched)),
                    _ => None,
                });
                for (unit, touched) in pages {
                    let here = PageMap::first(self.units.pages_of(unit));
                    self.units.push_scan(unit, touched.and(here), at);
                }
                let pays = self.pays(report.cost);
                let since = self.last_fine.replace(self.begun).map_or(pays, |last| self.begun.saturating_sub(last));
                self.fine_spent = Spent::new(report.cost, since);
                // As many units as pay for themselves within a period.
                let each = pays.as_secs_f64() / report.units.len().max(1) as f64;
                let fits = (self.period.as_secs_f64() / each) as usize;
                self.batch = fits.clamp(self.batch / 2, self.batch * 2).clamp(1, MOST_FINE);
                self.next_fine = (self.begun + pays).max(now);
            }
        }
    }

    /// The time for which a cost is within the budget.
    fn pays(&self, cost: Cost) -> Duration {
        let spent = cost.cpu.max(cost.guest).as_secs_f64();
        Duration::try_from_secs_f64(spent / (AIM * self.settings.budget)).unwrap_or(STALE)
    }

    /// After a coarse cycle: selects the hot units that get a fine scan.
    fn begin_round(&mut self) {
        let mut hot = Vec::new();
        for unit in self.units.present() {
            let generation = self.units.generation(unit).unwrap_or(0);
            // A unit that is young only because it is new, or that cools down, has no hot pages.
            if generation < 2 && self.is_recent(unit) {
                let scanned = self.units.scanned(unit);
                // Units with one scan come first: a second scan tells a few hot pages from many lukewarm ones. Then
                // come those whose last scan is longest ago. Of those without a scan, the second-youngest generation
                // comes first: units with a few hot pages gather there under fair promotion.
                let is_done = !scanned.is_some_and(Scanned::is_half_done);
                hot.push((is_done, scanned.map(Scanned::last), generation == 0, unit));
            }
        }
        hot.sort_unstable();
        self.round = hot.into_iter().map(|(.., unit)| unit).collect();
    }

    pub(crate) fn is_recent(&self, unit: UnitId) -> bool {
        self.units.entry(unit).is_some_and(|entry| entry.age() < RECENT)
    }

    /// Returns whether knowledge is recent.
    pub fn is_fresh(&self, now: Duration) -> bool {
        self.recent.back().is_some_and(|(_, end)| now.saturating_sub(*end) <= self.stale())
    }

    /// Knowledge is stale after this time without a cycle: [`STALE`], or a missed cycle of a very large guest.
    fn stale(&self) -> Duration {
        STALE.max(self.period * 3)
    }

    /// Number of coarse and of fine cycles.
    pub fn cycles(&self) -> (u64, u64) {
        (self.cycles, self.fine_cycles)
    }

    /// The current time from one coarse cycle to the next.
    pub fn period(&self) -> Duration {
        self.period
    }

    /// Current cost of tracking.
    pub fn spent(&self) -> Spent {
        // Fine cycles run only while there is a unit to scan.
        let fine = if self.fine_cycles > self.fine_before[1] { self.fine_spent } else { Spent::default() };
        Spent { cpu: self.coarse_spent.cpu + fine.cpu, guest: self.coarse_spent.guest + fine.guest }
    }

    /// Time from the start of the last [`RECENT`] coarse cycles to their end.
    pub fn recent_span(&self) -> Duration {
        match (self.recent.front(), self.recent.back()) {
            (Some((first, _)), Some((_, last))) => *last - *first,
            _ => Duration::ZERO,
        }
    }

    /// Time of the last touch of memory of this generation, by the rule of base pages; for the oldest, an upper bound.
    pub(crate) fn seen_in(&self, generation: u8) -> Moment {
        let ends = self.recent.iter().rev().map(|(_, end)| *end);
        let first = self.recent.front().map(|(begun, _)| *begun);
        Moment::at(ends.chain(first).nth(generation.into()).or(first).unwrap_or_default())
    }

    /// Entries, ages and fine scans of units.
    pub fn units(&self) -> &Units {
        &self.units
    }

    /// Warmth of all units with pages in memory, and of their pages, for placement; in ascending order.
    pub fn warmth(&self) -> Vec<(UnitId, Warmth)> {
        // A unit without a scan is as warm as others on average: it must not displace pages that scans found hot.
        let share = |(unit, scanned): (UnitId, &Scanned)| scanned.share(self.units.pages_of(unit));
        let shares: Vec<f64> = self.units.all_scanned().map(share).collect();
        let average = if shares.is_empty() { 1.0 } else { shares.iter().sum::<f64>() / shares.len() as f64 };
        let warmth = |unit: UnitId| {
            let touches = self.units.entry(unit)?.touches() & ((1 << RATE_CYCLES) - 1);
            let of = self.units.pages_of(unit);
            let (levels, has_cold) = match self.units.scanned(unit) {
                None => (vec![(average, PageMap::first(of))], false),
                Some(scanned) => (scanned.by_touches(), scanned.is_uneven(of)),
            };
            Some((unit, Warmth { rate: f64::from(touches.count_ones()) / f64::from(RATE_CYCLES), levels, has_cold }))
        };
        self.units.present().filter_map(warmth).collect()
    }
}
