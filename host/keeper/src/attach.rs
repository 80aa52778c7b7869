//! Attach: a process's RAM becomes a VM, one more view of a VM, or a VM that existed before (`resume`).
//!
//! Before: a client sent its attach message, or hot-plugged RAM. After: the engine has its orders, and the client its
//! reply. A client that joins a VM gets the reply when its faults are served.
//! Threads: the keeper's one.
//! Promise: the id alone identifies a VM. A resumed VM gets its words back even if another VM has taken its name, and
//! whichever of its processes comes first.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use anyhow::{Context, bail};
use ballast_base::store::FILE_STORE;
use ballast_base::text::ascii;
use ballast_base::wire::{self, Attach, KeeperToClient, RegionInfo, Span, VmId};
use ballast_handover::arena;
use ballast_handover::orders::Order;
use ballast_sys::memfd;

use crate::admit::{self, Admitted, Escrow, Ram};
use crate::client::{Answer, ClientView, Peer};
use crate::clients::{GONE, NO_VIEW, NO_VM};
use crate::engine_child::add_view;
use crate::keeper::Keeper;
use crate::options::group_of;
use crate::place::Place;
use crate::regions::Held;
use crate::store_files::Files;
use crate::vms::Vm;
use crate::waiting::{Made, UNASKED};
use ballast_sys::slow_fd::SlowFd;

type Spans = Vec<(Span, u32)>;

impl Keeper {
    pub(crate) fn attach(&mut self, key: u64, attach: &Attach, fds: Vec<SlowFd>) -> anyhow::Result<()> {
        if self.clients.view(key).is_some() {
            bail!("this process is attached already");
        }
        if self.is_making(key) {
            bail!("this process is being attached");
        }
        let admitted = admit::admit(attach, fds)?;
        // From here on, people read these texts.
        let attach = &Attach { vmm: ascii(&attach.vmm), pinned: attach.pinned.as_deref().map(ascii), ..attach.clone() };
        let is_file = |files: &Files| files.store() == FILE_STORE;
        let has_file = admitted.resumed.as_ref().is_some_and(|escrow| escrow.stores.iter().any(is_file));
        let ranges = Ram::ranges(&admitted.ram);
        let is_known = match attach.resume {
            Some(id) => self.vms.get(id).is_some(),
            None => self.vms.iter().any(|vm| vm.held.has_any(&ranges)),
        };
        if !self.file_stores || has_file || is_known {
            return self.attach_with(key, attach, admitted, None);
        }
        self.make_file_store(key, attach, admitted);
        Ok(())
    }

    /// The VM that this process of this user belongs to, or resumes.
    pub(crate) fn known(&self, attach: &Attach, uid: u32, ram: &[Ram]) -> anyhow::Result<Option<VmId>> {
        if let Some(id) = attach.resume {
            return Ok(self.vms.get(id).map(Vm::id));
        }
        let ranges = Ram::ranges(ram);
        let Some(vm) = self.vms.iter().find(|vm| vm.held.has_any(&ranges)) else { return Ok(None) };
        let (name, owner) = (vm.name(), vm.held.uid());
        if uid != 0 && uid != owner {
            bail!("its RAM is that of VM {name:?} of user {owner}, and this process is of user {uid}");
        }
        Ok(Some(vm.id()))
    }

    /// The second part of an attach: a VM that is new to this keeper gets this file store, or a note of why it has
    /// none.
    pub(crate) fn attach_with(
        &mut self,
        key: u64,
        attach: &Attach,
        admitted: Admitted,
        file_store: Option<Made>,
    ) -> anyhow::Result<()> {
        let peer = self.clients.peer(key).context(GONE)?;
        let Admitted { uffds, control, ram, resumed } = admitted;
        if let Some(why) = self.must_wait_to_attach(attach.resume, resumed.as_ref(), &ram) {
            self.clients.answer(key, KeeperToClient::Later(why));
            return Ok(());
        }
        let known = self.known(attach, peer.uid, &ram)?;
        let (id, spans, escrow) = match known {
            Some(id) => (id, self.join(id, peer.pid, resumed.as_ref(), ram)?, None),
            None => {
                let (id, spans, escrow) = self.admit_vm(attach, peer, resumed, ram, file_store)?;
                (id, spans, Some(escrow))
            }
        };
        let vm = self.vms.get_mut(id).context(NO_VM)?;
        if let Some(reason) = &attach.pinned {
            vm.held.pin(reason.clone());
        }
        if attach.may_pin {
            vm.held.set_may_pin();
        }
        let (name, stores) = (vm.name(), Files::counts(vm.held.stores()));
        tracing::info!(vm = name, %id, pid = peer.pid, regions = attach.regions.len(), "attached");
        let uffds = uffds.into_iter().map(Arc::new).collect();
        let (uffd_features, control) = (attach.uffd_features, Arc::new(control));
        self.clients.attach(key, ClientView { vm: id, uffds, uffd_features, control, spans });
        let Some(escrow) = escrow else { return self.answer_joined(key, id, attach) };
        // A new VM has no far page. Far pages of a returning VM are registered, and their faults wait.
        self.search_or_hand_over(id);
        self.give_escrow(key, &KeeperToClient::Attached { vm: id, stores, is_first: true }, &escrow);
        Ok(())
    }

    fn must_wait_to_attach(&self, resume: Option<VmId>, resumed: Option<&Escrow>, ram: &[Ram]) -> Option<String> {
        let is_known = resume.is_some_and(|id| self.vms.get(id).is_some());
        self.vms.must_wait(resume, ram).or_else(|| self.must_wait_for_engine(resumed.filter(|_| !is_known)?))
    }

    /// Admits a VM that is new to this keeper, because it was brought back, or because no keeper has seen it before.
    /// Returns where its process maps which region, and the escrow.
    fn admit_vm(
        &mut self,
        attach: &Attach,
        peer: Peer,
        resumed: Option<Escrow>,
        ram: Vec<Ram>,
        file_store: Option<Made>,
    ) -> anyhow::Result<(VmId, Spans, Vec<OwnedFd>)> {
        let ranges = Ram::ranges(&ram);
        if let Some(other) = self.vms.iter().find(|vm| vm.held.has_any(&ranges)) {
            bail!("its RAM is that of VM {:?}, which it was not part of", other.name());
        }
        let mut vm = match resumed {
            Some(files) => self.resume(attach, files, peer.uid)?,
            None => self.create(attach, peer)?,
        };
        match file_store {
            Some(Ok(_)) if vm.held.stores().iter().any(|files| files.store() == FILE_STORE) => {}
            Some(Ok(files)) => vm.held.add_store(Files::file(files)),
            // The VM is served without a file store.
            Some(Err(error)) => {
                let name = vm.name();
                let message = format!("VM {name} has no file store, its far pages stay in RAM: {error}");
                self.note(name, "spill-unavailable", message);
            }
            None => {}
        }
        // Before any engine serves the VM: without escrow it could not come back after this keeper's death.
        let escrow = vm.held.escrow()?;
        let spans = vm.held.number(ram, true, &mut Vec::new())?;
        let id = vm.id();
        // Not earlier: until now the engine may write back, and no other process may have the file.
        self.vms.add(vm);
        Ok((id, spans, escrow))
    }

    /// Makes this process one more view of a VM. Returns where it maps which region.
    fn join(&mut self, id: VmId, pid: u32, resumed: Option<&Escrow>, ram: Vec<Ram>) -> anyhow::Result<Spans> {
        self.check_joins(id, resumed, &ram)?;
        if self.clients.views_of(id).any(|(other, _)| other == pid) {
            bail!("this process is attached to that VM already");
        }
        // Only a process that was part of the VM may bring an unknown region: it was plugged while no keeper ran.
        let mut added = Vec::new();
        let vm = self.vms.get_mut(id).context(NO_VM)?;
        let spans = vm.held.number(ram, resumed.is_some(), &mut added);
        // Their addresses come with the view.
        for number in added {
            self.tell_region(id, pid, None, number);
        }
        spans
    }

    /// Replies to a client that has joined a VM, when it can touch its RAM.
    fn answer_joined(&mut self, key: u64, id: VmId, attach: &Attach) -> anyhow::Result<()> {
        let Peer { pid, .. } = self.clients.peer(key).context(GONE)?;
        let view = self.clients.view(key).context(NO_VIEW)?;
        let numbers = view.spans.iter().map(|(_, number)| *number).collect();
        let (add, fds) = add_view(pid, view, &[], None);
        if self.vms.get(id).is_some_and(|vm| vm.place.is_handed_over()) {
            // A new engine would learn these from OpenVm; an engine that has the VM must be told.
            if let Some(reason) = attach.pinned.clone() {
                self.order(&Order::Pin { seq: UNASKED, vm: id, reason }, &[]);
            }
            if attach.may_pin {
                self.order(&Order::MayPin { seq: UNASKED, vm: id }, &[]);
            }
            self.order(&add, &fds);
            // Pages may be far already: before its faults are served, the process would read zeros in their place.
            return self.answer_when_served(key, numbers, Answer::Attached);
        }
        // Until the VM is handed over, which may take a minute or more, no fault is served.
        if attach.resume.is_some() {
            self.answer_attached(key);
        } else {
            self.answer_when_served(key, numbers, Answer::Attached)?;
        }
        self.tend_vm(id);
        Ok(())
    }

    /// Checks whether a process with these descriptors may become one more view of the VM.
    fn check_joins(&self, id: VmId, resumed: Option<&Escrow>, ram: &[Ram]) -> anyhow::Result<()> {
        if let Some(Escrow { state, .. }) = resumed {
            // The VM's own state file proves that the process was part of the VM; knowledge of the id does not.
            let [own, theirs] =
                [self.vms.get(id).context(NO_VM)?.held.state().fd().as_fd(), state.as_fd()].map(memfd::file_id);
            if own.context("Comparing state files")? != theirs.context("Comparing state files")? {
                bail!("the state file is another VM's");
            }
        }
        let ranges = Ram::ranges(ram);
        match self.vms.iter().find(|other| other.id() != id && other.held.has_any(&ranges)) {
            Some(other) => bail!("some of its RAM is that of VM {:?}", other.name()),
            None => Ok(()),
        }
    }

    pub(crate) fn create(&mut self, attach: &Attach, Peer { pid, uid }: Peer) -> anyhow::Result<Vm> {
        if self.vms.has_name(&attach.name) {
            bail!("a VM named {:?} is attached already", attach.name);
        }
        let mut held = Held::create(attach, uid)?;
        // Settings are kept by UUID: no two attached VMs may share one.
        let twin = self.vms.iter().find(|vm| attach.uuid.is_some() && vm.held.state().uuid() == attach.uuid);
        let twin = twin.map(Vm::name);
        held.state().set_identity(attach.uuid.filter(|_| twin.is_none()), uid, pid);
        if let (Some(twin), Some(uuid)) = (twin, attach.uuid) {
            let name = attach.name.clone();
            let message = format!("VM {twin} has the UUID {uuid} of VM {name}, which runs without one until its end");
            self.note(name, "uuid-taken", message);
        }
        if let Some(group) = group_of(&self.groups, &attach.name) {
            let arena = self.group_arena(group, uid)?;
            held.add_store(Files::group(SlowFd::from(arena), held.state().id())?);
        }
        Ok(Vm { held, place: Place::with(self.who_for_new()) })
    }

    /// A new opening of the arena that this user's VMs of the group share; the arena is made if there is none. Any user
    /// who may attach may give a VM any name, so an arena is per user: a name must not give access to others' memory.
    fn group_arena(&self, group: &str, uid: u32) -> anyhow::Result<OwnedFd> {
        let opening = || format!("Opening the arena of group {group:?}");
        let is_of = |vm: &&Vm| vm.held.uid() == uid && group_of(&self.groups, &vm.name()) == Some(group);
        let known = self.vms.iter().filter(is_of).find_map(|vm| vm.held.stores().iter().find_map(Files::group_arena));
        if let Some(known) = known {
            return memfd::reopen(known.as_fd(), true).with_context(opening);
        }
        let made = arena::create().with_context(opening)?;
        rustix::fs::fchmod(&made, rustix::fs::Mode::from_raw_mode(0o600)).with_context(opening)?;
        // Reopened, because the opening that made the arena announces no member.
        memfd::reopen(made.as_fd(), true).with_context(opening)
    }

    pub(crate) fn add_region(
        &mut self,
        key: u64,
        region: RegionInfo,
        files: u8,
        fds: Vec<SlowFd>,
    ) -> anyhow::Result<()> {
        let Peer { pid, .. } = self.clients.peer(key).context(GONE)?;
        let view = self.clients.view(key).context(NO_VIEW)?;
        let (vm, features) = (view.vm, view.uffd_features);
        if fds.len() != usize::from(files) {
            bail!("{} descriptors came with a new region that needs {files}", fds.len());
        }
        let regions = [region];
        wire::check_regions(&regions, files)?;
        let [RegionInfo { span, .. }] = &regions;
        let spans: Vec<_> = view.spans.iter().map(|(span, _)| *span).chain([*span]).collect();
        wire::check_spans(&spans)?;
        let taken: Vec<u32> = view.spans.iter().map(|(_, number)| *number).collect();
        let mut ram = admit::check_ram(&regions, fds, features)?;
        let ranges = Ram::ranges(&ram);
        if self.vms.iter().any(|other| other.id() != vm && other.held.has_any(&ranges)) {
            bail!("region {} is RAM of another VM", span.hva);
        }
        if let Some(why) = self.vms.must_wait(Some(vm), &ram) {
            self.clients.answer(key, KeeperToClient::Later(why));
            return Ok(());
        }
        let ram = ram.pop().context("a region is needed")?;
        let unplugs = self.unplugs_of(vm);
        let held = &mut self.vm_of(key)?.held;
        // Another view may have brought the region already.
        let known = held.find(&ram, &[]);
        if known.is_some_and(|number| taken.contains(&number)) {
            bail!("region {} is mapped by this process already", span.hva);
        }
        if unplugs.iter().any(|(.., unplugged)| known == Some(*unplugged)) {
            self.clients.answer(key, KeeperToClient::Later("this RAM is about to be unplugged".into()));
            return Ok(());
        }
        let number = match known {
            Some(number) => number,
            None => self.vm_of(key)?.held.append(&ram)?,
        };
        self.vm_of(key)?.held.bring(number, ram.files);
        self.clients.map(key, *span, number);
        self.tell_region(vm, pid, Some(*span), number);
        if known.is_some() {
            // Pages of it may be far already, as for a process that joins a VM.
            return self.answer_when_served(key, vec![number], Answer::Ok);
        }
        self.clients.answer(key, KeeperToClient::Ok);
        Ok(())
    }

    fn tell_region(&mut self, vm: VmId, pid: u32, span: Option<Span>, number: u32) {
        let vm = self.vms.get(vm).filter(|vm| vm.place.is_handed_over());
        if let Some((order, fds)) = vm.and_then(|vm| vm.held.add_region(pid, span, number)) {
            self.order(&order, &fds);
        }
    }

    /// Drops the files of regions that the engine has removed and that no process has.
    pub(crate) fn forget_removed(&mut self, id: VmId) {
        let numbers = self.clients.views_of(id).flat_map(|(_, view)| view.spans.iter().map(|(_, number)| *number));
        let has: HashSet<u32> = numbers.collect();
        if let Some(vm) = self.vms.get_mut(id) {
            vm.held.forget_removed(&has);
        }
    }

    pub(crate) fn vm_of(&mut self, key: u64) -> anyhow::Result<&mut Vm> {
        let id = self.clients.view(key).context(NO_VIEW)?.vm;
        self.vms.get_mut(id).context(NO_VM)
    }
}
