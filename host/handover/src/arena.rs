//! The head of an arena, which is the shared-memory file of a store: its layout, and how many slabs it has and uses.
//!
//! Before: the keeper makes an empty file for a new VM, or a client brings one back. After: an engine formats it
//! ([`format()`]) and maps it (`ballast-store`, which alone knows the contents of its slabs).
//! Threads: no other process has the file while it is formatted. Units: offsets are bytes from the start of the file.
//! Promise: a layout that this program cannot read is refused, unchanged. A file is an arena once it has its full size,
//! which is set last; a shorter file was never formatted and has no contents.
//!
//! ```text
//! 0            header page: magic, stamp (version and least reader), slabs, slab size, fresh, held, four words of the
//!              store's own; reserved; counters from byte 1024; members of a group from byte 2048
//! 4096         slab table: one entry of 16 words per slab (state word, 15 bitmap words)
//! slabs_start  slab 0, slab 1, ...   (the table rounded up to a whole slab)
//! ```

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ballast_base::format::{Format, Stamp};
use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_sys::memfd::{self, FileId};
use ballast_sys::memory_error::{Fill, Survival, Surviving};
use ballast_sys::{Mapping, presence};

/// The most slabs of an arena (256 GiB): a handle has 22 bits for the slab.
pub const MAX_SLABS: u32 = 1 << 22;

/// Words of a table entry.
pub const ENTRY_WORDS: usize = 16;
/// Bytes of a table entry.
pub const ENTRY_BYTES: usize = ENTRY_WORDS * 8;
/// Offset of the table.
pub const TABLE_START: usize = PAGE_SIZE;

/// Words of the header, by index.
pub const WORD_MAGIC: usize = 0;
/// A [`Stamp`].
pub const WORD_LAYOUT: usize = 1;
/// Number of slabs.
pub const WORD_SLABS: usize = 2;
/// Bytes of a slab.
pub const WORD_SLAB_BYTES: usize = 3;
/// Number of slabs ever used.
pub const WORD_FRESH: usize = 4;
/// Number of slabs in use.
pub const WORD_HELD: usize = 5;
/// First of the words that belong to the kind of store.
pub const OWN_WORDS_START: usize = 6;
/// Number of these words.
pub const OWN_WORDS: usize = 4;
/// Words before the counters.
pub const HEADER_WORDS: usize = SHARDS_START / 8;

/// Number of cache lines over which counters are spread, against contention.
pub const SHARDS: usize = 16;
/// Words in one shard: one cache line.
pub const SHARD_WORDS: usize = 8;
/// Offset of the counters.
pub const SHARDS_START: usize = 1024;
const _: () =
    assert!(SHARDS_START + SHARDS * SHARD_WORDS * 8 <= PAGE_SIZE && OWN_WORDS_START + OWN_WORDS <= HEADER_WORDS);

/// Offset of a group's members: a word each, 0 for none.
pub const MEMBERS_START: usize = 2048;
/// Most members of a group.
pub const MEMBERS: usize = 256;
const _: () =
    assert!(SHARDS_START + SHARDS * SHARD_WORDS * 8 <= MEMBERS_START && MEMBERS_START + MEMBERS * 8 == PAGE_SIZE);
/// Replaces a member's word if the list of members was lost with the header.
pub const UNKNOWN_MEMBER: u64 = u64::MAX;

/// One kind of arena.
#[derive(Debug)]
pub struct Layout {
    /// Name of the kind, for messages.
    pub name: &'static str,
    magic: u64,
    /// Versions of the header, the table, the classes, the blob headers, and the meaning of handles and checksums.
    pub format: Format,
    /// Bytes of a slab in the file.
    pub slab_bytes: usize,
}

/// The RAM store's arena: the slabs contain the blobs. The VM's id seeds the checksums.
pub static RAM: Layout = Layout {
    name: "RAM store arena",
    magic: u64::from_le_bytes(*b"BALSTORE"),
    format: Format { version: 1, least_reader: 1, oldest: 1 },
    slab_bytes: 64 * 1024,
};

/// A group's arena: as the RAM store's, but its checksums have no seed, and it has a list of members.
pub static GROUP: Layout = Layout {
    name: "group's arena",
    magic: u64::from_le_bytes(*b"BALGROUP"),
    format: Format { version: 1, least_reader: 1, oldest: 1 },
    slab_bytes: 64 * 1024,
};

/// The file store's index: each slab has 512 headers of 16 bytes, and describes an area of the file. The VM's id seeds
/// the checksums.
pub static INDEX: Layout = Layout {
    name: "file store index",
    magic: u64::from_le_bytes(*b"BALFILES"),
    format: Format { version: 1, least_reader: 1, oldest: 1 },
    slab_bytes: 512 * 16,
};

/// An own word of the index: the device of its file.
pub const WORD_FILE_DEV: usize = 0;
/// An own word of the index: the inode of its file.
pub const WORD_FILE_INO: usize = 1;
/// An own word of the index: the day, and the blocks written on it (`ballast-store`).
pub const WORD_TODAY: usize = 2;

/// The header of an arena.
#[derive(Debug)]
pub struct Head {
    /// Number of slabs.
    pub slabs: u32,
    /// The header was lost to a memory error, and was written again.
    pub was_lost: bool,
    /// The words before the counters.
    pub words: Vec<u64>,
}

impl Layout {
    /// Offset of the first of `slabs` slabs.
    pub fn slabs_start(&self, slabs: u32) -> usize {
        (TABLE_START + slabs as usize * ENTRY_BYTES).next_multiple_of(self.slab_bytes)
    }

    /// Bytes of the whole file.
    pub fn file_bytes(&self, slabs: u32) -> usize {
        self.slabs_start(slabs) + slabs as usize * self.slab_bytes
    }

    fn slabs_of(&self, file_bytes: u64) -> Option<u32> {
        let most = file_bytes / self.slab_bytes as u64;
        // The only other content is the table, rounded up to a whole slab.
        let near = most.checked_sub(2 + (most * ENTRY_BYTES as u64).div_ceil(self.slab_bytes as u64))?;
        (near..=most)
            .filter_map(|slabs| u32::try_from(slabs).ok())
            .find(|slabs| self.file_bytes(*slabs) as u64 == file_bytes)
    }

    /// Writes the header of a new arena.
    pub fn write_header(&self, slabs: u32, header: &[AtomicU64]) {
        header[WORD_SLABS].store(slabs.into(), Ordering::Relaxed);
        header[WORD_SLAB_BYTES].store(self.slab_bytes as u64, Ordering::Relaxed);
        header[WORD_LAYOUT].store(self.format.stamp().to_word(), Ordering::Relaxed);
        header[WORD_MAGIC].store(self.magic, Ordering::Release);
    }

    /// Returns the number of slabs of a file of `size` bytes.
    fn check_header(&self, words: &[u64], size: u64) -> io::Result<u32> {
        let invalid = |what| self.invalid(what);
        let expect = |word: usize, name: &str, expected: u64| {
            let found = words[word];
            if found == expected { Ok(()) } else { Err(invalid(format!("{name} is {found:#x}, not {expected:#x}"))) }
        };
        expect(WORD_MAGIC, "the magic number", self.magic)?;
        let stamp = Stamp::from_word(words[WORD_LAYOUT]);
        self.format.check(stamp).map_err(|unreadable| invalid(unreadable.to_string()))?;
        expect(WORD_SLAB_BYTES, "the slab size", self.slab_bytes as u64)?;
        let stated = words[WORD_SLABS];
        let slabs = u32::try_from(stated)
            .ok()
            .filter(|slabs| (1..=MAX_SLABS).contains(slabs))
            .ok_or_else(|| invalid(format!("it states {stated} slabs, 1 to {MAX_SLABS} are possible")))?;
        let needed = self.file_bytes(slabs);
        if size != needed as u64 {
            return Err(invalid(format!("the file has {size} bytes, {slabs} slabs need {needed}")));
        }
        Ok(slabs)
    }

    fn slabs_of_lost(&self, size: u64) -> io::Result<u32> {
        self.slabs_of(size).ok_or_else(|| self.invalid(format!("its header is lost, and none has {size} bytes")))
    }

    fn invalid(&self, what: String) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, format!("Opening a {}: {what}", self.name))
    }
}

/// Makes the file of an arena, which an engine will format.
pub fn create() -> io::Result<OwnedFd> {
    memfd::create("ballast-store", Bytes(0))
}

/// Whether this file was never formatted, or only in part.
pub fn is_new(fd: impl AsFd) -> io::Result<bool> {
    Ok(matches!(memfd::size(fd)?.0, 0 | HEADER_BYTES))
}

const HEADER_BYTES: u64 = PAGE_SIZE as u64;

/// Formats a new file as an arena of `slabs` slabs.
pub fn format(layout: &Layout, fd: impl AsFd, slabs: u32) -> io::Result<()> {
    if slabs == 0 || slabs > MAX_SLABS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("Creating a {}: {slabs} slabs asked for, 1 to {MAX_SLABS} are possible", layout.name),
        ));
    }
    let words = [const { AtomicU64::new(0) }; HEADER_WORDS];
    layout.write_header(slabs, &words);
    let bytes: Vec<u8> = words.into_iter().flat_map(|word| word.into_inner().to_le_bytes()).collect();
    rustix::fs::ftruncate(&fd, HEADER_BYTES)?;
    if rustix::io::pwrite(&fd, &bytes, 0)? != bytes.len() {
        return Err(io::Error::other(format!("Creating a {}: its header was not written whole", layout.name)));
    }
    // The full size is set last: it proves that everything before it is done.
    Ok(rustix::fs::ftruncate(&fd, layout.file_bytes(slabs) as u64)?)
}

/// Whether `magic`, the first word, belongs to a header that was lost and not yet completely written again. A lost
/// header reads as zeros, and the magic number is written last.
fn is_lost(magic: u64, fd: impl AsFd) -> io::Result<bool> {
    Ok(magic == 0 && memfd::next_data(fd, TABLE_START as u64)?.is_some())
}

/// The number of slabs up to the last allocated page of the table; at most `slabs`.
pub fn touched_slabs(fd: impl AsFd, slabs: u32) -> io::Result<u32> {
    let table_end = (TABLE_START + slabs as usize * ENTRY_BYTES) as u64;
    let (mut at, mut touched_end) = (TABLE_START as u64, TABLE_START as u64);
    while let Some((start, end)) = memfd::next_data(&fd, at)? {
        if start >= table_end {
            break;
        }
        touched_end = table_end.min(end);
        at = touched_end;
    }
    Ok(((touched_end as usize - TABLE_START) / ENTRY_BYTES) as u32)
}

/// Checks the head of an existing arena. A lost head is written again; in a group's arena the list of members then has
/// [`UNKNOWN_MEMBER`].
///
/// # Errors
/// The file is no arena of this kind, has a layout that this program cannot read, or has the wrong size.
pub fn read(layout: &Layout, fd: &Arc<OwnedFd>) -> io::Result<Head> {
    let size = memfd::size(&**fd)?.0;
    if size < PAGE_SIZE as u64 {
        return Err(layout.invalid(format!("the file has {size} bytes, less than a header")));
    }
    let fills = vec![(PAGE_SIZE, Fill::Zeros)];
    let survival = Survival { file: fd.clone(), offset: 0, fills, journal: None };
    let header_map = Surviving::new(Mapping::shared(&**fd, 0, PAGE_SIZE)?, survival);
    let header = header_map.words(0, HEADER_WORDS);
    let magic = header[WORD_MAGIC].load(Ordering::Acquire);
    let was_lost = header_map.lost() > 0 || is_lost(magic, &**fd)?;
    if was_lost {
        // The rest of the header follows from the size of the file.
        let slabs = layout.slabs_of_lost(size)?;
        header[WORD_FRESH].store(touched_slabs(&**fd, slabs)?.into(), Ordering::Relaxed);
        if layout.magic == GROUP.magic {
            header_map.words(MEMBERS_START, 1)[0].store(UNKNOWN_MEMBER, Ordering::Relaxed);
        }
        layout.write_header(slabs, header);
    }
    let words: Vec<u64> = header.iter().map(|word| word.load(Ordering::Acquire)).collect();
    let slabs = layout.check_header(&words, size)?;
    Ok(Head { slabs, was_lost, words })
}

/// The words of the header; `None` if it was lost. Changes nothing.
fn look(layout: &Layout, fd: impl AsFd) -> io::Result<Option<Vec<u64>>> {
    let size = memfd::size(&fd)?.0;
    let mut bytes = [0; HEADER_WORDS * 8];
    let failed = match rustix::io::pread(&fd, &mut bytes, 0) {
        Ok(len) if len < bytes.len() => return Err(layout.invalid("the file is shorter than a header".into())),
        Err(error) if error != rustix::io::Errno::IO => return Err(error.into()),
        read => read.is_err(),
    };
    let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    if failed || is_lost(words[WORD_MAGIC], &fd)? {
        return layout.slabs_of_lost(size).map(|_| None);
    }
    layout.check_header(&words, size)?;
    Ok(Some(words))
}

/// Checks whether [`read`] could open this arena. A file that was never formatted passes. Changes nothing, because
/// other processes may use the arena, and the engine that opens it must learn of a lost header.
pub fn inspect(layout: &Layout, fd: impl AsFd) -> io::Result<()> {
    if is_new(&fd)? { Ok(()) } else { look(layout, fd).map(drop) }
}

/// The name of a member in a group's arena (`presence`): never 0, and no byte in common with [`ENGINES`].
pub fn member(vm: VmId) -> u64 {
    let [low, ..] = vm.0.as_chunks().0 else { return 4 };
    u64::from_le_bytes(*low).max(4)
}

/// The name of the engines that have a group's arena open.
pub const ENGINES: u64 = 0;

/// Announces on this open file of a group's arena that the process has the words of this VM.
pub fn announce(group: impl AsFd, vm: VmId) -> io::Result<()> {
    presence::announce(group, member(vm))
}

/// Device and inode of the file that an index describes: a caller can compare a descriptor with them before any other
/// call on that descriptor.
pub fn file_of(index: impl AsFd) -> io::Result<FileId> {
    let words = look(&INDEX, index)?.ok_or_else(|| INDEX.invalid("its header is lost".into()))?;
    let own = |word: usize| words[OWN_WORDS_START + word];
    Ok(FileId { dev: own(WORD_FILE_DEV), ino: own(WORD_FILE_INO) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_an_arena_once_it_has_its_full_size_and_new_before() {
        let fd = create().expect("memfd");
        let is_new_and_good = |fd: &OwnedFd| {
            inspect(&RAM, fd).expect("an engine of ours can lay it out");
            is_new(fd).expect("stat")
        };
        assert!(is_new_and_good(&fd));
        format(&RAM, &fd, 4).expect("formatted");
        assert!(!is_new_and_good(&fd));
        // As if its engine had died before the last step.
        rustix::fs::ftruncate(&fd, HEADER_BYTES).expect("truncate");
        assert!(is_new_and_good(&fd));
        format(&RAM, &fd, 5).expect("formatted");
        let head = read(&RAM, &Arc::new(fd)).expect("an arena");
        assert_eq!((head.slabs, head.was_lost), (5, false));
    }

    #[test]
    fn a_file_of_another_kind_is_neither_new_nor_an_arena() {
        for size in [1, 100, 4097, 1 << 20] {
            let fd = memfd::create("ballast-test", Bytes(size)).expect("memfd");
            inspect(&RAM, &fd).expect_err("it is none");
            read(&RAM, &Arc::new(fd)).expect_err("it is none");
        }
        let fd = create().expect("memfd");
        format(&INDEX, &fd, 1).expect("formatted");
        assert!(inspect(&RAM, &fd).expect_err("an index").to_string().contains("magic"));
        inspect(&INDEX, &fd).expect("an index");
        assert!(read(&RAM, &Arc::new(fd)).expect_err("an index").to_string().contains("magic"));
    }

    #[test]
    fn a_lost_header_stays_lost_when_inspected_and_is_written_again_by_the_first_read() {
        let fd = Arc::new(create().expect("memfd"));
        format(&GROUP, &fd, 100).expect("formatted");
        // An entry in the second page of the table.
        rustix::io::pwrite(&fd, &[1], 2 * 4096).expect("written");
        memfd::punch(&fd, 0, 4096).expect("punched");
        inspect(&GROUP, &fd).expect("an engine can open it");
        assert!(memfd::is_hole(&fd, 0, 4096).expect("a look"), "a look changes nothing");
        // As if a process had died while it wrote the header.
        rustix::io::pwrite(&fd, &[100], 8 * WORD_SLABS as u64).expect("written");
        let head = read(&GROUP, &fd).expect("an arena");
        assert_eq!((head.slabs, head.was_lost, head.words[WORD_FRESH]), (100, true, 64));
        let mut word = [0; 8];
        rustix::io::pread(&fd, &mut word, MEMBERS_START as u64).expect("read");
        assert_eq!(u64::from_le_bytes(word), UNKNOWN_MEMBER);
        inspect(&GROUP, &fd).expect("sound");
        assert!(!read(&GROUP, &fd).expect("an arena").was_lost);
    }
}
