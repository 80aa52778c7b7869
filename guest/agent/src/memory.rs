//! The ranges of RAM, and the content of each page.
//!
//! Before: /proc/iomem and /proc/kpageflags. After: ranges of pages, and a class for each page.
//! Units: pages, by guest-physical address; a flag word each.
//! Promise: memory that must not be read or is locked has no class. Memory that the kernel uses for itself is
//! [`Kind::Other`]: nothing here shows whether it is accessed. Page tables, and memory that the kernel took at boot
//! except for its code and data, must not be reported ([`is_in_use`]).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use ballast_messages::Kind;

use crate::files;

/// Returns the ranges of RAM that the kernel manages, ascending: first page, and the page after the last one.
pub fn ram() -> io::Result<Vec<(u64, u64)>> {
    Ok(system_ram(&files::read("/proc/iomem")?))
}

pub fn image() -> io::Result<Vec<(u64, u64)>> {
    Ok(kernel_image(&files::read("/proc/iomem")?))
}

/// Returns the first byte, the last byte and the name in a line of /proc/iomem.
fn bytes(line: &str) -> Option<(u64, u64, &str)> {
    let (place, what) = line.split_once(" : ")?;
    let (first, last) = place.split_once('-')?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    Some((number(first)?, number(last)?, what))
}

fn system_ram(iomem: &str) -> Vec<(u64, u64)> {
    let range = |line: &str| {
        // The line of a memory device is indented: `System RAM (virtio_mem)`. Parts of RAM have other names. Addresses
        // are zero for a process without the permission.
        let (first, last, _) = bytes(line.trim_start()).filter(|(_, _, what)| what.starts_with("System RAM"))?;
        let (page, end) = (first.div_ceil(4096), (last + 1) / 4096);
        (page < end).then_some((page, end))
    };
    iomem.lines().filter_map(range).collect()
}

fn kernel_image(iomem: &str) -> Vec<(u64, u64)> {
    let range = |line: &str| {
        let (first, last, _) = bytes(line.trim_start()).filter(|(_, _, what)| what.starts_with("Kernel "))?;
        Some((first / 4096, last / 4096 + 1))
    };
    iomem.lines().filter_map(range).collect()
}

// Bits of a word of /proc/kpageflags.
pub(crate) const DIRTY: u64 = 1 << 4;
pub(crate) const LRU: u64 = 1 << 5;
pub(crate) const WRITEBACK: u64 = 1 << 8;
pub(crate) const BUDDY: u64 = 1 << 10;
pub(crate) const ANON: u64 = 1 << 12;
pub(crate) const SWAP_BACKED: u64 = 1 << 14;
const TAIL: u64 = 1 << 16;
const HUGETLB: u64 = 1 << 17;
const UNEVICTABLE: u64 = 1 << 18;
const POISONED: u64 = 1 << 19;
const NO_PAGE: u64 = 1 << 20;
pub(crate) const THP: u64 = 1 << 22;
const OFFLINE: u64 = 1 << 23;
const IDLE: u64 = 1 << 25;
pub(crate) const PAGE_TABLE: u64 = 1 << 26;
/// The page was taken before there was an allocator, and never returned to it.
pub(crate) const RESERVED: u64 = 1 << 32;

/// Returns the content of a page, if it is reported. `head` is the class of the last page that is no compound tail.
pub fn class(flags: u64, head: Option<Kind>) -> Option<Kind> {
    const NEVER: u64 = NO_PAGE | POISONED | OFFLINE | HUGETLB;
    if flags & NEVER != 0 {
        return None;
    }
    if flags & BUDDY != 0 {
        return Some(Kind::Free);
    }
    if flags & TAIL != 0 {
        // Kernels differ in which flags of the head a tail has.
        return head.filter(|kind| *kind != Kind::Free);
    }
    // Locked memory is to stay resident. The agent locks the memory it holds.
    if flags & (UNEVICTABLE | WRITEBACK) != 0 {
        return None;
    }
    if flags & LRU == 0 {
        // A program's page that was just touched is not yet on the list, and a page that is being moved is not on it.
        return (flags & (ANON | SWAP_BACKED) == 0).then_some(Kind::Other);
    }
    Some(match flags {
        _ if flags & (ANON | SWAP_BACKED) != 0 => Kind::Anon,
        _ if flags & DIRTY != 0 => Kind::FileDirty,
        _ => Kind::FileClean,
    })
}

/// Returns whether the page is part of a huge page that the kernel made by itself.
pub fn is_huge(flags: u64) -> bool {
    flags & THP != 0
}

/// Returns whether the page is memory of the kernel that is used at any time: a page table, or memory that was taken at
/// boot. Most of the latter are the records of all pages of RAM, 1.6 % of it, and reading the flags reads all of them.
/// `image`: the kernel's code and data, which are taken at boot, but do not count.
pub fn is_in_use(page: u64, flags: u64, image: &[(u64, u64)]) -> bool {
    let is_in_image = || image.iter().any(|(first, end)| (*first..*end).contains(&page));
    flags & PAGE_TABLE != 0 || flags & RESERVED != 0 && !is_in_image()
}

pub fn is_idle(flags: u64) -> bool {
    flags & IDLE != 0
}

/// Returns whether the page is memory of a program or of a file.
pub fn is_on_lru(flags: u64) -> bool {
    flags & LRU != 0
}

#[derive(Debug)]
pub struct Flags(File);

impl Flags {
    /// Fails if this user may not read the file, or the kernel has none.
    pub fn open() -> io::Result<Self> {
        let file = File::open("/proc/kpageflags");
        file.map(Self).map_err(|error| io::Error::new(error.kind(), format!("opening /proc/kpageflags: {error}")))
    }

    /// Calls a function with each page of this range and its flags.
    pub fn each(&self, range: (u64, u64), mut tell: impl FnMut(u64, u64)) -> io::Result<()> {
        const AT_ONCE: u64 = 4096;
        let mut bytes = vec![0; AT_ONCE as usize * 8];
        let (mut page, end) = range;
        while page < end {
            let want = ((end - page).min(AT_ONCE) * 8) as usize;
            let got = self.0.read_at(&mut bytes[..want], page * 8)? / 8;
            if got == 0 {
                // Beyond the end of memory.
                return Ok(());
            }
            for word in bytes[..got * 8].chunks_exact(8) {
                tell(page, u64::from_ne_bytes(word.try_into().expect("eight bytes")));
                page += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_is_whole_pages_also_of_a_device_and_the_kernel_is_within() {
        let text = "00000000-00000fff : Reserved\n00001000-0009fbff : System RAM\n00100000-7ffdffff : System RAM\n  \
                    01000000-01ffffff : Kernel code\n100000000-17fffffff : System RAM\n\
                    180000000-1ffffffff : virtio0\n  188000000-18fffffff : System RAM (virtio_mem)";
        let ram = [(1, 0x9f), (0x100, 0x7ffe0), (0x10_0000, 0x18_0000), (0x18_8000, 0x19_0000)];
        assert_eq!(system_ram(text), ram);
        assert_eq!(system_ram("00000000-00000000 : System RAM"), [], "not for this user");
        let image = kernel_image(text);
        assert_eq!(image, [(0x1000, 0x2000)]);
        let is_in_use = |page, flags| is_in_use(page, flags, &image);
        assert!([0xfff, 0x2000].into_iter().all(|page| is_in_use(page, RESERVED) && !is_in_use(page, 0)));
        assert!(!is_in_use(0x1000, RESERVED) && is_in_use(0x1000, PAGE_TABLE));
    }

    #[test]
    fn a_page_is_told_unless_it_is_locked_or_must_not_be_read() {
        assert_eq!(class(BUDDY, None), Some(Kind::Free));
        assert_eq!(class(LRU, None), Some(Kind::FileClean));
        assert_eq!(class(LRU | DIRTY, None), Some(Kind::FileDirty));
        assert_eq!(class(LRU | SWAP_BACKED, None), Some(Kind::Anon), "shared memory");
        assert_eq!(class(1 << 7, None), Some(Kind::Other), "slab");
        assert_eq!(class(ANON | SWAP_BACKED, None), None, "not on its list yet");
        assert_eq!(class(LRU | ANON | UNEVICTABLE, None), None, "locked");
        assert_eq!(class(TAIL, Some(Kind::Anon)), Some(Kind::Anon), "inside a huge page");
        assert_eq!(class(TAIL, None), None);
        assert_eq!(class(NO_PAGE, None), None);
        assert_eq!(class(BUDDY | POISONED, None), None);
    }
}
