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
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ballast_base::store::IoContext;
use ballast_base::wire::VmId;
use ballast_sys::clock;
use ballast_sys::lock::Lock;

use crate::cluster::Cluster;
use crate::name;
use crate::request::{self, Found, Verb};
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

#[derive(Debug)]
struct Renewal {
    /// Time since the host started, of the renewal; or of the object's creation if there was none.
    at: Duration,
    was_done: bool,
}

impl Renewal {
    /// Time since the renewal, with the time that the host was suspended.
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
        self.renewal.locked()
    }

    /// Ensures that the lease exists and lasts for nearly its full duration.
    ///
    /// # Errors
    /// The reason why the cluster does not store it.
    pub fn ensure(&self, cluster: &Cluster) -> io::Result<()> {
        let mut renewal = self.renewal();
        if renewal.was_done && renewal.age() < self.lasts / 10 {
            return Ok(());
        }
        // The server counts from the time at which it executes the command, and its reply may be read much later.
        let at = clock::boot_time();
        let key = name::lease(self.vm);
        let ms = self.lasts.as_millis().to_string();
        // A node that is out of memory refuses the first command and executes the second.
        let mut asks = Commands::one(&[b"SET", &key, b"1", b"PX", ms.as_bytes()]);
        asks.add(&[b"PEXPIRE", &key, ms.as_bytes()]);
        at_owner(cluster, &key, &asks, |replies| match replies.get(0).error() {
            Some(_) if replies.get(1).int() == Some(1) => Ok(()),
            Some(error) => Err(io::Error::other(error)),
            None => Ok(()),
        })
        .map_err(|error| io::Error::other(format!("its lease: {error}")))?;
        *renewal = Renewal { at, was_done: true };
        Ok(())
    }

    /// Checks that a lease that [`Lease::ensure`] left at this time since the host started has not run out since. The
    /// process may have been stopped, and another host may have removed the stored pages meanwhile.
    ///
    /// # Errors
    /// The lease may have run out.
    pub fn has_lasted(&self, since: Duration) -> io::Result<()> {
        let passed = clock::boot_time().saturating_sub(since);
        if passed < self.lasts / 2 { Ok(()) } else { Err(io::Error::other("its lease may have run out meanwhile")) }
    }

    /// Returns the time without a renewal, if that is half of the lease or more.
    pub fn overdue(&self) -> Option<Duration> {
        Some(self.renewal().age()).filter(|age| *age >= self.lasts / 2)
    }
}

/// Sends commands to the owner of a key. After an error or a redirection, it refreshes the map and tries once more.
fn at_owner<T>(
    cluster: &Cluster,
    key: &[u8],
    asks: &Commands,
    read: impl Fn(&Replies<'_>) -> io::Result<T>,
) -> io::Result<T> {
    let mut last = io::Error::other("no node has its slot");
    for _ in 0..2 {
        let context = IoContext::BACKGROUND.until(Instant::now() + TIMEOUT);
        let asked = cluster.owner(slot_of(key), IoContext::BACKGROUND).and_then(|addr| {
            cluster.with(&addr, context, |link| {
                let replies = link.ask(asks, context)?;
                read(&replies).map_err(|error| io::Error::other(format!("{addr} says: {error}")))
            })
        });
        match asked {
            Ok(said) => return Ok(said),
            Err(error) => last = error,
        }
        cluster.refresh(IoContext::BACKGROUND);
    }
    Err(last)
}

/// Returns whether a node that accepts writes says that the VM has no lease.
fn is_without(cluster: &Cluster, vm: VmId) -> bool {
    let key = name::lease(vm);
    // A write that changes nothing: it sets a key that exists to its own value and keeps its expiry.
    let asks = Commands::one(&[b"SET", &key, b"1", b"XX", b"KEEPTTL"]);
    let is_nil = at_owner(cluster, &key, &asks, |replies| {
        let said = replies.get(0);
        said.error().map_or(Ok(said.is_nil()), |error| Err(io::Error::other(error)))
    });
    is_nil.unwrap_or(false)
}

#[derive(Debug)]
struct Removal {
    /// The VMs, and how many pages of each were removed.
    vms: HashMap<VmId, u64>,
    scan: Scan,
}

impl Removal {
    fn of(vms: HashMap<VmId, u64>) -> Self {
        let mut all = vms.keys();
        let pattern = match (all.next(), all.next()) {
            (Some(vm), None) => name::pattern(*vm),
            _ => name::EVERY_PAGE.to_vec(),
        };
        Self { vms, scan: Scan::new(pattern) }
    }

    /// Removes some pages, of VMs that are still gone. Returns whether the scan was at its end.
    fn step(&mut self, cluster: &Cluster, is_gone: &dyn Fn(VmId) -> bool) -> io::Result<bool> {
        let Some(keys) = self.scan.step(cluster)? else { return Ok(true) };
        let mut of: HashMap<VmId, Vec<Vec<u8>>> = HashMap::new();
        for key in keys {
            let Some((page, _)) = name::parse(&key) else { continue };
            let vm = page.region.vm;
            if self.vms.contains_key(&vm) {
                of.entry(vm).or_default().push(key);
            }
        }
        for (vm, keys) in of {
            if !is_gone(vm) {
                // A VM of which pages were removed is reported.
                self.vms.retain(|other, pages| *other != vm || *pages > 0);
                continue;
            }
            match sweep::unlink(cluster, keys) {
                Ok(gone) => *self.vms.entry(vm).or_default() += gone,
                Err(error) => {
                    self.scan.again();
                    return Err(error);
                }
            }
        }
        Ok(false)
    }
}

/// Removes the leases and the pages of VMs that ended. VMs that end during a scan are left to the next scan.
#[derive(Debug, Default)]
pub struct Ended {
    waiting: HashMap<VmId, u64>,
    /// VMs of the scan under way whose lease is still there.
    leases: Vec<VmId>,
    under_way: Option<Removal>,
}

impl Ended {
    /// Adds a VM that has ended and does not come back.
    pub fn add(&mut self, vm: VmId) {
        self.waiting.insert(vm, 0);
    }

    /// Returns whether no VM waits for its removal, and no scan is under way.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.under_way.is_none()
    }

    /// Does the next step. Returns the VMs that no longer have a page in the cluster, and how many pages each had.
    ///
    /// # Errors
    /// A node does not respond: a later call repeats the step.
    pub fn step(&mut self, cluster: &Cluster) -> io::Result<Vec<(VmId, u64)>> {
        if self.under_way.is_none() && !self.waiting.is_empty() {
            let vms = std::mem::take(&mut self.waiting);
            self.leases = vms.keys().copied().collect();
            self.under_way = Some(Removal::of(vms));
        }
        let Some(removal) = &mut self.under_way else { return Ok(Vec::new()) };
        if let Some(vm) = self.leases.pop() {
            // A lease that cannot be removed runs out.
            let _ = request::run(
                cluster,
                Verb::Unlink,
                &[name::lease(vm)],
                &mut |_, _: Found<'_>| (),
                IoContext::BACKGROUND,
            );
            return Ok(Vec::new());
        }
        let is_over = removal.step(cluster, &|_| true)?;
        Ok(self.under_way.take_if(|_| is_over).map_or_else(Vec::new, |removal| removal.vms.into_iter().collect()))
    }
}

/// Finds VMs without a lease.
#[derive(Debug, Default)]
pub struct Leaseless {
    /// Time since which each VM is known to have no lease.
    without: HashMap<VmId, Instant>,
    /// The scan of the leases: whether each VM found so far has none.
    look: Option<(HashMap<VmId, bool>, Scan)>,
    removal: Option<Removal>,
}

impl Leaseless {
    /// Scans all keys of the cluster, and removes pages of VMs that had no lease `lasts` ago and have none now. VMs for
    /// which `is_here` is true keep theirs. Returns the VMs that lost pages, with their number. `between` is called
    /// between any two steps.
    ///
    /// # Errors
    /// The cluster does not respond; the next call continues there.
    pub fn sweep(
        &mut self,
        cluster: &Cluster,
        lasts: Duration,
        is_here: &dyn Fn(VmId) -> bool,
        between: &mut dyn FnMut(),
    ) -> io::Result<Vec<(VmId, u64)>> {
        let is_gone = |vm| !is_here(vm) && is_without(cluster, vm);
        if self.removal.is_none() {
            let (found, scan) = self.look.get_or_insert_with(|| (HashMap::new(), Scan::new(name::EVERY_PAGE.to_vec())));
            while let Some(keys) = scan.step(cluster)? {
                for (page, _) in keys.iter().filter_map(|key| name::parse(key)) {
                    let vm = page.region.vm;
                    found.entry(vm).or_insert_with(|| is_gone(vm));
                }
                between();
            }
            let (found, now) = (std::mem::take(found), Instant::now());
            self.look = None;
            self.without.retain(|vm, _| found.get(vm) == Some(&true));
            let mut gone = HashMap::new();
            for vm in found.into_iter().filter(|(_, without)| *without).map(|(vm, _)| vm) {
                let since = *self.without.entry(vm).or_insert(now);
                if now - since >= lasts {
                    self.without.remove(&vm);
                    gone.insert(vm, 0);
                }
            }
            if gone.is_empty() {
                return Ok(Vec::new());
            }
            self.removal = Some(Removal::of(gone));
        }
        let Some(removal) = &mut self.removal else { return Ok(Vec::new()) };
        // The scan took its time, and so does the removal: each step asks for the lease again.
        while !removal.step(cluster, &is_gone)? {
            between();
        }
        let gone = self.removal.take().map_or_else(HashMap::new, |removal| removal.vms);
        Ok(gone.into_iter().filter(|(_, pages)| *pages > 0).collect())
    }
}
