//! Quarantine of a VM: pages are marked, clients zap them, and they wait for T.
//!
//! Before: the reclaim worker has picked pages. After: it gets runs that stayed untouched for T, and evicts them.
//! Threads: the VM's reclaim worker. Nothing here waits for a client, whose reply notifies that worker. Units: pages.
//! Promise: a page in Quarantine is registered with userfaultfd. A run is returned only if every mapping of it was
//! zapped at least T ago, and no view was added since. Pages whose accesses are not seen wait for longer.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::wire::Range;
use ballast_base::{PAGES_PER_UNIT, PageIdx, PageRange};
use ballast_handover::state_file::StateError;
use ballast_heat::ColdRun;
use ballast_page::evict::{quarantine, release};
use ballast_page::page_state::{State, Ticket, Word};

use crate::run::pool::pause;
use crate::vm::client_peer::Zap;
use crate::vm::region::Region;
use crate::vm::stats::Counter;
use crate::vm::view::View;
use crate::vm::{Layout, Vm};

/// Pages evicted under one hold of their locks above the limit: a fault waits for at most one such punch, some 20 us.
const EVICT_RUN: u64 = 64;

/// Whether accesses to a page are seen before its quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accesses {
    /// The host or the guest's agent saw none for a while.
    Seen,
    /// The guest's agent cannot see accesses of the guest's kernel.
    Unseen,
}

struct Batch {
    ticket: Ticket,
    generation: u64,
    zapped_at: Instant,
    runs: Vec<(Accesses, ColdRun)>,
}

struct Zapping {
    ticket: Ticket,
    generation: u64,
    runs: Vec<(Accesses, ColdRun)>,
    /// Zaps without a reply.
    asked: Vec<(Arc<View>, Zap)>,
}

pub(super) struct Due {
    pub ticket: Ticket,
    pub accesses: Accesses,
    pub region: Arc<Region>,
    pub run: PageRange,
}

pub(super) struct Quarantine {
    vm: Arc<Vm>,
    batches: VecDeque<Batch>,
    unseen: VecDeque<Batch>,
    zapping: Option<Zapping>,
}

impl Quarantine {
    pub fn new(vm: Arc<Vm>) -> Self {
        Self { vm, batches: VecDeque::new(), unseen: VecDeque::new(), zapping: None }
    }

    /// Returns whether a client is zapping: [`put`](Self::put) must wait.
    pub fn is_zapping(&self) -> bool {
        self.zapping.is_some()
    }

    /// Time at which the first zap without a reply fails.
    pub fn until(&self) -> Option<Instant> {
        self.zapping.as_ref()?.asked.iter().filter_map(|(_, zap)| zap.until()).min()
    }

    pub fn is_waiting(&self) -> bool {
        !self.batches.is_empty() || !self.unseen.is_empty()
    }

    pub fn is_all_unseen(&self) -> bool {
        self.batches.is_empty() && self.zapping.is_none() && !self.unseen.is_empty()
    }

    /// Puts the Resident pages among those picked into quarantine, and has the clients zap them. `layout`, under which
    /// they were picked, is released before the zap. Returns the number of pages. Fails if the kernel cannot register
    /// memory, or a client cannot be asked; then none of the pages is in quarantine.
    pub fn put(
        &mut self,
        layout: Layout<'_>,
        picked: impl Iterator<Item = (Accesses, ColdRun)>,
    ) -> std::io::Result<u64> {
        let vm = self.vm.clone();
        let (views, generation) = (vm.views(), vm.memory.generation());
        let ticket = vm.ticket();
        let marked = self.mark(picked, ticket)?;
        let pages: u64 = marked.iter().map(|(_, run)| run.pages.count()).sum();
        vm.stats().add(Counter::Zapped, pages);
        // Not held during the zap: a discard that a client waits for may need the layout exclusively. `due` checks for
        // changes since then (a view, a hold, an unplug) before any of these pages is evicted.
        drop(layout);
        // From here on none of their units is mapped as a whole: see `unit.rs`.
        for (_, run) in &marked {
            if let Some(region) = vm.region(run.region) {
                let begun = Instant::now();
                region.units().disturb(run.pages, || pause(begun));
            }
        }
        if marked.is_empty() {
            return Ok(0);
        }
        let mut zapping = Zapping { ticket, generation, runs: marked, asked: Vec::new() };
        for view in views {
            let ranges: Vec<Range> = zapping
                .runs
                .iter()
                .filter_map(|(_, run)| Some((view.base(run.region)? + run.pages.start().offset(), run.pages.bytes().0)))
                .collect();
            match view.peer().clone().begin_zap(&ranges) {
                Ok(zap) => zapping.asked.push((view, zap)),
                Err(error) => {
                    vm.stats().add(Counter::Failed, pages);
                    unmark(&vm, &zapping.runs, ticket);
                    return Err(error);
                }
            }
        }
        self.zapping = Some(zapping);
        Ok(pages)
    }

    /// Changes Resident words to Quarantine with this ticket. The caller holds the layout.
    fn mark(
        &self,
        picked: impl Iterator<Item = (Accesses, ColdRun)>,
        ticket: Ticket,
    ) -> std::io::Result<Vec<(Accesses, ColdRun)>> {
        let vm = &self.vm;
        let mut marked: Vec<(Accesses, ColdRun)> = Vec::with_capacity(picked.size_hint().0);
        for (accesses, run) in picked {
            // An unplugged region has freed the memory of its words.
            let Some(region) = vm.region(run.region).filter(|region| !region.is_removed()) else { continue };
            // Registered before the first word is Quarantine: an unregistered page must never be zapped or far.
            match vm.register_or_keep(&region, run.pages) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(error) => {
                    unmark(vm, &marked, ticket);
                    return Err(error);
                }
            }
            let count = region.granule_pages();
            for page in region.granules(run.pages) {
                if !quarantine(region.granule(page).cell(), ticket) {
                    continue;
                }
                match marked.last_mut() {
                    Some((same, last))
                        if *same == accesses && last.region == run.region && last.pages.end() == page =>
                    {
                        last.pages = PageRange::of(last.pages.start(), last.pages.count() + count);
                    }
                    _ => marked.push((accesses, ColdRun { region: run.region, pages: PageRange::of(page, count) })),
                }
                vm.ledger().moved(State::Resident, State::Quarantine, count);
            }
        }
        Ok(marked)
    }

    /// Takes the clients' replies. After the last one, the pages begin to wait for T. Fails if a client did not zap;
    /// then none of these pages is in quarantine any more.
    pub fn take_answers(&mut self, now: Instant) -> std::io::Result<()> {
        let vm = self.vm.clone();
        let Some(mut zapping) = self.zapping.take() else { return Ok(()) };
        let ticket = zapping.ticket;
        while let Some((view, zap)) = zapping.asked.last_mut() {
            match zap.poll(now) {
                Ok(None) => {
                    self.zapping = Some(zapping);
                    return Ok(());
                }
                Ok(Some(kept)) => {
                    for (region, run) in vm.keep_parts(view, &kept) {
                        let released = release(run, ticket, |page| region.granule(page));
                        vm.stats().add(Counter::Failed, released);
                        vm.ledger().moved(State::Quarantine, State::Resident, released);
                    }
                    zapping.asked.pop();
                }
                Err(error) => {
                    let pages = zapping.runs.iter().map(|(_, run)| run.pages.count()).sum();
                    vm.stats().add(Counter::Failed, pages);
                    unmark(&vm, &zapping.runs, ticket);
                    return Err(error);
                }
            }
        }
        let Zapping { generation, runs, .. } = zapping;
        let (unseen, seen): (Vec<_>, Vec<_>) =
            runs.into_iter().partition(|(accesses, _)| *accesses == Accesses::Unseen);
        for (batches, mut runs) in [(&mut self.batches, seen), (&mut self.unseen, unseen)] {
            if runs.is_empty() {
                continue;
            }
            // Runs are popped from the back: the coldest must be last.
            runs.reverse();
            // T counts from here, somewhat later than the zap.
            batches.push_back(Batch { ticket, generation, zapped_at: Instant::now(), runs });
        }
        Ok(())
    }

    /// Takes the next run of a batch that was zapped at least `wait` ago, or `unseen` if its accesses are not seen.
    /// With `whole`, a run may be a whole unit. The caller holds the layout: after a hold, a new view or
    /// [`Vm::set_may_pin`] has had it exclusively, it is respected here.
    pub fn due(&mut self, wait: Duration, unseen: Duration, whole: bool, now: Instant) -> Option<Due> {
        let vm = &self.vm;
        let seen = next_due(vm, &mut self.batches, wait, whole, now);
        seen.or_else(|| next_due(vm, &mut self.unseen, wait.max(unseen), whole, now))
    }

    pub fn release_all(&mut self) {
        for batch in self.batches.drain(..).chain(self.unseen.drain(..)) {
            unmark(&self.vm, &batch.runs, batch.ticket);
        }
        // Replies to these zaps are ignored.
        if let Some(zapping) = self.zapping.take() {
            unmark(&self.vm, &zapping.runs, zapping.ticket);
        }
    }

    /// Resets the quarantine after a failure during a batch, or a panic of the worker: all its pages become Resident.
    /// Moves that the worker had not booked are unknown, so the gauge is set to the pages that a discard or a fault has
    /// locked now, which book them. A page that is moved and not booked yet makes the gauge too low by one. Fails if
    /// the state file cannot be read.
    pub fn forget(&mut self) -> Result<(), StateError> {
        let _layout = self.vm.memory.layout();
        self.batches.clear();
        self.unseen.clear();
        self.zapping = None;
        let mut held = 0;
        for (region, record) in self.vm.regions().iter().zip(self.vm.state.regions()) {
            let written = self.vm.state.written_words(&record)?.into_iter();
            for page in written.flat_map(|pages| region.granules(pages)) {
                let cell = region.granule(page).cell();
                let word = cell.load();
                if !matches!(word.state(), State::Quarantine | State::Evicting) {
                    continue;
                }
                if word.is_locked() {
                    held += region.granule_pages();
                } else {
                    cell.swap(word, Word::new(State::Resident, word.age()));
                }
            }
        }
        self.vm.stats().set(Counter::Quarantined, held);
        Ok(())
    }
}

fn next_due(vm: &Vm, batches: &mut VecDeque<Batch>, wait: Duration, whole: bool, now: Instant) -> Option<Due> {
    loop {
        let batch = batches.front_mut()?;
        if batch.generation != vm.memory.generation() {
            // A view was added: these pages are not zapped there.
            let batch = batches.pop_front().expect("looked at above");
            unmark(vm, &batch.runs, batch.ticket);
            continue;
        }
        let in_quarantine = now.saturating_duration_since(batch.zapped_at);
        if vm.held().is_some() || in_quarantine < wait {
            return None;
        }
        let Some((accesses, cold)) = batch.runs.pop() else {
            batches.pop_front();
            continue;
        };
        let Some(region) = vm.region(cold.region).filter(|region| !region.is_removed()) else { continue };
        // Below the limit, a whole unit is evicted as one extent: by one punch, which splits no huge page.
        let start = cold.pages.start();
        let whole = whole && start.0.is_multiple_of(PAGES_PER_UNIT) && cold.pages.count() >= PAGES_PER_UNIT;
        let most = if whole { PAGES_PER_UNIT } else { EVICT_RUN.max(region.granule_pages()) };
        let unit_end = PageIdx::first_of_unit(start.unit() + 1);
        let run = PageRange::of(start, most).before(cold.pages.end()).before(unit_end);
        let rest = ColdRun { pages: cold.pages.from(run.end()), ..cold };
        if !rest.pages.is_empty() {
            batch.runs.push((accesses, rest));
        }
        return Some(Due { ticket: batch.ticket, accesses, region, run });
    }
}

/// Releases pages from quarantine. A minor fault maps those that were zapped.
fn unmark(vm: &Vm, runs: &[(Accesses, ColdRun)], ticket: Ticket) {
    for (_, run) in runs {
        // Reading the words of an unplugged region would allocate their memory again.
        if let Some(region) = vm.region(run.region).filter(|region| !region.is_removed()) {
            let released = release(run.pages, ticket, |page| region.granule(page));
            vm.ledger().moved(State::Quarantine, State::Resident, released);
        }
    }
}

#[cfg(test)]
mod tests {
    use ballast_base::wire::VmId;
    use ballast_base::{Bytes, Extents, PageCount};
    use ballast_handover::state_file::StateFile;
    use ballast_store::{Budget, RamOptions, RamStore};
    use ballast_sys::memfd;

    use super::*;
    use crate::vm::Tuning;
    use crate::vm::far::stores::{NearTier, Stores};
    use crate::vm::ram::RamFile;
    use crate::vm::region_table::LOST;

    /// A VM with a region of eight pages and no process.
    fn vm() -> Arc<Vm> {
        let size = PageCount(8).bytes();
        let ram = RamFile::new(memfd::create("ballast-test-ram", size).expect("memfd")).expect("stat");
        let state = StateFile::create(VmId([3; 16]), "test").expect("state");
        state.add_region(&[ram.id], &Extents::one(Bytes(0), size).expect("good"), None).expect("region");
        let epoch = state.take_over(std::process::id(), 1, LOST).expect("no journal");
        let (store, _arena) = RamStore::create(RamOptions::new(Budget::new(Bytes(1 << 20)))).expect("store");
        let near = NearTier { number: ballast_base::store::RAM_STORE, name: "RAM store", store: Arc::new(store) };
        let stores = Stores::new(vec![near], Vec::new());
        let vm = Arc::new(Vm::new(state, epoch, stores, Tuning::default(), Arc::new(|_: &str, _| ())));
        vm.open_region(&[ram]).expect("region");
        vm
    }

    #[test]
    fn pages_whose_accesses_are_not_seen_stay_for_longer_than_t() {
        let vm = vm();
        let mut quarantine = Quarantine::new(vm.clone());
        let run = |guess, page| (guess, ColdRun { region: 0, pages: PageRange::of(PageIdx(page), 4) });
        let runs = vec![run(Accesses::Unseen, 0), run(Accesses::Seen, 4)];
        let (ticket, generation, asked) = (vm.ticket(), vm.memory.generation(), Vec::new());
        quarantine.zapping = Some(Zapping { ticket, generation, runs, asked });
        let (t, longer, now) = (Duration::from_millis(10), Duration::from_secs(1), Instant::now());
        quarantine.take_answers(now).expect("no client");
        let later = Instant::now();
        let mut due = |after| {
            quarantine.due(t, longer, false, after).map(|due| (due.accesses, due.run.start().0, due.run.count()))
        };
        assert_eq!(due(now), None);
        assert_eq!(due(later + t), Some((Accesses::Seen, 4, 4)));
        assert_eq!(due(now + longer), None);
        assert_eq!(due(later + longer), Some((Accesses::Unseen, 0, 4)));
        assert!(due(later + longer).is_none() && !quarantine.is_waiting());
    }

    #[test]
    fn pages_that_a_discard_or_a_fault_takes_during_a_reset_are_booked_once() {
        let vm = vm();
        let (region, ticket) = (vm.region(0).expect("open"), vm.ticket());
        let cell = |page| region.granule(PageIdx(page)).cell();
        for page in 0..8 {
            assert!(quarantine(cell(page), ticket));
        }
        vm.ledger().moved(State::Resident, State::Quarantine, 8);
        let word = cell(0).load();
        let mut discard = cell(0).lock(word, word).expect("free");
        assert!(cell(1).swap(word, Word::INITIAL), "a fault");
        Quarantine::new(vm.clone()).forget().expect("a state file");
        let left = || vm.stats().get(Counter::Quarantined);
        assert_eq!(left(), 1, "a discard holds it and will book it");
        vm.ledger().moved(State::Quarantine, State::Resident, 1);
        discard.publish(Word::INITIAL);
        drop(discard);
        vm.ledger().moved(State::Quarantine, State::Resident, 1);
        assert_eq!(left(), 0);
        assert!((0..8).all(|page| cell(page).load().state() == State::Resident));
    }
}
