//! Leases: they name the VMs that exist. A VM's pages stay in the cluster as long as its lease does.
//!
//! Before: a VM is about to put pages into the cluster. After: its engine renews the lease. When the VM or its host
//! ends, another host of the cluster removes its pages.
//! Threads: any. Units: time; the cluster's own clocks measure leases, and go on while this host is suspended.
//! Promise: pages are removed only if two checks, one full lease time apart, found no lease, and the node of the lease
//! accepted a write each time: an engine cannot renew a lease there while writes are refused. An engine renews the
//! lease ten times in that interval. It creates a lease again that was lost with the only node that had it.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_sys::clock;

use crate::cluster::Cluster;
use crate::name;
use crate::request::{self, Failed, Found, Verb};
use crate::resp::{Commands, Replies};
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
    renewal: Mutex<Renewal>,
}

/// The last renewal.
#[derive(Debug)]
struct Renewal {
    /// Its time since the host started; that of the object's creation if there was none.
    at: Duration,
    was_done: bool,
}

impl Renewal {
    /// Time since then, with the time that the host was suspended.
    fn age(&self) -> Duration {
        clock::boot_time().saturating_sub(self.at)
    }
}

impl Lease {
    /// Creates a lease object. The cluster does not have the lease yet.
    pub fn new(vm: VmId, lasts: Duration) -> Self {
        Self { vm, lasts, renewal: Mutex::new(Renewal { at: clock::boot_time(), was_done: false }) }
    }

    fn renewal(&self) -> MutexGuard<'_, Renewal> {
        self.renewal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ensures that the lease exists and lasts for nearly its full duration.
    ///
    /// # Errors
    /// The reason why the cluster does not store it.
    pub fn ensure(&self, cluster: &Cluster) -> Result<(), String> {
        let mut renewal = self.renewal();
        if renewal.was_done && renewal.age() < self.lasts / 10 {
            return Ok(());
        }
        let key = name::lease(self.vm);
        let ms = self.lasts.as_millis().to_string();
        // A node that is out of memory refuses the first and executes the second.
        let mut asks = Commands::one(&[b"SET", &key, b"1", b"PX", ms.as_bytes()]);
        asks.add(&[b"PEXPIRE", &key, ms.as_bytes()]);
        at_owner(cluster, &key, &asks, |replies| match replies.get(0).error() {
            Some(_) if replies.get(1).int() == Some(1) => Ok(()),
            Some(error) => Err(error),
            None => Ok(()),
        })
        .map_err(|error| format!("its lease: {error}"))?;
        *renewal = Renewal { at: clock::boot_time(), was_done: true };
        Ok(())
    }

    /// Returns for how long it has not been renewed, if that is half of its duration or more.
    pub fn overdue(&self) -> Option<Duration> {
        Some(self.renewal().age()).filter(|age| *age >= self.lasts / 2)
    }
}

/// Sends commands to the owner of a key. After an error or a redirection, it refreshes the map and tries once more.
fn at_owner<T>(
    cluster: &Cluster,
    key: &[u8],
    asks: &Commands,
    read: impl Fn(&Replies<'_>) -> Result<T, String>,
) -> io::Result<T> {
    let mut last = io::Error::other("no node has its slot");
    for _ in 0..2 {
        let until = Instant::now() + TIMEOUT;
        let asked = cluster.owner(slot_of(key)).and_then(|addr| {
            cluster.with(&addr, until, |link| {
                let replies = link.ask(asks, until)?;
                read(&replies).map_err(|error| io::Error::other(format!("{addr} says: {error}")))
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

/// Returns whether the VM has no lease, as a node says that accepts writes.
fn is_without(cluster: &Cluster, vm: VmId) -> bool {
    let key = name::lease(vm);
    // A write that changes nothing: it sets a key that exists to its own value, until the same time.
    let asks = Commands::one(&[b"SET", &key, b"1", b"XX", b"KEEPTTL"]);
    let is_nil = at_owner(cluster, &key, &asks, |replies| {
        let said = replies.get(0);
        said.error().map_or(Ok(said.is_nil()), Err)
    });
    is_nil.unwrap_or(false)
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
    /// these VMs with the number of their pages. `is_here` tells VMs that are never removed.
    ///
    /// # Errors
    /// The cluster does not respond; the scan's memory of VMs is kept.
    pub fn sweep(
        &mut self,
        cluster: &Cluster,
        lasts: Duration,
        is_here: &dyn Fn(VmId) -> bool,
    ) -> io::Result<Vec<(VmId, u64)>> {
        let mut scan = Scan::begin(cluster, name::EVERY_PAGE.to_vec())?;
        let mut found: HashMap<VmId, bool> = HashMap::new();
        while let Some(keys) = scan.step(cluster)? {
            for (page, _) in keys.iter().filter_map(|key| name::parse(key)) {
                let vm = page.region.vm;
                found.entry(vm).or_insert_with(|| !is_here(vm) && is_without(cluster, vm));
            }
        }
        let now = Instant::now();
        self.without.retain(|vm, _| found.get(vm) == Some(&true));
        let mut gone = Vec::new();
        for vm in found.into_iter().filter(|(_, without)| *without).map(|(vm, _)| vm) {
            let since = *self.without.entry(vm).or_insert(now);
            if now - since < lasts {
                continue;
            }
            self.without.remove(&vm);
            // The scan took its time.
            if !is_here(vm) && is_without(cluster, vm) {
                gone.push((vm, sweep_all(cluster, vm)?));
            }
        }
        Ok(gone)
    }
}
