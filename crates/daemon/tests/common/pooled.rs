//! A daemon with a pool, and the host's huge pages put back.
//!
//! Before: a test wants memory of the pool. After: there is some, zeroed. Threads: one such daemon at a time.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ballast_api::{PoolRequest, PoolStat};
use ballast_base::MIB;
use ballast_needs::skip;
use ballast_reserve::Host;

use super::{Daemon, until};

/// A daemon with a pool; the host's huge pages are put back.
pub struct Pooled {
    pub daemon: Option<Daemon>,
    pub dir: PathBuf,
    before: u64,
    _one: MutexGuard<'static, ()>,
}

/// One at a time: they share the kernel's number of huge pages.
static ONE: Mutex<()> = Mutex::new(());

impl Pooled {
    /// A pool of this size in files of 16 MiB, zeroed; `None`, and said why, where there can be none.
    pub fn start(config: &str, mib: u64) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skip("root", "only root mounts file systems and reserves huge pages");
            return None;
        }
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match Host::default().pages(0) {
            Ok(pages) => pages.total,
            Err(error) => {
                skip("hugetlb", error);
                return None;
            }
        };
        let daemon = Daemon::start(config);
        let dir = daemon.dir().to_owned();
        let pooled = Self { daemon: Some(daemon), dir, before, _one: one };
        let daemon = pooled.daemon();
        until("the engine has the pool", || daemon.dir().join("pool.sock").exists());
        let request = PoolRequest { bytes: Some(mib * MIB), file_bytes: Some(16 * MIB), ..PoolRequest::default() };
        let pool = daemon.api.reserve_pool(&request).expect("reserve");
        if pool.nodes[0].reserved_bytes < mib * MIB {
            skip("memory", format!("{:?}", pool.notes));
            return None;
        }
        Some(pooled)
    }

    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it runs")
    }

    pub fn stat(&self) -> PoolStat {
        self.daemon().api.pool().expect("the pool")
    }

    /// Wait until all of it is zeroed and nobody's.
    pub fn settled(&self, mib: u64) {
        until("all of the pool is ready", || {
            self.stat().nodes.iter().map(|node| node.ready_bytes).sum::<u64>() == mib * MIB
        });
    }

    /// Huge pages of the host beyond what it had.
    pub fn pages(&self) -> u64 {
        Host::default().pages(0).expect("pages").total - self.before
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let mount = self.dir.join("pool").join(ballast_reserve::FILES);
        if mount.exists() {
            let _ = Command::new("umount").arg("--lazy").arg(mount).status();
        }
        drop(self.daemon.take());
        if let Err(error) = Host::default().set_pages(0, self.before) {
            eprintln!("Putting back the number of huge pages: {error}");
        }
    }
}
