//! The table of announced guest RAM: which memory may be zapped, and the addresses of a file range.
//!
//! Before: the VMM names a region. After: `service` checks each zap against it, `preload` each discard.
//! Threads: any, behind the lock in `Shared`, which is held across a zap, so that memory is never zapped after it was
//! taken off the table.
//! Promise: a range is allowed only if it lies completely inside one announced region and was not unmapped since. Only
//! a region that a keeper has confirmed is zapped.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};

use ballast_base::wire::{self, MAX_REGIONS, Range, RegionInfo};
use ballast_base::{Bytes, Hva, Invalid, PAGE_SIZE};
use ballast_sys::memfd::{self, FileId};

use crate::ram::{Checked, Ram};
use crate::zapped::{MOST, Record};

#[derive(Debug)]
pub(crate) struct Region {
    pub ram: Checked,
    /// Parts that were unmapped or mapped over since, as `(start, end)` addresses.
    holes: Vec<(u64, u64)>,
    /// A keeper has confirmed the region. Before that, no page of it was zapped, so none is far.
    confirmed: bool,
    /// The VMM was told that the region is not managed, and may use it as it likes.
    failed: bool,
    /// The units of the region that were zapped. Without the record, an engine must know about each discard.
    record: Option<Record>,
}

impl Region {
    /// Check the RAM that the VMM has given, and make it a region.
    pub fn checked(ram: Ram) -> Result<Self, Invalid> {
        Ok(Self { ram: Checked::new(ram)?, holes: Vec::new(), confirmed: false, failed: false, record: None })
    }

    pub fn is_huge(&self) -> bool {
        self.ram.page > PAGE_SIZE as u64
    }

    pub fn hva(&self) -> Hva {
        self.ram.span.hva
    }

    fn span(&self) -> (u64, u64) {
        (self.ram.span.hva.0, self.ram.span.hva.0 + self.ram.span.len.0)
    }

    /// The description of this region alone for the keeper, and its files.
    pub fn describe(&self) -> (RegionInfo, Vec<BorrowedFd<'_>>) {
        let number = |id| self.ram.files.iter().position(|(_, other)| *other == id).unwrap_or(0) as u16;
        (self.ram.info(number), self.ram.files.iter().map(|(fd, _)| fd.as_fd()).collect())
    }
}

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

    /// Whether an attach message may contain this region beside the others.
    pub fn check_with(&mut self, region: &mut Option<Region>) -> Result<(), Invalid> {
        self.regions.extend(region.take());
        let (infos, files) = self.describe(true);
        let checked = match infos.len() {
            ..=MAX_REGIONS => wire::check_regions(&infos, u8::try_from(files.len()).unwrap_or(u8::MAX)),
            _ => Err(format!("a VM may have at most {MAX_REGIONS} RAM regions").into()),
        };
        *region = self.regions.pop();
        checked
    }

    pub fn extend(&mut self, region: Option<Region>) {
        self.regions.extend(region);
    }

    pub fn confirm(&mut self, hva: Hva) {
        self.regions.iter_mut().filter(|region| region.hva() == hva).for_each(|region| region.confirmed = true);
    }

    /// Notes that a keeper has confirmed all regions. `for_the_first_time`: no keeper had before; `is_first`: this
    /// process is the first of its VM at the keeper.
    pub fn attached(&mut self, for_the_first_time: bool, is_first: bool) {
        for region in &mut self.regions {
            region.confirmed = true;
            if !is_first {
                region.record = None;
            } else if for_the_first_time && !region.is_huge() && !region.ram.is_on_demand {
                region.record = Some(Record::new(region.ram.span.len));
            }
        }
    }

    /// Records that the parts of these ranges that may be zapped will be zapped now.
    pub fn note_zapped(&mut self, ranges: &[Range]) {
        for region in &mut self.regions {
            let (from, to) = region.span();
            let Some(record) = &mut region.record else { continue };
            for (hva, len) in ranges {
                let (start, end) = (hva.0.max(from), hva.0.saturating_add(*len).min(to));
                if start < end {
                    record.note((start - from, end - from));
                }
            }
        }
    }

    /// Notes that an engine has restored this range, and has no copy of it.
    pub fn settled(&mut self, (hva, len): Range) {
        for region in &mut self.regions {
            let (from, to) = region.span();
            let Some(record) = &mut region.record else { continue };
            let (start, end) = (hva.0.max(from), hva.0.saturating_add(len).min(to));
            if start < end {
                record.forget((start - from, end - from));
            }
        }
    }

    /// Whether all of this may be discarded, no part of it was ever zapped, and it is at most [`MOST`].
    pub fn is_never_zapped(&self, ranges: &[Range]) -> bool {
        let is_small = ranges.iter().fold(0u64, |sum, (_, len)| sum.saturating_add(*len)) <= MOST;
        is_small
            && ranges.iter().all(|range| {
                let of = |region: &&Region| (region.span().0..region.span().1).contains(&range.0.0);
                let region = self.regions.iter().find(of).filter(|region| !region.failed && self.allows(*range));
                region.is_some_and(|region| {
                    let from = range.0.0 - region.span().0;
                    region.record.as_ref().is_some_and(|record| !record.has_any((from, from + range.1)))
                })
            })
    }

    /// Notes that the VMM was told that this region is not managed: it is never zapped from now on.
    pub fn fail(&mut self, hva: Hva) {
        self.regions.iter_mut().filter(|region| region.hva() == hva).for_each(|region| region.failed = true);
    }

    /// Whether a keeper has confirmed some of the regions, but not all.
    pub fn is_confirmed_in_part(&self) -> bool {
        let first = self.regions.first().map(|region| region.confirmed);
        self.regions.iter().any(|region| Some(region.confirmed) != first)
    }

    pub fn take_unconfirmed(&mut self) -> Vec<Region> {
        self.regions.extract_if(.., |region| !region.confirmed).collect()
    }

    /// The regions as the keeper gets them, and their files, each once. With `all`, unconfirmed regions are included.
    pub fn describe(&self, all: bool) -> (Vec<RegionInfo>, Vec<BorrowedFd<'_>>) {
        let mut numbers: HashMap<FileId, u16> = HashMap::new();
        let mut files = Vec::new();
        let regions = || self.regions.iter().filter(|region| all || region.confirmed);
        for (fd, id) in regions().flat_map(|region| &region.ram.files) {
            numbers.entry(*id).or_insert_with(|| {
                files.push(fd.as_fd());
                files.len() as u16 - 1
            });
        }
        (regions().map(|region| region.ram.info(|id| numbers[&id])).collect(), files)
    }

    /// Takes a region off the table; false if none starts at this address.
    pub fn remove(&mut self, hva: Hva) -> bool {
        self.take(hva).is_some()
    }

    pub fn take(&mut self, hva: Hva) -> Option<Region> {
        let at = self.regions.iter().position(|region| region.hva() == hva)?;
        Some(self.regions.remove(at))
    }

    /// Whether this range may be discarded: whole pages of one region, still mapped.
    pub fn allows(&self, (hva, len): Range) -> bool {
        let Some(end) = hva.0.checked_add(len) else { return false };
        len > 0
            && self.regions.iter().any(|region| {
                let (from, to) = region.span();
                let whole = hva.0.is_multiple_of(region.ram.page) && len.is_multiple_of(region.ram.page);
                whole && from <= hva.0 && end <= to && !region.holes.iter().any(|&(h0, h1)| h0 < end && hva.0 < h1)
            })
    }

    /// The parts of this range that may be zapped, and the others. Of a range that is not whole pages, none may be.
    pub fn split(&self, range: Range) -> (Vec<Range>, Vec<Range>) {
        let (hva, len) = range;
        let whole = |page: u64| hva.0.is_multiple_of(page) && len.is_multiple_of(page);
        let Some(end) = hva.0.checked_add(len).filter(|_| len > 0 && whole(PAGE_SIZE as u64)) else {
            return (Vec::new(), vec![range]);
        };
        let mut parts = self.overlap(hva, len);
        parts.retain(|(start, len)| {
            let region = self.regions.iter().find(|region| (region.span().0..region.span().1).contains(&start.0));
            let whole = |page: u64| start.0.is_multiple_of(page) && len.is_multiple_of(page);
            region.is_some_and(|region| region.confirmed && !region.failed && whole(region.ram.page))
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

    /// The parts of `[hva, hva + len)` that are announced RAM, without holes.
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

    /// The addresses at which the bytes `[offset, offset + len)` of a file are mapped.
    pub fn of_file(&self, file: FileId, offset: u64, len: u64) -> Vec<Range> {
        let mut parts = Vec::new();
        for region in &self.regions {
            let Some(number) = region.ram.files.iter().position(|(_, id)| *id == file) else { continue };
            for (at, len) in region.ram.extents.bytes_at(number as u16, offset, len) {
                parts.extend(self.overlap(region.hva() + at, len));
            }
        }
        parts
    }

    /// Notes that these addresses will be unmapped or mapped over. Returns the regions that they cover completely,
    /// which the keeper must be told, and parts of other regions, which become holes and are never zapped again. If the
    /// call may fail and leave the mapping, completely covered regions are returned as parts, too.
    pub fn unmapping(&mut self, hva: Hva, len: u64, may_fail: bool) -> (Vec<Hva>, Vec<Range>) {
        if len == 0 {
            return (Vec::new(), Vec::new());
        }
        let end = hva.0.saturating_add(len);
        let parts = self.overlap(hva, len);
        let mut whole = Vec::new();
        for region in &mut self.regions {
            let (from, to) = region.span();
            let is_whole = hva.0 <= from && to <= end;
            if is_whole {
                whole.push(region.hva());
            }
            if (may_fail || !is_whole) && from < end && hva.0 < to {
                region.holes.push((hva.0.max(from), end.min(to)));
                merge(&mut region.holes);
            }
        }
        let in_part = |(start, _): &Range| {
            self.regions.iter().any(|region| {
                let (from, to) = region.span();
                (from..to).contains(&start.0) && (may_fail || !whole.contains(&region.hva()))
            })
        };
        let parts = parts.into_iter().filter(in_part).collect();
        (whole, parts)
    }

    pub fn resident(&self) -> Bytes {
        let mut seen = HashSet::new();
        let files = self.regions.iter().flat_map(|region| &region.ram.files).filter(|(_, id)| seen.insert(*id));
        Bytes(files.map(|(fd, _)| memfd::resident(fd).map_or(0, |pages| pages.bytes().0)).sum())
    }

    pub fn total(&self) -> Bytes {
        Bytes(self.regions.iter().map(|region| region.ram.span.len.0).sum())
    }
}

/// Sorts the holes and joins neighbours, to keep the list short.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ram::RamExtent;
    use ballast_sys::Mapping;
    use std::os::fd::OwnedFd;

    const LEN: u64 = 16 * PAGE_SIZE as u64;

    fn one_region() -> (Mapping, Table) {
        let fd = memfd::create("ballast-test", Bytes(LEN)).expect("memfd");
        let map = Mapping::shared(&fd, 0, LEN as usize).expect("map");
        let mut table = Table::default();
        let ram = Ram::one(fd, Hva(map.addr() as u64), Bytes(LEN), Bytes(0));
        table.push(Region::checked(ram).expect("a good region"));
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
        assert_eq!(table.unmapping(Hva(base + 4096), 4096, false), (vec![], vec![(Hva(base + 4096), 4096)]));
        assert_eq!(table.unmapping(Hva(base + 4096), 8192, false), (vec![], vec![(Hva(base + 8192), 4096)]));
        assert!(!table.allows((Hva(base), LEN)) && !table.allows((Hva(base + 8192), 4096)));
        assert!(table.allows((Hva(base), 4096)) && table.allows((Hva(base + 12288), 4096)));
        assert_eq!(table.unmapping(Hva(base + 32768), 0, false), (vec![], vec![]));
        assert!(table.allows((Hva(base + 28672), 8192)), "nothing was unmapped");
        let parts = table.overlap(Hva(base), LEN);
        assert_eq!(parts, [(Hva(base), 4096), (Hva(base + 12288), LEN - 12288)]);
        let all = (Hva(base), LEN);
        assert_eq!(table.split(all), (vec![], vec![all]), "no keeper knows of it");
        table.confirm(Hva(base));
        let (may, not) = table.split((Hva(base - 4096), LEN + 8192));
        assert_eq!(may, [(Hva(base), 4096), (Hva(base + 12288), LEN - 12288)]);
        assert_eq!(not, [(Hva(base - 4096), 4096), (Hva(base + 4096), 8192), (Hva(base + LEN), 4096)]);
        for odd in [(base + 1, 4096), (base, 100), (u64::MAX - 4095, 8192)] {
            let odd = (Hva(odd.0), odd.1);
            assert_eq!(table.split(odd), (vec![], vec![odd]));
        }
        assert_eq!(table.unmapping(Hva(base - 4096), LEN + 8192, false), (vec![Hva(base)], vec![]));
    }

    #[test]
    fn a_region_that_a_call_may_leave_mapped_is_not_zapped_while_its_pages_return() {
        let (map, mut table) = one_region();
        let all = (Hva(map.addr() as u64), LEN);
        assert_eq!(table.unmapping(all.0, LEN, true), (vec![all.0], vec![all]));
        assert!(!table.allows((all.0, 4096)) && table.overlap(all.0, LEN).is_empty());
        assert!(table.remove(all.0), "the keeper is told of it");
    }

    #[test]
    fn a_file_range_is_found_where_it_is_mapped() {
        let (map, table) = one_region();
        let file = table.iter().next().expect("one").ram.files[0].1;
        assert_eq!(table.of_file(file, 8192, 4096), [(Hva(map.addr() as u64 + 8192), 4096)]);
        assert_eq!(table.of_file(file, LEN, 4096), []);
        let other = FileId { ino: file.ino + 1, ..file };
        assert_eq!(table.of_file(other, 0, LEN), []);
    }

    #[test]
    fn addresses_that_are_not_a_shared_mapping_of_the_file_are_refused() {
        let fd = memfd::create("ballast-test", Bytes(LEN)).expect("memfd");
        let other = memfd::create("ballast-other", Bytes(LEN)).expect("memfd");
        let map = Mapping::shared(&other, 0, LEN as usize).expect("map");
        let copy = |fd: &OwnedFd| fd.try_clone().expect("dup");
        let one = |fd, skip: u64, offset| {
            let hva = Hva(map.addr() as u64 + skip);
            Region::checked(Ram::one(fd, hva, Bytes(LEN - skip), Bytes(offset)))
        };
        assert!(one(copy(&fd), 0, 0).expect_err("another file").to_string().contains("MAP_SHARED"));
        assert!(one(copy(&other), 4096, 0).expect_err("another offset").to_string().contains("MAP_SHARED"));
        assert!(
            one(copy(&other), 0, 4096).expect_err("beyond the end").to_string().contains("which has 65536 bytes only")
        );
        let plain = tempfile::tempfile_in(".").expect("a file on disk");
        plain.set_len(LEN).expect("grow");
        if !memfd::is_shmem(&plain).expect("statfs") {
            assert!(one(plain.into(), 0, 0).expect_err("disk file").to_string().contains("not shared memory"));
        }
        one(other, 0, 0).expect("the real one");
    }

    #[test]
    fn ram_in_pieces_is_found_by_address_and_by_file_and_described_with_each_file_once() {
        let page = PAGE_SIZE as u64;
        let files = [0, 1].map(|_| memfd::create("ballast-test", Bytes(LEN)).expect("memfd"));
        let list = [(0, 8 * page, 2 * page), (1, page, 3 * page), (0, 0, page)];
        let pieces = list.map(|(file, offset, len): (usize, u64, u64)| (&files[file], offset, len as usize));
        let map = Mapping::shared_pieces(&pieces).expect("map");
        let hva = Hva(map.addr() as u64);
        let ram = |list: &[(usize, u64, u64)]| {
            let extent = |(file, offset, len): &(usize, u64, u64)| {
                let fd = files[*file].try_clone().expect("dup");
                RamExtent { fd, offset: Bytes(*offset), len: Bytes(*len) }
            };
            Ram { hva, extents: list.iter().map(extent).collect(), guest_address: Some(page) }
        };
        let mut table = Table::default();
        table.push(Region::checked(ram(&list)).expect("a good region"));
        let (infos, fds) = table.describe(true);
        assert_eq!((fds.len(), infos[0].guest_address, infos[0].extents.len()), (2, Some(page), 3));
        ballast_base::wire::check_regions(&infos, 2).expect("the keeper takes it");
        let ids = files.each_ref().map(|file| memfd::file_id(file).expect("stat"));
        assert_eq!(table.of_file(ids[0], 0, LEN), [(hva, 2 * page), (hva + 5 * page, page)]);
        assert_eq!(table.of_file(ids[1], 2 * page + 7, page), [(hva + 3 * page + 7, page)]);
        assert!(table.allows((hva + page, 2 * page)), "across a border");

        let swapped = [list[1], list[0], list[2]];
        assert!(Region::checked(ram(&swapped)).expect_err("another order").to_string().contains("MAP_SHARED"));
        let twice = [list[0], (0, 9 * page, page), list[2]];
        let refused = Region::checked(ram(&twice)).expect_err("twice").to_string();
        assert!(refused.contains("overlap at offset 0x9000 of file 0"), "{refused}");
    }
}
