//! The page-state word: one atomic `u64` per guest page, in memory that outlives engines.
//!
//! Before: `region` maps the words. After: `fault` and `evict` change them, `recover` repairs them after a death.
//! Threads: any number of workers, of any number of engines, at once; every change is one compare-exchange.
//! Promise: a word changes only as the table says. `tests/loom.rs` checks the changes against a modelled kernel.
//!
//! ```text
//! bits  0..4   state
//! |   bit   4      lock: one worker owns this page; all others retry later
//! bit   5      mark: an earlier spill pass found the page Far in RAM, under this handle (Far, Restoring)
//! bits  6..8   reserved, zero
//! |   bits  8..16  age, defined by heat; while Far or Zero, the time stamp of the eviction; 0 after a refault
//! bits 16..24  store number (Far, Restoring)
//! bits 24..64  handle in that store (Far, Restoring) or ticket of the batch (Quarantine, Evicting)
//! ```
//!
//! # Truth table
//!
//! | State | In the file | Mapped | A guest touch |
//! |---|---|---|---|
//! | Resident | yes, or never touched, or discarded | yes, or not yet again | runs on; if unmapped, is mapped again |
//! | Quarantine(ticket) | yes | no, once the zap is acknowledged | faults; mapped again, Resident |
//! | Evicting(ticket) | yes | no | faults; mapped again, Resident; the copy is dropped |
//! | Evicting(ticket), locked by reclaim | yes | no | waits for this page |
//! | Far, locked by reclaim | being punched | no | waits for this page |
//! | Far | no, or filled by a foreign mapper | no | faults |
//! | Far, locked by fault | no, or filled by a foreign mapper | no | waits for this page |
//! | Far, locked by spill | no | no | waits for this page |
//! | Restoring (always locked) | being filled | becoming so | waits for this page |
//! | Zero | no (locked by reclaim: being punched) | no | faults; a page of zeros, Resident |
//! | Poisoned | no, or its memory failed and cannot be read | no | memory error |
//! | the word itself was lost ([`Word::LOST`], always locked) | ? | ? | waits until recovery |
//!
//! The threads that change it, and how:
//!
//! - **Resident**. Reclaim: to Quarantine(ticket), by CAS. Fault: to Poisoned, under the lock, if its memory failed (so
//!   from Quarantine and Evicting).
//! - **Quarantine(ticket)**. Fault: to Resident, under the lock. Reclaim: to Evicting with the same ticket, by CAS,
//!   after T; with the lock, if reclaim is forced.
//! - **Evicting(ticket)**. Fault, discard: to Resident, under the lock. Reclaim: to Far or Zero **with** the lock, by
//!   CAS from the same ticket; to Resident, by CAS, if the page is pinned or cannot be read or stored.
//! - **Evicting(ticket), locked by reclaim**, which is forced: to Far or Zero, still locked; unlocks as Resident if the
//!   page is pinned or cannot be read or stored.
//! - **Far, locked by reclaim**. Reclaim: unlocks it after the punch.
//! - **Far**. Fault: takes the lock. Discard: to Resident under the lock. Spill: sets the mark, by CAS; to Far in
//!   another store, under the lock.
//! - **Far, locked by fault**. Fault: reads the copy; to Restoring when it has the bytes; back to Far if the store is
//!   busy; to Poisoned if the store lost the page. A foreign mapper's zeros in the file are replaced by the copy; any
//!   other bytes in the file are the page now: to Resident, or back to Far if that is impossible now.
//! - **Far, locked by spill**. Spill: unlocks it as Far, in the old store or the new one.
//! - **Restoring**. Fault: to Resident; back to Far if the hole could not be filled.
//! - **Zero**. Fault, discard: to Resident under the lock.
//! - **Poisoned**. Discard: to Resident under the lock.
//! - **Lost**. Recovery, when no worker runs: to Resident if bytes other than zeros are in its file, else to Poisoned.
//!
//! *A foreign mapper* is any process outside the VM that fills holes of the file: a process that maps the file and
//! touches a hole, khugepaged before Linux 6.4, a process that calls `fallocate`. A Far page was not all zeros when it
//! was evicted, so zeros in the file are never its bytes.
//!
//! Two rules make it safe. **A page is only ever mapped under its lock**, and is Resident when the lock is released (or
//! it is mapped with its whole unit of 2 MiB, which `unit.rs` keeps apart from any zap): so from the moment the zap of
//! a Quarantine page is acknowledged, an unchanged word means an unchanged page. **A ticket is never used twice**: a
//! page that was touched in quarantine and picked again starts a new quarantine, and an engine that was replaced while
//! it slept cannot commit a copy that it read earlier.

use std::fmt;

use ballast_base::store::Handle;

use crate::sync::{AtomicU64, Ordering};

const STATE_MASK: u64 = 0xF;
const LOCK: u64 = 1 << 4;
const MARK: u64 = 1 << 5;
const RESERVED: u64 = 3 << 6;
const AGE_SHIFT: u32 = 8;
const STORE_SHIFT: u32 = 16;
const PAYLOAD_SHIFT: u32 = 24;
const _: () = assert!(PAYLOAD_SHIFT + Handle::BITS == u64::BITS);

/// The state of a page. See the truth table above.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum State {
    /// In DRAM, or never touched, or discarded: the guest owns it.
    Resident = 0,
    /// Zapped, still in DRAM.
    Quarantine = 1,
    /// Being copied to a store; still in DRAM.
    Evicting = 2,
    /// In a store.
    Far = 3,
    /// Being restored.
    Restoring = 4,
    /// All zeros; nothing is stored.
    Zero = 5,
    /// Lost by the store, or by the memory it was in.
    Poisoned = 6,
}

impl State {
    /// Number of states.
    pub const COUNT: usize = 7;
    /// All states, by number.
    pub const ALL: [Self; Self::COUNT] =
        [Self::Resident, Self::Quarantine, Self::Evicting, Self::Far, Self::Restoring, Self::Zero, Self::Poisoned];
}

/// A value of the page-state word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Word(u64);

impl Word {
    /// The word of a page that no worker has moved yet: Resident, age 0. All-zero memory is a valid table.
    pub const INITIAL: Self = Self(0);

    /// Replaces a word whose memory failed; no worker writes these bits. The lock keeps workers from the page until
    /// recovery, which runs without workers, has repaired the word.
    pub const LOST: Self = Self(STATE_MASK | LOCK);

    /// Returns whether the word was lost.
    pub const fn is_lost(self) -> bool {
        self.0 & STATE_MASK == STATE_MASK
    }

    /// The word with these bits, which another program version may have written.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns whether this program knows every bit. A newer program may have written bits that this one does not know.
    pub const fn is_known(self) -> bool {
        self.is_lost() || self.0 & STATE_MASK < State::COUNT as u64 && self.0 & RESERVED == 0
    }

    /// All bits.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// An unlocked word without handle.
    pub const fn new(state: State, age: u8) -> Self {
        Self(state as u64 | (age as u64) << AGE_SHIFT)
    }

    /// The state. Bits that no engine writes read as Poisoned, so that the page is never mapped.
    pub const fn state(self) -> State {
        match self.0 & STATE_MASK {
            0 => State::Resident,
            1 => State::Quarantine,
            2 => State::Evicting,
            3 => State::Far,
            4 => State::Restoring,
            5 => State::Zero,
            _ => State::Poisoned,
        }
    }

    /// Returns whether a worker holds its lock.
    pub const fn is_locked(self) -> bool {
        self.0 & LOCK != 0
    }

    /// Returns whether an earlier spill pass found exactly this word.
    pub const fn is_marked(self) -> bool {
        self.0 & MARK != 0
    }

    /// This word with the mark. No other constructor sets it.
    pub const fn marked(self) -> Self {
        Self(self.0 | MARK)
    }

    /// The age byte.
    pub const fn age(self) -> u8 {
        (self.0 >> AGE_SHIFT) as u8
    }

    /// This word with another age.
    pub const fn with_age(self, age: u8) -> Self {
        Self(self.0 & !(0xFF << AGE_SHIFT) | (age as u64) << AGE_SHIFT)
    }

    /// Number of the store that has the page.
    pub const fn store(self) -> u8 {
        (self.0 >> STORE_SHIFT) as u8
    }

    /// Handle in the store: valid in Far and Restoring.
    pub fn handle(self) -> Handle {
        Handle::new(self.0 >> PAYLOAD_SHIFT).expect("the payload field is as wide as a handle")
    }

    /// Far in `store` under `handle`.
    pub const fn far(store: u8, handle: Handle, age: u8) -> Self {
        Self(Self::new(State::Far, age).0 | (store as u64) << STORE_SHIFT | handle.bits() << PAYLOAD_SHIFT)
    }

    /// Quarantine, in the batch with this ticket.
    pub const fn quarantine(ticket: Ticket, age: u8) -> Self {
        Self(Self::new(State::Quarantine, age).0 | ticket.0 << PAYLOAD_SHIFT)
    }

    /// This word, locked.
    pub const fn locked(self) -> Self {
        Self(self.0 | LOCK)
    }

    /// This word, unlocked.
    pub const fn unlocked(self) -> Self {
        Self(self.0 & !LOCK)
    }

    /// This word in another state, with its handle, age and lock.
    pub const fn in_state(self, state: State) -> Self {
        Self(self.0 & !STATE_MASK | state as u64)
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lock = if self.is_locked() { "|locked" } else { "" };
        let mark = if self.is_marked() { "|marked" } else { "" };
        let (age, store, payload) = (self.age(), self.store(), self.0 >> PAYLOAD_SHIFT);
        write!(f, "{:?}{lock}{mark} age={age} store={store} payload={payload:#x}", self.state())
    }
}

/// ID of a batch of zapped pages: 16 bits of engine epoch, 24 bits of counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

impl Ticket {
    /// Ticket number `counter` of engine `epoch`. Both wrap: a ticket repeats after 16 million batches of one engine,
    /// or 65536 engines of one VM, far longer than any batch lives.
    pub const fn new(epoch: u64, counter: u64) -> Self {
        Self((epoch & 0xFFFF) << 24 | (counter & 0xFF_FFFF))
    }
}

/// One page's word in the shared table.
#[derive(Clone, Copy, Debug)]
pub struct Cell<'a>(&'a AtomicU64);

impl<'a> Cell<'a> {
    /// The cell at `word`.
    pub fn new(word: &'a AtomicU64) -> Self {
        Self(word)
    }

    /// The current word.
    pub fn load(self) -> Word {
        Word(self.0.load(Ordering::Acquire))
    }

    /// Changes `from` to `to`; returns false if the word is not `from`.
    pub fn swap(self, from: Word, to: Word) -> bool {
        self.0.compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Takes the lock, changing `from` (unlocked) to `to`. The guard releases it.
    pub fn lock(self, from: Word, to: Word) -> Option<Locked<'a>> {
        debug_assert!(!from.is_locked());
        self.swap(from, to.locked()).then(|| Locked { cell: self, word: to })
    }

    /// Overwrites the word: only in `recover`, when no worker of any engine runs, and for other words of a [`Granule`].
    ///
    /// [`Granule`]: crate::granule::Granule
    pub fn reset(self, to: Word) {
        self.0.store(to.0, Ordering::Release);
    }
}

/// A locked page. Dropping it stores the word last given to [`Locked::set`], unlocked.
#[derive(Debug)]
pub struct Locked<'a> {
    cell: Cell<'a>,
    word: Word,
}

impl Locked<'_> {
    /// The word that the unlock will store.
    pub fn word(&self) -> Word {
        self.word
    }

    /// Sets the word to store on release.
    pub fn set(&mut self, to: Word) {
        self.word = to.unlocked();
    }

    /// Like [`Locked::set`], and stores the word now, still locked.
    pub fn publish(&mut self, to: Word) {
        self.set(to);
        self.cell.0.store(self.word.locked().0, Ordering::Release);
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // Only the lock's holder writes a locked word, so a plain store suffices.
        self.cell.0.store(self.word.0, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_field_of_a_word_is_independent(age: u8, store: u8, bits in 0..=Handle::MAX, newer: u8) {
            let handle = Handle::new(bits).expect("in range");
            let word = Word::far(store, handle, age).locked();
            prop_assert_eq!((word.state(), word.store(), word.handle(), word.age()), (State::Far, store, handle, age));
            prop_assert!(word.is_locked() && !word.unlocked().is_locked());
            let marked = word.marked();
            prop_assert_eq!((marked.state(), marked.store()), (State::Far, store));
            prop_assert_eq!((marked.handle(), marked.age()), (handle, age));
            prop_assert!(marked.is_marked() && marked.is_locked() && !word.is_marked());
            let moved = word.in_state(State::Restoring).with_age(newer).unlocked();
            prop_assert_eq!((moved.store(), moved.handle(), moved.age()), (store, handle, newer));
            prop_assert_eq!(moved.in_state(State::Far).with_age(age).locked(), word);
        }

        #[test]
        fn tickets_of_neighbouring_engines_and_batches_differ(epoch in 0u64..1 << 20, counter in 0u64..1 << 30) {
            prop_assert_ne!(Ticket::new(epoch, counter), Ticket::new(epoch + 1, counter));
            prop_assert_ne!(Ticket::new(epoch, counter), Ticket::new(epoch, counter + 1));
        }
    }

    #[test]
    fn a_word_of_a_newer_program_is_recognized_as_unknown() {
        for state in State::ALL {
            assert!(Word::new(state, 9).locked().marked().is_known(), "{state:?}");
        }
        assert!(Word::LOST.is_known());
        for bits in [7, 14, 1 << 6, 1 << 7 | 3] {
            assert!(!Word::from_bits(bits).is_known(), "{bits:#x}");
        }
    }

    #[test]
    fn a_lock_is_released_in_the_state_last_set() {
        let word = AtomicU64::new(0);
        let cell = Cell::new(&word);
        let mut guard = cell.lock(Word::INITIAL, Word::INITIAL).expect("free");
        assert!(cell.lock(cell.load().unlocked(), Word::INITIAL).is_none(), "a locked page was locked again");
        assert!(cell.load().is_locked(), "a failed attempt released somebody else's lock");
        guard.set(Word::new(State::Zero, 3));
        assert!(cell.load().is_locked());
        drop(guard);
        assert_eq!(cell.load(), Word::new(State::Zero, 3));
    }

    #[test]
    fn bits_no_engine_writes_read_as_poisoned() {
        for bits in 6..16 {
            assert_eq!(Word(bits).state(), State::Poisoned);
            assert_eq!(Word(bits).is_lost(), bits == 15);
        }
    }
}
