//! One slab, a piece of an arena or an area of a file: its state word, its bitmap, its size class.
//!
//! Before: `alloc` chose this slab. After: a slot is taken or freed, or the slab may be punched.
//! Threads: any, in any number of processes. Each step is a compare-exchange on the state word or an atomic operation
//! on the bitmap, and none waits for another thread. A process that dies leaves nothing locked. Units: a class is an
//! index into the capacities of the arena's shape; slots count from the start of the slab.
//! Promise: whatever the words hold, no method panics, loops forever or names a slot outside the slab.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes in a slab of the RAM store: the unit that is charged to the budget, and punched when its last slot is freed.
pub const SLAB_BYTES: usize = 64 * 1024;

/// Slot sizes of the RAM store. Each holds a 16-byte blob header and its payload; the last holds a page stored raw.
pub(crate) const CLASS_BYTES: [usize; CLASSES] =
    [64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4112];
pub(crate) const CLASSES: usize = 17;

const BITMAP_WORDS: usize = 15;
/// Most slots of a slab, by the bitmap. So 64-byte slots leave 4 KiB unused; more bits would double the table entry.
pub(crate) const SLOTS_MAX: usize = BITMAP_WORDS * 64;

pub(crate) const CAPACITIES: [usize; CLASSES] = {
    let mut capacities = [0; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        let fit = SLAB_BYTES / CLASS_BYTES[class];
        capacities[class] = if fit < SLOTS_MAX { fit } else { SLOTS_MAX };
        class += 1;
    }
    capacities
};

/// The smallest class whose slots hold `bytes`; `None` if no class does.
pub(crate) fn class_for(bytes: usize) -> Option<usize> {
    let class = CLASS_BYTES.partition_point(|&size| size < bytes);
    (class < CLASSES).then_some(class)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Unused: no bit set, no memory, not charged.
    Free = 0,
    /// Holds `used` slots of one class.
    Active = 1,
    /// Its last slot was freed; the thread that freed it has the slab punched.
    Retiring = 2,
}

/// The state word, decoded.
///
/// | Phase | used | changed by | to | other threads |
/// |---|---|---|---|---|
/// | `Free` | 0 | an allocator that was granted the budget | `Active`, used 1 | look for another slab |
/// | `Active` | 1..cap | any thread: `reserve` (+1), `release` (-1) | `Active` | reserve, release, read blobs |
/// | `Active` | 1 | the `release` of the last slot | `Retiring`, used 0 | can reserve nothing |
/// | `Retiring` | 0 | this process, after the punch | `Free`, generation +1 | see no bit set |
/// | `Retiring` | 0 | `recover`, if that process died | `Free`, generation +1 | none exists |
///
/// `used` counts reservations, the bitmap counts slots. A slot is first reserved in `used` and then claimed in the
/// bitmap; it is first freed in the bitmap and then released in `used`. So at each moment *bits set <= used <=
/// capacity*: a thread that reserved a slot will find a clear bit, and `used` 0 means an empty bitmap. Each reuse of a
/// slab has a new generation, so a compare-exchange prepared before a retirement fails after it (no ABA).
///
/// Bits: 0-1 phase, 2-7 class, 8-18 used, 32-63 generation. The word 0 is a `Free` slab, so a hole is a valid table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) phase: Phase,
    pub(crate) class: usize,
    pub(crate) used: usize,
    pub(crate) generation: u32,
}

impl State {
    /// `None` if the word has no meaning.
    pub(crate) fn decode(word: u64, capacities: &[usize]) -> Option<Self> {
        let phase = match word & 3 {
            0 => Phase::Free,
            1 => Phase::Active,
            2 => Phase::Retiring,
            _ => return None,
        };
        let class = (word >> 2 & 0x3f) as usize;
        let used = (word >> 8 & 0x7ff) as usize;
        let sound = used <= *capacities.get(class)? && (phase == Phase::Active) == (used > 0);
        sound.then_some(Self { phase, class, used, generation: (word >> 32) as u32 })
    }

    pub(crate) fn encode(self) -> u64 {
        self.phase as u64 | (self.class as u64) << 2 | (self.used as u64) << 8 | u64::from(self.generation) << 32
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    Slot {
        slot: usize,
        generation: u32,
    },
    /// No slot is left, or the slab is not active in that class.
    No,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// Other slots are still used.
    StillUsed,
    /// Other slots are still used, and the slab was full: it has room again.
    NoLongerFull { class: usize },
    /// That was the last slot: the slab is `Retiring`. The caller punches it and calls `retired`.
    Empty,
    /// The word is invalid; nothing was changed.
    Damaged,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Slab<'a> {
    state: &'a AtomicU64,
    bitmap: &'a [AtomicU64],
    capacities: &'static [usize],
}

impl<'a> Slab<'a> {
    /// Panics if the entry is not 16 words.
    pub(crate) fn new(words: &'a [AtomicU64], capacities: &'static [usize]) -> Self {
        assert!(words.len() == 1 + BITMAP_WORDS, "a slab table entry of {} words", words.len());
        Self { state: &words[0], bitmap: &words[1..], capacities }
    }

    pub(crate) fn state(self) -> Option<State> {
        State::decode(self.state.load(Ordering::Acquire), self.capacities)
    }

    /// Changes the state by compare-exchange until `step` declines. Returns the state before and after the change.
    fn update(self, step: impl Fn(State) -> Option<State>) -> Option<(State, State)> {
        let mut word = self.state.load(Ordering::Acquire);
        loop {
            let before = State::decode(word, self.capacities)?;
            let after = step(before)?;
            match self.state.compare_exchange_weak(word, after.encode(), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some((before, after)),
                Err(seen) => word = seen,
            }
        }
    }

    /// `Free` to `Active`, with one slot reserved for the caller, who has charged the budget. False if it was not free.
    pub(crate) fn activate(self, class: usize) -> bool {
        self.update(|state| {
            (state.phase == Phase::Free).then_some(State { phase: Phase::Active, class, used: 1, ..state })
        })
        .is_some()
    }

    fn reserve(self, class: usize) -> bool {
        self.update(|state| {
            let usable = state.phase == Phase::Active && state.class == class && state.used < self.capacities[class];
            usable.then_some(State { used: state.used + 1, ..state })
        })
        .is_some()
    }

    /// Takes a slot of an active slab of this class. If the bitmap is damaged and has no clear bit, the reservation
    /// stays until `recover`: to release it could retire a slab whose bitmap is not empty.
    pub(crate) fn take(self, class: usize) -> Taken {
        if self.reserve(class) { self.claim(class) } else { Taken::No }
    }

    /// Turns a reservation into a slot. At each moment some bit is clear, but a scan can miss one that moves. The
    /// number of scans is bounded, because a damaged bitmap may have no clear bit.
    pub(crate) fn claim(self, class: usize) -> Taken {
        const SCANS_MAX: usize = 64;
        let slots = self.capacities[class];
        for _ in 0..SCANS_MAX {
            for (index, word) in self.bitmap[..slots.div_ceil(64)].iter().enumerate() {
                let mut bits = word.load(Ordering::Relaxed);
                loop {
                    let bit = bits.trailing_ones() as usize;
                    if bit == 64 || index * 64 + bit >= slots {
                        break;
                    }
                    match word.compare_exchange_weak(bits, bits | 1 << bit, Ordering::AcqRel, Ordering::Relaxed) {
                        Ok(_) => {
                            let generation = (self.state.load(Ordering::Relaxed) >> 32) as u32;
                            return Taken::Slot { slot: index * 64 + bit, generation };
                        }
                        Err(seen) => bits = seen,
                    }
                }
            }
        }
        Taken::No
    }

    pub(crate) fn is_set(self, slot: usize) -> bool {
        self.bitmap.get(slot / 64).is_some_and(|word| word.load(Ordering::Acquire) >> (slot % 64) & 1 == 1)
    }

    /// Clears a slot's bit; true for the one caller that did.
    pub(crate) fn clear(self, slot: usize) -> bool {
        let bit = 1 << (slot % 64);
        self.bitmap.get(slot / 64).is_some_and(|word| word.fetch_and(!bit, Ordering::AcqRel) & bit != 0)
    }

    /// Releases the reservation of a slot whose bit the caller just cleared.
    pub(crate) fn release(self) -> Released {
        let moved = self.update(|state| match (state.phase, state.used) {
            (Phase::Active, 1) => Some(State { phase: Phase::Retiring, used: 0, ..state }),
            (Phase::Active, used) => Some(State { used: used - 1, ..state }),
            _ => None,
        });
        match moved {
            None => Released::Damaged,
            Some((_, after)) if after.phase == Phase::Retiring => Released::Empty,
            Some((before, _)) if before.used == self.capacities[before.class] => {
                Released::NoLongerFull { class: before.class }
            }
            Some(_) => Released::StillUsed,
        }
    }

    /// `Retiring` to `Free`, after the punch.
    pub(crate) fn retired(self) {
        self.update(|state| {
            let generation = state.generation.wrapping_add(1);
            (state.phase == Phase::Retiring).then_some(State { phase: Phase::Free, class: 0, used: 0, generation })
        });
    }

    /// Taken slots, by the bitmap.
    pub(crate) fn count(self) -> usize {
        self.bitmap.iter().map(|word| word.load(Ordering::Relaxed).count_ones() as usize).sum()
    }

    /// Keeps only the slots that are also set in `live`, and corrects the state word. For `recover`: no other thread
    /// uses the slab. Returns the number of slots left; without any, the slab is `Retiring`.
    pub(crate) fn sweep(self, live: &LiveSlots) -> usize {
        let word = self.state.load(Ordering::Relaxed);
        let class = match State::decode(word, self.capacities) {
            Some(State { phase: Phase::Active, class, .. }) => Some(class),
            _ => None,
        };
        let slots = class.map_or(0, |class| self.capacities[class]);
        let mut left = 0;
        for (index, (bits, live)) in self.bitmap.iter().zip(live.0).enumerate() {
            let inside = match slots.saturating_sub(index * 64) {
                0 => 0,
                some if some >= 64 => u64::MAX,
                some => (1 << some) - 1,
            };
            let kept = bits.load(Ordering::Relaxed) & live & inside;
            bits.store(kept, Ordering::Relaxed);
            left += kept.count_ones() as usize;
        }
        let generation = (word >> 32) as u32;
        let phase = if left > 0 { Phase::Active } else { Phase::Retiring };
        let state = State { phase, class: class.unwrap_or(0), used: left, generation };
        self.state.store(state.encode(), Ordering::Release);
        left
    }
}

/// The slots of one slab that live handles name.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LiveSlots([u64; BITMAP_WORDS]);

impl LiveSlots {
    pub(crate) fn mark(&mut self, slot: usize) {
        if let Some(word) = self.0.get_mut(slot / 64) {
            *word |= 1 << (slot % 64);
        }
    }
}

const _: () = {
    let mut class = 0;
    while class < CLASSES {
        assert!(CLASS_BYTES[class].is_multiple_of(16) && CAPACITIES[class] >= 2 && CAPACITIES[class] <= SLOTS_MAX);
        assert!(class == 0 || CLASS_BYTES[class - 1] < CLASS_BYTES[class]);
        class += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry() -> Vec<AtomicU64> {
        (0..=BITMAP_WORDS).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn a_slab_gives_each_slot_once_and_is_retired_by_the_last_release() {
        for (class, slots_in_slab) in CAPACITIES.into_iter().enumerate() {
            let words = entry();
            let slab = Slab::new(&words, &CAPACITIES);
            assert!(slab.activate(class) && !slab.activate(class));
            let mut slots = vec![slab.claim(class)];
            for _ in 1..slots_in_slab {
                slots.push(slab.take(class));
            }
            for (expected, taken) in slots.iter().enumerate() {
                assert_eq!(*taken, Taken::Slot { slot: expected, generation: 0 });
            }
            assert_eq!(slab.take(class), Taken::No);
            for slot in 0..slots_in_slab {
                assert!(slab.clear(slot) && !slab.clear(slot));
                let expected = match slot {
                    0 => Released::NoLongerFull { class },
                    last if last + 1 == slots_in_slab => Released::Empty,
                    _ => Released::StillUsed,
                };
                assert_eq!(slab.release(), expected);
            }
            assert_eq!(slab.take(class), Taken::No, "a retiring slab gives nothing");
            slab.retired();
            assert_eq!(slab.state(), Some(State { phase: Phase::Free, class: 0, used: 0, generation: 1 }));
            assert!(slab.activate(class));
            assert_eq!(slab.claim(class), Taken::Slot { slot: 0, generation: 1 });
        }
    }

    #[test]
    fn a_bitmap_without_a_clear_bit_ends_the_search() {
        let words = entry();
        for word in &words[1..] {
            word.store(u64::MAX, Ordering::Relaxed);
        }
        assert!(Slab::new(&words, &CAPACITIES).activate(0));
        assert_eq!(Slab::new(&words, &CAPACITIES).claim(0), Taken::No);
    }

    proptest! {
        #[test]
        fn a_state_word_that_decodes_encodes_to_its_own_meaning(word: u64) {
            if let Some(state) = State::decode(word, &CAPACITIES) {
                prop_assert_eq!(State::decode(state.encode(), &CAPACITIES), Some(state));
                prop_assert!(state.used <= CAPACITIES[state.class]);
            }
        }

        #[test]
        fn the_class_chosen_is_the_smallest_that_fits(bytes in 0usize..5000) {
            match class_for(bytes) {
                Some(class) => {
                    prop_assert!(CLASS_BYTES[class] >= bytes);
                    prop_assert!(class == 0 || CLASS_BYTES[class - 1] < bytes);
                }
                None => prop_assert!(bytes > CLASS_BYTES[CLASSES - 1]),
            }
        }
    }
}
