//! Stages of a restore: times 1 of [`EVERY`] restores from RAM, and all from a disk or a network.
//!
//! Before: a worker is about to serve a fault. After: `stats` has four histograms, for operators and the bench.
//! Threads: each fault worker has its own [`Sampler`]. Units: nanoseconds.
//! Promise: a fault that is not timed costs an addition and a few comparisons, a timed one some 100 ns.
//!
//! ```text
//! read ── queue ──► taken up ── lookup ──► word found ── read ──► bytes there ── install ──► guest woken
//! ```

use std::cell::Cell;
use std::io;
use std::time::{Duration, Instant};

use ballast_base::PageIdx;
use ballast_store::PageBytes;
use ballast_sys::uffd::FillOutcome;

use crate::vm::stats::{Stage, Stats};
use ballast_page::copies::{Source, StoreOf};
use ballast_page::memory::Mapped;
use ballast_page::page_state::Word;

/// 1 of this number of faults is timed, because reading the clock takes longer than counting.
const EVERY: u32 = 8;

#[derive(Debug, Default)]
pub(crate) struct Sampler {
    faults: u32,
}

impl Sampler {
    /// Begins to serve a fault, and reads the clock if it is to be timed.
    pub fn start(&mut self) -> Times {
        self.faults = self.faults.wrapping_add(1);
        if self.faults.is_multiple_of(EVERY) { Times::start() } else { Times::default() }
    }
}

/// The times at which one fault passed its stages; empty if it is not timed.
#[derive(Debug, Default)]
pub(crate) struct Times {
    taken_up: Option<Instant>,
    found: Cell<Option<Instant>>,
    fetched: Cell<Option<Instant>>,
}

impl Times {
    /// Times a fault in any case.
    pub fn start() -> Self {
        Self { taken_up: Some(Instant::now()), ..Self::default() }
    }

    /// Times a fault whose page was requested at `at`.
    pub fn begun(at: Instant) -> Self {
        Self { taken_up: Some(at), found: Cell::new(Some(at)), fetched: Cell::default() }
    }

    /// Wraps the stores: the first look-up ends the stage *lookup*.
    pub fn stores<'a, S>(&'a self, stores: &'a S) -> TimedStores<'a, S> {
        TimedStores { stores, times: self }
    }

    /// Wraps the guest's memory: an install ends the stage *read*.
    pub fn memory<'a, M>(&'a self, memory: &'a M) -> TimedMemory<'a, M> {
        TimedMemory { memory, times: self }
    }

    fn pass(&self, stage: &Cell<Option<Instant>>) {
        if self.taken_up.is_some() && stage.get().is_none() {
            stage.set(Some(Instant::now()));
        }
    }

    /// Records the stages of a fault that was read at `since`, if it was a restore.
    pub fn restored(&self, stats: Stats<'_>, since: Instant) {
        if let (Some(taken_up), Some(found), Some(fetched)) = (self.taken_up, self.found.get(), self.fetched.get()) {
            let times = [since, taken_up, found, fetched, Instant::now()];
            let took = |stage: Stage| -> Duration {
                times[stage as usize + 1].saturating_duration_since(times[stage as usize])
            };
            Stage::ALL.into_iter().for_each(|stage| stats.record_stage(stage, took(stage)));
        }
    }
}

pub(crate) struct TimedStores<'a, S> {
    stores: &'a S,
    times: &'a Times,
}

impl<S: StoreOf> StoreOf for TimedStores<'_, S> {
    fn store_of(&self, word: Word) -> Option<Source<'_>> {
        self.times.pass(&self.times.found);
        self.stores.store_of(word)
    }
}

pub(crate) struct TimedMemory<'a, M> {
    memory: &'a M,
    times: &'a Times,
}

impl<M: Mapped> Mapped for TimedMemory<'_, M> {
    fn install(&self, page: PageIdx, bytes: &[PageBytes]) -> io::Result<FillOutcome> {
        self.times.pass(&self.times.fetched);
        self.memory.install(page, bytes)
    }

    fn install_run(&self, first: PageIdx, bytes: &[PageBytes]) -> io::Result<usize> {
        self.times.pass(&self.times.fetched);
        self.memory.install_run(first, bytes)
    }

    fn install_zero(&self, page: PageIdx) -> io::Result<FillOutcome> {
        self.memory.install_zero(page)
    }

    fn map(&self, page: PageIdx) -> io::Result<FillOutcome> {
        self.memory.map(page)
    }

    fn poison(&self, page: PageIdx) -> io::Result<FillOutcome> {
        self.memory.poison(page)
    }

    fn wake(&self, page: PageIdx) -> io::Result<()> {
        self.memory.wake(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::wire::VmId;
    use ballast_handover::state_file::StateFile;

    struct Anywhere;

    impl StoreOf for Anywhere {
        fn store_of(&self, _: Word) -> Option<Source<'_>> {
            None
        }
    }

    impl Mapped for Anywhere {
        fn install(&self, _: PageIdx, _: &[PageBytes]) -> io::Result<FillOutcome> {
            Ok(FillOutcome::Done)
        }
        fn install_zero(&self, _: PageIdx) -> io::Result<FillOutcome> {
            Ok(FillOutcome::Done)
        }
        fn map(&self, _: PageIdx) -> io::Result<FillOutcome> {
            Ok(FillOutcome::Done)
        }
        fn poison(&self, _: PageIdx) -> io::Result<FillOutcome> {
            Ok(FillOutcome::Done)
        }
        fn wake(&self, _: PageIdx) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn one_fault_in_eight_is_timed_and_its_stages_add_up() {
        let file = StateFile::create(VmId([0; 16]), "x").expect("create");
        let (stats, mut sampler) = (Stats::of(&file), Sampler::default());
        let since = Instant::now();
        for fault in 0..16 {
            let times = sampler.start();
            times.stores(&Anywhere).store_of(Word::INITIAL);
            // A fault that is resolved without a restore has no stages.
            if fault != 7 {
                times.memory(&Anywhere).install(PageIdx(0), &[]).expect("install");
            }
            times.restored(stats, since);
        }
        let all = since.elapsed().as_nanos() as u64;
        let stages = Stage::ALL.map(|stage| stats.stage(stage));
        assert!(stages.iter().all(|stage| stage.count() == 1), "{stages:?}");
        assert!(stages.iter().map(|stage| stage.sum_ns).sum::<u64>() <= all);
    }
}
