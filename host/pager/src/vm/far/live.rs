//! Live copies: the copies in a store that words of a VM name. The store keeps them when it sweeps.
//!
//! Before: `recover` repairs the words one by one, in order. After: the store gets all of them at once.
//! Threads: none; a plain value. Units: 8 bytes for each page, and 40 for each gap between pages.
//! Promise: returns the copies in the order in which they were noted.

use ballast_base::PageIdx;
use ballast_base::store::{Handle, PageKey, RegionKey};

#[derive(Clone, Debug, Default)]
pub struct LiveCopies {
    handles: Vec<Handle>,
    runs: Vec<LiveRun>,
}

/// A run of neighbouring pages: the first one, and the index of its handle.
#[derive(Clone, Debug)]
struct LiveRun {
    region: RegionKey,
    first: PageIdx,
    start: usize,
}

impl LiveCopies {
    pub const fn new() -> Self {
        Self { handles: Vec::new(), runs: Vec::new() }
    }

    pub fn note(&mut self, key: PageKey, handle: Handle) {
        let start = self.handles.len();
        let goes_on = self.runs.last().is_some_and(|run| {
            let next = run.first.0 + (start - run.start) as u64;
            run.region == key.region && next == key.page.0
        });
        if !goes_on {
            self.runs.push(LiveRun { region: key.region, first: key.page, start });
        }
        self.handles.push(handle);
    }

    pub fn count(&self) -> u64 {
        self.handles.len() as u64
    }

    pub fn iter(&self) -> impl Iterator<Item = (PageKey, Handle)> {
        let ends = self.runs.iter().skip(1).map(|run| run.start).chain([self.handles.len()]);
        self.runs.iter().zip(ends).flat_map(|(run, end)| {
            let pages = (run.first.0..).map(|page| run.region.page(PageIdx(page)));
            pages.zip(self.handles[run.start..end].iter().copied())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::wire::VmId;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn copies_come_out_as_noted(noted in proptest::collection::vec((0u32..2, 0u64..6, 0u64..1 << 40), 0..60)) {
            let key = |number, page| RegionKey { vm: VmId([1; 16]), number }.page(PageIdx(page));
            let handle = |bits| Handle::new(bits).expect("40 bits");
            let noted = noted.into_iter().map(|(region, page, bits)| (key(region, page), handle(bits)));
            let mut noted: Vec<_> = noted.collect();
            noted.sort_by_key(|(key, _)| (key.region.number, key.page));
            let mut live = LiveCopies::default();
            noted.iter().for_each(|(key, handle)| live.note(*key, *handle));
            prop_assert_eq!(live.count(), noted.len() as u64);
            prop_assert_eq!(live.iter().collect::<Vec<_>>(), noted);
        }
    }
}
