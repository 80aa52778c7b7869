//! Finds a process that can still reach files, because it has one open or maps one.
//!
//! Before: a VM has ended, and pages of it are far. After: it is known whether some process may still read its RAM.
//! Threads: the engine's that writes back; to read a process may take a while ([`crate::mappers`]).

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use ballast_sys::lock::Lock;
use ballast_sys::memfd::FileId;
use ballast_sys::process::Process;

use crate::mappers::{Mapped, READ_TIMEOUT, Read, STUCK, entries, scan_these};
use crate::maps::{mapped, opened};

/// A process, not in `but`, that has one of these files open or maps one. Descriptors are checked first, because each
/// process may have them. A process that hangs and cannot be examined counts as having none, unless it is one of
/// `suspects`, which had them. Fails if not all could be examined, for lack of a resource: some process may have them.
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

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::Bytes;
    use ballast_sys::Mapping;
    use ballast_sys::file_ranges::FileRanges;
    use ballast_sys::memfd;

    #[test]
    fn a_process_that_has_a_file_open_or_maps_it_holds_it_and_no_other_does() {
        let fd = std::fs::File::from(memfd::create("ballast-test", Bytes(4096)).expect("memfd"));
        let theirs = fd.try_clone().expect("duplicate");
        let file = memfd::file_id(&fd).expect("stat");
        let files = HashSet::from([file]);
        let me = Process::this().expect("this process");
        let [nobody, mine] = [HashSet::new(), HashSet::from([me.pid])];
        assert_eq!(find(&files, &nobody, &[]).expect("readable"), Some(me));
        assert_eq!(find(&files, &mine, &[]).expect("readable"), None);
        let mut child = std::process::Command::new("sleep").arg("1000").stdin(theirs).spawn().expect("sleep");
        let holder = Process::find(child.id()).expect("readable");
        assert!(holder.is_some() && find(&files, &mine, &[]).expect("readable") == holder);
        child.kill().and_then(|()| child.wait()).expect("end it");
        assert_eq!(find(&files, &mine, &[]).expect("readable"), None);
        let maps = || mapped(me.pid, None).expect("read").files.overlap(&all_of(file));
        assert!(maps().is_none());
        let mapping = Mapping::shared(&fd, 0, 4096).expect("map");
        assert!(maps().is_some());
        drop(mapping);
        assert!(maps().is_none());
    }

    fn all_of(file: FileId) -> FileRanges {
        [(file, 0, u64::MAX)].into_iter().collect()
    }
}
