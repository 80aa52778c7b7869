//! The files in memory that a process maps, and the files it has open, from `/proc`.
//!
//! Before: `mappers` chose a process. After: parts of files, by the device and inode that the kernel
//! says; of known files only if that is proven.
//! Threads: those of `mappers` that may hang: reading a map needs a lock of that process.
//! Promise: a process that has ended, or that we may not read, has nothing; every other failure is an error.

use std::collections::HashSet;
use std::io::{self, BufRead, BufReader};

use ballast_sys::file_ranges::FileRanges;
use ballast_sys::memfd::FileId;
use rustix::fs::major;

use crate::known::{Files, names};
use crate::places::{Place, Places};

/// The files among these that the process has open. The kernel tells a descriptor's inode number without asking the
/// file's own file system, which may not respond; only a file with a matching number is queried, in a way that does not
/// wait.
pub(crate) fn opened(pid: u32, files: &Files) -> io::Result<HashSet<FileId>> {
    let mut found = HashSet::new();
    let there = passing_over(std::fs::read_dir(format!("/proc/{pid}/fdinfo")))?;
    for descriptor in there.into_iter().flatten() {
        let Some(descriptor) = passing_over(descriptor)? else { continue };
        let info = match std::fs::read(descriptor.path()) {
            Ok(info) => String::from_utf8_lossy(&info).into_owned(),
            Err(error) if is_ours(&error) => return Err(error),
            // It is closed by now, or its driver does not say.
            Err(_) => continue,
        };
        let ino = info.lines().find_map(|line| line.strip_prefix("ino:")?.trim().parse().ok());
        let path = format!("/proc/{pid}/fd/{}", descriptor.file_name().to_string_lossy());
        for file in files.keys().filter(|file| ino.is_none_or(|ino: u64| ino == file.ino)) {
            let is_it = passing_over(names(files, *file, &path))?.unwrap_or(false);
            found.extend(is_it.then_some(*file));
        }
    }
    Ok(found)
}

/// Is it us who lacks something?
fn is_ours(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let ours = [Errno::MFILE, Errno::NFILE, Errno::NOMEM].map(|errno| Some(errno.raw_os_error()));
    ours.contains(&error.raw_os_error())
}

/// A process that has ended, or closed this meanwhile, or that we may not read, has nothing.
fn passing_over<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    use io::ErrorKind::{NotFound, PermissionDenied};
    match read {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), NotFound | PermissionDenied) => Ok(None),
        // It ended while it was read.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Most parts of one file that one process maps; beyond that, all between the first and the last counts as mapped.
const MOST_PARTS: usize = 1024;

/// What one process maps of files in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mapped {
    /// Which bytes.
    pub files: FileRanges,
    /// Those that it maps elsewhere than it has announced; nothing of a process that has announced nothing.
    pub elsewhere: FileRanges,
}

impl Mapped {
    /// Keep only the bytes of these files.
    pub(crate) fn retain(&mut self, keep: impl Fn(FileId) -> bool) {
        self.files.retain(&keep);
        self.elsewhere.retain(keep);
    }
}

/// What the process maps, if it has announced these places. RAM of a VM is a memfd, or a file in a tmpfs or a
/// hugetlbfs, none of which is on a device. (Some other files are not either; they do no harm here.) With `known`, only
/// what it maps of these files. Adds the bytes that were read.
pub(crate) fn mapped(pid: u32, places: Option<&Places>, known: Option<&Files>, bytes: &mut u64) -> io::Result<Mapped> {
    // The first proof of a file is enough: the rest may be others that have its numbers, which does no harm then.
    let mut proven = HashSet::new();
    let mut is_known = |at: &Place| {
        let Some(files) = known.filter(|_| !proven.contains(&at.file)) else { return true };
        let path = format!("/proc/{pid}/map_files/{:x}-{:x}", at.start, at.end);
        let is_it = files.contains_key(&at.file) && names(files, at.file, &path).unwrap_or(true);
        proven.extend(is_it.then_some(at.file));
        is_it
    };
    let mut read = || -> io::Result<Mapped> {
        let mut maps = BufReader::new(std::fs::File::open(format!("/proc/{pid}/maps"))?);
        let (mut found, mut elsewhere, mut line) = (Vec::new(), Vec::new(), Vec::new());
        // As bytes: a path may be anything.
        while maps.read_until(b'\n', &mut line)? > 0 {
            *bytes += line.len() as u64;
            let mapping = mapping_of(&line).filter(|(at, _)| at.file.ino != 0 && major(at.file.dev) == 0);
            let mapping = mapping.filter(|(at, _)| is_known(at));
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

/// The file of a line of `/proc/PID/maps`, where which bytes of it are mapped, and whether the mapping is shared:
/// `start-end perms offset major:minor inode path`.
fn mapping_of(line: &[u8]) -> Option<(Place, bool)> {
    let mut fields = line.split(|byte| *byte == b' ').map_while(|field| str::from_utf8(field).ok());
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = fields.next()?.split_once('-')?;
    let (start, end) = (hex(start)?, hex(end)?);
    let is_shared = fields.next()?.ends_with('s');
    let offset = hex(fields.next()?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let dev = rustix::fs::makedev(u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let file = FileId { dev, ino: fields.next()?.parse().ok()? };
    (start <= end).then_some((Place { start, end, file, offset }, is_shared))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Arc;

    use ballast_base::Bytes;
    use ballast_sys::{Mapping, memfd};

    use super::*;

    #[test]
    fn a_file_that_only_has_the_numbers_of_a_known_one_is_neither_open_nor_mapped() {
        let [one, impostor] = [(); 2].map(|()| File::from(memfd::create("ballast-test", Bytes(4096)).expect("memfd")));
        let [one, impostor] = [one, impostor].map(|file| (memfd::file_id(&file).expect("stat"), Arc::new(file)));
        let me = std::process::id();
        let _maps = [&one, &impostor].map(|(_, file)| Mapping::shared(file, 0, 4096).expect("map"));
        let found = |known: &Files| {
            let mapped = mapped(me, None, Some(known), &mut 0).expect("read");
            (opened(me, known).expect("read").len(), mapped.files.files().count())
        };
        assert_eq!(found(&Files::from([(one.0, Arc::downgrade(&one.1))])), (1, 1));
        // As if it had the numbers of the file.
        let forged = Files::from([(impostor.0, Arc::downgrade(&one.1))]);
        let at = _maps[1].addr();
        let link = format!("/proc/self/map_files/{at:x}-{:x}", at + 4096);
        let may_look = std::fs::metadata(link).is_ok();
        assert_eq!(found(&forged), (0, usize::from(!may_look)), "what cannot be told counts");
    }

    #[test]
    fn odd_lines_of_maps_are_passed_over() {
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
