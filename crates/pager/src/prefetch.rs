//! Prefetch: bring back together what left together, where that pays.
//!
//! Before: the fault lane restored a page. After: the far pages beside it are back, too, before they are touched.
//! Threads: [`Gain`] belongs to one fault lane; [`run`] is a lane of its own, so no fault ever waits for speculation but
//! for the one page it may be bringing. Units: a *window* is an aligned piece of [`WINDOW`] pages.
//! Promise: a guess costs time and room, never bytes: prefetched pages come back by the same `fault::serve` as others.
//! They stay within the limit, and only the newest guesses are kept.
//!
//! Pages are evicted in runs, so neighbours left together. Whether they are *wanted* together is measured all the time:
//! some windows are left alone after their first restore, and what is then restored in them within a second is what a
//! prefetch would have saved. Below [`PAYS`] nothing is prefetched. The order of the touches plays no part.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ballast_base::{PageCount, PageIdx};
use ballast_sys::uffd::FaultKind;

use crate::fault::{Served, serve};
use crate::page_state::State;
use crate::region::Region;
use crate::stats::Counter;
use crate::stores::is_in_file;
use crate::view::View;
use crate::vm::Vm;

/// Pages of a window: 64 KiB.
pub const WINDOW: u64 = 16;
/// Share of a window's far pages that must be wanted within [`HORIZON`] for prefetch to pay: bringing one back in a row
/// costs about a quarter of a fault.
const PAYS: f64 = 0.25;
const HORIZON: Duration = Duration::from_secs(1);
/// Every so many windows one is left alone, to see; at first all are.
const TRY_EVERY: u64 = 16;
const TRY_AT_FIRST: u64 = 16;
/// Trials under way at a time.
const TRIALS: usize = 16;
/// Windows that wait at most: 8 MiB of guesses. Older ones are dropped.
const QUEUE: usize = 128;
/// Waking a thread costs the fault lane up to 30 us where CPUs sleep deeply. So the prefetch lane looks for wishes by
/// itself, this often, until there was none for a while.
const LOOK_EVERY: Duration = Duration::from_micros(200);
const LOOK_FOR: Duration = Duration::from_millis(50);

/// Region number and window number.
type Window = (u32, u64);

#[derive(Clone, Copy, Debug)]
struct Trial {
    window: Window,
    far: u64,
    hits: u64,
    since: Instant,
}

/// Does prefetching pay in this VM?
#[derive(Debug, Default)]
pub struct Gain {
    trials: Vec<Trial>,
    /// Share of a left-alone window's far pages that were wanted, averaged over about the last eight trials.
    share: f64,
    /// Windows seen, and the last ones, which need not be looked at again.
    windows: u64,
    recent: [Option<Window>; 4],
}

impl Gain {
    /// A page of this window was restored. Answers whether to prefetch the others. `far` counts those that are far.
    pub fn restored(&mut self, window: Window, far: impl FnOnce() -> u64, now: Instant) -> bool {
        self.close_trials(now);
        if let Some(trial) = self.trials.iter_mut().find(|trial| trial.window == window) {
            trial.hits += 1;
            return false;
        }
        if self.recent.contains(&Some(window)) {
            return false;
        }
        let far = far();
        if far == 0 {
            return false;
        }
        self.recent[self.windows as usize % self.recent.len()] = Some(window);
        self.windows += 1;
        if (self.windows <= TRY_AT_FIRST || self.windows.is_multiple_of(TRY_EVERY)) && self.trials.len() < TRIALS {
            self.trials.push(Trial { window, far, hits: 0, since: now });
            return false;
        }
        self.share >= PAYS
    }

    /// A trial ends after the horizon, or when it is clear that all the window was wanted.
    fn close_trials(&mut self, now: Instant) {
        let share = &mut self.share;
        self.trials.retain(|trial| {
            let over = trial.hits >= trial.far || now.saturating_duration_since(trial.since) > HORIZON;
            if over {
                *share += (trial.hits.min(trial.far) as f64 / trial.far as f64 - *share) / 8.0;
            }
            !over
        });
    }
}

/// Windows to bring back.
#[derive(Debug, Default)]
pub struct Prefetch {
    queue: Mutex<Queue>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    wanted: VecDeque<(Arc<View>, Window)>,
    /// The lane waits for the bell.
    asleep: bool,
    /// It rang for the last time.
    ended: bool,
}

impl Prefetch {
    /// Ask for the window around a page.
    pub fn want(&self, view: &Arc<View>, window: Window) {
        let mut queue = self.queue.lock().expect("no panic while held");
        if queue.wanted.len() == QUEUE {
            queue.wanted.pop_front();
        }
        queue.wanted.push_back((view.clone(), window));
        if queue.asleep {
            self.bell.notify_one();
        }
    }

    /// The lane is to stop.
    pub fn end(&self) {
        self.queue.lock().expect("no panic while held").ended = true;
        self.bell.notify_all();
    }

    /// The newest wish; `None` when it is time to end. `served` is when the last one was.
    fn next(&self, served: Option<Instant>) -> Option<(Arc<View>, Window)> {
        loop {
            let mut queue = self.queue.lock().expect("no panic while held");
            if served.is_none_or(|served| served.elapsed() > LOOK_FOR) {
                queue.asleep = true;
                let wait = self.bell.wait_while(queue, |queue| queue.wanted.is_empty() && !queue.ended);
                queue = wait.expect("no panic while held");
                queue.asleep = false;
            }
            if queue.ended {
                return None;
            }
            if let Some(newest) = queue.wanted.pop_back() {
                return Some(newest);
            }
            drop(queue);
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// The window of a page.
pub fn window_of(region: &Region, page: PageIdx) -> Window {
    (region.number, page.0 / WINDOW)
}

/// Pages of a window that are far, in RAM, and not on their way. What is on a disk has not been wanted for long, and a
/// guess is not worth its time.
fn far_pages(region: &Region, window: u64) -> impl Iterator<Item = PageIdx> {
    let pages = window * WINDOW..((window + 1) * WINDOW).min(region.pages().0);
    pages.map(PageIdx).filter(|page| {
        let word = region.word(*page);
        word.state() == State::Far && !word.is_locked() && !is_in_file(word)
    })
}

/// How many pages of a window are far.
pub fn count_far(region: &Region, window: u64) -> u64 {
    far_pages(region, window).count() as u64
}

/// Serve wishes until the VM is stopped.
pub fn run(vm: &Vm) {
    let mut served = None;
    while let Some((view, (number, window))) = vm.prefetch.next(served) {
        served = Some(Instant::now());
        let Some(region) = vm.region(number).filter(|region| !region.is_removed()) else { continue };
        if let Err(error) = bring_back(vm, &view, &region, window) {
            // The fault lane meets the same and has the say.
            tracing::warn!(vm = vm.state.name(), region = number, window, "Prefetching: {error}");
        }
    }
}

fn bring_back(vm: &Vm, view: &View, region: &Region, window: u64) -> std::io::Result<()> {
    // Held so that the region is not unplugged meanwhile: its addresses may be other RAM's right afterwards.
    let _layout = vm.layout();
    let Some(memory) = view.of_region(region).filter(|_| !region.is_removed()) else { return Ok(()) };
    if let Some(limit) = vm.effective_limit()
        && (vm.resident()? + PageCount(WINDOW)).bytes() > limit
    {
        return Ok(());
    }
    for page in far_pages(region, window) {
        let (granule, key) = (region.granule(page), region.key(page));
        let (rescued, served) = serve(granule, key, FaultKind::Minor, &memory, &vm.stores.near(), |age| age);
        vm.count_rescued(rescued, granule.pages());
        match served? {
            Served::Restored => {
                vm.stats().add(Counter::Prefetched, 1);
                vm.stats().sub(Counter::Far, 1);
            }
            // Somebody else was quicker, or it cannot be had now: whoever wants it will fault.
            Served::Later | Served::Mapped | Served::Fresh => {}
            served @ Served::Zeroed => vm.count(served, granule.pages()),
            served @ Served::Poisoned { newly } => {
                vm.count(served, granule.pages());
                if newly {
                    vm.report_lost(region.number, page);
                }
            }
            Served::Gone => return Ok(()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gain_after(windows: u64, touches: u64) -> (Gain, Instant) {
        let mut gain = Gain::default();
        let mut now = Instant::now();
        for window in 0..windows {
            for _ in 0..=touches {
                gain.restored((0, window), || WINDOW - 1, now);
            }
            now += HORIZON / 8;
        }
        (gain, now + 2 * HORIZON)
    }

    #[test]
    fn nothing_is_prefetched_until_windows_that_were_left_alone_were_wanted() {
        let mut gain = Gain::default();
        let now = Instant::now();
        assert!((0..TRY_AT_FIRST + 8).all(|window| !gain.restored((0, window), || 15, now)));
        let (mut gain, now) = gain_after(64, WINDOW - 1);
        assert!(gain.restored((0, 1001), || 15, now), "all of each window was wanted");
    }

    #[test]
    fn a_guest_that_wants_one_page_of_each_window_gets_no_prefetch() {
        let (mut gain, now) = gain_after(64, 0);
        assert!((1001..1033).all(|window| !gain.restored((0, window), || 15, now)));
    }

    #[test]
    fn prefetch_ends_when_the_guest_changes_its_ways() {
        let (mut gain, mut now) = gain_after(64, WINDOW - 1);
        let mut prefetched = 0;
        for window in 10_000..11_000 {
            prefetched += u64::from(gain.restored((0, window), || 15, now));
            now += HORIZON / 8;
        }
        assert!(prefetched < 500, "{prefetched} of 1000 windows were prefetched for nothing");
        assert!(!gain.restored((0, 20_001), || 15, now));
    }

    #[test]
    fn a_window_without_other_far_pages_is_no_trial_and_no_prefetch() {
        let mut gain = Gain::default();
        assert!(!gain.restored((0, 1), || 0, Instant::now()));
        assert!(gain.trials.is_empty() && gain.windows == 0);
    }
}
