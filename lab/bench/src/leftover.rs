//! Restores what a bench left behind that was killed together with its guard. A note on its swap tells.
//!
//! Before: the machine's lock is held, so no bench that could own any of it lives. After: swap, settings and cgroups
//! are as they were before that bench. Huge pages lent to the pool are not found again: their owner is unknown.
//! Threads: one. Promise: it changes only objects with our note or our name, and only the two settings that a bench
//! changes.

use std::fs;
use std::path::Path;

use crate::swap;
use anyhow::{Context, Result};

use crate::cgroup;
use crate::setting::Setting;
use crate::swaps::{self, Active, Named, Sized};

/// The beginning of a note. Each further line is a setting's path, a tab, and its value before.
const FIRST_LINE: &str = "ballast bench: swapoff this, and put these back";

/// The settings that a bench changes and that a reset of its device does not restore.
const SETTINGS: [&str; 2] = [swaps::PAGE_CLUSTER, swaps::ZSWAP];

/// The text on a swap device before it is used.
pub(crate) fn note(settings: &[Setting]) -> String {
    let kept = settings.iter().map(Setting::before).filter(|(path, _)| SETTINGS.iter().any(|known| path == known));
    let lines: String = kept.map(|(path, before)| format!("{}\t{before}\n", path.display())).collect();
    format!("{FIRST_LINE}\n{lines}")
}

/// The settings that a note names; `None` if it is not one of ours.
fn read(note: &str) -> Option<Vec<Setting>> {
    let lines = note.strip_prefix(FIRST_LINE)?.lines().filter_map(|line| line.split_once('\t'));
    let known = lines.filter_map(|(path, before)| Some((SETTINGS.iter().find(|known| **known == path)?, before)));
    Some(known.map(|(path, before)| Setting::changed(path.into(), before.to_owned())).collect())
}

/// Restore everything that can be found. The caller holds the machine's lock.
pub(crate) fn put_back() -> Result<()> {
    let active = swaps::swaps()?;
    let is_active = |path: &Path| active.iter().any(|swap| Path::new(swap) == path);
    let ours = |path: &Path| swap::note(path).ok().as_deref().and_then(read);
    let mut found: Vec<Vec<Setting>> = Vec::new();
    for (block, device, used) in swaps::devices()? {
        let Some(settings) = used.then(|| ours(&device)).flatten() else { continue };
        eprintln!("ballast bench: putting {} back, which a bench that was killed had left", device.display());
        if is_active(&device) {
            drop(Active(device));
        }
        drop(Sized(block));
        found.push(settings);
    }
    for path in active.iter().map(Path::new).filter(|path| !path.starts_with("/dev")) {
        let Some(settings) = ours(path) else { continue };
        eprintln!("ballast bench: removing {}, which a bench that was killed had left", path.display());
        drop(Active(path.to_owned()));
        drop(Named(path.to_owned()));
        found.push(settings);
    }
    drop(found);
    cgroups()
}

/// Remove cgroups of benches that are gone. One with processes in it stays.
fn cgroups() -> Result<()> {
    let Ok(root) = cgroup::mounted() else { return Ok(()) };
    for entry in fs::read_dir(&root).with_context(|| format!("Reading {}", root.display()))? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let pid = name.strip_prefix(cgroup::NAME).and_then(|rest| rest.split('-').next());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = fs::remove_dir(&path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_gives_back_the_two_settings_it_names_and_nothing_else() {
        assert!(read("").is_none() && read("GRUB").is_none());
        let settings: Vec<_> = [(swaps::PAGE_CLUSTER, "3"), ("/etc/passwd", "x"), (swaps::ZSWAP, "Y")]
            .map(|(path, before)| std::mem::ManuallyDrop::new(Setting::changed(path.into(), before.into())))
            .into();
        let lines: String =
            settings.iter().map(|s| format!("{}\t{}\n", s.before().0.display(), s.before().1)).collect();
        let read = read(&format!("{FIRST_LINE}\n{lines}")).expect("ours").into_iter().map(std::mem::ManuallyDrop::new);
        let read: Vec<_> = read.map(|s| (s.before().0.to_owned(), s.before().1.to_owned())).collect();
        assert_eq!(read, [(swaps::PAGE_CLUSTER.into(), "3".to_owned()), (swaps::ZSWAP.into(), "Y".to_owned())]);
    }
}
