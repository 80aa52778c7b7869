//! The tracker: when to watch what, and what the answers mean. The mind of the tracking lane.
//!
//! Before: the lane asks [`Tracker::next`] what to do, lets an [`crate::AccessSource`] do it, and hands the report to
//! [`Tracker::absorb`]. After: reclaim picks from the generations, the API shows ages, back ends ask for skew.
//! Threads: one tracker per VM behind a lock ([`crate::VmHeat`]); the lane, reclaim and the API hold it for short.
//! Units: `now` is the time since tracking of this VM began. Promise: no clock, no I/O; the same reports in, the same
//! state out, so that a recording replays exactly.
//!
//! ```text
//! |<---------------- period, adapts ---------------->|
//! | coarse window: all units | fine: chosen ones |   | coarse ...
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use crate::Pages;
use crate::chance::Counts;
use crate::generations::{GENERATIONS, Generations, Promotion};
use crate::inside::{Inside, Scanned};
use crate::pace::{Budget, Pace};
use crate::quota::Quota;
use crate::record::{self, Frame};
use crate::sample::Dice;
use crate::size_policy::Candidate;
use crate::source::{PageMap, Report, Seen, UnitId, Watch};
use crate::subpage::{Limits, Subpages, Verdict};
use crate::units::{Moment, Units};

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
    begun: Duration,
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

/// The last cycles, ready to be written to a file, while somebody wants them.
#[derive(Debug, Default)]
struct Tape {
    wanted_until: Duration,
    /// The regions that all frames are about.
    layout: Vec<u64>,
    frames: VecDeque<(u64, Vec<u8>)>,
    bytes: usize,
}

impl Tape {
    /// A recorder asks each second or so; one that has been silent for this long is gone.
    const PATIENCE: Duration = Duration::from_secs(30);
    /// What is kept for one that is late.
    const MOST_BYTES: usize = 16 << 20;

    fn push(&mut self, layout: Vec<u64>, number: u64, frame: Vec<u8>) {
        if self.layout != layout {
            *self = Self { wanted_until: self.wanted_until, layout, ..Self::default() };
        }
        self.bytes += frame.len();
        self.frames.push_back((number, frame));
        while self.bytes > Self::MOST_BYTES && self.frames.len() > 1 {
            self.bytes -= self.frames.pop_front().map_or(0, |(_, frame)| frame.len());
        }
    }
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
        if now < self.tape.wanted_until {
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
            if !self.units.push(unit, seen.touched(), seen.written(), at) {
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
        let Seen::Fine { watched, touched, written } = *seen else { return };
        let of = self.units.pages_of(unit);
        let here = PageMap::first(of);
        let (watched, touched) = (watched.and(here), touched.and(watched).and(here));
        match self.units.inside(unit) {
            Some(inside) => watched.iter().for_each(|page| self.counts.push(inside.misses(page), touched.get(page))),
            None => self.quota.looked(touched.count(), watched.count()),
        }
        if watched == here && of > 0 {
            self.units.push_scan(unit, at, watched, touched, written.unwrap_or_default().and(watched));
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

    /// The generation of a unit with pages in memory: 0 is the youngest.
    pub fn generation(&self, unit: UnitId) -> Option<usize> {
        self.units.birth(unit).map(|birth| self.generations.of(birth))
    }

    /// When what is in this generation by the rule of base pages was last seen touched; of the oldest, before when.
    pub(crate) fn seen_in(&self, generation: usize) -> Moment {
        let ends = self.recent.iter().rev().map(|(_, end)| *end);
        let first = self.recent.front().map(|(begun, _)| *begun);
        Moment::at(ends.chain(first).nth(generation).or(first).unwrap_or_default())
    }

    /// Entries, ages and what is known of the inside of units.
    pub fn units(&self) -> &Units {
        &self.units
    }

    /// The pages of a hot-bloated unit that can go.
    pub fn candidates(&self, unit: UnitId) -> Option<PageMap> {
        match self.units.inside(unit)? {
            Inside::Scanned(scanned) if scanned.bloated => self.cold_pages(unit),
            _ => None,
        }
    }

    /// The pages of a scanned unit that are colder than the unit is: its last scans did not see them touched, and of such pages
    /// the last look saw not half as many, in proportion, as looks see of all. `None` if there are none, or one look is all
    /// there is: of a unit that is lukewarm all over it misses nearly all pages, which are as warm as the others.
    pub(crate) fn cold_pages(&self, unit: UnitId) -> Option<PageMap> {
        let Inside::Scanned(scanned) = self.units.inside(unit)? else { return None };
        let of = self.units.pages_of(unit);
        let (scans, share) = scanned.share_within(RECENT, of);
        let warmth = scanned.counts(of).of_missed()?;
        (scans > 1 && (2.0 * warmth < share || share == 0.0)).then(|| scanned.cold().and(PageMap::first(of)))
    }

    /// The hot set: each unit touched in the recent cycles, and those of its pages that recent scans saw touched. A unit
    /// that was not scanned, because it was not looked into yet or is evenly hot, counts with all its pages, and so does one
    /// whose other pages are more likely than not to be touched as well in the time of the recent cycles: scans are short.
    pub fn hot_pages(&self) -> impl Iterator<Item = (UnitId, PageMap)> {
        let hot = |unit: &UnitId| self.units.entry(*unit).is_some_and(|entry| entry.age() < RECENT);
        self.units.present().filter(hot).map(|unit| {
            let of = self.units.pages_of(unit);
            match self.units.inside(unit) {
                Some(Inside::Scanned(scanned)) if self.unseen(scanned, of) < 0.5 => {
                    (unit, scanned.touched_within(RECENT))
                }
                _ => (unit, PageMap::first(of)),
            }
        })
    }

    /// The chance that a page that none of the recent scans of its unit saw touched is touched in the time of the recent
    /// cycles.
    fn unseen(&self, scanned: &Scanned, of: u64) -> f64 {
        let (scans, _) = scanned.share_within(RECENT, of);
        self.counts.chances().of_unit(scanned.counts(of)).after_misses(scans, self.span_in_looks())
    }

    /// The time of the recent cycles, in looks.
    fn span_in_looks(&self) -> f64 {
        if self.look.is_zero() { 1.0 } else { self.recent_span().as_secs_f64() / self.look.as_secs_f64() }
    }

    /// Candidates for the page-size policy: units that were touched of late and of whose inside something is known. `huge`
    /// answers whether a unit is mapped huge. A back end that wants others builds its own list.
    pub fn size_candidates(&self, huge: impl Fn(UnitId) -> bool) -> Vec<Candidate> {
        let hot = |unit| self.units.entry(unit).is_some_and(|entry| entry.age() < RECENT);
        let mut candidates: Vec<Candidate> = self
            .units
            .insides()
            .filter(|(unit, _)| hot(*unit))
            .map(|(unit, inside)| Candidate { unit, touched: self.touched_pages(unit, inside), huge: huge(unit) })
            .collect();
        candidates.sort_unstable_by_key(|candidate| candidate.unit);
        candidates
    }

    /// So many of its pages are touched in the time of the recent cycles, as far as is known.
    pub(crate) fn touched_pages(&self, unit: UnitId, inside: &Inside) -> u64 {
        let of = self.units.pages_of(unit);
        let chances = self.counts.chances();
        let (chances, share) = match inside {
            Inside::Scanned(scanned) => (chances.of_unit(scanned.counts(of)), scanned.share_within(RECENT, of).1),
            Inside::Sampled(sampled) => (chances, sampled.estimate.share),
        };
        (chances.within(share, self.span_in_looks()) * of as f64).round() as u64
    }

    /// Is what is known still news?
    pub fn is_fresh(&self, now: Duration) -> bool {
        self.recent.back().is_some_and(|(_, end)| now.saturating_sub(*end) <= STALE)
    }

    /// Coarse and fine cycles so far.
    pub fn cycles(&self) -> (u64, u64) {
        (self.cycles, self.fine_cycles)
    }

    pub(crate) fn begun(&self) -> Duration {
        self.begun
    }

    pub(crate) fn set_begun(&mut self, begun: Duration) {
        self.begun = begun;
    }

    /// A recording of the cycles after number `after` that are still kept. The first call begins to keep them, and so its
    /// answer has none; without a call for half a minute, nothing is kept any more.
    pub fn cycles_after(&mut self, now: Duration, after: u64, source: &str) -> Vec<u8> {
        self.tape.wanted_until = now + Tape::PATIENCE;
        let mut out = record::header(source);
        out.extend(Frame::Layout(self.tape.layout.clone()).encode());
        // Another engine counted further than this one has: to whoever asks, all is news.
        let after = if after > self.version { 0 } else { after };
        let late = self.tape.frames.iter().filter(|(number, _)| *number > after);
        late.for_each(|(_, frame)| out.extend(frame));
        out
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AccessSource;
    use crate::record::Recording;
    use crate::scripted::Scripted;
    use ballast_base::{PAGES_PER_UNIT, PageIdx};
    use proptest::prelude::*;

    /// One region, all of it in memory.
    struct Guest(u64);

    impl Pages for Guest {
        fn regions(&self) -> u32 {
            1
        }
        fn len(&self, _: u32) -> u64 {
            self.0 * PAGES_PER_UNIT
        }
        fn next_present(&self, _: u32, from: PageIdx, until: PageIdx) -> Option<(PageIdx, PageIdx)> {
            let until = until.min(PageIdx(self.len(0)));
            (from < until).then_some((from, until))
        }
        fn age(&self, _: u32, _: PageIdx) -> Option<u8> {
            Some(0)
        }
        fn set_age(&self, _: u32, _: PageIdx, _: u8) {}
    }

    fn unit(unit: u32) -> UnitId {
        UnitId { region: 0, unit }
    }

    /// Drive source and tracker as the lane does, on a made-up clock, until `until`.
    fn drive(tracker: &mut Tracker, source: &mut Scripted, guest: &Guest, now: &mut Duration, until: Duration) {
        while *now < until {
            match tracker.next(*now, guest) {
                Step::Rest(pause) => {
                    assert!(!pause.is_zero(), "a rest that never ends");
                    *now += pause;
                }
                Step::Watch { phase, watch, window } => {
                    source.start(&watch).expect("start");
                    *now += window;
                    source.length = window;
                    let report = source.end().expect("end");
                    tracker.absorb(*now, phase, &report);
                }
            }
        }
    }

    #[test]
    fn after_three_cycles_hot_units_are_young_cold_ones_oldest_and_bloat_is_known_page_by_page() {
        let guest = Guest(64);
        let mut source = Scripted::default();
        // 8 units evenly hot, 8 hot in 5 pages each, the rest cold.
        (0..8).for_each(|index| source.touch(unit(index), PageMap::ALL));
        (8..16).for_each(|index| source.touch(unit(index), PageMap::first(5)));
        let mut tracker = Tracker::new(Settings::default(), 1);
        drive(&mut tracker, &mut source, &guest, &mut Duration::ZERO.clone(), Duration::from_secs(20));
        assert!(tracker.cycles().0 >= 4, "{:?}", tracker.cycles());
        for index in 0..64 {
            assert_eq!(tracker.generation(unit(index)), Some(if index < 16 { 0 } else { 3 }), "unit {index}");
        }
        for index in 0..16 {
            let candidates = tracker.candidates(unit(index));
            assert_eq!(candidates, (index >= 8).then(|| PageMap::ALL.without(PageMap::first(5))), "unit {index}");
        }
        let hot: Vec<_> = tracker.hot_pages().collect();
        let pages = |index| if index < 8 { PageMap::ALL } else { PageMap::first(5) };
        assert_eq!(hot, (0..16).map(|index| (unit(index), pages(index))).collect::<Vec<_>>());
        let plan = crate::size_policy::plan(16 * 512, 8 * 512, &tracker.size_candidates(|_| true));
        assert_eq!(plan.split.len(), 8, "{plan:?}");
        assert!(plan.split.iter().all(|split| split.unit >= 8));
    }

    #[test]
    fn pages_are_watched_about_as_long_as_units_are_and_no_longer_than_until_the_next_cycle() {
        let guest = Guest(8);
        let mut source = Scripted::default();
        (0..8).for_each(|index| source.touch(unit(index), PageMap::first(9)));
        let mut tracker = Tracker::new(Settings::default(), 1);
        let (mut now, mut begun, mut coarse, mut looks) = (Duration::ZERO, Duration::ZERO, Duration::ZERO, 0);
        while looks < 5 {
            match tracker.next(now, &guest) {
                Step::Rest(pause) => now += pause,
                Step::Watch { phase, watch, window } => {
                    if phase == Phase::Coarse {
                        (coarse, begun) = (window, now);
                    } else {
                        assert!(window >= coarse / 2 && now + window <= begun + coarse * 2, "{window:?}");
                        looks += 1;
                    }
                    source.start(&watch).expect("start");
                    now += window;
                    tracker.absorb(now, phase, &source.end().expect("end"));
                }
            }
        }
    }

    #[test]
    fn a_tracker_that_does_not_look_inside_knows_units_only() {
        let mut source = Scripted::default();
        source.touch(unit(0), PageMap::first(5));
        let mut tracker = Tracker::new(Settings { fine_share: 0.0, ..Settings::default() }, 1);
        drive(&mut tracker, &mut source, &Guest(4), &mut Duration::ZERO.clone(), Duration::from_secs(20));
        assert!(tracker.cycles().0 >= 4 && tracker.cycles().1 == 0, "{:?}", tracker.cycles());
        assert_eq!(tracker.hot_pages().collect::<Vec<_>>(), [(unit(0), PageMap::ALL)]);
    }

    #[test]
    fn pages_that_scans_missed_are_hot_where_each_scan_sees_others_and_cold_where_all_see_the_same() {
        let guest = Guest(4);
        let mut tracker = Tracker::new(Settings::default(), 1);
        let _ = tracker.next(Duration::ZERO, &guest);
        let fifth = |number: u64| PageMap::first((number + 1) * 102).without(PageMap::first(number * 102));
        let of = |index: u32, number: u64| if index < 2 { fifth(number) } else { fifth(0) };
        for number in 0..3 {
            let start = Duration::from_secs(number * 2);
            let units = (0..4).map(|index| (unit(index), Seen::Coarse { touched: true, written: None })).collect();
            tracker.set_begun(start);
            tracker.absorb(start + Duration::from_secs(1), Phase::Coarse, &Report { units, ..Report::default() });
            let seen = |index| Seen::Fine { watched: PageMap::ALL, touched: of(index, number), written: None };
            let units = (0..4).map(|index| (unit(index), seen(index))).collect();
            tracker.set_begun(start + Duration::from_secs(1));
            tracker.absorb(start + Duration::from_millis(1500), Phase::Fine, &Report { units, ..Report::default() });
        }
        let hot: Vec<_> = tracker.hot_pages().map(|(_, pages)| pages).collect();
        assert_eq!(hot, [PageMap::ALL, PageMap::ALL, fifth(0), fifth(0)]);
        let cold = PageMap::ALL.without(fifth(0));
        assert_eq!([0, 1, 2, 3].map(|index| tracker.candidates(unit(index))), [None, None, Some(cold), Some(cold)]);
        let touched =
            tracker.size_candidates(|_| true).into_iter().map(|candidate| candidate.touched).collect::<Vec<_>>();
        assert!(touched[..2].iter().all(|pages| *pages > 400), "{touched:?}");
        assert!(touched[2..].iter().all(|pages| *pages < 200), "{touched:?}");
    }

    #[test]
    fn a_recording_replays_to_the_same_heat() {
        let guest = Guest(64);
        let mut source = Scripted::default();
        (0..8).for_each(|index| source.touch(unit(index), PageMap::first(u64::from(index) * 64)));
        source.write(unit(20), PageMap::first(3));
        let mut tracker = Tracker::new(Settings::default(), 1);
        let mut now = Duration::ZERO;
        assert_eq!(Recording::decode(&tracker.cycles_after(now, 0, "scripted")).expect("empty").cycles().count(), 0);
        drive(&mut tracker, &mut source, &guest, &mut now, Duration::from_secs(20));
        source.touch(unit(3), PageMap::NONE);
        drive(&mut tracker, &mut source, &guest, &mut now, Duration::from_secs(29));
        let recording = Recording::decode(&tracker.cycles_after(now, 0, "scripted")).expect("whole");
        assert_eq!(recording.cycles().count() as u64, tracker.version());
        let replayed = recording.replay(Settings::default(), |_, _| ());
        assert_eq!(crate::heat(&replayed, now, 16), crate::heat(&tracker, now, 16));
        let late = Recording::decode(&tracker.cycles_after(now, tracker.version() - 2, "scripted")).expect("whole");
        assert_eq!(late.cycles().count(), 2);
    }

    #[test]
    fn a_dear_source_is_asked_less_often() {
        let guest = Guest(40_000);
        let mut source = Scripted::default();
        (0..40_000).for_each(|index| source.touch(unit(index), PageMap::ALL));
        let mut tracker = Tracker::new(Settings { longest_period: Duration::from_secs(600), ..Settings::default() }, 1);
        drive(&mut tracker, &mut source, &guest, &mut Duration::ZERO.clone(), Duration::from_secs(300));
        // 40000 touches of 5.6 us are 0.22 s: at 1.5 % that is one cycle in 15 s.
        assert!(
            (Duration::from_secs(14)..Duration::from_secs(20)).contains(&tracker.period()),
            "{:?}",
            tracker.period()
        );
        assert!(tracker.spent().guest <= 0.03, "{:?}", tracker.spent());
    }

    #[test]
    fn a_cycle_that_failed_teaches_nothing_and_tracking_goes_on() {
        let guest = Guest(4);
        let mut tracker = Tracker::new(Settings::default(), 1);
        let mut source = Scripted::default();
        source.touch(unit(0), PageMap::ALL);
        let mut now = Duration::ZERO;
        drive(&mut tracker, &mut source, &guest, &mut now, Duration::from_secs(10));
        let before = (0..4).map(|index| tracker.generation(unit(index))).collect::<Vec<_>>();
        let Step::Watch { phase: Phase::Coarse, .. } = (loop {
            match tracker.next(now, &guest) {
                Step::Rest(pause) => now += pause,
                step @ Step::Watch { phase: Phase::Coarse, .. } => break step,
                Step::Watch { phase, .. } => tracker.absorb(now, phase, &Report::default()),
            }
        }) else {
            unreachable!()
        };
        tracker.absorb(now, Phase::Coarse, &Report::default());
        assert_eq!((0..4).map(|index| tracker.generation(unit(index))).collect::<Vec<_>>(), before);
        assert!(matches!(tracker.next(now, &guest), Step::Rest(_) | Step::Watch { phase: Phase::Fine, .. }));
    }

    proptest! {
        #[test]
        fn any_history_leaves_known_units_with_consistent_entries_and_generations(
            history in proptest::collection::vec((any::<bool>(), proptest::collection::vec((0u32..20, 0u64..600, 0u64..600, 0u8..3), 0..30)), 0..60),
        ) {
            let guest = Guest(16);
            let mut tracker = Tracker::new(Settings::default(), 5);
            let _ = tracker.next(Duration::ZERO, &guest);
            let mut touches = [0u32; 16];
            for (turn, (coarse, reports)) in history.into_iter().enumerate() {
                let mut units: Vec<(UnitId, Seen)> = reports.into_iter().map(|(index, watched, touched, kind)| {
                    let seen = match kind {
                        0 => Seen::Coarse { touched: touched % 2 == 0, written: None },
                        _ => Seen::Fine {
                            watched: PageMap::first(watched), touched: PageMap::first(touched),
                            written: (kind == 2).then_some(PageMap::first(touched / 2)),
                        },
                    };
                    (unit(index), seen)
                }).collect();
                units.sort_unstable_by_key(|(unit, _)| *unit);
                units.dedup_by_key(|(unit, _)| *unit);
                let phase = if coarse { Phase::Coarse } else { Phase::Fine };
                for (unit, seen) in &units {
                    if coarse && unit.unit < 16 && seen.touched() {
                        touches[unit.unit as usize] += 1;
                    }
                }
                tracker.absorb(Duration::from_secs(turn as u64 + 1), phase, &Report { units, ..Report::default() });
            }
            for index in 0..16 {
                let entry = tracker.units().entry(unit(index)).expect("known");
                prop_assert!(entry.frequency() <= touches[index as usize].min(32));
                prop_assert!(tracker.generation(unit(index)).expect("known") < GENERATIONS);
                if let Some(candidates) = tracker.candidates(unit(index)) {
                    let Some(Inside::Scanned(scanned)) = tracker.units().inside(unit(index)) else { panic!("scanned") };
                    prop_assert!(candidates.and(scanned.touched_within(RECENT)).is_empty());
                }
            }
            for index in 16..20 {
                prop_assert!(tracker.units().entry(unit(index)).is_none());
            }
        }
    }
}
