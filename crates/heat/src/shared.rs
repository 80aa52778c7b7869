//! One VM's tracker as its threads share it, with the clock it does not have itself.
//!
//! Before: the VM is opened. After: the tracking lane turns it, reclaim picks by it, the API shows it.
//! Threads: any; the lock is held for as long as it takes to look at each unit once. A fault lane never takes it.
//! Promise: a cycle that fails leaves the tracker ready for the next.

use std::io;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::source::{Ability, AccessSource, Report};
use crate::tracker::{Settings, Step, Tracker};
use crate::{Heat, Pages};

/// See above.
#[derive(Debug)]
pub struct VmHeat {
    began: Instant,
    tracker: Mutex<Tracker>,
    source: Mutex<Option<Ability>>,
}

impl VmHeat {
    /// Nothing known yet, and nobody tracking.
    pub fn new(settings: Settings, seed: u64) -> Self {
        Self { began: Instant::now(), tracker: Mutex::new(Tracker::new(settings, seed)), source: Mutex::default() }
    }

    /// The time that the tracker counts.
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// The tracker.
    pub fn lock(&self) -> MutexGuard<'_, Tracker> {
        self.tracker.lock().expect("no panic while held")
    }

    /// Who tracks, as far as anybody does.
    pub fn source(&self) -> Option<Ability> {
        *self.source.lock().expect("no panic while held")
    }

    /// Somebody begins to track, or `None` ends it.
    pub fn set_source(&self, source: Option<Ability>) {
        *self.source.lock().expect("no panic while held") = source;
    }

    /// One step of the tracking lane: a cycle, or a pause. `wait` sleeps so long and answers false if the lane is to end;
    /// a cycle that has begun is ended all the same.
    pub fn turn(
        &self,
        source: &mut dyn AccessSource,
        pages: &dyn Pages,
        wait: &mut dyn FnMut(Duration) -> bool,
    ) -> io::Result<()> {
        // Not in the match: the lock would be held while we wait.
        let step = self.lock().next(self.now(), pages);
        match step {
            Step::Rest(pause) => {
                wait(pause);
                Ok(())
            }
            Step::Watch { phase, watch, window } => {
                let report = source.start(&watch).and_then(|()| {
                    wait(window);
                    source.end()
                });
                let nothing = Report::default();
                self.lock().absorb(self.now(), phase, report.as_ref().unwrap_or(&nothing));
                report.map(|_| ())
            }
        }
    }

    /// What is to be shown, with a strip of so many cells.
    pub fn heat(&self, cells: usize) -> Heat {
        crate::heat(&self.lock(), self.now(), cells)
    }

    /// See [`Tracker::cycles_after`].
    pub fn cycles_after(&self, after: u64) -> Vec<u8> {
        let name = self.source().map_or("none", |source| source.name);
        self.lock().cycles_after(self.now(), after, name)
    }
}
