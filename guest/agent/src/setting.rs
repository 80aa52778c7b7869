//! Settings of the kernel that the agent changes while the host wants reports, or tuned services.
//!
//! Before: a setting as the guest's owner has it. After: the value that the agent needs. Promise: dropping [`Setting`]
//! restores the value. If the agent was killed, its next start, or `--undo`, restores it by a note below /run.
//!
//! *MGLRU* is off. Under it (on by default in Debian 13) `folio_mark_accessed` counts an access and leaves the idle
//! flag alone, so a page of a file that is read all the time looks idle for ever, to DAMON and to the agent (seen on
//! 6.12).
//!
//! *Free page reporting* names blocks of 16 KiB, too: by default it names blocks of 2 MiB, which scattered free pages
//! never form. Single pages are left out, because they are allocated next.

use std::io;
use std::path::{Path, PathBuf};

use crate::files;

/// A setting, and a function from its value to the wanted one; `None`: it stays.
pub type Wanted = (&'static str, fn(&str) -> Option<u64>);

// Bit 0 is MGLRU itself.
const MGLRU: Wanted = ("sys/kernel/mm/lru_gen/enabled", |now| {
    u32::from_str_radix(now.trim_start_matches("0x"), 16).is_ok_and(|bits| bits & 1 == 1).then_some(0)
});
/// Least order of a free block that is reported: 2. It is -1 where no device takes reports.
const REPORTING: Wanted = ("sys/module/page_reporting/parameters/page_reporting_order", |now| at_most(now, 2));
/// Files with the former values of settings, one a line: the file, a blank, its value.
const NOTES: [&str; 3] = ["run/ballast-agent.lru", "run/ballast-agent.reporting", "run/ballast-agent.services"];

/// Changed settings. Dropping this restores them.
#[derive(Debug)]
pub struct Setting {
    root: PathBuf,
    note: &'static str,
}

pub fn at_most(now: &str, most: u64) -> Option<u64> {
    now.parse::<u64>().is_ok_and(|now| now > most).then_some(most)
}

pub fn undo() {
    NOTES.iter().for_each(|note| restore(Path::new("/"), note));
}

fn restore(root: &Path, note: &str) {
    let note = root.join(note);
    let Ok(before) = std::fs::read_to_string(&note) else { return };
    let mut all = true;
    for (file, value) in before.lines().filter_map(|line| line.split_once(' ')) {
        let setting = root.join(file);
        // A kernel may not have the setting any more.
        if let Err(error) = files::write(&setting, value)
            && setting.exists()
        {
            eprintln!("ballast-agent: {error}");
            all = false;
        }
    }
    // Otherwise the next start tries again.
    if all {
        let _ = std::fs::remove_file(note);
    }
}

impl Setting {
    /// Turns MGLRU off, if the kernel has it and it is on.
    pub fn no_mglru() -> io::Result<Self> {
        Self::set(Path::new("/"), NOTES[0], &[MGLRU])
    }

    /// Has smaller free blocks reported, if free blocks are.
    pub fn small_blocks() -> io::Result<Self> {
        Self::set(Path::new("/"), NOTES[1], &[REPORTING])
    }

    /// Has services of the kernel do less.
    pub fn of_services(root: &Path, wanted: &[Wanted]) -> io::Result<Self> {
        Self::set(root, NOTES[2], wanted)
    }

    fn set(root: &Path, note: &'static str, wanted: &[Wanted]) -> io::Result<Self> {
        restore(root, note);
        let this = Self { root: root.to_owned(), note };
        let change = |(file, value): &Wanted| {
            // A kernel without the setting has nothing to change.
            let before = files::read(root.join(file)).ok()?;
            Some((*file, value(&before)?, before))
        };
        let all: Vec<_> = wanted.iter().filter_map(change).collect();
        if all.is_empty() {
            return Ok(this);
        }
        // Values that could not be restored the last time must still be restored.
        let mut text = std::fs::read_to_string(root.join(note)).unwrap_or_default();
        text.extend(all.iter().map(|(file, _, before)| format!("{file} {before}\n")));
        files::write(root.join(note), text)?;
        // After an error, dropping this restores all values.
        all.into_iter().try_for_each(|(file, value, _)| files::write(root.join(file), value))?;
        Ok(this)
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        restore(&self.root, self.note);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_as_before_however_the_agent_ends() {
        let root = tempfile::tempdir().expect("a directory");
        for (wanted, note, before, value, other) in
            [(MGLRU, NOTES[0], "0x0007", "0", "0x0006"), (REPORTING, NOTES[1], "9", "2", "-1")]
        {
            let (setting, noted) = (root.path().join(wanted.0), root.path().join(note));
            let start = || Setting::set(root.path(), note, &[wanted]).expect("it can be written");
            drop(start());
            assert!(!noted.exists(), "a kernel without it");
            for file in [&setting, &noted] {
                std::fs::create_dir_all(file.parent().expect("in a directory")).expect("a directory");
            }
            let is = |value: &str| files::read(&setting).expect("it is there") == value;
            std::fs::write(&setting, format!("{before}\n")).expect("a file");
            let started = start();
            assert!(is(value) && noted.exists());
            drop(started);
            assert!(is(before) && !noted.exists(), "it ended");
            std::mem::forget(start());
            restore(root.path(), note);
            assert!(is(before) && !noted.exists(), "it was killed");
            std::mem::forget(start());
            drop(start());
            assert!(is(before), "it was killed and came again");
            std::fs::write(&setting, other).expect("a file");
            drop(start());
            assert!(is(other), "it needed no change");
        }
    }
}
