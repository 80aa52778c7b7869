//! Guest-physical addresses: a region of RAM is one or more ranges of them.
//!
//! Before: a VMM names the addresses of a region; a PC has the part that does not fit below its PCI hole above 4 GiB.
//! After: the host can translate a page of a region to a guest-physical page and back.
//! Units: bytes. Promise: no I/O. A range is linear; a device or ROM that covers a part of it is not described.

use serde::{Deserialize, Serialize};

use crate::invalid::Invalid;
use crate::units::{Bytes, PAGE_SIZE};

/// Most ranges that one region may have.
pub const MAX_GUEST_RANGES: usize = 8;
/// Bound on guest-physical addresses; the bound on host virtual addresses (`wire`) has this value, too.
const ADDRESS_END: u64 = 1 << 56;

/// A part of a region, and its guest-physical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GuestRange {
    /// Guest-physical address of its first byte.
    pub address: u64,
    /// Its offset in the region.
    pub offset: Bytes,
    /// Its length.
    pub len: Bytes,
}

/// Check that a region of this length can have these ranges: whole pages, inside it, no byte and no address twice.
pub fn check_guest_ranges(region: Bytes, ranges: &[GuestRange]) -> Result<(), Invalid> {
    if ranges.len() > MAX_GUEST_RANGES {
        return Err(format!("{} guest-physical ranges; at most {MAX_GUEST_RANGES} are allowed", ranges.len()).into());
    }
    for range in ranges {
        let GuestRange { address, offset, len } = *range;
        let whole = [address, offset.0, len.0].iter().all(|n| n.is_multiple_of(PAGE_SIZE as u64)) && len.0 > 0;
        let inside = offset.0.checked_add(len.0).is_some_and(|end| end <= region.0);
        if !whole || !inside || address.checked_add(len.0).is_none_or(|end| end > ADDRESS_END) {
            return Err(format!("{} bytes at {offset} cannot be at guest-physical address {address:#x}", len.0).into());
        }
    }
    let overlap = |at: fn(&GuestRange) -> u64| {
        let mut sorted = ranges.to_vec();
        sorted.sort_unstable_by_key(at);
        sorted.array_windows().any(|[one, next]| at(one) + one.len.0 > at(next))
    };
    match overlap(|range| range.address) || overlap(|range| range.offset.0) {
        true => Err("guest-physical ranges overlap".into()),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{GIB, MIB};

    fn range(offset: u64, address: u64, len: u64) -> GuestRange {
        GuestRange { address, offset: Bytes(offset), len: Bytes(len) }
    }

    #[test]
    fn ram_around_the_pci_hole_is_two_ranges_of_one_region() {
        let both = [range(3 * GIB, 4 * GIB, 2 * GIB), range(0, 0, 3 * GIB)];
        check_guest_ranges(Bytes(5 * GIB), &both).expect("a PC");
        check_guest_ranges(Bytes(5 * GIB), &[]).expect("unknown");
    }

    #[test]
    fn ranges_that_no_guest_can_see_are_refused() {
        let size = Bytes(16 * MIB);
        for (ranges, what) in [
            (vec![range(0, 0, 17 * MIB)], "cannot be"),
            (vec![range(0, 0, 0)], "cannot be"),
            (vec![range(0, 1, MIB)], "cannot be"),
            (vec![range(0, ADDRESS_END - MIB, 2 * MIB)], "cannot be"),
            (vec![range(u64::MAX - 4095, 0, 4096)], "cannot be"),
            (vec![range(0, 0, 2 * MIB), range(MIB, 8 * MIB, MIB)], "overlap"),
            (vec![range(0, 0, 2 * MIB), range(8 * MIB, MIB, MIB)], "overlap"),
            ((0..9).map(|at| range(at * MIB, at * MIB, MIB)).collect(), "at most 8"),
        ] {
            let error = check_guest_ranges(size, &ranges).expect_err(what);
            assert!(error.to_string().contains(what), "{error}");
        }
    }
}
