//! Which huge pages a file of hugetlbfs has. The kernel has no `SEEK_DATA` for such files: it calls all of them data.
//!
//! Before: `pager` opens a region whose RAM is such a file. After: it can tell holes from pages.
//! Threads: any; two threads that ask about a page at once both get the right result.
//! Units: offsets are bytes from the start of the mapping, multiples of the page size.
//! Promise: nothing is allocated, nothing is written, and no page stays mapped here.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use ballast_base::Hva;

use crate::uffd::{FillOutcome, HUGETLB_FEATURES};
use crate::{Mapping, Uffd};

/// What the file has at the place of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// No page.
    Hole,
    /// A page.
    Page,
    /// A page whose memory failed: the kernel keeps it in the file, so that no process reads zeros there.
    Failed,
}

/// Asks the kernel whether huge pages are in a file: `UFFDIO_CONTINUE` maps an existing page and fails for a hole.
/// It is called on a mapping of our own that no thread ever touches; a mapped page is unmapped at once.
#[derive(Debug)]
pub struct Presence {
    uffd: Uffd,
    map: Mapping,
    page: usize,
}

impl Presence {
    /// Prepare to ask about this mapping of files, in which all lengths and offsets are multiples of `page`.
    ///
    /// # Errors
    /// This process may not use userfaultfd, or the kernel has none for huge pages (before Linux 5.13).
    pub fn new(map: Mapping, page: usize) -> io::Result<Self> {
        let (uffd, granted) = Uffd::create(HUGETLB_FEATURES)?;
        if granted != HUGETLB_FEATURES {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel has no userfaultfd for huge pages"));
        }
        uffd.register(Hva(map.addr() as u64), map.len() as u64)?;
        Ok(Self { uffd, map, page })
    }

    /// Is the page that has the byte at `offset` in the file?
    pub fn is_present(&self, offset: usize) -> io::Result<bool> {
        Ok(self.place(offset)? != Place::Hole)
    }

    /// What is the page that has the byte at `offset` of the mapping?
    pub fn place(&self, offset: usize) -> io::Result<Place> {
        let offset = offset - offset % self.page;
        let addr = Hva(self.map.ptr(offset, self.page) as u64);
        loop {
            match self.uffd.map_existing(addr, self.page as u64)? {
                FillOutcome::Done | FillOutcome::AlreadyThere => {
                    self.map.zap(offset, self.page)?;
                    return Ok(Place::Page);
                }
                FillOutcome::NotInFile => return Ok(Place::Hole),
                // The page is in the file, and the kernel did not map it.
                FillOutcome::Failed => return Ok(Place::Failed),
                FillOutcome::Retry => std::thread::yield_now(),
                FillOutcome::Gone => return Err(io::Error::other("a mapping of our own is not registered")),
            }
        }
    }
}

/// Takes the lock under which this program's processes change the host's numbers of huge pages; it lasts as long as the
/// file is open. It is in a file that only root can open: the kernel's own files can be read, and so be locked, by
/// every user. `None`: the host with this root has no `/run`. Fails if another process of root holds the lock for
/// longer than `within`.
pub fn lock_numbers(root: &Path, within: Duration) -> io::Result<Option<std::fs::File>> {
    use rustix::fs::{FlockOperation, flock};
    use std::os::unix::fs::OpenOptionsExt;
    const AGAIN_AFTER: Duration = Duration::from_millis(5);
    let path = root.join("run/ballast-hugepages.lock");
    let file = match std::fs::File::options().write(true).create(true).truncate(false).mode(0o600).open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?,
    };
    let begun = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) if begun.elapsed() < within => std::thread::sleep(AGAIN_AFTER),
            Err(error) => {
                let text = format!("{}: another process changes the host's huge pages: {error}", path.display());
                return Err(io::Error::new(io::Error::from(error).kind(), text));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd;
    use ballast_base::{Bytes, HUGE_SIZE};
    use ballast_testkit::{PoolLoan, skip};
    use std::sync::atomic::Ordering;

    #[test]
    fn numbers_are_changed_by_one_process_at_a_time_and_only_root_can_hold_the_others_up() {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().expect("a directory");
        assert!(lock_numbers(root.path(), Duration::ZERO).expect("asked").is_none(), "there is nowhere to put it");
        std::fs::create_dir(root.path().join("run")).expect("make");
        let first = lock_numbers(root.path(), Duration::ZERO).expect("locked").expect("a file");
        assert_eq!(first.metadata().expect("made").permissions().mode() & 0o777, 0o600);
        let said = lock_numbers(root.path(), Duration::ZERO).expect_err("another one has it").to_string();
        assert!(said.contains("ballast-hugepages.lock: another process"), "{said}");
        drop(first);
        // A program that another test starts has a copy of the descriptor for a moment.
        assert!(lock_numbers(root.path(), Duration::from_mins(1)).expect("locked").is_some());
    }

    #[test]
    fn pages_and_holes_of_a_huge_page_file_are_told_apart_and_stay_what_they_are() {
        const PAGES: usize = 4;
        let ready = PoolLoan::new(PAGES as u64).and_then(|loan| {
            let file = memfd::create_huge("ballast-test", Bytes((PAGES * HUGE_SIZE) as u64))?;
            let presence = Presence::new(Mapping::shared(&file, 0, PAGES * HUGE_SIZE)?, HUGE_SIZE)?;
            Ok((loan, file, presence))
        });
        let Ok((_loan, file, presence)) = ready.inspect_err(|why| skip("hugetlb", why)) else { return };
        let map = Mapping::shared(&file, 0, PAGES * HUGE_SIZE).expect("map");
        map.words(2 * HUGE_SIZE, 1)[0].store(7, Ordering::Relaxed);
        for _ in 0..2 {
            let present = [0, 1, 2, 3].map(|page| presence.is_present(page * HUGE_SIZE).expect("ask"));
            assert_eq!(present, [false, false, true, false]);
        }
        assert_eq!(
            memfd::resident(&file).expect("stat").bytes(),
            Bytes(HUGE_SIZE as u64),
            "asking allocated something"
        );
        assert_eq!(memfd::ram_page(&file).expect("statfs"), Some(Bytes(HUGE_SIZE as u64)));
        memfd::punch(&file, 2 * HUGE_SIZE as u64, HUGE_SIZE as u64).expect("punch");
        assert!(!presence.is_present(2 * HUGE_SIZE).expect("ask"));
        assert_eq!(map.words(2 * HUGE_SIZE, 1)[0].load(Ordering::Relaxed), 0);
    }
}
