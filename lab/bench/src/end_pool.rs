//! The end of a pool of the bench's own: all its memory is the host's again, and nothing stays mounted.
//!
//! Before: no daemon has it; one that was killed may have it for a moment. After: the directory can be removed.
//! Threads: the guard's. Promise: the number of huge pages changes by the pool's own, so that those of others stay.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_base::Bytes;
use ballast_reserve::{Error, FILES, Host, Reserve};

/// How long a killed daemon and killed VMs may take to end.
const ENDED_WITHIN: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(20);

/// Return the memory of the pool in this directory, if it is still there.
pub(crate) fn end_pool(dir: &Path) -> Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    let start = Instant::now();
    let mut reserve = loop {
        match Reserve::open(dir, Host::default()) {
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
    drop(reserve);
    unmount(dir).context("Unmounting the pool's files")
}

/// Unmount the files of the pool in this directory, if there is a pool.
pub(crate) fn unmount(dir: &Path) -> io::Result<()> {
    if !dir.join(FILES).exists() {
        return Ok(());
    }
    let files = CString::new(dir.join(FILES).as_os_str().as_bytes())?;
    // SAFETY: the path is a C string that lives during the call, which only reads it.
    let done = unsafe { libc::umount2(files.as_ptr(), libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
