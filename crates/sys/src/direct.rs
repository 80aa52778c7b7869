//! Files for direct I/O: made without a name, so that they end with their last descriptor.
//!
//! Before: an operator names a directory. After: `store` writes far pages into the file through `ring`.
//! Units: bytes. Promise: an error names the directory and says what it cannot do.

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
/// If the directory is not there or not ours to write, or its file system knows no direct I/O or no nameless files, or
/// not of that size.
pub fn create_unnamed(dir: &Path, size: Bytes) -> io::Result<OwnedFd> {
    // EXCL: nobody can give it a name later.
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::DIRECT | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR).map_err(|errno| match errno {
        Errno::INVAL => refused(dir, "its file system does not do direct I/O (O_DIRECT)", errno),
        Errno::OPNOTSUPP | Errno::ISDIR => refused(dir, "its file system makes no nameless files (O_TMPFILE)", errno),
        _ => refused(dir, "open", errno),
    })?;
    rustix::fs::ftruncate(&file, size.0)
        .map_err(|errno| refused(dir, &format!("a sparse file of {} bytes", size.0), errno))?;
    Ok(file)
}

/// A second, independent open of such a file, for reading and writing or for reading only. The kernel checks
/// permissions anew, as with `memfd::reopen`.
pub fn reopen(fd: BorrowedFd<'_>, writable: bool) -> io::Result<OwnedFd> {
    let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(rustix::fs::open(path, access | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())?)
}

/// Is this a regular file open for reading and writing, without the page cache?
pub fn is_direct_file(fd: impl AsFd) -> io::Result<bool> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
    Ok(kind.is_file() && flags.contains(OFlags::DIRECT) && flags & OFlags::RWMODE == OFlags::RDWR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd;
    use ballast_needs::skip;

    #[test]
    fn a_nameless_file_is_sparse_and_leaves_no_trace_in_its_directory() {
        let dir = tempfile::tempdir().expect("a directory");
        let made = create_unnamed(dir.path(), Bytes(1 << 30));
        let Ok(file) = made.inspect_err(|error| skip("o_direct", error)) else { return };
        assert!(is_direct_file(&file).expect("fcntl"));
        assert_eq!(memfd::size(&file).expect("stat"), Bytes(1 << 30));
        assert_eq!(memfd::resident(&file).expect("stat").0, 0);
        let reader = reopen(file.as_fd(), false).expect("reopen");
        assert!(!is_direct_file(&reader).expect("fcntl"), "a reader is not enough");
        let writer = reopen(reader.as_fd(), true).expect("reopen");
        assert!(is_direct_file(&writer).expect("fcntl"));
        assert_eq!(memfd::file_id(&file).expect("stat"), memfd::file_id(&writer).expect("stat"));
        assert_eq!(std::fs::read_dir(dir.path()).expect("read").count(), 0);
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let error = create_unnamed(Path::new("/proc/self"), Bytes(4096)).expect_err("accepted").to_string();
        assert!(error.contains("/proc/self"), "{error}");
        let error = create_unnamed(Path::new("/no/such/directory"), Bytes(4096)).expect_err("accepted").to_string();
        assert!(error.contains("/no/such/directory: open: No such file"), "{error}");
        let memfd = memfd::create("ballast-test", Bytes(4096)).expect("memfd");
        assert!(!is_direct_file(&memfd).expect("fcntl"));
    }
}
