//! VMs arrive and leave on real reserved pages, through the product's own pool, until it is full: the share of it that
//! VMs have then.
//!
//! Before: there are as many huge pages as the pool has. After: there is a row. Units: shares in percent.
//! Threads: one of its own, in a mount name space of its own, so that nothing stays mounted however the bench ends.
//! Promise: each VM maps all its memory and checks every page for data of others. Sizes are those of the model
//! (`sizes.rs`) divided by 32, as are files: this stands for a host of 128 GiB with files of 1 GiB. The guard has set
//! the kernel's number of huge pages; the pool reads another number from a file.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use ballast_base::pool::Nodes;
use ballast_base::{Bytes, GIB, HUGE_SIZE, MIB, PAGE_SIZE};
use ballast_pool::map::{Mode, SLICE_SIZE};
use ballast_pool::{Grant, Host, Reserve, Want};
use ballast_sys::Mapping;
use rustix::fd::AsFd;

use super::sizes;
use crate::report::Row;
use crate::stats::random;

const SCALE: u32 = 32;
const FILE: Bytes = Bytes(32 * MIB);

/// The row of a pool of this size, for which huge pages are there.
pub(super) fn row(mut row: Row, size: Bytes, rounds: u64, steps: u32) -> Result<Row> {
    row.fact("measures", "sold");
    row.fact("ram_bytes", size.0);
    row.fact("file_bytes", FILE.0);
    row.fact("sizes", "AzurePublicDatasetV1 / 32");
    row.fact("steps", steps);
    let measured = std::thread::Builder::new().name("sold".into()).spawn(move || measure(size, rounds, steps));
    let measured = measured.context("Starting a thread")?.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
    let [sold, fenced, vms, checked] = measured?;
    row.figure("real_sellable_pct", &sold);
    row.figure("real_fenced_pct", &fenced);
    row.figure("vms_when_full", &vms);
    row.figure("searched_gib", &checked);
    Ok(row)
}

/// Memory that VMs have, unused memory in their files, their number, and the memory that they have checked.
fn measure(size: Bytes, rounds: u64, steps: u32) -> Result<[Vec<f64>; 4]> {
    own_mounts().context("Making a mount name space")?;
    let mut figures: [Vec<f64>; 4] = Default::default();
    for round in 0..rounds {
        let root = tempfile::tempdir().context("Making a directory")?;
        let place = tempfile::tempdir_in("/dev/shm").context("Making a directory")?;
        let host = canned(root.path(), size).context("Writing the files of a host")?;
        let mut reserve = Reserve::open(&place.path().join("pool"), host)?;
        reserve.grow(Want::Bytes(size), None, Some(FILE))?;
        let mut vms = Vms { reserve, held: Vec::new(), searched: 0 };
        vms.tend()?;
        let mut seed = round;
        while vms.arrive(sizes::draw(&mut seed) / SCALE)? {}
        for _ in 0..steps {
            // A pool may be smaller than the first VM that comes.
            if !vms.held.is_empty() {
                vms.held.swap_remove(random(&mut seed) as usize % vms.held.len());
                vms.tend()?;
            }
            while vms.arrive(sizes::draw(&mut seed) / SCALE)? {}
        }
        while vms.arrive(sizes::SMALLEST / SCALE)? {}
        while vms.arrive(1)? {}
        vms.reserve.validate().context("The pool's state is invalid")?;
        let overview = vms.reserve.overview();
        let share = |of: fn(&ballast_pool::Node) -> Bytes| {
            100.0 * overview.nodes.iter().map(|node| of(node).0).sum::<u64>() as f64 / size.0 as f64
        };
        let searched = vms.searched as f64 / GIB as f64;
        let now = [share(|node| node.used), share(|node| node.fenced), vms.held.len() as f64, searched];
        figures.iter_mut().zip(now).for_each(|(figure, now)| figure.push(now));
        vms.held.clear();
        vms.tend()?;
    }
    Ok(figures)
}

struct Vms {
    reserve: Reserve,
    held: Vec<(Grant, Mapping)>,
    searched: u64,
}

impl Vms {
    /// A VM takes memory, checks it, and marks it. Returns whether there was enough.
    fn arrive(&mut self, slices: u32) -> Result<bool> {
        let size = Bytes(u64::from(slices.max(1)) * SLICE_SIZE);
        let grant = match self.reserve.grant("vm", size, Mode::Mix, &Nodes::Any) {
            Ok(grant) => grant,
            Err(ballast_pool::Error::Refused(..) | ballast_pool::Error::Request(_)) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let piece = |extent: &ballast_base::Extent| {
            (grant.files[usize::from(extent.file)].as_fd(), extent.offset.0, extent.len.0 as usize)
        };
        let map = Mapping::shared_pieces(&grant.extents.iter().map(piece).collect::<Vec<_>>())?;
        for at in (0..map.len()).step_by(PAGE_SIZE) {
            let word = &map.words(at, 1)[0];
            if word.swap(grant.vm | 1, std::sync::atomic::Ordering::Relaxed) != 0 {
                bail!("a VM found at {at:#x} data of another VM");
            }
        }
        self.searched += size.0;
        self.held.push((grant, map));
        Ok(true)
    }

    /// Take back and zero the memory of VMs that are gone.
    fn tend(&mut self) -> Result<()> {
        self.reserve.tend()?;
        while let Some(job) = self.reserve.next_job()? {
            let done = job.run();
            ensure!(self.reserve.finish(done), "the kernel has no page for a slice");
        }
        Ok(())
    }
}

/// Give this thread a mount name space of its own, whose mounts are not seen elsewhere.
fn own_mounts() -> std::io::Result<()> {
    // SAFETY: the call takes no pointer; this thread alone gets another name space.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } == -1 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the path is a constant C string; the others are not used for this change of how mounts propagate.
    let done = unsafe {
        libc::mount(
            std::ptr::null(),
            c"/".as_ptr(),
            std::ptr::null(),
            libc::MS_REC | libc::MS_PRIVATE,
            std::ptr::null(),
        )
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// The kernel's files of a host with one node, of twice that size.
fn canned(root: &Path, size: Bytes) -> std::io::Result<Host> {
    let node = "sys/devices/system/node/node0";
    let kib = size.0 * 2 / 1024 + (8 << 20);
    let line = |key: &str, kib: u64| format!("Node 0 {key}: {kib} kB\n");
    let memory = [("MemTotal", kib), ("MemFree", kib), ("Active(file)", 0), ("Inactive(file)", 0)];
    let pages = format!("{node}/hugepages/hugepages-{}kB", HUGE_SIZE / 1024);
    let mut files = vec![
        ("sys/devices/system/node/has_memory".to_owned(), "0\n".to_owned()),
        ("proc/meminfo".to_owned(), format!("MemAvailable: {kib} kB\n")),
        (format!("{node}/meminfo"), memory.map(|(key, kib)| line(key, kib)).concat()),
    ];
    for file in ["nr_hugepages", "free_hugepages", "surplus_hugepages"] {
        files.push((format!("{pages}/{file}"), "0\n".to_owned()));
    }
    for (file, text) in files {
        let file = root.join(file);
        std::fs::create_dir_all(file.parent().unwrap_or(root))?;
        std::fs::write(file, text)?;
    }
    Ok(Host::at(root))
}
