//! The kernel's huge pages of each node, and the memory that is left for others.
//!
//! Before: the kernel's files under `/sys` and `/proc`. After: numbers that were read, and the number of reserved pages
//! that was set.
//! Threads: any. Units: huge pages, or bytes where the name says so. Promise: a number is read again after it was set,
//! because the kernel allocates as many pages as it can and reports no error.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ballast_base::{Bytes, GIB, HUGE_SIZE, KIB, PAGE_SIZE};
use ballast_sys::{hugetlb, meminfo};

/// How long another process may take to change the number of pages.
const LOCKED_WITHIN: Duration = Duration::from_secs(1);

/// The pages of which a pool consists. A slice of the pool is one of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Page {
    /// Pages of 2 MiB, which can be paged.
    #[default]
    Huge,
    /// Pages of 1 GiB. The kernel can neither map nor fill a part of such a page, so a VM keeps all of them.
    Gib,
}

impl Page {
    /// All of them, in the order in which they are zeroed.
    pub const ALL: [Self; 2] = [Self::Huge, Self::Gib];

    /// Bytes of a slice.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Huge => HUGE_SIZE as u64,
            Self::Gib => GIB,
        }
    }

    /// The size of a page, for people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Huge => "2 MiB",
            Self::Gib => "1 GiB",
        }
    }

    /// The size of this number of slices.
    pub const fn size(self, pages: u32) -> Bytes {
        Bytes(self.bytes() * pages as u64)
    }

    /// The directory of files with such pages, below that of the pool.
    pub const fn files(self) -> &'static str {
        match self {
            Self::Huge => "2M",
            Self::Gib => "1G",
        }
    }

    const fn kernel(self) -> &'static str {
        match self {
            Self::Huge => "hugepages/hugepages-2048kB",
            Self::Gib => "hugepages/hugepages-1048576kB",
        }
    }

    /// Memory of `struct page`s that the kernel frees for each page (HVO): all but the first 4 KiB of them.
    pub(crate) const fn vmemmap_freed(self) -> u64 {
        self.bytes() / PAGE_SIZE as u64 * 64 - PAGE_SIZE as u64
    }
}

impl std::fmt::Display for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.size(1).fmt(f)
    }
}

/// The kernel's files.
#[derive(Clone, Debug)]
pub struct Host {
    root: PathBuf,
    page: Page,
}

/// Huge pages of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// Reserved pages. Surplus pages are not among them.
    pub total: u64,
    /// Pages that are in no file and no mapping.
    pub free: u64,
    /// Surplus pages: those beyond the reserved ones. The kernel releases them when they are freed.
    pub surplus: u64,
}

/// Memory of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Total memory.
    pub total: Bytes,
    /// Free memory, plus the page cache of files on disks, which can be reclaimed at once.
    pub spare: Bytes,
}

impl Default for Host {
    fn default() -> Self {
        Self::at(Path::new("/"))
    }
}

impl Host {
    /// Uses the kernel's files below this directory.
    pub fn at(root: &Path) -> Self {
        Self { root: root.into(), page: Page::default() }
    }

    /// The kernel's files of huge pages of this size instead of 2 MiB.
    #[must_use]
    pub fn with(self, page: Page) -> Self {
        Self { page, ..self }
    }

    /// The size of these huge pages.
    pub fn page(&self) -> Page {
        self.page
    }

    fn node(&self, node: u32) -> PathBuf {
        self.root.join(format!("sys/devices/system/node/node{node}"))
    }

    /// Returns the nodes that have memory.
    pub fn nodes(&self) -> io::Result<Vec<u32>> {
        let text = read(&self.root.join("sys/devices/system/node/has_memory"))?;
        ranges(text.trim()).ok_or_else(|| io::Error::other(format!("the kernel lists its nodes as {:?}", text.trim())))
    }

    /// Returns the huge pages of a node.
    ///
    /// # Errors
    /// There is no such node, or the kernel has no huge pages of this size.
    pub fn pages(&self, node: u32) -> io::Result<Pages> {
        if let Some(pages) = self.pages_at_once(node)? {
            return Ok(pages);
        }
        let number = |file: &str| number(&self.node(node).join(self.page.kernel()).join(file));
        // Between the reads of these two files, other processes may change the surplus, so the reads are repeated.
        let read = || Ok::<_, io::Error>((number("nr_hugepages")?, number("surplus_hugepages")?));
        let mut last = read()?;
        loop {
            let now = read()?;
            if now == last {
                break;
            }
            last = now;
        }
        Ok(Pages { total: last.0.saturating_sub(last.1), free: number("free_hugepages")?, surplus: last.1 })
    }

    /// As [`Self::pages`], from one snapshot in one file, which only shows the default huge page size.
    fn pages_at_once(&self, node: u32) -> io::Result<Option<Pages>> {
        let text = read(&self.root.join("proc/meminfo"))?;
        if meminfo::number_in(&text, "Hugepagesize") != Some(self.page.bytes() / KIB) {
            return Ok(None);
        }
        let text = read(&self.node(node).join("meminfo"))?;
        let line = |key| line(&text, key);
        Ok(match (line("HugePages_Total:"), line("HugePages_Surp:"), line("HugePages_Free:")) {
            (Some(all), Some(surplus), Some(free)) => Some(Pages { total: all.saturating_sub(surplus), free, surplus }),
            _ => None,
        })
    }

    /// Makes the kernel reserve this number of pages more, or less. Returns the actual change.
    pub fn change_pages(&self, node: u32, by: i64) -> io::Result<i64> {
        let _lock = self.lock()?;
        let before = self.pages(node)?.total;
        let now = self.write_pages(node, before.saturating_add_signed(by))?;
        Ok(now as i64 - before as i64)
    }

    /// Takes the lock under which other processes change the number, too. Waits briefly only: VMs wait for the owner.
    fn lock(&self) -> io::Result<Option<std::fs::File>> {
        hugetlb::lock_numbers(&self.root, LOCKED_WITHIN)
    }

    /// Makes the kernel reserve this number of pages in all. Returns the resulting number.
    pub fn set_pages(&self, node: u32, total: u64) -> io::Result<u64> {
        let _lock = self.lock()?;
        self.write_pages(node, total)
    }

    fn write_pages(&self, node: u32, total: u64) -> io::Result<u64> {
        let file = self.node(node).join(self.page.kernel()).join("nr_hugepages");
        std::fs::write(&file, total.to_string()).map_err(|error| named(&file, error))?;
        Ok(self.pages(node)?.total)
    }

    /// Returns the memory of a node.
    pub fn memory(&self, node: u32) -> io::Result<Memory> {
        let file = self.node(node).join("meminfo");
        let text = read(&file)?;
        let line = |key: &str| -> io::Result<u64> {
            let kib = line(&text, key);
            Ok(kib.ok_or_else(|| io::Error::other(format!("{} has no {key}", file.display())))? * KIB)
        };
        let files = line("Active(file):")? + line("Inactive(file):")?;
        Ok(Memory { total: Bytes(line("MemTotal:")?), spare: Bytes(line("MemFree:")? + files) })
    }

    /// Returns the kernel's estimate of the memory that programs can still allocate, on all nodes together.
    pub fn available(&self) -> io::Result<Bytes> {
        let file = self.root.join("proc/meminfo");
        let text = read(&file)?;
        meminfo::number_in(&text, "MemAvailable")
            .map(|kib| Bytes(kib * KIB))
            .ok_or_else(|| io::Error::other(format!("{} has no MemAvailable", file.display())))
    }

    /// Returns the number of 4 KiB pages whose memory failed, as far as the kernel counts them
    /// (`CONFIG_MEMORY_FAILURE`).
    pub fn failed_pages(&self) -> io::Result<u64> {
        let text = read(&self.root.join("proc/meminfo"))?;
        Ok(meminfo::number_in(&text, "HardwareCorrupted").unwrap_or(0) / 4)
    }

    /// Returns whether the kernel frees most of the `struct page`s of huge pages (HVO).
    pub fn frees_vmemmap(&self) -> bool {
        read(&self.root.join("proc/sys/vm/hugetlb_optimize_vmemmap")).is_ok_and(|text| text.trim() == "1")
    }
}

fn named(file: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", file.display()))
}

fn read(file: &Path) -> io::Result<String> {
    std::fs::read_to_string(file).map_err(|error| named(file, error))
}

fn line(text: &str, key: &str) -> Option<u64> {
    let fields = text.lines().map(|line| line.split_ascii_whitespace().skip(2).collect::<Vec<_>>());
    fields.filter(|fields| fields.first() == Some(&key)).find_map(|fields| fields.get(1)?.parse().ok())
}

fn number(file: &Path) -> io::Result<u64> {
    let text = read(file)?;
    text.trim().parse().map_err(|_| io::Error::other(format!("{} is {:?}", file.display(), text.trim())))
}

/// Parses a list such as `0-1,3`.
pub(crate) fn ranges(text: &str) -> Option<Vec<u32>> {
    let mut all = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        // A host has at most 1024 nodes.
        all.extend(first..=last.min(first.saturating_add(1024)));
    }
    Some(all)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const PAGES: &str = Page::Huge.kernel();

    /// Write the files of a host with two nodes, 0 and 2, of 64 GiB each.
    pub(crate) fn two_nodes(root: &Path, spare: [u64; 2]) -> Host {
        let write = |file: &str, text: &str| {
            let file = root.join(file);
            std::fs::create_dir_all(file.parent().expect("a folder")).expect("make");
            std::fs::write(file, text).expect("write");
        };
        write("sys/devices/system/node/has_memory", "0,2\n");
        write("proc/meminfo", &format!("MemTotal: 1 kB\nMemAvailable:   {} kB\n", (spare[0] + spare[1]) / KIB));
        for (node, spare) in [0, 2].into_iter().zip(spare) {
            let dir = format!("sys/devices/system/node/node{node}");
            let meminfo = format!(
                "Node {node} MemTotal:       {} kB\nNode {node} MemFree: {} kB\nNode {node} Active(file): 0 kB\n\
                 Node {node} Inactive(file): 0 kB\n",
                64 << 20,
                spare / KIB
            );
            write(&format!("{dir}/meminfo"), &meminfo);
            for file in ["nr_hugepages", "free_hugepages", "surplus_hugepages"] {
                write(&format!("{dir}/{PAGES}/{file}"), "0\n");
            }
        }
        Host::at(root)
    }

    #[test]
    fn nodes_and_their_memory_are_read_as_the_kernel_writes_them() {
        let dir = tempfile::tempdir().expect("a directory");
        let host = two_nodes(dir.path(), [1 << 30, 3 << 30]);
        assert_eq!(host.nodes().expect("nodes"), [0, 2]);
        assert_eq!(host.memory(2).expect("memory"), Memory { total: Bytes(64 << 30), spare: Bytes(3 << 30) });
        assert_eq!(host.available().expect("available"), Bytes(4 << 30));
        assert_eq!(host.set_pages(2, 9).expect("set"), 9);
        assert_eq!(host.change_pages(2, -2).expect("change"), -2);
        assert_eq!(host.pages(2).expect("pages"), Pages { total: 7, free: 0, surplus: 0 });
        assert!(host.pages(1).expect_err("no node").to_string().contains("node1"));
        assert_eq!(
            (ranges("0-2,5"), ranges("0"), ranges(""), ranges("x")),
            (Some(vec![0, 1, 2, 5]), Some(vec![0]), Some(vec![]), None)
        );
    }

    #[test]
    fn pages_beyond_the_reserved_ones_are_told_apart_at_one_moment() {
        let dir = tempfile::tempdir().expect("a directory");
        let host = two_nodes(dir.path(), [1 << 30, 3 << 30]);
        let add = |file: &str, text: &str| {
            let file = dir.path().join(file);
            let before = std::fs::read_to_string(&file).expect("read");
            std::fs::write(&file, before + text).expect("write");
        };
        let node = "sys/devices/system/node/node2";
        add(
            &format!("{node}/meminfo"),
            "Node 2 HugePages_Total:    33\nNode 2 HugePages_Free:      3\nNode 2 HugePages_Surp:      1\n",
        );
        // The numbers that a reader of the two files finds if a page is freed between the reads.
        std::fs::write(dir.path().join(format!("{node}/{PAGES}/nr_hugepages")), "33\n").expect("write");
        assert_eq!(host.pages(2).expect("pages").total, 33);
        add("proc/meminfo", "Hugepagesize:       2048 kB\n");
        assert_eq!(host.pages(2).expect("pages"), Pages { total: 32, free: 3, surplus: 1 });
        assert_eq!(host.pages(0).expect("pages"), Pages { total: 0, free: 0, surplus: 0 }, "from files of its own");
    }

    #[test]
    fn a_user_who_locks_the_kernels_file_holds_nobody_up() {
        let dir = tempfile::tempdir().expect("a directory");
        let host = two_nodes(dir.path(), [1 << 30, 3 << 30]);
        let kernels = dir.path().join("sys/kernel/mm").join(PAGES);
        std::fs::create_dir_all(&kernels).expect("make");
        std::fs::create_dir(dir.path().join("run")).expect("make");
        std::fs::write(kernels.join("nr_hugepages"), "0\n").expect("write");
        let file = std::fs::File::open(kernels.join("nr_hugepages")).expect("every user may read it");
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).expect("lock");
        assert_eq!(host.change_pages(0, 2).expect("change"), 2);
    }

    #[test]
    fn pages_of_another_size_have_numbers_of_their_own() {
        let dir = tempfile::tempdir().expect("a directory");
        let host = two_nodes(dir.path(), [1 << 30, 3 << 30]);
        let gib = host.clone().with(Page::Gib);
        assert!(gib.pages(0).expect_err("no such pages").to_string().contains("hugepages-1048576kB"));
        for file in ["nr_hugepages", "free_hugepages", "surplus_hugepages"] {
            let place = dir.path().join("sys/devices/system/node/node0").join(Page::Gib.kernel());
            std::fs::create_dir_all(&place).expect("make");
            std::fs::write(place.join(file), "0\n").expect("write");
        }
        assert_eq!(gib.change_pages(0, 3).expect("change"), 3);
        assert_eq!((gib.pages(0).expect("pages").total, host.pages(0).expect("pages").total), (3, 0));
        assert_eq!((Page::Huge.vmemmap_freed(), Page::Gib.vmemmap_freed()), (28 << 10, (16 << 20) - 4096));
        assert_eq!((Page::Huge.to_string(), Page::Gib.to_string()), ("2 MiB".into(), "1 GiB".into()));
    }

    #[test]
    fn this_host_has_a_node_with_memory() {
        let host = Host::default();
        let nodes = host.nodes().expect("nodes");
        let memory = host.memory(nodes[0]).expect("memory");
        assert!(memory.spare < memory.total && host.available().expect("available") > Bytes(0));
    }
}
