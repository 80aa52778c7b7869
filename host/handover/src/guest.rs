//! Guest-physical addresses of each region: words of the state file that outlive engines.
//!
//! Before: the VMM states the addresses, with a region or later. After: the API shows them, in every engine.
//! Threads: the keeper's one writes; any may read, and may see a list half replaced, which is for display only. Units:
//! whole pages.
//! Promise: a list is checked when it is read as it is when it is written.
//!
//! ```text
//! 3072     42 entries of three words: region plus 1, over the page of the region << 8; the guest's page; pages
//! ```
//!
//! A zero in the first word marks a free entry. The address of a region without entries is in its record, or unknown.

use std::sync::atomic::{AtomicU64, Ordering};

use ballast_base::guest::{GuestRange, check_guest_ranges};
use ballast_base::{Bytes, PAGE_SIZE, PageCount};

use crate::records::RegionRecord;
use crate::state_file::{GUEST_WORDS, StateError, StateFile};

const WORDS: usize = 3;
const ENTRIES: usize = GUEST_WORDS / WORDS;
const NUMBER_BITS: u32 = 8;

fn number(entry: &[AtomicU64]) -> u64 {
    entry[0].load(Ordering::Acquire) & ((1 << NUMBER_BITS) - 1)
}

impl StateFile {
    /// The guest-physical ranges of this region, ascending; none if unknown.
    pub fn guest_ranges(&self, region: u32, record: &RegionRecord) -> Vec<GuestRange> {
        let bytes = |pages: u64| pages.saturating_mul(PAGE_SIZE as u64);
        let own = self.guest_words().chunks_exact(WORDS).filter(|entry| number(entry) == u64::from(region) + 1);
        let read = |entry: &[AtomicU64]| {
            let [first, address, pages] = [0, 1, 2].map(|at| entry[at].load(Ordering::Acquire));
            let (offset, len) = (Bytes(bytes(first >> NUMBER_BITS)), Bytes(bytes(pages)));
            GuestRange { address: bytes(address), offset, len }
        };
        let mut ranges: Vec<_> = own.map(read).collect();
        let len = record.pages().bytes();
        if ranges.is_empty() {
            ranges.extend(record.guest_address.map(|address| GuestRange { address, offset: Bytes(0), len }));
        }
        ranges.sort_unstable();
        check_guest_ranges(len, &ranges).map_or_else(|_| Vec::new(), |()| ranges)
    }

    /// Replaces the guest-physical ranges of this region.
    ///
    /// # Errors
    /// The ranges are invalid, or the VM's regions have too many; nothing was changed.
    pub fn set_guest_ranges(&self, region: u32, ranges: &[GuestRange]) -> Result<(), StateError> {
        let records = self.regions();
        let record = records.get(region as usize).filter(|record| !record.removed);
        let record = record.ok_or_else(|| StateError::Invalid(format!("it has no region {region}")))?;
        check_guest_ranges(record.pages().bytes(), ranges).map_err(|why| StateError::Invalid(why.to_string()))?;
        let lives = |number: u64| {
            let record = number.checked_sub(1).and_then(|index| records.get(index as usize));
            record.is_some_and(|record| !record.removed)
        };
        let all = self.guest_words().chunks_exact(WORDS);
        let free = all.filter(|entry| number(entry) == u64::from(region) + 1 || !lives(number(entry)));
        let free: Vec<_> = free.collect();
        if free.len() < ranges.len() {
            return Err(StateError::Invalid(format!("its regions have more than {ENTRIES} guest-physical ranges")));
        }
        free.iter().for_each(|entry| entry[0].store(0, Ordering::Release));
        let pages = |bytes: u64| PageCount(bytes / PAGE_SIZE as u64).0;
        for (entry, range) in free.iter().zip(ranges) {
            entry[1].store(pages(range.address), Ordering::Release);
            entry[2].store(pages(range.len.0), Ordering::Release);
            entry[0].store((u64::from(region) + 1) | pages(range.offset.0) << NUMBER_BITS, Ordering::Release);
        }
        self.remember();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::wire::VmId;
    use ballast_base::{Extents, GIB, MIB};
    use ballast_sys::memfd::FileId;

    fn file(regions: u64, guest_address: Option<u64>) -> StateFile {
        let file = StateFile::create(VmId([7; 16]), "x").expect("create");
        let extents = Extents::one(Bytes(0), Bytes(5 * GIB)).expect("good");
        for ino in 0..regions {
            file.add_region(&[FileId { dev: 1, ino }], &extents, guest_address).expect("add");
        }
        file
    }

    fn ranges(file: &StateFile, region: u32) -> Vec<GuestRange> {
        file.guest_ranges(region, &file.regions()[region as usize])
    }

    fn range(offset: u64, address: u64, len: u64) -> GuestRange {
        GuestRange { address, offset: Bytes(offset), len: Bytes(len) }
    }

    #[test]
    fn guest_ranges_are_those_stated_last_even_for_a_later_opener() {
        let file = file(3, None);
        assert_eq!(ranges(&file, 0), []);
        let pc = [range(0, 0, 3 * GIB), range(3 * GIB, 4 * GIB, 2 * GIB)];
        file.set_guest_ranges(0, &[range(0, 64 * GIB, 5 * GIB)]).expect("set");
        file.set_guest_ranges(2, &[range(0, 128 * GIB, 5 * GIB)]).expect("set");
        file.set_guest_ranges(0, &[pc[1], pc[0]]).expect("set");
        let again = StateFile::open(file.fd().try_clone_to_owned().expect("dup")).expect("open");
        for file in [&file, &again] {
            assert_eq!(ranges(file, 0), pc);
            assert_eq!(ranges(file, 1), []);
            assert_eq!(ranges(file, 2), [range(0, 128 * GIB, 5 * GIB)]);
        }
        file.set_guest_ranges(0, &[]).expect("unknown again");
        assert_eq!(ranges(&file, 0), []);
    }

    #[test]
    fn the_address_given_with_a_region_holds_until_ranges_are_stated() {
        let file = file(1, Some(GIB));
        assert_eq!(ranges(&file, 0), [range(0, GIB, 5 * GIB)]);
        file.set_guest_ranges(0, &[range(MIB, 0, MIB)]).expect("set");
        assert_eq!(ranges(&file, 0), [range(MIB, 0, MIB)]);
    }

    #[test]
    fn too_many_ranges_are_refused_and_a_removed_region_frees_its_entries() {
        let file = file(7, None);
        let eight: Vec<_> = (0..8).map(|at| range(at * MIB, at * MIB, MIB)).collect();
        for region in 0..5 {
            file.set_guest_ranges(region, &eight).expect("40 of 42");
        }
        let said = file.set_guest_ranges(5, &eight).expect_err("48").to_string();
        assert!(said.contains("more than 42"), "{said}");
        assert_eq!(ranges(&file, 5), []);
        file.remove_region(3);
        file.set_guest_ranges(5, &eight).expect("40 again");
        assert_eq!((ranges(&file, 5), ranges(&file, 3)), (eight.clone(), Vec::new()));
        assert!(file.set_guest_ranges(3, &eight).is_err() && file.set_guest_ranges(9, &eight).is_err());
        assert!(file.set_guest_ranges(6, &[range(5 * GIB, 0, MIB)]).is_err(), "not inside the region");
    }

    #[test]
    fn damaged_entries_are_taken_for_unknown() {
        let file = file(1, None);
        file.set_guest_ranges(0, &[range(0, 0, MIB)]).expect("set");
        file.guest_words()[2].store(u64::MAX, Ordering::Release);
        assert_eq!(ranges(&file, 0), []);
    }
}
