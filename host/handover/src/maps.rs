//! The files in memory that a process maps, and those that it has open, from `/proc`.
//!
//! Before: `mappers` chose a process. After: the parts of files, by the device and inode that the kernel states.
//! Threads: those of `mappers` that may hang, because a read of a map takes the `mmap_lock` of that process.
//! Promise: a process that has ended, or that we may not read, has nothing; any other failure is an error.

use std::collections::HashSet;
use std::io::{self, BufRead, BufReader};

use ballast_sys::file_ranges::FileRanges;
use ballast_sys::memfd::FileId;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, major, makedev, openat, statx};

use crate::places::{Place, Places};

/// Whether this path in `/proc` names the file with these numbers. Neither call asks a file system, which may not
/// respond.
fn names(file: FileId, path: &str) -> io::Result<bool> {
    let there = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let stat = statx(&there, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS)?;
    Ok((FileId { dev: makedev(stat.stx_dev_major, stat.stx_dev_minor), ino: stat.stx_ino }) == file)
}

/// Those of `files` that the process has open. The kernel states the inode number of a descriptor without a call to the
/// file system, which may not respond. Only a file with a matching number is queried, in a way that does not wait.
pub(crate) fn opened(pid: u32, files: &HashSet<FileId>) -> io::Result<HashSet<FileId>> {
    let mut found = HashSet::new();
    let there = passing_over(std::fs::read_dir(format!("/proc/{pid}/fdinfo")))?;
    for descriptor in there.into_iter().flatten() {
        let Some(descriptor) = passing_over(descriptor)? else { continue };
        let info = match std::fs::read(descriptor.path()) {
            Ok(info) => String::from_utf8_lossy(&info).into_owned(),
            Err(error) if is_ours(&error) => return Err(error),
            // The descriptor was closed, or its driver does not state a number.
            Err(_) => continue,
        };
        let ino = info.lines().find_map(|line| line.strip_prefix("ino:")?.trim().parse().ok());
        let path = format!("/proc/{pid}/fd/{}", descriptor.file_name().to_string_lossy());
        for file in files.iter().filter(|file| ino.is_none_or(|ino: u64| ino == file.ino)) {
            let is_it = passing_over(names(*file, &path))?.unwrap_or(false);
            found.extend(is_it.then_some(*file));
        }
    }
    Ok(found)
}

/// Whether the cause is that this process, the reader, lacks a resource.
fn is_ours(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let ours = [Errno::MFILE, Errno::NFILE, Errno::NOMEM].map(|errno| Some(errno.raw_os_error()));
    ours.contains(&error.raw_os_error())
}

/// Maps the error of a process that has ended, of a closed descriptor, and of a process that we may not read to `None`.
fn passing_over<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    use io::ErrorKind::{NotFound, PermissionDenied};
    match read {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), NotFound | PermissionDenied) => Ok(None),
        // The process ended during the read.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Most parts of one file that one process maps; beyond that, all bytes from the first to the last count as mapped.
const MOST_PARTS: usize = 1024;

/// The parts of files in memory that one process maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mapped {
    /// All parts that it maps.
    pub files: FileRanges,
    /// Parts that it maps at other addresses than it has announced; empty for a process that has announced nothing.
    pub elsewhere: FileRanges,
}

impl Mapped {
    pub(crate) fn retain(&mut self, keep: impl Fn(FileId) -> bool) {
        self.files.retain(&keep);
        self.elsewhere.retain(keep);
    }
}

/// The files that the process maps; `places` are those that it has announced. A VM's RAM is a memfd, or a file in tmpfs
/// or hugetlbfs, and none of these is on a block device. (Some other files are not either; they do no harm here.)
pub(crate) fn mapped(pid: u32, places: Option<&Places>) -> io::Result<Mapped> {
    let read = || -> io::Result<Mapped> {
        let mut maps = BufReader::new(std::fs::File::open(format!("/proc/{pid}/maps"))?);
        let (mut found, mut elsewhere, mut line) = (Vec::new(), Vec::new(), Vec::new());
        // As bytes, because a path may not be UTF-8.
        while maps.read_until(b'\n', &mut line)? > 0 {
            let mapping = mapping_of(&line).filter(|(at, _)| at.file.ino != 0 && major(at.file.dev) == 0);
            if let Some((at, is_shared)) = mapping {
                found.push((at.file, at.offset, at.offset.saturating_add(at.end - at.start)));
                match places {
                    Some(places) if is_shared => elsewhere.extend(places.elsewhere(&at)),
                    Some(_) => elsewhere.extend(found.last().copied()),
                    None => {}
                }
            }
            line.clear();
        }
        let [files, elsewhere] = [found, elsewhere].map(|parts| FileRanges::from_iter(parts).at_most(MOST_PARTS));
        Ok(Mapped { files, elsewhere })
    };
    Ok(passing_over(read())?.unwrap_or_default())
}

/// The place of a line of `/proc/PID/maps`, and whether the mapping is shared: `start-end perms offset major:minor
/// inode path`.
fn mapping_of(line: &[u8]) -> Option<(Place, bool)> {
    let mut fields = line.split(|byte| *byte == b' ').map_while(|field| str::from_utf8(field).ok());
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = fields.next()?.split_once('-')?;
    let (start, end) = (hex(start)?, hex(end)?);
    let is_shared = fields.next()?.ends_with('s');
    let offset = hex(fields.next()?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let dev = makedev(u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let file = FileId { dev, ino: fields.next()?.parse().ok()? };
    (start <= end).then_some((Place { start, end, file, offset }, is_shared))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::Bytes;
    use ballast_sys::{Mapping, memfd};

    #[test]
    fn a_file_is_found_mapped_until_its_mapping_ends() {
        let fd = memfd::create("ballast-test", Bytes(4096)).expect("memfd");
        let all = [(memfd::file_id(&fd).expect("stat"), 0, u64::MAX)].into_iter().collect();
        let maps = || mapped(std::process::id(), None).expect("read").files.overlap(&all);
        assert!(maps().is_none());
        let mapping = Mapping::shared(&fd, 0, 4096).expect("map");
        assert!(maps().is_some());
        drop(mapping);
        assert!(maps().is_none());
    }

    #[test]
    fn odd_lines_of_maps_are_skipped() {
        let text = |perms| format!("7f00-9f00 {perms} 1000 00:01 77 /memfd:x (deleted)\n");
        for (perms, is_shared) in [("rw-s", true), ("r--p", false)] {
            let (at, shared) = mapping_of(text(perms).as_bytes()).expect("a mapping");
            assert_eq!((at.start, at.end, at.file.ino, at.offset, shared), (0x7f00, 0x9f00, 77, 0x1000, is_shared));
        }
        for line in [
            "",
            "7f00-7f01",
            "7f01-7f00 rw-p 0 00:01 1",
            "7f00-7f01 rw-p q 00:01 1",
            "7f00-7f01 rw-p 0 zz:00 1",
            "7f00-7f01 rw-p 00000000 00:00 [heap]",
        ] {
            assert_eq!(mapping_of(line.as_bytes()), None, "{line}");
        }
    }
}
