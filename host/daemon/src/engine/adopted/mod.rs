//! Adopted VMs: VMs that were started without Ballast, whose pages the kernel moves and whose limits are set here.
//!
//! Before: an operator names a running VMM, or the settings name all. After: the VM is in every list beside attached
//! VMs, until its process ends or an operator releases it.
//! Threads: any; `worker` holds VMs to their limits. Units: bytes.
//! Promise: nothing of a VMM or its cgroup is changed, so an engine that dies leaves nothing behind. The next one
//! continues from the file ([`kept`]).

pub mod kept;
pub mod sample;
mod stall;
pub mod vm;
pub mod worker;

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use anyhow::{anyhow, bail};
use ballast_adopt::swap::{self, Swap};
use ballast_adopt::{Adopted, Refusal, found, look};
use ballast_api::AdoptRefusal;
use ballast_base::Bytes;
use ballast_base::wire::check_name;
use ballast_policy::{Action, Decision};
use ballast_sys::lock::Lock;
use rustix::event::{EventfdFlags, eventfd};

use crate::events::Events;
use kept::{Kept, KeptProcess, KeptVm};
use vm::{AdoptedVm, Terms};

/// Time to restore a page, in microseconds, until swap was measured: as with zram.
const USUAL_RESTORE_US: f64 = 8.0;

#[derive(Debug)]
pub struct AdoptedVms {
    file: PathBuf,
    all: bool,
    list: Mutex<Vec<Arc<AdoptedVm>>>,
    released: Mutex<Vec<KeptProcess>>,
    /// Whether the file was read, and no other engine writes it.
    works: AtomicBool,
    wake: OwnedFd,
    restore_us: OnceLock<f64>,
    events: Arc<Events>,
}

#[derive(Clone, Debug, Default)]
pub struct Taken {
    pub pids: HashSet<u32>,
    pub names: HashSet<String>,
}

impl AdoptedVms {
    /// No VM yet: [`AdoptedVms::resume`] reads the file in this directory. Fails without a descriptor.
    pub fn new(runtime_dir: &Path, all: bool, events: Arc<Events>) -> std::io::Result<Self> {
        Ok(Self {
            file: runtime_dir.join(kept::FILE),
            all,
            list: Mutex::default(),
            released: Mutex::default(),
            works: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            restore_us: OnceLock::new(),
            events,
        })
    }

    pub fn all(&self) -> Vec<Arc<AdoptedVm>> {
        self.list.locked().clone()
    }

    /// The host's swap now; not read if there are no VMs.
    pub fn swap(&self) -> Swap {
        let has_none = self.list.locked().is_empty();
        if has_none { Swap::default() } else { Swap::now() }
    }

    pub fn by_name(&self, name: &str) -> Option<Arc<AdoptedVm>> {
        self.all().into_iter().find(|vm| vm.name() == name)
    }

    /// Time to restore one page from swap, in microseconds. Measured at the first call.
    pub fn restore_us(&self) -> f64 {
        *self.restore_us.get_or_init(|| swap::speed().map_or(USUAL_RESTORE_US, |speed| speed.in_us))
    }

    /// Begins, or continues after another engine: reads the file and adopts those of its VMs that still run.
    pub fn resume(&self) {
        let kept = kept::read(&self.file).unwrap_or_else(|error| {
            let text = format!("{}: {error}: no VM of before is adopted", self.file.display());
            self.events.add(None, "adopted-lost", text);
            Kept::default()
        });
        *self.released.locked() = kept.released;
        let mut vms = Vec::new();
        for KeptVm { process, name, limit_bytes, settings } in kept.vms {
            if !process.runs() {
                self.events.add(Some(name.clone()), "gone", format!("{name} has ended"));
                continue;
            }
            let terms = Terms { name: name.clone(), limit: limit_bytes.map(Bytes), target: None, settings };
            match look(process.pid).and_then(Adopted::new) {
                Ok(vm) => vms.push(Arc::new(AdoptedVm::new(vm, terms))),
                Err(why) => self.events.add(Some(name), "adopted-lost", format!("it is not adopted any more: {why}")),
            }
        }
        *self.list.locked() = vms;
        self.works.store(true, Ordering::Release);
        self.notify();
    }

    /// Stops, because another engine may begin: VMs keep their limits and settings.
    pub fn rest(&self) {
        self.works.store(false, Ordering::Release);
    }

    pub fn works(&self) -> bool {
        self.works.load(Ordering::Acquire)
    }

    pub fn notify(&self) {
        // If the counter is full, the worker is awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub fn keep(&self) {
        // Locked before the list is read, so that of two calls the later one writes the later list.
        let mut released = self.released.locked();
        if !self.works() {
            return;
        }
        let vms = self.all();
        let kept_vm = |vm: &Arc<AdoptedVm>| {
            let Terms { name, limit, settings, .. } = vm.terms();
            KeptVm { process: vm.vm.process.into(), name, limit_bytes: limit.map(|limit| limit.0), settings }
        };
        released.retain(|process| process.runs());
        let kept = Kept { vms: vms.iter().map(kept_vm).collect(), released: released.clone() };
        if let Err(error) = kept::write(&self.file, &kept) {
            let text = format!("the next engine will not know of the change: {}: {error}", self.file.display());
            self.events.add(None, "adopted-lost", text);
        }
    }

    pub fn adopt(&self, pid: u32, name: Option<&str>, taken: &Taken) -> anyhow::Result<Arc<AdoptedVm>> {
        let of_pid = |why: Refusal| anyhow!("process {pid}: {why}");
        if taken.pids.contains(&pid) {
            return Err(of_pid(Refusal::Paged));
        }
        let found = look(pid).map_err(of_pid)?;
        let own = found.vmm.name.clone();
        let vm = Adopted::new(found).map_err(of_pid)?;
        let mut list = self.list.locked();
        if let Some(known) = list.iter().find(|known| known.vm.process == vm.process) {
            bail!("process {pid} is adopted already, as {}", known.name());
        }
        let is_taken = |name: &str| taken.names.contains(name) || list.iter().any(|known| known.name() == name);
        let name = match (name, own) {
            (Some(name), _) => {
                check_name(name)?;
                if is_taken(name) {
                    bail!("another VM is named {name:?}");
                }
                name.to_owned()
            }
            (None, Some(own)) if check_name(&own).is_ok() && !is_taken(&own) => own,
            // Pids are unique, so no other VM has this name, unless an operator chose it.
            (None, _) => format!("vm-{pid}"),
        };
        let adopted = Arc::new(AdoptedVm::new(vm, Terms { name: name.clone(), ..Terms::default() }));
        list.push(adopted.clone());
        drop(list);
        self.released.locked().retain(|process| process.pid != pid);
        self.keep();
        self.notify();
        let text = format!("{name} is adopted: {}, pid {pid}, {}", adopted.vm.vmm.program, Bytes(adopted.vm.size()));
        self.events.add(Some(name), "adopted", text);
        Ok(adopted)
    }

    /// Adopts all VMMs that are neither adopted nor attached. If `unasked`, leaves out those that an operator released.
    pub fn adopt_all(&self, taken: &Taken, unasked: bool) -> (Vec<Arc<AdoptedVm>>, Vec<AdoptRefusal>) {
        let known: HashSet<u32> = self.all().iter().map(|vm| vm.vm.process.pid).collect();
        let released = self.released.locked().clone();
        let mut result = (Vec::new(), Vec::new());
        for pid in found::all() {
            let is_released = unasked && released.iter().any(|process| process.pid == pid && process.runs());
            if known.contains(&pid) || taken.pids.contains(&pid) || is_released {
                continue;
            }
            match self.adopt(pid, None, taken) {
                Ok(vm) => result.0.push(vm),
                Err(why) => result.1.push(AdoptRefusal { pid, reason: format!("{why:#}") }),
            }
        }
        result
    }

    pub fn named(name: &str) -> Vec<u32> {
        let is_it = |pid: &u32| look(*pid).is_ok_and(|found| found.vmm.name.as_deref() == Some(name));
        found::all().into_iter().filter(is_it).collect()
    }

    /// Forgets a VM: an operator released it, or its process ended.
    pub fn forget(&self, vm: &Arc<AdoptedVm>, is_released: bool) {
        vm.leaves.store(true, Ordering::Release);
        if is_released {
            // Before it leaves the list: a VM in neither list would be adopted again.
            self.released.locked().push(vm.vm.process.into());
        }
        let mut list = self.list.locked();
        let before = list.len();
        list.retain(|known| !Arc::ptr_eq(known, vm));
        if list.len() == before {
            return;
        }
        drop(list);
        let name = vm.name();
        let (kind, text) = if is_released {
            ("released", format!("{name} is released: the kernel alone decides about its memory"))
        } else {
            ("gone", format!("{name} ended"))
        };
        self.keep();
        self.events.add(Some(name), kind, text);
    }

    /// Adopts a VM again, with its terms, after its process executed a program.
    pub fn renew(&self, vm: &Arc<AdoptedVm>) {
        match look(vm.vm.process.pid).and_then(Adopted::new) {
            Ok(next) => {
                let mut list = self.list.locked();
                if let Some(known) = list.iter_mut().find(|known| Arc::ptr_eq(known, vm)) {
                    *known = Arc::new(AdoptedVm::new(next, vm.terms()));
                }
            }
            Err(Refusal::NotVmm(_)) => self.forget(vm, false),
            // It may not have mapped its RAM yet.
            Err(_) => {}
        }
    }

    /// Gives a VM the limit of a plan. Returns whether the limit changed; `None` if no adopted VM has the decision's
    /// id.
    pub fn apply(&self, decision: &Decision) -> Option<bool> {
        let vm = self.all().into_iter().find(|vm| vm.id == decision.id)?;
        let after = match decision.action {
            Action::Limit => decision.limit_bytes.map(Bytes),
            Action::Free => None,
            Action::Leave => return Some(false),
        };
        let changes = vm.terms().target != after;
        if changes {
            vm.change(|terms| terms.target = after);
            self.notify();
        }
        Some(changes)
    }

    pub fn free_all(&self) -> usize {
        let vms = self.all();
        let had = vms.iter().filter(|vm| vm.terms().target.is_some());
        had.map(|vm| vm.change(|terms| terms.target = None)).count()
    }

    /// Why this limit cannot be kept beside the others: they could need more swap than there is.
    pub fn refusal(&self, changed: &AdoptedVm, limit: Option<Bytes>) -> Option<String> {
        let size = changed.vm.size();
        let limit = limit.filter(|limit| limit.0 < size)?;
        if let Some(why) = changed.vm.pinned() {
            return Some(format!("the VM is pinned: {why}"));
        }
        let swap = Swap::now();
        if let Some(why) = changed.vm.blocked(&swap) {
            return Some(why);
        }
        let mut needs = 0;
        let mut has = 0;
        for vm in self.all() {
            let limit = if vm.id == changed.id { Some(limit) } else { vm.terms().limit };
            let size = vm.vm.size();
            needs += size.saturating_sub(limit.map_or(size, |limit| limit.0));
            has += vm.vm.quick().map_or(0, |memory| memory.far);
        }
        let others = swap.used.saturating_sub(has);
        let room = swap.total.saturating_sub(others);
        if needs > room {
            let [needs, room, total] = [needs, room, swap.total].map(Bytes);
            return Some(format!(
                "the limits of all adopted VMs could need {needs} of swap, and there are {room} for them (of {total})"
            ));
        }
        let (could, far) = (size - limit.0, changed.vm.quick().map_or(0, |memory| memory.far));
        let may = far + changed.vm.cgroup_room()?;
        (could > may).then(|| {
            format!("a limit of {limit} could need {} of swap, and its cgroup lets {} in", Bytes(could), Bytes(may))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_rests_does_not_write_the_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let vms = AdoptedVms::new(dir.path(), false, Arc::default()).expect("a descriptor");
        let keeps = || {
            vms.keep();
            std::fs::remove_file(dir.path().join(kept::FILE)).is_ok()
        };
        vms.resume();
        assert!(keeps());
        vms.rest();
        assert!(!keeps(), "the next engine writes it");
        vms.resume();
        assert!(keeps());
    }
}
