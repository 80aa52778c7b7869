//! Kept: which parts of a view cannot be zapped, because the VMM has mapped something over its RAM there, or locked it.
//!
//! Before: a client has answered a zap and left parts of it alone. After: reclaim does not propose them again.
//! Threads: any; written by whoever zaps. Units: pages of a region, whole granules.
//! Promise: what was once kept stays so for as long as the region is mapped in this view.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

/// Region number and first page; the end.
type Parts = BTreeMap<(u32, u64), u64>;

/// The parts of one view that are kept.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// Apart from each other.
    parts: RwLock<Parts>,
    any: AtomicBool,
}

impl Kept {
    /// These pages are. Returns whether some were not before.
    pub fn add(&self, region: u32, pages: Range<u64>) -> bool {
        if pages.is_empty() {
            return false;
        }
        let mut parts = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        let Range { mut start, mut end } = pages;
        while let Some((&(_, first), &last)) = parts.range((region, 0)..=(region, end)).next_back()
            && last >= start
        {
            if first <= start && end <= last {
                return false;
            }
            parts.remove(&(region, first));
            (start, end) = (start.min(first), end.max(last));
        }
        parts.insert((region, start), end);
        self.any.store(true, Ordering::Release);
        true
    }

    /// Is any part?
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Is this page?
    pub fn contains(&self, region: u32, page: u64) -> bool {
        let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
        parts.range((region, 0)..=(region, page)).next_back().is_some_and(|(_, end)| page < *end)
    }

    /// The region is not mapped there any more.
    pub fn forget(&self, region: u32) {
        let mut parts = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        parts.retain(|(number, _), _| *number != region);
        self.any.store(!parts.is_empty(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_kept_is_what_was_added(added in proptest::collection::vec((0u32..3, 0u64..40, 0u64..12), 0..30)) {
            let kept = Kept::default();
            let mut pages = std::collections::HashSet::new();
            for (region, first, count) in added {
                let before = pages.len();
                pages.extend((first..first + count).map(|page| (region, page)));
                prop_assert_eq!(kept.add(region, first..first + count), pages.len() > before);
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
