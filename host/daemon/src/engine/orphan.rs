//! An engine whose keeper is gone: it serves faults until the next keeper ends it, or until no VM is left.
//!
//! Before: the socket to the keeper was closed. After: this process is killed, or has closed its last VM and ends.
//! Threads: the one that took orders; VMs are closed by their workers.
//! Promise: a VM is closed only when its processes are gone. If an upgrade left a VM with two engines, one of them
//! closes it.

use std::sync::Arc;
use std::time::Duration;

use ballast_pager::vm::view::View;
use ballast_pager::vm::{Hold, Vm};
use ballast_sys::lock::Lock;
use ballast_sys::process::Process;

use super::Orders;
use super::served::Served;

const POLLS_EVERY: Duration = Duration::from_millis(200);

/// Whether this process is gone. If the engine only serves the VM's faults, no thread listens to the client.
fn is_gone(vm: &Vm, view: &View) -> bool {
    view.peer().is_disconnected() || vm.is_stopping() && matches!(Process::find(view.pid), Ok(None))
}

impl Orders {
    /// Whether the processes of this VM are gone. The keeper may have died before it told this engine about them; then
    /// no process may hold its RAM.
    fn are_gone(&self, served: &Served) -> bool {
        match &served.vm.views()[..] {
            [] => !self.engine.is_held(served),
            views => views.iter().all(|view| is_gone(&served.vm, view)),
        }
    }

    /// The keeper died during an upgrade. If another engine serves a VM, too, this engine closes the VM if the other
    /// one serves each process of it, or if no process is left. Otherwise this engine continues to serve it.
    ///
    /// `all_done`: each order was carried out. No keeper names engines at this time: it would need a process of the VM,
    /// and it ends this engine first.
    fn leave(&self, served: &Arc<Served>, all_done: bool) {
        let state = &served.vm.state;
        let (me, other) = (self.engine.me, state.engine().map(|(pid, start)| Process { pid, start }));
        let (is_followed, leaves) = (state.is_followed(), state.leaving() == Some((me.pid, me.start)));
        let is_over = || is_followed || all_done && self.are_gone(served);
        if !leaves || !is_over() {
            return;
        }
        let has_opened = state.epoch() > served.vm.epoch();
        if !is_followed && (!has_opened || other.is_none_or(Process::is_dying)) {
            // The VM is closed here, as if no engine had been about to follow.
            return state.name_engine(me.pid, me.start);
        }
        let (engine, id, served) = (self.engine.clone(), state.id(), served.clone());
        let part = move || {
            drop(engine.part_with_vm(id));
            // The other engine closes the VM when it is alone.
            served.vm.state.has_left();
        };
        if let Err(error) = self.workers.locked().give_last(id, part) {
            tracing::error!("Closing VM {id}: {error}");
        }
    }

    pub(super) fn serve_as_orphan(&mut self) {
        tracing::error!("the keeper is gone: serving faults, reclaiming nothing, until another one comes");
        let (host, events) = (self.engine.host.clone(), self.engine.events.clone());
        events.add(None, "keeper-gone", "the keeper is gone; reclaim is paused until ballastd runs again".into());
        // The keeper may have died during an upgrade.
        self.begin_rest();
        self.gate.open();
        if self.api.is_some()
            && !host.all().is_empty()
            && let Err(error) = self.serve()
        {
            tracing::error!("Answering the API: {error:#}");
        }
        // Some VMs may not be open yet. The next keeper finds this engine in their state files.
        let mut done = self.workers.locked().all_so_far();
        loop {
            let is_over = done.is_over();
            self.engine.record_parted();
            let vms = host.all();
            if is_over && vms.is_empty() {
                tracing::info!("no VM is left: ending");
                return;
            }
            for served in vms {
                served.vm.hold(Hold::Orphaned, Some("ballastd is not running".into()));
                self.leave(&served, is_over);
                let leaving = served.vm.state.leaving().map(|(pid, start)| Process { pid, start });
                if is_over && leaving.is_none_or(Process::is_dying) && self.are_gone(&served) {
                    let id = served.vm.state.id();
                    if let Err(error) = self.close(id, None) {
                        tracing::error!("Closing VM {id}: {error}");
                    }
                    done = self.workers.locked().all_so_far();
                }
            }
            // It rested for an upgrade that was abandoned: no other engine has any of its VMs.
            if !host.adopted.works() && host.all().iter().all(|served| served.vm.state.leaving().is_none()) {
                host.adopted.resume();
            }
            std::thread::sleep(POLLS_EVERY);
        }
    }
}
