//! Sequential readahead: finds threads that touch pages in order, and decides how many pages to bring in ahead of them.
//!
//! Before: a fault on a page that is far, zero, in quarantine, or was never touched (below: *out*). After: the pages
//! ahead of it that are brought in before its thread continues.
//! Threads: each fault worker has its own. Units: pages of a region.
//! Promise: it reads no page and never waits; a wrong guess costs time and space, never bytes.
//!
//! A stream begins with the third fault in order, each on the next page that is out. That fault brings in two more
//! pages, the next one four, and so on. (With the second fault, a stream began at each value that lies across two
//! pages, as a quarter of all values of 1 KiB do in jemalloc: Redis under a limit then restored 500 to 1,600 pages a
//! second that it did not touch.) Each page of a stream would be a fault, which costs two context switches; a page that
//! comes with another one costs only its decompression. It also comes in time: where CPUs are short, a separate thread
//! would be late.

use ballast_base::{PAGES_PER_UNIT, PageIdx, PageRange};

/// Number of faults in order at which a stream begins.
const IN_ORDER: u64 = 3;
/// Streams that each fault worker follows.
const STREAMS: usize = 8;
/// Most pages that come with a fault: 16 take some 35 us.
pub const MOST: u64 = 16;
/// Fewest pages that come with a fault of a stream.
const LEAST: u64 = 2;
/// Most and fewest pages ahead in a slow store, 512 and 64 KiB: a request takes longer than the pages' transfer.
const MOST_SLOW: u64 = 128;
const LEAST_SLOW: u64 = 16;
/// Range in which the next far page is searched for, in pages.
const REACH: u64 = 64;

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    region: u32,
    page: u64,
    /// The page after the last one brought in.
    next: u64,
    faults: u64,
    /// Pages that came with the last fault.
    ahead: u64,
    /// Number of the last fault of this stream.
    met: u64,
}

impl Stream {
    /// Returns whether this page is the next far one, at most `reach` pages ahead.
    fn leads_to(&self, region: u32, page: u64, reach: u64, is_far: impl Fn(u64) -> bool) -> bool {
        self.met > 0
            && self.region == region
            // Includes pages that were requested and have not arrived.
            && (self.page + 1..=self.next + reach).contains(&page)
            && !(self.next..page).any(is_far)
    }
}

/// Streams of faults, as one fault worker sees them, or all slow workers of a VM.
#[derive(Debug)]
pub struct Readahead {
    streams: [Stream; STREAMS],
    faults: u64,
    least: u64,
    most: u64,
}

impl Default for Readahead {
    fn default() -> Self {
        Self { streams: Default::default(), faults: 0, least: LEAST, most: MOST }
    }
}

impl Readahead {
    /// Streams of pages in slow stores.
    pub fn slow() -> Self {
        Self { least: LEAST_SLOW, most: MOST_SLOW, ..Self::default() }
    }

    /// A fault on this far page of a region of `pages` pages. Returns how many far pages to restore with it, and where.
    pub fn fault(&mut self, region: u32, page: u64, pages: u64, is_far: impl Fn(u64) -> bool) -> (u64, PageRange) {
        let unit_end = (page + 1).next_multiple_of(PAGES_PER_UNIT);
        let reach = REACH.max(self.most);
        let range = PageRange::of(PageIdx(page + 1), reach).before(PageIdx(unit_end.min(pages)));
        // A retry of the last fault, whose page was not available.
        let is_it = |stream: &Stream| stream.met > 0 && (stream.region, stream.page) == (region, page);
        if self.streams.iter().any(|stream| stream.met == self.faults && is_it(stream)) {
            return (0, range);
        }
        self.faults += 1;
        let (least, most) = (self.least, self.most);
        let ahead = match self.streams.iter_mut().find(|stream| stream.leads_to(region, page, reach, &is_far)) {
            Some(stream) => {
                stream.faults += 1;
                if stream.faults >= IN_ORDER {
                    stream.ahead = (stream.ahead * 2).clamp(least, most);
                }
                (stream.page, stream.next, stream.met) = (page, stream.next.max(page + 1), self.faults);
                stream.ahead
            }
            None => {
                let oldest = self.streams.iter_mut().min_by_key(|stream| stream.met).expect("there are some");
                *oldest = Stream { region, page, next: page + 1, faults: 1, ahead: 0, met: self.faults };
                0
            }
        };
        (ahead, range)
    }

    /// A fault on this page of a slow store. If its thread reads in order, returns the pages to read together with it,
    /// and the pages that were not requested yet, which may begin among the former. Some pages of both may be present
    /// or under way already. No page is requested that is more than [`MOST_SLOW`] pages ahead.
    pub fn request(
        &mut self,
        region: u32,
        page: u64,
        pages: u64,
        is_far: impl Fn(u64) -> bool,
    ) -> Option<(PageRange, PageRange)> {
        let ahead = self.fault(region, page, pages, is_far).0;
        let last = self.streams.iter_mut().find(|stream| ahead > 0 && stream.met == self.faults)?;
        let half = (page + 1 + ahead / 2).min(pages);
        let end = (page + 1 + ahead).min(pages);
        let unrequested = last.next.min(end);
        last.next = last.next.max(end);
        Some((PageRange::new(PageIdx(page + 1), PageIdx(half)), PageRange::new(PageIdx(unrequested), PageIdx(end))))
    }

    /// Returns whether a fault on this far page continues a stream.
    pub fn is_in_order(&self, region: u32, page: u64, is_far: impl Fn(u64) -> bool) -> bool {
        let reach = REACH.max(self.most);
        self.streams.iter().any(|stream| stream.leads_to(region, page, reach, &is_far))
    }

    /// Records that the pages that came with the last fault end before `end`.
    pub fn came(&mut self, end: u64) {
        if let Some(last) = self.streams.iter_mut().find(|stream| stream.met == self.faults) {
            last.next = last.next.max(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u64 = 4096;

    /// Touches these pages, of which some are far. Returns the number of faults, and of pages restored and not touched.
    fn touch(far: &mut [bool], touches: impl Iterator<Item = u64>) -> (u64, usize) {
        let (mut streams, mut faults) = (Readahead::default(), 0);
        let mut early = vec![false; far.len()];
        for page in touches {
            early[page as usize] = false;
            if !far[page as usize] {
                continue;
            }
            faults += 1;
            let (ahead, place) = streams.fault(0, page, far.len() as u64, |page| far[page as usize]);
            far[page as usize] = false;
            let (end, count) = (place.end().0, far.len() as u64);
            assert!(end <= count.max(page + 1) && end.saturating_sub(1) / 512 <= page.div_ceil(512));
            let with: Vec<u64> =
                place.iter().map(|page| page.0).filter(|page| far[*page as usize]).take(ahead as usize).collect();
            for page in with {
                (far[page as usize], early[page as usize]) = (false, true);
                streams.came(page + 1);
            }
        }
        (faults, early.into_iter().filter(|early| *early).count())
    }

    #[test]
    fn a_thread_that_reads_far_memory_in_order_faults_once_in_seventeen_pages() {
        let mut far = vec![true; PAGES as usize];
        let (faults, early) = touch(&mut far, 0..PAGES);
        assert!(faults < PAGES / 16 + PAGES / 512 + 8, "{faults}");
        assert_eq!(early, 0);
    }

    #[test]
    fn a_retried_fault_neither_ends_its_stream_nor_brings_in_more() {
        let mut streams = Readahead::default();
        for page in 0..4 {
            let _ = streams.fault(0, page, PAGES, |_| true);
        }
        assert!((0..100).all(|_| streams.fault(0, 3, PAGES, |_| true).0 == 0));
        assert_eq!(streams.fault(0, 4, PAGES, |_| true).0, 8);
    }

    #[test]
    fn a_value_across_two_pages_brings_no_third_one() {
        let mut streams = Readahead::default();
        for value in 0..100 {
            let page = value * 37 % PAGES;
            assert_eq!(streams.fault(0, page, PAGES, |_| true).0, 0);
            assert_eq!(streams.fault(0, page + 1, PAGES, |_| true).0, 0);
        }
    }

    #[test]
    fn no_page_ahead_of_a_thread_in_order_is_left_out() {
        let (mut streams, mut requested) = (Readahead::slow(), 1);
        for page in 0..1000 {
            let Some((with, rest)) = streams.request(0, page, PAGES, |_| true) else { continue };
            assert!(with.start().0 == page + 1 && with.end() <= rest.end(), "{with} and {rest}");
            assert!(rest.is_empty() || rest.start().0 == requested.max(page + 1), "{rest} after {requested}");
            requested = requested.max(rest.end().0);
        }
    }

    #[test]
    fn no_page_is_requested_twice_or_too_far_ahead_even_from_a_slow_store() {
        // A reader that faults on every page, and on every other one before its request is served.
        let (mut streams, mut requested) = (Readahead::slow(), 0);
        for page in 0..1000 {
            let Some((with, more)) = streams.request(0, page, PAGES, |_| true) else { continue };
            assert!(with.start().0 == page + 1 && with.count() <= MOST_SLOW / 2, "{with}");
            assert!(more.is_empty() || more.start().0 >= requested, "{more} after {requested}");
            assert!(more.end().0 <= page + 1 + MOST_SLOW, "{more} from {page}");
            requested = requested.max(more.end().0);
        }
        let mut streams = Readahead::slow();
        // Each page once, at a large distance from the last one.
        let hops = (0..PAGES).map(|at| at * 2531 % PAGES);
        assert!(hops.into_iter().all(|page| streams.request(0, page, PAGES, |_| true).is_none()));
    }

    #[test]
    fn a_random_touch_continues_no_stream_that_ended_shortly_before() {
        let mut streams = Readahead::slow();
        (0..PAGES)
            .map(|at| at * 2531 % PAGES)
            .take(64)
            .for_each(|page| assert!(streams.request(0, page, PAGES, |_| true).is_none()));
        let in_order = (0..PAGES).filter(|page| streams.is_in_order(0, *page, |_| true)).count();
        assert!(in_order <= STREAMS, "{in_order} pages");
        // No page is far between the end of each stream and these pages.
        let all_near = (0..PAGES).filter(|page| streams.is_in_order(0, *page, |_| false)).count();
        assert!(all_near > STREAMS * 64, "{all_near} pages");
    }

    #[test]
    fn present_pages_do_not_end_a_stream() {
        let mut far: Vec<bool> = (0..PAGES).map(|page| page % 7 == 0).collect();
        let (faults, _) = touch(&mut far, 0..PAGES);
        assert!(faults < PAGES / 7 / 5, "{faults} of {}", PAGES / 7);
    }

    #[test]
    fn some_threads_at_once_are_told_apart() {
        let mut far = vec![true; PAGES as usize];
        let (faults, _) = touch(&mut far, (0..PAGES / 4).flat_map(|at| [at, at + 1024, at + 2048, at + 3072]));
        assert!(faults < PAGES / 12, "{faults}");
    }

    #[test]
    fn random_touches_bring_in_next_to_no_other_page() {
        let mut far = vec![true; PAGES as usize];
        // Each page once, at a large distance from the last one.
        let (faults, _) = touch(&mut far, (0..PAGES).map(|at| at * 2531 % PAGES));
        assert!(faults > PAGES * 9 / 10, "{faults}");
    }

    #[test]
    fn touches_in_descending_order_or_across_far_gaps_are_no_stream() {
        let mut far = vec![true; PAGES as usize];
        assert_eq!(touch(&mut far, (0..PAGES).rev()), (PAGES, 0));
        let mut far = vec![true; PAGES as usize];
        assert_eq!(touch(&mut far, (0..PAGES).step_by(2)), (PAGES / 2, 0));
    }
}
