//! Where a program's pages are: which are there, which of them are in the fast tier, and which may be moved.
//!
//! Before: [`crate::programs`] knows what a program maps. After: `ballast_ranges::relocate` plans with the pages, and
//! moves are recorded in them. The page table is read a part at a time, round and round, so that the cost of an epoch
//! does not depend on the size; new mappings are read first.
//! Units: addresses; units of 2 MiB (128 KiB of bits for a GiB). Threads: none of its own.
//! Promise: bounded by the program's memory. The bits may be old; then a move fails and is reported.

use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;

use ballast_base::PAGE_SIZE;
use ballast_ranges::Range;
use ballast_ranges::relocate::Tier;

use crate::kernel::PageTable;
use crate::nodes::Tiers;
use crate::settings::AGAIN_AFTER;
use crate::unit::{PAGE, Seen, UNIT, Unit, WORDS, place};

/// Units whose page-table entries are read by one call: 512 KiB of entries.
const READ_UNITS: u64 = 128;

/// The pages of one program.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    units: BTreeMap<u64, Unit>,
    areas: Vec<(u64, u64)>,
    /// Parts of these that were never read, descending; each is read from its start on.
    unread: Vec<(u64, u64)>,
    /// Address at which the next read of the others begins.
    cursor: u64,
    rounds: u32,
    looks: u64,
}

/// Returns the parts of `ranges` that are not in `others`; both are ascending.
fn without(ranges: &[(u64, u64)], others: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut left = Vec::new();
    for &(mut start, end) in ranges {
        let after = others.partition_point(|(_, other)| *other <= start);
        for &(from, to) in others[after..].iter().take_while(|(from, _)| *from < end) {
            if start < from {
                left.push((start, from));
            }
            start = to;
        }
        if start < end {
            left.push((start, end));
        }
    }
    left
}

impl Pages {
    /// Sets the memory that the program maps now, ascending, and forgets all other pages.
    pub fn set_areas(&mut self, areas: Vec<(u64, u64)>) {
        let covered = |unit: u64| {
            let after = areas.partition_point(|(start, _)| *start < (unit + 1) * UNIT);
            areas[..after].last().is_some_and(|(_, end)| *end > unit * UNIT)
        };
        self.units.retain(|unit, _| covered(*unit));
        self.unread.reverse();
        let read = without(&self.areas, &self.unread);
        self.unread = without(&areas, &read);
        self.unread.reverse();
        self.areas = areas;
    }

    /// Reads about `most` page-table entries at most, once in an epoch: of parts that were never read, and, once all
    /// memory was read, of all memory, from the end of the last read, round and round. However much memory is new, half
    /// of the entries are for known memory. Returns the number of entries.
    ///
    /// # Errors
    /// The process is gone, or its page table may not be read.
    pub fn look(&mut self, process: &dyn PageTable, tiers: &Tiers, most: u64) -> io::Result<u64> {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(AGAIN_AFTER) {
            self.units.values_mut().for_each(|unit| unit.kept = [0; WORDS]);
        }
        let kept_back = if self.rounds == 0 { 0 } else { most / 2 };
        let mut read = 0;
        while let Some(&(start, end)) = self.unread.last().filter(|_| read < most - kept_back) {
            let to = self.read(process, tiers, (start, end), most - kept_back - read)?;
            read += (to - start) / PAGE;
            self.unread.pop();
            self.unread.extend((to < end).then_some((to, end)));
        }
        if self.rounds == 0 {
            self.rounds = u32::from(self.unread.is_empty());
            return Ok(read);
        }
        let most = most.max(read + kept_back);
        while read < most {
            let after = self.areas.partition_point(|(_, end)| *end <= self.cursor);
            let Some(&(start, end)) = self.areas.get(after) else {
                self.cursor = 0;
                self.rounds += 1;
                break;
            };
            let from = start.max(self.cursor);
            self.cursor = self.read(process, tiers, (from, end), most - read)?;
            read += (self.cursor - from) / PAGE;
        }
        Ok(read)
    }

    /// Reads about `most` entries from the start of a range on. Returns where it ended.
    fn read(&mut self, process: &dyn PageTable, tiers: &Tiers, (from, end): (u64, u64), most: u64) -> io::Result<u64> {
        let units = most.div_ceil(UNIT / PAGE).clamp(1, READ_UNITS);
        let to = end.min((from / UNIT + units) * UNIT);
        let found = process.pages(from, ((to - from) / PAGE) as usize)?;
        let seen = found.into_iter().map(|page| {
            let (frame, is_exclusive) = page?;
            Some(Seen { is_fast: tiers.is_fast(tiers.node_of(frame)?), is_shared: !is_exclusive })
        });
        self.note((from..to).step_by(PAGE_SIZE).zip(seen));
        Ok(to)
    }

    fn note(&mut self, found: impl Iterator<Item = (u64, Option<Seen>)>) {
        let mut last: Option<(u64, Unit)> = None;
        for (address, seen) in found {
            let (number, word, bit) = place(address);
            if last.as_ref().is_none_or(|(last, _)| *last != number) {
                self.put(last.take());
                last = Some((number, self.units.remove(&number).unwrap_or_default()));
            }
            let Some((_, unit)) = &mut last else { continue };
            unit.see((word, bit), seen);
        }
        self.put(last);
    }

    fn put(&mut self, unit: Option<(u64, Unit)>) {
        // A unit without a page costs nothing.
        self.units.extend(unit.filter(|(_, unit)| unit.present != [0; WORDS]));
    }

    /// Returns how often all of its memory was read.
    pub fn rounds(&self) -> u32 {
        self.rounds
    }

    /// Records that a page is in this tier now.
    pub fn moved(&mut self, address: u64, tier: Tier) {
        let (number, word, bit) = place(address);
        if let Some(unit) = self.units.get_mut(&number) {
            unit.fast[word] = if tier == Tier::Fast { unit.fast[word] | bit } else { unit.fast[word] & !bit };
        }
    }

    /// Records that the page is gone.
    pub fn gone(&mut self, address: u64) {
        let (number, word, bit) = place(address);
        if let Some(unit) = self.units.get_mut(&number) {
            unit.see((word, bit), None);
        }
    }

    /// Records that a page cannot be moved: it is left alone for a while.
    pub fn kept(&mut self, address: u64) {
        let (number, word, bit) = place(address);
        if let Some(unit) = self.units.get_mut(&number) {
            unit.kept[word] |= bit;
        }
    }

    /// Pages that can be moved, and how many of them are in the fast tier.
    pub fn counts(&self) -> (u64, u64) {
        let each = self.units.values().map(Unit::counts);
        each.fold((0, 0), |(free, fast), (more, of_them)| (free + more, fast + of_them))
    }

    /// Returns whether this page is in the fast tier, as 1 or 0, or the share of its unit if the page is not known.
    /// `None` if nothing is known there.
    pub fn fast_share(&self, address: u64) -> Option<f64> {
        let (number, word, bit) = place(address);
        let unit = self.units.get(&number)?;
        if unit.present[word] & bit != 0 {
            return Some(f64::from(u8::from(unit.fast[word] & bit != 0)));
        }
        Some(unit.fast_share())
    }
}

/// 64 pages of a range, from this address on: those that can be moved, and those of them that are in the fast tier.
struct Word {
    address: u64,
    free: u64,
    fast: u64,
}

impl Word {
    /// Calls `each` with the address of each page of `bits`, ascending, until it breaks.
    fn each(&self, mut bits: u64, each: &mut dyn FnMut(u64) -> ControlFlow<()>) -> ControlFlow<()> {
        while bits != 0 {
            each(self.address + u64::from(bits.trailing_zeros()) * PAGE)?;
            bits &= bits - 1;
        }
        ControlFlow::Continue(())
    }
}

impl Pages {
    /// The pages of a range, without those that are left alone.
    fn words(&self, range: &Range) -> impl Iterator<Item = Word> {
        const SPAN: u64 = 64 * PAGE;
        let (start, end) = (range.start, range.end);
        // The first pages of a word, up to this address.
        let before = move |word: u64, address: u64| match address.saturating_sub(word).div_ceil(PAGE) {
            pages @ 0..64 => (1u64 << pages) - 1,
            _ => u64::MAX,
        };
        let units = self.units.range(start / UNIT..end.div_ceil(UNIT).max(start / UNIT));
        units.flat_map(move |(number, unit)| {
            (0..WORDS).map(move |word| {
                let address = number * UNIT + word as u64 * SPAN;
                let inside = before(address, end) & !before(address, start);
                let free = unit.free(word) & inside;
                Word { address, free, fast: free & unit.fast[word] }
            })
        })
    }

    /// Returns how many pages of a range can be moved, and how many of these are in the fast tier.
    pub fn count(&self, range: &Range) -> (u64, u64) {
        let counts = self.words(range).map(|word| (word.free.count_ones(), word.fast.count_ones()));
        counts.fold((0, 0), |(free, fast), (more, of_them)| (free + u64::from(more), fast + u64::from(of_them)))
    }

    /// Visits the pages of a range that can be moved and are in one tier, ascending, until `each` breaks.
    pub fn visit_in(&self, range: &Range, wanted: Tier, each: &mut dyn FnMut(u64) -> ControlFlow<()>) {
        let of = |word: &Word| if wanted == Tier::Fast { word.fast } else { word.free & !word.fast };
        let _ = self.words(range).try_for_each(|word| word.each(of(&word), each));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::HUGE_SIZE;
    use ballast_sys::Remote;
    use proptest::prelude::*;
    use std::collections::BTreeMap as Map;

    proptest! {
        #[test]
        fn pages_are_visited_once_in_order_with_their_tier_until_they_are_gone_or_kept_and_shared_ones_never(
            found in proptest::collection::btree_map(0u64..2000, any::<Option<(bool, bool)>>(), 0..200),
            then in proptest::collection::vec((0u64..2000, 0u8..4), 0..50),
            start in 0u64..2000, len in 0u64..2000,
        ) {
            let mut pages = Pages::default();
            let seen = |(is_fast, is_shared)| Seen { is_fast, is_shared };
            pages.note(found.iter().map(|(page, found)| (page * PAGE, found.map(seen))));
            // Shared pages are never visited, like kept ones.
            let mut model: Map<u64, (bool, bool)> =
                found.iter().filter_map(|(page, found)| Some((*page, (*found)?))).collect();
            for (page, what) in then {
                let address = page * PAGE;
                let known = model.get_mut(&page);
                match (what, known) {
                    (0, _) => { pages.gone(address); model.remove(&page); }
                    (1, Some(known)) => { pages.kept(address); known.1 = true; }
                    (2, Some(known)) => { pages.moved(address, Tier::Fast); known.0 = true; }
                    (3, Some(known)) => { pages.moved(address, Tier::Slow); known.0 = false; }
                    _ => (),
                }
            }
            let range = Range { start: start * PAGE, end: (start + len) * PAGE, count: 0, variance: 0, born: 0 };
            let free = model.iter().filter(|(_, (_, kept))| !kept);
            let expected: Vec<(u64, bool)> = free.clone().map(|(page, (fast, _))| (*page, *fast))
                .filter(|(page, _)| (start..start + len).contains(page)).collect();
            for tier in [Tier::Slow, Tier::Fast] {
                let mut of = Vec::new();
                pages.visit_in(&range, tier, &mut |address| {
                    of.push((address / PAGE, tier == Tier::Fast));
                    ControlFlow::Continue(())
                });
                let wanted = expected.iter().copied().filter(|(_, fast)| *fast == (tier == Tier::Fast));
                prop_assert_eq!(of, wanted.collect::<Vec<_>>());
            }
            let fast = expected.iter().filter(|(_, fast)| *fast).count() as u64;
            prop_assert_eq!(pages.count(&range), (expected.len() as u64, fast));
            let fast = free.clone().filter(|(_, (fast, _))| *fast).count() as u64;
            prop_assert_eq!(pages.counts(), (free.count() as u64, fast));
        }
    }

    #[test]
    fn what_is_unmapped_is_forgotten_and_a_look_goes_round() {
        let mut pages = Pages::default();
        let seen = |is_fast| Some(Seen { is_fast, is_shared: false });
        pages.note([(0, seen(true)), (UNIT, seen(false)), (3 * UNIT, seen(true))].into_iter());
        pages.set_areas(vec![(UNIT + PAGE, UNIT + 3 * PAGE), (3 * UNIT, 4 * UNIT)]);
        assert_eq!(pages.counts(), (2, 1), "a unit that is covered in part is kept until it is looked at");
        assert_eq!((pages.fast_share(3 * UNIT), pages.fast_share(9 * UNIT)), (Some(1.0), None));
        assert_eq!(pages.fast_share(3 * UNIT + PAGE), Some(1.0), "the unit's, for a page that is not known");
    }

    #[test]
    fn a_page_that_could_not_be_moved_is_tried_again_after_60_looks_however_long_a_round_takes() {
        let process = Remote::open(std::process::id()).expect("this process");
        let mut pages = Pages::default();
        pages.note([(0, Some(Seen { is_fast: false, is_shared: false }))].into_iter());
        pages.kept(0);
        let mut count = || {
            pages.look(&process, &Tiers::default(), 100).expect("nothing to read");
            pages.counts().0
        };
        let counts: Vec<u64> = (0..60).map(|_| count()).collect();
        assert_eq!((counts[..59].iter().sum::<u64>(), counts[59]), (0, 1));
    }

    #[test]
    fn new_mappings_leave_what_is_known_its_part_of_a_look() {
        let memory = ballast_sys::Anon::new(64 * HUGE_SIZE).expect("memory");
        let start = (memory.addr() as u64).next_multiple_of(UNIT);
        let (process, tiers) = (Remote::open(std::process::id()).expect("this process"), Tiers::default());
        for most in [8, 1].map(|units| units * UNIT / PAGE) {
            let mut pages = Pages::default();
            pages.set_areas(vec![(start, start + 20 * UNIT)]);
            while pages.rounds() == 0 {
                pages.look(&process, &tiers, most).expect("readable");
            }
            assert_eq!((pages.cursor, pages.unread.len()), (0, 0));
            pages.set_areas(vec![(start, start + 60 * UNIT)]);
            let read = pages.look(&process, &tiers, most).expect("readable") * PAGE;
            let (again, anew) = (pages.cursor - start, pages.unread[0].0 - (start + 20 * UNIT));
            assert_eq!(read, again + anew);
            assert!(again >= most * PAGE / 2 && anew >= most * PAGE / 2, "{again} and {anew}");
            assert!(read <= most.max(2 * UNIT / PAGE) * PAGE, "{read} of {most} pages");
        }
    }

    proptest! {
        #[test]
        fn what_ranges_have_beside_others_is_found_address_by_address(
            bounds in proptest::collection::btree_set(0u64..60, 0..12),
            others in proptest::collection::btree_set(0u64..60, 0..12),
        ) {
            let pairs = |bounds: &std::collections::BTreeSet<u64>| {
                let bounds: Vec<u64> = bounds.iter().copied().collect();
                bounds.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect::<Vec<_>>()
            };
            let (ranges, others) = (pairs(&bounds), pairs(&others));
            let is_in = |list: &[(u64, u64)], at: u64| list.iter().any(|(start, end)| (*start..*end).contains(&at));
            let left = without(&ranges, &others);
            prop_assert!(left.iter().all(|(start, end)| start < end));
            for at in 0..60 {
                prop_assert_eq!(is_in(&left, at), is_in(&ranges, at) && !is_in(&others, at), "{}: {:?}", at, left);
            }
        }
    }

    #[test]
    fn the_pages_of_a_real_process_are_found_and_belong_to_a_node() {
        let files = crate::kernel_files::Files::default();
        let Ok(tiers) = Tiers::detect(&files) else { return ballast_testkit::skip("numa", "no nodes") };
        let memory = ballast_sys::Anon::new(3000 * PAGE_SIZE).expect("memory");
        let touch = |pages: std::ops::Range<usize>| {
            let words = pages.step_by(2).map(|page| memory.word(page * PAGE_SIZE));
            words.for_each(|word| word.store(1, std::sync::atomic::Ordering::Relaxed));
        };
        touch(0..300);
        let start = memory.addr() as u64;
        let process = Remote::open(std::process::id()).expect("this process");
        let mut pages = Pages::default();
        pages.set_areas(vec![(start, start + 300 * PAGE)]);
        while pages.rounds() == 0 {
            pages.look(&process, &tiers, 100).expect("readable");
        }
        if pages.counts() == (0, 0) {
            return ballast_testkit::skip("root", "physical addresses are hidden");
        }
        assert_eq!(pages.counts().0, 150);
        // Memory that is mapped later is read first, and at once.
        touch(0..3000);
        pages.set_areas(vec![(start, start + 3000 * PAGE)]);
        assert!(pages.look(&process, &tiers, 10_000).expect("readable") >= 2700);
        assert_eq!(pages.counts().0, 1500);
    }
}
