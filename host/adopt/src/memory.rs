//! Where an adopted VM's memory is: counted by scans of its page tables, and by the kernel's counters in between.
//!
//! Before: the mappings that are guest RAM. After: sums of bytes. Threads: any; one at a time counts.
//! Units: bytes. Promise: `size = resident + far + zero + untouched`, always. Scans take 1/1000 of a CPU at most.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use ballast_base::{Hva, MIB, PAGE_SIZE, PageCount};
use ballast_sys::clock::cpu_time;
use ballast_sys::page_tables::{Entry, PageTables};
use rustix::fs::{SeekFrom, seek};

use crate::maps::{self, Ram};

/// A scan that took one second is followed by the next after this many seconds.
const RARELY: u32 = 1000;
/// Pages by which the kernel's counters of a process vary at rest.
const FEW: u64 = 64;
/// Least number of pages by which a process's mappings grow or shrink when a DIMM is plugged in or taken out.
const DIMM_PAGES: u64 = 64 * MIB / PAGE_SIZE as u64;
/// Least time between two scans.
const AT_LEAST: Duration = Duration::from_millis(500);

/// Sums of guest memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// All guest RAM.
    pub size: u64,
    /// In memory.
    pub resident: u64,
    /// In swap.
    pub far: u64,
    /// Mapped as the kernel's page of zeros. Kernels before 6.7 report it as resident memory.
    pub zero: u64,
    /// Never touched, or discarded.
    pub untouched: u64,
    /// When its pages were counted. The kernel's counters show changes since then.
    pub scanned: SystemTime,
}

/// Counts one VM's memory.
#[derive(Debug)]
pub struct Counter {
    statm: File,
    last: Option<Scan>,
    /// Pages of all mappings of the process when its RAM was last searched for.
    mapped_pages: Option<u64>,
}

#[derive(Debug)]
struct Scan {
    memory: Memory,
    /// The process's resident pages at the scan, by [`Counter::process_pages`].
    process_pages: u64,
    next: Instant,
}

impl Counter {
    /// A counter for this process.
    pub fn new(pid: u32) -> io::Result<Self> {
        Ok(Self { statm: File::open(format!("/proc/{pid}/statm"))?, last: None, mapped_pages: None })
    }

    /// Whether the process has mapped or unmapped as much as a DIMM since the last call that returned true.
    pub fn is_mapped_anew(&mut self) -> io::Result<bool> {
        let [now, ..] = self.statm()?;
        let before = *self.mapped_pages.get_or_insert(now);
        let is_new = before.abs_diff(now) >= DIMM_PAGES;
        if is_new {
            self.mapped_pages = Some(now);
        }
        Ok(is_new)
    }

    /// Forgets the last count, because the RAM has moved: the next call counts all pages.
    pub fn forget(&mut self) {
        self.last = None;
    }

    /// The VM's memory now. Pages are counted if that is due and the kernel's counters changed since the last count.
    pub fn memory(&mut self, tables: &PageTables, pid: u32, ram: &[Ram]) -> io::Result<Memory> {
        let now = self.process_pages(ram)?;
        match &self.last {
            Some(scan) if scan.process_pages.abs_diff(now) < FEW || scan.next > Instant::now() => {
                Ok(changed(scan.memory, scan.process_pages, now))
            }
            _ => self.scan(tables, pid, ram),
        }
    }

    /// The VM's memory now, from the counters alone. If there was no count yet, pages are counted.
    pub fn quick(&mut self, tables: &PageTables, pid: u32, ram: &[Ram]) -> io::Result<Memory> {
        let now = self.process_pages(ram)?;
        match &self.last {
            Some(scan) => Ok(changed(scan.memory, scan.process_pages, now)),
            None => self.scan(tables, pid, ram),
        }
    }

    /// Counts all pages now.
    pub fn scan(&mut self, tables: &PageTables, pid: u32, ram: &[Ram]) -> io::Result<Memory> {
        let (begun, cpu) = (Instant::now(), cpu_time());
        let process_pages = self.process_pages(ram)?;
        let [mut resident, mut far, mut zero, mut size] = [0; 4];
        for part in ram {
            size += part.len;
            let mut sums = [0; 3];
            tables.runs(part.start, part.len, |run| sums[run.entry as usize] += run.end.0 - run.start.0)?;
            let [present, zeros, swapped] = sums;
            zero += zeros;
            let held = part.shared.then(|| held_by_file(pid, part)).flatten();
            match held {
                Some((held, in_swap)) => (resident, far) = (resident + held.saturating_sub(in_swap), far + in_swap),
                None => (resident, far) = (resident + present, far + swapped),
            }
        }
        // Pages may have moved during the count.
        resident = resident.min(size);
        far = far.min(size - resident);
        zero = zero.min(size - resident - far);
        let untouched = size - resident - far - zero;
        let memory = Memory { size, resident, far, zero, untouched, scanned: SystemTime::now() };
        let pause = (cpu_time().saturating_sub(cpu) * RARELY).max(AT_LEAST);
        self.last = Some(Scan { memory, process_pages, next: begun + pause });
        Ok(memory)
    }

    /// Resident pages of the process, in the kinds of memory of which its guest RAM consists.
    fn process_pages(&self, ram: &[Ram]) -> io::Result<u64> {
        let [_, all, shared] = self.statm()?;
        Ok(match (ram.iter().any(|part| part.shared), ram.iter().any(|part| !part.shared)) {
            (true, true) => all,
            (true, false) => shared,
            _ => all.saturating_sub(shared),
        })
    }

    /// Pages of the process: in mappings, resident, and resident in files.
    fn statm(&self) -> io::Result<[u64; 3]> {
        let mut text = [0; 128];
        let len = self.statm.read_at(&mut text, 0)?;
        let text = std::str::from_utf8(&text[..len]).unwrap_or_default();
        let mut words = text.split_ascii_whitespace().map_while(|word| word.parse().ok());
        let mut next = || words.next().ok_or(io::Error::from(io::ErrorKind::NotFound));
        Ok([next()?, next()?, next()?])
    }
}

/// The memory after the process's resident pages changed. Pages that went are far; new ones come from far first,
/// because a VM above its limit has few other pages that could come.
fn changed(memory: Memory, before: u64, now: u64) -> Memory {
    let Memory { size, resident, far, zero, untouched, .. } = memory;
    let bytes = |pages| PageCount(pages).bytes().0;
    if now <= before {
        let gone = bytes(before - now).min(resident);
        return Memory { resident: resident - gone, far: far + gone, ..memory };
    }
    let new = bytes(now - before).min(size - resident);
    let from_far = new.min(far);
    let from_untouched = (new - from_far).min(untouched);
    let from_zero = new - from_far - from_untouched;
    Memory {
        resident: resident + new,
        far: far - from_far,
        untouched: untouched - from_untouched,
        zero: zero - from_zero,
        ..memory
    }
}

/// Bytes that the file of a shared mapping holds in its range, and those of them in swap; `None` if unknown.
fn held_by_file(pid: u32, part: &Ram) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let file = std::fs::metadata(path(pid, part).ok()?).ok()?;
    let smaps = std::fs::read(format!("/proc/{pid}/smaps")).ok()?;
    let swapped = maps::swapped(&String::from_utf8_lossy(&smaps), part.start)?;
    let held = if file.len() == part.len {
        (file.blocks() * 512).min(part.len)
    } else {
        data(pid, part).ok()?.iter().map(|(_, len)| len).sum()
    };
    Some((held, swapped))
}

/// The runs of a shared mapping (address and length) for which its file holds data, in memory or in swap.
pub fn data(pid: u32, part: &Ram) -> io::Result<Vec<(Hva, u64)>> {
    let (file, first) = (File::open(path(pid, part)?)?, part.offset());
    let (mut found, mut at) = (Vec::new(), first);
    while let Ok(start) = seek(&file, SeekFrom::Data(at)) {
        let end = seek(&file, SeekFrom::Hole(start))?.min(first + part.len);
        if start >= end {
            break;
        }
        found.push((Hva(part.start.0 + (start - first)), end - start));
        at = end;
    }
    Ok(found)
}

/// The path of a mapping's file. The kernel has one for each of the mappings that count as one here.
fn path(pid: u32, part: &Ram) -> io::Result<PathBuf> {
    for entry in std::fs::read_dir(format!("/proc/{pid}/map_files"))? {
        let entry = entry?;
        let bounds = entry.file_name().to_str().and_then(maps::bounds);
        if bounds.is_some_and(|(start, end)| (start..end).contains(&part.start.0)) {
            return Ok(entry.path());
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

/// Runs of pages in memory within a range of pages. Pages are numbered through all of the RAM.
pub fn present(tables: &PageTables, ram: &[Ram], pages: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut found: Vec<Range<u64>> = Vec::new();
    for (first, start, len) in pieces(ram, pages) {
        tables.runs(start, len, |run| {
            let page = |at: Hva| first + (at.0 - start.0) / PAGE_SIZE as u64;
            if run.entry == Entry::Present {
                found.push(page(run.start)..page(run.end));
            }
        })?;
    }
    Ok(found)
}

/// The addresses of a range of pages: first page, address and length of each piece.
pub fn pieces(ram: &[Ram], pages: Range<u64>) -> Vec<(u64, Hva, u64)> {
    let mut first = 0;
    let mut found = Vec::new();
    for part in ram {
        let count = part.len / PAGE_SIZE as u64;
        let (start, end) = (pages.start.max(first), pages.end.min(first + count));
        if start < end {
            let at = Hva(part.start.0 + (start - first) * PAGE_SIZE as u64);
            found.push((start, at, (end - start) * PAGE_SIZE as u64));
        }
        first += count;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adds_up(memory: Memory) -> bool {
        memory.size == memory.resident + memory.far + memory.zero + memory.untouched
    }

    #[test]
    fn between_two_scans_the_sums_add_up_whatever_the_counters_say() {
        let page = PAGE_SIZE as u64;
        let memory = Memory {
            size: 100 * page,
            resident: 50 * page,
            far: 20 * page,
            zero: 10 * page,
            untouched: 20 * page,
            scanned: SystemTime::UNIX_EPOCH,
        };
        for (now, resident, far, untouched) in
            [(50, 50, 20, 20), (40, 40, 30, 20), (0, 0, 70, 20), (60, 60, 10, 20), (75, 75, 0, 15), (1000, 100, 0, 0)]
        {
            let seen = changed(memory, 50, now);
            assert!(adds_up(seen), "{seen:?}");
            let pages = [seen.resident, seen.far, seen.untouched].map(|bytes| bytes / page);
            assert_eq!(pages, [resident, far, untouched], "at {now}");
        }
        assert!(adds_up(changed(memory, 1000, 0)) && adds_up(changed(memory, 0, u64::MAX >> 20)));
    }

    #[test]
    fn pages_are_counted_through_all_pieces_of_ram() {
        let part = |start, pages| Ram { start: Hva(start), len: pages * PAGE_SIZE as u64, ..Ram::default() };
        let ram = [part(0x10_0000, 4), part(0x90_0000, 2)];
        assert_eq!(pieces(&ram, 1..5), [(1, Hva(0x10_1000), 3 << 12), (4, Hva(0x90_0000), 1 << 12)]);
        assert_eq!(pieces(&ram, 6..9), []);
    }
}
