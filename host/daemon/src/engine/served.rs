//! A VM that the engine serves, with its processes and the work beside its workers.
//!
//! Before: the keeper handed the VM over. After: orders, the scan for foreign mappers, the governor and the API find
//! everything about it here. Threads: any; locks are held briefly.
//! Promise: reclaim is held until the end of a scan for foreign mappers that began after the last change.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use ballast_api::VmStat;
use ballast_base::Bytes;
use ballast_pager::vm::stats::Counter;
use ballast_pager::vm::{Hold, Vm};
use ballast_store::{GroupMember, RamStore, Store};
use ballast_sys::lock::Lock;

use super::late;
use super::workers::Jobs;

/// The smallest limit: below it, a guest cannot even keep its kernel resident.
pub const SMALLEST_LIMIT: Bytes = Bytes(ballast_base::MIB);

pub const KEPT: &str = "an operator wants all of it in memory (`ballast vm restore NAME --end` ends that)";

#[derive(Debug)]
pub struct Served {
    pub vm: Arc<Vm>,
    /// Its RAM store, for pages that other stores do not have.
    pub store: Arc<RamStore>,
    pub group: Option<Arc<GroupMember>>,
    pub file: late::File,
    pub vmm: String,
    pub jobs: Jobs,
    /// Words or tables were lost while another engine had the VM, too: it must be reopened.
    pub is_damaged: AtomicBool,
    pids: Mutex<HashSet<u32>>,
    /// Its processes that are not served everywhere they map its RAM, each with the reason.
    unserved: Mutex<HashMap<u32, String>>,
    /// Each thread that restores all of its pages has a clone.
    restoring: Arc<()>,
    /// Scans for foreign mappers that were requested: the hold ends with a scan that began after the last request.
    scans_requested: Mutex<u64>,
}

impl Served {
    pub fn new(
        vm: Arc<Vm>,
        store: Arc<RamStore>,
        group: Option<Arc<GroupMember>>,
        file: late::File,
        vmm: String,
    ) -> Self {
        let (is_damaged, pids, unserved, restoring, scans_requested) = Default::default();
        Self {
            vm,
            store,
            group,
            file,
            vmm,
            jobs: Jobs::default(),
            is_damaged,
            pids,
            unserved,
            restoring,
            scans_requested,
        }
    }

    /// RAM that its far pages occupy; of pages that its group stores once, its share.
    pub fn store_bytes(&self) -> u64 {
        self.store.usage().bytes + self.group.as_ref().map_or(0, |group| group.usage().bytes)
    }

    /// Ends all work for the VM, except the serving of its faults. Blocks; may wait for a disk or a cluster.
    pub fn end_work(&self) {
        self.vm.serve_faults_only();
        self.jobs.close();
    }

    /// Ends all work for the VM. Its faults are served until nothing that may wait is left.
    pub fn stop(&self) {
        self.end_work();
        self.vm.stop();
        self.settle();
    }

    /// Does deferred work of the VM's near stores. The VM must be stopped: another thread may still hold it when its
    /// arenas have been opened again, and then nothing may be done. Does not wait for a disk: recovery finds a file
    /// store's deferred work.
    pub fn settle(&self) {
        self.vm.stores.near().iter().for_each(|tier| tier.store.tidy());
    }

    /// From now on, only serves the VM's faults, from all stores.
    ///
    /// Nothing is put into any store from then on. Fails if an operation is in progress that only recovery could
    /// complete (a late write, a file that is being opened and swept): then the VM moves without a time in which two
    /// engines serve its faults.
    pub fn serve_faults_only(&self) -> io::Result<()> {
        let stores = &self.vm.stores;
        if let Some(why) = self.unserved() {
            return Err(io::Error::other(why));
        }
        let finished = || match stores.slow().iter().find(|tier| tier.store.must_recover()) {
            Some(tier) => Err(io::Error::other(format!("something is under way in the {}", tier.name))),
            None => Ok(()),
        };
        finished()?;
        if let Some(group) = &self.group {
            group.part();
        }
        self.end_work();
        // Work that was deferred until now is done. Work that later faults defer is done when the VM is closed.
        stores.first().store.tidy();
        // The last spill may have given up waiting.
        finished()
    }

    /// Holds reclaim until a scan for foreign mappers. The caller then requests that scan.
    pub fn hold_unchecked(&self) {
        let mut asked = self.scans_requested.locked();
        *asked += 1;
        self.vm.hold(Hold::Unchecked, Some(VmStat::UNCHECKED.into()));
    }

    pub fn asked(&self) -> u64 {
        *self.scans_requested.locked()
    }

    /// A scan is done; `asked` scans had been requested when it began.
    pub fn checked(&self, asked: u64) {
        let now = self.scans_requested.locked();
        if *now == asked {
            self.vm.hold(Hold::Unchecked, None);
        }
    }

    /// Holds reclaim at once, and restores each page on a thread of its own, which then reports the result.
    pub fn restore(
        &self,
        kind: Hold,
        reason: String,
        then: impl FnOnce(io::Result<()>) + Send + 'static,
    ) -> io::Result<()> {
        self.vm.hold(kind, Some(reason));
        let releases = self.vm.releases();
        self.bring_back(move |vm, result| {
            // A restore that ended because nothing held the VM has not failed, even if the VM is held again.
            if let Err(error) = &result
                && vm.held().is_some()
                && vm.releases() == releases
            {
                vm.report("restore-failed", format!("Restoring its pages: {error}"));
            }
            then(result);
        })
    }

    /// Restores far pages of a held VM, unless a thread does: the thread may have been missing, or met an error.
    pub fn restore_rest(&self) -> io::Result<()> {
        if self.vm.stats().get(Counter::Far) == 0 || Arc::strong_count(&self.restoring) > 1 {
            return Ok(());
        }
        self.bring_back(|vm, result| {
            if let Err(error) = result {
                tracing::warn!(vm = vm.state.name(), "Restoring its pages again: {error}");
            }
        })
    }

    /// Starts a thread that restores all of the VM's pages, and then calls `then`.
    fn bring_back(&self, then: impl FnOnce(&Vm, io::Result<()>) + Send + 'static) -> io::Result<()> {
        let (vm, under_way) = (self.vm.clone(), self.restoring.clone());
        self.jobs.begin("restore", move || {
            let _listed = vm.state.list_thread();
            let result = vm.restore();
            drop(under_way);
            then(&vm, result);
        })
    }

    pub fn pids(&self) -> Vec<u32> {
        self.pids.locked().iter().copied().collect()
    }

    pub fn add_pid(&self, pid: u32) {
        self.pids.locked().insert(pid);
    }

    /// Why some attached process counts as not attached; `None` if none does.
    pub fn unserved(&self) -> Option<String> {
        self.unserved.locked().values().next().cloned()
    }

    pub fn unserved_of(&self, pid: u32) -> Option<String> {
        self.unserved.locked().get(&pid).cloned()
    }

    pub fn set_unserved(&self, pid: u32, reason: String) {
        self.unserved.locked().insert(pid, reason);
    }

    /// Like `set_unserved`, and holds the VM with each page restored, because such a process may read zeros where pages
    /// are far. Fails if no thread could be started; the VM is still held.
    pub fn hold_unserved(&self, pid: u32, reason: String) -> io::Result<()> {
        self.set_unserved(pid, reason.clone());
        self.restore(Hold::Shared, reason, |_| ())
    }

    /// Ends a hold of this kind, and returns whether it is ended: `Shared` stays while some process is not served. A
    /// thread that notes an unserved process holds the VM afterwards, so either it or this call sees the other's
    /// change.
    pub fn release(&self, kind: Hold) -> bool {
        let unserved = self.unserved.locked();
        let is_released = kind != Hold::Shared || unserved.is_empty();
        if is_released {
            self.vm.hold(kind, None);
        }
        is_released
    }

    /// Takes over what an earlier opening of the VM knew of its processes.
    pub fn take_after(&self, last: &Self) {
        *self.unserved.locked() = last.unserved.locked().clone();
        let pids = last.pids().into_iter().collect();
        *self.pids.locked() = pids;
    }

    pub fn forget_pid(&self, pid: u32) {
        self.pids.locked().remove(&pid);
        self.unserved.locked().remove(&pid);
    }
}
