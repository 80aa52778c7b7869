//! Finds a process that can still reach files, because it has one open or maps one.
//!
//! Before: a VM has ended, and pages of it are far. After: it is known whether some process may still read its RAM.
//! Threads: the engine's thread that writes back; it may take a while to read a process ([`crate::mappers`]).

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use ballast_sys::lock::Lock;
use ballast_sys::memfd::FileId;
use ballast_sys::process::Process;

use crate::mappers::{Mapped, READ_TIMEOUT, Read, STUCK, entries, scan_these};
use crate::maps::{mapped, opened};

/// A process, not in `but`, that has one of these files open or maps one. Descriptors are checked first, because any
/// process may have one. A process that hangs and cannot be examined counts as having none, unless it is one of
/// `suspects`, which had them before. Fails if a process could not be examined for lack of a resource: it may have
/// them.
pub fn find(files: &HashSet<FileId>, but: &HashSet<u32>, suspects: &[u32]) -> io::Result<Option<Process>> {
    let [opening, mapping] = [files.clone(), files.clone()];
    let readers: [Arc<Read>; 2] = [
        Arc::new(move |pid| {
            let files = opened(pid, &opening)?.into_iter().map(|file| (file, 0, u64::MAX)).collect();
            Ok(Mapped { files, ..Mapped::default() })
        }),
        Arc::new(move |pid| {
            let mut found = mapped(pid, None)?;
            found.retain(|file| mapping.contains(&file));
            Ok(found)
        }),
    ];
    for read in readers {
        let pids = entries()?.into_iter().map(|(pid, _)| pid).collect();
        let scan = scan_these(pids, &read, READ_TIMEOUT);
        let hangs = |process: &Process| suspects.contains(&process.pid) && STUCK.locked().contains(process);
        let hanging = scan.unreadable.into_iter().filter(hangs);
        if let Some(process) = scan.mapping.into_keys().chain(hanging).find(|process| !but.contains(&process.pid)) {
            return Ok(Some(process));
        }
        if scan.failed {
            return Err(io::Error::other("not all processes could be examined"));
        }
    }
    Ok(None)
}
