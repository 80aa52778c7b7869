//! The engine: opens what the keeper hands over and keeps it served.
//!
//! Before: the keeper starts it with a socket as standard input. After: it is killed, or the keeper is gone and the last
//! VM too.
//! Threads: this one takes orders; the API has one; the watch has one; every VM has its lanes.
//! Promise: it may be killed at any instruction. What must outlive it is in the state files and arenas already.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, RwLock, mpsc};
use std::time::Duration;

use anyhow::{Context, bail};
use ballast_base::wire::{self, VmId};
use ballast_pager::recover::recover;
use ballast_pager::state_file::StateFile;
use ballast_pager::stats::Counter;
use ballast_pager::view::View;
use ballast_pager::vm::{Hold, Tuning, Vm};
use ballast_store::{Budget, Codec, RamOptions, RamStore, Store};
use ballast_sys::{Uffd, scm};

use crate::backend::{Host, Served};
use crate::config::Compression;
use crate::events::Events;
use crate::http::{self, PeerPolicy};
use crate::orders::{Begin, Order, Report};

/// How often processes are looked through for ones that map a VM's RAM behind our back.
const WATCH_EVERY: Duration = Duration::from_secs(5);
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
    let (Ok(Order::Begin(begin)), [api]) = (wire::decode::<Order>(&first.bytes), &first.fds[..]) else {
        bail!("the first order is not one this engine understands: keeper and engine are of different releases");
    };
    protect_from_oom_killer();
    let events = Arc::new(Events::default());
    let host = Arc::new(Host {
        budget: Budget::new(begin.store_budget),
        begin: begin.clone(),
        vms: RwLock::default(),
        events: events.clone(),
    });
    let api = Mutex::new(Some(api.try_clone().context("Duplicating a descriptor")?));
    let watch = watch_strangers(host.clone())?;
    let engine = Engine { keeper, begin, host, events, api, watch };
    engine.take_orders()?;
    engine.serve_as_orphan();
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
        runtime.block_on(async {
            match tokio::net::UnixListener::from_std(listener.into()) {
                Ok(listener) => http::serve(listener, host, PeerPolicy::new(reader_gid)).await,
                Err(error) => tracing::error!("Listening on the API socket: {error}"),
            }
        });
    })?;
    Ok(())
}

/// Start the watch; what is sent to it is looked at at once.
fn watch_strangers(host: Arc<Host>) -> anyhow::Result<mpsc::Sender<Arc<Served>>> {
    let (sender, asked) = mpsc::channel::<Arc<Served>>();
    std::thread::Builder::new().name("watch".into()).spawn(move || {
        loop {
            match asked.recv_timeout(WATCH_EVERY) {
                Ok(served) => look_for_stranger(&host, &served),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let vms: Vec<Arc<Served>> = host.vms.read().expect("no panic while held").clone();
                    vms.iter().for_each(|served| look_for_stranger(&host, served));
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    })?;
    Ok(sender)
}

/// Hold a VM while a process that has not attached maps its RAM; let it go again when that is over.
fn look_for_stranger(host: &Host, served: &Served) {
    let vm = &served.vm;
    let unchecked = vm.is_held_for(Hold::Unchecked);
    if !unchecked && (vm.effective_limit().is_none() || vm.is_pinned() || vm.views().is_empty()) {
        return;
    }
    match (host.stranger(vm), vm.is_held_for(Hold::Shared)) {
        (Some(reason), false) => {
            vm.report("ram-shared", reason.clone());
            if let Err(error) = vm.restore_for(Hold::Shared, reason) {
                vm.report("ram-shared", format!("Bringing its pages back: {error}"));
            }
        }
        (None, true) => {
            vm.report("ram-shared", "no other process maps this VM's RAM any more".into());
            vm.hold(Hold::Shared, None);
        }
        _ => {}
    }
    vm.hold(Hold::Unchecked, None);
}

/// Nanoseconds on the clock that keeper and engine share.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

struct Engine {
    keeper: Arc<OwnedFd>,
    begin: Begin,
    host: Arc<Host>,
    events: Arc<Events>,
    /// Whoever is sent here is looked at for strangers.
    watch: mpsc::Sender<Arc<Served>>,
    /// The API's listener, until it is served.
    api: Mutex<Option<OwnedFd>>,
}

impl Engine {
    fn take_orders(&self) -> anyhow::Result<()> {
        loop {
            let received = match scm::receive(&*self.keeper) {
                Ok(Some(received)) => received,
                Ok(None) => return Ok(()),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Ok(()),
                Err(error) => return Err(error).context("Receiving an order"),
            };
            let order = wire::decode::<Order>(&received.bytes).context("Understanding an order")?;
            self.carry_out(order, received.fds);
        }
    }

    fn carry_out(&self, order: Order, fds: Vec<OwnedFd>) {
        let what = format!("{order:?}");
        let result = match order {
            Order::Begin(_) => Ok(()),
            Order::Ping => self.report(&Report::Pong),
            Order::Serve => self.serve(),
            Order::Note { vm, kind, message } => {
                self.events.add(vm, &kind, message);
                Ok(())
            }
            Order::OpenVm { vm, vmm, pinned, may_pin } => self.open_vm(vm, vmm, pinned, may_pin, fds),
            Order::AddView { vm, pid, uffd_features, spans, unserved_since_ns } => {
                self.add_view(vm, pid, uffd_features, &spans, unserved_since_ns, fds)
            }
            Order::AddRegion { vm, pid, info, number } => self.add_region(vm, pid, &info, number, fds),
            Order::RemoveRegion { seq, vm, pid, hva } => self.in_background(seq, vm, move |vm| {
                let Some(view) = vm.views().into_iter().find(|view| view.pid == pid) else { return Ok(()) };
                vm.remove_region(&view, hva).map(|_| ())
            }),
            Order::Pin { seq, vm, reason } => {
                self.in_background(seq, vm, move |vm| vm.restore_for(Hold::Pinned, reason))
            }
            Order::MayPin { seq, vm } => self.in_background(seq, vm, |vm| {
                vm.set_may_pin();
                Ok(())
            }),
            Order::RemoveView { vm, pid } => {
                if let Some(served) = self.host.by_id(vm) {
                    served.vm.remove_view(pid);
                }
                Ok(())
            }
            Order::CloseVm { vm } => {
                self.close_vm(vm);
                Ok(())
            }
        };
        if let Err(error) = result {
            tracing::error!("Carrying out {what}: {error:#}");
            self.events.add(None, "order-failed", format!("{error:#}"));
        }
    }

    /// Begin to answer the API: nobody shall be told that a VM does not exist because it has not been opened yet.
    fn serve(&self) -> anyhow::Result<()> {
        if let Some(listener) = self.api.lock().expect("no panic while held").take() {
            serve_api(listener, self.host.clone(), self.begin.reader_gid)?;
        }
        self.report(&Report::Serving)
    }

    fn report(&self, report: &Report) -> anyhow::Result<()> {
        scm::send(&*self.keeper, &wire::encode(report), &[]).context("Reporting to the keeper")
    }

    /// Do something that may take long without keeping other orders waiting, and report when it is done.
    fn in_background(
        &self,
        seq: u64,
        vm: VmId,
        work: impl FnOnce(&Vm) -> std::io::Result<()> + Send + 'static,
    ) -> anyhow::Result<()> {
        let (keeper, served) = (self.keeper.clone(), self.host.by_id(vm));
        std::thread::Builder::new().name("order".into()).spawn(move || {
            let result = served.map_or(Ok(()), |served| work(&served.vm)).map_err(|error| error.to_string());
            if let Err(error) = scm::send(&*keeper, &wire::encode(&Report::Done { seq, result }), &[]) {
                tracing::error!("Reporting to the keeper: {error}");
            }
        })?;
        Ok(())
    }

    fn open_vm(
        &self,
        id: VmId,
        vmm: String,
        pinned: Option<String>,
        may_pin: bool,
        fds: Vec<OwnedFd>,
    ) -> anyhow::Result<()> {
        let mut fds = fds.into_iter();
        let (Some(state), Some(arena)) = (fds.next(), fds.next()) else { bail!("state and arena file are missing") };
        let state = StateFile::open(state)?;
        let me = std::process::id();
        let epoch = state.take_over(me, crate::keeper::start_time(me).unwrap_or(0));
        let options = RamOptions {
            codec: match self.begin.compression {
                Compression::Lz4 => Codec::Lz4,
                Compression::Zstd => Codec::Zstd { level: 1 },
            },
            ..RamOptions::new(self.host.budget.clone())
        };
        let store = Arc::new(RamStore::open(arena, options).context("Opening the arena")?);
        let tuning = Tuning { quarantine: Duration::from_millis(self.begin.quarantine_ms), ..Tuning::default() };
        let events = self.events.clone();
        let name = state.name();
        let report = {
            let name = name.clone();
            Arc::new(move |kind: &str, message| events.add(Some(name.clone()), kind, message))
        };
        let vm = Arc::new(Vm::new(state, epoch, store.clone() as Arc<dyn Store>, tuning, report));
        for file in fds {
            vm.open_region(file)?;
        }
        if epoch > 1 {
            let regions = vm.regions();
            let recovered = recover(&vm.state, regions.iter().map(|region| &**region))?;
            let live = recovered.live.len();
            store.recover(recovered.live.into_iter());
            vm.stats().add(Counter::Takeovers, 1);
            tracing::warn!(vm = name, epoch, far = live, mended = recovered.mended, "took over");
        }
        if may_pin {
            vm.set_may_pin();
        }
        vm.hold(Hold::Pinned, pinned);
        vm.start()?;
        self.host.vms.write().expect("no panic while held").push(Arc::new(Served { vm: vm.clone(), store, vmm }));
        if epoch == 1 {
            self.events.add(Some(name.clone()), "attached", format!("VM {name} ({id}) is attached"));
        }

        Ok(())
    }

    fn add_view(
        &self,
        vm: VmId,
        pid: u32,
        uffd_features: u64,
        spans: &[(wire::RegionInfo, u32)],
        unserved_since_ns: Option<u64>,
        fds: Vec<OwnedFd>,
    ) -> anyhow::Result<()> {
        let served = self.host.by_id(vm).context("The VM of the view is not open")?;
        let [uffd, control] =
            <[OwnedFd; 2]>::try_from(fds).map_err(|_| anyhow::anyhow!("two descriptors are needed"))?;
        let epoch = served.vm.state.epoch();
        served.vm.hold(Hold::Unchecked, Some("nobody has looked yet who else maps its RAM".into()));
        let view = Arc::new(View::new(pid, Uffd::from(uffd), uffd_features, control, epoch));
        served.vm.add_view(view, spans)?;
        if let Some(since_ns) = unserved_since_ns {
            let gap = Duration::from_nanos(monotonic_ns().saturating_sub(since_ns));
            served.vm.stats().raise(Counter::LongestGapNs, gap.as_nanos() as u64);
            let name = served.vm.state.name();
            let text = format!("VM {name} is served again after {:.1} ms", gap.as_secs_f64() * 1e3);
            self.events.add(Some(name), "taken-over", text);
        }
        if served.vm.is_pinned() {
            let reason = served.vm.held().unwrap_or_default();
            served.vm.restore_for(Hold::Pinned, reason)?;
        }
        self.watch.send(served).context("Asking the watch to look")
    }

    fn add_region(
        &self,
        vm: VmId,
        pid: u32,
        info: &wire::RegionInfo,
        number: u32,
        fds: Vec<OwnedFd>,
    ) -> anyhow::Result<()> {
        let vm = &self.host.by_id(vm).context("The VM of the region is not open")?.vm;
        if vm.region(number).is_none() {
            let opened = vm.open_region(fds.into_iter().next().context("a descriptor is needed")?)?;
            anyhow::ensure!(opened == number, "region {number} came before region {opened}");
        }
        if let Some(view) = vm.views().into_iter().find(|view| view.pid == pid) {
            vm.add_span(&view, info, number)?;
        }
        Ok(())
    }

    fn close_vm(&self, id: VmId) {
        let closed = {
            let mut vms = self.host.vms.write().expect("no panic while held");
            let at = vms.iter().position(|served| served.vm.state.id() == id);
            at.map(|at| vms.remove(at))
        };
        if let Some(served) = closed {
            served.vm.stop();
            let name = served.vm.state.name();
            self.events.add(Some(name.clone()), "gone", format!("the process of VM {name} is gone"));
        }
    }

    /// The keeper is gone. Serve faults until the next keeper's engine ends us, or until no VM is left.
    fn serve_as_orphan(&self) {
        tracing::error!("the keeper is gone: serving faults, reclaiming nothing, until another one comes");
        self.events.add(None, "keeper-gone", "the keeper is gone; reclaim is paused until ballastd runs again".into());
        loop {
            let vms: Vec<Arc<Served>> = self.host.vms.read().expect("no panic while held").clone();
            if vms.iter().all(|served| served.vm.views().iter().all(|view| view.is_disconnected())) {
                tracing::info!("no VM is left: ending");
                return;
            }
            for served in vms {
                served.vm.hold(Hold::Orphaned, Some("ballastd is not running".into()));
            }
            std::thread::sleep(ORPHAN_LOOKS_EVERY);
        }
    }
}
