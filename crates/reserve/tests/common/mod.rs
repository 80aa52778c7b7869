//! A pool in a directory of its own, on huge pages of this host that are put back.

#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ballast_base::{Bytes, MIB};
use ballast_needs::skip;
use ballast_reserve::{Host, Reserve, Want};

/// One at a time: they share the kernel's number of huge pages.
static ONE: Mutex<()> = Mutex::new(());

/// Where a pool is.
pub struct Place {
    dir: tempfile::TempDir,
    pages: u64,
    _one: MutexGuard<'static, ()>,
}

impl Place {
    /// `None`, and said why, where there can be no pool.
    pub fn new() -> Option<Self> {
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        if !rustix::process::geteuid().is_root() {
            skip("root", "only root mounts file systems and reserves huge pages");
            return None;
        }
        let pages = match Host::default().pages(0) {
            Ok(pages) => pages.total,
            Err(error) => {
                skip("hugetlb", error);
                return None;
            }
        };
        let dir = tempfile::Builder::new().prefix("ballast-pool-").tempdir_in("/dev/shm").expect("a directory");
        Some(Self { dir, pages, _one: one })
    }

    /// The directory.
    pub fn dir(&self) -> PathBuf {
        self.dir.path().join("pool")
    }

    /// Open what is there.
    pub fn open(&self) -> Reserve {
        Reserve::open(&self.dir(), Host::default()).expect("open")
    }

    /// A pool of this size in files of that size, all zeroed; `None` where the host has too little.
    pub fn pool(&self, size_mib: u64, brick_mib: u64) -> Option<Reserve> {
        let mut reserve = self.open();
        let grown = reserve.grow(Want::Bytes(Bytes(size_mib * MIB)), None, Some(Bytes(brick_mib * MIB)));
        if let Err(error) = grown {
            skip("hugetlb", error);
            return None;
        }
        if sum(&reserve, |node| node.reserved) < size_mib * MIB {
            skip("memory", format!("{:?}", reserve.overview().notes));
            return None;
        }
        zero_all(&mut reserve);
        Some(reserve)
    }

    /// Huge pages of the host now, beyond what it had.
    pub fn pages(&self) -> u64 {
        Host::default().pages(0).expect("pages").total - self.pages
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        unmount(&self.dir().join("2M"));
        if let Err(error) = Host::default().set_pages(0, self.pages) {
            eprintln!("Putting back the number of huge pages: {error}");
        }
    }
}

/// Take the file system of a pool away.
pub fn unmount(dir: &Path) {
    if dir.exists() {
        let _ = Command::new("umount").arg("--lazy").arg(dir).status();
    }
}

/// Have a worker zero all that can be.
pub fn zero_all(reserve: &mut Reserve) {
    while let Some(job) = reserve.next_job().expect("a job") {
        let done = job.run();
        reserve.finish(done);
    }
}

/// Bytes of all nodes.
pub fn sum(reserve: &Reserve, of: impl Fn(&ballast_reserve::Node) -> Bytes) -> u64 {
    reserve.overview().nodes.iter().map(|node| of(node).0).sum()
}
