//! Stripes: which userfaultfd of a process a page of a region belongs to.
//!
//! Before: the client made one or several userfaultfds. After: each has a fault worker of its own in the engine, so
//! that a VM with many vCPUs is not served by one thread. Client and engine register by the same rule.
//! Threads: none; plain values. Units: pages from the start of a region.
//! Promise: a page keeps the same userfaultfd as long as its process lives, in every engine: the kernel lets no second
//! one register it. So [`Stripes`] may change only together with `wire::FORMAT`, which keeps an engine from taking over
//! a client of another rule.
//!
//! A region is cut into stripes that go round the userfaultfds. A stripe consists of whole chunks, which are registered
//! as one, and so of whole units of 2 MiB: all faults on a page, and on its unit, come to one worker. It is short, so
//! that threads that work side by side meet different workers.

use crate::PageRange;
use crate::units::{Bytes, MIB, PageCount, PageIdx};

/// A chunk of guest RAM that is registered with userfaultfd as one. Picked so that a 1 TiB guest needs at most 32768
/// mappings (the kernel's default cap is 65530) while memory that is not reclaimed stays unregistered.
pub const CHUNK: Bytes = Bytes(32 * MIB);
/// Pages in a chunk.
pub const PAGES_PER_CHUNK: u64 = CHUNK.pages_floor().0;

/// Most stripes of a region. The kernel keeps neighbours that are registered with different userfaultfds as separate
/// mappings, of which a process may have 65530: 32 regions of this many stripes make half of them.
const MOST_STRIPES: u64 = 1024;

/// The division of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripes {
    /// Pages of a stripe.
    pages: u64,
    shards: u64,
}

impl Stripes {
    /// The stripes of a region of this length, in a process with this number of userfaultfds.
    pub fn new(region: PageCount, shards: usize) -> Self {
        // With one userfaultfd, all is one stripe.
        let even = region.0.div_ceil(MOST_STRIPES).max(1).next_multiple_of(PAGES_PER_CHUNK);
        Self { pages: if shards <= 1 { u64::MAX } else { even }, shards: shards.max(1) as u64 }
    }

    /// The userfaultfd of a page.
    pub fn shard(self, page: PageIdx) -> usize {
        (page.0 / self.pages % self.shards) as usize
    }

    /// The parts of a range of pages, each with its userfaultfd.
    pub fn split(self, pages: PageRange) -> impl Iterator<Item = (usize, PageRange)> {
        pages.pieces(self.pages).map(move |part| (self.shard(part.start()), part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{GIB, PAGES_PER_UNIT};
    use proptest::prelude::*;

    const fn pages(bytes: u64) -> u64 {
        bytes / 4096
    }

    #[test]
    fn stripes_of_32_mib_go_round_and_large_regions_have_longer_ones() {
        let small = Stripes::new(PageCount(pages(GIB)), 3);
        let of = |stripes: Stripes, bytes| stripes.shard(PageIdx(pages(bytes)));
        assert_eq!([0, 31, 32, 64, 96, 128].map(|at| of(small, at * MIB)), [0, 0, 1, 2, 0, 1]);
        let large = Stripes::new(PageCount(pages(1024 * GIB)), 3);
        assert_eq!([0, 1023, 1024, 2048, 3072].map(|at| of(large, at * MIB)), [0, 0, 1, 2, 0]);
        assert_eq!(Stripes::new(PageCount(0), 2).shard(PageIdx(0)), 0);
    }

    #[test]
    fn with_one_userfaultfd_nothing_is_split() {
        let all = PageRange::of(PageIdx(0), pages(4 * GIB));
        assert_eq!(Stripes::new(PageCount(all.count()), 1).split(all).collect::<Vec<_>>(), [(0, all)]);
    }

    proptest! {
        #[test]
        fn a_range_is_split_into_parts_of_one_userfaultfd_each_and_no_unit_is_split(
            region in 1..1u64 << 33, shards in 1usize..9, first in 0..1u64 << 33, len in 0..1u64 << 20,
        ) {
            let stripes = Stripes::new(PageCount(region), shards);
            let (first, end) = (first % region, (first % region + len).min(region));
            let mut next = first;
            let mut count = 0;
            for (shard, part) in stripes.split(PageRange::new(PageIdx(first), PageIdx(end))) {
                let (start, last) = (part.start(), PageIdx(part.end().0 - 1));
                prop_assert!(start.0 == next && !part.is_empty() && shard < shards);
                prop_assert_eq!(stripes.shard(start), shard);
                prop_assert_eq!(stripes.shard(last), shard);
                prop_assert!(part.end().0 == end || part.end().0.is_multiple_of(PAGES_PER_UNIT));
                (next, count) = (part.end().0, count + 1);
            }
            prop_assert!(next == end.max(first) && count <= MOST_STRIPES);
        }
    }
}
