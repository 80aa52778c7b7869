//! Leases: they name the VMs that exist. A VM's pages stay in the cluster as long as its lease does.
//!
//! Before: a VM is about to put pages into the cluster. After: its engine renews the lease. When the VM or its host
//! ends, another host of the cluster removes its pages.
//! Threads: any. Units: time; the cluster's own clocks measure leases.
//! Promise: pages are removed only if two checks, one full lease time apart, found no lease. An engine renews the lease
//! ten times in that interval. It creates a lease again that was lost with the only node that had it.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;

use crate::cluster::Cluster;
use crate::name;
use crate::request::{self, Failed, Found, Verb};
use crate::resp::Commands;
use crate::slot::slot_of;
use crate::sweep::{self, Scan};

/// Default duration of a lease: a host may be without an engine for that long.
pub const LEASE: Duration = Duration::from_secs(24 * 3600);
const TIMEOUT: Duration = Duration::from_secs(2);

/// The lease of one VM.
#[derive(Debug)]
pub struct Lease {
    vm: VmId,
    lasts: Duration,
    renewed: Mutex<Option<Instant>>,
}

impl Lease {
    /// Creates a lease object. The cluster does not have the lease yet.
    pub fn new(vm: VmId, lasts: Duration) -> Self {
        Self { vm, lasts, renewed: Mutex::default() }
    }

    /// Ensures that the lease exists and lasts for nearly its full duration.
    ///
    /// # Errors
    /// The reason why the cluster does not store it.
    pub fn ensure(&self, cluster: &Cluster) -> Result<(), String> {
        let mut renewed = self.renewed.lock().unwrap_or_else(PoisonError::into_inner);
        if renewed.is_some_and(|at| at.elapsed() < self.lasts / 10) {
            return Ok(());
        }
        let key = name::lease(self.vm);
        let ms = self.lasts.as_millis().to_string();
        let asks = Commands::one(&[b"SET", &key, b"1", b"PX", ms.as_bytes()]);
        at_owner(cluster, &key, &asks).map_err(|error| format!("its lease: {error}"))?;
        *renewed = Some(Instant::now());
        Ok(())
    }
}

/// Sends commands to the owner of a key. After an error or a redirection, it refreshes the map and tries once more.
fn at_owner(cluster: &Cluster, key: &[u8], asks: &Commands) -> io::Result<Option<i64>> {
    let mut last = io::Error::other("no node has its slot");
    for _ in 0..2 {
        let until = Instant::now() + TIMEOUT;
        let asked = cluster.owner(slot_of(key)).and_then(|addr| {
            cluster.with(&addr, until, |link| {
                let replies = link.ask(asks, until)?;
                let said = replies.get(0);
                said.error().map_or(Ok(said.int()), |error| Err(io::Error::other(format!("{addr} says: {error}"))))
            })
        });
        match asked {
            Ok(said) => return Ok(said),
            Err(error) => last = error,
        }
        cluster.refresh();
    }
    Err(last)
}

/// Removes the lease and all pages of a VM that ended. Returns the number of pages.
///
/// # Errors
/// The cluster does not respond. The rest is removed when a host finds that there is no lease.
pub fn end(cluster: &Cluster, vm: VmId) -> io::Result<u64> {
    request::run(cluster, Verb::Unlink, &[name::lease(vm)], sweep::write_timeout, &mut |_, _: Found<'_>| ())
        .map_err(to_io)?;
    sweep_all(cluster, vm)
}

fn sweep_all(cluster: &Cluster, vm: VmId) -> io::Result<u64> {
    let (mut scan, mut gone) = (Scan::begin(cluster, name::pattern(vm))?, 0);
    while let Some(keys) = scan.step(cluster)? {
        gone += sweep::unlink(cluster, keys).map_err(to_io)?;
    }
    Ok(gone)
}

fn to_io(failed: Failed) -> io::Error {
    io::Error::other(failed.why)
}

/// Finds VMs without a lease.
#[derive(Debug, Default)]
pub struct Leaseless {
    /// Time since which each VM is known to have no lease.
    without: HashMap<VmId, Instant>,
}

impl Leaseless {
    /// Scans all keys of the cluster, and removes pages of VMs that had no lease `lasts` ago and have none now. Returns
    /// these VMs with the number of their pages.
    ///
    /// # Errors
    /// The cluster does not respond; the scan's memory of VMs is kept.
    pub fn sweep(&mut self, cluster: &Cluster, lasts: Duration) -> io::Result<Vec<(VmId, u64)>> {
        let mut scan = Scan::begin(cluster, name::EVERY_PAGE.to_vec())?;
        let mut leases: HashMap<VmId, bool> = HashMap::new();
        while let Some(keys) = scan.step(cluster)? {
            for (page, _) in keys.iter().filter_map(|key| name::parse(key)) {
                if let std::collections::hash_map::Entry::Vacant(vm) = leases.entry(page.region.vm) {
                    let key = name::lease(page.region.vm);
                    let there = at_owner(cluster, &key, &Commands::one(&[b"EXISTS", &key]))?;
                    vm.insert(there.ok_or_else(|| io::Error::other("no number of keys was said"))? != 0);
                }
            }
        }
        let now = Instant::now();
        self.without.retain(|vm, _| leases.get(vm) == Some(&false));
        let mut gone = Vec::new();
        for vm in leases.into_iter().filter(|(_, there)| !there).map(|(vm, _)| vm) {
            let since = *self.without.entry(vm).or_insert(now);
            if now - since >= lasts {
                gone.push((vm, sweep_all(cluster, vm)?));
                self.without.remove(&vm);
            }
        }
        Ok(gone)
    }
}
