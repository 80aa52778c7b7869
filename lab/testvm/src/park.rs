//! Parking: makes a process hold its own `mmap_lock` until a file server replies.
//!
//! Before: a test serves a file by [`crate::fuse`]. After: a thread of this process sleeps in `mmap` and holds the lock
//! for writing. No signal ends it, so every thread that needs the lock of this address space waits as well.
//! Threads: each step starts one, which waits until the server replies or ends.
//!
//! The file is open twice, with the page cache and with `O_DIRECT`. An unanswered read through the page cache leaves a
//! locked page in the cache. To map the other descriptor, the kernel first drops the cache and waits for that page.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use ballast_base::PAGE_SIZE;
use rustix::fs::OFlags;

/// The name of the thread that holds the lock.
pub const HOLDER: &str = "park-map";

/// The two open descriptors of the file.
#[derive(Debug)]
pub struct Parking {
    cached: File,
    direct: File,
}

impl Parking {
    /// Open the file. The server must reply to this.
    pub fn open(path: &Path) -> io::Result<Self> {
        let direct = OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path)?;
        Ok(Self { cached: File::open(path)?, direct })
    }

    /// Start a thread that reads a page. Call this while the server holds its replies.
    pub fn read(&self) -> io::Result<()> {
        let file = self.cached.try_clone()?;
        let body = move || drop(file.read_at(&mut [0], 0));
        std::thread::Builder::new().name("park-read".into()).spawn(body).map(drop)
    }

    /// Start a thread that maps the file. Call this when the server has received the read.
    pub fn map(&self) -> io::Result<()> {
        let file = self.direct.try_clone()?;
        let body = move || {
            use rustix::mm::{MapFlags, ProtFlags, mmap};
            // SAFETY: a new mapping at an address that the kernel chooses. Nobody touches it, and it is never unmapped.
            let _ = unsafe { mmap(std::ptr::null_mut(), PAGE_SIZE, ProtFlags::READ, MapFlags::PRIVATE, &file, 0) };
        };
        std::thread::Builder::new().name(HOLDER.into()).spawn(body).map(drop)
    }
}
