//! Kernel services that touch far pages (Blowfish, section 4.5): khugepaged and compaction, tuned.
//!
//! Before: the host says which pages were restored, and whether to tune the services. After: it knows about how many of
//! these were restored for a service (`restores`); tuned services touch less memory that no program uses.
//! Units: pages. Promise: settings are as before when tuning ends, also when this is dropped. A note below /run has the
//! next start, or `--undo`, do that for an agent that was killed.
//!
//! Blowfish patches both: khugepaged skips what is mostly unused, compaction skips what is far. A stock kernel copies
//! what it merges or moves wherever it is, so all that helps is that it does so more rarely: a lower scan rate, a huge
//! page only where most of it is present (`max_ptes_none`), no compaction in advance or for khugepaged (`defrag`).

use std::fs;
use std::path::PathBuf;

use ballast_messages::Run;
use ballast_messages::message::Tick;

use crate::files;
use crate::memory::Flags;
use crate::restores::{Restores, number};

const THP: &str = "sys/kernel/mm/transparent_hugepage/khugepaged";
const COMPACTION: &str = "proc/sys/vm/compaction_proactiveness";
const VMSTAT: &str = "proc/vmstat";
/// File with the settings before, one a line: the file, a blank, its value.
const NOTE: &str = "run/ballast-agent.services";

/// Settings while tuned, unless those before make khugepaged do even less. At most an eighth of a huge page may be
/// absent, instead of nearly all of it. Half as many pages are scanned in four times the time.
const TUNED: [(&str, u64); 4] = [("max_ptes_none", 64), ("pages_to_scan", 2048), (SLEEP, 40_000), ("defrag", 0)];
/// The one of them of which more is less work.
const SLEEP: &str = "scan_sleep_millisecs";

/// The guest's services.
#[derive(Debug)]
pub struct Services {
    /// Directory that holds `sys`, `proc` and `run`.
    root: PathBuf,
    is_tuned: bool,
    restores: Restores,
}

/// Restores the settings that a killed agent did not restore.
pub fn undo() {
    Services::new(&[]).untune();
}

impl Services {
    /// The services of a guest with this memory, in ranges of pages.
    pub fn new(ram: &[(u64, u64)]) -> Self {
        Self::below("/".into(), ram)
    }

    fn below(root: PathBuf, ram: &[(u64, u64)]) -> Self {
        Self { root, is_tuned: false, restores: Restores::new(ram) }
    }

    /// Tunes them, or restores their settings.
    pub fn tune(&mut self, tune: bool) {
        if tune == self.is_tuned {
            return;
        }
        if !tune {
            return self.untune();
        }
        let wanted = TUNED.iter().map(|(name, value)| (format!("{THP}/{name}"), *value));
        // What could not be put back the last time is still to be put back.
        let kept = fs::read_to_string(self.root.join(NOTE)).unwrap_or_default();
        let kept =
            |file: &str| kept.lines().find_map(|line| line.strip_prefix(file)?.strip_prefix(' ')).map(str::to_owned);
        // A kernel without one of them has nothing to tune there.
        let change = |(file, value): (String, u64)| {
            let before = files::read(self.root.join(&file)).ok()?;
            let now: u64 = before.trim().parse().ok()?;
            let tuned = if file.ends_with(SLEEP) { now.max(value) } else { now.min(value) };
            let before = kept(&file).unwrap_or(before);
            Some((file, before, tuned.to_string()))
        };
        let all: Vec<_> = wanted.chain([(COMPACTION.to_owned(), 0)]).filter_map(change).collect();
        let note: String = all.iter().map(|(file, before, _)| format!("{file} {before}\n")).collect();
        // Without the note, a killed agent would leave them tuned.
        if let Err(error) = files::write(self.root.join(NOTE), note) {
            return eprintln!("ballast-agent: {error}");
        }
        for (file, _, value) in all {
            match files::write(self.root.join(file), value) {
                Ok(()) => self.is_tuned = true,
                Err(error) => eprintln!("ballast-agent: {error}"),
            }
        }
        if !self.is_tuned {
            self.untune();
        }
    }

    fn untune(&mut self) {
        self.is_tuned = false;
        let note = self.root.join(NOTE);
        let Ok(before) = fs::read_to_string(&note) else { return };
        let mut left = String::new();
        for (file, value) in before.lines().filter_map(|line| line.split_once(' ')) {
            let path = self.root.join(file);
            if let Err(error) = files::write(&path, value) {
                eprintln!("ballast-agent: {error}");
                // The next start tries again, unless the kernel has no such setting any more.
                if path.exists() {
                    left += &format!("{file} {value}\n");
                }
            }
        }
        let kept = if left.is_empty() { fs::remove_file(note) } else { fs::write(note, left) };
        if let Err(error) = kept {
            eprintln!("ballast-agent: {error}");
        }
    }

    /// The host restored these pages during the last second or so.
    pub fn restored(&mut self, runs: &[Run], flags: &Flags) {
        let stat = self.vmstat();
        self.restores.add(runs, flags, &stat);
    }

    /// What restores are attributed by: reports tell it which pages are dirty.
    pub fn restores(&mut self) -> &mut Restores {
        &mut self.restores
    }

    fn vmstat(&self) -> String {
        files::read(self.root.join(VMSTAT)).unwrap_or_default()
    }

    /// Returns their counters since boot. Once a tick.
    pub fn count(&mut self, tick: &mut Tick) {
        let stat = self.vmstat();
        self.restores.look(&stat);
        tick.collapsed = number(&stat, "thp_collapse_alloc");
        tick.compacted = number(&stat, "compact_isolated");
        tick.by_service = self.restores.by_service();
        tick.service_restores = tick.by_service.khugepaged + tick.by_service.compaction;
        tick.tuned = self.is_tuned;
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        if self.is_tuned {
            self.untune();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files as a kernel has them, without `defrag`.
    fn guest() -> (tempfile::TempDir, Vec<(PathBuf, String)>) {
        let root = tempfile::tempdir().expect("a directory");
        let thp = ["max_ptes_none 511", "pages_to_scan 4096", "scan_sleep_millisecs 10000"]
            .map(|file| format!("{THP}/{file}"));
        let mut all = Vec::new();
        for file in thp.into_iter().chain([format!("{COMPACTION} 20"), "run/other x".into()]) {
            let (file, value) = file.split_once(' ').expect("two words");
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().expect("in a directory")).expect("a directory");
            fs::write(&file, value).expect("a file");
            all.push((file, value.to_owned()));
        }
        (root, all)
    }

    fn now(files: &[(PathBuf, String)]) -> Vec<(PathBuf, String)> {
        files.iter().map(|(file, _)| (file.clone(), files::read(file).expect("it is there"))).collect()
    }

    #[test]
    fn settings_are_as_before_when_tuning_ends_however_the_agent_ends() {
        let (root, before) = guest();
        let agent = || Services::below(root.path().into(), &[]);
        let values = |files: &[(PathBuf, String)]| files.iter().map(|(_, value)| value.clone()).collect::<Vec<_>>();
        let mut services = agent();
        services.tune(true);
        services.tune(true);
        assert_eq!(values(&now(&before)), ["64", "2048", "40000", "0", "x"]);
        services.tune(false);
        assert_eq!(now(&before), before, "it was told");
        services.tune(true);
        drop(services);
        assert_eq!(now(&before), before, "it ended");
        let mut killed = agent();
        killed.tune(true);
        std::mem::forget(killed);
        agent().untune();
        assert_eq!(now(&before), before, "it was killed");
        agent().untune();
        assert!(!root.path().join(NOTE).exists() && !root.path().join(THP).join("defrag").exists());
    }
}
