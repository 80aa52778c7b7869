//! One VM's tracker as its threads share it, with a clock.
//!
//! Before: the VM is opened. After: the tracking worker runs its cycles, reclaim picks by it, the API shows it.
//! Threads: any; the lock is held for one pass over all units at most. The kernel is asked which pages are in the RAM
//! file without it, except by a pick: the kernel needs a lock that a VMM may hold for ever. A fault worker never takes
//! the tracker's lock, and a reader does not wait long for it.
//! Promise: a cycle that fails leaves the tracker ready for the next.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use crate::source::{Ability, AccessSource, CycleReport, Phase};
use crate::tracker::{Settings, Step, Tracker};
use crate::units::survey;
use crate::{Heat, Pages};

/// How long a reader waits for the tracker. A pass over all units of some TiB takes less.
const LOOK_TIMEOUT: Duration = Duration::from_secs(1);

/// What a tracking worker is to do next.
#[derive(Debug)]
pub enum Turn {
    /// Nothing for this time.
    Rest(Duration),
    /// Finish this cycle when its window is over.
    Watch(Cycle),
}

/// A cycle that runs.
#[derive(Debug)]
pub struct Cycle {
    phase: Phase,
    planning: Duration,
    /// How long it is to run.
    pub window: Duration,
}

impl Cycle {
    /// Does it watch all memory?
    pub fn is_coarse(&self) -> bool {
        self.phase == Phase::Coarse
    }
}

/// The tracker of one VM, shared.
#[derive(Debug)]
pub struct VmHeat {
    began: Instant,
    tracker: Mutex<Tracker>,
    source: Mutex<Option<Ability>>,
    /// The last reader timed out.
    is_stuck: AtomicBool,
}

impl VmHeat {
    /// Nothing is known, and no source tracks.
    pub fn new(settings: Settings, seed: u64) -> Self {
        Self {
            began: Instant::now(),
            tracker: Mutex::new(Tracker::new(settings, seed)),
            source: Mutex::default(),
            is_stuck: AtomicBool::new(false),
        }
    }

    /// The tracker's time.
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// The tracker.
    pub fn lock(&self) -> MutexGuard<'_, Tracker> {
        self.tracker.lock().expect("no panic while held")
    }

    /// The tracker for a reader, which serves other VMs as well; `None` if it is not available in time.
    fn try_lock(&self) -> Option<MutexGuard<'_, Tracker>> {
        let until = Instant::now() + LOOK_TIMEOUT;
        loop {
            let tracker = match self.tracker.try_lock() {
                Err(TryLockError::WouldBlock) => None,
                tracker => Some(tracker.expect("no panic while held")),
            };
            // Only the first waits: there may be many such VMs, and each is read twice a second.
            let ends = tracker.is_some() || self.is_stuck.load(Ordering::Relaxed) || Instant::now() >= until;
            if ends {
                self.is_stuck.store(tracker.is_none(), Ordering::Relaxed);
                return tracker;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The source that tracks, if any.
    pub fn source(&self) -> Option<Ability> {
        *self.source.lock().expect("no panic while held")
    }

    /// A source begins to track; `None`: tracking ended.
    pub fn set_source(&self, source: Option<Ability>) {
        *self.source.lock().expect("no panic while held") = source;
    }

    /// The next step of the tracking worker: a pause, or a cycle, which has begun.
    ///
    /// # Errors
    /// The source could not begin the cycle: none runs.
    pub fn begin(&self, source: &mut dyn AccessSource, pages: &dyn Pages) -> io::Result<Turn> {
        let (planning, now) = (Instant::now(), self.now());
        let is_surveyed = self.lock().begin_survey(now, pages);
        if is_surveyed {
            // The kernel is asked without the lock: for 1 TiB that takes about a second.
            survey(pages).for_each(|part| self.lock().survey(now, &part));
        }
        // Not in the match: the lock would be held meanwhile.
        let step = self.lock().step(now);
        // Finding out which pages are in memory may cost more than the cycle, if they are in many pieces.
        let planning = planning.elapsed();
        if is_surveyed {
            self.lock().planned(planning);
        }
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

    /// A cycle is to end. `whole`: it ran for all of its window; else its report is dropped, because less was touched
    /// than in a whole one.
    ///
    /// # Errors
    /// The source could not tell which pages were touched. No cycle runs all the same.
    pub fn finish(&self, source: &mut dyn AccessSource, cycle: Cycle, whole: bool) -> io::Result<()> {
        let report = source.end().map(|mut report| {
            report.cost.cpu += cycle.planning;
            if whole { report } else { CycleReport { units: Vec::new(), ..report } }
        });
        let nothing = CycleReport::default();
        self.lock().absorb(self.now(), cycle.phase, report.as_ref().unwrap_or(&nothing));
        report.map(|_| ())
    }

    /// The heat for the API, with a strip of this number of cells; empty (no cycles) while it cannot be known.
    pub fn heat(&self, cells: usize) -> Heat {
        self.try_lock().map(|tracker| crate::heat(&tracker, self.now(), cells)).unwrap_or_default()
    }

    /// See [`Tracker::cycles_after`]; nothing, not even an empty recording, while it cannot be known.
    pub fn cycles_after(&self, after: u64) -> Vec<u8> {
        let name = self.source().map_or("none", |source| source.name);
        self.try_lock().map(|mut tracker| tracker.cycles_after(self.now(), after, name)).unwrap_or_default()
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
    fn who_only_looks_does_not_wait_for_a_thread_that_sleeps_with_the_tracker() {
        let heat = VmHeat::new(Settings::default(), 1);
        assert!(!heat.cycles_after(0).is_empty());
        let held = heat.lock();
        std::thread::scope(|scope| {
            let looks = || (heat.heat(8), heat.cycles_after(0));
            assert_eq!(scope.spawn(looks).join().expect("it ends"), (Heat::default(), Vec::new()));
        });
        drop(held);
        assert!(!heat.cycles_after(0).is_empty());
    }

    #[test]
    fn who_picks_does_not_wait_while_the_kernel_is_asked_which_pages_are_in_memory() {
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
        let heat = VmHeat::new(Settings::default(), 1);
        let turn = heat.begin(&mut Scripted::default(), &Asked(&heat)).expect("begun");
        assert!(matches!(turn, Turn::Watch(cycle) if cycle.is_coarse()));
        assert_eq!(heat.lock().units().present().count(), 5000);
    }

    #[test]
    fn a_cycle_that_was_cut_short_or_failed_teaches_nothing_and_is_ended() {
        let unit = UnitId { region: 0, unit: 0 };
        let soon = Settings { period: Duration::from_millis(1), ..Settings::default() };
        let heat = VmHeat::new(soon, 1);
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
