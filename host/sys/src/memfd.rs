//! Shared memory files: create, read, punch, query.
//!
//! Before: a client or the keeper creates or receives the descriptor. After: `pager` reads and punches guest pages,
//! `store` keeps its arenas here.
//! Units: offsets and lengths are bytes from the start of the file, page-aligned where they name pages.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use ballast_base::{Bytes, GIB, HUGE_SIZE, Invalid, PAGE_SIZE, PageCount};
use rustix::fs::{FallocateFlags, FileType, MemfdFlags, SeekFrom};

/// Create an empty shared memory file of `size` bytes. It is sparse: memory is used as pages are touched.
pub fn create(name: &str, size: Bytes) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&fd, size.0)?;
    Ok(fd)
}

/// As [`create`], with 2 MiB pages, which come from the host's pool as they are touched; `size` is a multiple.
pub fn create_huge(name: &str, size: Bytes) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?;
    rustix::fs::ftruncate(&fd, size.0)?;
    Ok(fd)
}

/// Free `len` bytes from `offset`: the pages leave the file and return to the host. A part of a huge page that the
/// kernel cannot split now is filled with zeros and stays (see [`is_hole`]).
pub fn punch(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    fallocate(fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
}

/// Allocate `len` bytes from `offset` on; they read as zeros. On a disk, later writes then need no space.
pub fn allocate(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    fallocate(fd, FallocateFlags::KEEP_SIZE, offset, len)
}

fn fallocate(fd: impl AsFd, flags: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
    loop {
        match rustix::fs::fallocate(&fd, flags, offset, len) {
            Err(rustix::io::Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

/// Read exactly `out.len()` bytes at `offset` without mapping the file. A hole reads as zeros (and stays a hole).
pub fn read_exact_at(file: impl AsFd, offset: u64, out: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < out.len() {
        match rustix::io::pread(&file, &mut out[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Does this error of a read mean that the bytes are lost, because the memory failed, or the device it was swapped to?
pub fn is_memory_error(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EIO)
}

/// Is the page at `offset` present in the file? A hole is not.
pub fn is_present(fd: impl AsFd, offset: u64) -> io::Result<bool> {
    Ok(!is_hole(fd, offset, PAGE_SIZE as u64)?)
}

/// Is no page of this range present in the file?
pub fn is_hole(fd: impl AsFd, offset: u64, len: u64) -> io::Result<bool> {
    Ok(data_from(fd, offset)?.is_none_or(|next| next >= offset + len))
}

fn data_from(fd: impl AsFd, offset: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(fd, SeekFrom::Data(offset)) {
        Ok(next) => Ok(Some(next)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The next run of present bytes at or after `offset`, as `(start, end)`; `None` when only holes follow.
pub fn next_data(fd: impl AsFd, offset: u64) -> io::Result<Option<(u64, u64)>> {
    let Some(start) = data_from(&fd, offset)? else { return Ok(None) };
    Ok(Some((start, rustix::fs::seek(&fd, SeekFrom::Hole(start))?)))
}

/// The first run of present bytes in `offset..end`, cut at `end`; both are whole pages. The cost depends on the range
/// alone. The kernel's `SEEK_HOLE` would search a full file to its end, at 20 ns a page.
pub fn next_data_within(fd: impl AsFd, offset: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
    // `cachestat` takes a length of 0 as the whole file.
    if offset >= end {
        return Ok(None);
    }
    // One call is enough where all pages are present or none is, as in most short ranges.
    let cached = cached(&fd, offset, end - offset)?.map(|pages| pages.bytes().0);
    match cached {
        Some(0) => return Ok(None),
        Some(bytes) if bytes >= end - offset => return Ok(Some((offset, end))),
        _ => {}
    }
    let Some(start) = data_from(&fd, offset)?.filter(|start| *start < end) else { return Ok(None) };
    let stop = match cached {
        // All pages that were counted are from `start` on.
        Some(bytes) if bytes >= end - start => end,
        Some(_) => rustix::fs::seek(&fd, SeekFrom::Hole(start))?.min(end),
        None => {
            let mut stop = start + PAGE_SIZE as u64;
            while stop < end && is_present(&fd, stop)? {
                stop += PAGE_SIZE as u64;
            }
            stop
        }
    };
    Ok(Some((start, stop)))
}

/// Pages of a range that are in memory or swapped out; `None` if the kernel cannot tell (before Linux 6.5).
fn cached(fd: &impl AsFd, offset: u64, len: u64) -> io::Result<Option<PageCount>> {
    // `cachestat`, its range and what it returns: in memory, dirty, in write-back, evicted, evicted recently.
    const CACHESTAT: libc::c_long = 451;
    let (range, mut counts) = ([offset, len], [0u64; 5]);
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: both arrays are as large as the kernel's structures and live during the call.
    let done = unsafe { libc::syscall(CACHESTAT, fd, range.as_ptr(), counts.as_mut_ptr(), 0) };
    if done == 0 {
        return Ok(Some(PageCount(counts[0] + counts[3])));
    }
    match io::Error::last_os_error() {
        error if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EOPNOTSUPP)) => Ok(None),
        error => Err(error),
    }
}

/// Memory the whole file uses now. A huge folio counts whole.
pub fn resident(fd: impl AsFd) -> io::Result<PageCount> {
    Ok(usage(fd)?.0)
}

/// As [`resident`], with the length of the file.
pub fn usage(fd: impl AsFd) -> io::Result<(PageCount, Bytes)> {
    const SECTOR: u64 = 512;
    let stat = rustix::fs::fstat(&fd)?;
    Ok((Bytes(stat.st_blocks as u64 * SECTOR).pages_floor(), Bytes(stat.st_size as u64)))
}

/// Memory that a part of the file uses now. It costs some 10 ns for each present page.
pub fn resident_within(fd: impl AsFd, offset: u64, len: u64) -> io::Result<PageCount> {
    if let Some(pages) = cached(&fd, offset, len)? {
        return Ok(pages);
    }
    let (mut at, mut found) = (offset, 0);
    while let Some((start, end)) = next_data(&fd, at)?.filter(|(start, _)| *start < offset + len) {
        at = end.min(offset + len);
        found += at - start;
    }
    Ok(Bytes(found).pages_floor())
}

/// Does [`resident_within`] take no lock of the file, so that it waits for no other process?
pub fn counts_at_once(fd: impl AsFd) -> bool {
    matches!(cached(&fd, 0, 1), Ok(Some(_)))
}

/// Size of the file.
pub fn size(fd: impl AsFd) -> io::Result<Bytes> {
    Ok(Bytes(rustix::fs::fstat(&fd)?.st_size as u64))
}

/// The identity of a file across processes: its device and inode numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Device number.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
}

/// The identity of an open file.
pub fn file_id(fd: impl AsFd) -> io::Result<FileId> {
    let stat = rustix::fs::fstat(&fd)?;
    Ok(FileId { dev: stat.st_dev, ino: stat.st_ino })
}

/// Is this descriptor a file of the shared-memory file system (a memfd, or a file in a tmpfs)?
pub fn is_shmem(fd: impl AsFd) -> io::Result<bool> {
    Ok(ram_page(fd)? == Some(Bytes(PAGE_SIZE as u64)))
}

/// Bytes of the pages that a RAM file consists of: a base page for the shared-memory file system, the page size of a
/// hugetlbfs. `None` for a file of any other file system, and for a device, whose node is in one as well (`/dev`).
pub fn ram_page(fd: impl AsFd) -> io::Result<Option<Bytes>> {
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    const HUGETLBFS_MAGIC: i64 = 0x9584_58F6;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
    if matches!(kind, FileType::CharacterDevice | FileType::BlockDevice) {
        return Ok(None);
    }
    let stat = rustix::fs::fstatfs(&fd)?;
    Ok(match stat.f_type as i64 {
        TMPFS_MAGIC => Some(Bytes(PAGE_SIZE as u64)),
        HUGETLBFS_MAGIC => Some(Bytes(stat.f_bsize as u64)),
        _ => None,
    })
}

/// Permission bit of files whose pages come when they are touched (the sticky bit, which has no other meaning for a
/// file). Every process that has such a file sees it, in each life of engine, keeper and client.
pub const ON_DEMAND: u32 = 0o1000;

/// Do the pages of this file of a hugetlbfs come when they are touched? Then all mappings of guest RAM in it must
/// always be registered with userfaultfd: if the kernel served a touch itself and had no page, it would end the
/// process.
pub fn is_on_demand(fd: impl AsFd) -> io::Result<bool> {
    let mode = rustix::fs::fstat(&fd)?.st_mode;
    Ok(mode & ON_DEMAND != 0
        && FileType::from_raw_mode(mode) == FileType::RegularFile
        && ram_page(fd)?.is_some_and(|page| page.0 > PAGE_SIZE as u64))
}

/// The node of the host that a file on demand must have its pages from. It is kept in the file's group, which has no
/// other meaning here: the node's number plus one. `None`: any node.
pub fn on_demand_node(fd: impl AsFd) -> io::Result<Option<u32>> {
    Ok(rustix::fs::fstat(&fd)?.st_gid.checked_sub(1))
}

/// Set the node that [`on_demand_node`] returns.
pub fn set_on_demand_node(fd: impl AsFd, node: u32) -> io::Result<()> {
    Ok(rustix::fs::fchown(&fd, None, Some(rustix::fs::Gid::from_raw(node + 1)))?)
}

/// Is one of these files on demand ([`is_on_demand`])?
pub fn any_is_on_demand<F: AsFd>(files: impl IntoIterator<Item = F>) -> io::Result<bool> {
    files.into_iter().try_fold(false, |any, file| Ok(any || is_on_demand(file)?))
}

/// Check that guest RAM can be in this file. Returns the size of its pages.
///
/// # Errors
/// The reason, as the end of a sentence that begins with the file.
pub fn check_ram_file(fd: impl AsFd) -> Result<Bytes, Invalid> {
    let page = ram_page(fd).map_err(|error| format!("looking at its file: {error}"))?;
    let page = page.ok_or("its file is not shared memory (a memfd, or a file in a tmpfs or a hugetlbfs)")?;
    match [PAGE_SIZE as u64, HUGE_SIZE as u64, GIB].contains(&page.0) {
        true => Ok(page),
        false => Err(format!("its pages are of {page}; pages of 4 KiB, 2 MiB and 1 GiB are managed").into()),
    }
}

/// A second, independent open of the same file, read-only or read-write. The kernel checks permissions again, so a
/// read-only descriptor of a file with mode 0600 can be given to a process that must not write it.
pub fn reopen(fd: BorrowedFd<'_>, writable: bool) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(std::fs::OpenOptions::new().read(true).write(writable).open(path)?.into())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_run_of_pages_ends_within_its_range_whatever_follows() {
        let at = |page: u64| page * PAGE_SIZE as u64;
        let file = File::from(create("ballast-test", Bytes(at(16))).expect("memfd"));
        for page in [2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14, 15] {
            file.write_all_at(&[7; PAGE_SIZE], at(page)).expect("write");
        }
        let run = |from, until| {
            let run = next_data_within(&file, at(from), at(until)).expect("ask");
            run.map(|(start, end)| (start / PAGE_SIZE as u64, end / PAGE_SIZE as u64))
        };
        assert_eq!([run(0, 2), run(5, 7), run(3, 3)], [None, None, None]);
        assert_eq!([run(0, 16), run(3, 16), run(3, 4)], [Some((2, 5)), Some((3, 5)), Some((3, 4))]);
        assert_eq!([run(5, 16), run(8, 12)], [Some((7, 16)), Some((8, 12))]);
        assert!(cached(&file, at(1), at(5)).expect("ask").is_none_or(|pages| pages == PageCount(3)));
        let counts =
            [(0, 16), (3, 6), (5, 2), (14, 2)].map(|(from, count)| resident_within(&file, at(from), at(count)));
        assert_eq!(counts.map(|pages| pages.expect("ask").0), [12, 4, 0, 2]);
    }

    #[test]
    fn a_punched_page_reads_as_zeros_and_is_no_longer_present() {
        let fd = create("ballast-test", Bytes(4 * PAGE_SIZE as u64)).expect("memfd");
        let file = File::from(fd);
        file.write_all_at(&[7; PAGE_SIZE], PAGE_SIZE as u64).expect("write");
        assert!(is_present(&file, PAGE_SIZE as u64).expect("seek"));
        assert!(!is_present(&file, 0).expect("seek"));
        assert_eq!(resident(&file).expect("stat"), PageCount(1));
        assert_eq!(next_data(&file, 0).expect("seek"), Some((4096, 8192)));
        punch(&file, PAGE_SIZE as u64, PAGE_SIZE as u64).expect("punch");
        assert!(!is_present(&file, PAGE_SIZE as u64).expect("seek"));
        assert_eq!(resident(&file).expect("stat"), PageCount(0));
        assert_eq!(next_data(&file, 0).expect("seek"), None);
        let mut page = [1; PAGE_SIZE];
        read_exact_at(&file, PAGE_SIZE as u64, &mut page).expect("read");
        assert_eq!(page, [0; PAGE_SIZE]);
        assert_eq!(resident(&file).expect("stat"), PageCount(0), "reading a hole must not fill it");
    }

    #[test]
    fn a_read_only_reopen_cannot_be_written() {
        let fd = create("ballast-test", Bytes(PAGE_SIZE as u64)).expect("memfd");
        let reader = File::from(reopen(fd.as_fd(), false).expect("reopen"));
        assert!(reader.write_all_at(&[1], 0).is_err());
        assert_eq!(file_id(&fd).expect("stat"), file_id(&reader).expect("stat"));
        assert!(is_shmem(&fd).expect("statfs"));
    }
    #[test]
    fn a_device_in_a_tmpfs_is_no_ram_file() {
        let device = File::open("/dev/zero").expect("open");
        assert_eq!(ram_page(&device).expect("stat"), None);
        assert!(check_ram_file(&device).expect_err("a device").to_string().contains("not shared memory"));
        let fd = create("ballast-test", Bytes(PAGE_SIZE as u64)).expect("memfd");
        assert_eq!(ram_page(&fd).expect("stat"), Some(Bytes(PAGE_SIZE as u64)));
    }
}
