//! Restores that khugepaged and compaction of the guest's kernel have caused, and not its programs.
//!
//! Before: the host says once a second which pages were restored. After: how many of them the two touched is estimated.
//! Units: pages. Promise: flags are read of restored pages alone. The attributed restores are at most as many as the
//! pages that the two copied in this time by the kernel's counters.
//!
//! khugepaged reads the pages that it merges, which are free afterwards, and writes a huge page. Compaction reads the
//! pages that it moves, which are free afterwards, too; the pages that it writes look like any others. If one of the
//! two worked at this time, a page that a program read and then freed is counted as well.

use ballast_base::PAGES_PER_UNIT;
use ballast_messages::{Kind, Run};

use crate::memory::{self, Flags};

#[derive(Debug, Default)]
pub struct Restores {
    /// Pages copied until the last look; by how much this number had grown then; and pages that were copied in this
    /// time and the one before, and to which no restore is attributed.
    copied: Option<u64>,
    fresh: u64,
    left: u64,
    count: u64,
}

/// Returns whether one of the two may have touched this page.
fn is_theirs(flags: u64) -> bool {
    memory::is_huge(flags) || memory::class(flags, None) == Some(Kind::Free)
}

impl Restores {
    /// The host restored these pages during the last second or so; `stat` is /proc/vmstat.
    pub fn add(&mut self, runs: &[Run], flags: &Flags, stat: &str) {
        let mut found = 0;
        for run in runs {
            if flags.each((run.page, run.end()), |_, flags| found += u64::from(is_theirs(flags))).is_err() {
                return;
            }
        }
        self.attribute(found, stat);
    }

    /// Called once a tick: copies from before the last two looks are too old for a restore.
    pub fn look(&mut self, stat: &str) {
        self.attribute(0, stat);
    }

    fn attribute(&mut self, found: u64, stat: &str) {
        // A copied page is read in one place and written in another. The counter of compaction has both; it does not
        // have pages that are moved between nodes.
        let copied = 2 * number(stat, "thp_collapse_alloc") * PAGES_PER_UNIT + number(stat, "compact_isolated");
        let before = self.copied.replace(copied).unwrap_or(copied);
        self.left = self.left.min(self.fresh);
        self.fresh = copied.saturating_sub(before);
        self.left += self.fresh;
        let taken = found.min(self.left);
        self.left -= taken;
        self.count += taken;
    }

    /// Returns the number of attributed restores since the agent's start.
    pub fn count(&self) -> u64 {
        self.count
    }
}

pub fn number(stat: &str, name: &str) -> u64 {
    let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{ANON, BUDDY, LRU, THP};

    #[test]
    fn no_more_restores_are_attributed_than_pages_were_copied_meanwhile() {
        let mut restores = Restores::default();
        let mut look = |collapsed: u64, isolated: u64, found: u64| {
            let before = restores.count();
            restores.attribute(found, &format!("thp_collapse_alloc {collapsed}\ncompact_isolated {isolated}\n"));
            restores.count() - before
        };
        assert_eq!(look(7, 100, 50), 0, "what was before the first look");
        assert_eq!(look(7, 120, 50), 20);
        assert_eq!(look(8, 120, 900), 900, "512 pages, read and written");
        assert_eq!((look(8, 120, 0), look(8, 120, 100)), (0, 0), "too long ago");
        assert_eq!(look(8, 130, 100), 10);
        assert_eq!(restores.count(), 930);
    }

    #[test]
    fn a_page_shows_by_its_flags_whether_a_service_may_have_touched_it() {
        assert!(is_theirs(LRU | ANON | THP) && is_theirs(BUDDY));
        assert!(!is_theirs(LRU | ANON), "a program touched it");
    }
}
