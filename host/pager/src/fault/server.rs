//! The server of a userfaultfd: reads its faults and serves them.
//!
//! Before: [`crate::vm::Vm::add_view`] gives it to the fault workers (`run/servers.rs`), one for each CPU. After: it
//! ends with the view's process or the engine.
//! Threads: the worker that visits it, one at a time; a page's faults always come through one userfaultfd (`shard`). It
//! never waits: if another thread has locked the page, its store is busy, or the fault throttle delays it, the server
//! keeps the fault and retries it in a later visit. If the page is on a disk or a network, the server begins the read,
//! and passes the fault to the slow workers if the page does not arrive soon (`begun`). A sequential fault is served
//! after up to 16 pages of readahead.
//! Promise: each fault that was read is served or, if this engine dies first, raised again by the next engine's wake.
//! During a visit, the VM's state file lists the thread.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::{PAGE_SIZE, PageIdx};
use ballast_store::PageBytes;
use ballast_sys::Uffd;
use ballast_sys::uffd::{Fault, FaultKind, READ_AT_ONCE};

use super::ahead::bring_ahead;
use super::begun;
use super::follow::Follow;
use super::forgotten::{Forgotten, REPORT_EVERY};
use crate::run::queue::Next;
use crate::run::serve::{After, Placement, Serve};
use crate::run::set::Notify;
use crate::scan::touch::{self, Touch, touched};
use crate::vm::Vm;
use crate::vm::region::Region;
use crate::vm::running::Serves;
use crate::vm::serve::readahead::{self, Readahead};
use crate::vm::serve::resolve::{resolve, settle, target};
use crate::vm::serve::stages::{Sampler, Times};
use crate::vm::serve::stall::PendingFault;
use crate::vm::serve::throttle::{MOST_WAIT, Waiter};
use crate::vm::stats::Counter;
use crate::vm::view::View;
use ballast_page::outcome::Served;
use ballast_page::page_state::State;

/// Time for which faults that wait for a page lock are retried at once: a lock is held for some 20 to 40 us. After
/// that, retries are [`RETRY`] apart: a busy store takes longer.
const EAGER: Duration = Duration::from_micros(200);
const RETRY: Duration = Duration::from_micros(50);

/// A fault that has waited for this long is reported, and the next one [`REPORT_EVERY`] later. Its page gets no memory
/// (a pool of huge pages or a file system of limited size is used up), or a store does not return.
const LONG: Duration = Duration::from_secs(5);

thread_local! {
    static BUFFER: RefCell<Box<[PageBytes; readahead::MOST as usize]>> = RefCell::new(Box::new([[0; PAGE_SIZE]; _]));
}

pub(crate) struct Shard(pub Arc<View>, pub usize);

impl Shard {
    fn uffd(&self) -> &Uffd {
        &self.0.uffds()[self.1]
    }
}

impl AsFd for Shard {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd().as_fd()
    }
}

pub(crate) struct FaultServer {
    vm: Arc<Vm>,
    view: Arc<View>,
    shard: Arc<Shard>,
    /// The first fault is tried next.
    pending: VecDeque<PendingFault>,
    read: Vec<Fault>,
    sampler: Sampler,
    readahead: Readahead,
    follow: Follow,
    forgotten: Forgotten,
    reported: Option<Instant>,
    /// Notified when there are `short_of` credits, the least number that a pending fault needs.
    waiter: Arc<Waiter>,
    notify: Notify,
    short_of: u64,
    /// Tries that failed since the last success.
    failed: usize,
}

struct Round {
    served: bool,
    /// Each pending fault was tried since the last success.
    is_whole: bool,
}

impl Serve for FaultServer {
    fn serve(&mut self, now: Instant, until: Instant) -> After {
        let after = self.visit(now, until);
        self.vm.stats().add(Counter::FaultWorkNs, now.elapsed().as_nanos() as u64);
        after
    }

    fn panicked(&mut self, times: u32) -> bool {
        let (vm, view) = (self.vm.clone(), self.view.clone());
        let _listed = vm.state.list_thread();
        self.pending.clear();
        self.read.clear();
        self.readahead = Readahead::default();
        self.update_stall(Instant::now());
        vm.panicked("fault", Serves::View(&view), times)
    }

    fn end(&mut self) {
        let vm = self.vm.clone();
        let _listed = vm.state.list_thread();
        if !self.pending.is_empty() {
            vm.raise_again(&self.view);
        }
        self.pending.clear();
        self.update_stall(Instant::now());
    }
}

impl FaultServer {
    pub fn new(vm: Arc<Vm>, shard: Arc<Shard>, notify: Notify) -> Self {
        let view = shard.0.clone();
        let own = notify.clone();
        let waiter = vm.mail.throttle.waiter(move || own.notify());
        Self {
            notify,
            follow: Follow::new(view.pid),
            vm,
            view,
            shard,
            pending: VecDeque::new(),
            read: Vec::with_capacity(READ_AT_ONCE),
            sampler: Sampler::default(),
            readahead: Readahead::default(),
            forgotten: Forgotten::new(Instant::now()),
            reported: None,
            waiter,
            short_of: u64::MAX,
            failed: 0,
        }
    }

    fn visit(&mut self, now: Instant, until: Instant) -> After {
        let (vm, view, shard) = (self.vm.clone(), self.view.clone(), self.shard.clone());
        let _listed = vm.state.list_thread();
        if vm.is_over() || view.is_closed() {
            return After::next(Next::Done);
        }
        self.waiter.ends();
        if let Err(error) = shard.uffd().read_faults(&mut self.read) {
            // The address space has ended, and its threads with it.
            tracing::debug!(vm = vm.state.name(), pid = view.pid, "Reading faults: {error}");
            return After::next(Next::Done);
        }
        let newest = self.read.last().map(|fault| fault.thread);
        let is_full = self.read.len() == READ_AT_ONCE;
        if newest.is_some() || self.pending.is_empty() && now < self.forgotten.due() {
            // The time counts even if no fault was read: another program may have read it.
            self.forgotten.seen(now);
        }
        if newest.is_some() {
            let pending = self.read.drain(..).map(|fault| PendingFault {
                fault,
                since: now,
                throttled: false,
                begun: None,
                is_late: false,
            });
            self.pending.extend(pending);
        }
        let mut after = After::next(Next::At(self.forgotten.due()));
        if !self.pending.is_empty() {
            self.update_stall(now);
            let round = self.serve_round(until);
            after = self.after(&round, now);
            self.update_stall(Instant::now());
            self.report_long_waits(now);
        }
        if is_full {
            after = After::next(Next::Again);
        }
        // The check comes last: no fault waits for it.
        if now >= self.forgotten.due() {
            self.forgotten.check(&vm, &view, shard.uffd(), self.pending.len(), now);
            if self.pending.is_empty() && !is_full {
                after.next = Next::At(self.forgotten.due());
            }
        }
        let placement = newest.map_or(Placement::Stay, |thread| self.follow.faulted(thread, now));
        After { placement, shares: vm.shares(), ..after }
    }

    fn after(&self, round: &Round, now: Instant) -> After {
        if self.pending.is_empty() {
            return After::next(Next::At(self.forgotten.due()));
        }
        if round.served || !round.is_whole {
            return After::next(Next::Again);
        }
        if self.pending.iter().all(|pending| pending.throttled) {
            return After::next(self.wait_for_credits(now));
        }
        if let Some(due) = begun::due(&self.pending) {
            return After::next(Next::At(due));
        }
        let may_nap = |pending: &PendingFault| {
            pending.throttled || pending.begun.is_some() || now.saturating_duration_since(pending.since) > EAGER
        };
        if self.pending.iter().all(may_nap) {
            return After::next(Next::At(Instant::now() + RETRY));
        }
        After { is_eager: true, ..After::next(Next::Again) }
    }

    /// Has this server notified when there are credits, unless there are enough. Returns the next visit.
    fn wait_for_credits(&self, now: Instant) -> Next {
        let oldest = self.pending.iter().map(|pending| pending.since).min().unwrap_or(now);
        match self.vm.mail.throttle.begin_wait(&self.waiter, self.short_of) {
            true => Next::At(oldest + MOST_WAIT),
            false => Next::Again,
        }
    }

    fn update_stall(&self, now: Instant) {
        self.view.stall.update(self.vm.stats(), now, |waiters| {
            waiters.here[self.shard.1] = self.pending.len();
            waiters.add_threads(self.pending.iter().map(|pending| pending.fault.thread));
        });
    }

    fn report_long_waits(&mut self, now: Instant) {
        let is_long = |pending: &&PendingFault| now.saturating_duration_since(pending.since) >= LONG;
        let Some(PendingFault { fault, .. }) = self.pending.iter().find(is_long) else { return };
        if self.reported.is_some_and(|reported| now.saturating_duration_since(reported) < REPORT_EVERY) {
            return;
        }
        self.reported = Some(now);
        let text = format!(
            "thread {} of process {} has waited {} s for the page at {}: no memory for it, or its store does not \
             answer",
            fault.thread,
            self.view.pid,
            LONG.as_secs(),
            fault.addr
        );
        self.vm.report("fault-waits", text);
    }

    /// Tries each pending fault once, as far as there is time; keeps those that must still wait.
    fn serve_round(&mut self, until: Instant) -> Round {
        let (mut served, count) = (false, self.pending.len());
        for tried in 1..=count {
            let Some(mut pending) = self.pending.pop_front() else { break };
            if self.serve_one(&mut pending) {
                (served, self.failed, self.short_of) = (true, 0, u64::MAX);
            } else {
                self.failed += 1;
                self.pending.push_back(pending);
            }
            if tried < count && Instant::now() >= until {
                break;
            }
        }
        // If one visit is too short for all of them, each was tried in some visit.
        Round { served, is_whole: self.failed >= self.pending.len() }
    }

    /// Serves one fault. Returns false if it must be retried.
    fn serve_one(&mut self, pending: &mut PendingFault) -> bool {
        let vm = &*self.vm.clone();
        let view = self.view.clone();
        let _serving = view.serving();
        let Some(target) = target(vm, &view, pending) else { return true };
        let (region, page) = (&*target.region, target.page);
        if let Some(begun) = pending.begun {
            let times = Times::begun(begun);
            let watch = |fd: BorrowedFd<'_>| drop(self.notify.watch(fd));
            return begun::ends(vm, &view, &target, pending, &times, &watch);
        }
        let mut touch = None;
        if let Some(unit) = region.units().of(page).filter(|unit| !unit.is_quiet()) {
            match touched(vm, &view, &target, unit, pending) {
                // The kernel may be copying the unit into a huge page, for which no other fault may wait.
                Touch::Aside => return settle(vm, &target, pending, Served::Later.into()).is_some(),
                Touch::Mapped => return settle(vm, &target, pending, Served::Mapped.into()).is_some(),
                Touch::Serve { tracked, around } => touch = Some((tracked, around)),
            }
        }
        let granule = region.granule(page);
        let is_missing = pending.fault.kind == FaultKind::Missing;
        if is_missing && !vm.mail.throttle.admits(granule.pages(), || pending.since.elapsed()) {
            self.short_of = self.short_of.min(granule.pages());
            if !std::mem::replace(&mut pending.throttled, true) {
                vm.notify_reclaim();
            }
            return false;
        }
        if std::mem::take(&mut pending.throttled) {
            vm.stats().add(Counter::Throttled, 1);
            vm.stats().add(Counter::ThrottledNs, pending.since.elapsed().as_nanos() as u64);
        }
        // Fault workers read from near stores only. If the page leaves them now, the retry finds it in a slow store.
        if !vm.stores.slow().is_empty() && region.is_slow(page) {
            let word = region.word(page);
            let is_one = is_missing && granule.pages() == 1 && word.state() == State::Far && !word.is_locked();
            let watch = |fd: BorrowedFd<'_>| drop(self.notify.watch(fd));
            let is_far = |page| region.is_slow_and_free(PageIdx(page));
            let now = Instant::now();
            if is_one
                && !vm.mail.slow.is_in_order(region.number, page.0, is_far)
                && vm.stores.begin(region.key(page), word, &watch)
            {
                pending.begun = Some(now);
                return false;
            }
            vm.mail.slow.take(vm.stats(), &view, *pending);
            return true;
        }
        if granule.pages() == 1 && touch.is_none() {
            self.read_ahead(region, page, pending.fault.kind);
        }
        let times = self.sampler.start();
        let Some(served) = resolve(vm, &target, pending, &vm.stores.reads_near(), &times) else {
            return false;
        };
        if let Some((tracked, around)) = touch {
            let around = around && served == Served::Mapped;
            touch::served(vm, &target, pending, tracked, around);
        }
        true
    }

    /// If the thread touches pages in order, brings in the next ones, before the page that it waits for.
    fn read_ahead(&mut self, region: &Region, page: PageIdx, kind: FaultKind) {
        let vm = &*self.vm;
        // A missing page that is Resident was never touched, or was discarded.
        let is_fresh = kind == FaultKind::Missing && region.word(page).state() == State::Resident;
        let is_out = |page| region.is_out_and_free(PageIdx(page));
        if !is_fresh && !is_out(page.0) {
            return;
        }
        let (ahead, pages) = self.readahead.fault(region.number, page.0, region.pages().0, is_out);
        if ahead == 0 {
            return;
        }
        // The layout is held by each thread that moves pages for which no fault waits, so these addresses stay this
        // region's. If the layout is about to change, readahead is skipped.
        let Some(_layout) = vm.memory.try_layout() else { return };
        let Some(memory) = self.view.of_region(region).filter(|_| !region.is_removed()) else { return };
        let run = BUFFER
            .with_borrow_mut(|buffer| bring_ahead(vm, region, &memory, (pages, ahead), is_fresh, &mut buffer[..]));
        match run {
            Ok(end) => self.readahead.came(end.0),
            // The thread's own fault then fails with this error, too, and reports it.
            Err(error) => {
                tracing::debug!(vm = vm.state.name(), region = region.number, %page, "Reading ahead: {error}")
            }
        }
    }
}
