//! Where a program's pages are: a bit for each page that is there, and one for each that is in the fast tier.
//!
//! Before: [`crate::programs`] knows what a program maps. After: `ballast_ranges::relocate` plans with it, and moves
//! are recorded in it. The page table is read a part at a time, round and round, so that the cost of an epoch does not
//! depend on the size. Units: addresses; units of 2 MiB, 512 bits each (64 KiB of bits for a GiB). Threads: none of its
//! own.
//! Promise: bounded by the program's memory. The bits may be old; then a move fails and is reported.

use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;

use ballast_base::{HUGE_SIZE, Hva, PAGE_SIZE, PAGES_PER_UNIT};
use ballast_ranges::Range;
use ballast_ranges::relocate::{Placement, Tier};
use ballast_sys::Remote;

use crate::nodes::Tiers;

const PAGE: u64 = PAGE_SIZE as u64;
const UNIT: u64 = HUGE_SIZE as u64;
const WORDS: usize = PAGES_PER_UNIT as usize / 64;
/// Units whose page-table entries are read by one call: 512 KiB of entries.
const READ_UNITS: u64 = 128;
/// Rounds through its memory after which pages that could not be moved are tried again.
const FORGIVEN_AFTER: u32 = 16;

#[derive(Clone, Debug, Default)]
struct Unit {
    present: [u64; WORDS],
    fast: [u64; WORDS],
    /// Pages that could not be moved, and are left alone for a while.
    kept: [u64; WORDS],
}

/// The pages of one program.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    units: BTreeMap<u64, Unit>,
    areas: Vec<(u64, u64)>,
    /// Address at which the next read begins.
    cursor: u64,
    rounds: u32,
}

fn place(address: u64) -> (u64, usize, u64) {
    let page = address % UNIT / PAGE;
    (address / UNIT, (page / 64) as usize, 1 << (page % 64))
}

impl Pages {
    /// Sets the memory that the program maps now, and forgets all other pages.
    pub fn set_areas(&mut self, areas: Vec<(u64, u64)>) {
        let covered = |unit: u64| {
            let after = areas.partition_point(|(start, _)| *start < (unit + 1) * UNIT);
            areas[..after].last().is_some_and(|(_, end)| *end > unit * UNIT)
        };
        self.units.retain(|unit, _| covered(*unit));
        self.areas = areas;
    }

    /// Reads about `most` page-table entries, from the end of the last read. Returns how many.
    ///
    /// # Errors
    /// The process is gone, or its page table may not be read.
    pub fn look(&mut self, process: &Remote, tiers: &Tiers, most: u64) -> io::Result<u64> {
        let mut read = 0;
        let mut frames = Vec::new();
        while read < most {
            let after = self.areas.partition_point(|(_, end)| *end <= self.cursor);
            let Some(&(start, end)) = self.areas.get(after) else {
                self.cursor = 0;
                self.rounds += 1;
                if self.rounds.is_multiple_of(FORGIVEN_AFTER) {
                    self.units.values_mut().for_each(|unit| unit.kept = [0; WORDS]);
                }
                break;
            };
            let from = start.max(self.cursor);
            let to = end.min(from / UNIT * UNIT + READ_UNITS * UNIT);
            frames.clear();
            frames.resize(((to - from) / PAGE) as usize, None);
            process.physical(Hva(from), &mut frames)?;
            let node = |at: Option<u64>| at.and_then(|at| tiers.node_of(at / PAGE));
            let found = frames.iter().map(|frame| node(*frame).map(|node| tiers.is_fast(node)));
            self.note((from..to).step_by(PAGE_SIZE).zip(found));
            read += (to - from) / PAGE;
            self.cursor = to;
        }
        Ok(read)
    }

    fn note(&mut self, found: impl Iterator<Item = (u64, Option<bool>)>) {
        let mut last: Option<(u64, Unit)> = None;
        for (address, is_fast) in found {
            let (number, word, bit) = place(address);
            if last.as_ref().is_none_or(|(last, _)| *last != number) {
                self.put(last.take());
                last = Some((number, self.units.remove(&number).unwrap_or_default()));
            }
            let Some((_, unit)) = &mut last else { continue };
            unit.present[word] &= !bit;
            unit.fast[word] &= !bit;
            unit.present[word] |= if is_fast.is_some() { bit } else { 0 };
            unit.fast[word] |= if is_fast == Some(true) { bit } else { 0 };
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

    /// A page is in this tier now.
    pub fn moved(&mut self, address: u64, tier: Tier) {
        let (number, word, bit) = place(address);
        if let Some(unit) = self.units.get_mut(&number) {
            unit.fast[word] = if tier == Tier::Fast { unit.fast[word] | bit } else { unit.fast[word] & !bit };
        }
    }

    /// The page is gone.
    pub fn gone(&mut self, address: u64) {
        let (number, word, bit) = place(address);
        if let Some(unit) = self.units.get_mut(&number) {
            unit.present[word] &= !bit;
            unit.fast[word] &= !bit;
        }
    }

    /// A page cannot be moved: leave it alone for a while.
    pub fn kept(&mut self, address: u64) {
        let (number, word, bit) = place(address);
        if let Some(unit) = self.units.get_mut(&number) {
            unit.kept[word] |= bit;
        }
    }

    /// Pages that can be moved, and how many of them are in the fast tier.
    pub fn counts(&self) -> (u64, u64) {
        let ones = |words: [u64; WORDS]| words.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        let each = self.units.values().map(|unit| {
            let free = |words: &[u64; WORDS]| std::array::from_fn(|at| words[at] & !unit.kept[at]);
            (ones(free(&unit.present)), ones(free(&unit.fast)))
        });
        each.fold((0, 0), |(present, fast), (more, of_them)| (present + more, fast + of_them))
    }

    /// Is this page in the fast tier: 1 or 0, or the share of its unit if the page is not known. `None` if nothing is
    /// known there.
    pub fn fast_share(&self, address: u64) -> Option<f64> {
        let (number, word, bit) = place(address);
        let unit = self.units.get(&number)?;
        if unit.present[word] & bit != 0 {
            return Some(f64::from(u8::from(unit.fast[word] & bit != 0)));
        }
        let ones = |words: &[u64; WORDS]| words.iter().map(|word| word.count_ones()).sum::<u32>();
        Some(f64::from(ones(&unit.fast)) / f64::from(ones(&unit.present).max(1)))
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
                let free = unit.present[word] & !unit.kept[word] & inside;
                Word { address, free, fast: free & unit.fast[word] }
            })
        })
    }
}

impl Placement for Pages {
    fn visit(&self, range: &Range, each: &mut dyn FnMut(u64, Tier) -> ControlFlow<()>) {
        let _ = self.words(range).try_for_each(|word| {
            let tier = |address: u64| match word.fast >> ((address - word.address) / PAGE) & 1 {
                1 => Tier::Fast,
                _ => Tier::Slow,
            };
            word.each(word.free, &mut |address| each(address, tier(address)))
        });
    }

    fn count(&self, range: &Range) -> (u64, u64) {
        let counts = self.words(range).map(|word| (word.free.count_ones(), word.fast.count_ones()));
        counts.fold((0, 0), |(free, fast), (more, of_them)| (free + u64::from(more), fast + u64::from(of_them)))
    }

    fn visit_in(&self, range: &Range, wanted: Tier, each: &mut dyn FnMut(u64) -> ControlFlow<()>) {
        let of = |word: &Word| if wanted == Tier::Fast { word.fast } else { word.free & !word.fast };
        let _ = self.words(range).try_for_each(|word| word.each(of(&word), each));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap as Map;

    proptest! {
        #[test]
        fn pages_are_visited_once_in_order_with_their_tier_until_they_are_gone_or_kept(
            found in proptest::collection::btree_map(0u64..2000, any::<Option<bool>>(), 0..200),
            then in proptest::collection::vec((0u64..2000, 0u8..4), 0..50),
            start in 0u64..2000, len in 0u64..2000,
        ) {
            let mut pages = Pages::default();
            pages.note(found.iter().map(|(page, is_fast)| (page * PAGE, *is_fast)));
            let mut model: Map<u64, (bool, bool)> =
                found.iter().filter_map(|(page, is_fast)| Some((*page, ((*is_fast)?, false)))).collect();
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
            let mut seen = Vec::new();
            pages.visit(&range, &mut |address, tier| {
                seen.push((address / PAGE, tier == Tier::Fast));
                ControlFlow::Continue(())
            });
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
            prop_assert_eq!(Placement::count(&pages, &range), (expected.len() as u64, fast));
            prop_assert_eq!(seen, expected);
            let fast = free.clone().filter(|(_, (fast, _))| *fast).count() as u64;
            prop_assert_eq!(pages.counts(), (free.count() as u64, fast));
        }
    }

    #[test]
    fn what_is_unmapped_is_forgotten_and_a_look_goes_round() {
        let mut pages = Pages::default();
        pages.note([(0, Some(true)), (UNIT, Some(false)), (3 * UNIT, Some(true))].into_iter());
        pages.set_areas(vec![(UNIT + PAGE, UNIT + 3 * PAGE), (3 * UNIT, 4 * UNIT)]);
        assert_eq!(pages.counts(), (2, 1), "a unit that is covered in part is kept until it is looked at");
        assert_eq!((pages.fast_share(3 * UNIT), pages.fast_share(9 * UNIT)), (Some(1.0), None));
        assert_eq!(pages.fast_share(3 * UNIT + PAGE), Some(1.0), "the unit's, for a page that is not known");
    }

    #[test]
    fn the_pages_of_a_real_process_are_found_and_belong_to_a_node() {
        let files = crate::kernel_files::Files::default();
        let Ok(tiers) = Tiers::detect(&files) else { return ballast_needs::skip("numa", "no nodes") };
        let memory = ballast_sys::Anon::new(300 * PAGE_SIZE).expect("memory");
        (0..300)
            .step_by(2)
            .for_each(|page| memory.word(page * PAGE_SIZE).store(1, std::sync::atomic::Ordering::Relaxed));
        let start = memory.addr() as u64;
        let process = Remote::open(std::process::id()).expect("this process");
        let mut pages = Pages::default();
        pages.set_areas(vec![(start, start + 300 * PAGE)]);
        while pages.rounds() == 0 {
            pages.look(&process, &tiers, 100).expect("readable");
        }
        if pages.counts() == (0, 0) {
            return ballast_needs::skip("root", "physical addresses are hidden");
        }
        assert_eq!(pages.counts().0, 150);
    }
}
