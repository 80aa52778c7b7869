//! The requests of clients, and the ends of their connections.
//!
//! Before: a client sent a message (`client`). After: the request was carried out, or an engine has an order for it.
//! Requests are handled one at a time. Threads: the keeper's one.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use anyhow::{Context, bail};
use ballast_base::Bytes;
use ballast_base::text::ascii;
use ballast_base::wire::{self, ClientToKeeper, KeeperToClient, MAX_REGIONS, VmId};
use ballast_handover::failure::Failure;
use ballast_handover::orders::Order;
use ballast_sys::{Uffd, process};

use crate::client::{Answer, ClientView, Heard, Peer};
use crate::keeper::Keeper;
use crate::place::At;
use crate::store_files::Files;
use crate::vms::Vm;
use ballast_sys::slow_fd::SlowFd;

pub const GONE: &str = "this client is gone";
pub const NO_VIEW: &str = "attach first";
pub const NO_VM: &str = "the VM is gone";

impl Keeper {
    pub(crate) fn tend_clients(&mut self, now: Instant) {
        for key in self.clients.late(now) {
            self.drop_client(key, "did not attach in time");
        }
    }

    pub(crate) fn hear_client(&mut self, key: u64) {
        let refused = match self.clients.hear(key) {
            Heard::Message(message, fds) => self.obey(key, message, fds),
            Heard::Nothing => return,
            Heard::Nonsense(why) => Err(why),
            Heard::End(why) => return self.drop_client(key, &why),
        };
        if let Err(why) = refused {
            self.refuse(key, &why);
        }
    }

    pub(crate) fn refuse(&mut self, key: u64, why: &anyhow::Error) {
        if self.clients.refuse(key, format!("{why:#}")) {
            self.drop_client(key, "sends nothing but nonsense, or takes no answers");
        }
    }

    fn obey(&mut self, key: u64, message: ClientToKeeper, fds: Vec<SlowFd>) -> anyhow::Result<()> {
        let brings = matches!(message, ClientToKeeper::Attach(_) | ClientToKeeper::AddRegion { .. });
        if !brings && !fds.is_empty() {
            bail!("{} descriptors came with a message that needs none", fds.len());
        }
        match message {
            ClientToKeeper::Attach(attach) => self.attach(key, &attach, fds),
            ClientToKeeper::AddRegion { region, files } => {
                let len = region.span.len;
                let Err(why) = self.add_region(key, region, files, fds) else { return Ok(()) };
                let Ok(vm) = self.vm_of(key) else { return Err(why) };
                let (name, is_full) = (vm.name(), vm.held.state().regions().len() >= MAX_REGIONS);
                let message = format!("{len} of RAM plugged into VM {name} are not managed: {why:#}");
                self.note(name, "ram-unmanaged", message);
                if !is_full {
                    return Err(why);
                }
                // A VMM that plugs RAM all its life does nothing wrong, so this refusal does not count as a fault.
                self.clients.answer(key, KeeperToClient::Refused(format!("{why:#}")));
                Ok(())
            }
            ClientToKeeper::RemoveRegion(hva) => {
                let region = self.clients.view(key).context(NO_VIEW)?.region_at(hva);
                self.ask_engine(key, Answer::Ok, |seq, vm, pid| Order::RemoveRegion { seq, vm, pid, hva, region })
            }
            ClientToKeeper::Pin(reason) => {
                if reason.len() > 256 {
                    bail!("the reason is longer than 256 bytes");
                }
                let reason = ascii(&reason);
                self.vm_of(key)?.held.pin(reason.clone());
                self.ask_engine(key, Answer::Ok, |seq, vm, _| Order::Pin { seq, vm, reason })
            }
            ClientToKeeper::Unmanaged { name, len, why } => self.unmanaged(key, name, len, &why),
            ClientToKeeper::Device => {
                let device = Uffd::device().context("Opening /dev/userfaultfd")?;
                self.clients.send(key, &KeeperToClient::Device, &[device.as_fd()]);
                Ok(())
            }
            ClientToKeeper::MayPin => {
                self.vm_of(key)?.held.set_may_pin();
                self.ask_engine(key, Answer::Ok, |seq, vm, _| Order::MayPin { seq, vm })
            }
            ClientToKeeper::GuestRanges { hva, ranges } => {
                let region = self.clients.view(key).context(NO_VIEW)?.region_at(hva);
                let number = region.with_context(|| format!("no RAM region begins at {hva}"))?;
                let state = self.vm_of(key)?.held.state();
                state.set_guest_ranges(number, &ranges)?;
                self.clients.answer(key, KeeperToClient::Ok);
                Ok(())
            }
        }
    }

    /// Notes that some RAM of a guest, or a whole VM, is not managed.
    fn unmanaged(&mut self, key: u64, name: String, len: Bytes, why: &str) -> anyhow::Result<()> {
        if why.len() > 256 {
            bail!("the reason is longer than 256 bytes");
        }
        let why = wire::shown_name(why);
        let Peer { pid, uid } = self.clients.peer(key).context(GONE)?;
        let (name, message) = match self.vm_of(key) {
            Ok(vm) => {
                let (name, before) = (vm.name(), vm.held.state().unmanaged());
                vm.held.state().set_unmanaged(len);
                self.clients.answer(key, KeeperToClient::Ok);
                if len <= before {
                    return Ok(());
                }
                (name.clone(), format!("{len} of the RAM of VM {name} are not managed: {why}"))
            }
            Err(_) => {
                wire::check_name(&name)?;
                (name.clone(), format!("process {pid} of user {uid}, which calls itself {name}, runs unmanaged: {why}"))
            }
        };
        self.note(name, "ram-unmanaged", message);
        Ok(())
    }

    /// The engine has carried out, or refused, an order for which a client waits.
    pub(crate) fn answered(&mut self, seq: u64, result: Result<(), Failure>) {
        let Some((key, order, answer)) = self.clients.waits_for(seq) else { return };
        // Even if the order failed: the client's process unmaps the region in any case.
        if let Order::RemoveRegion { vm, hva, .. } = *order {
            self.clients.unmap(key, hva);
            self.forget_removed(vm);
        }
        match (result, answer) {
            (Err(reason), Answer::Ok) => self.clients.settle(seq, Some(KeeperToClient::Refused(reason.to_string()))),
            (Ok(()), Answer::Ok) => self.clients.settle(seq, Some(KeeperToClient::Ok)),
            // A client sends the engine no request before it attaches, so no earlier reply is due.
            (Ok(()), Answer::Attached) => {
                self.answer_attached(key);
                self.clients.settle(seq, None);
            }
            (Err(reason), Answer::Attached) => self.refuse_attached(key, &reason.to_string()),
        }
    }

    /// Tells a client that it is attached, and gives it its VM's escrow.
    pub(crate) fn answer_attached(&mut self, key: u64) {
        let escrow = self.vm_of(key).and_then(|vm| Ok((vm.id(), Files::counts(vm.held.stores()), vm.held.escrow()?)));
        match escrow {
            Ok((vm, stores, escrow)) => {
                self.give_escrow(key, &KeeperToClient::Attached { vm, stores, is_first: false }, &escrow);
            }
            // Without escrow the VM could not come back after this keeper's death.
            Err(why) => self.refuse_attached(key, &format!("{why:#}")),
        }
    }

    pub(crate) fn give_escrow(&mut self, key: u64, attached: &KeeperToClient, escrow: &[OwnedFd]) {
        self.clients.send(key, attached, &escrow.iter().map(AsFd::as_fd).collect::<Vec<_>>());
    }

    /// Refuses a client whose attach passed the checks and failed later.
    fn refuse_attached(&mut self, key: u64, reason: &str) {
        self.clients.send(key, &KeeperToClient::Refused(reason.to_owned()), &[]);
        self.drop_client(key, reason);
    }

    pub(crate) fn drop_client(&mut self, key: u64, why: &str) {
        let Some((Peer { pid, .. }, view)) = self.clients.end(key) else { return };
        let Some(ClientView { vm, .. }) = view else {
            tracing::debug!(pid, "a process that did not attach {why}");
            return;
        };
        // A process that has ended has no memory when its sockets close. A pinned process has all of its pages: it has
        // executed another program, as it announced.
        let is_pinned = self.vms.get(vm).is_some_and(|vm| vm.held.is_pinned());
        if process::has_memory(pid) && !is_pinned {
            let name = self.vms.get(vm).map_or_else(|| vm.to_string(), Vm::name);
            let message = format!(
                "process {pid} {why}, and runs on without a connection: it has executed another program past the C \
                 library, or closed what is not its own. Ballast has lost sight of its RAM, which may read as zeros \
                 there until far pages are written back"
            );
            self.note(name, "sight-lost", message);
        }
        self.order(&Order::RemoveView { vm, pid }, &[]);
        if self.clients.views_of(vm).next().is_none() {
            let name = self.vms.get(vm).map(Vm::name);
            tracing::info!(vm = name, pid, "the VM's process {why}: forgetting the VM");
            self.close_vm(vm);
        }
    }

    /// Replies to a client when it can touch these regions of its VM (see [`Order::Reach`]).
    pub(crate) fn answer_when_served(&mut self, key: u64, regions: Vec<u32>, answer: Answer) -> anyhow::Result<()> {
        self.ask_engine(key, answer, |seq, vm, pid| Order::Reach { seq, vm, pid, regions })
    }

    fn ask_engine(
        &mut self,
        key: u64,
        answer: Answer,
        order: impl FnOnce(u64, VmId, u32) -> Order,
    ) -> anyhow::Result<()> {
        let seq = self.engines.number();
        let order = self.clients.wait(key, answer, seq, order).context(NO_VIEW)?;
        // An engine that gets the VM later, or gets it alone, is then given the orders for which clients wait.
        let vm = order.vm().and_then(|vm| self.vms.get(vm));
        if vm.is_some_and(|vm| vm.place.is_handed_over() && vm.place.at() != At::Both) {
            self.order(&order, &[]);
        }
        Ok(())
    }
}
