//! Guest RAM among the mappings of a VMM.
//!
//! Before: the text of `/proc/PID/smaps`. After: the mappings that are guest RAM, and what makes them stay in memory.
//! Threads: any; pure functions. Units: bytes; addresses are the VMM's.
//! Promise: the mappings add up to the size that the command line states, or there is an error.

use ballast_base::{Bytes, Hva, MIB};

/// The smallest mapping that is taken for guest RAM if no size is known. Heaps and stacks of the known VMMs are
/// smaller.
const SMALLEST: u64 = 16 * MIB;

/// Size of the blocks of plugged-in DIMMs: Linux guests use no others.
const DIMM: u64 = 128 * MIB;
/// The mapping without rights that QEMU puts after guest RAM.
const GUARD: u64 = 4096;

/// A mapping, or several adjacent ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ram {
    /// Address of its first byte.
    pub start: Hva,
    /// Its length in bytes.
    pub len: u64,
    /// Whether it is shared memory: other processes may map it.
    pub shared: bool,
    /// Bytes of it that are shared memory in swap, which page tables do not show.
    pub swapped: u64,
    /// Why its pages stay in memory, if they do.
    pub pinned: Option<&'static str>,
    pub(crate) executable: bool,
    pub(crate) writable: bool,
    /// Whether it has no rights at all.
    pub(crate) bars_all: bool,
    /// Whether QEMU's guard follows it.
    pub(crate) guarded: bool,
    /// The inode of its file, and the offset in the file at which it ends; 0 for private memory.
    pub(crate) file: (u64, u64),
}

impl Ram {
    /// The address after its last byte.
    pub fn end(&self) -> Hva {
        Hva(self.start.0 + self.len)
    }

    /// Where it begins in its file.
    pub(crate) fn offset(&self) -> u64 {
        self.file.1.saturating_sub(self.len)
    }

    /// Its last `len` bytes. The kernel joins guest RAM with private memory that the VMM has mapped just below it;
    /// above it QEMU keeps a page without rights.
    fn last(&self, len: u64) -> Self {
        Self { start: Hva(self.end().0 - len), len, ..self.clone() }
    }
}

/// A process has no guest RAM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRam {
    /// No choice of mappings has this size.
    #[error("its command line says {0} of RAM, and none of its mappings have that size")]
    Size(Bytes),
    /// There are only small mappings.
    #[error("it has no mapping that could be guest RAM")]
    Nothing,
}

/// The guest RAM of a VMM, ascending. `wanted`: its size, if that is known.
pub fn ram(smaps: &str, wanted: Option<u64>) -> Result<Vec<Ram>, NoRam> {
    let mut found: Vec<Ram> = mappings(smaps).into_iter().filter(|ram| ram.writable && !ram.executable).collect();
    if let Some(wanted) = wanted {
        let large = found.iter().filter(|ram| ram.len >= wanted && (ram.len == wanted || !ram.shared));
        if let Some(ram) = large.min_by_key(|ram| ram.len) {
            return Ok(vec![ram.last(wanted)]);
        }
        // The largest first: guest RAM is in few mappings, and is most of a VMM's memory.
        found.sort_by_key(|ram| std::cmp::Reverse(ram.len));
        let mut left = wanted;
        found.retain(|ram| {
            let fits = ram.len <= left && ram.len >= MIB.min(wanted);
            left -= if fits { ram.len } else { 0 };
            fits
        });
        if left > 0 {
            return Err(NoRam::Size(Bytes(wanted)));
        }
        found.sort_by_key(|ram| ram.start);
    } else {
        found.retain(|ram| ram.len >= SMALLEST);
    }
    if found.is_empty() { Err(NoRam::Nothing) } else { Ok(found) }
}

/// DIMMs that were plugged into QEMU, which the command line does not name: at most `most` bytes, and none that overlap
/// `ram`.
pub fn plugged(smaps: &str, ram: &[Ram], most: u64) -> Vec<Ram> {
    let is_ram = |dimm: &Ram| ram.iter().any(|ram| ram.start < dimm.end() && dimm.start < ram.end());
    let mut left = most;
    let dimms = mappings(smaps).into_iter().filter(|dimm| dimm.writable && !dimm.executable && dimm.guarded);
    let whole = dimms.map(|dimm| dimm.last(dimm.len / DIMM * DIMM)).filter(|dimm| !is_ram(dimm));
    let fits = |dimm: &Ram| {
        let fits = dimm.len > 0 && dimm.len <= left;
        left -= if fits { dimm.len } else { 0 };
        fits
    };
    whole.filter(fits).collect()
}

/// Bytes in swap of the shared mapping that starts at this address.
pub fn swapped(smaps: &str, start: Hva) -> Option<u64> {
    mappings(smaps).iter().find(|ram| ram.start == start).map(|ram| ram.swapped)
}

/// All mappings; adjacent ones of one kind of memory count as one.
fn mappings(smaps: &str) -> Vec<Ram> {
    let mut found: Vec<Ram> = Vec::new();
    for line in smaps.lines() {
        if let Some(next) = head(line) {
            found.push(next);
            continue;
        }
        let Some(ram) = found.last_mut() else { continue };
        let number = |text: &str| text.split_ascii_whitespace().next()?.parse::<u64>().ok();
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let has = |flag: &str| flags.split_ascii_whitespace().any(|word| word == flag);
            let reasons = [("ht", "it is in huge pages of hugetlbfs"), ("lo", "it is locked in memory")];
            ram.pinned = reasons.iter().find(|(flag, _)| has(flag)).map(|(_, reason)| *reason);
        } else if let Some(swap) = line.strip_prefix("Swap:").and_then(number) {
            ram.swapped = if ram.shared { swap * 1024 } else { 0 };
        }
    }
    let mut joined: Vec<Ram> = Vec::new();
    for next in found {
        if let Some(last) = joined.last_mut().filter(|last| last.end() == next.start) {
            last.guarded |= next.len == GUARD && next.bars_all;
        }
        match joined.last_mut() {
            Some(last) if last.continues_in(&next) => {
                last.len += next.len;
                last.swapped += next.swapped;
                last.pinned = last.pinned.or(next.pinned);
                last.file.1 = next.file.1;
            }
            _ => joined.push(next),
        }
    }
    joined
}

impl Ram {
    fn continues_in(&self, next: &Self) -> bool {
        let kind = |ram: &Self| (ram.shared, ram.writable, ram.executable, ram.file.0);
        let follows_in_file = self.file.0 == 0 || next.file.1.checked_sub(next.len) == Some(self.file.1);
        self.end() == next.start && kind(self) == kind(next) && follows_in_file
    }
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

/// The addresses in `START-END`.
pub(crate) fn bounds(text: &str) -> Option<(u64, u64)> {
    let (start, end) = text.split_once('-')?;
    Some((hex(start)?, hex(end)?))
}

/// The first line of a mapping: `START-END rw-p OFFSET DEVICE INODE NAME`.
fn head(line: &str) -> Option<Ram> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = bounds(words.next()?)?;
    let rights = words.next()?.as_bytes();
    let (offset, _device, inode) = (hex(words.next()?)?, words.next()?, words.next()?.parse::<u64>().ok()?);
    let name = words.next().unwrap_or_default();
    let len = end.checked_sub(start)?;
    let has = |at: usize, right| rights.get(at) == Some(&right);
    // A heap or a stack is no guest RAM. Nor is a file on a disk, whose pages go to that file.
    let is_memory = !["[heap]", "[stack]"].contains(&name)
        && (inode == 0 || name.starts_with("/memfd:") || name.starts_with("/dev/shm/") || name.contains("hugepages"));
    Some(Ram {
        start: Hva(start),
        len,
        shared: has(3, b's'),
        writable: has(1, b'w') && is_memory,
        executable: has(2, b'x'),
        bars_all: rights.starts_with(b"---"),
        file: (inode, if inode == 0 { 0 } else { offset.checked_add(len)? }),
        ..Ram::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const QEMU: &str = "\
5500000000-5500010000 r-xp 00000000 fd:00 77 /usr/bin/qemu-system-x86_64
5500100000-5508100000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0040000000 rwxp 00000000 00:00 0
VmFlags: rd wr ex
7f1000000000-7f1020000000 rw-p 00000000 00:00 0
Swap:               12 kB
VmFlags: rd wr mr mw me ac
7f1020000000-7f1040000000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me ac dd
7f1040000000-7f1040001000 ---p 00000000 00:00 0
7f2000000000-7f2000800000 rw-p 00000000 00:00 0
";

    #[test]
    fn the_mappings_of_the_size_that_the_command_line_says_are_ram() {
        let found = ram(QEMU, Some(1 << 30)).expect("1 GiB");
        assert_eq!(found.len(), 1, "two that follow each other are one, and code is none: {found:?}");
        assert_eq!((found[0].start, found[0].len), (Hva(0x7f10_0000_0000), 1 << 30));
        assert_eq!((found[0].swapped, found[0].pinned, found[0].shared), (0, None, false));
        assert_eq!(ram(QEMU, Some(3 << 30)), Err(NoRam::Size(Bytes(3 << 30))));
        assert_eq!(ram("", None), Err(NoRam::Nothing));
        let unknown = ram(QEMU, None).expect("one is large enough");
        assert_eq!(unknown, found);
    }

    #[test]
    fn ram_that_the_kernel_joined_with_private_memory_below_it_is_the_end_of_that_mapping() {
        let smaps = "\
7f0ff8000000-7f1010000000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me ac
7f1010000000-7f1010001000 ---p 00000000 00:00 0
7f2000000000-7f2004000000 rw-p 00000000 00:00 0
";
        let found = ram(smaps, Some(256 << 20)).expect("256 MiB");
        assert_eq!(
            found.iter().map(|ram| (ram.start, ram.len)).collect::<Vec<_>>(),
            [(Hva(0x7f10_0000_0000), 256 << 20)]
        );
    }

    #[test]
    fn ram_in_several_pieces_adds_up_and_says_why_it_stays() {
        let smaps = "\
7f0000000000-7f0010000000 rw-s 00000000 00:01 9 /memfd:ch_ram (deleted)
Swap:               2048 kB
VmFlags: rd wr sh mr mw me ms lo
7f0010000000-7f0020000000 rw-s 20000000 00:01 9 /memfd:ch_ram (deleted)
VmFlags: rd wr sh
7f3000000000-7f3010000000 rw-p 00000000 00:0f 5 /dev/hugepages/x (deleted)
VmFlags: rd wr ht
";
        let found = ram(smaps, Some(3 * (256 << 20))).expect("three pieces");
        let seen: Vec<_> = found.iter().map(|ram| (ram.swapped, ram.pinned.is_some(), ram.shared)).collect();
        assert_eq!(seen, [(2 << 20, true, true), (0, false, true), (0, true, false)], "{found:?}");
        assert!(found[2].pinned.is_some_and(|why| why.contains("hugetlbfs")));
    }

    #[test]
    fn dimms_are_whole_blocks_before_a_guard_and_nothing_else() {
        let smaps = "\
7f0000000000-7f0010000000 rw-p 00000000 00:00 0
7f0010000000-7f0010001000 ---p 00000000 00:00 0
7f0ff7f00000-7f1000000000 rw-p 00000000 00:00 0
7f1000000000-7f1000001000 ---p 00000000 00:00 0
7f2000000000-7f2010000000 rw-s 00000000 00:01 9 /memfd:dimm (deleted)
7f2010000000-7f2010001000 ---p 00000000 00:00 0
7f3000000000-7f3008000000 rw-p 00000000 00:00 0
7f3008000000-7f3010000000 ---p 00000000 00:00 0
7f4000000000-7f4001000000 rw-p 00000000 00:00 0
7f4001000000-7f4001001000 ---p 00000000 00:00 0
";
        let boot = ram(smaps, Some(256 << 20)).expect("256 MiB");
        assert_eq!(boot[0].start, Hva(0x7f00_0000_0000));
        let seen = |most: u64| {
            let found = plugged(smaps, &boot, most << 20);
            found.iter().map(|dimm| (dimm.start.0, dimm.len >> 20)).collect::<Vec<_>>()
        };
        assert_eq!(seen(384), [(0x7f0f_f800_0000, 128), (0x7f20_0000_0000, 256)]);
        assert_eq!((seen(128), seen(0)), (vec![(0x7f0f_f800_0000, 128)], Vec::new()));
    }

    #[test]
    fn lines_of_any_form_are_no_mappings() {
        for line in ["", "-", "zz-10 rw-p 0 0 0", "20-10 rw-p 0 00:00 0", "10-20", "10-20 rw-p 0 00:00", "\u{e9}"] {
            assert_eq!(head(line), None, "{line:?}");
        }
    }
}
