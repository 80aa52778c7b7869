//! Extents: the parts of files that a region of guest RAM consists of, in the order of its pages.
//!
//! Before: a VMM maps pieces of files one after the other. After: every crate finds the place of a page, and the page
//! of a place, by the same rule.
//! Threads: any; a plain value. Units: bytes of files, pages of the region.
//! Promise: pages and places correspond one to one: no two extents of a region share a byte of a file, and all are
//! whole pages. Pieces of a file that follow each other are one extent, so equal RAM has equal extents.

use std::sync::Arc;

use crate::extent::{Extent, MAX_EXTENTS, check_pages};
use crate::{Bytes, HUGE_SIZE, Invalid, PAGE_SIZE, PageCount, PageIdx, PageRange};

/// The extents of a region, in the order of its pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extents {
    list: Arc<[Extent]>,
    /// The first page of each in the region, and the page after the last one.
    starts: Arc<[PageIdx]>,
}

/// Neighbouring pages of a region that are neighbours in one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The pages.
    pub pages: PageRange,
    /// The file that they are in.
    pub file: u16,
    /// Offset of the first page in the file.
    pub offset: u64,
}

impl Extents {
    /// The extents of a region, one after the other.
    pub fn new(list: &[Extent]) -> Result<Self, Invalid> {
        if list.is_empty() {
            return Err("it has no extents".into());
        }
        if list.len() > MAX_EXTENTS {
            return Err(format!("it has {} extents; at most {MAX_EXTENTS} are allowed", list.len()).into());
        }
        let mut merged: Vec<Extent> = Vec::with_capacity(list.len());
        let mut starts = vec![PageIdx(0)];
        let mut end = 0u64;
        for (at, extent) in list.iter().copied().enumerate() {
            check_pages(at, extent, PAGE_SIZE as u64)?;
            let fits = |end: Option<u64>| end.filter(|end| *end <= i64::MAX as u64);
            let (Some(_), Some(sum)) =
                (fits(extent.offset.0.checked_add(extent.len.0)), fits(end.checked_add(extent.len.0)))
            else {
                let (len, offset, file) = (extent.len.0, extent.offset.0, extent.file);
                let why = format!("extent {at}, {len} bytes from offset {offset:#x} of file {file}, is too long");
                return Err(why.into());
            };
            end = sum;
            match merged.last_mut() {
                Some(last) if last.file == extent.file && last.end() == extent.offset.0 => {
                    last.len.0 += extent.len.0;
                    starts.pop();
                }
                _ => merged.push(extent),
            }
            starts.push(PageIdx::containing(end));
        }
        let mut sorted = merged.clone();
        sorted.sort_unstable_by_key(|extent| (extent.file, extent.offset.0));
        if let Some([_, next]) =
            sorted.array_windows().find(|[one, next]| one.file == next.file && next.offset.0 < one.end())
        {
            let (at, file) = (next.offset.0, next.file);
            return Err(format!("two of its extents overlap at offset {at:#x} of file {file}").into());
        }
        Ok(Self { list: merged.into(), starts: starts.into() })
    }

    /// The one extent of a region that is one piece of the first file.
    pub fn one(offset: Bytes, len: Bytes) -> Result<Self, Invalid> {
        Self::new(&[Extent { file: 0, offset, len }])
    }

    /// Check that each extent lies within its file, by the files' sizes, and consists of whole pages of `page` bytes.
    pub fn check(&self, sizes: &[Bytes], page: u64) -> Result<(), Invalid> {
        for (at, extent) in self.list.iter().copied().enumerate() {
            let Some(size) = sizes.get(usize::from(extent.file)) else {
                let (file, files) = (extent.file, sizes.len());
                return Err(format!("extent {at} is of file {file}, and there are {files} files").into());
            };
            check_pages(at, extent, page)?;
            if extent.end() > size.0 {
                let (end, file) = (extent.end(), extent.file);
                let why =
                    format!("extent {at} ends at offset {end:#x} of file {file}, which has {} bytes only", size.0);
                return Err(why.into());
            }
        }
        Ok(())
    }

    /// Check that the extents have the length of the region.
    pub fn check_len(&self, region: Bytes) -> Result<(), Invalid> {
        let extents = self.pages().bytes().0;
        match extents == region.0 {
            true => Ok(()),
            false => Err(format!("its extents have {extents} bytes, and it has {}", region.0).into()),
        }
    }

    /// The list, in the order of the region's pages.
    pub fn list(&self) -> &[Extent] {
        &self.list
    }

    /// Pages of the region.
    pub fn pages(&self) -> PageCount {
        PageCount(self.starts.last().map_or(0, |end| end.0))
    }

    /// The largest number of a file that an extent names, plus one.
    pub fn files(&self) -> usize {
        self.list.iter().map(|extent| usize::from(extent.file) + 1).max().unwrap_or(0)
    }

    /// These extents with their files renumbered.
    #[must_use]
    pub fn renumbered(&self, number: impl Fn(u16) -> u16) -> Self {
        let list = self.list.iter().map(|extent| Extent { file: number(extent.file), ..*extent });
        Self { list: list.collect(), starts: self.starts.clone() }
    }

    /// Bytes of the extents in one file.
    pub fn of_file(&self, file: u16) -> Bytes {
        Bytes(self.list.iter().filter(|extent| extent.file == file).map(|extent| extent.len.0).sum())
    }

    /// Is each unit of the region, counted from its start, an aligned 2 MiB of a file?
    pub fn are_units(&self) -> bool {
        let aligned = |value: u64| value.is_multiple_of(HUGE_SIZE as u64);
        let places = self.list.iter().all(|extent| aligned(extent.offset.0));
        places && self.starts[..self.list.len()].iter().all(|start| aligned(start.offset()))
    }

    /// The place of a page: the number of its file and its offset there.
    ///
    /// # Panics
    /// If the region has no such page.
    pub fn place(&self, page: PageIdx) -> (u16, u64) {
        let at = self.of_page(page);
        let extent = self.list.get(at).unwrap_or_else(|| panic!("{page} is outside a region of {}", self.pages().0));
        (extent.file, extent.offset.0 + (page.offset() - self.starts[at].offset()))
    }

    /// The index, in the list, of the extent that has this page.
    fn of_page(&self, page: PageIdx) -> usize {
        if self.list.len() == 1 && page < self.starts[1] {
            return 0;
        }
        self.starts.partition_point(|start| *start <= page) - 1
    }

    /// The first page after this one that is not its neighbour in its file; the region's end if all are.
    pub fn run_end(&self, page: PageIdx) -> PageIdx {
        self.starts.get(self.of_page(page) + 1).copied().unwrap_or(PageIdx(self.pages().0))
    }

    /// These pages, cut where an extent ends. Pages outside the region are left out.
    pub fn pieces(&self, pages: PageRange) -> impl Iterator<Item = Piece> + use<'_> {
        let mut rest = pages.before(PageIdx(self.pages().0));
        let mut at = if rest.is_empty() { self.list.len() } else { self.of_page(rest.start()) };
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let (extent, start) = (self.list[at], self.starts[at]);
            let piece = rest.before(self.starts[at + 1]);
            rest = rest.from(piece.end());
            at += 1;
            let offset = extent.offset.0 + (piece.start().offset() - start.offset());
            Some(Piece { pages: piece, file: extent.file, offset })
        })
    }

    /// Where these bytes of a file are in the region: offsets from its start, and lengths.
    pub fn bytes_at(&self, file: u16, offset: u64, len: u64) -> impl Iterator<Item = (u64, u64)> + use<'_> {
        let end = offset.saturating_add(len);
        let extents = self.list.iter().zip(self.starts.iter());
        extents.filter(move |(extent, _)| extent.file == file).filter_map(move |(extent, start)| {
            let (from, until) = (offset.max(extent.offset.0), end.min(extent.end()));
            (from < until).then(|| (start.offset() + (from - extent.offset.0), until - from))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn extent(file: u16, first: u64, pages: u64) -> Extent {
        Extent { file, offset: Bytes(first * PAGE), len: Bytes(pages * PAGE) }
    }

    /// Extents that do not overlap: pieces of up to three files, in any order.
    fn lists() -> impl Strategy<Value = Vec<Extent>> {
        let piece = (0u16..3, 0u64..5, 1u64..40);
        proptest::collection::vec(piece, 1..20).prop_flat_map(|pieces| {
            let mut ends = [0; 3];
            let list = pieces.into_iter().map(|(file, gap, pages)| {
                let end = &mut ends[usize::from(file)];
                *end += gap + pages;
                extent(file, *end - pages, pages)
            });
            Just(list.collect::<Vec<_>>()).prop_shuffle()
        })
    }

    /// The naive model: the place of each page, by its number.
    fn places(list: &[Extent]) -> Vec<(u16, u64)> {
        let of = |extent: &Extent| {
            let extent = *extent;
            (0..extent.len.0 / PAGE).map(move |page| (extent.file, extent.offset.0 + page * PAGE))
        };
        list.iter().flat_map(of).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn pages_and_places_are_those_of_a_list_of_all_pages(
            list in lists(), start in 0u64..400, count in 0u64..400, file in 0u16..4, at in 0u64..400, len in 0u64..200,
        ) {
            let (model, extents) = (places(&list), Extents::new(&list).expect("apart"));
            prop_assert_eq!(extents.pages(), PageCount(model.len() as u64));
            for (page, place) in model.iter().enumerate() {
                let page = PageIdx(page as u64);
                prop_assert_eq!(extents.place(page), *place);
                prop_assert_eq!(extents.bytes_at(place.0, place.1 + 77, 1).next(), Some((page.offset() + 77, 1)));
                let run = model[page.0 as usize..].iter().zip(0..);
                let run = run.take_while(|(next, n)| **next == (place.0, place.1 + n * PAGE)).count();
                prop_assert_eq!(extents.run_end(page), PageIdx(page.0 + run as u64));
            }
            let asked = PageRange::of(PageIdx(start), count);
            let mut found = Vec::new();
            for Piece { pages, file, offset } in extents.pieces(asked) {
                prop_assert!(!pages.is_empty() && pages.end() <= extents.run_end(pages.start()));
                let place = |page: PageIdx| (file, offset + (page.offset() - pages.start().offset()));
                found.extend(pages.iter().map(|page| (page, place(page))));
            }
            let all = model.iter().enumerate().map(|(page, place)| (PageIdx(page as u64), *place));
            prop_assert_eq!(found, all.clone().filter(|(page, _)| asked.contains(*page)).collect::<Vec<_>>());

            let (from, until) = (at * PAGE + 5, at * PAGE + 5 + len * 100);
            let expected = all.filter(|(_, (of, _))| *of == file).filter_map(|(page, (_, byte))| {
                let (first, end) = (from.max(byte), until.min(byte + PAGE));
                (first < end).then(|| (page.offset() + (first - byte), end - first))
            });
            let (mut back, mut expected) =
                (extents.bytes_at(file, from, until - from).collect::<Vec<_>>(), expected.collect::<Vec<_>>());
            back.sort_unstable();
            expected.dedup_by(|next, kept| {
                // Bytes that are neighbours both in the region and in the file are in one range of the result.
                let joins = kept.0 + kept.1 == next.0
                    && extents.run_end(PageIdx::containing(kept.0)) > PageIdx::containing(next.0);
                kept.1 += if joins { next.1 } else { 0 };
                joins
            });
            prop_assert_eq!(back, expected);
        }

        #[test]
        fn two_extents_with_a_byte_in_common_are_refused_and_others_are_not(
            list in proptest::collection::vec((0u16..2, 0u64..30, 1u64..6), 1..6),
        ) {
            let list: Vec<_> = list.into_iter().map(|(file, first, pages)| extent(file, first, pages)).collect();
            let mut all = places(&list);
            let count = all.len();
            all.sort_unstable();
            all.dedup();
            prop_assert_eq!(Extents::new(&list).is_ok(), all.len() == count);
        }

        #[test]
        fn equal_ram_has_equal_extents_however_it_is_cut(list in lists(), cut in 1u64..7) {
            let pieces = list.iter().flat_map(|whole| {
                let pages = whole.len.0 / PAGE;
                (0..pages).step_by(cut as usize).map(move |first| {
                    extent(whole.file, whole.offset.0 / PAGE + first, cut.min(pages - first))
                })
            });
            let pieces: Vec<_> = pieces.collect();
            prop_assert_eq!(Extents::new(&pieces), Extents::new(&list));
        }

        #[test]
        fn any_numbers_are_extents_or_an_error(
            list in proptest::collection::vec((any::<u16>(), any::<u64>(), any::<u64>()), 0..5), whole in any::<bool>(),
        ) {
            let cut = |bytes: u64| Bytes(if whole { bytes & !(PAGE - 1) } else { bytes });
            let extent = |(file, offset, len)| Extent { file, offset: cut(offset), len: cut(len) };
            let list: Vec<_> = list.into_iter().map(extent).collect();
            if let Ok(extents) = Extents::new(&list) {
                let last = PageIdx(extents.pages().0 - 1);
                extents.place(last);
                prop_assert_eq!(extents.pieces(PageRange::one(last)).count(), 1);
                prop_assert!(extents.check(&[], PAGE).is_err());
            }
        }
    }

    #[test]
    fn what_is_wrong_with_extents_is_said_by_name() {
        let said = |list: &[Extent]| Extents::new(list).expect_err("wrong").to_string();
        assert_eq!(said(&[]), "it has no extents");
        assert!(said(&vec![extent(0, 0, 1); MAX_EXTENTS + 1]).contains("1025 extents; at most 1024"));
        let odd = Extent { offset: Bytes(1), ..extent(3, 0, 1) };
        assert!(said(&[extent(0, 0, 1), odd]).contains("extent 1, 4096 bytes from offset 0x1 of file 3"));
        assert!(said(&[Extent { len: Bytes(0), ..extent(0, 0, 1) }]).contains("0 bytes"));
        let far = Extent { offset: Bytes(u64::MAX - 4095), ..extent(0, 0, 1) };
        assert!(said(&[far]).contains("too long"));
        assert!(
            said(&[extent(0, 5, 9), extent(1, 5, 9), extent(0, 13, 1)]).contains("overlap at offset 0xd000 of file 0")
        );

        let extents = Extents::new(&[extent(0, 0, 512), extent(1, 512, 1)]).expect("good");
        let said = |sizes: &[Bytes], page| extents.check(sizes, page).expect_err("wrong").to_string();
        assert!(said(&[Bytes(512 * PAGE)], PAGE).contains("extent 1 is of file 1, and there are 1 files"));
        let sizes = [Bytes(512 * PAGE), Bytes(512 * PAGE)];
        assert!(
            said(&sizes, PAGE).contains("extent 1 ends at offset 0x201000 of file 1, which has 2097152 bytes only")
        );
        assert!(said(&[Bytes(1 << 30); 2], HUGE_SIZE as u64).contains("whole pages of 2097152 bytes"));
        assert_eq!(extents.check(&[Bytes(1 << 30); 2], PAGE), Ok(()));
        assert!(extents.check_len(Bytes(512 * PAGE)).expect_err("longer").to_string().contains("2101248 bytes"));
    }

    #[test]
    fn units_are_those_of_extents_that_begin_at_multiples_of_2_mib() {
        let units = |list: &[Extent]| Extents::new(list).expect("good").are_units();
        assert!(units(&[extent(0, 512, 512), extent(0, 0, 512), extent(1, 1024, 3)]));
        assert!(!units(&[extent(0, 512, 511), extent(0, 0, 512)]) && !units(&[extent(0, 1, 512)]));
    }
}
