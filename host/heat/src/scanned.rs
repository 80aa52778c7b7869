//! The pages of one unit, as far as fine scans know them.
//!
//! Before: fine scans of the unit. After: the pages that were touched recently, and whether the others are colder.
//! Units: shares of 1; a page is one of the unit's 512.
//! Promise: pure; about 2 KiB.
//!
//! One scan cannot tell a unit of which a fifth is hot from a unit that is lukewarm all over: both show a fifth. More
//! scans can: in the first unit they show the same pages, in the second mostly different ones.

use ballast_base::PAGES_PER_UNIT;

use crate::Entry;
use crate::entry::RECENT;
use crate::moment::Moment;
use crate::source::PageMap;

/// Scans whose times are kept.
const SCANS: usize = 4;
/// A unit is uneven if its pages differ by this number of standard deviations: 1 of 16,000 even units seems so.
const SIGMAS: f64 = 4.0;
/// A unit is bloated if a smaller share of its pages is touched.
const BLOATED_BELOW: f64 = 0.2;

#[derive(Clone, Debug)]
pub struct Scanned {
    entries: Box<[Entry; PAGES_PER_UNIT as usize]>,
    /// Times of the scans, the last one first; unused places hold the time of the first.
    at: [Moment; SCANS],
    /// Scans so far, at most [`SCANS`].
    scans: usize,
}

impl Scanned {
    pub(crate) fn new(at: Moment) -> Self {
        Self { entries: Box::new([Entry::default(); _]), at: [at; SCANS], scans: 0 }
    }

    pub(crate) fn push(&mut self, at: Moment, touched: PageMap) {
        for (page, entry) in (0..).zip(self.entries.iter_mut()) {
            entry.push(touched.get(page));
        }
        self.at.rotate_right(1);
        self.at[0] = at;
        self.scans = (self.scans + 1).min(SCANS);
    }

    /// Whether there was only one scan, which cannot tell hot pages from lukewarm ones.
    pub fn is_half_done(&self) -> bool {
        self.scans == 1
    }

    pub fn last(&self) -> Moment {
        self.at[0]
    }

    /// The pages that one of the recent scans saw touched.
    pub fn hot(&self) -> PageMap {
        self.pages(|entry| entry.age() < RECENT)
    }

    /// Whether the last scan saw a page touched.
    pub fn is_touched(&self, page: u64) -> bool {
        self.entries[page as usize].age() == 0
    }

    /// The average share of `of` pages that the kept scans saw touched.
    pub fn share(&self, of: u64) -> f64 {
        let seen: u32 = self.entries.iter().map(|entry| self.touches(*entry)).sum();
        f64::from(seen) / (self.scans as f64 * of as f64).max(1.0)
    }

    /// Number of the kept scans that saw a page touched.
    fn touches(&self, entry: Entry) -> u32 {
        (entry.touches() & ((1 << self.scans) - 1)).count_ones()
    }

    fn pages(&self, wanted: impl Fn(Entry) -> bool) -> PageMap {
        let mut map = PageMap::NONE;
        (0..PAGES_PER_UNIT).filter(|page| wanted(self.entries[*page as usize])).for_each(|page| map.set(page));
        map
    }

    /// The pages by the share of the kept scans that saw them touched, the highest first.
    pub fn by_touches(&self) -> Vec<(f64, PageMap)> {
        let of = |touches| self.pages(move |entry| self.touches(entry) as usize == touches);
        let levels = (0..=self.scans).rev().map(|touches| (touches as f64 / self.scans.max(1) as f64, of(touches)));
        levels.filter(|(_, pages)| !pages.is_empty()).collect()
    }

    /// The pages of `of` that no recent scan saw touched. `None` if the scans do not tell pages apart.
    pub fn cold(&self, of: u64) -> Option<PageMap> {
        self.is_uneven(of).then(|| PageMap::first(of).without(self.hot()))
    }

    /// The cold pages of a unit that is hot by a few pages alone.
    pub fn bloat(&self, of: u64) -> Option<PageMap> {
        self.cold(of).filter(|_| self.share(of) < BLOATED_BELOW)
    }

    /// Returns whether some of the first `of` pages are hotter than others: the number of scans that saw a page touched
    /// differs more from page to page than by chance. If all pages are equally warm, each scan sees other pages
    /// touched. One scan cannot tell.
    pub fn is_uneven(&self, of: u64) -> bool {
        let (scans, share) = (self.scans as f64, self.share(of));
        let chance = scans * share * (1.0 - share);
        if self.scans < 2 || of < 2 || chance <= 0.0 {
            return false;
        }
        let apart = |entry: &Entry| (f64::from(self.touches(*entry)) - scans * share).powi(2);
        let others = (of - 1) as f64;
        let variance = self.entries.iter().take(of as usize).map(apart).sum::<f64>() / others;
        // Relative standard deviation of the variance of binomial counts, by their fourth moment.
        let deviation = ((1.0 / chance + 2.0 - 6.0 / scans) / others).sqrt();
        variance > chance * (1.0 + SIGMAS * deviation)
    }

    /// Time of a page's last touch; the time of the oldest kept scan if none saw one.
    pub fn seen(&self, page: u64) -> Moment {
        let age = self.entries[page as usize].age() as usize;
        self.at[age.min(self.scans.saturating_sub(1))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_testkit::random::Random;

    #[test]
    fn a_page_touched_in_a_past_scan_has_the_age_of_that_scan() {
        let mut scanned = Scanned::new(Moment(10));
        for (at, touched) in [(10, 3), (20, 2), (30, 1)] {
            scanned.push(Moment(at), PageMap::first(touched));
        }
        assert_eq!([0, 1, 2, 3].map(|page| scanned.seen(page)), [30, 20, 10, 10].map(Moment));
        assert_eq!(scanned.hot(), PageMap::first(3));
        assert_eq!(scanned.share(512), 6.0 / 1536.0);
        let levels: Vec<_> = scanned.by_touches().into_iter().map(|(share, pages)| (share, pages.count())).collect();
        assert_eq!(levels, [(1.0, 1), (2.0 / 3.0, 1), (1.0 / 3.0, 1), (0.0, 509)]);
    }

    #[test]
    fn a_second_scan_tells_some_hot_pages_among_strays_from_strays_alone() {
        let mut random = Random(3);
        let mut scan = |scanned: &mut Scanned, hot: PageMap| {
            let mut touched = hot;
            (0..36).for_each(|_| touched.set(random.below(PAGES_PER_UNIT)));
            scanned.push(Moment(1), touched);
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
}
