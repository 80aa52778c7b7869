//! A pool in a directory of its own, on huge pages of this host that are put back.

#![allow(dead_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard};

use ballast_base::pool::Nodes;
use ballast_base::{Bytes, Extent, MIB, PAGE_SIZE};
use ballast_pool::map::Mode;
use ballast_pool::{Grant, Host, Page, Reserve, Want};
use ballast_sys::Mapping;
use ballast_sys::lock::Lock;
use ballast_testkit::skip;

/// The word that one VM writes and no other VM may find.
pub const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;

pub fn grant(reserve: &mut Reserve, name: &str, mib: u64) -> Grant {
    reserve.grant(name, Bytes(mib * MIB), Mode::Slices, &Nodes::Any).expect("granted")
}

pub fn map(grant: &Grant) -> Mapping {
    let piece =
        |extent: &Extent| (grant.files[usize::from(extent.file)].as_fd(), extent.offset.0, extent.len.0 as usize);
    Mapping::shared_pieces(&grant.extents.iter().map(piece).collect::<Vec<_>>()).expect("map")
}

/// Writes the secret into each page, and returns how many words were not zero.
pub fn search_and_mark(map: &Mapping) -> usize {
    let mut found = 0;
    for page in (0..map.len()).step_by(PAGE_SIZE) {
        let words = map.words(page, PAGE_SIZE / 8);
        found += words.iter().filter(|word| word.load(Ordering::Relaxed) != 0).count();
        words[page / PAGE_SIZE % 512].store(SECRET, Ordering::Relaxed);
    }
    found
}

/// Have a pipe hold the page that begins at this offset. Returns its reading and its writing end.
pub fn hold_in_pipe(ram: &Mapping, at: usize) -> (OwnedFd, OwnedFd) {
    let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
    let page = rustix::pipe::IoSliceRaw::from_slice({
        // SAFETY: a page of a mapping that lives until after the call, which takes its address and no byte of it.
        unsafe { std::slice::from_raw_parts(ram.ptr(at, PAGE_SIZE), PAGE_SIZE) }
    });
    // SAFETY: the kernel takes a reference to the page; whatever it holds later is what the test is about.
    let held = unsafe { rustix::pipe::vmsplice(&writer, &[page], rustix::pipe::SpliceFlags::empty()) };
    assert_eq!(held.expect("vmsplice"), PAGE_SIZE);
    (reader, writer)
}

/// One at a time: they share the kernel's number of huge pages.
static ONE: Mutex<()> = Mutex::new(());

pub struct Place {
    dir: tempfile::TempDir,
    host: Host,
    /// Huge pages that each node had.
    pages: Vec<(u32, u64)>,
    _one: MutexGuard<'static, ()>,
}

impl Place {
    /// `None`, with a printed skip, where there can be no pool.
    pub fn new() -> Option<Self> {
        Self::of(Page::Huge)
    }

    /// As [`Self::new`], for pages of this size.
    pub fn of(page: Page) -> Option<Self> {
        let host = Host::default().with(page);
        let one = ONE.locked();
        if !rustix::process::geteuid().is_root() {
            skip("root", "only root mounts file systems and reserves huge pages");
            return None;
        }
        let pages = match all_pages(&host) {
            Ok(pages) => pages,
            Err(error) => {
                skip("hugetlb", error);
                return None;
            }
        };
        let dir = tempfile::Builder::new().prefix("ballast-pool-").tempdir_in("/dev/shm").expect("a directory");
        Some(Self { dir, host, pages, _one: one })
    }

    pub fn dir(&self) -> PathBuf {
        self.dir.path().join("pool")
    }

    pub fn open(&self) -> Reserve {
        Reserve::open(&self.dir(), self.host.clone()).expect("open")
    }

    pub fn node(&self) -> u32 {
        self.pages[0].0
    }

    /// A pool of this size with files of `brick_mib`, of the first node and zeroed; `None` if the host has too little.
    pub fn pool(&self, size_mib: u64, brick_mib: u64) -> Option<Reserve> {
        self.pool_of(size_mib, brick_mib, Some(self.node()))
    }

    /// As [`Self::pool`], of this node, or of all nodes.
    pub fn pool_of(&self, size_mib: u64, brick_mib: u64, node: Option<u32>) -> Option<Reserve> {
        let mut reserve = self.open();
        let grown = reserve.grow(Want::Bytes(Bytes(size_mib * MIB)), node, Some(Bytes(brick_mib * MIB)));
        if let Err(error) = grown {
            skip("hugetlb", error);
            return None;
        }
        if sum(&reserve, |node| node.reserved) < size_mib * MIB {
            skip("memory", format!("{:?}", reserve.overview().notes));
            return None;
        }
        zero_all(&mut reserve);
        Some(reserve)
    }

    /// Huge pages of the host beyond those that it had at the start.
    pub fn pages(&self) -> u64 {
        let sum = |pages: &[(u32, u64)]| pages.iter().map(|(_, pages)| pages).sum::<u64>();
        sum(&all_pages(&self.host).expect("pages")) - sum(&self.pages)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        unmount(&self.dir().join(self.host.page().files()));
        for (node, pages) in &self.pages {
            if let Err(error) = self.host.set_pages(*node, *pages) {
                eprintln!("Putting back the number of huge pages: {error}");
            }
        }
    }
}

fn all_pages(host: &Host) -> std::io::Result<Vec<(u32, u64)>> {
    host.nodes()?.into_iter().map(|node| Ok((node, host.pages(node)?.total))).collect()
}

pub fn unmount(dir: &Path) {
    if dir.exists() {
        let _ = Command::new("umount").arg("-l").arg(dir).status();
    }
}

/// Runs a worker's jobs until no slice can be zeroed.
pub fn zero_all(reserve: &mut Reserve) {
    while let Some(job) = reserve.next_job().expect("a job") {
        let done = job.run();
        reserve.finish(done);
    }
}

/// As [`zero_all`], with an engine's retries: waiting slices are tried again, and others replace held pages.
pub fn settle(reserve: &mut Reserve) {
    zero_all(reserve);
    for _ in 0..12 {
        let jobs = reserve.jobs_again();
        if jobs.is_empty() {
            break;
        }
        let mut found = false;
        for job in jobs {
            let done = job.run();
            found |= reserve.finish(done);
        }
        reserve.replenish(found).expect("ask for pages");
    }
    reserve.tend().expect("tend");
}

/// The kernel's files of a host with two nodes; the second one has less to spare.
pub fn two_nodes(root: &Path) -> Host {
    let write = |file: &str, text: &str| {
        let file = root.join(file);
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("make");
        std::fs::write(file, text).expect("write");
    };
    write("sys/devices/system/node/has_memory", "0-1\n");
    write("proc/meminfo", "MemAvailable: 12582912 kB\n");
    for (node, free) in [(0, 8 << 20), (1, 3 << 20)] {
        let dir = format!("sys/devices/system/node/node{node}");
        let line = |key: &str, kib: u64| format!("Node {node} {key}: {kib} kB\n");
        let all = [("MemTotal", 16 << 20), ("MemFree", free), ("Active(file)", 0), ("Inactive(file)", 1 << 20)];
        write(&format!("{dir}/meminfo"), &all.map(|(key, kib)| line(key, kib)).concat());
        for (file, count) in [("nr_hugepages", 5), ("free_hugepages", 5), ("surplus_hugepages", 0)] {
            write(&format!("{dir}/hugepages/hugepages-2048kB/{file}"), &format!("{count}\n"));
        }
    }
    Host::at(root)
}

pub fn sum(reserve: &Reserve, of: impl Fn(&ballast_pool::Node) -> Bytes) -> u64 {
    reserve.overview().nodes.iter().map(|node| of(node).0).sum()
}
