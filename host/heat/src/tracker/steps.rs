//! What the tracking worker does next.
//!
//! Before: a cycle was absorbed, or none ran yet. After: the worker starts a coarse cycle, a fine one, or rests.
//! Threads, units: as of [`Tracker`]. Promise: cycles of one kind do not starve those of the other: a fine cycle that
//! is due runs between two coarse ones, however long their plans take.

use std::time::Duration;

use super::{Step, Tracker};
use crate::Pages;
use crate::moment::Moment;
use crate::source::{FineWatch, Phase, Watch};
use crate::units::{self, Surveyed};

/// The shortest rest.
const SHORT: Duration = Duration::from_millis(1);

impl Tracker {
    /// What to do now. A step to watch lasts until its report is absorbed.
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

    /// Take in a part of the survey.
    pub fn survey(&mut self, now: Duration, part: &Surveyed) {
        self.units.survey(part, Moment::at(now), self.generations.youngest());
    }

    /// A coarse cycle was planned, which took this long: the period may grow until that, too, is within the budget.
    pub fn planned(&mut self, took: Duration) {
        self.coarse.allow(took);
    }

    /// The same as [`Self::next`], of what was surveyed.
    pub fn step(&mut self, now: Duration) -> Step {
        if self.is_fine_due(now) {
            let (window, fine) = (self.fine_window(), self.batch());
            if fine.is_empty() {
                // All of its units are gone.
                return Step::Rest(SHORT);
            }
            self.begun = now;
            return Step::Watch { phase: Phase::Fine, watch: Watch { coarse: Vec::new(), fine }, window };
        }
        if now >= self.next_coarse {
            self.begun = now;
            let period = self.coarse.period();
            self.next_coarse = now + period;
            let watch = Watch { coarse: self.units.present().collect(), fine: Vec::new() };
            return match watch.coarse.is_empty() {
                true => Step::Rest(period),
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

    /// May a fine cycle begin then? It must end before the next coarse cycle, unless there was none since the last one,
    /// and that was not long ago.
    fn may_be_fine(&self, at: Duration) -> bool {
        let window = self.fine_window();
        let is_starved = self.fine_cycles == self.fine_before[0] && self.is_fresh(at);
        !self.subpages.is_idle() && !window.is_zero() && (at + window <= self.next_coarse || is_starved)
    }

    /// The units of the next fine cycle.
    fn batch(&mut self) -> Vec<FineWatch> {
        let (units, window) = (&self.units, self.fine_window());
        let allowance = self.quota.allowance(self.settings.budget, self.coarse.period()).within(window);
        let mut allowance = if self.settings.is_placed { allowance.starting_within(window) } else { allowance };
        let unknown = self.quota.share();
        let pages_of = |unit| if units.present_pages(unit) > 0 { units.pages_of(unit) } else { 0 };
        // As many units as in a whole window.
        let whole = self.window(self.settings.fine_share);
        self.subpages.batch(whole, pages_of, |unit, watched| {
            let share = units.inside(unit).map_or(unknown, |inside| inside.share().share);
            // The first ones tell what a unit costs.
            let is_known = self.fine_cycles > 0 || !self.settings.is_placed;
            is_known && allowance.charge(watched as f64 * share, watched < units.pages_of(unit))
        })
    }

    /// The window of a cycle that may take this part of the period. A longer one would see everything touched.
    pub(super) fn window(&self, share: f64) -> Duration {
        self.coarse.period().min(self.settings.longest_period).mul_f64(share)
    }

    /// The window of a coarse cycle. Where memory is placed it stays as short as in the shortest period: a guest whose
    /// cycles are expensive touches much, and in a longer window the cold units, too; the rest is left to fine cycles.
    fn coarse_window(&self) -> Duration {
        match self.settings.is_placed {
            true => self.settings.period.mul_f64(self.settings.coarse_share),
            false => self.window(self.settings.coarse_share),
        }
    }

    /// The window of a fine cycle.
    pub(super) fn fine_window(&self) -> Duration {
        self.window(self.settings.fine_share).min(self.fine_most)
    }
}
