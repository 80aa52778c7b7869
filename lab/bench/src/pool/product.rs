//! The pool of the bench's daemon: it gets memory for a measurement, and returns it.
//!
//! Before: a daemon runs. After: the host has all memory of the pool again, also if the bench is killed.
//! Threads: the bench's one. Units: bytes. Promise: memory that the pool holds for a measurement is zeroed, and no VM
//! has it.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ballast_api::{Client, LendRequest, PoolRequest, PoolStat};
use ballast_base::pool::{Nodes, Pages, Take};
use ballast_base::{Bytes, HUGE_SIZE};
use ballast_client::pool::take;
use ballast_sys::Mapping;
use ballast_testhost::until;

use crate::end_pool::unmount;
use crate::rig::Bench;

/// Longest time in which the engine must zero the memory of former VMs: some 100 ms a GiB on an idle machine.
const SETTLED_WITHIN: Duration = Duration::from_secs(120);

pub(super) struct Product {
    api: Client,
    dir: PathBuf,
}

impl Product {
    /// The pool of the bench's daemon, still without memory.
    pub(super) fn start(bench: &mut Bench) -> Result<Self> {
        let dir = bench.daemon.dir().to_owned();
        let api = Client::new(dir.join("api.sock"))?.retry_for(Duration::from_secs(20));
        let product = Self { api, dir };
        until("the engine does not open the socket of its pool", SETTLED_WITHIN, || {
            Ok(product.socket().exists().then_some(()))
        })?;
        bench.guard.end_pool(product.dir.join("pool"), bench.daemon.keeper_pid())?;
        Ok(product)
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("pool.sock")
    }

    fn stat(&self) -> Result<PoolStat> {
        self.api.pool().context("Asking for the pool")
    }

    /// Makes the pool this large, and waits until it is zeroed.
    pub(super) fn hold(&self, size: Bytes) -> Result<()> {
        let sum = |stat: &PoolStat| -> (u64, u64, u64) {
            stat.nodes.iter().fold((0, 0, 0), |(has, lent, ready), node| {
                (has + node.reserved_bytes, lent + node.lent_bytes, ready + node.ready_bytes)
            })
        };
        // A slice that is being zeroed cannot be lent.
        let rests = |stat: &PoolStat| stat.vms.is_empty() && stat.nodes.iter().all(|node| node.dirty_bytes == 0);
        let stat = self.settled(rests)?;
        let (has, lent, _) = sum(&stat);
        if has > size.0 {
            let lend = LendRequest { bytes: has + lent - size.0, ..LendRequest::default() };
            self.api.lend_pool(&lend).context("Lending")?;
        } else if has < size.0 {
            let request = PoolRequest { bytes: Some(size.0), ..PoolRequest::default() };
            self.api.reserve_pool(&request).context("Reserving")?;
        }
        let stat = self.stat()?;
        ensure!(sum(&stat).0 == size.0, "the pool has not {size}: {:?}: {:?}", stat.notes, stat.nodes);
        self.settled(|stat| sum(stat).2 == size.0).map(drop)
    }

    fn settled(&self, is: impl Fn(&PoolStat) -> bool) -> Result<PoolStat> {
        until("the pool does not come to rest", SETTLED_WITHIN, || Ok(Some(self.stat()?).filter(&is)))
    }

    /// RAM from the pool for this process as a VM: from the request to mapped pages.
    pub(super) fn take(&self, size: Bytes) -> Result<Mapping> {
        let wanted = Take { name: "bench".into(), size, pages: Pages::Mix, nodes: Nodes::Any };
        let pieces = take(&self.socket(), &wanted).context("Taking memory of the pool")?;
        let places: Vec<_> = pieces.iter().map(|piece| (&piece.fd, piece.offset.0, piece.len.0 as usize)).collect();
        let map = Mapping::shared_pieces(&places).context("Mapping memory of the pool")?;
        map.populate(0, map.len()).context("Filling page tables")?;
        Ok(map)
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        let unmount = || unmount(&self.dir.join("pool")).context("unmounting its files");
        let ended = self.hold(Bytes(0)).and_then(|()| unmount());
        if let Err(error) = ended {
            eprintln!("ballast bench: returning the pool's memory: {error:#}");
        }
    }
}

pub(super) fn huge_pages(size: Bytes) -> u64 {
    size.0.div_ceil(HUGE_SIZE as u64)
}
