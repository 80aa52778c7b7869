//! The VMs that the keeper holds: those with processes, and those that are being closed.
//!
//! Before: a VM was made (`attach`) or brought back (`resume`). After: an engine has closed it.
//! Threads: the keeper's one.
//! Promise: a VM is in one of these two lists. The RAM of a VM that is being closed goes to no other VM: a client that
//! brings it, with its attach or later, is told to retry.

use std::io;
use std::time::Instant;

use ballast_base::wire::VmId;
use ballast_handover::kept::Kept;
use ballast_handover::orders::Order;
use ballast_sys::process::Process;

use crate::admit::Ram;
use crate::engine::{PING_EVERY, Who};
use crate::fence::Left;
use crate::lost::Found;
use crate::place::{AGAIN_AFTER, At, Place};
use crate::regions::{Given, Held};
use crate::waiting::UNASKED;

/// Tries to open a VM only to close it: within about a minute. Then others need the memory more.
const MOST_TRIES: u32 = 30;

pub(crate) struct Vm {
    pub held: Held,
    pub place: Place,
}

pub(crate) struct Closing {
    pub vm: Vm,
    seq: u64,
    /// Whether the engine has the order to close the VM.
    given: bool,
    /// The engine could not open the VM, so its pages did not go back. The engine gets it again at this time.
    again_at: Option<Instant>,
    /// How often the engine could not open it.
    tries: u32,
}

pub(crate) struct Vms {
    list: Vec<Vm>,
    closing: Vec<Closing>,
    /// When the first pages of the state files are remembered next.
    remember_at: Instant,
}

impl Vm {
    pub fn id(&self) -> VmId {
        self.held.state().id()
    }

    pub fn name(&self) -> String {
        self.held.state().name()
    }

    /// The engine that leaves the VM to another one.
    pub fn leaving(&self) -> Option<Process> {
        self.held.state().leaving().map(|(pid, start)| Process { pid, start })
    }

    /// Has this engine open the VM. Returns the orders.
    ///
    /// # Errors
    /// As for [`Held::open`].
    pub fn open(&mut self, engine: Process, ours: &[Process]) -> Result<Vec<Given>, io::Result<Left>> {
        // One of the two engines that had the VM is dead. The other one, which is `engine` if it is ours, has served
        // its faults until now.
        let is_shared = self.place.at() == At::Both;
        let had_two = !is_shared && self.leaving().is_some();
        let open = self.held.open(engine, is_shared, ours)?;
        self.place.opens();
        let close = had_two.then(|| (Order::HandOver { seq: UNASKED, vm: self.id() }, Vec::new()));
        Ok(close.into_iter().chain([open]).collect())
    }

    /// Ends the search for the VM's regions, if it has a result. Returns whether it ended just now, and the text of an
    /// event.
    pub fn end_search(&mut self) -> Option<Option<String>> {
        let found = self.place.found(self.held.missing_files())?;
        let (name, count) = (self.name(), self.held.missing().len());
        self.held.give_up_missing(found == Found::Nobody);
        if found == Found::NobodyCame {
            return Some(Some(format!(
                "{count} regions of VM {name} were given up: a process may map them but did not attach again; what was \
                 far of them is lost"
            )));
        }
        if count > 0 {
            tracing::info!(vm = name, count, "regions were unplugged while no keeper ran");
        }
        Some(None)
    }
}

impl Closing {
    pub fn is_given(&self) -> bool {
        self.given
    }

    /// The order to close it is void: its engine is dead, or leaves the VM.
    pub fn take_back(&mut self) {
        self.given = false;
    }

    /// The orders that have this engine open the VM and close it, if it is time.
    pub fn give(&mut self, engine: Process, ours: &[Process]) -> Vec<Given> {
        let is_due = !self.vm.place.is_searched() && self.again_at.is_none_or(|at| at <= Instant::now());
        // If another engine of ours must still close the VM, this one cannot open it yet.
        let is_free = self.vm.leaving().is_none_or(|leaving| leaving == engine || !ours.contains(&leaving));
        if self.given || !is_due || !is_free {
            return Vec::new();
        }
        let Ok(mut orders) = self.vm.open(engine, ours) else { return Vec::new() };
        orders.push((Order::CloseVm { seq: self.seq, vm: self.vm.id() }, Vec::new()));
        self.given = true;
        orders
    }

    /// The engine could not open the VM to close it: makes it due again later. Returns false after too many tries.
    pub fn try_again(&mut self, now: Instant) -> bool {
        // A VM that no engine ever had open has nothing far. Its RAM may be exactly what the host lacks.
        if self.vm.held.state().epoch() == 0 || self.tries >= MOST_TRIES {
            return false;
        }
        (self.given, self.again_at, self.tries) = (false, Some(now + AGAIN_AFTER), self.tries + 1);
        true
    }
}

impl Vms {
    pub fn new() -> Self {
        Self { list: Vec::new(), closing: Vec::new(), remember_at: Instant::now() }
    }

    pub fn of(kept: &Kept) -> anyhow::Result<Self> {
        let again = |vm| anyhow::Ok(Vm { held: Held::of(vm)?, place: Place::with(Who::Engine) });
        let mut vms = Self::new();
        for vm in &kept.vms {
            vms.list.push(again(vm)?);
        }
        for (seq, given, vm) in &kept.closing {
            vms.closing.push(closing(*seq, again(vm)?, *given));
        }
        Ok(vms)
    }

    pub fn record(&self, kept: &mut Kept) {
        kept.vms = self.list.iter().map(|vm| vm.held.kept()).collect();
        let closing = |closing: &Closing| (closing.seq, closing.given, closing.vm.held.kept());
        kept.closing = self.closing.iter().map(closing).collect();
    }

    pub fn iter(&self) -> impl Iterator<Item = &Vm> {
        self.list.iter()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Vm> {
        self.list.iter_mut()
    }

    pub fn get(&self, id: VmId) -> Option<&Vm> {
        self.list.iter().find(|vm| vm.id() == id)
    }

    pub fn get_mut(&mut self, id: VmId) -> Option<&mut Vm> {
        self.list.iter_mut().find(|vm| vm.id() == id)
    }

    pub fn which(&self, is_it: impl Fn(&Vm) -> bool) -> Vec<VmId> {
        self.list.iter().filter(|vm| is_it(vm)).map(Vm::id).collect()
    }

    pub fn all(&self) -> impl Iterator<Item = &Vm> {
        self.list.iter().chain(self.closing.iter().map(|closing| &closing.vm))
    }

    pub fn has_name(&self, name: &str) -> bool {
        self.list.iter().any(|vm| vm.name() == name)
    }

    pub fn add(&mut self, vm: Vm) {
        let id = vm.id();
        self.closing.retain(|closing| closing.vm.id() != id);
        self.list.push(vm);
    }

    /// No process of this VM is left: it is closed by the order with this number. Returns where it was, and whether its
    /// engine gets the order now. A VM that waits for regions is with no engine, and is given to one when the search is
    /// over.
    pub fn close(&mut self, id: VmId, seq: u64) -> Option<(At, bool)> {
        let at = self.list.iter().position(|vm| vm.id() == id)?;
        let mut vm = self.list.remove(at);
        let given = vm.place.is_handed_over() && vm.place.at() != At::Both;
        let was = vm.place.end();
        self.closing.push(closing(seq, vm, given));
        Some((was, given))
    }

    pub fn closing(&self) -> impl Iterator<Item = &Closing> {
        self.closing.iter()
    }

    pub fn closing_mut(&mut self) -> impl Iterator<Item = &mut Closing> {
        self.closing.iter_mut()
    }

    pub fn closing_by(&mut self, seq: u64) -> Option<&mut Closing> {
        self.closing.iter_mut().find(|closing| closing.seq == seq)
    }

    pub fn closed(&mut self, seq: u64) {
        self.closing.retain(|closing| closing.seq != seq);
    }

    /// Once a second, remembers the first pages of state files. Returns the VMs that have files of unplugged regions.
    pub fn remember(&mut self, now: Instant) -> Vec<VmId> {
        if now < self.remember_at {
            return Vec::new();
        }
        self.remember_at = now + PING_EVERY;
        self.list.iter().for_each(|vm| vm.held.state().remember());
        self.which(|vm| vm.held.has_removed())
    }

    /// Why a process must wait before it brings this RAM as a part of `vm`: far pages of another VM are still written
    /// back into these files. `None` if it need not wait.
    pub fn must_wait(&self, vm: Option<VmId>, ram: &[Ram]) -> Option<String> {
        let is_it = |closing: &&Closing| Some(closing.vm.id()) == vm;
        let (own, others): (Vec<_>, Vec<_>) = self.closing.iter().partition(is_it);
        if let Some(closing) = own.iter().find(|closing| closing.vm.leaving().is_some()) {
            return Some(format!("two engines have VM {:?} at this moment", closing.vm.name()));
        }
        let ranges = Ram::ranges(ram);
        let of = others.iter().find(|closing| closing.vm.held.has_any(&ranges))?;
        Some(format!("what was far of VM {:?} is on its way back into its RAM file", of.vm.name()))
    }
}

fn closing(seq: u64, vm: Vm, given: bool) -> Closing {
    Closing { seq, vm, given, again_at: None, tries: 0 }
}

#[cfg(test)]
impl Closing {
    pub fn number(&self) -> u64 {
        self.seq
    }

    pub fn try_now(&mut self) {
        self.again_at = Some(Instant::now());
    }
}
