//! Slots for blobs: chooses the slab for the next one, takes slabs into use, and returns their memory.
//!
//! Before: `ram` knows the size of a blob. After: `slab` holds the slot, the budget is charged, and a slab whose last
//! slot was freed is punched out of the arena.
//! Threads: any. Processes share only the arena. The hints and queues belong to this process and may be incomplete,
//! which may waste memory for a while but is never incorrect. A process that stops using the arena changes nothing in
//! it, since its successor may already use it; `recover` finds emptied slabs. Fast path: no lock. Slow path (a slab
//! becomes full, or no longer is): one lock of this process per size class, never held during a system call.
//! Promise: each slab that is not FREE is charged exactly once; nothing is charged if the budget refuses.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use ballast_base::Bytes;
use ballast_base::store::Recovered;
use ballast_sys::lock::Lock;

use crate::arena::Arena;
use crate::budget::{Account, Budget};
use crate::slab::{LiveSlots, Phase, Released, Slab, State, Taken};

const NO_SLAB: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) slab: u32,
    pub(crate) slot: usize,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocated {
    pub(crate) place: Place,
    pub(crate) generation: u32,
}

#[derive(Debug)]
pub(crate) struct Allocator {
    arena: Arena,
    account: Account,
    /// Per class, the slab to try first.
    hints: Vec<AtomicU32>,
    /// Per class, slabs that were full and got free slots. They may have changed since.
    with_room: Vec<Mutex<Vec<u32>>>,
    /// Slabs known to be FREE. Another process may free more.
    free: Mutex<Vec<u32>>,
    /// RETIRING slabs that the next `settle` punches. At most `to_punch_max` wait if the budget is short.
    to_punch: Mutex<VecDeque<u32>>,
    to_punch_max: usize,
}

fn runs(numbers: &[u32]) -> impl Iterator<Item = Range<u32>> {
    numbers.chunk_by(|a, b| a + 1 == *b).map(|run| run[0]..run[0] + run.len() as u32)
}

/// The slab table contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Validating a store: {0}")]
pub struct Inconsistent(pub String);

impl Allocator {
    /// Begins with the contents of the arena, which are charged even above the limit.
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

    /// Whether little is left of the budget, apart from the parts of other stores.
    pub(crate) fn is_short(&self) -> bool {
        crate::is_short(self.account.budget().used().0, self.account.most(self.slab_charge()).0)
    }

    pub(crate) fn budget_limit(&self) -> Bytes {
        self.account.budget().limit()
    }

    fn learn(&self) {
        let mut free = self.free.locked();
        free.clear();
        self.to_punch.locked().clear();
        for queue in &self.with_room {
            queue.locked().clear();
        }
        for hint in &self.hints {
            hint.store(NO_SLAB, Ordering::Relaxed);
        }
        for number in 0..self.arena.fresh() {
            match self.arena.slab(number).state() {
                Some(State { phase: Phase::Free, .. }) => free.push(number),
                Some(State { phase: Phase::Active, class, used, .. }) if used < self.capacity(class) => {
                    self.with_room[class].locked().push(number);
                }
                _ => {}
            }
        }
        // Low numbers are used first, so that the table stays dense.
        free.reverse();
    }

    /// Sets the charge to the real contents of the arena, because another process may have taken or freed slabs. A slab
    /// whose phase this process is changing at that moment may be miscounted until the next call.
    pub(crate) fn resync(&self) -> u32 {
        let held = self.arena.held();
        self.account.set(i64::from(held) * self.slab_charge());
        held
    }

    /// A slot of this class; `None` if the class has none and the budget no slab.
    pub(crate) fn alloc(&self, class: usize) -> Option<Allocated> {
        let hint = self.hints[class].load(Ordering::Relaxed);
        if let Some(allocated) = self.take_from(hint, class) {
            return Some(allocated);
        }
        let Some((allocated, new_slab)) = self.alloc_slowly(class) else {
            let emptied = self.to_punch.locked().pop_back();
            emptied.into_iter().for_each(|number| self.retire(number..number + 1));
            return None;
        };
        if new_slab {
            // The slab is charged, and other threads may use it from now on. Our slot keeps it from being retired.
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

    /// Finds another slab for the class: one with a free slot, else a free slab (then the second value is true). Holds
    /// the class's lock, so that of two threads that take a free slab, neither overwrites the other's hint.
    fn alloc_slowly(&self, class: usize) -> Option<(Allocated, bool)> {
        let mut with_room = self.with_room[class].locked();
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

    /// Takes a free slab into use for `class`, with one slot reserved; `None` if the budget or the arena is used up.
    fn activate(&self, class: usize) -> Option<u32> {
        let charge = self.slab_charge();
        // A slab that waits for its punch is reused unpunched, if the budget would allow another one.
        let emptied = self.to_punch.locked().pop_back().filter(|number| self.is_in(*number, Phase::Retiring));
        if let Some(number) = emptied {
            self.account.adjust(-charge);
            if !self.account.try_charge(charge) {
                self.account.adjust(charge);
                // `alloc` punches it after it has released the class's lock.
                self.to_punch.locked().push_back(number);
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
        let mut free = self.free.locked();
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
        // Every slab was used once. Another process may have freed some since.
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

    /// The slab of a taken place, and its class; `None` if the place is not a taken slot of an active slab.
    pub(crate) fn occupied(&self, place: Place) -> Option<(Slab<'_>, usize)> {
        // Not `slabs()`: to read the entry of a slab that was never used would allocate a page of the table.
        if place.slab >= self.arena.fresh() {
            return None;
        }
        let slab = self.arena.slab(place.slab);
        let state = slab.state().filter(|state| state.phase == Phase::Active)?;
        (place.slot < self.capacity(state.class) && slab.is_set(place.slot)).then_some((slab, state.class))
    }

    pub(crate) fn free(&self, place: Place) -> bool {
        let slab = self.arena.slab(place.slab);
        if !slab.clear(place.slot) {
            return false;
        }
        match slab.release() {
            Released::StillUsed | Released::Damaged => {}
            Released::NoLongerFull { class } => {
                let mut with_room = self.with_room[class].locked();
                // The hint's free slots are found without this list, which would otherwise gain an entry each time.
                if self.hints[class].load(Ordering::Relaxed) != place.slab {
                    with_room.push(place.slab);
                }
            }
            Released::Empty => self.put_off(place.slab),
        }
        true
    }

    /// Leaves a RETIRING slab to the next `settle`; punches the oldest one now if too many wait.
    fn put_off(&self, number: u32) {
        let most = if self.is_short() { self.to_punch_max } else { usize::MAX };
        let surplus = {
            let mut to_punch = self.to_punch.locked();
            to_punch.push_back(number);
            if to_punch.len() > most { to_punch.pop_front() } else { None }
        };
        if let Some(number) = surplus {
            self.retire(number..number + 1);
        }
    }

    /// Punches the slabs that wait, except the last `keep`: a slab is quicker to reuse unpunched.
    pub(crate) fn settle(&self, keep: usize) {
        let mut emptied: Vec<u32> = {
            let mut to_punch = self.to_punch.locked();
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

    /// Punches those slabs of a run that are RETIRING, and makes them FREE. Others were swept through another mapping
    /// of the arena. If the kernel refuses, they stay RETIRING and charged.
    fn retire(&self, run: Range<u32>) {
        let numbers: Vec<u32> = run.filter(|number| self.is_in(*number, Phase::Retiring)).collect();
        for run in runs(&numbers) {
            if self.arena.punch(&run).is_ok() {
                run.for_each(|number| self.make_free(number));
            }
        }
    }

    fn make_free(&self, number: u32) {
        self.arena.slab(number).retired();
        self.arena.held_sub();
        self.account.adjust(-self.slab_charge());
        self.free.locked().push(number);
    }

    /// Mark and sweep: keeps the slots that `live` names, frees the others, and corrects all counts. No other thread or
    /// process may use the arena during this call. The next `settle`, when others may, punches emptied slabs.
    pub(crate) fn recover(&self, live: impl Iterator<Item = Place>) -> Recovered {
        let mut report = Recovered::default();
        let fresh = self.arena.fresh_rebuild().unwrap_or_else(|_| self.arena.fresh());
        let mut marks = vec![LiveSlots::default(); fresh as usize];
        for place in live {
            match marks.get_mut(place.slab as usize) {
                Some(slots) if self.occupied(place).is_some() => slots.mark(place.slot),
                _ => report.missing += 1,
            }
        }
        let (mut held, mut emptied, mut free) = (0, Vec::new(), Vec::new());
        for (number, slots) in (0..fresh).zip(&marks) {
            let slab = self.arena.slab(number);
            let was = slab.count();
            if self.is_free(number) && was == 0 {
                free.push(number);
                continue;
            }
            let kept = slab.sweep(slots);
            report.kept_blobs += kept as u64;
            report.freed_slots += (was - kept) as u64;
            held += 1;
            if kept == 0 {
                emptied.push(number);
            }
        }
        report.freed_slabs = emptied.len() as u64;
        for run in runs(&free) {
            // A late read may have allocated one of its pages. If the kernel refuses, they stay allocated.
            let _ = self.arena.punch(&run);
        }
        self.arena.held_set(held);
        self.learn();
        self.to_punch.locked().extend(emptied);
        self.resync();
        report
    }

    /// Checks the slab table, which nobody may use. Returns the number of taken slots.
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
        let known: HashSet<u32> = self.free.locked().iter().copied().collect();
        if let Some(active) = known.iter().find(|&&number| !self.is_free(number)) {
            return Err(Inconsistent(format!("slab {active} is listed as free and is not")));
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests;
