//! Settings of the kernel that are others while the host wants reports.
//!
//! Before: a setting as the guest's owner has it. After: the value that reports need. Promise: it is as before when
//! this is dropped. A note below /run has the next start, or `--undo`, do that for an agent that was killed.
//!
//! *MGLRU* is off. Under it (on by default in Debian 13) `folio_mark_accessed` counts an access and leaves the idle
//! flag alone, so a page of a file that is read all the time looks idle for ever, to DAMON as to us (seen on 6.12).
//!
//! *Free page reporting* names blocks of 16 KiB, too: by default blocks of 2 MiB, and what is freed here and there
//! never becomes one. Single pages are left out, because they are what is allocated next.

use std::io;
use std::path::{Path, PathBuf};

use crate::files;

const MGLRU: (&str, &str) = ("sys/kernel/mm/lru_gen/enabled", "run/ballast-agent.lru");
const REPORTING: (&str, &str) =
    ("sys/module/page_reporting/parameters/page_reporting_order", "run/ballast-agent.reporting");
/// Least order of a free block that is reported.
const ORDER: i32 = 2;

/// While this exists, a setting is another.
#[derive(Debug)]
pub struct Setting {
    /// Directory that holds `sys` and `run`.
    root: PathBuf,
    /// The setting, and the file with its value before.
    files: (&'static str, &'static str),
}

/// Restores settings that a killed agent did not restore.
pub fn undo() {
    [MGLRU, REPORTING].iter().for_each(|files| restore(Path::new("/"), *files));
}

fn restore(root: &Path, (setting, note): (&str, &str)) {
    let note = root.join(note);
    let Ok(before) = files::read(&note) else { return };
    match files::write(root.join(setting), before) {
        Ok(()) => drop(std::fs::remove_file(note)),
        Err(error) => eprintln!("ballast-agent: {error}"),
    }
}

impl Setting {
    /// Turns MGLRU off, if the kernel has it and it is on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn no_mglru() -> io::Result<Self> {
        Self::below("/".into(), MGLRU)
    }

    /// Has smaller free blocks reported, if free blocks are.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn small_blocks() -> io::Result<Self> {
        Self::below("/".into(), REPORTING)
    }

    fn below(root: PathBuf, files: (&'static str, &'static str)) -> io::Result<Self> {
        restore(&root, files);
        let this = Self { root, files };
        let setting = this.root.join(files.0);
        if !setting.exists() {
            return Ok(this);
        }
        let before = files::read(&setting)?;
        let (changes, value) = match files == MGLRU {
            // Bit 0 is MGLRU itself.
            true => (u32::from_str_radix(before.trim_start_matches("0x"), 16).is_ok_and(|bits| bits & 1 == 1), 0),
            // It is -1 where nobody takes reports.
            false => (before.parse::<i32>().is_ok_and(|order| order > ORDER), ORDER),
        };
        if changes {
            files::write(this.root.join(files.1), &before)?;
            // If it fails, it is put back when this is dropped.
            files::write(setting, value)?;
        }
        Ok(this)
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        restore(&self.root, self.files);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_as_before_however_the_agent_ends() {
        let root = tempfile::tempdir().expect("a directory");
        for (files, before, value, other) in [(MGLRU, "0x0007", "0", "0x0006"), (REPORTING, "9", "2", "-1")] {
            let (setting, note) = (root.path().join(files.0), root.path().join(files.1));
            let start = || Setting::below(root.path().into(), files).expect("it can be written");
            drop(start());
            assert!(!note.exists(), "a kernel without it");
            for file in [&setting, &note] {
                std::fs::create_dir_all(file.parent().expect("in a directory")).expect("a directory");
            }
            let is = |value: &str| files::read(&setting).expect("it is there") == value;
            std::fs::write(&setting, format!("{before}\n")).expect("a file");
            let started = start();
            assert!(is(value) && note.exists());
            drop(started);
            assert!(is(before) && !note.exists(), "it ended");
            std::mem::forget(start());
            restore(root.path(), files);
            assert!(is(before) && !note.exists(), "it was killed");
            std::mem::forget(start());
            drop(start());
            assert!(is(before), "it was killed and came again");
            std::fs::write(&setting, other).expect("a file");
            drop(start());
            assert!(is(other), "it needed no change");
        }
    }
}
