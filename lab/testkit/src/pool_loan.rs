//! Huge pages for a test, or a bench.
//!
//! Before: the host has too few. After: it has more while a [`PoolLoan`] exists. Threads: any; several test programs
//! may have a loan at once. Units: huge pages of 2 MiB. Promise: at the end the host's number is as before.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;

/// More huge pages for the host's pool while this value lives. Drop returns them.
#[derive(Debug)]
pub struct PoolLoan {
    setting: &'static str,
    pages: u64,
}

impl PoolLoan {
    const RESERVED: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    /// File with the number of pages that the pool may take from the host beyond those.
    const SURPLUS: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages";
    /// The lock file of `ballast_sys::hugetlb`.
    const LOCK: &str = "/run/ballast-hugepages.lock";

    /// Let the pool take `pages` more as they are touched. They return to the host as they are freed.
    pub fn new(pages: u64) -> io::Result<Self> {
        Self::of(Self::SURPLUS, pages)
    }

    /// Reserve `pages` more now. They return to the pool as they are freed, so that later touches find used memory.
    pub fn reserved(pages: u64) -> io::Result<Self> {
        let loan = Self::of(Self::RESERVED, pages)?;
        if loan.pages < pages {
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, format!("the host lacks {pages} huge pages")));
        }
        Ok(loan)
    }

    fn of(setting: &'static str, pages: u64) -> io::Result<Self> {
        let pages = Self::change(setting, |now| now + pages)?;
        Ok(Self { setting, pages })
    }

    fn read(setting: &str) -> io::Result<u64> {
        std::fs::read_to_string(setting)?.trim().parse().map_err(io::Error::other)
    }

    /// Changes the number in a file. Returns its growth: the kernel reserves as many pages as it can.
    fn change(setting: &str, to: impl Fn(u64) -> u64) -> io::Result<u64> {
        // A user without permission gets this error, and not that of the lock file.
        File::options().write(true).open(setting)?;
        let _lock = match File::options().write(true).create(true).truncate(false).mode(0o600).open(Self::LOCK) {
            // A machine that runs only this program may have no /run.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            lock => {
                let lock = lock?;
                lock.lock()?;
                Some(lock)
            }
        };
        let before = Self::read(setting)?;
        std::fs::write(setting, to(before).to_string())?;
        Ok(Self::read(setting)?.saturating_sub(before))
    }
}

impl Drop for PoolLoan {
    fn drop(&mut self) {
        if let Err(error) = Self::change(self.setting, |now| now.saturating_sub(self.pages)) {
            eprintln!("Putting back {}: {error}", self.setting);
        }
    }
}
