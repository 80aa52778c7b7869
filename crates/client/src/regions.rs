//! The table of announced guest RAM: what may be zapped, and which addresses a file range has.
//!
//! Before: the VMM names a region. After: `service` asks it before every zap, `preload` asks it at every discard.
//! Threads: any, behind the one lock in `Shared`; the lock is held across a zap, so memory that was taken off the table
//! is never zapped afterwards.
//! Promise: a range is allowed only if it lies whole inside one announced region and was not unmapped since.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use ballast_base::wire::{Range, RegionInfo, check_regions};
use ballast_base::{Bytes, Hva, PAGE_SIZE};
use ballast_sys::memfd::{self, FileId};

/// One announced region.
#[derive(Debug)]
pub(crate) struct Region {
    pub info: RegionInfo,
    pub fd: OwnedFd,
    pub file: FileId,
    /// Bytes of the pages it is made of.
    page: u64,
    /// Parts that were unmapped or mapped over since, as `(start, end)` addresses.
    holes: Vec<(u64, u64)>,
}

impl Region {
    /// Take a region given by the VMM, after checking that the address range really is a shared mapping of that file.
    pub fn checked(fd: OwnedFd, info: RegionInfo) -> Result<Self, String> {
        check_regions(&[info])?;
        let wrong = |what: &str| format!("RAM at {} of {}: {what}", info.hva, info.len);
        let io = |what: &str, error: io::Error| wrong(&format!("{what}: {error}"));
        let file = memfd::file_id(&fd).map_err(|e| io("looking at its file", e))?;
        let page = memfd::check_ram_pages(&fd, info.hva.0, info.file_offset.0, info.len.0).map_err(|e| wrong(&e))?;
        if memfd::size(&fd).map_err(|e| io("looking at its file", e))?.0 < info.file_offset.0 + info.len.0 {
            return Err(wrong("its file ends before the mapping does"));
        }
        let maps = std::fs::read_to_string("/proc/self/maps").map_err(|e| io("reading /proc/self/maps", e))?;
        if !is_shared_mapping(&maps, &info, file.ino) {
            return Err(wrong("these addresses are not one shared (MAP_SHARED) mapping of that file and offset"));
        }
        Ok(Self { info, fd, file, page: page.0, holes: Vec::new() })
    }

    /// Is its RAM of huge pages?
    pub fn is_huge(&self) -> bool {
        self.page > PAGE_SIZE as u64
    }

    fn span(&self) -> (u64, u64) {
        (self.info.hva.0, self.info.hva.0 + self.info.len.0)
    }
}

/// Does `maps` (the text of `/proc/self/maps`) show the whole region as shared mappings of that inode, in file order?
fn is_shared_mapping(maps: &str, info: &RegionInfo, inode: u64) -> bool {
    let mut next = info.hva.0;
    let end = info.hva.0 + info.len.0;
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let parsed = (|| {
            let (from, to) = fields.next()?.split_once('-')?;
            let shared = fields.next()?.ends_with('s');
            let offset = fields.next()?;
            let inode = fields.nth(1)?;
            Some((hex(from)?, hex(to)?, shared, hex(offset)?, inode.parse::<u64>().ok()?))
        })();
        let Some((from, to, shared, offset, ino)) = parsed else { continue };
        if to <= next || from > next {
            continue;
        }
        let right_place = offset + (next - from) == info.file_offset.0 + (next - info.hva.0);
        if !shared || ino != inode || !right_place {
            return false;
        }
        next = to;
        if next >= end {
            return true;
        }
    }
    false
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

/// Every announced region.
#[derive(Debug, Default)]
pub(crate) struct Table {
    regions: Vec<Region>,
}

impl Table {
    pub fn iter(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter()
    }

    pub fn push(&mut self, region: Region) {
        self.regions.push(region);
    }

    /// Put it there, if there is one.
    pub fn extend(&mut self, region: Option<Region>) {
        self.regions.extend(region);
    }

    /// The regions in a form the keeper gets.
    pub fn infos(&self) -> Vec<RegionInfo> {
        self.regions.iter().map(|region| region.info).collect()
    }

    /// Take a region off the table; `false` if none starts there.
    pub fn remove(&mut self, hva: Hva) -> bool {
        self.take(hva).is_some()
    }

    /// The same; returns the region.
    pub fn take(&mut self, hva: Hva) -> Option<Region> {
        let at = self.regions.iter().position(|region| region.info.hva == hva)?;
        Some(self.regions.remove(at))
    }

    /// May this range be discarded: whole pages of one region, still mapped?
    pub fn allows(&self, (hva, len): Range) -> bool {
        let Some(end) = hva.0.checked_add(len) else { return false };
        len > 0
            && self.regions.iter().any(|region| {
                let (from, to) = region.span();
                let whole = hva.0.is_multiple_of(region.page) && len.is_multiple_of(region.page);
                whole && from <= hva.0 && end <= to && !region.holes.iter().any(|&(h0, h1)| h0 < end && hva.0 < h1)
            })
    }

    /// The parts of this range that may be zapped, and the others. A range that is not whole pages may not be at all.
    pub fn split(&self, range: Range) -> (Vec<Range>, Vec<Range>) {
        let (hva, len) = range;
        let whole = |page: u64| hva.0.is_multiple_of(page) && len.is_multiple_of(page);
        let Some(end) = hva.0.checked_add(len).filter(|_| len > 0 && whole(PAGE_SIZE as u64)) else {
            return (Vec::new(), vec![range]);
        };
        let mut parts = self.overlap(hva, len);
        parts.retain(|(start, len)| {
            let region = self.regions.iter().find(|region| (region.span().0..region.span().1).contains(&start.0));
            region.is_some_and(|region| start.0.is_multiple_of(region.page) && len.is_multiple_of(region.page))
        });
        parts.sort_unstable();
        let (mut holes, mut next) = (Vec::new(), hva.0);
        for (start, len) in &parts {
            holes.extend((next < start.0).then(|| (Hva(next), start.0 - next)));
            next = start.0 + len;
        }
        holes.extend((next < end).then(|| (Hva(next), end - next)));
        (parts, holes)
    }

    /// The parts of `[hva, hva + len)` that are announced RAM, hole-free.
    pub fn overlap(&self, hva: Hva, len: u64) -> Vec<Range> {
        let end = hva.0.saturating_add(len);
        let mut parts = Vec::new();
        for region in &self.regions {
            let (from, to) = region.span();
            let mut start = from.max(hva.0);
            let stop = to.min(end);
            for &(h0, h1) in &region.holes {
                if start < h0.min(stop) {
                    parts.push((Hva(start), h0.min(stop) - start));
                }
                start = start.max(h1);
            }
            if start < stop {
                parts.push((Hva(start), stop - start));
            }
        }
        parts
    }

    /// Where the bytes `[offset, offset + len)` of a file are mapped.
    pub fn of_file(&self, file: FileId, offset: u64, len: u64) -> Vec<Range> {
        let end = offset.saturating_add(len);
        let mut parts = Vec::new();
        for region in self.regions.iter().filter(|region| region.file == file) {
            let base = region.info.file_offset.0;
            let start = offset.max(base);
            let stop = end.min(base + region.info.len.0);
            if start < stop {
                parts.extend(self.overlap(region.info.hva + (start - base), stop - start));
            }
        }
        parts
    }

    /// These addresses are about to be unmapped or mapped over. Returns which regions they cover whole (the keeper must
    /// be told), and which parts of others, which from now on are holes that are never zapped again.
    pub fn unmapping(&mut self, hva: Hva, len: u64) -> (Vec<Hva>, Vec<Range>) {
        let end = hva.0.saturating_add(len);
        let parts = self.overlap(hva, len);
        let mut whole = Vec::new();
        for region in &mut self.regions {
            let (from, to) = region.span();
            if hva.0 <= from && to <= end {
                whole.push(region.info.hva);
            } else if from < end && hva.0 < to {
                region.holes.push((hva.0.max(from), end.min(to)));
                merge(&mut region.holes);
            }
        }
        let in_part = |(start, _): &Range| {
            self.regions.iter().any(|region| {
                let (from, to) = region.span();
                (from..to).contains(&start.0) && !whole.contains(&region.info.hva)
            })
        };
        let parts = parts.into_iter().filter(in_part).collect();
        (whole, parts)
    }

    /// Memory that the RAM files use now.
    pub fn resident(&self) -> Bytes {
        let mut files: Vec<&Region> = self.regions.iter().collect();
        files.sort_unstable_by_key(|region| (region.file.dev, region.file.ino));
        files.dedup_by_key(|region| region.file);
        let pages = files.iter().map(|region| memfd::resident(&region.fd).map_or(0, |pages| pages.bytes().0));
        Bytes(pages.sum())
    }

    /// Bytes announced.
    pub fn total(&self) -> Bytes {
        Bytes(self.regions.iter().map(|region| region.info.len.0).sum())
    }
}

/// Sort and join what touches, so that the list stays as short as the address space is simple.
fn merge(holes: &mut Vec<(u64, u64)>) {
    holes.sort_unstable();
    holes.dedup_by(|next, kept| {
        let joins = next.0 <= kept.1;
        if joins {
            kept.1 = kept.1.max(next.1);
        }
        joins
    });
}

/// A second descriptor of the same open file, close-on-exec.
pub(crate) fn duplicate(fd: impl AsFd) -> io::Result<OwnedFd> {
    fd.as_fd().try_clone_to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_sys::Mapping;

    const LEN: u64 = 16 * PAGE_SIZE as u64;

    fn one_region() -> (Mapping, Table) {
        let fd = memfd::create("ballast-test", Bytes(LEN)).expect("memfd");
        let map = Mapping::shared(&fd, 0, LEN as usize).expect("map");
        let info = RegionInfo { hva: Hva(map.addr() as u64), len: Bytes(LEN), file_offset: Bytes(0) };
        let mut table = Table::default();
        table.push(Region::checked(fd, info).expect("a good region"));
        (map, table)
    }

    #[test]
    fn only_page_aligned_ranges_inside_one_region_are_allowed() {
        let (map, table) = one_region();
        let base = map.addr() as u64;
        assert!(table.allows((Hva(base), LEN)) && table.allows((Hva(base + 4096), 4096)));
        let outside = [
            (base - 4096, 4096),
            (base, LEN + 4096),
            (base + LEN, 4096),
            (base + 1, 4096),
            (base, 100),
            (base, 0),
            (base, u64::MAX),
        ];
        for (hva, len) in outside {
            assert!(!table.allows((Hva(hva), len)), "{hva:#x}+{len:#x} was allowed");
        }
    }

    #[test]
    fn a_part_that_was_unmapped_is_never_allowed_again() {
        let (map, mut table) = one_region();
        let base = map.addr() as u64;
        assert_eq!(table.unmapping(Hva(base + 4096), 4096), (vec![], vec![(Hva(base + 4096), 4096)]));
        assert_eq!(table.unmapping(Hva(base + 4096), 8192), (vec![], vec![(Hva(base + 8192), 4096)]));
        assert!(!table.allows((Hva(base), LEN)) && !table.allows((Hva(base + 8192), 4096)));
        assert!(table.allows((Hva(base), 4096)) && table.allows((Hva(base + 12288), 4096)));
        let parts = table.overlap(Hva(base), LEN);
        assert_eq!(parts, [(Hva(base), 4096), (Hva(base + 12288), LEN - 12288)]);
        let (may, not) = table.split((Hva(base - 4096), LEN + 8192));
        assert_eq!(may, [(Hva(base), 4096), (Hva(base + 12288), LEN - 12288)]);
        assert_eq!(not, [(Hva(base - 4096), 4096), (Hva(base + 4096), 8192), (Hva(base + LEN), 4096)]);
        for odd in [(base + 1, 4096), (base, 100), (u64::MAX - 4095, 8192)] {
            let odd = (Hva(odd.0), odd.1);
            assert_eq!(table.split(odd), (vec![], vec![odd]));
        }
        assert_eq!(table.unmapping(Hva(base - 4096), LEN + 8192), (vec![Hva(base)], vec![]));
    }

    #[test]
    fn a_file_range_is_found_where_it_is_mapped() {
        let (map, table) = one_region();
        let region = table.iter().next().expect("one");
        assert_eq!(table.of_file(region.file, 8192, 4096), [(Hva(map.addr() as u64 + 8192), 4096)]);
        assert_eq!(table.of_file(region.file, LEN, 4096), []);
        let other = FileId { ino: region.file.ino + 1, ..region.file };
        assert_eq!(table.of_file(other, 0, LEN), []);
    }

    #[test]
    fn addresses_that_are_not_a_shared_mapping_of_the_file_are_refused() {
        let fd = memfd::create("ballast-test", Bytes(LEN)).expect("memfd");
        let other = memfd::create("ballast-other", Bytes(LEN)).expect("memfd");
        let map = Mapping::shared(&other, 0, LEN as usize).expect("map");
        let info = RegionInfo { hva: Hva(map.addr() as u64), len: Bytes(LEN), file_offset: Bytes(0) };
        let copy = |fd: &OwnedFd| duplicate(fd).expect("dup");
        assert!(Region::checked(copy(&fd), info).expect_err("another file").contains("MAP_SHARED"));
        let shifted = RegionInfo { hva: info.hva + 4096, len: Bytes(LEN - 4096), ..info };
        assert!(Region::checked(copy(&other), shifted).expect_err("another offset").contains("MAP_SHARED"));
        assert!(Region::checked(copy(&other), RegionInfo { file_offset: Bytes(4096), ..info }).is_err());
        let plain = tempfile::tempfile_in(".").expect("a file on disk");
        plain.set_len(LEN).expect("grow");
        if !memfd::is_shmem(&plain).expect("statfs") {
            assert!(Region::checked(plain.into(), info).expect_err("disk file").contains("not shared memory"));
        }
        Region::checked(other, info).expect("the real one");
    }
}
