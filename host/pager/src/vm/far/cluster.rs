//! Clustered prefetch: decides whether to bring back pages together that were evicted together.
//!
//! Before: a slow worker restored a page of a disk or a cluster. After: it knows which pages beside it, of slow stores,
//! to request from another slow worker. Threads: all slow workers of a VM share one. Units: a *window* is an aligned
//! group of [`WINDOW`] pages. Promise: it reads no page and waits for nothing. (Sequential touches need no guess: see
//! [`crate::vm::serve::readahead`].) Pages of near stores are never prefetched: a real program in a limit lost by it
//! (`bench real`), because each page that comes unasked drives out another.
//!
//! Pages are evicted in runs, so neighbours left together. The engine measures all the time whether the guest wants
//! them together: it leaves some windows alone after their first restore, and counts the pages of the window that are
//! restored soon afterwards. A prefetch would have saved those faults. Below [`PAYS`] it prefetches nothing. It
//! measures windows of 2 MiB in the same way, and where the guest wants most of one, all 2 MiB come back. The order of
//! the touches does not matter.
//!
//! *Soon* is within a second. In a VM near its limit, where each page that comes in drives out another, soon is much
//! sooner than the average refault interval: a guest that touches its memory at random wants every window again within
//! about a second, and a prefetch would only exchange one page for another.

use std::time::{Duration, Instant};

use ballast_base::{PAGES_PER_UNIT, PageIdx, PageRange};

use crate::vm::region::Region;

/// Pages of a window: 64 KiB.
const WINDOW: u64 = 16;

/// Share of a window's far pages that must be wanted soon for prefetch to pay: bringing one back in a run costs about a
/// quarter of a fault. From a slow store it costs less, but a page that came for nothing is also written there again.
const PAYS: f64 = 0.25;
/// Near the limit, soon is 1/8 of the refault interval, between these two bounds; elsewhere it is the upper one.
const SOON_PART: u32 = 8;
const SOONEST: Duration = Duration::from_millis(5);
const HORIZON: Duration = Duration::from_secs(1);
/// The refault interval is averaged over about this many pages.
const INTERVAL_OVER: f64 = 64.0;
/// 1 in this number of windows is left alone as a trial; at first all are.
const TRY_EVERY: u64 = 16;
const TRY_AT_FIRST: u64 = 16;
/// Trials under way at a time.
const TRIALS: usize = 16;

/// Region number and window number.
type Window = (u32, u64);

#[derive(Clone, Copy, Debug)]
struct Trial {
    window: Window,
    far: u64,
    hits: u64,
    since: Instant,
}

/// Decides whether to bring back the rest of a window.
#[derive(Debug, Default)]
struct Gain {
    trials: Vec<Trial>,
    /// Share of a left-alone window's far pages that were wanted, averaged over about the last eight trials.
    share: f64,
    /// Windows seen, and the last ones, which are not looked at again.
    windows: u64,
    recent: [Option<Window>; 4],
}

impl Gain {
    /// A page of this window was restored. Returns whether to prefetch the others, or `None` if that was decided just
    /// now. `far` counts the far pages of the window.
    fn restored(&mut self, window: Window, far: impl FnOnce() -> u64, soon: Duration, now: Instant) -> Option<bool> {
        self.close_trials(soon, now);
        if let Some(trial) = self.trials.iter_mut().find(|trial| trial.window == window) {
            trial.hits += 1;
            return None;
        }
        if self.recent.contains(&Some(window)) {
            return None;
        }
        let far = far();
        if far == 0 {
            return None;
        }
        self.recent[self.windows as usize % self.recent.len()] = Some(window);
        self.windows += 1;
        if (self.windows <= TRY_AT_FIRST || self.windows.is_multiple_of(TRY_EVERY)) && self.trials.len() < TRIALS {
            self.trials.push(Trial { window, far, hits: 0, since: now });
            return Some(false);
        }
        Some(self.share >= PAYS)
    }

    /// The rest of this window comes back for another reason, so a trial of it proves nothing.
    fn give_up(&mut self, window: Window) {
        self.trials.retain(|trial| trial.window != window);
    }

    /// Ends the trials that are older than `soon`, and those whose whole window was wanted.
    fn close_trials(&mut self, soon: Duration, now: Instant) {
        let share = &mut self.share;
        self.trials.retain(|trial| {
            let over = trial.hits >= trial.far || now.saturating_duration_since(trial.since) > soon;
            if over {
                *share += (trial.hits.min(trial.far) as f64 / trial.far as f64 - *share) / 8.0;
            }
            !over
        });
    }
}

/// Decides for one VM whether to prefetch, and how far.
#[derive(Debug)]
pub struct Cluster {
    near: Gain,
    /// The same for windows of 2 MiB.
    wide: Gain,
    /// The refault interval, in seconds.
    interval_s: f64,
}

impl Default for Cluster {
    fn default() -> Self {
        let interval_s = (HORIZON * SOON_PART).as_secs_f64();
        Self { near: Gain::default(), wide: Gain::default(), interval_s }
    }
}

impl Cluster {
    /// A page was restored that had been far for this long; `tight`: the VM is near its limit. Returns what else to
    /// bring back, the most urgent last.
    pub fn restored(
        &mut self,
        region: &Region,
        page: PageIdx,
        interval: Duration,
        tight: bool,
        now: Instant,
    ) -> Vec<PageRange> {
        self.interval_s += (interval.as_secs_f64() - self.interval_s) / INTERVAL_OVER;
        let part = Duration::from_secs_f64(self.interval_s.max(0.0) / f64::from(SOON_PART));
        let soon = if tight { part.clamp(SOONEST, HORIZON) } else { HORIZON };
        let window = page.0 / WINDOW;
        let near = PageRange::of(PageIdx(window * WINDOW), WINDOW).before(region.range().end());
        let far = || near.iter().filter(|page| region.is_slow_and_free(*page)).count() as u64;
        // A window counts once towards its 2 MiB, however many of its pages are wanted.
        let Some(pays) = self.near.restored((region.number, window), far, soon, now) else { return Vec::new() };
        let unit = page.0 / PAGES_PER_UNIT;
        let all = PageRange::of_unit(unit).before(region.range().end());
        let windows = || all.step_by(WINDOW).filter(|page| region.is_slow_and_free(*page)).count();
        let wide = self.wide.restored((region.number, unit), || windows() as u64, soon, now) == Some(true);
        match (pays, wide) {
            (true, true) => vec![all.before(near.start()), all.from(near.end()), near],
            (true, false) => vec![near],
            _ => Vec::new(),
        }
    }

    /// A thread reads the memory around this page in order; [`crate::vm::serve::readahead`] brings its pages back.
    pub fn read_in_order(&mut self, region: &Region, page: PageIdx) {
        self.near.give_up((region.number, page.0 / WINDOW));
        self.wide.give_up((region.number, page.0 / PAGES_PER_UNIT));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gain_after(windows: u64, touches: u64) -> (Gain, Instant) {
        let mut gain = Gain::default();
        let mut now = Instant::now();
        for window in 0..windows {
            for _ in 0..=touches {
                let _ = gain.restored((0, window), || WINDOW - 1, HORIZON, now);
            }
            now += HORIZON / 8;
        }
        (gain, now + 2 * HORIZON)
    }

    #[test]
    fn nothing_is_prefetched_until_windows_that_were_left_alone_were_wanted() {
        let mut gain = Gain::default();
        let now = Instant::now();
        assert!((0..TRY_AT_FIRST + 8).all(|window| gain.restored((0, window), || 15, HORIZON, now) != Some(true)));
        let (mut gain, now) = gain_after(64, WINDOW - 1);
        assert_eq!(gain.restored((0, 1001), || 15, HORIZON, now), Some(true), "all of each window was wanted");
    }

    #[test]
    fn a_guest_that_wants_one_page_of_each_window_gets_no_prefetch() {
        let (mut gain, now) = gain_after(64, 0);
        assert!((1001..1033).all(|window| gain.restored((0, window), || 15, HORIZON, now) != Some(true)));
    }

    #[test]
    fn prefetch_ends_when_the_guest_changes_its_ways() {
        let (mut gain, mut now) = gain_after(64, WINDOW - 1);
        let mut prefetched = 0;
        for window in 10_000..11_000 {
            prefetched += u64::from(gain.restored((0, window), || 15, HORIZON, now) == Some(true));
            now += HORIZON / 8;
        }
        assert!(prefetched < 500, "{prefetched} of 1000 windows were prefetched for nothing");
        assert_ne!(gain.restored((0, 20_001), || 15, HORIZON, now), Some(true));
    }

    #[test]
    fn a_window_without_other_far_pages_is_no_trial_and_no_prefetch() {
        let mut gain = Gain::default();
        assert_eq!(gain.restored((0, 1), || 0, HORIZON, Instant::now()), None);
        assert!(gain.trials.is_empty() && gain.windows == 0);
    }
}
