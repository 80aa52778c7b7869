//! The pool of the bench's daemon: it gets memory for a measurement, and returns it.
//!
//! Before: a daemon runs. After: the host has all memory of the pool again, also if the bench is killed.
//! Threads: the bench's one. Units: bytes. Promise: a size that the pool has is zeroed and no VM's.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_api::{Client, LendRequest, PoolPages, PoolRequest, PoolStat, VmStat};
use ballast_base::pool::{Nodes, Pages, Take};
use ballast_base::{Bytes, HUGE_SIZE};
use ballast_client::RamExtent;
use ballast_client::pool::take;
use ballast_sys::Mapping;

use crate::end_pool::unmount;
use crate::rig::Bench;

/// How long the engine may take to zero what VMs had: some 100 ms a GiB on an idle machine.
const SETTLED_WITHIN: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(2);

pub(super) struct Product {
    api: Client,
    dir: PathBuf,
}

impl Product {
    /// The pool of the bench's daemon, which has no memory yet.
    pub(super) fn start(bench: &mut Bench) -> Result<Self> {
        let dir = bench.daemon.dir().to_owned();
        let api = Client::new(dir.join("api.sock"))?.retry_for(Duration::from_secs(20));
        let product = Self { api, dir };
        let start = Instant::now();
        while !product.socket().exists() {
            ensure!(start.elapsed() < SETTLED_WITHIN, "the engine does not open the socket of its pool");
            std::thread::sleep(PAUSE);
        }
        bench.guard.end_pool(product.dir.join("pool"), bench.daemon.keeper_pid())?;
        Ok(product)
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("pool.sock")
    }

    fn stat(&self) -> Result<PoolStat> {
        self.api.pool().context("Asking for the pool")
    }

    /// Have its part of pages of 2 MiB this large, and zeroed.
    pub(super) fn hold(&self, size: Bytes) -> Result<()> {
        self.hold_of(PoolPages::Huge, size)
    }

    /// The same of its part of these pages.
    pub(super) fn hold_of(&self, pages: PoolPages, size: Bytes) -> Result<()> {
        let sum = |stat: &PoolStat| -> (u64, u64, u64) {
            stat.nodes.iter().fold((0, 0, 0), |(has, lent, ready), node| {
                (has + node.reserved_bytes, lent + node.lent_bytes, ready + node.ready_bytes)
            })
        };
        // A slice that is being zeroed is not lent.
        let rests = |stat: &PoolStat| stat.vms.is_empty() && stat.nodes.iter().all(|node| node.dirty_bytes == 0);
        let stat = self.settled(pages, rests)?;
        let (has, lent, _) = sum(&stat);
        if has > size.0 {
            let lend = LendRequest { bytes: has + lent - size.0, pages, ..LendRequest::default() };
            self.api.lend_pool(&lend).context("Lending")?;
        } else if has < size.0 {
            let request = PoolRequest { bytes: Some(size.0), pages, ..PoolRequest::default() };
            self.api.reserve_pool(&request).context("Reserving")?;
        }
        let stat = part(&self.stat()?, pages);
        ensure!(sum(&stat).0 == size.0, "the pool has not {size}: {:?}: {:?}", stat.notes, stat.nodes);
        self.settled(pages, |stat| sum(stat).2 == size.0).map(drop)
    }

    fn settled(&self, pages: PoolPages, is: impl Fn(&PoolStat) -> bool) -> Result<PoolStat> {
        let start = Instant::now();
        loop {
            let stat = part(&self.stat()?, pages);
            if is(&stat) {
                return Ok(stat);
            }
            ensure!(start.elapsed() < SETTLED_WITHIN, "the pool does not come to rest: {stat:?}");
            std::thread::sleep(PAUSE);
        }
    }

    /// Bytes of the pool's own state.
    pub(super) fn state_bytes(&self) -> Result<u64> {
        Ok(self.stat()?.metadata_bytes)
    }

    /// RAM for a VM that the bench's process is, from the request to its page tables.
    pub(super) fn take(&self, size: Bytes) -> Result<Mapping> {
        self.take_of(Pages::Mix, size)
    }

    /// The same in these pages.
    pub(super) fn take_of(&self, pages: Pages, size: Bytes) -> Result<Mapping> {
        let wanted = Take { name: "bench".into(), size, pages, nodes: Nodes::Any };
        let pieces = take(&self.socket(), &wanted).context("Taking memory of the pool")?;
        let places: Vec<_> = pieces.iter().map(|piece| (&piece.fd, piece.offset.0, piece.len.0 as usize)).collect();
        let map = Mapping::shared_pieces(&places).context("Mapping memory of the pool")?;
        map.populate(0, map.len()).context("Filling page tables")?;
        Ok(map)
    }

    /// Reserve as much as this of pages of this size, of a pool that has none. Returns how much it got, and the time
    /// that it took, in seconds.
    pub(super) fn reserve(&self, pages: PoolPages, size: Bytes) -> Result<(Bytes, f64)> {
        let request = PoolRequest { bytes: Some(size.0), pages, ..PoolRequest::default() };
        let start = Instant::now();
        let stat = self.api.reserve_pool(&request).context("Reserving")?;
        let took = start.elapsed().as_secs_f64();
        Ok((Bytes(part(&stat, pages).nodes.iter().map(|node| node.reserved_bytes).sum()), took))
    }

    /// The host gets all pages of this size again.
    pub(super) fn give_back(&self, pages: PoolPages) -> Result<()> {
        let has = |stat: &PoolStat| part(stat, pages).nodes.iter().any(|node| node.reserved_bytes > 0);
        let is_done = |stat: &PoolStat| -> Result<bool> {
            let all = part(stat, pages).nodes.iter().map(|node| node.reserved_bytes + node.lent_bytes).sum();
            if has(stat) {
                self.api.lend_pool(&LendRequest { bytes: all, pages, ..LendRequest::default() }).context("Lending")?;
            }
            Ok(!has(&self.stat()?))
        };
        let start = Instant::now();
        while !is_done(&self.stat()?)? {
            ensure!(start.elapsed() < SETTLED_WITHIN, "the pool does not give its memory back");
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Let it promise this many percent of what it has.
    pub(super) fn overcommit(&self, size: Bytes, percent: u32) -> Result<()> {
        let overcommit_percent = Some(percent);
        let request = PoolRequest { bytes: Some(size.0), overcommit_percent, ..PoolRequest::default() };
        self.api.reserve_pool(&request).context("Letting the pool promise more").map(drop)
    }

    /// What the daemon says of a VM.
    pub(super) fn vm(&self, name: &str) -> Result<VmStat> {
        self.api.vm(name).context("Asking for the VM")
    }

    /// Places for RAM of this size.
    pub(super) fn take_on_demand(&self, size: Bytes) -> Result<Vec<RamExtent>> {
        let wanted = Take { name: "bench".into(), size, pages: Pages::OnDemand, nodes: Nodes::Any };
        take(&self.socket(), &wanted).context("Taking memory of the pool on demand")
    }
}

/// What the pool says of pages of this size.
fn part(stat: &PoolStat, pages: PoolPages) -> PoolStat {
    match pages {
        PoolPages::Huge => stat.clone(),
        PoolPages::Gib => stat.gib.as_deref().cloned().unwrap_or_default(),
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        let unmount = || unmount(&self.dir.join("pool")).context("unmounting its files");
        let others = self.give_back(PoolPages::Gib);
        let ended = self.hold(Bytes(0)).and(others).and_then(|()| unmount());
        if let Err(error) = ended {
            eprintln!("ballast bench: returning the pool's memory: {error:#}");
        }
    }
}

/// Whole huge pages of a size.
pub(super) fn huge_pages(size: Bytes) -> u64 {
    size.0.div_ceil(HUGE_SIZE as u64)
}
