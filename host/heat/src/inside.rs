//! The pages inside one unit, as far as fine scans know them.
//!
//! Before: fine scans of the unit. After: which of its pages were touched recently and which were not, and an estimate
//! for the others.
//! Units: shares of 1; a page is one of the unit's 512. Promise: pure; about 2 KiB for a unit that had a full scan.

use ballast_base::PAGES_PER_UNIT;

use crate::Entry;
use crate::chance::Counts;
use crate::generations::{self, GENERATIONS};
use crate::moment::Moment;
use crate::sample::Estimate;
use crate::source::PageMap;
use crate::tally::Tally;

/// Full scans of one unit whose times are kept.
const SCANS: usize = 4;
/// A unit is uneven if its pages differ by this number of standard deviations more than by chance: one of 16,000 even
/// units seems uneven.
const SIGMAS: f64 = 4.0;

/// The pages of a unit that had a full scan.
#[derive(Clone, Debug)]
pub struct Scanned {
    entries: Box<[Entry; PAGES_PER_UNIT as usize]>,
    /// When, the last scan first; unused places hold the time of the first.
    at: [Moment; SCANS],
    /// Scans so far, at most [`SCANS`].
    scans: usize,
    /// The last scan found it bloated. Its cold pages are candidates once two scans agree.
    pub bloated: bool,
}

impl Scanned {
    pub(crate) fn new(at: Moment) -> Self {
        Self { entries: Box::new([Entry::default(); _]), at: [at; SCANS], scans: 0, bloated: false }
    }

    pub(crate) fn push(&mut self, at: Moment, watched: PageMap, touched: PageMap) {
        for page in watched.iter() {
            self.entries[page as usize].push(touched.get(page));
        }
        self.at.rotate_right(1);
        self.at[0] = at;
        self.scans = (self.scans + 1).min(SCANS);
    }

    /// The history of one page.
    ///
    /// # Panics
    /// If `page` is not below 512.
    pub fn entry(&self, page: u64) -> Entry {
        self.entries[page as usize]
    }

    /// When it was last scanned.
    pub fn last(&self) -> Moment {
        self.at[0]
    }

    /// The pages that any of the last `scans` scans saw touched.
    pub fn touched_within(&self, scans: u32) -> PageMap {
        self.pages(|entry| entry.age() < scans)
    }

    /// How many of the last `scans` scans there were, and the average share of `of` pages that they saw touched.
    pub fn share_within(&self, scans: u32, of: u64) -> (u32, f64) {
        let scans = scans.min(self.scans as u32);
        let mask = u32::MAX.checked_shr(Entry::CYCLES - scans).unwrap_or(0);
        let seen: u32 = self.entries.iter().map(|entry| (entry.touches() & mask).count_ones()).sum();
        (scans, f64::from(seen) / (f64::from(scans) * of as f64).max(1.0))
    }

    /// How many of the last scans in a row missed a page.
    fn misses(&self, page: u64) -> u32 {
        self.entry(page).age().min(self.scans as u32)
    }

    /// What the last scan counted of pages that the scans before had missed, for a unit of `of` pages.
    pub fn counts(&self, of: u64) -> Counts {
        let mut counts = Counts::default();
        let before = (self.scans as u32).saturating_sub(1);
        for entry in self.entries.iter().take(of as usize).filter(|_| before > 0) {
            counts.push((entry.touches() >> 1).trailing_zeros().min(before), entry.age() == 0);
        }
        counts
    }

    /// The pages in the oldest generation.
    pub fn cold(&self) -> PageMap {
        self.pages(|entry| generations::of_page(entry) == GENERATIONS - 1)
    }

    fn pages(&self, wanted: impl Fn(Entry) -> bool) -> PageMap {
        let mut map = PageMap::NONE;
        (0..PAGES_PER_UNIT).filter(|page| wanted(self.entries[*page as usize])).for_each(|page| map.set(page));
        map
    }

    /// The pages by the share of the scans that are kept that saw them touched, the most first.
    pub fn by_touches(&self) -> Vec<(f64, PageMap)> {
        let mask = (1u32 << self.scans) - 1;
        let of = |touches| self.pages(move |entry| (entry.touches() & mask).count_ones() as usize == touches);
        let levels = (0..=self.scans).rev().map(|touches| (touches as f64 / self.scans.max(1) as f64, of(touches)));
        levels.filter(|(_, pages)| !pages.is_empty()).collect()
    }

    /// Are some of the first `of` pages hotter than others? The number of scans that saw a page touched differs more
    /// from page to page than it does by chance where all pages are as warm: a stray access touches another page each
    /// time. One scan cannot tell.
    pub fn is_uneven(&self, of: u64) -> bool {
        let (scans, share) = self.share_within(SCANS as u32, of);
        let chance = f64::from(scans) * share * (1.0 - share);
        if scans < 2 || of < 2 || chance <= 0.0 {
            return false;
        }
        let mask = (1u32 << scans) - 1;
        let touches = |entry: &Entry| f64::from((entry.touches() & mask).count_ones());
        let apart = |entry| (touches(entry) - f64::from(scans) * share).powi(2);
        let others = (of - 1) as f64;
        let variance = self.entries.iter().take(of as usize).map(apart).sum::<f64>() / others;
        // The relative standard deviation of the variance of binomial counts, by their fourth moment.
        let deviation = ((1.0 / chance + 2.0 - 6.0 / f64::from(scans)) / others).sqrt();
        variance > chance * (1.0 + SIGMAS * deviation)
    }

    /// When a page was last seen touched; the time of the oldest scan that is kept if none saw it.
    pub fn seen(&self, page: u64) -> Moment {
        let age = self.entry(page).age() as usize;
        self.at[age.min(self.scans.saturating_sub(1))]
    }
}

/// A unit of which a random sample of pages was watched.
#[derive(Clone, Copy, Debug)]
pub struct Sampled {
    /// What the sample says of all pages.
    pub estimate: Estimate,
    /// When.
    pub at: Moment,
    /// Its pages.
    pub watched: PageMap,
    /// Those of them that were touched.
    pub touched: PageMap,
    /// This sample and those before it, by block.
    pub tally: Tally,
}

/// What is known of the inside of a unit.
#[derive(Clone, Debug)]
pub enum Inside {
    /// By a sample.
    Sampled(Sampled),
    /// By full scans.
    Scanned(Scanned),
}

impl Inside {
    /// When the last fine scan was.
    pub fn last(&self) -> Moment {
        match self {
            Self::Sampled(sampled) => sampled.at,
            Self::Scanned(scanned) => scanned.last(),
        }
    }

    /// How many of the last fine scans in a row missed a page; 0 if they did not watch it.
    pub fn misses(&self, page: u64) -> u32 {
        match self {
            Self::Sampled(sampled) => u32::from(sampled.watched.without(sampled.touched).get(page)),
            Self::Scanned(scanned) => scanned.misses(page),
        }
    }

    /// Share of the pages that are touched.
    pub fn share(&self) -> Estimate {
        match self {
            Self::Sampled(sampled) => sampled.estimate,
            Self::Scanned(scanned) => Estimate::new(scanned.touched_within(1).count(), PAGES_PER_UNIT, PAGES_PER_UNIT),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::SplitMix64;

    #[test]
    fn a_page_touched_in_a_past_scan_has_the_age_of_that_scan() {
        let mut scanned = Scanned::new(Moment(10));
        for (at, touched) in [(10, 3), (20, 2), (30, 1)] {
            scanned.push(Moment(at), PageMap::ALL, PageMap::first(touched));
        }
        assert_eq!([0, 1, 2, 3].map(|page| scanned.seen(page)), [30, 20, 10, 10].map(Moment));
        assert_eq!(scanned.touched_within(2), PageMap::first(2));
        assert_eq!(scanned.cold(), PageMap::ALL.without(PageMap::first(3)));
        assert_eq!(scanned.share_within(2, 512), (2, 3.0 / 1024.0));
        let levels: Vec<_> = scanned.by_touches().into_iter().map(|(share, pages)| (share, pages.count())).collect();
        assert_eq!(levels, [(1.0, 1), (2.0 / 3.0, 1), (1.0 / 3.0, 1), (0.0, 509)]);
    }

    #[test]
    fn some_hot_pages_among_strays_are_told_from_strays_alone_by_a_second_scan() {
        let mut rng = SplitMix64::new(3);
        let mut scan = |scanned: &mut Scanned, hot: PageMap| {
            scanned.push(Moment(1), PageMap::ALL, hot.or(rng.pages(36, PAGES_PER_UNIT)));
            scanned.is_uneven(PAGES_PER_UNIT)
        };
        for hot in [PageMap::first(51), PageMap::NONE] {
            let uneven = (0..200).filter(|_| {
                let mut scanned = Scanned::new(Moment(1));
                !scan(&mut scanned, hot) && scan(&mut scanned, hot)
            });
            let uneven = uneven.count();
            assert!(if hot.is_empty() { uneven < 3 } else { uneven == 200 }, "{uneven} of 200");
        }
    }

    #[test]
    fn misses_are_counted_in_scans_that_watched_the_page_and_the_last_scan_counts_what_followed() {
        let (watched, touched) = (PageMap::first(3), PageMap::first(1));
        let (estimate, tally) = (Estimate::new(1, 3, 512), Tally::default());
        let sampled = Inside::Sampled(Sampled { estimate, at: Moment(1), watched, touched, tally });
        assert_eq!([0, 1, 2, 3].map(|page| sampled.misses(page)), [0, 1, 1, 0]);
        let mut scanned = Scanned::new(Moment(10));
        for touched in [1, 0, 3] {
            scanned.push(Moment(10), PageMap::ALL, PageMap::first(touched));
        }
        let mut expected = Counts::default();
        expected.push(1, true);
        [true, true, false].into_iter().for_each(|touched| expected.push(2, touched));
        assert_eq!(scanned.counts(4), expected);
        assert_eq!([0, 3].map(|page| Inside::Scanned(scanned.clone()).misses(page)), [0, 3]);
    }
}
