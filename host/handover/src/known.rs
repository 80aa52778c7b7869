//! The files that are looked for in other processes, and the proof that what a process has is one of them.
//!
//! Before: a process has something with the numbers of such a file, which proves nothing (`ballast_sys::same_file`).
//! After: it is the file, or it is not.
//! Threads: those of `mappers` that may hang.
//! Promise: what cannot be told from the file counts as the file.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Weak;

use ballast_sys::memfd::FileId;
use ballast_sys::same_file::same_file;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, makedev, openat, statx};

/// The files that are looked for. A thread that hangs over a process keeps none of them open.
pub type Files = HashMap<FileId, Weak<File>>;

/// Is what this path in `/proc` names the file of these that has these numbers?
///
/// # Errors
/// There is nothing, or we may not look at it, or lack something.
pub(crate) fn names(files: &Files, file: FileId, path: &str) -> io::Result<bool> {
    let Some(known) = files.get(&file) else { return Ok(false) };
    // Neither asks a file system that may not respond.
    let there = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let stat = statx(&there, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS)?;
    if (FileId { dev: makedev(stat.stx_dev_major, stat.stx_dev_minor), ino: stat.stx_ino }) != file {
        return Ok(false);
    }
    let again = format!("/proc/self/fd/{}", there.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = openat(CWD, again, flags, Mode::empty()).map_err(io::Error::from);
    let Some(known) = known.upgrade() else { return Ok(true) };
    Ok(opened.and_then(|opened| same_file(&*known, opened)).unwrap_or(true))
}
