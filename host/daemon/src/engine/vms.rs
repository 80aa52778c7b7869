//! Orders about one VM: opens it, adds processes and RAM, restores it, closes it.
//!
//! Before: `mod` took an order about a VM and gave it to the VM's worker. After: the order is carried out, or an event
//! says why not.
//! Threads: the VM's worker, which is in the list of the VM's state file during the order.
//! Promise: only a VM whose state file names this engine is opened.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context;
use ballast_base::Bytes;
use ballast_base::store::{FILE_STORE, GROUP_STORE, RAM_STORE, REMOTE_STORE};
use ballast_base::wire::{self, StoreFiles, VmId};
use ballast_handover::failure::Failure;
use ballast_handover::orders::{Order, Report};
use ballast_handover::state_file::StateFile;
use ballast_pager::run::pool::blocking;
use ballast_pager::vm::far::stores::{LateStore, NearTier, SlowTier, Stores};
use ballast_pager::vm::ram::RamFile;
use ballast_pager::vm::region_table::LOST;
use ballast_pager::vm::stats::Counter;
use ballast_pager::vm::view::View;
use ballast_pager::vm::{Hold, Reporter, Tuning, Vm};
use ballast_store::{Codec, FileOptions, GroupMember, RamOptions, RamStore};
use ballast_sys::process::Process;
use ballast_sys::{clock, memory_error, scm};

use super::governor::operator;
use super::late::{self, LateFile};
use super::order_files::{Files, ram_files, sent_regions, store_files};
use super::served::{KEPT, Served};
use super::shared::{Closing, Engine, Unlists, mend};
use super::unopened::{lacks_handles, may_pass};
use super::{views, vm_settings};
use crate::config::Compression;
use crate::tiering::Tiering;

struct Opening {
    vmm: String,
    pinned: Option<String>,
    may_pin: bool,
    stores: Vec<StoreFiles>,
    files: u8,
    beside: bool,
    regions: u32,
}

impl Engine {
    /// Carries out an order about a VM, on its worker. `is_whole`: whether all of its descriptors came.
    pub(super) fn carry_out(&self, id: VmId, order: Order, fds: Vec<OwnedFd>, is_whole: bool) {
        let what = format!("{order:?}");
        let opens = matches!(order, Order::OpenVm { .. });
        let brings = opens || matches!(order, Order::AddView { .. } | Order::AddRegion { .. });
        let process = match &order {
            Order::AddView { pid, .. } | Order::AddRegion { pid, .. } | Order::RemoveRegion { pid, .. } => Some(*pid),
            _ => None,
        };
        let served = self.host.by_id(id);
        let _listed = served.as_ref().map(|served| served.vm.state.list_thread());
        let result = match (order, &served) {
            (Order::OpenVm { vmm, pinned, may_pin, stores, files, beside, regions, .. }, None) => {
                self.has_again(id);
                let opening = Opening { vmm, pinned, may_pin, stores, files, beside, regions };
                let opened = self.open_vm(id, opening, fds);
                self.unopened(id, opened.as_ref().err(), is_whole);
                opened
            }
            (Order::CheckVm { seq, stores, files, regions, .. }, _) => {
                let checked = self.check_vm(id, &stores, files, regions, fds);
                self.done(seq, checked.map(drop).map_err(|error| io::Error::other(format!("{error:#}"))))
            }
            (Order::Tell { seq, .. }, Some(served)) => {
                if served.unserved().is_none() {
                    served.vm.state.set_followed();
                }
                self.done(seq, served.unserved().map_or(Ok(()), |why| Err(io::Error::other(why))))
            }
            (Order::Tell { seq, .. }, None) => {
                let why = self.why_unopened(id).unwrap_or_else(|| "it is not open".into());
                self.done(seq, Err(io::Error::other(why)))
            }
            (Order::AddView { pid, uffd_features, spans, unserved_since_ns, .. }, Some(served)) => {
                self.add_view(served, pid, uffd_features, &spans, unserved_since_ns, fds)
            }
            (Order::AddRegion { pid, span, number, files, .. }, Some(served)) => {
                let added = ram_files(fds, files).and_then(|files| self.add_region(served, pid, span, number, &files));
                // The error that `add_region` itself reported is more exact.
                if let Err(error) = &added
                    && served.unserved_of(pid).is_none()
                {
                    let reason = format!("region {number} of process {pid} is not served: {error:#}");
                    // The first error is reported.
                    let _ = served.hold_unserved(pid, reason);
                }
                added
            }
            (Order::RemoveRegion { seq, pid, hva, region, .. }, Some(served)) => {
                let view = served.vm.views().into_iter().find(|view| view.pid == pid);
                let unplug = |view: Arc<View>| self.unplug(served, &view, hva, region);
                self.done(seq, view.map_or(Ok(()), unplug))
            }
            (Order::Pin { seq, reason, .. }, Some(served)) => self.restore(served, Hold::Pinned, reason, seq),
            (Order::Reach { seq, pid, regions, .. }, Some(served)) => self.reach(served, seq, pid, &regions),
            (Order::MayPin { seq, .. }, Some(served)) => {
                served.vm.set_may_pin();
                self.done(seq, Ok(()))
            }
            (Order::ServeFaults { seq, .. }, _) => {
                let served = served.as_ref().ok_or_else(|| io::Error::other("it is not open"));
                self.done(seq, served.and_then(|served| served.serve_faults_only()))
            }
            (Order::Alone { .. }, Some(served)) => self.alone(served),
            (Order::RemoveView { pid, .. }, Some(served)) => self.remove_view(served, pid),
            // Nothing is reclaimed from a VM that is not open. An earlier engine may have left pages far.
            (Order::RemoveRegion { seq, .. } | Order::MayPin { seq, .. }, None) => self.done(seq, Ok(())),
            (Order::Reach { seq, .. } | Order::Pin { seq, .. }, None) => {
                self.done(seq, Err(io::Error::other("the VM could not be opened, so its pages do not come back")))
            }
            (Order::RemoveView { .. } | Order::Alone { .. }, None) => Ok(()),
            (_, served) => {
                Err(anyhow::anyhow!("the VM is {}", if served.is_some() { "open already" } else { "not open" }))
            }
        };
        if let Err(error) = result {
            if brings
                && (!is_whole || lacks_handles(error.as_ref()) || opens && may_pass(error.as_ref()))
                && let Err(error) = self.report(&Report::Lost(id))
            {
                tracing::error!("{error:#}");
            }
            let error = error.context(format!("VM {id}"));
            if process.is_some_and(Process::has_ended) {
                tracing::info!("Carrying out {what}: {error:#} (its process has ended)");
                return;
            }
            self.failed(served.as_ref().map(|served| served.vm.state.name()), &what, &error);
        }
    }

    /// The other engine of this VM has closed it: from now on this engine does all work for it.
    fn alone(&self, served: &Arc<Served>) -> anyhow::Result<()> {
        // If the VM was reopened for a memory error after the other engine had closed it, its stores belong to this
        // engine already, and its workers run.
        let owns = if served.vm.is_alone() {
            Ok(())
        } else {
            let owns = served.vm.own_stores().context("Reading what its words name");
            served.vm.start().context("Starting its workers")?;
            owns
        };
        self.mapper_scan.send(served.clone()).context("Requesting a scan for foreign mappers")?;
        // The other engine may have met a loss in its own mapping.
        let has_lost = served.vm.has_lost_words().context("Looking for lost words");
        if matches!(has_lost, Ok(true)) {
            served.is_damaged.store(true, Ordering::Release);
        }
        memory_error::notify();
        owns.and(has_lost.map(drop))
    }

    /// Reports whether this process is served in these regions. If not, it may read zeros where pages are far, so the
    /// reply is sent only when no page is far.
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

    /// Keeps each page in memory, and reports when all are restored: a VMM that is about to pin its memory must not
    /// wait in the kernel for a far page, and a process that cannot be served must find none. Runs on a thread of its
    /// own, because it takes a second per 100,000 far pages.
    fn restore(&self, served: &Arc<Served>, kind: Hold, reason: String, seq: u64) -> anyhow::Result<()> {
        let keeper = self.keeper.clone();
        let begun = served.restore(kind, reason, move |result| {
            let report = Report::Done { seq, result: result.map_err(Failure::new) };
            if let Err(error) = scm::send(&*keeper, &wire::encode(&report), &[]) {
                tracing::error!("Reporting to the keeper: {error}");
            }
        });
        begun.or_else(|error| self.done(seq, Err(error)))
    }

    fn open_vm(
        &self,
        id: VmId,
        Opening { vmm, pinned, may_pin, stores, files, beside, regions }: Opening,
        fds: Vec<OwnedFd>,
    ) -> anyhow::Result<()> {
        let mut fds = fds.into_iter();
        let state = StateFile::open(fds.next().context("the state file is missing")?)?;
        let Files { arena, group, file } = store_files(&stores, &mut fds)?;
        let ram = ram_files(fds.collect(), files)?;
        let Process { pid, start } = self.me;
        state.open_as(pid, start);
        // This thread works for the VM until it is open. If a keeper has just killed this engine, the thread ends here.
        let listed = state.list_thread();
        // The keeper named this engine before it gave the order. Another name means that another engine will have the
        // VM.
        anyhow::ensure!(state.engine() == Some((pid, start)), "the state file names another engine");
        anyhow::ensure!(!state.is_given_up(), "all of its RAM was given up: no process had it");
        let epoch = match beside {
            true => state.open_beside(pid, start),
            false => state.take_over(pid, start, LOST).context("Taking the state file over")?,
        };
        if !beside {
            vm_settings::settle(&self.host, &state);
        }
        let codec = match self.settings().compression {
            Compression::Lz4 => Codec::Lz4,
            Compression::Zstd => Codec::Zstd { level: 1 },
        };
        let options = RamOptions { codec, ..RamOptions::new(self.host.budget.clone()) };
        let size = Bytes(state.regions().iter().map(|region| region.pages().bytes().0).sum());
        let own = RamOptions { max_slabs: RamOptions::slabs_for(size), ..options.clone() };
        let store = Arc::new(RamStore::open(arena, own).context("Opening the arena")?);
        let events = self.events.clone();
        let name = state.name();
        let report: Reporter = {
            let name = name.clone();
            Arc::new(move |kind: &str, message| events.add(Some(name.clone()), kind, message))
        };
        let group = match group {
            Some(group) => self.join_group(group, &state, options, epoch == 1)?,
            None => None,
        };
        let late = file.is_some().then(|| Arc::new(LateStore::new()));
        let tuning = self.tuning(file.is_some());
        let mut near: Vec<NearTier> = Vec::new();
        near.extend(group.clone().map(|store| NearTier { number: GROUP_STORE, name: "group store", store }));
        near.push(NearTier { number: RAM_STORE, name: "RAM store", store: store.clone() });
        let mut slow: Vec<SlowTier> = Vec::new();
        slow.extend(late.clone().map(|late| SlowTier::new(FILE_STORE, "file store", late)));
        let remote = super::remote::store_of(self.host.remote.as_ref(), &state, beside, codec, &report)?;
        slow.extend(remote.map(|remote| SlowTier::new(REMOTE_STORE, "remote store", remote)));
        std::mem::forget(listed);
        let vm = Vm::new(state, epoch, Stores::new(near, slow), tuning, report).with_pins(self.host.pins.clone());
        let vm = Arc::new(vm);
        let _unlists = Unlists(&vm);
        vm.set_shares(operator::read(vm.state.settings()).effective_shares());
        let late_file = late::File::default();
        let opening = match late.clone().zip(file) {
            Some((late, files)) => {
                let state = self.open_again(&vm.state)?;
                Some(LateFile::begin(state, vm.reporter(), late, files, self.file_options(), &late_file)?)
            }
            None => None,
        };
        let open = || -> anyhow::Result<()> {
            for _ in sent_regions(&vm.state, regions) {
                vm.open_region(&ram)?;
            }
            if epoch > 1 {
                // Nothing is repaired beside another engine, whose workers hold the locked words.
                let read = if beside { vm.follow_stores().context("Reading what its words name") } else { mend(&vm) };
                read?;
                vm.stats().add(Counter::Takeovers, 1);
            }
            if let Some(opening) = opening {
                blocking(|| opening.finish(&vm, late.and_then(|late| late.take_live())));
            }
            if may_pin {
                vm.set_may_pin();
            }
            pinned.into_iter().for_each(|why| vm.hold(Hold::Pinned, Some(why)));
            vm.hold(Hold::Kept, vm.state.kept().then(|| KEPT.into()));
            if beside { vm.start_beside() } else { vm.start() }.context("Starting its workers")
        };
        if let Err(error) = open() {
            late_file.cancel();
            vm.stop();
            return Err(error);
        }
        let served = Arc::new(Served::new(vm.clone(), store, group, late_file, vmm));
        self.host.vms.write().expect("no panic while held").push(served.clone());
        // Losses that were found before the VM was in the list are reported now.
        memory_error::notify();
        self.governor.opened(&served);
        if epoch == 1 {
            self.events.add(Some(name.clone()), "attached", format!("VM {name} ({id}) is attached"));
        }
        Ok(())
    }

    /// The store in the arena of the VM's group. If the group has no room for the VM, the VM shares no pages.
    fn join_group(
        &self,
        group: OwnedFd,
        state: &StateFile,
        options: RamOptions,
        is_new: bool,
    ) -> anyhow::Result<Option<Arc<GroupMember>>> {
        match self.host.groups.join(group, state.id(), options, is_new) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                // It never was a member, so no word of it names that store.
                let name = state.name();
                let message = format!("VM {name} shares no pages: {error}");
                self.events.add(Some(name), "group-unavailable", message);
                Ok(None)
            }
            joined => Ok(Some(Arc::new(joined.context("Opening the arena of its group")?))),
        }
    }

    fn tuning(&self, has_file: bool) -> Tuning {
        let settings = self.settings();
        let file_after_s = settings.spill.as_ref().filter(|_| has_file).map(|spill| spill.after_s);
        let remote_after_s = || settings.remote.as_ref().map(|remote| remote.after_s);
        Tuning {
            quarantine: Duration::from_millis(settings.quarantine_ms),
            spill_after: file_after_s.or_else(remote_after_s).map(Duration::from_secs),
            track: settings.heat.track || settings.tier.is_some(),
            heat: settings.heat.settings(settings.tier.is_some()),
            tiers: settings.tier.map(Tiering::to_pager),
            ..Tuning::default()
        }
    }

    fn file_options(&self) -> FileOptions {
        let writes_per_day = self.settings().spill.as_ref().and_then(|spill| spill.writes_per_day).unwrap_or_default();
        FileOptions { writes_per_day, ..FileOptions::new(self.host.file_budget.clone()) }
    }

    fn add_view(
        &self,
        served: &Arc<Served>,
        pid: u32,
        uffd_features: u64,
        spans: &[(wire::Span, u32)],
        unserved_since_ns: Option<u64>,
        fds: Vec<OwnedFd>,
    ) -> anyhow::Result<()> {
        served.add_pid(pid);
        served.hold_unchecked();
        // More RAM may come: the limit need not be below the size of now.
        let has_limit = served.vm.state.limit().or(served.vm.state.target()).is_some();
        if served.vm.state.epoch() == 1 && has_limit && views::loads(pid) {
            served.vm.set_loads();
        }
        views::add(served, pid, uffd_features, fds, spans)?;
        if let Some(since_ns) = unserved_since_ns {
            let gap = Duration::from_nanos(clock::monotonic_ns().saturating_sub(since_ns));
            served.vm.stats().raise(Counter::LongestGapNs, gap.as_nanos() as u64);
            let name = served.vm.state.name();
            let text = format!("VM {name} is served again after {:.1} ms", gap.as_secs_f64() * 1e3);
            self.events.add(Some(name), "taken-over", text);
        }
        if served.vm.is_pinned() {
            // No caller waits for this restore: the hold has existed since the VM was opened.
            served.restore(Hold::Pinned, served.vm.reason(Hold::Pinned), |_| ())?;
        } else if served.vm.is_held_for(Hold::Kept) {
            served.restore(Hold::Kept, KEPT.into(), |_| ())?;
        }
        self.request_scan(served)
    }

    pub(super) fn request_scan(&self, served: &Arc<Served>) -> anyhow::Result<()> {
        if served.vm.state.leaving().is_some() {
            // The leaving engine may map the VM's RAM: the scan is requested when it is gone.
            return Ok(());
        }
        self.mapper_scan.send(served.clone()).context("Requesting a scan for foreign mappers")
    }

    fn add_region(
        &self,
        served: &Arc<Served>,
        pid: u32,
        span: Option<wire::Span>,
        number: u32,
        files: &[RamFile],
    ) -> anyhow::Result<()> {
        let vm = &served.vm;
        // A running scan does not cover the region's files. Another process that maps a region that we know cannot
        // unmap pages of it yet: it learns from our reply that this memory is managed.
        served.hold_unchecked();
        let (known, was_pinned) = (vm.region(number).is_some(), vm.is_pinned());
        let opened = if known { Ok(number) } else { vm.open_region(files) };
        self.request_scan(served)?;
        let opened = opened?;
        anyhow::ensure!(opened == number, "region {number} came before region {opened}");
        let view = vm.views().into_iter().find(|view| view.pid == pid);
        if let Some((view, span)) = view.zip(span)
            && let Err(error) = vm.add_span(&view, span, number)
        {
            let reason = format!("RAM that process {pid} added cannot be watched there: region {number}: {error}");
            vm.report("view-incomplete", reason.clone());
            served.hold_unserved(pid, reason)?;
        }
        if vm.is_pinned() && !was_pinned {
            // A region of 1 GiB pages pins its VM, which may have far pages.
            served.restore(Hold::Pinned, vm.reason(Hold::Pinned), |_| ())?;
        }
        Ok(())
    }

    /// Closes a VM without processes. Fails if the VM could not be opened, for a reason that may pass: then its far
    /// pages were not written back, and its files stay as they are.
    pub(super) fn close_vm(&self, id: VmId, closing: &Closing) -> io::Result<()> {
        let Some(served) = self.stop_vm(id) else {
            return self
                .forget_unopened(id)
                .filter(|why| why.may_pass)
                .map_or(Ok(()), |why| Err(io::Error::other(why.text)));
        };
        let _listed = served.vm.state.list_thread();
        let name = served.vm.state.name();
        self.events.add(Some(name.clone()), "gone", format!("the process of VM {name} is gone"));
        self.leave(&served, closing);
        Ok(())
    }

    /// Stops changing anything of a VM that another engine will have. An error says that the VM was not served
    /// everywhere it is mapped.
    pub(super) fn part_with_vm(&self, id: VmId) -> io::Result<()> {
        let Some(served) = self.host.by_id(id) else {
            return Err(io::Error::other(self.why_unopened(id).unwrap_or_else(|| "it was not open".into())));
        };
        let _listed = served.vm.state.list_thread();
        served.end_work();
        // As the near stores' deferred work is done at the end, but while the VM's faults are still served, because it
        // may wait for a disk or a cluster. Work that the last faults defer is found by recovery, or, in a cluster, by
        // the store of the other engine.
        for tier in served.vm.stores.slow() {
            blocking(|| served.vm.state.beside(|| tier.store.tidy()));
        }
        self.stop_vm(id);
        if let Some(group) = &served.group {
            group.part();
        }
        served.unserved().map_or(Ok(()), |why| Err(io::Error::other(why)))
    }

    fn stop_vm(&self, id: VmId) -> Option<Arc<Served>> {
        let stopped = {
            let mut vms = self.host.vms.write().expect("no panic while held");
            let at = vms.iter().position(|served| served.vm.state.id() == id);
            at.map(|at| vms.remove(at))
        }?;
        let listed = stopped.vm.state.list_thread();
        stopped.file.cancel();
        stopped.stop();
        drop(listed);
        Some(stopped)
    }
}
