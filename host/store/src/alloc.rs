//! Slots for blobs: which slab gives the next one, when a slab is taken into use, when its memory is returned.
//!
//! Before: `ram` knows the size of a blob. After: `slab` holds the slot; the budget is charged; a slab whose last slot
//! was freed is punched out of the arena.
//! Threads: any. Processes share only the arena; the hints and queues here are this process's own and may be
//! incomplete, which costs memory for a while and never correctness. When a process or its use of the arena ends, that
//! changes nothing in the arena: the next one may have it by then, and `recover` finds emptied slabs. Quick path: no
//! lock. Slow path (a slab becomes full, or no longer is): a lock of this process, per size class, never held during a
//! system call.
//! Promise: every slab that is not FREE is charged exactly once; nothing is charged when the budget refuses.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ballast_base::Bytes;
use ballast_base::store::Recovered;

use crate::arena::Arena;
use crate::budget::{Account, Budget};
use crate::slab::{LiveSlots, Phase, Released, Slab, State, Taken};

const NO_SLAB: u32 = u32::MAX;

/// A slab and a slot in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) slab: u32,
    pub(crate) slot: usize,
}

/// A slot that was just taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocated {
    pub(crate) place: Place,
    pub(crate) generation: u32,
}

/// One process's allocator over an arena.
#[derive(Debug)]
pub(crate) struct Allocator {
    arena: Arena,
    /// What this process is charged for the arena.
    account: Account,
    /// Per class, the slab to try first.
    hints: Vec<AtomicU32>,
    /// Per class, slabs that were full and have free slots again. May contain slabs that have changed since.
    with_room: Vec<Mutex<Vec<u32>>>,
    /// Slabs known to be FREE. May be incomplete: another process frees slabs too.
    free: Mutex<Vec<u32>>,
    /// RETIRING slabs that `settle` is to punch, and how many may wait for it when the budget is short; 0 if all are
    /// punched at once.
    to_punch: Mutex<VecDeque<u32>>,
    to_punch_max: usize,
    punch_failures: AtomicU64,
}

/// The runs of neighbours among these numbers, which are in order.
fn runs(numbers: &[u32]) -> impl Iterator<Item = Range<u32>> {
    numbers.chunk_by(|a, b| a + 1 == *b).map(|run| run[0]..run[0] + run.len() as u32)
}

/// The slab table contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Validating a store: {0}")]
pub struct Inconsistent(pub String);

/// A panic elsewhere cannot leave these plain lists half changed, so a poisoned lock is usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Allocator {
    /// Begin with the contents of the arena. They are charged, above the limit if need be.
    pub(crate) fn new(arena: Arena, budget: Arc<Budget>, to_punch_max: usize) -> Self {
        let capacities = arena.shape().capacities;
        let allocator = Self {
            arena,
            account: Account::new(budget),
            hints: capacities.iter().map(|_| AtomicU32::new(NO_SLAB)).collect(),
            with_room: capacities.iter().map(|_| Mutex::default()).collect(),
            free: Mutex::new(Vec::new()),
            to_punch: Mutex::new(VecDeque::new()),
            to_punch_max,
            punch_failures: AtomicU64::new(0),
        };
        allocator.arena.raise_stamp();
        if allocator.arena.header_was_lost() {
            let held = (0..allocator.arena.fresh()).filter(|number| !allocator.is_free(*number)).count();
            allocator.arena.held_set(held as u32);
        }
        allocator.learn();
        allocator.resync();
        allocator
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    fn capacity(&self, class: usize) -> usize {
        self.arena.shape().capacities[class]
    }

    fn slab_charge(&self) -> i64 {
        self.arena.shape().charge_bytes as i64
    }

    /// Is the budget nearly used up, by any store, apart from the part that this store must leave to others?
    pub(crate) fn is_short(&self) -> bool {
        crate::is_short(self.account.budget().used().0, self.account.most(self.slab_charge()).0)
    }

    pub(crate) fn budget_limit(&self) -> Bytes {
        self.account.budget().limit()
    }

    /// Slabs that could not be punched; they stay charged until `recover`.
    pub(crate) fn punch_failures(&self) -> u64 {
        self.punch_failures.load(Ordering::Relaxed)
    }

    /// Fill hints and queues from the slab table.
    fn learn(&self) {
        let mut free = lock(&self.free);
        free.clear();
        lock(&self.to_punch).clear();
        for queue in &self.with_room {
            lock(queue).clear();
        }
        for hint in &self.hints {
            hint.store(NO_SLAB, Ordering::Relaxed);
        }
        for number in 0..self.arena.fresh() {
            match self.arena.slab(number).state() {
                Some(State { phase: Phase::Free, .. }) => free.push(number),
                Some(State { phase: Phase::Active, class, used, .. }) if used < self.capacity(class) => {
                    lock(&self.with_room[class]).push(number);
                }
                _ => {}
            }
        }
        // Low numbers first: the table then stays dense.
        free.reverse();
    }

    /// Make the charge equal to the real contents of the arena: another process may have taken or freed slabs. A slab
    /// that this process is moving at this moment may be counted wrongly until the next call.
    pub(crate) fn resync(&self) -> u32 {
        let held = self.arena.held();
        self.account.set(i64::from(held) * self.slab_charge());
        held
    }

    /// A slot of this class; `None` if there is none and no budget for more.
    pub(crate) fn alloc(&self, class: usize) -> Option<Allocated> {
        let hint = self.hints[class].load(Ordering::Relaxed);
        if let Some(allocated) = self.take_from(hint, class) {
            return Some(allocated);
        }
        let Some((allocated, new_slab)) = self.alloc_slowly(class) else {
            let emptied = lock(&self.to_punch).pop_back();
            emptied.into_iter().for_each(|number| self.retire(number..number + 1));
            return None;
        };
        if new_slab {
            // The slab is charged already. Other threads may use it now; it cannot be retired, because we hold a slot.
            self.arena.populate(allocated.place.slab);
        }
        Some(allocated)
    }

    fn take_from(&self, number: u32, class: usize) -> Option<Allocated> {
        if number >= self.arena.slabs() {
            return None;
        }
        Self::allocated(number, self.arena.slab(number).take(class))
    }

    fn allocated(slab: u32, taken: Taken) -> Option<Allocated> {
        match taken {
            Taken::Slot { slot, generation } => Some(Allocated { place: Place { slab, slot }, generation }),
            Taken::No => None,
        }
    }

    /// Find another slab for the class: one with a free slot, else a free slab (then the second value is true). The
    /// class's lock is held, so that two threads do not each bring in a slab and lose the other.
    fn alloc_slowly(&self, class: usize) -> Option<(Allocated, bool)> {
        let mut with_room = lock(&self.with_room[class]);
        let hint = self.hints[class].load(Ordering::Relaxed);
        if let Some(allocated) = self.take_from(hint, class) {
            return Some((allocated, false));
        }
        while let Some(number) = with_room.pop() {
            if let Some(allocated) = self.take_from(number, class) {
                self.hints[class].store(number, Ordering::Relaxed);
                return Some((allocated, false));
            }
        }
        let number = self.activate(class)?;
        self.hints[class].store(number, Ordering::Relaxed);
        Self::allocated(number, self.arena.slab(number).claim(class)).map(|allocated| (allocated, true))
    }

    /// Take a free slab into use for `class`, with one slot reserved; `None` if the budget or the arena is used up.
    fn activate(&self, class: usize) -> Option<u32> {
        let charge = self.slab_charge();
        // A slab that still waits to be punched is reused without that, if the budget would grant another one.
        let emptied = lock(&self.to_punch).pop_back().filter(|number| self.is_in(*number, Phase::Retiring));
        if let Some(number) = emptied {
            self.account.adjust(-charge);
            if !self.account.try_charge(charge) {
                self.account.adjust(charge);
                // `alloc` punches it when the lock that is held here is free.
                lock(&self.to_punch).push_back(number);
                return None;
            }
            self.arena.slab(number).retired();
            if self.arena.slab(number).activate(class) {
                return Some(number);
            }
            self.arena.held_sub();
            self.account.adjust(-charge);
        }
        if !self.account.try_charge(charge) {
            return None;
        }
        let Some(number) = self.activate_any(class) else {
            self.account.adjust(-charge);
            return None;
        };
        self.arena.held_add();
        Some(number)
    }

    fn activate_any(&self, class: usize) -> Option<u32> {
        let mut free = lock(&self.free);
        while let Some(number) = free.pop() {
            if self.arena.slab(number).activate(class) {
                return Some(number);
            }
        }
        while let Some(number) = self.arena.take_fresh() {
            if self.arena.slab(number).activate(class) {
                return Some(number);
            }
        }
        // Every number was used once. Another process may have freed some without our knowledge.
        for number in 0..self.arena.slabs() {
            if self.is_free(number) {
                free.push(number);
            }
        }
        while let Some(number) = free.pop() {
            if self.arena.slab(number).activate(class) {
                return Some(number);
            }
        }
        None
    }

    fn is_free(&self, number: u32) -> bool {
        self.is_in(number, Phase::Free)
    }

    fn is_in(&self, number: u32, phase: Phase) -> bool {
        self.arena.slab(number).state().is_some_and(|state| state.phase == phase)
    }

    /// The slab of a taken place, with its class; `None` if the place is not a taken slot of an active slab.
    pub(crate) fn occupied(&self, place: Place) -> Option<(Slab<'_>, usize)> {
        // A range check is not enough: reading the entry of a slab that was never used would make a page of the table
        // present.
        if place.slab >= self.arena.fresh() {
            return None;
        }
        let slab = self.arena.slab(place.slab);
        let state = slab.state().filter(|state| state.phase == Phase::Active)?;
        (place.slot < self.capacity(state.class) && slab.is_set(place.slot)).then_some((slab, state.class))
    }

    /// Give a slot back; true for the one caller that did.
    pub(crate) fn free(&self, place: Place) -> bool {
        let slab = self.arena.slab(place.slab);
        if !slab.clear(place.slot) {
            return false;
        }
        match slab.release() {
            Released::StillUsed | Released::Damaged => {}
            Released::NoLongerFull { class } => {
                let mut with_room = lock(&self.with_room[class]);
                // The hint's slots are found without that list, which would get it again each time it was full.
                if self.hints[class].load(Ordering::Relaxed) != place.slab {
                    with_room.push(place.slab);
                }
            }
            Released::Empty => self.put_off(place.slab),
        }
        true
    }

    /// Have a RETIRING slab punched by the next `settle`, if that is wanted and others do not need the budget.
    fn put_off(&self, number: u32) {
        let most = if self.to_punch_max == 0 || self.is_short() { self.to_punch_max } else { usize::MAX };
        let surplus = {
            let mut to_punch = lock(&self.to_punch);
            to_punch.push_back(number);
            if to_punch.len() > most { to_punch.pop_front() } else { None }
        };
        if let Some(number) = surplus {
            self.retire(number..number + 1);
        }
    }

    /// Punch emptied slabs that were put off, except the last `keep`: unpunched ones are quicker to reuse.
    pub(crate) fn settle(&self, keep: usize) {
        let mut emptied: Vec<u32> = {
            let mut to_punch = lock(&self.to_punch);
            let surplus = to_punch.len().saturating_sub(keep);
            to_punch.drain(..surplus).collect()
        };
        emptied.sort_unstable();
        let runs: Vec<Range<u32>> = runs(&emptied).collect();
        if runs.len() > 1 {
            self.arena.unmap(&runs);
        }
        for run in runs {
            self.retire(run);
        }
    }

    /// Punch those slabs of a run that are RETIRING, and make them FREE. If the kernel refuses, they stay as they are,
    /// and charged. A slab that is not: another opening of the arena has swept it.
    fn retire(&self, run: Range<u32>) {
        let numbers: Vec<u32> = run.filter(|number| self.is_in(*number, Phase::Retiring)).collect();
        for run in runs(&numbers) {
            if self.arena.punch(&run).is_err() {
                self.punch_failures.fetch_add(run.len() as u64, Ordering::Relaxed);
                continue;
            }
            run.for_each(|number| self.make_free(number));
        }
    }

    fn make_free(&self, number: u32) {
        self.arena.slab(number).retired();
        self.arena.held_sub();
        self.account.adjust(-self.slab_charge());
        lock(&self.free).push(number);
    }

    /// Mark and sweep: keep the slots that `live` names, free the others, make every count agree. No other thread or
    /// process may use the arena meanwhile. The slabs that it empties are punched at once, or (`later`) by the next
    /// `settle`, when others use the arena again.
    pub(crate) fn recover(&self, live: impl Iterator<Item = Place>, later: bool) -> Recovered {
        let mut report = Recovered::default();
        let fresh = self.arena.fresh_rebuild().unwrap_or_else(|_| self.arena.fresh());
        let mut marks = vec![LiveSlots::default(); fresh as usize];
        for place in live {
            match marks.get_mut(place.slab as usize) {
                Some(slots) if self.occupied(place).is_some() => slots.mark(place.slot),
                _ => report.missing += 1,
            }
        }
        let (mut held, mut emptied, mut punched) = (0, Vec::new(), Vec::new());
        for (number, slots) in (0..fresh).zip(&marks) {
            let slab = self.arena.slab(number);
            let (was, free_before) = (slab.count(), self.is_free(number));
            let kept = if free_before && was == 0 { 0 } else { slab.sweep(slots) };
            report.kept_blobs += kept as u64;
            report.freed_slots += (was - kept) as u64;
            if kept > 0 {
                held += 1;
                continue;
            }
            report.freed_slabs += u64::from(!free_before);
            // A FREE slab is punched too: a late reader may have made one of its pages present.
            if later && !free_before { emptied.push(number) } else { punched.push(number) }
        }
        for run in runs(&punched) {
            if self.arena.punch(&run).is_ok() {
                run.for_each(|number| self.arena.slab(number).retired());
                continue;
            }
            let left = run.filter(|number| self.is_in(*number, Phase::Retiring)).count();
            self.punch_failures.fetch_add(left as u64, Ordering::Relaxed);
            report.freed_slabs = report.freed_slabs.saturating_sub(left as u64);
            held += left as u32;
        }
        self.arena.held_set(held + emptied.len() as u32);
        self.learn();
        lock(&self.to_punch).extend(emptied);
        self.resync();
        report
    }

    /// Check the slab table while it is not used. Returns the number of slots taken.
    pub(crate) fn validate(&self) -> Result<u64, Inconsistent> {
        let (mut held, mut taken) = (0, 0);
        for number in 0..self.arena.fresh() {
            let slab = self.arena.slab(number);
            let state =
                slab.state().ok_or_else(|| Inconsistent(format!("the state of slab {number} means nothing")))?;
            let set = slab.count();
            let inside = (0..self.capacity(state.class)).filter(|&slot| slab.is_set(slot)).count();
            if state.phase == Phase::Retiring || set != state.used || inside != set {
                return Err(Inconsistent(format!(
                    "slab {number} has {set} bits set, {inside} of them slots: {state:?}"
                )));
            }
            held += u32::from(state.phase == Phase::Active);
            taken += set as u64;
        }
        if held != self.arena.held() {
            return Err(Inconsistent(format!("{held} slabs are active, the header says {}", self.arena.held())));
        }
        let known: HashSet<u32> = lock(&self.free).iter().copied().collect();
        if let Some(active) = known.iter().find(|&&number| !self.is_free(number)) {
            return Err(Inconsistent(format!("slab {active} is listed as free and is not")));
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests;
