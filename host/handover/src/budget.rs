//! How much of the memory maps of one user's processes a scan reads: maps are as long as their owner likes.
//!
//! Before: a scan begins. After: each user's processes were read up to a number of bytes; the next scan begins with
//! the rest.
//! Threads: those of `mappers` that may hang. Units: bytes of `/proc/PID/maps`.
//! Promise: at least one process of each user is read by each scan, and that one to its end.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};

/// The bytes that one scan has read of each user.
#[derive(Debug)]
pub(crate) struct Budget {
    most: u64,
    spent: Mutex<HashMap<u32, u64>>,
}

impl Budget {
    pub(crate) fn new(most: u64) -> Self {
        Self { most, spent: Mutex::default() }
    }

    /// Reads a process, which adds the bytes that it read.
    ///
    /// # Errors
    /// Those of reading; `QuotaExceeded` if too much of its user was read already.
    pub(crate) fn read<T>(&self, pid: u32, read: impl FnOnce(&mut u64) -> io::Result<T>) -> io::Result<T> {
        let user = user_of(pid);
        let spent = || self.spent.lock().unwrap_or_else(PoisonError::into_inner);
        if spent().get(&user).is_some_and(|spent| *spent >= self.most) {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let mut bytes = 0;
        let done = read(&mut bytes);
        *spent().entry(user).or_default() += bytes;
        done
    }
}

/// The user who started a process; the owner of its directory is root if it cannot be dumped.
fn user_of(pid: u32) -> u32 {
    let status = std::fs::read(format!("/proc/{pid}/status")).unwrap_or_default();
    let text = String::from_utf8_lossy(&status);
    let ids = text.lines().find_map(|line| line.strip_prefix("Uid:"));
    ids.and_then(|ids| ids.split_ascii_whitespace().next()?.parse().ok()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;

    use ballast_sys::memfd::FileId;

    use super::*;
    use crate::mappers::tests::stopped;
    use crate::mappers::{Mapped, Processes, Read};

    #[test]
    fn what_a_scan_leaves_of_a_user_is_read_by_the_next_scans_and_what_is_known_of_it_counts() {
        let mut children: Vec<_> = (0..4).map(|_| stopped()).collect();
        let entries: Vec<(u32, u64)> = children.iter().map(|child| (child.id(), 1)).collect();
        let file = FileId { dev: 1, ino: 1 };
        let reads = Arc::new(Mutex::new(HashMap::<u32, u32>::new()));
        let mut processes = Processes::default();
        // Two of one user fit, as the second begins before all is spent.
        let scan = |processes: &mut Processes| {
            let (budget, reads) = (Budget::new(100), reads.clone());
            let read: Arc<Read> = Arc::new(move |pid| {
                budget.read(pid, |bytes| {
                    *bytes += 60;
                    *reads.lock().expect("one thread").entry(pid).or_default() += 1;
                    Ok(Mapped { files: [(file, 0, 4096)].into_iter().collect(), ..Mapped::default() })
                })
            });
            processes.scan_these(entries.clone(), &HashSet::from([file]), &read)
        };
        let first = scan(&mut processes);
        assert_eq!((first.left.len(), first.mapping.len(), first.failed), (2, 2, false));
        let second = scan(&mut processes);
        assert_eq!((second.left.len(), second.mapping.len()), (0, 4));
        for _ in 0..4 {
            processes.forget_times();
            let again = scan(&mut processes);
            assert_eq!((again.left.len(), again.mapping.len()), (2, 4), "all have run, and are known");
        }
        assert_eq!(reads.lock().expect("no reader").values().copied().collect::<Vec<_>>(), [3; 4], "each in its turn");
        children.iter_mut().for_each(|child| drop(child.kill().and_then(|()| child.wait())));
    }

    #[test]
    fn what_is_read_counts_for_its_user_only() {
        let (budget, me) = (Budget::new(100), std::process::id());
        let reads_all = |bytes: &mut u64| {
            *bytes = 100;
            Ok(())
        };
        budget.read(me, reads_all).expect("it had read nothing");
        let error = budget.read(me, |_| Ok(())).expect_err("all is spent");
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
        budget.read(u32::MAX, |_| Ok(())).expect("of another user");
        assert_eq!(user_of(me), rustix::process::getuid().as_raw());
    }
}
