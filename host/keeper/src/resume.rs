//! Resume: a VM that existed before this keeper, or before its attach socket was cut, is a VM again.
//!
//! Before: a process brought the VM's state file and stores back (`attach`). After: the engine has the VM. If no
//! process has brought some of its regions yet, it has it when one brings them, or when they are given up (`lost`).
//! Threads: the keeper's one; `lost` searches on a thread of its own.
//! Promise: no engine gets the VM before the one that may have been serving it can do nothing to it any more, and that
//! one is not ended before ours serves. A region that a process may still map is not given up before `LONGEST_WAIT` is
//! over.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ballast_base::store::{GROUP_STORE, RAM_STORE};
use ballast_base::wire::{Attach, MAX_NAME, VmId};
use ballast_handover::arena;
use ballast_handover::state_file::StateFile;
use ballast_sys::file_ranges::FileRanges;
use ballast_sys::memfd::FileId;
use ballast_sys::process::Process;

use crate::admit::Escrow;
use crate::engine::{Engine, PING_EVERY};
use crate::fence;
use crate::keeper::Keeper;
use crate::lost::{Found, LONGEST_WAIT, Search};
use crate::regions::{At, VmEntry};
use crate::waiting::Returning;

/// A VM that was told to come again comes sooner than this: a client tries each 200 ms.
const RETURNS_WITHIN: Duration = Duration::from_secs(10);

impl Keeper {
    /// A VM whose keeper died, or whose attach socket was cut. The engine of an earlier keeper may be serving it, or be
    /// about to open it: it is killed here, and [`Keeper::hand_over`] waits until all of it is gone. Our own engine was
    /// told to close the VM before this, and carries out the orders about a VM in turn.
    pub(crate) fn resume(
        &mut self,
        attach: &Attach,
        Escrow { state, stores }: Escrow,
        uid: u32,
    ) -> Result<VmEntry, String> {
        let state = state.as_fd().try_clone_to_owned().map_err(|error| format!("Duplicating a descriptor: {error}"))?;
        let state = StateFile::open(state).map_err(|error| error.to_string())?;
        if Some(state.id()) != attach.resume {
            return Err("the state file is another VM's".into());
        }
        // A store that no engine of ours can open stays with one that can. (An index was opened to find its file.)
        for files in &stores {
            let layout = match files.store() {
                RAM_STORE => &arena::RAM,
                GROUP_STORE => &arena::GROUP,
                _ => continue,
            };
            for arena in files.iter() {
                arena::inspect(layout, arena.as_fd()).map_err(|error| error.to_string())?;
            }
        }
        let named = state.engine().map(|(pid, start)| Process { pid, start });
        let leaving = state.leaving().map(|(pid, start)| Process { pid, start });
        // One of ours closes it, after its earlier orders; the same one opens it again.
        let next = self.upgrade.as_ref().filter(|upgrade| !upgrade.is_dead()).map(|upgrade| upgrade.next.process);
        let at = if named.is_some() && named == next { At::Next } else { At::Engine };
        let ours = self.ours();
        for Process { pid, start } in named.into_iter().chain(leaving).filter(|process| !ours.contains(process)) {
            let killed = fence::kill(Process { pid, start })
                .map_err(|error| format!("Ending the engine of the last keeper, process {pid}: {error}"))?;
            if let Some(pidfd) = killed {
                tracing::warn!(pid, "ended the engine that the last keeper left behind");
                self.dying.push(pidfd);
            }
        }
        let name = state.name();
        if self.has_name(&name) {
            // Its guest waits for its memory; its name can be mended later.
            let free = free_name(&name, |name| self.has_name(name));
            state.rename(&free);
            self.note(
                free.clone(),
                "renamed",
                format!("VM {name} ({}) is called {free} from now on: another VM took its name meanwhile", state.id()),
            );
        }
        let mut entry = VmEntry::new(state, stores, attach.vmm.clone(), uid, &self.closer)?;
        self.returning.retain(|returning| Some(returning.vm) != attach.resume);
        entry.at = at;
        Ok(entry)
    }

    /// Why this VM may not return yet: the engine that an earlier keeper left behind serves it, and ours does not. If
    /// ours never does, that one goes on, also for VMs that have not returned.
    pub(crate) fn must_wait_for_engine(&mut self, escrow: &Escrow, ram: &FileRanges) -> Option<String> {
        if self.engine.as_ref().is_some_and(Engine::serves) {
            return None;
        }
        let state = StateFile::open(escrow.state.as_fd().try_clone_to_owned().ok()?).ok()?;
        let mut engines = state.engine().into_iter().chain(state.leaving()).map(|(pid, start)| Process { pid, start });
        let ours = self.ours();
        let is_there = |engine: Process| Process::find(engine.pid).is_ok_and(|found| found == Some(engine));
        if !engines.any(|engine| !ours.contains(&engine) && !engine.is_dying() && is_there(engine)) {
            return None;
        }
        let (vm, now) = (state.id(), Instant::now());
        self.returning.retain(|returning| returning.vm != vm && returning.until > now);
        self.returning.push(Returning { vm, ram: ram.clone(), until: now + RETURNS_WITHIN });
        Some("the engine of the last keeper serves it, and the one of this keeper does not serve yet".into())
    }

    pub(crate) fn has_name(&self, name: &str) -> bool {
        self.vms.iter().any(|vm| vm.state.name() == name)
    }

    /// Hand a VM to the engine, or begin to look for the regions that no process has brought.
    pub(crate) fn search_or_hand_over(&mut self, id: VmId) {
        let Some(vm) = self.vms.iter_mut().find(|vm| vm.state.id() == id) else { return };
        let missing = missing_files(vm);
        if missing.is_empty() {
            return self.hand_over(id, None);
        }
        let (name, count) = (vm.state.name(), vm.missing().len());
        vm.search = Some(Search::begin(missing));
        let message = format!(
            "VM {name} resumed without {count} of its regions; it is served when a process brings them, or no process \
             maps them, or after {LONGEST_WAIT:?}"
        );
        self.note(name, "region-missing", message);
    }

    /// Go on with VMs that wait for regions. Returns whether there are any. Once a second, state files are remembered.
    pub(crate) fn tend_vms(&mut self, now: Instant) -> bool {
        if now >= self.remember_at {
            self.remember_at = now + PING_EVERY;
            self.vms.iter().for_each(|vm| vm.state.remember());
        }
        let searching = self.vms.iter().filter(|vm| vm.search.is_some()).map(|vm| vm.state.id());
        for id in searching.collect::<Vec<_>>() {
            self.tend_vm(id);
        }
        self.vms.iter().any(|vm| vm.search.is_some())
    }

    pub(crate) fn tend_vm(&mut self, id: VmId) {
        let Some(vm) = self.vms.iter_mut().find(|vm| vm.state.id() == id) else { return };
        let Some(lost) = end_search(vm) else { return };
        if let Some(message) = lost {
            let name = vm.state.name();
            self.note(name, "region-lost", message);
        }
        self.hand_over(id, None);
    }
}

/// Ends the search for regions of this VM, if it has found out. Returns whether it ended just now, and what operators
/// are to know.
pub(crate) fn end_search(vm: &mut VmEntry) -> Option<Option<String>> {
    let missing = missing_files(vm);
    let search = vm.search.as_mut()?;
    let found = if missing.is_empty() { Found::Nobody } else { search.ask(|| missing.clone()) };
    if found == Found::Waiting {
        return None;
    }
    let (name, count) = (vm.state.name(), vm.missing().len());
    vm.give_up_missing(found == Found::Nobody);
    vm.search = None;
    if found == Found::NobodyCame {
        return Some(Some(format!(
            "{count} regions of VM {name} were given up: a process may map them but did not attach again; what was far \
             of them is lost"
        )));
    }
    if count > 0 {
        tracing::info!(vm = name, count, "regions were unplugged while no keeper ran");
    }
    Some(None)
}

fn missing_files(vm: &VmEntry) -> HashSet<FileId> {
    vm.missing().into_iter().flat_map(|(_, record)| record.files).collect()
}

/// A name like this one that is free.
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
