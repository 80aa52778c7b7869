//! Kernel services that touch far pages (Blowfish, section 4.5): khugepaged and compaction, counted and tuned.
//!
//! Before: the host says whether to tune them. After: they touch less memory that no program uses.
//! Promise: settings are as before when tuning ends, also when this is dropped.
//!
//! Blowfish patches both: khugepaged skips what is mostly unused, compaction skips what is far. A stock kernel has
//! knobs for the first: `max_ptes_none` (a huge page is made only if most of it is present already) and the scan rate.
//! For the second it can only compact less in advance.

use ballast_guest::message::Tick;

use crate::files;

const THP: &str = "/sys/kernel/mm/transparent_hugepage/khugepaged";
const COMPACTION: &str = "/proc/sys/vm/compaction_proactiveness";

/// Settings while tuned. At most an eighth of a huge page may be absent, instead of nearly all of it. Half as many
/// pages are scanned in four times the time. Memory is compacted on demand only.
const TUNED: [(&str, &str); 4] =
    [("max_ptes_none", "64"), ("pages_to_scan", "2048"), ("scan_sleep_millisecs", "40000"), ("", "0")];

fn path(name: &str) -> String {
    if name.is_empty() { COMPACTION.into() } else { format!("{THP}/{name}") }
}

/// The guest's services.
#[derive(Debug, Default)]
pub struct Services {
    /// Settings before: file and value.
    before: Vec<(String, String)>,
}

impl Services {
    /// Tunes them, or restores their settings.
    pub fn tune(&mut self, tune: bool) {
        if tune != self.before.is_empty() {
            return;
        }
        if !tune {
            for (file, value) in self.before.drain(..) {
                if let Err(error) = files::write(file, value) {
                    eprintln!("ballast-agent: {error}");
                }
            }
            return;
        }
        for (name, value) in TUNED {
            // A kernel without one of them has nothing to tune there.
            let file = path(name);
            if let Ok(before) = files::read(&file)
                && files::write(&file, value).is_ok()
            {
                self.before.push((file, before));
            }
        }
    }

    /// Returns their counters since boot.
    pub fn count(&self, tick: &mut Tick) {
        let stat = files::read("/proc/vmstat").unwrap_or_default();
        let number = |name: &str| {
            let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|number| number.parse().ok()).unwrap_or(0)
        };
        tick.collapsed = number("thp_collapse_alloc");
        tick.compacted = number("compact_migrate_scanned");
        tick.tuned = !self.before.is_empty();
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        self.tune(false);
    }
}
