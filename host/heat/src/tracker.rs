//! The tracker: decides what to watch when, and what the reports mean.
//!
//! Before: the tracking worker asks [`Tracker::next`] what to do, lets an [`crate::AccessSource`] do it, and hands the
//! report to [`Tracker::absorb`]. After: reclaim picks from the generations, the API shows ages.
//! Threads: one tracker per VM behind a lock ([`crate::VmHeat`]), which the worker, reclaim and the API hold briefly.
//! Units: `now` is the time since tracking of this VM began. Promise: no clock and no I/O; the same reports give the
//! same state, so that a recording replays exactly.
//!
//! ```text
//! |<---------------- period, adapts ---------------->|
//! | coarse window: all units | fine: chosen ones |   | coarse ...
//! ```

mod cycle_log;
mod queries;
mod replay;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Duration;

use crate::chance::Counts;
use crate::entry::RECENT;
use crate::generations::{GENERATIONS, Generations};
use crate::inside::Inside;
use crate::moment::Moment;
use crate::pace::{Budget, Pace, Paid};
use crate::quota::Quota;
use crate::record::Frame;
use crate::sample::SplitMix64;
use crate::source::{CycleReport, PageMap, Phase, Seen, UnitId, Watch};
use crate::subpage::{Limits, Subpages, Verdict};
use crate::tally::Told;
use crate::units::Units;
use cycle_log::CycleLog;

/// A fine scan is forgotten after this time.
const KEEP_INSIDE: Duration = Duration::from_secs(600);
/// After this time without a coarse cycle, what is known is stale.
const STALE: Duration = Duration::from_secs(600);
/// Share of the watched pages above which a fine window is too long for placement, well below that of a bloated unit;
/// and the share below which it is too short.
const TOO_MUCH: f64 = 0.125;
const TOO_LITTLE: f64 = TOO_MUCH / 2.0;

/// How tracking works.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Shortest time from the start of one coarse cycle to the start of the next. It grows to keep the budget.
    pub period: Duration,
    /// Longest, beyond what planning alone takes of the budget.
    pub longest_period: Duration,
    /// Part of the period in which all units are watched as wholes; where memory is placed, of the shortest period.
    pub coarse_share: f64,
    /// Part of the period in which chosen units are watched page by page, after that. 0: never.
    pub fine_share: f64,
    /// Which units get a fine scan, and how many at a time.
    pub subpages: Limits,
    /// What each of the two phases may cost.
    pub budget: Budget,
    /// Memory is placed by its warmth, so it matters which is hotter, not for how long it was idle: coarse windows stay
    /// short, fine ones are as short as they may be without missing hot pages, and samples tell blocks apart.
    pub is_placed: bool,
}

impl Default for Settings {
    /// A cycle every 2 s if that is cheap. Budgets: half of HugeScope's 3 % for each phase. The pages of a unit are
    /// watched about as long as the unit was when it was found hot: in Blowfish's 100 ms, a unit of which every page is
    /// touched once a second seems nearly all cold.
    fn default() -> Self {
        Self {
            period: Duration::from_secs(2),
            longest_period: Duration::from_secs(60),
            coarse_share: 0.5,
            fine_share: 0.4,
            subpages: Limits::default(),
            budget: Budget { cpu: 0.015, guest: 0.015 },
            is_placed: false,
        }
    }
}

/// What the tracking worker does next.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Start a cycle, end it after `window`, and absorb the report.
    Watch {
        /// To be passed on with the report.
        phase: Phase,
        /// What to watch.
        watch: Watch,
        /// For this time.
        window: Duration,
    },
    /// Do nothing for this time.
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
    fine: Paid,
    /// What fine cycles cost.
    quota: Quota,
    next_coarse: Duration,
    next_fine: Duration,
    /// When the running cycle began.
    pub(crate) begun: Duration,
    /// What fine scans saw of pages that the scans before had missed.
    counts: Counts,
    /// How long the last fine cycle took.
    fine_length: Duration,
    /// Fine windows are no longer than this.
    fine_most: Duration,
    /// Start and end of the last coarse cycles, the newest last; at most [`RECENT`].
    recent: VecDeque<(Duration, Duration)>,
    cycles: u64,
    fine_cycles: u64,
    /// Number of fine cycles at the last coarse cycle and at the one before.
    fine_before: [u64; 2],
    /// Grows with each report, so that a reader knows whether anything changed.
    version: u64,
    log: CycleLog,
}

impl Tracker {
    /// Knows nothing. `seed` decides which pages are sampled.
    pub fn new(settings: Settings, seed: u64) -> Self {
        let mut quota = Quota::default();
        if settings.is_placed {
            quota.expect_told();
        }
        Self {
            settings,
            units: Units::default(),
            generations: Generations::default(),
            subpages: Subpages::new(settings.subpages, SplitMix64::new(seed)),
            coarse: Pace::new(settings.period, settings.longest_period, settings.budget),
            fine: Paid::new(settings.longest_period, settings.budget),
            quota,
            next_coarse: Duration::ZERO,
            next_fine: Duration::ZERO,
            begun: Duration::ZERO,
            counts: Counts::default(),
            fine_length: Duration::ZERO,
            fine_most: if settings.is_placed { settings.subpages.every } else { Duration::MAX },
            recent: VecDeque::new(),
            cycles: 0,
            fine_cycles: 0,
            fine_before: [0; 2],
            version: 0,
            log: CycleLog::default(),
        }
    }

    /// The settings it was made with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Where memory is placed: a window in which much of what is watched is touched tells nothing apart, and costs
    /// most. One in which hardly anything is touched misses hot pages. It begins short, which costs least.
    fn learn_window(&mut self, report: &CycleReport) {
        let share = |(_, seen): &(UnitId, Seen)| match seen {
            Seen::Fine { watched, touched } if !watched.is_empty() => {
                Some(touched.and(*watched).count() as f64 / watched.count() as f64)
            }
            _ => None,
        };
        let shares: Vec<f64> = report.units.iter().filter_map(share).collect();
        if !self.settings.is_placed || shares.is_empty() {
            return;
        }
        let (window, share) = (self.fine_window(), shares.iter().sum::<f64>() / shares.len() as f64);
        if share > TOO_MUCH {
            self.fine_most = (window / 2).max(self.settings.subpages.every);
        } else if share < TOO_LITTLE {
            self.fine_most = (window * 2).min(self.settings.longest_period);
        }
    }

    /// Take in the report of a cycle that ended `now`; an empty report of a cycle that failed.
    pub fn absorb(&mut self, now: Duration, phase: Phase, report: &CycleReport) {
        let at = Moment::at(now);
        self.version += 1;
        if self.log.is_wanted(now) {
            let frame = Frame::Cycle(self.recorded(self.version, now, phase, report)).encode();
            self.log.push(self.units.region_pages().collect(), self.version, frame);
        } else {
            self.log = CycleLog::default();
        }
        if phase == Phase::Coarse {
            self.generations.advance();
        }
        if phase == Phase::Fine {
            self.counts.fade();
            self.fine_length = now.saturating_sub(self.begun);
        }
        let mut reported = report.units.iter().map(|(unit, _)| *unit).peekable();
        if phase == Phase::Coarse {
            // What the cycle did not report stays in its generation.
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
                // Tracking may have been off for long.
                let stale = self.stale();
                self.recent.retain(|(_, end)| self.begun.saturating_sub(*end) <= stale);
                self.recent.push_back((self.begun, now));
                if self.recent.len() > RECENT as usize {
                    self.recent.pop_front();
                }
                self.coarse.record(report.cost);
                self.next_coarse = (self.begun + self.coarse.period()).max(now);
                self.units.forget_old(at, KEEP_INSIDE);
                self.begin_round();
            }
            Phase::Fine => {
                self.fine_cycles += 1;
                let units = &self.units;
                self.quota.learn(report, |unit| units.pages_of(unit));
                self.learn_window(report);
                self.subpages.end_batch();
                let pays = self.fine.record(self.begun, report.cost, self.subpages.interval());
                self.next_fine = (self.begun + pays).max(now);
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
            // A unit that is watched more often than others must not become younger by it: no entry, no promotion.
            self.units.touch(unit, at);
        }
        let Seen::Fine { watched, touched } = *seen else { return };
        let of = self.units.pages_of(unit);
        let here = PageMap::first(of);
        let (watched, touched) = (watched.and(here), touched.and(watched).and(here));
        match self.units.inside(unit) {
            Some(inside) => watched.iter().for_each(|page| self.counts.push(inside.misses(page), touched.get(page))),
            None => self.quota.first_scan(touched.count(), watched.count()),
        }
        if watched == here && of > 0 {
            self.units.push_scan(unit, at, watched, touched);
        } else if !watched.is_empty() {
            self.units.push_sample(unit, at, watched, touched);
        }
        // In a coarse cycle, too: a source may report pages at no cost.
        let told = match self.units.inside(unit) {
            Some(Inside::Sampled(sampled)) if self.settings.is_placed => sampled.tally.told(),
            _ => Told::Nothing,
        };
        let judged = self.subpages.judge_blocks(unit, told);
        let verdict = judged.unwrap_or_else(|| self.subpages.judge(unit, touched.count(), watched.count(), of));
        if watched.count() < of && told != Told::Maybe && (told == Told::Blocks || verdict == Verdict::Suspect) {
            self.quota.told(told == Told::Blocks);
        }
        if let Some(scanned) = self.units.scanned_mut(unit).filter(|_| verdict != Verdict::Suspect) {
            scanned.bloated = verdict == Verdict::Bloated;
        }
    }

    /// After a coarse cycle: which hot units get a fine scan.
    fn begin_round(&mut self) {
        let mut hot = Vec::new();
        for unit in self.units.present() {
            let generation = self.units.birth(unit).map_or(GENERATIONS, |birth| self.generations.of(birth));
            // A unit that is young only because it is new, or cools down, has no hot pages.
            let touched = self.units.entry(unit).is_some_and(|entry| entry.age() < RECENT);
            if generation < 2 && touched {
                let inside = self.units.inside(unit);
                let bloated = match inside {
                    Some(Inside::Scanned(scanned)) if scanned.bloated => Some(scanned),
                    _ => None,
                };
                // Half done: only a second scan tells a few hot pages from many lukewarm ones.
                let is_done = bloated.is_none_or(|scanned| scanned.share_within(RECENT, 1).0 > 1);
                // The longest ago first; of those without a scan, the second-youngest generation first.
                let scan = bloated.is_some() || inside.is_none() && self.quota.is_sparse();
                hot.push((is_done, inside.map(Inside::last), generation == 0, unit, scan));
            }
        }
        hot.sort_unstable();
        self.subpages.begin_round(hot.into_iter().map(|(.., unit, scan)| (unit, scan)));
    }

    /// Is what is known recent?
    pub fn is_fresh(&self, now: Duration) -> bool {
        self.recent.back().is_some_and(|(_, end)| now.saturating_sub(*end) <= self.stale())
    }

    /// Without a cycle in this time, what is known is stale: [`STALE`], or a missed cycle of a very large guest.
    fn stale(&self) -> Duration {
        STALE.max(self.coarse.period() * 3)
    }

    /// Coarse and fine cycles so far.
    pub fn cycles(&self) -> (u64, u64) {
        (self.cycles, self.fine_cycles)
    }

    /// Grows with each report.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The current time from one coarse cycle to the next.
    pub fn period(&self) -> Duration {
        self.coarse.period()
    }

    /// What tracking costs now: shares of a CPU, and of the guest's time.
    pub fn spent(&self) -> Budget {
        let (coarse, fine) = (self.coarse.spent(), self.fine.spent());
        // Batches run only while there is a unit to scan.
        let fine = if self.fine_cycles > self.fine_before[1] { fine } else { Budget { cpu: 0.0, guest: 0.0 } };
        Budget { cpu: coarse.cpu + fine.cpu, guest: coarse.guest + fine.guest }
    }

    /// From the start of the last [`RECENT`] coarse cycles to their end.
    pub fn recent_span(&self) -> Duration {
        match (self.recent.front(), self.recent.back()) {
            (Some((first, _)), Some((_, last))) => *last - *first,
            _ => Duration::ZERO,
        }
    }
}
