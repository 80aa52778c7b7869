//! Parking: makes a process hold its own `mmap_lock` for as long as a file server keeps it waiting.
//!
//! Before: a test serves a file by [`crate::fuse`]. After: a thread of this process sleeps in `mmap` and holds the lock
//! for writing. Nothing can end it, so every thread that needs the lock of this address space waits as well.
//! Threads: each step has one of its own, which stays there until the server answers or goes.
//!
//! The file is open twice, through the page cache and past it. An unanswered read through the cache leaves a locked
//! page in it. A mapping of the other open has the kernel drop the cache first, and wait for that page.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use ballast_base::PAGE_SIZE;
use rustix::fs::OFlags;

/// The name of the thread that holds the lock.
pub const HOLDER: &str = "park-map";

/// A process that can park itself.
#[derive(Debug)]
pub struct Parking {
    cached: File,
    direct: File,
}

impl Parking {
    /// Open the file, which the server must still answer for.
    pub fn open(path: &Path) -> io::Result<Self> {
        let direct = OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path)?;
        Ok(Self { cached: File::open(path)?, direct })
    }

    /// Read a page without an answer: call this while the server holds its answers.
    pub fn read(&self) -> io::Result<()> {
        let file = self.cached.try_clone()?;
        let body = move || drop(file.read_at(&mut [0], 0));
        std::thread::Builder::new().name("park-read".into()).spawn(body).map(drop)
    }

    /// Map it: do this when the server has the read.
    pub fn map(&self) -> io::Result<()> {
        let file = self.direct.try_clone()?;
        let body = move || {
            use rustix::mm::{MapFlags, ProtFlags, mmap};
            // SAFETY: a new mapping where the kernel likes, which nobody ever touches; it stays until the process ends.
            let _ = unsafe { mmap(std::ptr::null_mut(), PAGE_SIZE, ProtFlags::READ, MapFlags::PRIVATE, &file, 0) };
        };
        std::thread::Builder::new().name(HOLDER.into()).spawn(body).map(drop)
    }
}
