//! Which restores the services of the guest's kernel have caused, and not its programs.
//!
//! Before: the host says once a second which pages were restored. After: it is known about how many of them
//! khugepaged, compaction, reclaim (kswapd, or a program that needs memory) and writeback touched.
//! Units: pages. Promise: flags are read of restored pages alone; the bits of dirty pages come from flags that reports
//! read anyway. No service gets more restores than pages that it copied or wrote meanwhile by the kernel's counters.
//!
//! khugepaged reads the pages that it merges, which are free then, and writes a huge page. Compaction reads the pages
//! that it moves, which are free then, too; the places that it writes look like any others. Reclaim writes pages to
//! swap: they are in the swap cache, then free. Writeback writes dirty pages to their files. So a page of a file that
//! was dirty when a report was made, and was restored, and is clean or being written a moment later, was read by
//! writeback: a program that touches a dirty page does not make it clean. (The report may be old.) A page that a
//! program reads and then frees at that moment is counted as well, if a service worked meanwhile.

use ballast_messages::message::ServiceRestores;
use ballast_messages::{Kind, Run};

use crate::memory::{self, Flags};

/// Pages of a huge page.
const HUGE: u64 = 512;

/// Pages that were dirty, a bit each.
#[derive(Debug, Default)]
struct Bits(Vec<(u64, Vec<u64>)>);

impl Bits {
    fn new(ram: &[(u64, u64)]) -> Self {
        Self(ram.iter().map(|(page, end)| (*page, vec![0; (end - page).div_ceil(64) as usize])).collect())
    }

    /// Range of memory, word in it, and bit.
    fn place(&self, page: u64) -> Option<(usize, usize, u64)> {
        let range = self.0.partition_point(|(first, _)| *first <= page).checked_sub(1)?;
        let at = page - self.0[range].0;
        let word = (at / 64) as usize;
        (word < self.0[range].1.len()).then_some((range, word, 1 << (at % 64)))
    }

    fn set(&mut self, page: u64, is_set: bool) {
        let Some((range, word, bit)) = self.place(page) else { return };
        let word = &mut self.0[range].1[word];
        *word = if is_set { *word | bit } else { *word & !bit };
    }

    fn has(&self, page: u64) -> bool {
        self.place(page).is_some_and(|(range, word, bit)| self.0[range].1[word] & bit != 0)
    }
}

/// A service that copies or writes pages.
#[derive(Debug, Default)]
struct Service {
    /// The kernel's counter of these pages at the last look, what it had grown by, and pages of that time and the one
    /// before to which no restore is attributed.
    count: Option<u64>,
    fresh: u64,
    left: u64,
    /// Restores that were attributed.
    restores: u64,
}

impl Service {
    fn look(&mut self, count: u64) {
        self.left = self.left.min(self.fresh);
        let before = self.count.unwrap_or(count);
        self.fresh = count.saturating_sub(before);
        self.count = Some(count.max(before));
        self.left += self.fresh;
    }

    /// Attributes as many of these restores as it has copied or written pages. Returns the rest.
    fn take(&mut self, found: u64) -> u64 {
        let taken = found.min(self.left);
        self.left -= taken;
        self.restores += taken;
        found - taken
    }
}

/// Restored pages by what they are now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Found {
    huge: u64,
    free: u64,
    swapped: u64,
    written: u64,
}

impl Found {
    fn page(&mut self, flags: u64, was_dirty: bool) {
        match () {
            () if memory::is_huge(flags) => self.huge += 1,
            () if memory::class(flags, None) == Some(Kind::Free) => self.free += 1,
            () if memory::is_swapped(flags) => self.swapped += 1,
            () if was_dirty && memory::is_written(flags) => self.written += 1,
            () => {}
        }
    }
}

/// Restores, by the service that caused them.
#[derive(Debug, Default)]
pub struct Restores {
    khugepaged: Service,
    compaction: Service,
    reclaim: Service,
    writeback: Service,
    /// Pages of files that were dirty at the last report, and at the one before: it may be younger than the restore.
    dirty: [Bits; 2],
}

impl Restores {
    /// Restores of pages of this memory, in ranges of pages.
    pub fn new(ram: &[(u64, u64)]) -> Self {
        Self { dirty: [Bits::new(ram), Bits::new(ram)], ..Self::default() }
    }

    /// The memory is another: some was plugged, or removed.
    pub fn set_ram(&mut self, ram: &[(u64, u64)]) {
        self.dirty = [Bits::new(ram), Bits::new(ram)];
    }

    /// A report begins: [`Restores::seen`] is called with each page.
    pub fn begin(&mut self) {
        self.dirty.swap(0, 1);
    }

    /// A page has these flags at this report.
    pub fn seen(&mut self, page: u64, flags: u64) {
        self.dirty[0].set(page, memory::is_dirty_file(flags));
    }

    /// The host restored these pages during the last second or so; `stat` is /proc/vmstat.
    pub fn add(&mut self, runs: &[Run], flags: &Flags, stat: &str) {
        let mut found = Found::default();
        for run in runs {
            let told = flags.each((run.page, run.end()), |page, flags| {
                found.page(flags, self.dirty.iter().any(|bits| bits.has(page)));
            });
            if told.is_err() {
                return;
            }
        }
        self.attribute(found, stat);
    }

    /// Once a tick: what services did before the last two looks is too long ago.
    pub fn look(&mut self, stat: &str) {
        self.attribute(Found::default(), stat);
    }

    fn attribute(&mut self, found: Found, stat: &str) {
        // Each is read where it was and written where it is. Compaction counts both; pages that are moved between nodes
        // are not among them.
        self.khugepaged.look(2 * number(stat, "thp_collapse_alloc") * HUGE);
        self.compaction.look(number(stat, "compact_isolated"));
        let swapped = number(stat, "nr_vmscan_write");
        self.reclaim.look(swapped);
        // Both count what goes to swap: one when the write begins, the other when it has ended.
        self.writeback.look(number(stat, "nr_written").saturating_sub(swapped));
        self.reclaim.take(found.swapped);
        let huge = self.khugepaged.take(found.huge);
        self.compaction.take(huge);
        let free = self.khugepaged.take(found.free);
        let free = self.compaction.take(free);
        self.reclaim.take(free);
        self.writeback.take(found.written);
    }

    /// Returns them, since the agent's start.
    pub fn by_service(&self) -> ServiceRestores {
        ServiceRestores {
            khugepaged: self.khugepaged.restores,
            compaction: self.compaction.restores,
            reclaim: self.reclaim.restores,
            writeback: self.writeback.restores,
        }
    }
}

/// The counter of this name in the text of /proc/vmstat.
pub fn number(stat: &str, name: &str) -> u64 {
    let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{ANON, BUDDY, DIRTY, LRU, SWAP_BACKED, SWAP_CACHE, THP, WRITEBACK};

    #[test]
    fn no_service_gets_more_restores_than_pages_it_copied_or_wrote_meanwhile() {
        let mut restores = Restores::default();
        let mut look = |collapsed: u64, isolated: u64, swapped: u64, free: u64| {
            let stat =
                format!("thp_collapse_alloc {collapsed}\ncompact_isolated {isolated}\nnr_vmscan_write {swapped}\n");
            let before = restores.by_service();
            restores.attribute(Found { free, ..Found::default() }, &stat);
            let now = restores.by_service();
            [now.khugepaged - before.khugepaged, now.compaction - before.compaction, now.reclaim - before.reclaim]
        };
        assert_eq!(look(7, 100, 9, 50), [0; 3], "what was before the first look");
        assert_eq!(look(7, 120, 9, 50), [0, 20, 0]);
        assert_eq!(look(8, 120, 9, 900), [900, 0, 0], "512 pages, read and written");
        assert_eq!((look(8, 120, 9, 0), look(8, 120, 9, 100)), ([0; 3], [0; 3]), "too long ago");
        assert_eq!(look(8, 130, 14, 100), [0, 10, 5]);
    }

    #[test]
    fn pages_that_go_to_swap_are_not_written_to_a_file() {
        let mut restores = Restores::default();
        let mut look = |swapped: u64, ended: u64, written: u64| {
            let stat = format!("nr_vmscan_write {swapped}\nnr_written {ended}\n");
            let before = restores.by_service().writeback;
            restores.attribute(Found { written, ..Found::default() }, &stat);
            restores.by_service().writeback - before
        };
        assert_eq!([look(10, 30, 9), look(20, 30, 9), look(20, 40, 9), look(20, 45, 9)], [0, 0, 0, 5]);
    }

    #[test]
    fn a_page_shows_by_its_flags_which_service_may_have_touched_it() {
        let found = |flags: u64, was_dirty: bool| {
            let mut found = Found::default();
            found.page(flags, was_dirty);
            found
        };
        let none = Found::default();
        assert_eq!(found(LRU | ANON | THP, false), Found { huge: 1, ..none });
        assert_eq!(found(BUDDY, true), Found { free: 1, ..none });
        for flags in [SWAP_CACHE, WRITEBACK] {
            assert_eq!(found(LRU | ANON | SWAP_BACKED | flags, false), Found { swapped: 1, ..none });
        }
        for flags in [LRU, LRU | WRITEBACK, LRU | WRITEBACK | DIRTY] {
            assert_eq!([found(flags, true), found(flags, false)], [Found { written: 1, ..none }, none]);
        }
        assert_eq!([found(LRU | DIRTY, true), found(LRU | ANON, true)], [none; 2], "a program touched them");
    }

    #[test]
    fn a_page_counts_as_dirty_if_it_was_so_at_one_of_the_last_two_reports() {
        let mut restores = Restores::new(&[(1, 100), (256, 300)]);
        let mut report = |flags: u64| {
            restores.begin();
            for page in [1, 99, 256, 299, 400] {
                restores.seen(page, flags);
            }
            [0, 1, 99, 256, 299, 400].map(|page| restores.dirty.iter().any(|bits| bits.has(page)))
        };
        let both = [false, true, true, true, true, false];
        assert_eq!([LRU, LRU | DIRTY, LRU].map(&mut report), [[false; 6], both, both]);
        assert_eq!([LRU | SWAP_BACKED | DIRTY, LRU].map(&mut report), [[false; 6]; 2], "memory of no file");
    }
}
