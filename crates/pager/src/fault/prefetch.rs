//! Prefetch: bring back together what left together, where that pays.
//!
//! Before: the fault lane restored a page. After: the far pages beside it are back, too, before they are touched.
//! Threads: [`Company`] belongs to one fault lane; [`run`] is a lane of its own, so no fault waits for these guesses but
//! for the few pages it may be bringing. (What is touched in order is no guess: see [`crate::streams`].) Units: a *window* is an aligned piece of [`WINDOW`] pages.
//! Promise: a guess costs time and room, never bytes: prefetched pages come back under their locks as others do, and
//! invariant 1 decides. They stay within the limit, and only the newest guesses are kept.
//!
//! Pages are evicted in runs, so neighbours left together. Whether they are *wanted* together is measured all the time:
//! some windows are left alone after their first restore, and what is then restored in them soon is what a prefetch
//! would have saved. Below [`PAYS`] nothing is prefetched. The same is measured of the windows of 2 MiB, and
//! where most of those are wanted, all 2 MiB come back. The order of the touches plays no part.
//!
//! *Soon* is within a second. In a VM near its limit, where each page that comes drives out another, it is much sooner than
//! pages come back anyway: one that touches its memory at random wants all of every window again within a second or so,
//! and would only exchange one page for the next.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ballast_base::{Bytes, MIB, PAGE_SIZE, PAGES_PER_UNIT, PageCount, PageIdx};
use ballast_store::PageBytes;

use crate::busy::Busy;
use crate::fault::restore_run;
use crate::page_state::State;
use crate::region::Region;
use crate::stats::Counter;
use crate::stores::is_in_file;
use crate::view::{RegionView, View};
use crate::vm::Vm;

/// Pages of a window: 64 KiB.
pub const WINDOW: u64 = 16;
/// Share of a window's far pages that must be wanted soon for prefetch to pay: bringing one back in a row costs about a
/// quarter of a fault.
const PAYS: f64 = 0.25;
/// Near the limit, soon is this part of the time for which pages are away, and between these two; else the latter.
const SOON_PART: u32 = 8;
const SOONEST: Duration = Duration::from_millis(5);
const HORIZON: Duration = Duration::from_secs(1);
/// The time for which pages are away is averaged over about so many.
const AWAY_OVER: f64 = 64.0;
/// Every so many windows one is left alone, to see; at first all are.
const TRY_EVERY: u64 = 16;
const TRY_AT_FIRST: u64 = 16;
/// Trials under way at a time.
const TRIALS: usize = 16;
/// Guesses that wait at most. Older ones are dropped.
const BUDGET: Bytes = Bytes(8 * MIB);
/// Pages that come back as one: what a fault on one of them waits for, some 8 us.
const RUN: usize = 8;
/// Waking a thread costs the fault lane up to 30 us where CPUs sleep deeply. So the prefetch lane looks for wishes by
/// itself, this often, until there was none for a while, or other threads want its CPU ([`Busy`]).
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

/// Does bringing back the rest of a window pay?
#[derive(Debug, Default)]
struct Gain {
    trials: Vec<Trial>,
    /// Share of a left-alone window's far pages that were wanted, averaged over about the last eight trials.
    share: f64,
    /// Windows seen, and the last ones, which need not be looked at again.
    windows: u64,
    recent: [Option<Window>; 4],
}

impl Gain {
    /// A page of this window was restored. Answers whether to prefetch the others, or nothing if that was asked just now.
    /// `far` counts those that are far.
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

    /// What is left of this window comes back for another reason, so a trial of it says nothing.
    fn give_up(&mut self, window: Window) {
        self.trials.retain(|trial| trial.window != window);
    }

    /// A trial ends when it is not soon any more, or when it is clear that all the window was wanted.
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

/// Does prefetching pay in this VM, and how far?
#[derive(Debug)]
pub struct Company {
    near: Gain,
    /// The same of the windows of whole 2 MiB.
    wide: Gain,
    /// For how long pages are away, in seconds.
    away_s: f64,
}

impl Default for Company {
    fn default() -> Self {
        Self { near: Gain::default(), wide: Gain::default(), away_s: (HORIZON * SOON_PART).as_secs_f64() }
    }
}

impl Company {
    /// A page was restored that had been away for so long, in a VM near its limit (`tight`) or not. Answers what to bring back
    /// besides, the most urgent last.
    pub fn restored(
        &mut self,
        region: &Region,
        page: PageIdx,
        away: Duration,
        tight: bool,
        now: Instant,
    ) -> Vec<Range<u64>> {
        self.away_s += (away.as_secs_f64() - self.away_s) / AWAY_OVER;
        let part = Duration::from_secs_f64(self.away_s.max(0.0) / f64::from(SOON_PART));
        let soon = if tight { part.clamp(SOONEST, HORIZON) } else { HORIZON };
        let window = page.0 / WINDOW;
        let near = window * WINDOW..((window + 1) * WINDOW).min(region.pages().0);
        let far = || far_pages(region, near.clone()).count() as u64;
        // Of the 2 MiB each window counts once, however many of its pages are wanted.
        let Some(pays) = self.near.restored((region.number, window), far, soon, now) else { return Vec::new() };
        let unit = page.0 / PAGES_PER_UNIT;
        let all = unit * PAGES_PER_UNIT..((unit + 1) * PAGES_PER_UNIT).min(region.pages().0);
        let windows = || all.clone().step_by(WINDOW as usize).filter(|page| is_far(region, PageIdx(*page))).count();
        let wide = self.wide.restored((region.number, unit), || windows() as u64, soon, now) == Some(true);
        match (pays, wide) {
            (true, true) => vec![all.start..near.start, near.end..all.end, near],
            (true, false) => vec![near],
            _ => Vec::new(),
        }
    }

    /// A thread goes through the memory around this page in order, for which [`crate::streams`] brings pages back.
    pub fn walked(&mut self, region: &Region, page: PageIdx) {
        self.near.give_up((region.number, page.0 / WINDOW));
        self.wide.give_up((region.number, page.0 / PAGES_PER_UNIT));
    }
}

/// Pages to bring back.
#[derive(Debug, Default)]
pub struct Prefetch {
    queue: Mutex<Queue>,
    bell: Condvar,
}

#[derive(Debug)]
struct Wish {
    view: Arc<View>,
    region: u32,
    pages: Range<u64>,
}

#[derive(Debug, Default)]
struct Queue {
    wanted: VecDeque<Wish>,
    /// Pages in it.
    pages: u64,
    /// The lane waits for the bell.
    asleep: bool,
    /// It rang for the last time.
    ended: bool,
}

impl Queue {
    fn push(&mut self, wish: Wish) {
        self.pages += wish.pages.end - wish.pages.start;
        self.wanted.push_back(wish);
        while self.pages > BUDGET.pages_floor().0 {
            let Some(oldest) = self.wanted.pop_front() else { return };
            self.pages -= oldest.pages.end - oldest.pages.start;
        }
    }

    /// The next window of the newest wish.
    fn pop(&mut self) -> Option<Wish> {
        let newest = self.wanted.back_mut()?;
        let first = newest.pages.start;
        let end = newest.pages.end.min(first + WINDOW);
        self.pages -= end - first;
        newest.pages.start = end;
        let next = Wish { view: newest.view.clone(), region: newest.region, pages: first..end };
        if newest.pages.is_empty() {
            self.wanted.pop_back();
        }
        Some(next)
    }
}

impl Prefetch {
    /// Ask for these pages of a region.
    pub fn want(&self, view: &Arc<View>, region: u32, pages: Range<u64>) {
        if pages.is_empty() {
            return;
        }
        let mut queue = self.queue.lock().expect("no panic while held");
        queue.push(Wish { view: view.clone(), region, pages });
        if queue.asleep {
            self.bell.notify_one();
        }
    }

    /// The lane is to stop.
    pub fn end(&self) {
        self.queue.lock().expect("no panic while held").ended = true;
        self.bell.notify_all();
    }

    /// The newest wish, at most a window of it; `None` when it is time to end. `served` is when the last one was.
    fn next(&self, served: Option<Instant>, cpus: &mut Busy) -> Option<Wish> {
        loop {
            let mut queue = self.queue.lock().expect("no panic while held");
            if queue.wanted.is_empty() && (cpus.ran() || served.is_none_or(|served| served.elapsed() > LOOK_FOR)) {
                queue.asleep = true;
                let wait = self.bell.wait_while(queue, |queue| queue.wanted.is_empty() && !queue.ended);
                queue = wait.expect("no panic while held");
                queue.asleep = false;
            }
            if queue.ended {
                return None;
            }
            if let Some(newest) = queue.pop() {
                return Some(newest);
            }
            drop(queue);
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Is a page far, in RAM, and not on its way? What is on a disk has not been wanted for long, and a guess is not worth
/// its time.
pub(crate) fn is_far(region: &Region, page: PageIdx) -> bool {
    let word = region.word(page);
    word.state() == State::Far && !word.is_locked() && !is_in_file(word)
}

fn far_pages(region: &Region, pages: Range<u64>) -> impl Iterator<Item = PageIdx> {
    pages.map(PageIdx).filter(|page| is_far(region, *page))
}

/// Serve wishes until the VM is stopped.
pub fn run(vm: &Vm) {
    let (mut served, mut cpus) = (None, Busy::of_this_thread());
    let mut room = Box::new([[0; PAGE_SIZE]; RUN]);
    while let Some(Wish { view, region: number, pages }) = vm.prefetch.next(served, &mut cpus) {
        served = Some(Instant::now());
        let Some(region) = vm.region(number).filter(|region| !region.is_removed()) else { continue };
        let first = pages.start;
        if let Err(error) = bring_back(vm, &view, &region, pages, &mut room[..]) {
            // The fault lane meets the same and has the say.
            tracing::warn!(vm = vm.state.name(), region = number, first, "Prefetching: {error}");
        }
    }
}

fn bring_back(vm: &Vm, view: &View, region: &Region, pages: Range<u64>, room: &mut [PageBytes]) -> std::io::Result<()> {
    // Held so that the region is not unplugged meanwhile: its addresses may be other RAM's right afterwards.
    let _layout = vm.layout();
    let Some(memory) = view.of_region(region).filter(|_| !region.is_removed()) else { return Ok(()) };
    let most = pages.end - pages.start;
    if vm.gate.spare().is_none()
        && let Some(limit) = vm.effective_limit()
        && (vm.resident()? + PageCount(most)).bytes() > limit
    {
        return Ok(());
    }
    let mut next = pages.start;
    while vm.gate.spare().is_none_or(|spare| spare >= RUN as i64) {
        let Some(came) = next_run(vm, region, &memory, next..pages.end, room)? else { break };
        next = came.end;
    }
    Ok(())
}

/// Bring back the next far pages of these that lie side by side, as many as the buffer has room for. Answers which came back,
/// or `None` if none is far.
pub(crate) fn next_run(
    vm: &Vm,
    region: &Region,
    memory: &RegionView<'_>,
    pages: Range<u64>,
    room: &mut [PageBytes],
) -> std::io::Result<Option<Range<u64>>> {
    let Some(first) = far_pages(region, pages.clone()).next() else { return Ok(None) };
    let cells = (first.0..pages.end).map(|page| region.granule(PageIdx(page)).cell());
    let were: Vec<u8> = (first.0..pages.end).take(room.len()).map(|page| region.word(PageIdx(page)).age()).collect();
    let back = restore_run(region.key(first), cells, memory, &vm.stores.near(), room)?;
    vm.gate.came(back);
    vm.came_back(region, first, 1, were.into_iter().take(back as usize));
    vm.stats().add(Counter::Prefetched, back);
    vm.stats().sub(Counter::Far, back);
    if back == 0 {
        // Somebody else was quicker, or it cannot be had now, and whoever wants it will fault.
        return Ok(Some(first.0 + 1..first.0 + 1));
    }
    Ok(Some(first.0..first.0 + back))
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
