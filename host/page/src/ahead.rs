//! Ahead: maps neighbouring pages that need no bytes from a store, before the guest touches them.
//!
//! Before: a thread touches memory in order, and a fault worker decided how far ahead to go. After: pages in quarantine
//! are Resident and mapped; zero holes are filled.
//! Threads: fault workers. Units: base pages.
//! Promise: each page is moved under its lock, as by its own fault; a locked page or another state ends the run.

use ballast_base::{PageIdx, PageRange};

use crate::memory::Mapped;
use crate::outcome::Move;
use crate::page_state::{Cell, Locked, State, Word};

/// Makes pages in Quarantine or Evicting Resident, from `first` on, and maps them. Returns their moves. A page that the
/// kernel does not map is Resident all the same; a touch of it faults, and that fault reports the reason.
pub fn map_ahead<'a>(
    first: PageIdx,
    cells: impl Iterator<Item = Cell<'a>>,
    memory: &impl Mapped,
    touched: fn(u8) -> u8,
) -> Vec<Move> {
    let wants = |state| matches!(state, State::Quarantine | State::Evicting);
    let locks = lock_run(cells, wants, |from| Word::new(State::Resident, touched(from.age())));
    let _ = memory.map_run(PageRange::of(first, locks.len() as u64));
    locks.iter().map(|(from, lock)| Move { from: *from, to: lock.word() }).collect()
}

/// Fills zero holes, from `first` on: of Zero pages, and of Resident ones that are not in the file. Stops at the first
/// page that is in the file. Returns the moves of the filled pages.
pub fn zero_ahead<'a>(first: PageIdx, cells: impl Iterator<Item = Cell<'a>>, memory: &impl Mapped) -> Vec<Move> {
    let wants = |state| matches!(state, State::Resident | State::Zero);
    let mut locks = lock_run(cells, wants, |from| from);
    if locks.is_empty() {
        return Vec::new();
    }
    let filled = memory.zero_run(PageRange::of(first, locks.len() as u64)).unwrap_or(0);
    let filled = locks.iter_mut().take(filled as usize);
    let resident = |from: Word| if from.state() == State::Zero { Word::new(State::Resident, 0) } else { from };
    filled
        .map(|(from, lock)| {
            lock.set(resident(*from));
            Move { from: *from, to: lock.word() }
        })
        .collect()
}

/// Locks neighbouring pages in these states, up to the first other or locked one. Returns locks and words before.
pub fn lock_run<'a>(
    cells: impl Iterator<Item = Cell<'a>>,
    wants: impl Fn(State) -> bool,
    to: impl Fn(Word) -> Word,
) -> Vec<(Word, Locked<'a>)> {
    cells
        .map_while(|cell| {
            let from = cell.load();
            let is_free = wants(from.state()) && !from.is_locked();
            is_free.then(|| cell.lock(from, to(from))).flatten().map(|lock| (from, lock))
        })
        .collect()
}
