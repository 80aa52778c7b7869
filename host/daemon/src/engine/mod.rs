//! The engine: opens the VMs that the keeper hands over and serves them.
//!
//! Before: the keeper starts it with a socket as standard input. After: it is killed, or the keeper and the last VM are
//! gone.
//! Threads: the first one takes orders and never waits for their execution. The API, the scan for foreign mappers, the
//! governor and the check for stuck threads have one each; of a VM they change only words in memory. Orders are carried
//! out on the threads of a pool, and VMs have fault workers and jobs. A thread is in the list of a VM's state file
//! while it works for that VM (`ballast_handover::threads`).
//! Promise: it may be killed at any instruction, because state that must outlive it is already in the state files and
//! arenas. It opens only VMs whose state file names it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use anyhow::{Context, bail};
use ballast_base::Bytes;
use ballast_base::wire::{self, VmId};
use ballast_handover::orders::{Order, Report};
use ballast_handover::state_file::StateFile;
use ballast_pool::Far;
use ballast_store::Budget;
use ballast_sys::detach::detach;
use ballast_sys::lock::Lock;
use ballast_sys::priority::run_first;
use ballast_sys::process::Process;
use ballast_sys::{memory_error, scm};

use crate::backend::Shown;
use crate::config::Spill;
use crate::events::Events;
use crate::history::Past;
use crate::http::{self, Gate, PeerPolicy};
use crate::kept_settings::KeptSettings;
use crate::settings::Settings;
use adopted::AdoptedVms;
use governor::Governor;
use groups::Groups;
use host::Host;
use remote::Remote;
use shared::{Engine, Overdue};
use workers::Workers;

pub(crate) mod adopted;
mod check;
pub(crate) mod foreign_mappers;
pub(crate) mod governor;
mod groups;
pub(crate) mod host;
pub(crate) mod huge_pages;
pub(crate) mod late;
mod lending;
mod make;
mod memory;
mod missing;
mod order_files;
mod orphan;
mod past;
mod pin_check;
pub(crate) mod pool;
mod pool_parts;
pub(crate) mod remote;
pub(crate) mod served;
mod shared;
pub(crate) mod stuck;
mod unopened;
pub(crate) mod upgrades;
mod views;
pub(crate) mod vm_settings;
mod vms;
pub(crate) mod workers;
mod write_back;

/// How long the API waits for VMs to open: a VM of hundreds of GiB takes a second or two.
const OPENING: Duration = Duration::from_secs(3);

/// Takes orders until the keeper and the last VM are gone.
pub fn run() -> anyhow::Result<()> {
    detach(c"ballastd");
    // Guests wait for a new engine. The threads that this one starts have normal priority.
    run_first();
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
    let settings = wire::decode::<Settings>(&begin.settings);
    let settings = settings.context("This engine cannot read its settings: restart ballastd").inspect_err(|error| {
        // The operator who requested an upgrade to this engine gets the reason.
        let _ = scm::send(&*keeper, &wire::encode(&Report::Refused(format!("{error:#}"))), &[]);
    })?;
    protect_from_oom_killer();
    let errors_seen = memory_error::install().context("Preparing for memory errors")?;
    let events = Arc::new(Events::default());
    let reports = keeper.clone();
    let told = settings.clone();
    let keep = move |policy| {
        let settings = wire::encode(&Settings { policy, ..told.clone() });
        if let Err(error) = scm::send(&*reports, &wire::encode(&Report::Settings(settings)), &[]) {
            tracing::warn!("Reporting the policy to the keeper: {error}");
        }
    };
    let governor = Arc::new(Governor::new(settings.policy, keep));
    let pool = pool::PoolService::start(settings.pool.clone(), events.clone()).context("Starting the pool")?;
    let adopted = AdoptedVms::new(&settings.runtime_dir, settings.adopt_all, events.clone());
    let adopted = adopted.context("Starting to adopt VMs")?;
    let past = Past::new(settings.runtime_dir.join("history")).context("Making the directory of the history")?;
    let host = Arc::new(Host {
        budget: Budget::new(settings.store_budget),
        file_budget: Budget::new(settings.spill.as_ref().map_or(Bytes(0), Spill::budget)),
        groups: Groups::default(),
        remote: settings.remote.as_ref().map(|remote| Remote::begin(remote, events.clone())).transpose()?,
        begin,
        kept: KeptSettings::new(&settings.state_dir),
        settings,
        vms: RwLock::default(),
        events: events.clone(),
        adopted: Arc::new(adopted),
        pins: Arc::default(),
        upgrades: upgrades::Upgrades::default(),
        pool,
        past,
    });
    let api = api.try_clone().context("Duplicating a descriptor")?;
    let mapper_scan = foreign_mappers::start(host.clone())?;
    pin_check::start(host.pins.clone())?;
    adopted::worker::start(host.clone()).context("Starting to adopt VMs")?;
    governor.start(host.clone(), mapper_scan.clone()).context("Starting the governor")?;
    link_pool(&host, &governor);
    stuck::start(host.clone()).context("Starting to look for threads that are stuck")?;
    let shown = Shown { host: host.clone(), governor: governor.clone(), keeper: keeper.clone() };
    past::start(Arc::new(shown)).context("Starting to take samples")?;
    let me = Process::this().context("Finding this process's start time")?;
    let engine = Arc::new(Engine {
        keeper,
        me,
        host,
        governor,
        events,
        mapper_scan,
        closing: Mutex::default(),
        overdue: Overdue::default(),
        unopened: Mutex::default(),
        parted: Mutex::default(),
    });
    let workers = Arc::new(Mutex::new(Workers::default()));
    memory::start(&engine, &workers, errors_seen)?;
    let mut orders = Orders { engine, workers, api: Some(api), gate: Gate::default(), rests: Arc::default() };
    if orders.take()? == End::Orphaned {
        orders.serve_as_orphan();
    }
    Ok(())
}

/// Connects pool and governor: the pool asks how much memory VMs on demand can have far, and tells the governor when
/// little is left for their touches.
fn link_pool(host: &Arc<Host>, governor: &Arc<Governor>) {
    let (host_now, decides, governor) = (Arc::downgrade(host), governor.clone(), governor.clone());
    let far = move || host_now.upgrade().map_or_else(Far::default, |host| decides.far(&host));
    let links = pool::demand::Links { far: Box::new(far), short: Box::new(move || governor.pool_is_short()) };
    host.pool.demand.link(links);
}

/// Has the kernel kill a guest before this process, which holds the far memory of many guests.
fn protect_from_oom_killer() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-900") {
        tracing::debug!("Lowering this process's OOM score: {error}");
    }
}

fn serve_api(listener: OwnedFd, shown: Arc<Shown>, reader_gid: Option<u32>, gate: Gate) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("Starting the API")?;
    std::thread::Builder::new().name("api".into()).spawn(move || {
        // The operator's request must not wait behind hundreds of vCPUs.
        run_first();
        runtime.block_on(async {
            match tokio::net::UnixListener::from_std(listener.into()) {
                Ok(listener) => http::serve(listener, shown, PeerPolicy::new(reader_gid), gate).await,
                Err(error) => tracing::error!("Listening on the API socket: {error}"),
            }
        });
    })?;
    Ok(())
}

/// Calls `what`, unless a later order to rest or to resume has come after order number `this`.
fn at_turn(rests: &Mutex<u64>, this: u64, what: impl FnOnce()) {
    let last = rests.locked();
    if *last == this {
        what();
    }
}

struct Orders {
    engine: Arc<Engine>,
    workers: Arc<Mutex<Workers>>,
    api: Option<OwnedFd>,
    gate: Gate,
    /// Counts the orders to rest and to resume: an earlier one must not undo a later one.
    rests: Arc<Mutex<u64>>,
}

#[derive(PartialEq, Eq)]
enum End {
    Orphaned,
    Followed,
}

impl Orders {
    fn take(&mut self) -> anyhow::Result<End> {
        loop {
            let (received, is_whole) = match scm::receive_or_bytes(&*self.engine.keeper) {
                Ok(Some(received)) => received,
                Ok(None) => return Ok(End::Orphaned),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(End::Orphaned),
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    self.engine.failed(None, "an order", &anyhow::Error::new(error).context("Receiving it whole"));
                    continue;
                }
                Err(error) => return Err(error).context("Receiving an order"),
            };
            let order = wire::decode::<Order>(&received.bytes).context("Understanding an order")?;
            if order == Order::Leave {
                tracing::info!("another engine serves all VMs: ending");
                return Ok(End::Followed);
            }
            let what = format!("{order:?}");
            if !is_whole {
                // The order fails without them, and its error names the VM that is not served completely.
                tracing::error!("{what}: its descriptors did not come, because this process has too many open");
            }
            if let Err(error) = self.carry_out(order, received.fds, is_whole) {
                self.engine.failed(None, &what, &error);
            }
        }
    }

    /// Carries out an order that takes no time; passes other orders to the VM's worker.
    fn carry_out(&mut self, order: Order, fds: Vec<OwnedFd>, is_whole: bool) -> anyhow::Result<()> {
        let engine = self.engine.clone();
        match order {
            Order::Begin(_) => {}
            Order::Ping => engine.report(&Report::Pong)?,
            Order::Serve => self.serve()?,
            Order::Note { vm, kind, message } => engine.events.add(vm, &kind, message),
            Order::CloseVm { seq, vm } => self.close(vm, Some(seq))?,
            Order::MakeFileStore { seq } => engine.make_file_store(seq)?,
            Order::Rest { seq } => self.rest(seq)?,
            Order::Resume => self.resume()?,
            Order::HandOver { seq, vm } => self.workers.locked().give_last(vm, move || {
                let state = engine.host.by_id(vm).and_then(|served| served.vm.state.fd().try_clone_to_owned().ok());
                let parted = engine.part_with_vm(vm);
                engine.has_parted(state.and_then(|fd| StateFile::open(fd).ok()));
                if let Err(error) = engine.done(seq, parted) {
                    tracing::debug!("Reporting that VM {vm} is handed over: {error:#}");
                }
            })?,
            Order::Past(events) => engine.events.add_past(&events).context("Understanding events")?,
            Order::Upgrading(now) => engine.host.upgrades.set(now),
            Order::Asked { ask, result } => engine.host.upgrades.answered(ask, result),
            order => {
                if let Order::OpenVm { vm, .. } = &order {
                    engine.stop_writing_back(*vm);
                }
                if let Some(vm) = order.vm() {
                    self.workers.locked().give(vm, move || engine.carry_out(vm, order, fds, is_whole))?;
                }
            }
        }
        Ok(())
    }

    /// Stops decisions and API requests, because VMs are about to move.
    fn rest(&self, seq: u64) -> io::Result<()> {
        let (engine, gate) = (self.engine.clone(), self.gate.clone());
        let (rests, this) = (self.rests.clone(), self.begin_rest());
        gate.close();
        std::thread::Builder::new().name("rest".into()).spawn(move || {
            gate.wait_until_empty(http::GATE_CLOSES_WITHIN * 2);
            at_turn(&rests, this, || {
                engine.governor.rest();
                engine.host.adopted.rest();
            });
            let past = engine.events.for_successor().into_iter().map(Report::Past);
            let reports = past.chain([Report::Done { seq, result: Ok(()) }]);
            if let Err(error) = reports.into_iter().try_for_each(|report| engine.report(&report)) {
                tracing::error!("{error:#}");
            }
        })?;
        Ok(())
    }

    /// Decides and answers again: this engine has all VMs, as far as they can be opened.
    fn resume(&mut self) -> io::Result<()> {
        let opened = self.workers.locked().all_so_far();
        let (engine, gate) = (self.engine.clone(), self.gate.clone());
        let (rests, this) = (self.rests.clone(), self.begin_rest());
        std::thread::Builder::new().name("resume".into()).spawn(move || {
            opened.wait(OPENING);
            at_turn(&rests, this, || {
                engine.host.adopted.resume();
                engine.governor.resume();
                gate.open();
            });
        })?;
        Ok(())
    }

    fn begin_rest(&self) -> u64 {
        let mut last = self.rests.locked();
        *last += 1;
        *last
    }

    /// Closes a VM after its earlier orders, and reports that to the waiting caller.
    fn close(&mut self, vm: VmId, seq: Option<u64>) -> io::Result<()> {
        let engine = self.engine.clone();
        // At once, so that an order to open the VM again finds it.
        let closing = engine.begin_closing(vm);
        self.workers.locked().give_last(vm, move || {
            let closed = engine.close_vm(vm, &closing);
            engine.end_closing(vm, &closing);
            if let Some(Err(error)) = seq.map(|seq| engine.done(seq, closed)) {
                tracing::debug!("Reporting that VM {vm} is closed: {error:#}");
            }
        })
    }

    /// Serves the API once the VMs that were handed over are open: no client may learn that a VM does not exist because
    /// it is not open yet. A VM that does not open in time does not keep clients from the others.
    fn serve(&mut self) -> anyhow::Result<()> {
        let (opened, is_serving) = {
            let mut workers = self.workers.locked();
            (workers.all_so_far(), workers.is_serving())
        };
        let (engine, api, gate) = (self.engine.clone(), self.api.take(), self.gate.clone());
        let (rests, this) = (self.rests.clone(), self.begin_rest());
        std::thread::Builder::new().name("serve".into()).spawn(move || {
            if !opened.wait(OPENING) {
                tracing::warn!("not every VM is open and served after {OPENING:?}: answering the API all the same");
            }
            is_serving.store(true, Ordering::Release);
            let keeper = engine.keeper.clone();
            let shown = Arc::new(Shown { host: engine.host.clone(), governor: engine.governor.clone(), keeper });
            // An engine that follows another one has rested.
            at_turn(&rests, this, || {
                engine.host.adopted.resume();
                engine.governor.resume();
                gate.open();
            });
            let served = api.map_or(Ok(()), |api| serve_api(api, shown, engine.settings().reader_gid, gate));
            if let Err(error) = served.and_then(|()| engine.report(&Report::Serving)) {
                engine.failed(None, "Serve", &error);
                // The keeper must not wait for this engine in an upgrade: VMs go back.
                let _ = engine.report(&Report::Refused(format!("it cannot answer the API: {error:#}")));
            }
        })?;
        Ok(())
    }
}
