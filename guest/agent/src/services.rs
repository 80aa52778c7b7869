//! Kernel services that touch far pages (Blowfish, section 4.5): khugepaged and compaction, tuned.
//!
//! Before: the host says which pages were restored, and whether to tune the services. After: about how many of the
//! pages were restored for a service is known (`restores`); tuned services touch less memory that no program uses.
//! Units: pages. Promise: the settings are restored when tuning ends (`setting`).
//!
//! Blowfish patches both: khugepaged skips memory that is mostly unused, and compaction skips far pages. A stock kernel
//! copies the pages that it merges or moves wherever they are, so only rarer work helps: a lower scan rate, a huge page
//! only where most of it is present (`max_ptes_none`), no compaction in advance or for khugepaged (`defrag`).

use std::path::PathBuf;

use ballast_messages::Run;
use ballast_messages::message::Tick;

use crate::files;
use crate::memory::Flags;
use crate::restores::{Restores, number};
use crate::setting::{Setting, Wanted, at_most};

const VMSTAT: &str = "proc/vmstat";

/// Settings while tuned; a setting with which khugepaged does even less stays. At most an eighth of a huge page may be
/// absent, instead of nearly all of it. Half as many pages are scanned in four times the time.
const TUNED: [Wanted; 5] = [
    ("sys/kernel/mm/transparent_hugepage/khugepaged/max_ptes_none", |now| at_most(now, 64)),
    ("sys/kernel/mm/transparent_hugepage/khugepaged/pages_to_scan", |now| at_most(now, 2048)),
    ("sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs", |now| {
        now.parse::<u64>().is_ok_and(|now| now < 40_000).then_some(40_000)
    }),
    ("sys/kernel/mm/transparent_hugepage/khugepaged/defrag", |now| at_most(now, 0)),
    ("proc/sys/vm/compaction_proactiveness", |now| at_most(now, 0)),
];

#[derive(Debug)]
pub struct Services {
    /// Directory that holds `sys`, `proc` and `run`.
    root: PathBuf,
    tuned: Option<Setting>,
    restores: Restores,
}

impl Services {
    pub fn new() -> Self {
        Self::below("/".into())
    }

    fn below(root: PathBuf) -> Self {
        Self { root, tuned: None, restores: Restores::default() }
    }

    pub fn tune(&mut self, tune: bool) {
        if tune == self.tuned.is_some() {
            return;
        }
        let tuned = tune.then(|| Setting::of_services(&self.root, &TUNED)).transpose();
        self.tuned = tuned.unwrap_or_else(|error| {
            eprintln!("ballast-agent: {error}");
            None
        });
    }

    /// Attributes restores: the host restored these pages during the last second or so.
    pub fn restored(&mut self, runs: &[Run], flags: &Flags) {
        let stat = self.vmstat();
        self.restores.add(runs, flags, &stat);
    }

    fn vmstat(&self) -> String {
        files::read(self.root.join(VMSTAT)).unwrap_or_default()
    }

    /// Writes the services' counters since boot into the tick. Called once a tick.
    pub fn count(&mut self, tick: &mut Tick) {
        let stat = self.vmstat();
        self.restores.look(&stat);
        tick.collapsed = number(&stat, "thp_collapse_alloc");
        tick.compacted = number(&stat, "compact_isolated");
        tick.service_restores = self.restores.count();
        tick.tuned = self.tuned.is_some();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn tuned_services_do_less_and_their_settings_are_as_before_when_tuning_ends() {
        // A kernel without `defrag`, and with one setting that is low already.
        let values = ["511", "4096", "90000", "", "20"];
        let root = tempfile::tempdir().expect("a directory");
        fs::create_dir(root.path().join("run")).expect("a directory");
        for ((file, _), value) in TUNED.iter().zip(values).filter(|(_, value)| !value.is_empty()) {
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().expect("in a directory")).expect("a directory");
            fs::write(file, value).expect("a file");
        }
        let now = || TUNED.map(|(file, _)| files::read(root.path().join(file)).unwrap_or_default());
        let mut services = Services::below(root.path().into());
        services.tune(true);
        services.tune(true);
        assert_eq!(now(), ["64", "2048", "90000", "", "0"]);
        services.tune(false);
        assert_eq!(now(), values, "it was told");
        services.tune(true);
        drop(services);
        assert_eq!(now(), values, "it ended");
        let mut killed = Services::below(root.path().into());
        killed.tune(true);
        std::mem::forget(killed);
        let mut next = Services::below(root.path().into());
        next.tune(true);
        drop(next);
        assert_eq!(now(), values, "it was killed, and came again");
    }
}
