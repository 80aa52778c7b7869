//! A keeper's record, and a keeper made from it.
//!
//! Before: nothing prevents an exec (`replace`). After: the next program has the same VMs, clients and engine as this
//! one had.
//! Threads: the keeper's one.
//! Promise: making a keeper takes duplicates of the descriptors, reads files, and sends nothing. So if a program fails
//! here, the one before it can be the keeper again.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use ballast_base::wire::{KeeperToClient, WireError, decode, encode};
use ballast_handover::kept::{Kept, KeptAsk, KeptClient, KeptEngine, KeptView, KeptVm, Number};
use ballast_handover::orders::Order;
use ballast_handover::state_file::StateFile;
use ballast_sys::exec::duplicate;
use ballast_sys::memfd::FileId;
use ballast_sys::process::Process;
use ballast_sys::spawn::{Child, Starter};

use crate::client::{Client, ClientView};
use crate::closer::{Closer, SentFd};
use crate::engine::Engine;
use crate::keeper::{Keeper, Standing};
use crate::options::Options;
use crate::program::Program;
use crate::regions::VmEntry;
use crate::store_files::Files;
use crate::waiting::{Answer, Asked, Closing};

impl Keeper {
    /// The record of this keeper; `None` if it cannot be recorded (`replace` says why).
    pub(crate) fn kept(&self) -> Option<Kept> {
        let (standing, engine) = (self.standing.as_ref()?, self.engine.as_ref()?);
        let number = |fd: &dyn AsFd| fd.as_fd().as_raw_fd();
        let Process { pid, start } = engine.process;
        let ask = |(seq, asked): (&u64, &Asked)| KeptAsk {
            seq: *seq,
            client: asked.client,
            order: encode(&asked.order),
            attaches: asked.answer == Answer::Attached,
        };
        let owed = |(key, client): (&u64, &Client)| {
            let holds_any = client.owed.iter().any(Option::is_some);
            let replies = client.owed.iter().map(|reply| reply.as_ref().map_or_else(Vec::new, encode));
            holds_any.then(|| (*key, replies.collect()))
        };
        let client = |(key, client): (&u64, &Client)| KeptClient {
            key: *key,
            socket: number(&client.socket),
            pid: client.pid,
            uid: client.uid,
            faults: client.faults,
            view: client.view.as_ref().map(|view| KeptView {
                vm: view.vm,
                uffds: view.uffds.iter().map(|fd| number(&**fd)).collect(),
                uffd_features: view.uffd_features,
                control: number(&*view.control),
                spans: view.spans.clone(),
            }),
        };
        Some(Kept {
            lock: standing.lock,
            attach: number(&*standing.attach),
            api: number(&*self.api),
            program: self.program.path().as_os_str().as_bytes().to_vec(),
            own_program: self.own_program.path().as_os_str().as_bytes().to_vec(),
            settings: self.settings.clone(),
            file_stores: self.file_stores,
            since_unix_s: self.since_unix_s,
            restarts: self.restarts,
            upgrading: encode(&Order::Upgrading(self.last_upgrade.clone())),
            engine: KeptEngine { pid, start, pidfd: number(&engine.child.pidfd()), socket: number(&engine.socket) },
            zombies: self.zombies.iter().map(|child| (child.id(), number(&child.pidfd()))).collect(),
            vms: self.vms.iter().map(kept_vm).collect(),
            closing: self.closing.iter().map(|closing| (closing.seq, closing.given, kept_vm(&closing.entry))).collect(),
            clients: self.clients.iter().map(client).collect(),
            pending: self.pending.iter().map(ask).collect(),
            next_client: self.next_client,
            next_seq: self.next_seq,
            groups: self.groups.clone(),
            owed: self.clients.iter().filter_map(owed).collect(),
        })
    }

    /// The keeper of this record, in the next program. `own_program` is the next program.
    ///
    /// # Errors
    /// A descriptor is not open, or a file cannot be read by this program.
    pub(crate) fn of(kept: &Kept, own_program: Program, starter: Starter) -> anyhow::Result<Self> {
        let fd = |number: Number| duplicate(number).with_context(|| format!("Taking over descriptor {number}"));
        let options = Options {
            file_stores: kept.file_stores,
            groups: kept.groups.clone(),
            engine: kept.settings.clone(),
            ..Options::default()
        };
        let mut keeper = Self::new(options, own_program, starter, fd(kept.api)?);
        let closer = keeper.closer.clone();
        keeper.since_unix_s = kept.since_unix_s;
        keeper.restarts = kept.restarts;
        (keeper.next_client, keeper.next_seq) = (kept.next_client, kept.next_seq);
        let Order::Upgrading(upgrading) = decode(&kept.upgrading).context("Reading how the upgrade stands")? else {
            bail!("how the upgrade stands is no such message");
        };
        keeper.last_upgrade = upgrading;
        let child = |pid, pidfd: OwnedFd| Child::known(pid, pidfd).with_context(|| format!("Taking over child {pid}"));
        let KeptEngine { pid, start, pidfd, socket } = kept.engine;
        let mut engine = Engine::new(child(pid, fd(pidfd)?)?, Process { pid, start }, fd(socket)?);
        (engine.told_to_serve, engine.pulse.starting) = (true, None);
        keeper.engine = Some(engine);
        for (pid, pidfd) in &kept.zombies {
            keeper.zombies.push(child(*pid, fd(*pidfd)?)?);
        }
        for vm in &kept.vms {
            keeper.vms.push(vm_again(vm, &closer)?);
        }
        for (seq, given, vm) in &kept.closing {
            keeper.closing.push(Closing::new(*seq, vm_again(vm, &closer)?, *given));
        }
        for ask in &kept.pending {
            let order = decode(&ask.order).context("Reading what a client waits for")?;
            let answer = if ask.attaches { Answer::Attached } else { Answer::Ok };
            keeper.pending.insert(ask.seq, Asked { client: ask.client, order, answer });
        }
        for client in &kept.clients {
            let owed = owed_again(kept, client.key).context("Reading what a client is owed")?;
            keeper.clients.insert(client.key, client_again(client, owed, &closer)?);
        }
        keeper.standing = Some(Standing { lock: kept.lock, attach: Arc::new(fd(kept.attach)?) });
        Ok(keeper)
    }
}

fn kept_vm(vm: &VmEntry) -> KeptVm {
    let numbers = |files: &Files| files.iter().map(|fd| fd.as_fd().as_raw_fd()).collect();
    let file = |(fd, id): &(Arc<SentFd>, FileId)| (fd.as_fd().as_raw_fd(), id.dev, id.ino);
    KeptVm {
        state: vm.state.fd().as_raw_fd(),
        stores: vm.stores.iter().map(|files| (files.store(), numbers(files))).collect(),
        ram: vm.ram.iter().map(|ram| ram.as_ref().map(|files| files.iter().map(file).collect())).collect(),
        uid: vm.uid,
        vmm: vm.vmm.clone(),
        pinned: vm.pinned.clone(),
        may_pin: vm.may_pin,
        named_at: vm.named_at,
    }
}

/// A socket to a client.
fn unchecked(number: Number, uid: u32, closer: &Arc<Closer>) -> anyhow::Result<SentFd> {
    let fd = duplicate(number).with_context(|| format!("Taking over descriptor {number}"))?;
    Ok(SentFd::new(fd, uid, closer.clone()))
}

/// A descriptor that was checked when it came.
fn sent(number: Number, uid: u32, closer: &Arc<Closer>) -> anyhow::Result<SentFd> {
    Ok(unchecked(number, uid, closer)?.checked())
}

fn vm_again(vm: &KeptVm, closer: &Arc<Closer>) -> anyhow::Result<VmEntry> {
    let fd = duplicate(vm.state).with_context(|| format!("Taking over descriptor {}", vm.state))?;
    let state = StateFile::open(fd)?;
    let name = state.name();
    let stores = vm.stores.iter().map(|(store, files)| {
        let files = files.iter().map(|number| Ok(Arc::new(sent(*number, vm.uid, closer)?)));
        Ok(Files::of(*store, files.collect::<anyhow::Result<_>>()?))
    });
    let stores = stores.collect::<anyhow::Result<_>>()?;
    let mut entry = VmEntry::new(state, stores, vm.vmm.clone(), vm.uid, closer).map_err(anyhow::Error::msg)?;
    if entry.ram.len() != vm.ram.len() {
        bail!("VM {name} has {} regions, and {} were written down", entry.ram.len(), vm.ram.len());
    }
    // Several regions may be parts of one file.
    let mut known: HashMap<Number, Arc<SentFd>> = HashMap::new();
    for (ram, kept) in entry.ram.iter_mut().zip(&vm.ram) {
        let Some(kept) = kept else { continue };
        let mut files = Vec::new();
        for (number, dev, ino) in kept {
            let fd = match known.get(number) {
                Some(fd) => fd.clone(),
                None => Arc::new(sent(*number, vm.uid, closer)?),
            };
            known.insert(*number, fd.clone());
            files.push((fd, FileId { dev: *dev, ino: *ino }));
        }
        *ram = Some(files);
    }
    entry.pinned = vm.pinned.clone();
    (entry.may_pin, entry.named_at) = (vm.may_pin, vm.named_at);
    Ok(entry)
}

/// The replies that a client gets, in order: those that wait for an engine, and others behind them.
fn owed_again(kept: &Kept, key: u64) -> Result<VecDeque<Option<KeeperToClient>>, WireError> {
    let reply = |bytes: &Vec<u8>| if bytes.is_empty() { Ok(None) } else { decode(bytes).map(Some) };
    match kept.owed.iter().find(|(client, _)| *client == key) {
        Some((_, replies)) => replies.iter().map(reply).collect(),
        None => Ok(kept.pending.iter().filter(|ask| ask.client == key).map(|_| None).collect()),
    }
}

fn client_again(
    client: &KeptClient,
    owed: VecDeque<Option<KeeperToClient>>,
    closer: &Arc<Closer>,
) -> anyhow::Result<Client> {
    let KeptClient { socket, pid, uid, faults, ref view, .. } = *client;
    let view = view.as_ref().map(|view| {
        let uffds = view.uffds.iter().map(|number| Ok(Arc::new(sent(*number, uid, closer)?)));
        anyhow::Ok(ClientView {
            vm: view.vm,
            uffds: uffds.collect::<anyhow::Result<_>>()?,
            uffd_features: view.uffd_features,
            control: Arc::new(unchecked(view.control, uid, closer)?),
            spans: view.spans.clone(),
        })
    });
    let view = view.transpose()?;
    Ok(Client { socket: unchecked(socket, uid, closer)?, pid, uid, view, since: Instant::now(), faults, owed })
}
