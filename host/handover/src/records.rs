//! Region records: a region's description in the state file.
//!
//! Before: the keeper admitted a region. After: each engine opens the same extents of the same files for it.
//! Threads: any; a record is written once, before it is counted, and later only its end changes. Units: words of 64
//! bits; offsets are bytes from the start of the state file.
//! Promise: a record that does not fit its file is refused, and so is one of extents that no region can have. The list
//! of extents is stored twice, so that a memory error in one page costs no region.
//!
//! ```text
//! 0, 1  device and inode of the file   2  offset of the region in it   3  pages   (0 to 2: of the first extent)
//! 4     offset of its table
//! 5     its end: 0 lives, 1 unplugged, 2 given up
//! 6     offset of the list of extents, a multiple of 4096, plus their number; 0: there is one extent
//! 7     its guest-physical address plus 1; 0: unknown
//! list: per extent device, inode, offset, pages; padded to 4096, then all of it again
//! ```

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use ballast_base::extent::MAX_EXTENTS;
use ballast_base::{Bytes, Extent, Extents, Invalid, PAGE_SIZE, PageCount};
use ballast_sys::memfd::{self, FileId};

use crate::table::{flags_len, table_len};

pub(crate) const WORDS: usize = 8;
/// The word with the end of a region; 0 while it lives.
pub(crate) const END: usize = 5;
pub(crate) const UNPLUGGED: u64 = 1;
pub(crate) const GIVEN_UP: u64 = 2;
/// Words of an extent in a list.
const LISTED: usize = 4;
const _: () = assert!(MAX_EXTENTS < PAGE_SIZE, "the count fits beside the offset");

/// A region, as every engine sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionRecord {
    /// The RAM files, each once.
    pub files: Vec<FileId>,
    /// The parts of the files of which it consists.
    pub extents: Extents,
    /// Guest-physical address of its first byte, if known.
    pub guest_address: Option<u64>,
    /// The region was unplugged; its number is not used again.
    pub removed: bool,
    /// It counts as unplugged, because its process did not attach again; its far pages were dropped.
    pub given_up: bool,
    pub(crate) table_offset: u64,
}

impl RegionRecord {
    /// Length of the region.
    pub fn pages(&self) -> PageCount {
        self.extents.pages()
    }

    /// Offset of its words in the state file.
    pub fn words_at(&self) -> u64 {
        self.table_offset + flags_len(self.pages())
    }

    /// End of its words.
    pub(crate) fn table_end(&self) -> u64 {
        self.table_offset + table_len(self.pages())
    }

    /// Its extents: file, first byte, and the byte after the last one.
    pub fn places(&self) -> impl Iterator<Item = (FileId, u64, u64)> + use<'_> {
        let place = |extent: &Extent| (self.files[usize::from(extent.file)], extent.offset.0, extent.end());
        self.extents.list().iter().map(place)
    }

    /// This record, with the region's end from these words.
    pub(crate) fn at_end(&self, words: &[AtomicU64]) -> Self {
        let end = words[END].load(Ordering::Acquire);
        Self { removed: end != 0, given_up: end == GIVEN_UP, ..self.clone() }
    }
}

pub(crate) fn words(
    files: &[FileId],
    extents: &Extents,
    guest_address: Option<u64>,
    table_offset: u64,
    lists_offset: u64,
) -> [u64; WORDS] {
    let first = extents.list()[0];
    let FileId { dev, ino } = files[usize::from(first.file)];
    let count = extents.list().len() as u64;
    let lists = if count > 1 { lists_offset | count } else { 0 };
    let guest = guest_address.map_or(0, |address| address.saturating_add(1));
    [dev, ino, first.offset.0, extents.pages().0, table_offset, 0, lists, guest]
}

/// The bytes of the lists of extents; none for a single extent.
pub(crate) fn lists(files: &[FileId], extents: &Extents) -> Vec<u8> {
    let list = extents.list();
    if list.len() == 1 {
        return Vec::new();
    }
    let of = |extent: &Extent| {
        let FileId { dev, ino } = files[usize::from(extent.file)];
        [dev, ino, extent.offset.0, extent.len.pages_floor().0]
    };
    let mut bytes: Vec<u8> = list.iter().flat_map(of).flat_map(u64::to_le_bytes).collect();
    bytes.resize(list_len(list.len()), 0);
    bytes.repeat(2)
}

/// Writes the lists to the file.
pub(crate) fn write_lists(file: impl AsFd, mut offset: u64, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = rustix::io::pwrite(&file, bytes, offset)?;
        (offset, bytes) = (offset + written as u64, &bytes[written..]);
    }
    Ok(())
}

fn list_len(count: usize) -> usize {
    (count * LISTED * 8).next_multiple_of(PAGE_SIZE)
}

/// Decodes the record in these words of a file of this size.
pub(crate) fn read(words: &[AtomicU64], file: &OwnedFd, size: u64) -> Result<RegionRecord, Invalid> {
    let get = |word: usize| words[word].load(Ordering::Acquire);
    let (pages, table_offset) = (get(3), get(4));
    let fits = pages > 0
        && pages < 1 << 44
        && table_offset.is_multiple_of(PAGE_SIZE as u64)
        && table_offset.checked_add(table_len(PageCount(pages))).is_some_and(|end| end <= size);
    if !fits {
        return Err(format!("its {pages} pages do not fit the file").into());
    }
    let (files, extents) = if get(6) == 0 {
        let extents = Extents::one(Bytes(get(2)), PageCount(pages).bytes()).map_err(|error| error.to_string())?;
        (vec![FileId { dev: get(0), ino: get(1) }], extents)
    } else {
        read_extents(get(6), file, size)?
    };
    extents.check_len(PageCount(pages).bytes()).map_err(|error| error.to_string())?;
    let guest_address = get(7).checked_sub(1);
    let record = RegionRecord { files, extents, guest_address, removed: false, given_up: false, table_offset };
    Ok(record.at_end(words))
}

fn read_extents(place: u64, file: &OwnedFd, size: u64) -> Result<(Vec<FileId>, Extents), Invalid> {
    let page = PAGE_SIZE as u64;
    let (offset, count) = (place - place % page, (place % page) as usize);
    let copy = list_len(count) as u64;
    if count > MAX_EXTENTS || offset.checked_add(2 * copy).is_none_or(|end| end > size) {
        return Err(format!("its {count} extents do not fit the file").into());
    }
    let mut bytes = vec![0; count * LISTED * 8];
    let mut read = memfd::read_exact_at(file, offset, &mut bytes);
    if read.as_ref().is_err_and(memfd::is_memory_error) {
        read = memfd::read_exact_at(file, offset + copy, &mut bytes);
    }
    read.map_err(|error| format!("reading its extents: {error}"))?;
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
    let (mut files, mut list) = (Vec::new(), Vec::with_capacity(count));
    for words in bytes.chunks_exact(LISTED * 8) {
        let [dev, ino, offset, pages] = [0, 1, 2, 3].map(|at| word(&words[at * 8..][..8]));
        let id = FileId { dev, ino };
        let number = files.iter().position(|file| *file == id).unwrap_or_else(|| {
            files.push(id);
            files.len() - 1
        });
        let len = pages.checked_mul(page).ok_or("an extent is too long")?;
        list.push(Extent { file: number as u16, offset: Bytes(offset), len: Bytes(len) });
    }
    let extents = Extents::new(&list).map_err(|error| error.to_string())?;
    Ok((files, extents))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state_file::StateFile;
    use ballast_base::wire::VmId;
    use proptest::prelude::*;
    use std::os::unix::fs::FileExt;

    const FILES: [FileId; 2] = [FileId { dev: 1, ino: 2 }, FileId { dev: 1, ino: 3 }];

    fn three() -> Extents {
        let extent =
            |file, first, pages| Extent { file, offset: PageCount(first).bytes(), len: PageCount(pages).bytes() };
        Extents::new(&[extent(1, 700, 300), extent(0, 0, 5), extent(1, 100, 9)]).expect("good")
    }

    fn again(file: &StateFile) -> StateFile {
        StateFile::open(file.fd().try_clone_to_owned().expect("dup")).expect("open")
    }

    #[test]
    fn extents_and_guest_address_are_read_as_written_even_by_an_earlier_opener() {
        let file = StateFile::create(VmId([7; 16]), "x").expect("create");
        let reader = again(&file);
        let small = Extents::one(Bytes(4096), Bytes(8192)).expect("good");
        assert_eq!(file.add_region(&FILES, &small, Some(0)).expect("add"), 0);
        assert_eq!(file.add_region(&FILES, &three(), None).expect("add"), 1);
        assert_eq!(file.add_region(&FILES, &small, Some(4 << 30)).expect("add"), 2);
        for reader in [&file, &reader, &again(&file)] {
            let records = reader.regions();
            assert_eq!(
                records.iter().map(|record| record.guest_address).collect::<Vec<_>>(),
                [Some(0), None, Some(4 << 30)]
            );
            let places: Vec<_> = records[1].places().map(|(id, start, end)| (id.ino, start, end)).collect();
            let expected = three();
            let expected = expected.list().iter().map(|e| (FILES[usize::from(e.file)].ino, e.offset.0, e.end()));
            assert_eq!(places, expected.collect::<Vec<_>>());
            assert_eq!((records[0].extents.clone(), &records[0].files[..]), (small.clone(), &FILES[..1]));
            assert!(reader.written_words(&records[1]).expect("ask").is_empty(), "the list is not taken for words");
        }
        let wrong = Extents::new(&[Extent { file: 2, offset: Bytes(0), len: Bytes(4096) }]).expect("good");
        assert!(file.add_region(&FILES, &wrong, None).is_err(), "there is no third file");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_damaged_list_is_refused_or_is_of_some_region(
            damage in proptest::collection::vec((0u64..96, any::<u8>()), 1..20), place in any::<Option<u64>>(),
        ) {
            let file = StateFile::create(VmId([1; 16]), "x").expect("create");
            file.add_region(&FILES, &three(), None).expect("add");
            let raw = std::fs::File::from(file.fd().try_clone_to_owned().expect("dup"));
            let list = memfd::size(&raw).expect("stat").0 - 2 * PAGE_SIZE as u64;
            for (offset, byte) in damage {
                raw.write_all_at(&[byte], list + offset).expect("write");
            }
            if let Some(place) = place {
                raw.write_all_at(&place.to_le_bytes(), 1024 + 6 * 8).expect("write");
            }
            if let Ok(file) = StateFile::open(raw.into()) {
                for record in file.regions() {
                    prop_assert_eq!(record.pages(), PageCount(314));
                    record.places().for_each(drop);
                }
            }
        }
    }
}
