//! One VM's tracker as its threads share it, with a clock.
//!
//! Before: the VM is opened. After: the tracking worker runs its cycles, reclaim picks by its heat, the API shows it.
//! Threads: any; the lock is held for at most one pass over all units. The kernel is asked without the lock which pages
//! are in the RAM file, except by a pick: the kernel needs a lock that a VMM may hold for any time. A fault worker
//! never takes the tracker's lock, and a reader does not wait long for it.
//! Promise: a cycle that fails leaves the tracker ready for the next.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use crate::source::{AccessSource, CycleReport, Phase};
use crate::tracker::{Settings, Step, Tracker};
use crate::units::survey;
use crate::{Heat, Pages};

/// Longest wait of a reader for the tracker. A pass over all units of some TiB takes less.
const LOOK_TIMEOUT: Duration = Duration::from_secs(1);

/// The next step of a tracking worker.
#[derive(Debug)]
pub enum Turn {
    /// Nothing to do for this time.
    Rest(Duration),
    /// End this cycle after its window.
    Watch(Cycle),
}

/// A running cycle.
#[derive(Debug)]
pub struct Cycle {
    phase: Phase,
    planning: Duration,
    /// Time that it is to run.
    pub window: Duration,
}

impl Cycle {
    /// Returns whether it watches all memory.
    pub fn is_coarse(&self) -> bool {
        self.phase == Phase::Coarse
    }
}

/// The shared tracker of one VM.
#[derive(Debug)]
pub struct VmHeat {
    began: Instant,
    tracker: Mutex<Tracker>,
    is_tracked: AtomicBool,
    /// The last reader timed out.
    is_stuck: AtomicBool,
}

impl VmHeat {
    /// Begins without knowledge.
    pub fn new(settings: Settings) -> Self {
        Self {
            began: Instant::now(),
            tracker: Mutex::new(Tracker::new(settings)),
            is_tracked: AtomicBool::new(false),
            is_stuck: AtomicBool::new(false),
        }
    }

    /// Time since tracking began.
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// The tracker.
    pub fn lock(&self) -> MutexGuard<'_, Tracker> {
        self.tracker.lock().expect("no panic while held")
    }

    /// Locks the tracker for a reader, which serves other VMs as well; `None` if it is not available in time.
    fn try_lock(&self) -> Option<MutexGuard<'_, Tracker>> {
        let until = Instant::now() + LOOK_TIMEOUT;
        loop {
            let tracker = match self.tracker.try_lock() {
                Err(TryLockError::WouldBlock) => None,
                tracker => Some(tracker.expect("no panic while held")),
            };
            // Only the first call waits: many VMs may be stuck, and each is read twice a second.
            let ends = tracker.is_some() || self.is_stuck.load(Ordering::Relaxed) || Instant::now() >= until;
            if ends {
                self.is_stuck.store(tracker.is_none(), Ordering::Relaxed);
                return tracker;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns whether cycles run.
    pub fn is_tracked(&self) -> bool {
        self.is_tracked.load(Ordering::Relaxed)
    }

    /// Cycles begin to run, or end.
    pub fn set_tracked(&self, is_tracked: bool) {
        self.is_tracked.store(is_tracked, Ordering::Relaxed);
    }

    /// The next step of the tracking worker: a rest, or a cycle, which has begun.
    ///
    /// # Errors
    /// The source could not begin the cycle; no cycle runs.
    pub fn begin(&self, source: &mut dyn AccessSource, pages: &dyn Pages) -> io::Result<Turn> {
        let (planning, now) = (Instant::now(), self.now());
        let is_due = self.lock().begin_survey(now, pages);
        if is_due {
            // The kernel is asked without the lock: for 1 TiB that takes about a second.
            survey(pages).for_each(|part| self.lock().survey(now, &part));
        }
        // Not in the match, which would hold the lock.
        let step = self.lock().step(now);
        // Finding the pages in memory may cost more than the cycle, if they are fragmented.
        let planning = planning.elapsed();
        match step {
            Step::Rest(pause) => Ok(Turn::Rest(pause)),
            Step::Watch { phase, watch, window } => match source.start(&watch) {
                Ok(()) => Ok(Turn::Watch(Cycle { phase, planning, window })),
                Err(error) => {
                    self.lock().absorb(self.now(), phase, &CycleReport::default());
                    Err(error)
                }
            },
        }
    }

    /// Ends a cycle. `whole`: it ran for its whole window; otherwise its report is dropped, because fewer pages were
    /// touched than in a whole one.
    ///
    /// # Errors
    /// The source could not tell which pages were touched. The cycle has ended nevertheless.
    pub fn finish(&self, source: &mut dyn AccessSource, cycle: Cycle, whole: bool) -> io::Result<()> {
        let report = source.end().map(|mut report| {
            report.cost.cpu += cycle.planning;
            if whole { report } else { CycleReport { units: Vec::new(), ..report } }
        });
        let nothing = CycleReport::default();
        self.lock().absorb(self.now(), cycle.phase, report.as_ref().unwrap_or(&nothing));
        report.map(|_| ())
    }

    /// The heat for the API, with this number of cells in the strip; empty (no cycles) while the tracker is stuck.
    pub fn heat(&self, cells: usize) -> Heat {
        self.try_lock().map(|tracker| crate::heat(&tracker, self.now(), cells)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scripted::Scripted;
    use crate::source::{PageMap, UnitId};
    use ballast_base::{PageIdx, PageRange};

    /// One unit in memory.
    struct Guest;

    impl Pages for Guest {
        fn regions(&self) -> u32 {
            1
        }
        fn len(&self, _: u32) -> u64 {
            512
        }
        fn next_present(&self, _: u32, pages: PageRange) -> Option<PageRange> {
            Some(pages.before(PageIdx(512))).filter(|pages| !pages.is_empty())
        }
        fn age(&self, _: u32, _: PageIdx) -> Option<u8> {
            Some(0)
        }
        fn set_age(&self, _: u32, _: PageIdx, _: u8) {}
    }

    #[test]
    fn a_reader_does_not_wait_for_a_thread_that_sleeps_with_the_tracker() {
        let heat = VmHeat::new(Settings::default());
        let held = heat.lock();
        std::thread::scope(|scope| {
            assert_eq!(scope.spawn(|| heat.heat(8)).join().expect("it ends"), Heat::default());
        });
        drop(held);
        assert_eq!(heat.heat(8).strip.len(), 8);
    }

    #[test]
    fn a_pick_does_not_wait_while_the_kernel_is_asked_which_pages_are_in_memory() {
        /// 5000 units: more than a part of a survey.
        struct Asked<'a>(&'a VmHeat);
        impl Pages for Asked<'_> {
            fn regions(&self) -> u32 {
                1
            }
            fn len(&self, _: u32) -> u64 {
                5000 * 512
            }
            fn next_present(&self, _: u32, pages: PageRange) -> Option<PageRange> {
                assert!(self.0.tracker.try_lock().is_ok(), "it is locked");
                (!pages.is_empty()).then_some(pages)
            }
            fn age(&self, _: u32, _: PageIdx) -> Option<u8> {
                None
            }
            fn set_age(&self, _: u32, _: PageIdx, _: u8) {}
        }
        let heat = VmHeat::new(Settings::default());
        let turn = heat.begin(&mut Scripted::default(), &Asked(&heat)).expect("begun");
        assert!(matches!(turn, Turn::Watch(cycle) if cycle.is_coarse()));
        assert_eq!(heat.lock().units().present().count(), 5000);
    }

    #[test]
    fn a_cycle_that_was_cut_short_or_failed_changes_nothing_and_is_ended() {
        let unit = UnitId { region: 0, unit: 0 };
        let soon = Settings { period: Duration::from_millis(1), ..Settings::default() };
        let heat = VmHeat::new(soon);
        let mut source = Scripted::default();
        source.touch(unit, PageMap::ALL);
        let frequency = || heat.lock().units().entry(unit).map(|entry| entry.frequency());
        let coarse = || heat.lock().cycles().0;
        let turn = |source: &mut Scripted, whole: bool| {
            let before = coarse();
            loop {
                let outcome = heat.begin(source, &Guest).and_then(|turn| match turn {
                    Turn::Rest(pause) => {
                        std::thread::sleep(pause);
                        Ok(())
                    }
                    Turn::Watch(cycle) => {
                        std::thread::sleep(cycle.window);
                        heat.finish(source, cycle, whole)
                    }
                });
                if coarse() > before || outcome.is_err() {
                    return outcome;
                }
            }
        };
        turn(&mut source, false).expect("cut short");
        assert_eq!(frequency(), Some(0));
        source.fail_start = true;
        turn(&mut source, true).expect_err("it fails to start");
        source.fail_end = true;
        turn(&mut source, true).expect_err("it fails to end");
        assert_eq!(frequency(), Some(0));
        turn(&mut source, true).expect("whole");
        assert_eq!(frequency(), Some(1));
    }
}
