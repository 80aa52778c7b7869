//! The 40 bits of a handle in the RAM store and the file store.
//!
//! Before: a store has a slot for a page, or the page needs none. After: `get` and `free` receive the handle.
//! Threads: any; plain values. Units: slot numbers as in `alloc`.
//! Promise: any 40 bits may be decoded.
//!
//! ```text
//! bit 39 = 1: same-filled   bits 32-38 key check   bits 0-31 the pattern
//! bit 39 = 0: blob          bits 32-38 tag (1-127) bits 10-31 slab   bits 0-9 slot
//! ```

use ballast_handover::arena::MAX_SLABS;

use crate::alloc::Place;
use crate::slab::SLOTS_MAX;
use crate::{GetOutcome, Handle, PageBytes, PageKey, codec};

const SAME_FILLED: u64 = 1 << 39;
const TAG_SHIFT: u32 = 32;
const TAG_MASK: u64 = 0x7f;
const SLAB_SHIFT: u32 = 10;
const SLOT_MASK: u64 = (1 << SLAB_SHIFT) - 1;
const _: () = assert!((MAX_SLABS as u64) << SLAB_SHIFT == 1 << TAG_SHIFT && SAME_FILLED < Handle::MAX);
const _: () = assert!(SLOTS_MAX as u64 <= SLOT_MASK + 1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    SameFilled(SameFilled),
    Blob { place: Place, tag: u8 },
}

/// A page that repeats 32 bits, kept in the handle itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SameFilled {
    pattern: u32,
    check: u64,
}

impl Named {
    pub(crate) fn by(handle: Handle) -> Self {
        let bits = handle.bits();
        let seven = bits >> TAG_SHIFT & TAG_MASK;
        if bits & SAME_FILLED != 0 {
            Self::SameFilled(SameFilled { pattern: bits as u32, check: seven })
        } else {
            let place = Place { slab: bits as u32 >> SLAB_SHIFT, slot: (bits & SLOT_MASK) as usize };
            Self::Blob { place, tag: seven as u8 }
        }
    }
}

/// The handle of a blob. Any slab and slot of an arena and any tag of `next_tag` fit (asserted above).
pub(crate) fn of_blob(place: Place, tag: u8) -> Option<Handle> {
    Handle::new(u64::from(tag) << TAG_SHIFT | u64::from(place.slab) << SLAB_SHIFT | place.slot as u64)
}

/// The handle of a page that repeats `pattern`; `None` if the halves of `pattern` differ.
pub(crate) fn of_same_filled(key: PageKey, pattern: u64) -> Option<Handle> {
    let halves_equal = pattern as u32 == (pattern >> 32) as u32;
    let bits = SAME_FILLED | check(key) << TAG_SHIFT | pattern & u64::from(u32::MAX);
    Handle::new(bits).filter(|_| halves_equal)
}

fn check(key: PageKey) -> u64 {
    u64::from(codec::key_check(key)) & TAG_MASK
}

impl SameFilled {
    /// Whether the seven bits of the key's digest agree.
    pub(crate) fn may_be_of(self, key: PageKey) -> bool {
        self.check == check(key)
    }

    pub(crate) fn get(self, key: PageKey, out: &mut PageBytes) -> GetOutcome {
        if !self.may_be_of(key) {
            return GetOutcome::Corrupt;
        }
        codec::fill(out, u64::from(self.pattern) << 32 | u64::from(self.pattern));
        GetOutcome::Found
    }
}

/// The tag of a slot's next use, 1 to 127. `last`: that of its last use, or 0 in a slab that was punched.
pub(crate) fn next_tag(last: u8, generation: u32) -> u8 {
    let step = if last == 0 { generation % 127 } else { u32::from(last) % 127 };
    step as u8 + 1
}
