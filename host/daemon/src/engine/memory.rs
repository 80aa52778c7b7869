//! Memory errors in pages of a VM's own files (its state file, its stores).
//!
//! Before: a thread touched a lost page, and the handler of `ballast_sys::memory_error` replaced it with safe bytes.
//! After: operators know the loss; if words or tables were lost, the VM was reopened, with recovery.
//! Threads: one waits for losses; the VM's worker handles them, in turn with its orders.
//! Promise: one VM's loss affects only that VM, and the engine stays.
//!
//! To *reopen* a VM is what follows an engine's death, for one VM. All its workers end, so that no page is locked;
//! `recover` reads each word, and pages in their file count as resident; the stores sweep objects that no word names;
//! workers begin again, and each waiting thread is woken. While workers run, nothing can be repaired: a lost word may
//! have been locked, and the holder of the lock writes it again.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::Context;
use ballast_base::store::FILE_STORE;
use ballast_handover::orders::Report;
use ballast_pager::vm::far::stores::SlowTier;
use ballast_pager::vm::region_table::LOST;
use ballast_pager::vm::{Hold, Vm};
use ballast_sys::lock::Lock;
use rustix::event::{PollFd, PollFlags, poll};

use super::late;
use super::served::Served;
use super::shared::{Engine, Unlists, mend};
use super::unopened::may_pass;
use super::workers::Workers;

pub(super) fn start(engine: &Arc<Engine>, workers: &Arc<Mutex<Workers>>, errors_seen: OwnedFd) -> io::Result<()> {
    let (engine, workers) = (engine.clone(), workers.clone());
    std::thread::Builder::new().name("memory".into()).spawn(move || {
        loop {
            match poll(&mut [PollFd::new(&errors_seen, PollFlags::IN)], None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return tracing::error!("Waiting for memory errors: {error}"),
            }
            let _ = rustix::io::read(&errors_seen, &mut [0; 8]);
            for served in engine.host.all() {
                if !say(&served) {
                    continue;
                }
                let (id, engine) = (served.vm.state.id(), engine.clone());
                let given = workers.locked().give(id, move || {
                    if let Some(served) = engine.host.by_id(id) {
                        engine.reopen(&served);
                    }
                });
                if let Err(error) = given {
                    served
                        .vm
                        .fail_stop(&format!("memory of the host failed, and the VM cannot be opened again: {error}"));
                }
            }
        }
    })?;
    Ok(())
}

/// Reports the losses of this VM's files. Returns whether it must be reopened.
fn say(served: &Served) -> bool {
    let state = served.vm.losses();
    let (ram, ram_damaged) = served.store.losses();
    let (file, file_damaged) = served.file.opened().map(|file| file.losses()).unwrap_or_default();
    let reopens = served.vm.lost() > 0 || ram_damaged || file_damaged || served.is_damaged.load(Ordering::Acquire);
    // A group's losses need no action: each member finds its own when it touches the pages.
    let group = served.group.iter().flat_map(|member| member.group().losses());
    for what in state.into_iter().chain(ram).chain(group).chain(file) {
        served.vm.report("memory-error", format!("memory of the host failed, and with it was lost: {what}"));
    }
    reopens
}

impl Engine {
    fn reopen(&self, served: &Arc<Served>) {
        if served.vm.is_stopping() || served.vm.state.leaving().is_some() {
            // Nothing can be repaired while another engine serves the VM's faults. The engine that has the VM alone in
            // the end repairs it.
            if served.is_damaged.swap(true, Ordering::AcqRel) {
                return;
            }
            let text = "the VM is recovered when one engine has it alone: two have it at this moment";
            return served.vm.report("memory-error", text.into());
        }
        let begun = Instant::now();
        match self.try_reopen(served) {
            Ok(()) => {
                let took = begun.elapsed().as_secs_f64() * 1e3;
                let text = format!("after the loss it was recovered; its faults waited {took:.1} ms");
                served.vm.report("memory-mended", text);
            }
            Err(error) => {
                let reason = format!("memory of the host failed, and the VM cannot be opened again: {error:#}");
                served.vm.report("memory-error", reason.clone());
                // The report has the keeper give this engine the VM again.
                if !may_pass(error.as_ref()) || self.report(&Report::Lost(served.vm.state.id())).is_err() {
                    served.vm.fail_stop(&reason);
                }
            }
        }
    }

    fn try_reopen(&self, last: &Arc<Served>) -> anyhow::Result<()> {
        let listed = last.vm.state.list_thread();
        last.stop();
        let state = self.open_again(&last.vm.state)?;
        let epoch = state.take_over(self.me.pid, self.me.start, LOST).context("Taking the state file over")?;
        // The list of threads may have been lost. This thread is the only one that works for the VM now.
        drop(listed);
        state.unlist_thread();
        std::mem::forget(state.list_thread());
        // The file store is recovered on a thread of its own, because its disk may not respond.
        let (recovery, mut stores) = (last.file.recovers(), last.vm.stores.clone());
        if let Some(recovery) = &recovery {
            stores = stores.with(SlowTier::new(FILE_STORE, "file store", recovery.store.clone()));
        }
        let vm = Vm::new(state, epoch, stores, last.vm.tuning, last.vm.reporter()).with_pins(self.host.pins.clone());
        let vm = Arc::new(vm);
        let _unlists = Unlists(&vm);
        let served = self.recover(last, &vm, recovery).inspect_err(|_| vm.stop())?;
        self.mapper_scan.send(served).context("Requesting a scan for foreign mappers")
    }

    /// Replaces the last opening of the VM by the reopened one, and serves the VM's processes from it.
    fn recover(
        &self,
        last: &Arc<Served>,
        vm: &Arc<Vm>,
        recovery: Option<late::Recovery>,
    ) -> anyhow::Result<Arc<Served>> {
        for region in last.vm.regions() {
            vm.open_region(region.files())?;
        }
        mend(vm)?;
        if let Some(recovery) = recovery {
            recovery.begin(self.open_again(&vm.state)?, vm.reporter()).context("Starting to recover its file store")?;
        }
        vm.take_after(&last.vm);
        vm.start().context("Starting its threads")?;
        let served = Arc::new(Served::new(
            vm.clone(),
            last.store.clone(),
            last.group.clone(),
            last.file.clone(),
            last.vmm.clone(),
        ));
        served.take_after(last);
        // Until a scan has examined all of its processes: processes that are not added yet may have pages mapped.
        served.hold_unchecked();
        for place in self.host.vms.write().expect("no panic while held").iter_mut() {
            if Arc::ptr_eq(place, last) {
                *place = served.clone();
            }
        }
        for view in last.vm.views() {
            served.vm.add_view(view, &[]).context("Serving a process again")?;
        }
        // The caller of the earlier restore was told that it failed, or that it was done.
        for kind in [Hold::Pinned, Hold::Shared, Hold::Kept] {
            if served.vm.is_held_for(kind) {
                served.restore(kind, served.vm.reason(kind), |_| ())?;
            }
        }
        Ok(served)
    }
}
