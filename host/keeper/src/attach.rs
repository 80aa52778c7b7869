//! Attach: a process's RAM becomes a VM, one more view of a VM, or a VM that existed before (`resume`).
//!
//! Before: a client sent its attach message, or hot-plugged RAM. After: the engine has been told, and the client has
//! its reply: a client that joins a VM when its faults are served.
//! Threads: the keeper's one.
//! Promise: its id identifies a VM. A resumed VM gets its words back even if another VM has taken its name, and
//! whichever of its processes comes first.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ballast_base::Hva;
use ballast_base::store::FILE_STORE;
use ballast_base::text::ascii;
use ballast_base::wire::{self, Attach, KeeperToClient, RegionInfo, Span, VmId};
use ballast_handover::arena;
use ballast_handover::orders::Order;
use ballast_sys::memfd;
use ballast_sys::same_file::same_file;

use crate::admit::{self, Admitted, Escrow, Ram};
use crate::client::ClientView;
use crate::clients::FORGET_EVERY;
use crate::closer::SentFd;
use crate::engine_child::add_view;
use crate::keeper::Keeper;
use crate::mappings;
use crate::options::group_of;
use crate::regions::{Kin, VmEntry};
use crate::store_files::Files;
use crate::waiting::{Answer, Made, UNASKED};

impl Keeper {
    pub(crate) fn attach(&mut self, key: u64, attach: &Attach, fds: Vec<SentFd>) -> Result<(), String> {
        let client = self.clients.get(&key).ok_or("this client is gone")?;
        if client.view.is_some() {
            return Err("this process is attached already".into());
        }
        if self.is_making(key) {
            return Err("this process is being attached".into());
        }
        self.check_memory(client.uid, attach.regions.iter().map(|region| region.span.len))?;
        let admitted = admit::admit(attach, fds)?;
        // From here on they are read by people.
        let attach = &Attach { vmm: ascii(&attach.vmm), pinned: attach.pinned.as_deref().map(ascii), ..attach.clone() };
        let is_file = |files: &Files| files.store() == FILE_STORE;
        let has_file = admitted.resumed.as_ref().is_some_and(|escrow| escrow.stores.iter().any(is_file));
        let ranges = Ram::ranges(&admitted.ram);
        let is_known = match attach.resume {
            Some(id) => self.vm(id).is_some(),
            None => self.vms.iter().any(|vm| vm.has_any(&ranges)),
        };
        if !self.file_stores || has_file || is_known {
            return self.attach_with(key, attach, admitted, None);
        }
        self.make_file_store(key, attach, admitted);
        Ok(())
    }

    /// The VM that this process of this user is, or becomes, a part of.
    pub(crate) fn known(&self, attach: &Attach, uid: u32, ram: &[Ram]) -> Result<Option<usize>, String> {
        if let Some(id) = attach.resume {
            return Ok(self.vms.iter().position(|vm| vm.state.id() == id));
        }
        let kin = self.vms.iter().map(|vm| vm.kin(ram)).enumerate().find(|(_, kin)| *kin != Kin::None);
        let Some((index, kin)) = kin else { return Ok(None) };
        let (name, owner) = (self.vms[index].state.name(), self.vms[index].uid);
        match kin {
            Kin::Same if uid == 0 || uid == owner => Ok(Some(index)),
            Kin::Same => {
                Err(format!("its RAM is that of VM {name:?} of user {owner}, and this process is of user {uid}"))
            }
            _ => Err(format!(
                "a file of its RAM has the device and inode of a RAM file of VM {name:?} and is not proven to be it"
            )),
        }
    }

    /// The rest of it: a VM that is new to this keeper gets this file store, or a note of why it has none.
    pub(crate) fn attach_with(
        &mut self,
        key: u64,
        attach: &Attach,
        admitted: Admitted,
        file_store: Option<Made>,
    ) -> Result<(), String> {
        let client = self.clients.get(&key).ok_or("this client is gone")?;
        let (pid, uid) = (client.pid, client.uid);
        // Other processes may have come while this one waited.
        self.check_memory(uid, attach.regions.iter().map(|region| region.span.len))?;
        let Admitted { uffds, control, ram, resumed } = admitted;
        let ranges = Ram::ranges(&ram);
        let is_known = attach.resume.is_some_and(|id| self.vm(id).is_some());
        let wait = self
            .must_wait(attach.resume, &ram)
            .or_else(|| self.must_wait_for_others(uid, attach.resume))
            .or_else(|| self.must_wait_for_engine(resumed.as_ref().filter(|_| !is_known)?, &ranges));
        if let Some(why) = wait {
            self.answer(key, KeeperToClient::Later(why));
            return Ok(());
        }
        let (index, escrow) = match (self.known(attach, uid, &ram)?, resumed) {
            (Some(index), resumed) => {
                self.check_joins(index, resumed.as_ref(), &ram)?;
                (index, None)
            }
            (None, resumed) => {
                // A VM that returns does not stay away because another user has a file with the numbers of its own.
                if let Some(other) = self.vms.iter().find(|vm| !matches!(vm.kin(&ram), Kin::None | Kin::Other)) {
                    return Err(format!("its RAM is that of VM {:?}, which it was not part of", other.state.name()));
                }
                let mut entry = match resumed {
                    Some(files) => self.resume(attach, files, uid)?,
                    None => {
                        let extents = attach.regions.iter().map(|region| region.extents.len());
                        self.check_mappings(uid, mappings::of_vm(extents))?;
                        self.create(attach, uid, pid)?
                    }
                };
                match file_store {
                    Some(Ok(_)) if entry.stores.iter().any(|files| files.store() == FILE_STORE) => {}
                    Some(Ok(files)) => entry.stores.push(Files::file(files)),
                    // It is served all the same.
                    Some(Err(error)) => {
                        let name = entry.state.name();
                        let message = format!("VM {name} has no file store, its far pages stay in RAM: {error}");
                        self.note(name, "spill-unavailable", message);
                    }
                    None => {}
                }
                // Before any engine serves it: without escrow it could not come back after this keeper's death.
                let escrow = entry.escrow()?;
                self.vms.push(entry);
                (self.vms.len() - 1, Some(escrow))
            }
        };
        let is_new = escrow.is_some();
        let vm = self.vms[index].state.id();
        if self.views_of(vm).any(|(other, _)| other == pid) {
            return Err("this process is attached to that VM already".into());
        }
        // Only a process that was part of the VM may bring an unknown region: it was plugged while no keeper ran.
        let may_add = is_new || attach.resume.is_some();
        let mut added = Vec::new();
        let spans = self.vms[index].number(ram, may_add, &mut added);
        if is_new && spans.is_err() {
            self.vms.pop();
        }
        if !is_new {
            self.tell_added(vm, pid, &added);
        }
        let spans = spans?;
        // Only now: until then the engine may write back, and no other process may have the file.
        self.reopened(vm);
        let numbers = spans.iter().map(|(_, number)| *number).collect();
        let entry = &mut self.vms[index];
        if let Some(reason) = &attach.pinned {
            entry.pinned = Some(reason.clone());
        }
        entry.may_pin |= attach.may_pin;
        let name = entry.state.name();
        let view = ClientView {
            vm,
            uffds: uffds.into_iter().map(Arc::new).collect(),
            uffd_features: attach.uffd_features,
            control: Arc::new(control),
            spans,
        };
        let order = add_view(pid, &view, &[], None);
        self.clients.get_mut(&key).ok_or("this client is gone")?.view = Some(view);
        tracing::info!(vm = name, id = %vm, pid, regions = attach.regions.len(), "attached");
        if let Some(escrow) = escrow {
            // A new VM has no far page. Far pages of a returning VM are registered, and their faults wait.
            self.search_or_hand_over(vm);
            let stores = Files::counts(&self.vms[index].stores);
            self.give_escrow(key, &KeeperToClient::Attached { vm, stores, is_first: true }, &escrow);
        } else if !self.vms[index].is_handed_over() {
            // That may take a minute or more, and no fault is served meanwhile.
            if attach.resume.is_some() {
                self.answer_attached(key);
            } else {
                self.answer_when_served(key, numbers, Answer::Attached)?;
            }
            self.tend_vm(vm);
        } else {
            // A new engine would learn these from OpenVm; the one that runs must be told.
            if let Some(reason) = attach.pinned.clone() {
                self.order(&Order::Pin { seq: UNASKED, vm, reason }, &[]);
            }
            if attach.may_pin {
                self.order(&Order::MayPin { seq: UNASKED, vm }, &[]);
            }
            self.order(&order.0, &order.1);
            // Pages may be far already: until its faults are seen, it would read zeros in their place.
            self.answer_when_served(key, numbers, Answer::Attached)?;
        }
        Ok(())
    }

    /// May a process with these descriptors become one more view of the VM?
    fn check_joins(&self, index: usize, resumed: Option<&Escrow>, ram: &[Ram]) -> Result<(), String> {
        let vm = &self.vms[index];
        if let Some(Escrow { state, .. }) = resumed {
            // The VM's own state file proves that it was part of the VM; knowing the id does not.
            let same = same_file(vm.state.fd(), state);
            if !same.map_err(|error| format!("Comparing state files: {error}"))? {
                return Err("the state file is another VM's".into());
            }
        }
        let is_shared = |kin| kin != Kin::None && (resumed.is_none() || kin != Kin::Other);
        match self.vms.iter().enumerate().find(|(other, entry)| *other != index && is_shared(entry.kin(ram))) {
            Some((_, other)) => Err(format!("some of its RAM is that of VM {:?}", other.state.name())),
            None => Ok(()),
        }
    }

    /// A VM that no keeper has seen before.
    pub(crate) fn create(&mut self, attach: &Attach, uid: u32, pid: u32) -> Result<VmEntry, String> {
        if self.has_name(&attach.name) {
            return Err(format!("a VM named {:?} is attached already", attach.name));
        }
        let mut entry = VmEntry::create(attach, uid, &self.closer)?;
        // Settings are kept by UUID: two VMs that are attached never share one.
        let twin = self.vms.iter().find(|vm| attach.uuid.is_some() && vm.state.uuid() == attach.uuid);
        let twin = twin.map(|vm| vm.state.name());
        entry.state.set_identity(attach.uuid.filter(|_| twin.is_none()), uid, pid);
        if let (Some(twin), Some(uuid)) = (twin, attach.uuid) {
            let name = attach.name.clone();
            let message = format!("VM {twin} has the UUID {uuid} of VM {name}, which runs without one until its end");
            self.note(name, "uuid-taken", message);
        }
        entry.at = self.at_for_new();
        if let Some(group) = group_of(&self.groups, &attach.name) {
            let arena = self.group_arena(group, uid)?;
            entry.stores.push(Files::group(SentFd::new(arena, uid, self.closer.clone()).checked(), entry.state.id())?);
        }
        Ok(entry)
    }

    /// An opening of its own of the arena that this user's VMs of a group have, or of a new one. Any user who may
    /// attach may give a VM any name, so an arena is per user: a name must not give access to others' memory.
    fn group_arena(&self, group: &str, uid: u32) -> Result<OwnedFd, String> {
        let say = |error: std::io::Error| format!("Opening the arena of group {group:?}: {error}");
        let is_of = |vm: &&VmEntry| vm.uid == uid && group_of(&self.groups, &vm.state.name()) == Some(group);
        let known = self.vms.iter().filter(is_of).find_map(|vm| vm.stores.iter().find_map(Files::group_arena));
        if let Some(known) = known {
            return memfd::reopen(known.as_fd(), true).map_err(say);
        }
        let made = arena::create().map_err(say)?;
        rustix::fs::fchmod(&made, rustix::fs::Mode::from_raw_mode(0o600)).map_err(|error| say(error.into()))?;
        // The opening that made it is another one, which announces no member.
        memfd::reopen(made.as_fd(), true).map_err(say)
    }

    pub(crate) fn add_region(
        &mut self,
        key: u64,
        region: RegionInfo,
        files: u8,
        fds: Vec<SentFd>,
    ) -> Result<(), String> {
        let client = self.clients.get(&key).ok_or("this client is gone")?;
        let view = client.view.as_ref().ok_or("attach first")?;
        let (vm, pid, features) = (view.vm, client.pid, view.uffd_features);
        self.check_memory(client.uid, [region.span.len])?;
        if fds.len() != usize::from(files) {
            return Err(format!("{} descriptors came with a new region that needs {files}", fds.len()));
        }
        let regions = [region];
        wire::check_regions(&regions, files)?;
        let [RegionInfo { span, .. }] = &regions;
        wire::check_spans(&view.spans.iter().map(|(span, _)| *span).chain([*span]).collect::<Vec<_>>())?;
        let taken: Vec<u32> = view.spans.iter().map(|(_, number)| *number).collect();
        let mut ram = admit::check_ram(&regions, fds, features)?;
        let ranges = Ram::ranges(&ram);
        if self.vms.iter().any(|other| other.state.id() != vm && other.has_any(&ranges)) {
            return Err(format!("region {} is RAM of another VM", span.hva));
        }
        if let Some(why) = self.must_wait(Some(vm), &ram) {
            self.answer(key, KeeperToClient::Later(why));
            return Ok(());
        }
        let ram = ram.pop().ok_or("a region is needed")?;
        let unplugs = self.unplugs_of(vm);
        let entry = self.entry_of(key)?;
        entry.check_files(&ram)?;
        // Another view may have brought the region already.
        let known = entry.find(&ram, &[]);
        if known.is_some_and(|number| taken.contains(&number)) {
            return Err(format!("region {} is mapped by this process already", span.hva));
        }
        if unplugs.iter().any(|(.., unplugged)| known == Some(*unplugged)) {
            self.answer(key, KeeperToClient::Later("this RAM is about to be unplugged".into()));
            return Ok(());
        }
        let number = match known {
            Some(number) => number,
            None => {
                let (uid, more) = (entry.uid, mappings::of_regions([ram.extents.list().len()]));
                self.check_mappings(uid, more)?;
                self.entry_of(key)?.append(&ram)?
            }
        };
        let entry = self.entry_of(key)?;
        entry.bring(number, ram.files);
        if let Some(view) = self.clients.get_mut(&key).and_then(|client| client.view.as_mut()) {
            view.spans.push((*span, number));
        }
        self.tell_region(vm, pid, Some(*span), number);
        if known.is_some() {
            // Pages of it may be far already, as for a process that attaches to a VM that is there.
            return self.answer_when_served(key, vec![number], Answer::Ok);
        }
        self.answer(key, KeeperToClient::Ok);
        Ok(())
    }

    /// Tell the engine that runs about regions a view brought with it; their addresses come with the view.
    fn tell_added(&mut self, vm: VmId, pid: u32, added: &[u32]) {
        for number in added {
            self.tell_region(vm, pid, None, *number);
        }
    }

    fn tell_region(&mut self, vm: VmId, pid: u32, span: Option<Span>, number: u32) {
        let Some(entry) = self.vm(vm).filter(|vm| vm.is_handed_over()) else { return };
        let Some(files) = entry.ram.get(number as usize).and_then(Option::as_ref) else { return };
        let fds: Vec<_> = files.iter().map(|(fd, _)| fd.clone()).collect();
        self.order(&Order::AddRegion { vm, pid, span, number, files: fds.len() as u8 }, &fds);
    }

    pub(crate) fn forget_region(&mut self, key: u64, vm: VmId, hva: Hva) {
        let Some(view) = self.clients.get_mut(&key).and_then(|client| client.view.as_mut()) else { return };
        let Some(at) = view.spans.iter().position(|(span, _)| span.hva == hva) else { return };
        view.spans.remove(at);
        self.forget_removed(vm, Instant::now());
    }

    /// Drop the files of regions that the engine has removed and that no process has. An engine that has not opened the
    /// VM, or that another process still has them from, did not remove them: the one that opens the VM next needs them.
    pub(crate) fn forget_removed(&mut self, id: VmId, now: Instant) {
        let had: HashSet<u32> =
            self.views_of(id).flat_map(|(_, view)| view.spans.iter().map(|(_, number)| *number)).collect();
        let Some(entry) = self.vms.iter_mut().find(|entry| entry.state.id() == id) else { return };
        entry.looks_at = Some(now + FORGET_EVERY);
        for ((number, record), ram) in (0..).zip(entry.state.regions()).zip(&mut entry.ram) {
            if record.removed && !had.contains(&number) {
                *ram = None;
            }
        }
    }

    pub(crate) fn vm(&self, id: VmId) -> Option<&VmEntry> {
        self.vms.iter().find(|vm| vm.state.id() == id)
    }

    /// The VM this client is attached to.
    pub(crate) fn entry_of(&mut self, key: u64) -> Result<&mut VmEntry, String> {
        let id = self.clients.get(&key).and_then(|client| client.view.as_ref()).ok_or("attach first")?.vm;
        self.vms.iter_mut().find(|vm| vm.state.id() == id).ok_or_else(|| "the VM is gone".into())
    }
}
