//! Translation between guest-physical pages and pages of regions, piece by piece.
//!
//! Before: the VMM stated the guest-physical addresses of each region. After: a page that the guest names is a page of
//! a region, if its piece is proved: the host found its nonce in the page that the guest named. Units: pages of 4 KiB.
//! Promise: a page in no proved piece is ignored; pieces do not overlap.

use ballast_base::guest::GuestRange;
use ballast_base::{PAGE_SIZE, PageIdx, PageRange};
use ballast_handover::state_file::StateFile;
use ballast_messages::Run;
use ballast_messages::message::MAX_PIECES;

/// A range of guest-physical memory that lies in one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    page: u64,
    count: u64,
    region: u32,
    /// First page in the region.
    first: PageIdx,
}

impl Piece {
    fn end(&self) -> u64 {
        self.page + self.count
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Places {
    /// Ascending, each with whether it is proved.
    pieces: Vec<(Piece, bool)>,
}

impl Places {
    /// The pieces that the VMM stated.
    pub fn of(state: &StateFile) -> Self {
        let records = state.regions();
        let known = (0..).zip(&records).filter(|(_, record)| !record.removed);
        Self::new(known.map(|(number, record)| (number, state.guest_ranges(number, record))))
    }

    /// The pieces of these regions: region number and guest-physical ranges.
    pub fn new(regions: impl Iterator<Item = (u32, Vec<GuestRange>)>) -> Self {
        let pages = |bytes: u64| bytes / PAGE_SIZE as u64;
        let of_region = |(region, ranges): (u32, Vec<GuestRange>)| {
            ranges.into_iter().map(move |range| Piece {
                page: pages(range.address),
                count: pages(range.len.0),
                region,
                first: PageIdx(pages(range.offset.0)),
            })
        };
        let mut all: Vec<Piece> = regions.flat_map(of_region).collect();
        all.sort_unstable();
        let mut pieces: Vec<(Piece, bool)> = Vec::new();
        for piece in all.into_iter().take(MAX_PIECES) {
            // Of two overlapping pieces, the later one is dropped.
            if pieces.last().is_none_or(|(last, _)| last.end() <= piece.page) {
                pieces.push((piece, false));
            }
        }
        Self { pieces }
    }

    /// Takes over the proofs of pieces that did not change.
    pub fn take_after(&mut self, last: &Self) {
        for (piece, proved) in &mut self.pieces {
            *proved = last.pieces.contains(&(*piece, true));
        }
    }

    pub fn unproved(&self) -> Vec<Run> {
        let open = self.pieces.iter().filter(|(_, proved)| !proved);
        open.map(|(piece, _)| Run::of(piece.page, u32::try_from(piece.count).unwrap_or(u32::MAX))).collect()
    }

    /// Number of pieces, and of those that are proved.
    pub fn count(&self) -> (u32, u32) {
        (self.pieces.len() as u32, self.pieces.iter().filter(|(_, proved)| *proved).count() as u32)
    }

    /// Number of pages, proved or not.
    pub fn pages(&self) -> u64 {
        self.pieces.iter().map(|(piece, _)| piece.count).sum()
    }

    /// The place of a guest-physical page, proved or not: index of its piece, region and page.
    pub fn expected(&self, page: u64) -> Option<(usize, u32, PageIdx)> {
        let at = self.pieces.partition_point(|(piece, _)| piece.page <= page).checked_sub(1)?;
        let (piece, _) = &self.pieces[at];
        (page < piece.end()).then(|| (at, piece.region, PageIdx(piece.first.0 + (page - piece.page))))
    }

    pub fn prove(&mut self, piece: usize) {
        if let Some((_, proved)) = self.pieces.get_mut(piece) {
            *proved = true;
        }
    }

    /// Proved parts of a run: region and pages.
    pub fn parts(&self, run: Run) -> impl Iterator<Item = (u32, PageRange)> + '_ {
        let from = self.pieces.partition_point(|(piece, _)| piece.end() <= run.page);
        let within = self.pieces[from..].iter().take_while(move |(piece, _)| piece.page < run.end());
        within.filter(|(_, proved)| *proved).filter_map(move |(piece, _)| {
            let (start, end) = (run.page.max(piece.page), run.end().min(piece.end()));
            let at = |page: u64| PageIdx(piece.first.0 + (page - piece.page));
            (start < end).then(|| (piece.region, PageRange::new(at(start), at(end))))
        })
    }

    /// The guest-physical page of a region's page; `None` if its piece is not proved.
    pub fn guest_page(&self, region: u32, page: PageIdx) -> Option<u64> {
        let has =
            |piece: &Piece| piece.region == region && (piece.first.0..piece.first.0 + piece.count).contains(&page.0);
        let (piece, _) = self.pieces.iter().find(|(piece, proved)| *proved && has(piece))?;
        Some(piece.page + (page.0 - piece.first.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::Bytes;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn range(offset: u64, page: u64, count: u64) -> GuestRange {
        let bytes = |pages: u64| pages * PAGE_SIZE as u64;
        GuestRange { address: bytes(page), offset: Bytes(bytes(offset)), len: Bytes(bytes(count)) }
    }

    fn pc() -> Places {
        Places::new([(0, vec![range(0, 0, 100), range(100, 1000, 50)]), (2, vec![range(0, 2000, 10)])].into_iter())
    }

    #[test]
    fn only_proved_pieces_are_found_and_a_run_is_cut_at_their_ends() {
        let mut places = pc();
        let parts = |places: &Places, run| places.parts(run).collect::<Vec<_>>();
        assert_eq!((parts(&places, Run::of(0, 3000)), places.count()), (Vec::new(), (3, 0)));
        let (at, region, page) = places.expected(1049).expect("the last page of it");
        assert_eq!((region, page, places.expected(1050)), (0, PageIdx(149), None));
        places.prove(at);
        places.prove(99);
        let high = PageRange::new(PageIdx(100), PageIdx(150));
        assert_eq!(parts(&places, Run::of(0, 3000)), [(0, high)]);
        assert_eq!(parts(&places, Run::of(1049, 1)), [(0, PageRange::one(PageIdx(149)))]);
        assert_eq!((places.guest_page(0, PageIdx(149)), places.guest_page(0, PageIdx(0))), (Some(1049), None));
        assert_eq!(places.unproved(), [Run::of(0, 100), Run::of(2000, 10)]);

        let mut again = pc();
        again.take_after(&places);
        assert_eq!(again, places);
        let mut moved = Places::new([(0, vec![range(100, 5000, 50)])].into_iter());
        moved.take_after(&places);
        assert_eq!(moved.count(), (1, 0));
    }

    #[test]
    fn of_two_overlapping_pieces_one_is_left() {
        let places = Places::new([(0, vec![range(0, 0, 100)]), (1, vec![range(0, 50, 100)])].into_iter());
        assert_eq!(places.count(), (1, 0));
    }

    proptest! {
        #[test]
        fn every_proved_part_lies_in_a_region_and_translates_back_to_the_same_page(
            runs in vec((0u64..1 << 40, 1u32..u32::MAX), 0..20), near in vec((0u64..2100, 1u32..2000), 0..20),
        ) {
            let mut places = pc();
            (0..3).for_each(|piece| places.prove(piece));
            for (page, count) in runs.into_iter().chain(near) {
                let run = Run::of(page, count);
                let mut sum = 0;
                for (region, pages) in places.parts(run) {
                    let len = if region == 0 { 150 } else { 10 };
                    prop_assert!(!pages.is_empty() && pages.end().0 <= len);
                    let first = places.guest_page(region, pages.start()).expect("proved");
                    prop_assert!((run.page..run.end()).contains(&first));
                    sum += pages.count();
                }
                prop_assert!(sum <= u64::from(count));
            }
        }
    }
}
