//! Ends the bench's own pool: all its memory returns to the host, and nothing stays mounted.
//!
//! Before: no daemon uses the pool, or a killed daemon still does for a moment. After: the directory can be removed.
//! Threads: the guard's. Promise: the number of huge pages changes by the pool's own, so that those of others stay.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_base::Bytes;
use ballast_pool::{Error, Host, Page, Reserve};

const ENDED_WITHIN: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(20);

/// Returns the memory of the pool in this directory, if there is one.
pub(crate) fn end_pool(dir: &Path) -> Result<()> {
    let ends = parts(dir).map(|(dir, page)| end_part(&dir, page));
    ends.into_iter().collect::<Result<()>>()?;
    unmount(dir).context("Unmounting the pool's files")
}

fn parts(dir: &Path) -> [(PathBuf, Page); 2] {
    [(dir.join("gib"), Page::Gib), (dir.into(), Page::Huge)]
}

fn end_part(dir: &Path, page: Page) -> Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    let start = Instant::now();
    let mut reserve = loop {
        match Reserve::open(dir, Host::default().with(page)) {
            Err(Error::Taken(_)) if start.elapsed() < ENDED_WITHIN => std::thread::sleep(PAUSE),
            opened => break opened.context("Opening the pool")?,
        }
    };
    loop {
        reserve.tend()?;
        let nodes = reserve.overview().nodes;
        if nodes.iter().all(|node| node.reserved.0 == 0) {
            break;
        }
        ensure!(start.elapsed() < ENDED_WITHIN, "memory of the pool is still used: {nodes:?}");
        // More than each node has.
        let all = nodes.iter().map(|node| node.reserved.0 + node.lent.0).sum::<u64>() * nodes.len() as u64;
        reserve.lend(Bytes(all), None)?;
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Unmount the files of the pool in this directory, if there is a pool.
pub(crate) fn unmount(dir: &Path) -> io::Result<()> {
    let all = parts(dir).map(|(dir, page)| dir.join(page.files()));
    for files in all.iter().filter(|files| files.exists()) {
        let files = CString::new(files.as_os_str().as_bytes())?;
        // SAFETY: the path is a C string that lives during the call, which only reads it.
        let done = unsafe { libc::umount2(files.as_ptr(), libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW) };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
