//! Resume: a VM that existed before this keeper, or before its attach socket was cut, is attached again.
//!
//! Before: a process brought the VM's state file and stores back (`attach`). After: the engine has the VM. If some of
//! its regions are missing, the engine gets it when a process brings them, or when they are given up (`lost`).
//! Threads: the keeper's one; `lost` searches on a thread of its own.
//! Promise: no engine gets the VM while the engine that served it last can still change it, and that engine is not
//! ended before ours serves. A region that a process may still map is not given up before `LONGEST_WAIT` is over.

use std::os::fd::AsFd;
use std::time::Instant;

use anyhow::{Context, bail};
use ballast_base::store::{GROUP_STORE, RAM_STORE};
use ballast_base::wire::{Attach, MAX_NAME, VmId};
use ballast_handover::arena;
use ballast_handover::state_file::StateFile;
use ballast_sys::process::Process;

use crate::admit::Escrow;
use crate::engine::Who;
use crate::fence;
use crate::keeper::Keeper;
use crate::lost::{LONGEST_WAIT, Search};
use crate::place::Place;
use crate::regions::Held;
use crate::vms::Vm;

impl Keeper {
    /// Takes back a VM whose keeper died, or whose attach socket was cut. The engine of an earlier keeper may be
    /// serving it, or be about to open it: it is killed here, and [`Keeper::hand_over`] waits until all of it is gone.
    /// Our own engine was told to close the VM before, and carries out the orders about a VM in turn.
    pub(crate) fn resume(&mut self, attach: &Attach, Escrow { state, stores }: Escrow, uid: u32) -> anyhow::Result<Vm> {
        let state = state.as_fd().try_clone_to_owned().context("Duplicating a descriptor")?;
        let state = StateFile::open(state)?;
        if Some(state.id()) != attach.resume {
            bail!("the state file is another VM's");
        }
        // If no engine of ours could open a store, the VM stays with the engine that can. (An index is opened to find
        // its file.)
        for files in &stores {
            let layout = match files.store() {
                RAM_STORE => &arena::RAM,
                GROUP_STORE => &arena::GROUP,
                _ => continue,
            };
            for arena in files.iter() {
                arena::inspect(layout, arena.as_fd())?;
            }
        }
        let named = state.engine().map(|(pid, start)| Process { pid, start });
        let leaving = state.leaving().map(|(pid, start)| Process { pid, start });
        // If an engine of ours has the VM, it closes the VM after its earlier orders, and opens it again.
        let next = self.engines.process(Who::Next);
        let who = if named.is_some() && named == next { Who::Next } else { Who::Engine };
        let ours = self.engines.ours();
        for Process { pid, start } in named.into_iter().chain(leaving).filter(|process| !ours.contains(process)) {
            let killed = fence::kill(Process { pid, start })
                .with_context(|| format!("Ending the engine of the last keeper, process {pid}"))?;
            if let Some(pidfd) = killed {
                tracing::warn!(pid, "ended the engine that the last keeper left behind");
                self.engines.await_end(pidfd);
            }
        }
        let name = state.name();
        if self.vms.has_name(&name) {
            // Its guest waits for its memory, so the VM gets another name, which can be corrected later.
            let free = free_name(&name, |name| self.vms.has_name(name));
            state.rename(&free);
            self.note(
                free.clone(),
                "renamed",
                format!("VM {name} ({}) is called {free} from now on: another VM took its name meanwhile", state.id()),
            );
        }
        let held = Held::new(state, stores, attach.vmm.clone(), uid)?;
        Ok(Vm { held, place: Place::with(who) })
    }

    /// Why this VM may not return yet: an earlier keeper's engine serves it, and ours does not serve yet. If ours never
    /// does, the earlier engine continues, also for VMs that have not returned.
    pub(crate) fn must_wait_for_engine(&self, escrow: &Escrow) -> Option<String> {
        if self.engines.serves() {
            return None;
        }
        let state = StateFile::open(escrow.state.as_fd().try_clone_to_owned().ok()?).ok()?;
        let mut engines = state.engine().into_iter().chain(state.leaving()).map(|(pid, start)| Process { pid, start });
        let ours = self.engines.ours();
        let is_there = |engine: Process| Process::find(engine.pid).is_ok_and(|found| found == Some(engine));
        if !engines.any(|engine| !ours.contains(&engine) && !engine.is_dying() && is_there(engine)) {
            return None;
        }
        Some("the engine of the last keeper serves it, and the one of this keeper does not serve yet".into())
    }

    /// Hands a VM to the engine, or begins to search for the regions that no process has brought.
    pub(crate) fn search_or_hand_over(&mut self, id: VmId) {
        let Some(vm) = self.vms.get_mut(id) else { return };
        let missing = vm.held.missing_files();
        if missing.is_empty() {
            return self.hand_over(id, None);
        }
        let (name, count) = (vm.name(), vm.held.missing().len());
        vm.place.begin_search(Search::begin(missing));
        let message = format!(
            "VM {name} resumed without {count} of its regions; it is served when a process brings them, or no process \
             maps them, or after {LONGEST_WAIT:?}"
        );
        self.note(name, "region-missing", message);
    }

    /// Continues with VMs that wait for regions. Returns whether there are any.
    pub(crate) fn tend_vms(&mut self, now: Instant) -> bool {
        for id in self.vms.remember(now) {
            self.forget_removed(id);
        }
        for id in self.vms.which(|vm| vm.place.is_searched()) {
            self.tend_vm(id);
        }
        self.vms.iter().any(|vm| vm.place.is_searched())
    }

    pub(crate) fn tend_vm(&mut self, id: VmId) {
        let Some(vm) = self.vms.get_mut(id) else { return };
        let Some(lost) = vm.end_search() else { return };
        if let Some(message) = lost {
            let name = vm.name();
            self.note(name, "region-lost", message);
        }
        self.hand_over(id, None);
    }
}

fn free_name(name: &str, is_taken: impl Fn(&str) -> bool) -> String {
    let named = |number: u64| {
        let suffix = format!("-{number}");
        let mut end = name.len().min(MAX_NAME - suffix.len());
        while !name.is_char_boundary(end) {
            end -= 1;
        }
        format!("{}{suffix}", &name[..end])
    };
    (2..).map(named).find(|name| !is_taken(name)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use ballast_base::wire;

    use super::*;

    #[test]
    fn a_free_name_is_a_name_and_free() {
        let taken = ["web", "web-2"];
        assert_eq!(free_name("web", |name| taken.contains(&name)), "web-3");
        let long = "x".repeat(MAX_NAME);
        let free = free_name(&long, |_| false);
        assert!(wire::check_name(&free).is_ok() && free != long, "{free}");
    }
}
