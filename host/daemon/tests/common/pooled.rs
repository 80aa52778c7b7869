//! A daemon with a pool. The host's huge pages are restored at the end.
//!
//! Before: a test wants memory of the pool. After: there is some, zeroed. Threads: one such daemon at a time.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard};

use ballast_api::{PoolPages, PoolRequest, PoolStat};
use ballast_base::MIB;
use ballast_client::RamExtent;
use ballast_pool::{Host, Page};
use ballast_sys::Mapping;
use ballast_sys::lock::Lock;
use ballast_testkit::skip;

use super::{Daemon, until};

pub struct Pooled {
    pub daemon: Option<Daemon>,
    pub dir: PathBuf,
    pub host: Host,
    before: Vec<(u32, u64)>,
    _one: MutexGuard<'static, ()>,
}

/// One test at a time: they share the kernel's number of huge pages.
static ONE: Mutex<()> = Mutex::new(());

impl Pooled {
    /// A zeroed pool of this size in files of 16 MiB; `None`, with a message, if there can be none.
    pub fn start(config: &str, mib: u64) -> Option<Self> {
        Self::of(config, mib, PoolPages::Huge)
    }

    /// A pool of these pages; a file of 1 GiB pages has one page.
    pub fn of(config: &str, mib: u64, pages: PoolPages) -> Option<Self> {
        let (page, file_bytes) = match pages {
            PoolPages::Huge => (Page::Huge, Some(16 * MIB)),
            PoolPages::Gib => (Page::Gib, None),
        };
        let host = Host::default().with(page);
        if !rustix::process::geteuid().is_root() {
            skip("root", "only root mounts file systems and reserves huge pages");
            return None;
        }
        let one = ONE.locked();
        let nodes = host.nodes().expect("nodes");
        let had = nodes.into_iter().map(|node| Ok((node, host.pages(node)?.total)));
        let before = match had.collect::<std::io::Result<Vec<_>>>() {
            Ok(before) => before,
            Err(error) => {
                skip("hugetlb", error);
                return None;
            }
        };
        let daemon = Daemon::start(config);
        let dir = daemon.dir().to_owned();
        let pooled = Self { daemon: Some(daemon), dir, host, before, _one: one };
        let daemon = pooled.daemon();
        until("the engine has the pool", || daemon.dir().join("pool.sock").exists());
        let request = PoolRequest { bytes: Some(mib * MIB), file_bytes, pages, ..PoolRequest::default() };
        // An emulated machine may take minutes to find pages of 1 GiB. The request may be repeated.
        let asked = (0..5).map(|_| daemon.api.reserve_pool(&request)).find(|asked| asked.is_ok());
        asked.expect("answered").expect("reserve");
        let pool = pooled.stat();
        if pool.nodes.iter().map(|node| node.reserved_bytes).sum::<u64>() < mib * MIB {
            skip("memory", format!("{:?}", pool.notes));
            return None;
        }
        Some(pooled)
    }

    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it runs")
    }

    pub fn stat(&self) -> PoolStat {
        let pool = self.daemon().api.pool().expect("the pool");
        match self.host.page() {
            Page::Huge => pool,
            Page::Gib => pool.gib.map_or_else(PoolStat::default, |gib| *gib),
        }
    }

    pub fn settled(&self, mib: u64) {
        until("all of the pool is ready", || {
            self.stat().nodes.iter().map(|node| node.ready_bytes).sum::<u64>() == mib * MIB
        });
    }

    /// Huge pages of the host beyond those before the test.
    pub fn pages(&self) -> u64 {
        self.before.iter().map(|(node, before)| self.host.pages(*node).expect("pages").total - before).sum()
    }

    pub fn part(&self) -> PathBuf {
        let pool = self.dir.join("pool");
        match self.host.page() {
            Page::Huge => pool,
            Page::Gib => pool.join("gib"),
        }
    }

    fn mount(&self) -> PathBuf {
        self.part().join(self.host.page().files())
    }
}

pub fn mapped(pieces: &[RamExtent]) -> Mapping {
    let places: Vec<_> = pieces.iter().map(|piece| (piece.fd.as_fd(), piece.offset.0, piece.len.0 as usize)).collect();
    Mapping::shared_pieces(&places).expect("map")
}

pub fn end(vm: &mut Child) {
    vm.kill().expect("kill");
    vm.wait().expect("reap");
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let mount = self.mount();
        if mount.exists() {
            let _ = Command::new("umount").arg("-l").arg(mount).status();
        }
        drop(self.daemon.take());
        for (node, before) in &self.before {
            if let Err(error) = self.host.set_pages(*node, *before) {
                eprintln!("Putting back the number of huge pages: {error}");
            }
        }
    }
}
