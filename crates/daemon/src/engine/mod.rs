//! The engine: opens what the keeper hands over and keeps it served.
//!
//! Before: the keeper starts it with a socket as standard input. After: it is killed, or the keeper is gone and the
//! last VM too.
//! Threads: this one takes orders and never waits for what they are about; the API, the watch, the control loop and the
//! look for stuck threads have one each, and change nothing of any VM but words in memory; orders are carried out on
//! the threads of the pool, and VMs have fault workers and jobs. A thread is in the list of a VM's state file while it
//! works for that VM (`ballast_handover::threads`).
//! Promise: it may be killed at any instruction. What must outlive it is in the state files and arenas already. It
//! opens only VMs whose state file names it.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, mpsc};
use std::time::Duration;

use anyhow::{Context, bail};
use ballast_base::Bytes;
use ballast_base::store::{FILE_STORE, RAM_STORE};
use ballast_base::wire::{self, VmId};
use ballast_handover::state_file::StateFile;
use ballast_pager::run::pool::{blocking, run_first};
use ballast_pager::tier::stores::{LateStore, Stores, Tier};
use ballast_pager::vm::region_table::LOST;
use ballast_pager::vm::stats::Counter;
use ballast_pager::vm::view::View;
use ballast_pager::vm::{Hold, Tuning, Vm};
use ballast_store::{Budget, Codec, FileOptions, RamOptions, RamStore};
use ballast_sys::{memory_error, scm};

use crate::backend::{Host, KEPT, Served};
use crate::config::Compression;
use crate::events::Events;
use crate::http::{self, PeerPolicy};
use crate::keeper::fence::Process;
use crate::orders::{Begin, Order, Report};
use crate::tracking;
use control::Control;
use late::LateFile;
use workers::Workers;
use write_back::Closing;

pub mod control;
pub mod foreign_mappers;
pub mod huge_pages;
pub mod late;
mod make;
mod memory;
mod pin_check;
pub mod stuck;
mod views;
pub mod workers;
mod write_back;

/// How long the API waits for VMs to be opened: one of hundreds of GiB takes a second or two.
const OPENING: Duration = Duration::from_secs(3);
/// How often an engine without keeper looks whether any VM is left.
const ORPHAN_LOOKS_EVERY: Duration = Duration::from_millis(200);

/// Take orders until the keeper is gone and no VM is left.
pub fn run() -> anyhow::Result<()> {
    let keeper = std::io::stdin().as_fd().try_clone_to_owned().context("Taking the keeper's socket")?;
    let keeper = Arc::new(keeper);
    let Some(first) =
        scm::receive(&*keeper).context("Receiving the first order (engines are started by the keeper)")?
    else {
        bail!("the keeper closed the socket before its first order");
    };
    let order = wire::decode::<Order>(&first.bytes).context("This engine cannot serve its keeper: restart ballastd")?;
    let (Order::Begin(begin), [api]) = (order, &first.fds[..]) else {
        bail!("the keeper's first order is not the one to begin");
    };
    protect_from_oom_killer();
    let errors_seen = memory_error::install().context("Preparing for memory errors")?;
    let events = Arc::new(Events::default());
    let reports = keeper.clone();
    let keep = move |setup| {
        if let Err(error) = scm::send(&*reports, &wire::encode(&Report::Policy(setup)), &[]) {
            tracing::warn!("Reporting the policy to the keeper: {error}");
        }
    };
    let host = Arc::new(Host {
        control: Control::new(begin.policy, keep),
        budget: Budget::new(begin.store_budget),
        file_budget: Budget::new(begin.spill.as_ref().map_or(Bytes(0), |spill| spill.budget)),
        begin: begin.clone(),
        vms: RwLock::default(),
        events: events.clone(),
        pins: Arc::default(),
    });
    let api = api.try_clone().context("Duplicating a descriptor")?;
    let watch = foreign_mappers::start(host.clone())?;
    pin_check::start(host.pins.clone())?;
    Control::start(host.clone(), watch.clone()).context("Starting the control loop")?;
    stuck::start(host.clone()).context("Starting to look for threads that are stuck")?;
    let me = Process::this().context("Finding this process's start time")?;
    let engine = Arc::new(Engine {
        keeper,
        me,
        begin,
        host,
        events,
        watch,
        closing: Mutex::default(),
        overdue: make::Overdue::default(),
    });
    let workers = Arc::new(Mutex::new(Workers::default()));
    memory::start(&engine, &workers, errors_seen)?;
    let mut orders = Orders { engine, workers, api: Some(api) };
    orders.take()?;
    orders.serve_as_orphan();
    Ok(())
}

/// The kernel should rather kill a guest than the process that holds back memory of many.
fn protect_from_oom_killer() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-900") {
        tracing::debug!("Lowering this process's OOM score: {error}");
    }
}

fn serve_api(listener: OwnedFd, host: Arc<Host>, reader_gid: Option<u32>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("Starting the API")?;
    std::thread::Builder::new().name("api".into()).spawn(move || {
        // An operator who waits for an answer must not wait behind hundreds of vCPUs.
        run_first();
        runtime.block_on(async {
            match tokio::net::UnixListener::from_std(listener.into()) {
                Ok(listener) => http::serve(listener, host, PeerPolicy::new(reader_gid)).await,
                Err(error) => tracing::error!("Listening on the API socket: {error}"),
            }
        });
    })?;
    Ok(())
}

/// Nanoseconds on the clock that keeper and engine share.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The thread that takes orders.
struct Orders {
    engine: Arc<Engine>,
    workers: Arc<Mutex<Workers>>,
    /// The API's listener, until it is served.
    api: Option<OwnedFd>,
}

impl Orders {
    fn workers(&self) -> MutexGuard<'_, Workers> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&mut self) -> anyhow::Result<()> {
        loop {
            let received = match scm::receive(&*self.engine.keeper) {
                Ok(Some(received)) => received,
                Ok(None) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                // Its descriptors found no room in our table: one VM is not served as it should be, all others are.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    self.engine.failed(None, "an order", &anyhow::Error::new(error).context("Receiving it whole"));
                    continue;
                }
                Err(error) => return Err(error).context("Receiving an order"),
            };
            let order = wire::decode::<Order>(&received.bytes).context("Understanding an order")?;
            let what = format!("{order:?}");
            if let Err(error) = self.carry_out(order, received.fds) {
                self.engine.failed(None, &what, &error);
            }
        }
    }

    /// Carry out an order that takes no time; give the others to the VM's worker.
    fn carry_out(&mut self, order: Order, fds: Vec<OwnedFd>) -> anyhow::Result<()> {
        let engine = self.engine.clone();
        match order {
            Order::Begin(_) => {}
            Order::Ping => engine.report(&Report::Pong)?,
            Order::Serve => self.serve()?,
            Order::Note { vm, kind, message } => engine.events.add(vm, &kind, message),
            Order::CloseVm { seq, vm } => self.close(vm, Some(seq))?,
            Order::MakeFileStore { seq } => engine.make_file_store(seq)?,
            order => {
                if let Order::OpenVm { vm, .. } = &order {
                    engine.stop_writing_back(*vm);
                }
                if let Some(vm) = order.vm() {
                    self.workers().give(vm, move || engine.carry_out(vm, order, fds))?;
                }
            }
        }
        Ok(())
    }

    /// Have a VM closed, after what was ordered before, and say so to whoever waits for it.
    fn close(&mut self, vm: VmId, seq: Option<u64>) -> io::Result<()> {
        let engine = self.engine.clone();
        // From now on, so that an order to open it again finds it.
        let closing = engine.begin_closing(vm);
        self.workers().give_last(vm, move || {
            engine.close_vm(vm, &closing);
            engine.end_closing(vm, &closing);
            if let Some(Err(error)) = seq.map(|seq| engine.done(seq, Ok(()))) {
                tracing::debug!("Reporting that VM {vm} is closed: {error:#}");
            }
        })
    }

    /// Begin to answer the API, once the VMs handed over are open: nobody shall be told that a VM does not exist
    /// because it has not been opened yet. One that does not open in time keeps nobody from all the others.
    fn serve(&mut self) -> anyhow::Result<()> {
        let opened = self.workers().all_so_far();
        let (engine, api) = (self.engine.clone(), self.api.take());
        std::thread::Builder::new().name("serve".into()).spawn(move || {
            if !opened.wait(OPENING) {
                tracing::warn!("not every VM is open and served after {OPENING:?}: answering the API all the same");
            }
            let served = api.map_or(Ok(()), |api| serve_api(api, engine.host.clone(), engine.begin.reader_gid));
            if let Err(error) = served.and_then(|()| engine.report(&Report::Serving)) {
                engine.failed(None, "Serve", &error);
            }
        })?;
        Ok(())
    }

    /// The keeper is gone. Serve faults until the next keeper's engine ends us, or until no VM is left.
    fn serve_as_orphan(&mut self) {
        tracing::error!("the keeper is gone: serving faults, reclaiming nothing, until another one comes");
        let (host, events) = (self.engine.host.clone(), self.engine.events.clone());
        events.add(None, "keeper-gone", "the keeper is gone; reclaim is paused until ballastd runs again".into());
        // Some may not be open yet. The next keeper knows of us from their state files.
        let mut done = self.workers().all_so_far();
        loop {
            let is_over = done.is_over();
            let vms = host.all();
            if is_over && vms.is_empty() {
                tracing::info!("no VM is left: ending");
                return;
            }
            for served in vms {
                served.vm.hold(Hold::Orphaned, Some("ballastd is not running".into()));
                if is_over && served.vm.views().iter().all(|view| view.is_disconnected()) {
                    let id = served.vm.state.id();
                    if let Err(error) = self.close(id, None) {
                        tracing::error!("Closing VM {id}: {error}");
                    }
                    done = self.workers().all_so_far();
                }
            }
            std::thread::sleep(ORPHAN_LOOKS_EVERY);
        }
    }
}

/// The calling thread works for the VM no more when this is dropped.
struct Unlists<'a>(&'a Vm);

impl Drop for Unlists<'_> {
    fn drop(&mut self) {
        self.0.state.unlist_thread();
    }
}

/// What an order to open a VM says of it.
struct Opening {
    vmm: String,
    pinned: Option<String>,
    may_pin: bool,
    has_file: bool,
}

/// Mend what the workers of a VM left behind. None of them runs.
fn mend(vm: &Vm) -> anyhow::Result<()> {
    let recovered = vm.recover()?;
    let far: Vec<_> = recovered.live.iter().map(|(number, live)| (*number, live.count())).collect();
    tracing::warn!(vm = vm.state.name(), ?far, mended = recovered.mended, "took over");
    Ok(())
}

/// What the thread that takes orders and the workers share.
struct Engine {
    keeper: Arc<OwnedFd>,
    me: Process,
    begin: Begin,
    host: Arc<Host>,
    events: Arc<Events>,
    /// The watch looks for foreign mappers of each VM that is sent here.
    watch: mpsc::Sender<Arc<Served>>,
    /// VMs that are being closed.
    closing: Mutex<HashMap<VmId, Closing>>,
    /// File stores that are being made.
    overdue: make::Overdue,
}

impl Engine {
    fn report(&self, report: &Report) -> anyhow::Result<()> {
        scm::send(&*self.keeper, &wire::encode(report), &[]).context("Reporting to the keeper")
    }

    fn failed(&self, vm: Option<String>, what: &str, error: &anyhow::Error) {
        tracing::error!(vm, "Carrying out {what}: {error:#}");
        self.events.add(vm, "order-failed", format!("{error:#}"));
    }

    /// Carry out an order about a VM, on its worker.
    fn carry_out(&self, id: VmId, order: Order, fds: Vec<OwnedFd>) {
        let what = format!("{order:?}");
        let served = self.host.by_id(id);
        let _listed = served.as_ref().map(|served| served.vm.state.list_thread());
        let result = match (order, &served) {
            (Order::OpenVm { vmm, pinned, may_pin, has_file, .. }, None) => {
                self.open_vm(id, Opening { vmm, pinned, may_pin, has_file }, fds)
            }
            (Order::AddView { pid, uffd_features, spans, unserved_since_ns, .. }, Some(served)) => {
                self.add_view(served, pid, uffd_features, &spans, unserved_since_ns, fds)
            }
            (Order::AddRegion { pid, info, number, .. }, Some(served)) => {
                self.add_region(served, pid, &info, number, fds)
            }
            (Order::RemoveRegion { seq, pid, hva, .. }, Some(served)) => {
                let view = served.vm.views().into_iter().find(|view| view.pid == pid);
                let removed = view.map_or(Ok(None), |view| served.vm.remove_region(&view, hva));
                self.done(seq, removed.map(|_| ()))
            }
            (Order::Pin { seq, reason, .. }, Some(served)) => self.restore(served, Hold::Pinned, reason, seq),
            (Order::Reach { seq, pid, regions, .. }, Some(served)) => self.reach(served, seq, pid, &regions),
            (Order::Reach { seq, .. }, None) => {
                self.done(seq, Err(io::Error::other("the VM could not be opened, so nobody is served")))
            }
            (Order::MayPin { seq, .. }, Some(served)) => {
                served.vm.set_may_pin();
                self.done(seq, Ok(()))
            }
            (Order::RemoveView { pid, .. }, Some(served)) => {
                served.vm.remove_view(pid);
                served.forget_pid(pid);
                Ok(())
            }
            // Nothing is reclaimed from a VM that is not open: what they ask for is so.
            (Order::RemoveRegion { seq, .. } | Order::Pin { seq, .. } | Order::MayPin { seq, .. }, None) => {
                self.done(seq, Ok(()))
            }
            (Order::RemoveView { .. }, None) => Ok(()),
            (_, served) => {
                Err(anyhow::anyhow!("the VM is {}", if served.is_some() { "open already" } else { "not open" }))
            }
        };
        if let Err(error) = result {
            let error = error.context(format!("VM {id}"));
            self.failed(served.as_ref().map(|served| served.vm.state.name()), &what, &error);
        }
    }

    fn done(&self, seq: u64, result: io::Result<()>) -> anyhow::Result<()> {
        self.report(&Report::Done { seq, result: result.map_err(|error| error.to_string()) })
    }

    /// Is this process served in these regions? If not, it may read zeros where pages are far, so the answer is that
    /// none is.
    fn reach(&self, served: &Arc<Served>, seq: u64, pid: u32, regions: &[u32]) -> anyhow::Result<()> {
        let (its, others): (Vec<_>, Vec<_>) = served.vm.views().into_iter().partition(|view| view.pid == pid);
        let in_all =
            |views: &[Arc<View>]| regions.iter().all(|number| views.iter().any(|view| view.base(*number).is_some()));
        let unserved = served.unserved_of(pid);
        if in_all(&its) && unserved.is_none() {
            return self.done(seq, Ok(()));
        }
        let reason = unserved.unwrap_or_else(|| format!("process {pid} is not served"));
        served.set_unserved(pid, reason.clone());
        if !in_all(&others) {
            return self.done(seq, Err(io::Error::other(format!("{reason}; no other process maps all of its RAM"))));
        }
        self.restore(served, Hold::Shared, reason, seq)
    }

    /// Keep every page in memory, and answer when all are back: a VMM that is about to pin its memory must not wait for
    /// a far page in the kernel, and a process that cannot be served must find none. From a thread of its own, because
    /// that takes a second for some 100,000 far pages.
    fn restore(&self, served: &Arc<Served>, kind: Hold, reason: String, seq: u64) -> anyhow::Result<()> {
        let keeper = self.keeper.clone();
        let begun = served.restore(kind, reason, move |result| {
            let report = Report::Done { seq, result: result.map_err(|error| error.to_string()) };
            if let Err(error) = scm::send(&*keeper, &wire::encode(&report), &[]) {
                tracing::error!("Reporting to the keeper: {error}");
            }
        });
        begun.or_else(|error| self.done(seq, Err(error)))
    }

    fn open_vm(
        &self,
        id: VmId,
        Opening { vmm, pinned, may_pin, has_file }: Opening,
        fds: Vec<OwnedFd>,
    ) -> anyhow::Result<()> {
        let mut fds = fds.into_iter();
        let (Some(state), Some(arena)) = (fds.next(), fds.next()) else { bail!("state and arena file are missing") };
        let state = StateFile::open(state)?;
        let Process { pid, start } = self.me;
        state.open_as(pid, start);
        // This thread works for the VM until it is open. A keeper may have killed us a moment ago: then it ends here.
        std::mem::forget(state.list_thread());
        // The keeper named us before it gave the order. Another name means that another engine is to have the VM.
        anyhow::ensure!(state.engine() == Some((pid, start)), "the state file names another engine");
        anyhow::ensure!(!state.is_given_up(), "all of its RAM was given up: nobody held it");
        let epoch = state.take_over(pid, start, LOST).context("Taking the state file over")?;
        let options = RamOptions {
            codec: match self.begin.compression {
                Compression::Lz4 => Codec::Lz4,
                Compression::Zstd => Codec::Zstd { level: 1 },
            },
            punch_later: true,
            ..RamOptions::new(self.host.budget.clone())
        };
        let store = Arc::new(RamStore::open(arena, options).context("Opening the arena")?);
        let events = self.events.clone();
        let name = state.name();
        let report = {
            let name = name.clone();
            Arc::new(move |kind: &str, message| events.add(Some(name.clone()), kind, message))
        };
        let late = has_file.then(|| Arc::new(LateStore::new()));
        let file = if has_file { fds.next().zip(fds.next()) } else { None };
        let tuning = Tuning {
            quarantine: Duration::from_millis(self.begin.quarantine_ms),
            spill_after: self.begin.spill.as_ref().filter(|_| has_file).map(|spill| Duration::from_secs(spill.after_s)),
            track: tracking::to_pager(self.begin.heat.track),
            heat: self.begin.heat.settings(),
            ..Tuning::default()
        };
        let mut tiers = vec![Tier::near(RAM_STORE, "RAM store", store.clone())];
        tiers.extend(late.clone().map(|late| Tier::slow(FILE_STORE, "file store", late)));
        let vm = Arc::new(Vm::new(state, epoch, Stores::new(tiers), tuning, report).with_pins(self.host.pins.clone()));
        let _unlists = Unlists(&vm);
        let late_file = late::File::default();
        let opening = match late.clone().zip(file) {
            Some((late, (file, index))) => {
                let state = StateFile::open(vm.state.fd().try_clone_to_owned().context("Duplicating a descriptor")?)?;
                state.open_as(pid, start);
                Some(LateFile::begin(state, vm.reporter(), late, [file, index], self.file_options(), &late_file)?)
            }
            None => None,
        };
        for file in fds {
            vm.open_region(file)?;
        }
        if epoch > 1 {
            mend(&vm)?;
            vm.stats().add(Counter::Takeovers, 1);
        }
        if let Some(opening) = opening {
            blocking(|| opening.finish(&vm, late.and_then(|late| late.take_live())));
        }
        if may_pin {
            vm.set_may_pin();
        }
        vm.hold(Hold::Pinned, pinned);
        vm.hold(Hold::Kept, vm.state.kept().then(|| KEPT.into()));
        vm.start()?;
        let served = Arc::new(Served::new(vm.clone(), store, late_file, vmm));
        self.host.vms.write().expect("no panic while held").push(served.clone());
        // What was found lost while it was opened is told now that it is known.
        memory_error::notify();
        self.host.control.opened(&served);
        if epoch == 1 {
            self.events.add(Some(name.clone()), "attached", format!("VM {name} ({id}) is attached"));
        }
        Ok(())
    }

    /// What a VM's file store is opened with.
    fn file_options(&self) -> FileOptions {
        let writes_per_day = self.begin.spill.as_ref().map_or(Bytes(0), |spill| spill.writes_per_day);
        FileOptions { writes_per_day, ..FileOptions::new(self.host.file_budget.clone()) }
    }

    fn add_view(
        &self,
        served: &Arc<Served>,
        pid: u32,
        uffd_features: u64,
        spans: &[(wire::RegionInfo, u32)],
        unserved_since_ns: Option<u64>,
        fds: Vec<OwnedFd>,
    ) -> anyhow::Result<()> {
        served.add_pid(pid);
        served.hold_unchecked();
        views::add(served, pid, uffd_features, views::descriptors(fds)?, spans)?;
        if let Some(since_ns) = unserved_since_ns {
            let gap = Duration::from_nanos(monotonic_ns().saturating_sub(since_ns));
            served.vm.stats().raise(Counter::LongestGapNs, gap.as_nanos() as u64);
            let name = served.vm.state.name();
            let text = format!("VM {name} is served again after {:.1} ms", gap.as_secs_f64() * 1e3);
            self.events.add(Some(name), "taken-over", text);
        }
        if served.vm.is_pinned() {
            // Nobody waits for this one: the hold has been there since the VM was opened.
            served.restore(Hold::Pinned, served.vm.held().unwrap_or_default(), |_| ())?;
        } else if served.vm.is_held_for(Hold::Kept) {
            served.restore(Hold::Kept, KEPT.into(), |_| ())?;
        }
        self.watch.send(served.clone()).context("Asking the watch to look")
    }

    fn add_region(
        &self,
        served: &Arc<Served>,
        pid: u32,
        info: &wire::RegionInfo,
        number: u32,
        fds: Vec<OwnedFd>,
    ) -> anyhow::Result<()> {
        let vm = &served.vm;
        if vm.region(number).is_none() {
            let opened = vm.open_region(fds.into_iter().next().context("a descriptor is needed")?)?;
            anyhow::ensure!(opened == number, "region {number} came before region {opened}");
        }
        if let Some(view) = vm.views().into_iter().find(|view| view.pid == pid) {
            let added = vm.add_span(&view, info, number);
            if let Err(error) = &added {
                // As for a view that is not complete: it may read zeros where pages are far, so none may be.
                let reason = format!("RAM that process {pid} added cannot be watched there: region {number}: {error}");
                vm.report("view-incomplete", reason.clone());
                served.set_unserved(pid, reason.clone());
                vm.hold(Hold::Shared, Some(reason.clone()));
                served.restore(Hold::Shared, reason, |_| ())?;
            }
            added?;
        }
        Ok(())
    }

    fn close_vm(&self, id: VmId, closing: &Closing) {
        let closed = {
            let mut vms = self.host.vms.write().expect("no panic while held");
            let at = vms.iter().position(|served| served.vm.state.id() == id);
            at.map(|at| vms.remove(at))
        };
        if let Some(served) = closed {
            let _listed = served.vm.state.list_thread();
            served.file.cancel();
            served.vm.stop();
            served.jobs.close();
            // Nothing is freed from here on. Somebody may still look at this VM when its arena has been opened again,
            // and what was put off must not be done then.
            served.vm.stores.first().store.tidy();
            let name = served.vm.state.name();
            self.events.add(Some(name.clone()), "gone", format!("the process of VM {name} is gone"));
            self.leave(&served, closing);
        }
    }
}
