//! Kept: parts of a view that cannot be zapped, because the VMM locked them or mapped other memory over its RAM.
//!
//! Before: a client zapped a range and reported parts that it kept. After: reclaim does not propose those parts again.
//! Threads: any; only the worker that zaps writes. Units: pages of a region, whole granules.
//! Promise: a part stays kept as long as the region is mapped in this view.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use ballast_base::PageRange;

/// Key: region number and first page; value: the page after the last one.
type Parts = BTreeMap<(u32, u64), u64>;

/// Most parts of a view, about as many as a process may have mappings (`vm.max_map_count`). Beyond that, the pages
/// between two parts count as kept as well.
const MOST: usize = 1 << 16;

#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// Parts of one region neither overlap nor touch.
    parts: RwLock<Parts>,
    any: AtomicBool,
}

impl Kept {
    /// Marks these pages as kept. Returns whether that changed anything.
    pub fn add(&self, region: u32, pages: PageRange) -> bool {
        if pages.is_empty() {
            return false;
        }
        let mut parts = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        let (mut start, mut end) = (pages.start().0, pages.end().0);
        while let Some((&(_, first), &last)) = parts.range((region, 0)..=(region, end)).next_back()
            && last >= start
        {
            if first <= start && end <= last {
                return false;
            }
            parts.remove(&(region, first));
            (start, end) = (start.min(first), end.max(last));
        }
        if parts.len() >= MOST {
            let before = parts.range((region, 0)..(region, start)).next_back().map(|(&(_, first), _)| first);
            let after =
                parts.range((region, end)..=(region, u64::MAX)).next().map(|(&(_, first), &last)| (first, last));
            match (before, after) {
                (Some(first), _) => start = first,
                (None, Some((first, last))) => {
                    parts.remove(&(region, first));
                    end = last;
                }
                (None, None) => {}
            }
        }
        parts.insert((region, start), end);
        self.any.store(true, Ordering::Release);
        true
    }

    pub fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    pub fn contains(&self, region: u32, page: u64) -> bool {
        let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
        parts.range((region, 0)..=(region, page)).next_back().is_some_and(|(_, end)| page < *end)
    }

    pub fn forget(&self, region: u32) {
        let mut parts = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        parts.retain(|(number, _), _| *number != region);
        self.any.store(!parts.is_empty(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::PageIdx;
    use proptest::prelude::*;

    #[test]
    fn parts_of_a_client_that_keeps_every_other_page_are_bounded() {
        let kept = Kept::default();
        // In descending order: each part lies before all others.
        for page in (0..2 * MOST as u64).rev() {
            assert!(kept.add(1, PageRange::one(PageIdx(2 * page))), "page {page}");
        }
        assert!(kept.add(0, PageRange::one(PageIdx(7))), "the first of another region");
        assert!(kept.parts.read().expect("no panic").len() <= MOST + 1);
        assert!((0..2 * MOST as u64).all(|page| kept.contains(1, 2 * page)));
        assert!(kept.contains(0, 7) && !kept.contains(0, 8));
    }

    proptest! {
        #[test]
        fn the_kept_pages_are_the_added_ones(added in proptest::collection::vec((0u32..3, 0u64..40, 0u64..12), 0..30)) {
            let kept = Kept::default();
            let mut pages = std::collections::HashSet::new();
            for (region, first, count) in added {
                let before = pages.len();
                pages.extend((first..first + count).map(|page| (region, page)));
                prop_assert_eq!(kept.add(region, PageRange::of(PageIdx(first), count)), pages.len() > before);
            }
            prop_assert_eq!(kept.any(), !pages.is_empty());
            for (region, page) in (0..4).flat_map(|region| (0..60).map(move |page| (region, page))) {
                prop_assert_eq!(kept.contains(region, page), pages.contains(&(region, page)));
            }
            kept.forget(1);
            prop_assert!((0..60).all(|page| !kept.contains(1, page)));
            prop_assert!((0..60).all(|page| kept.contains(2, page) == pages.contains(&(2, page))));
        }
    }
}
