//! Files for direct I/O: created without a name, so that they end with their last descriptor.
//!
//! Before: an operator names a directory. After: `store` writes far pages into the file through `ring`.
//! Units: bytes. Promise: an error names the directory and says what it cannot do. A descriptor from [`place_of`]
//! closes at once, however long the disk hangs.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use ballast_base::Bytes;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

fn refused(dir: &Path, what: &str, errno: Errno) -> io::Error {
    let error = io::Error::from(errno);
    io::Error::new(error.kind(), format!("Making a file in {}: {what}: {error}", dir.display()))
}

/// Make a sparse file of `size` bytes in `dir`, without a name, with mode 0600, for direct I/O.
///
/// # Errors
/// The directory does not exist or is not writable, or its file system supports no direct I/O, no unnamed files, or not
/// that size.
pub fn create_unnamed(dir: &Path, size: Bytes) -> io::Result<OwnedFd> {
    // EXCL: no process can give it a name later.
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::DIRECT | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR).map_err(|errno| match errno {
        Errno::INVAL => refused(dir, "its file system does not support direct I/O (O_DIRECT)", errno),
        Errno::OPNOTSUPP | Errno::ISDIR => refused(dir, "its file system supports no unnamed files (O_TMPFILE)", errno),
        _ => refused(dir, "open", errno),
    })?;
    rustix::fs::ftruncate(&file, size.0)
        .map_err(|errno| refused(dir, &format!("a sparse file of {} bytes", size.0), errno))?;
    Ok(file)
}

/// Another open of a file, for reading and writing or for reading only. As in `memfd::reopen`, permissions are checked.
pub fn reopen(fd: BorrowedFd<'_>, writable: bool) -> io::Result<OwnedFd> {
    let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(rustix::fs::open(path, access | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())?)
}

/// A descriptor of the file's place (`O_PATH`): it keeps the file and can be sent and reopened, but neither read nor
/// written. Neither this call nor the descriptor's close waits for the file's disk or server.
pub fn place_of(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// Read from `offset` on, with no limit to the wait. Returns the number of bytes.
pub fn read_at(fd: impl AsFd, offset: u64, out: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::io::pread(fd, out, offset)?)
}

/// Is this a regular file open without the page cache, for reading and writing, or (not `writable`) for reading only?
pub fn is_direct_file(fd: impl AsFd, writable: bool) -> io::Result<bool> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
    let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
    Ok(kind.is_file() && flags.contains(OFlags::DIRECT) && flags & OFlags::RWMODE == access)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd;
    use ballast_testkit::skip;

    #[test]
    fn an_unnamed_file_is_sparse_and_leaves_no_trace_in_its_directory() {
        let dir = tempfile::tempdir().expect("a directory");
        let made = create_unnamed(dir.path(), Bytes(1 << 30));
        let Ok(file) = made.inspect_err(|error| skip("o_direct", error)) else { return };
        assert!(is_direct_file(&file, true).expect("fcntl"));
        assert_eq!(memfd::size(&file).expect("stat"), Bytes(1 << 30));
        assert_eq!(memfd::resident(&file).expect("stat").0, 0);
        let reader = reopen(file.as_fd(), false).expect("reopen");
        assert_eq!([true, false].map(|writable| is_direct_file(&reader, writable).expect("fcntl")), [false, true]);
        let writer = reopen(reader.as_fd(), true).expect("reopen");
        assert!(is_direct_file(&writer, true).expect("fcntl"));
        assert_eq!(memfd::file_id(&file).expect("stat"), memfd::file_id(&writer).expect("stat"));
        assert_eq!(std::fs::read_dir(dir.path()).expect("read").count(), 0);
    }

    #[test]
    fn a_place_keeps_the_file_and_can_be_reopened_but_not_read_or_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let made = create_unnamed(dir.path(), Bytes(1 << 20));
        let Ok(file) = made.inspect_err(|error| skip("o_direct", error)) else { return };
        let id = memfd::file_id(&file).expect("stat");
        let place = place_of(file.as_fd()).expect("a place");
        drop(file);
        let again = place_of(place.as_fd()).expect("a place of a place");
        drop(place);
        assert_eq!(rustix::io::read(&again, &mut [0; 1]), Err(Errno::BADF));
        assert_eq!(rustix::fs::fallocate(&again, rustix::fs::FallocateFlags::empty(), 0, 4096), Err(Errno::BADF));
        let opened = reopen(again.as_fd(), true).expect("reopen");
        assert!(is_direct_file(&opened, true).expect("fcntl"));
        assert_eq!(memfd::file_id(&opened).expect("stat"), id);
    }

    #[test]
    fn an_error_names_the_directory_that_cannot_hold_the_file() {
        let error = create_unnamed(Path::new("/proc/self"), Bytes(4096)).expect_err("accepted").to_string();
        assert!(error.contains("/proc/self"), "{error}");
        let error = create_unnamed(Path::new("/no/such/directory"), Bytes(4096)).expect_err("accepted").to_string();
        assert!(error.contains("/no/such/directory: open: No such file"), "{error}");
        let memfd = memfd::create("ballast-test", Bytes(4096)).expect("memfd");
        assert!(!is_direct_file(&memfd, true).expect("fcntl"));
    }
}
