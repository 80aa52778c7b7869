//! The fault worker: one for each userfaultfd of a view, serves its faults.
//!
//! Before: [`crate::vm::Vm::add_view`] starts it. After: it ends when the view's process or the engine does.
//! Threads: one each; a page's faults always come to the same one (`shard`). It waits for nothing but faults: a page
//! that another thread has locked, or whose store is busy, or that the fault throttle holds back, is put aside and
//! tried again while others are served; one whose bytes are on a disk goes to the slow workers. A fault of a thread
//! that reads memory in order waits for up to 16 pages of readahead, which come back first.
//! Promise: every fault read is served or, if this engine dies first, raised again by its successor's wake.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::{PAGE_SIZE, PageIdx};
use ballast_store::PageBytes;
use ballast_sys::Uffd;
use ballast_sys::uffd::FaultKind;
use rustix::event::{PollFd, PollFlags, poll};

use super::cluster::Cluster;
use super::far_run::{is_near, restore_next_run};
use super::follow::Follow;
use super::forgotten::Forgotten;
use super::readahead::{self, Readahead};
use super::resolve::{resolve, settle, target};
use super::stages::Sampler;
use super::stall::PendingFault;
use super::throttle::{MOST_WAIT, Waiter};
use crate::scan::touch::{self, Touch, touched};
use crate::vm::Vm;
use crate::vm::region::Region;
use crate::vm::stats::Counter;
use crate::vm::view::View;
use ballast_page::outcome::Served;

/// How long a worker sleeps at most before it checks whether the VM is being stopped.
pub(crate) const NAP: Duration = Duration::from_millis(100);
/// A page lock is held for some 20 to 40 us, so a worker with nothing but put-aside faults tries again at once for this
/// long. Then it sleeps between tries: a busy store takes longer.
const EAGER: Duration = Duration::from_micros(200);
const RETRY: Duration = Duration::from_micros(50);

/// A fault that has waited for this long is reported, and another one a minute later: memory for its page cannot be had
/// (a pool of huge pages or a file system of limited size is used up), or a store does not return.
const LONG: Duration = Duration::from_secs(5);
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// Serve the faults of one userfaultfd until the view's process is gone or the VM is stopped.
pub fn run(vm: &Vm, view: &Arc<View>, shard: usize) {
    let uffd = view.shards().get(shard);
    let mut worker = FaultWorker {
        vm,
        view,
        shard,
        pending: Vec::new(),
        sampler: Sampler::default(),
        cluster: Cluster::default(),
        readahead: Readahead::default(),
        buffer: Box::new([[0; PAGE_SIZE]; _]),
        reported: None,
        waiter: vm.mail.throttle.waiter().inspect_err(|error| tracing::warn!("Making an eventfd: {error}")).ok(),
        short_of: 0,
    };
    let mut follow = Follow::new(view.pid);
    let mut forgotten = Forgotten::new(Instant::now());
    let mut read = Vec::with_capacity(64);
    while !vm.is_stopping() && !view.is_closed() {
        // Without a read first: the thread that was just woken runs when this one sleeps, so a call saved is saved
        // twice.
        if worker.pending.is_empty() && !sleep_until_readable(uffd, NAP) {
            forgotten.check(vm, view, uffd, 0, Instant::now());
            continue;
        }
        if let Err(error) = uffd.read_faults(&mut read) {
            // The address space is gone: so are its threads.
            tracing::debug!(vm = vm.state.name(), pid = view.pid, "Reading faults: {error}");
            return;
        }
        if read.is_empty() && worker.pending.is_empty() {
            continue;
        }
        let now = Instant::now();
        let newest = read.last().map(|fault| fault.thread);
        worker.pending.extend(read.drain(..).map(|fault| PendingFault { fault, since: now, throttled: false }));
        worker.update_stall();
        let served = worker.serve_round();
        let may_nap =
            |pending: &PendingFault| pending.throttled || now.saturating_duration_since(pending.since) > EAGER;
        if !served && worker.pending.iter().all(|pending| pending.throttled) {
            worker.wait_for_credits(uffd, now);
        } else if !served && worker.pending.iter().all(may_nap) {
            sleep_until_readable(uffd, RETRY);
        } else if !served {
            std::thread::yield_now();
        }
        worker.update_stall();
        worker.report_long_waits(now);
        // Last: no fault waits for these.
        forgotten.check(vm, view, uffd, worker.pending.len(), now);
        if let Some(thread) = newest {
            follow.faulted(thread, now);
        }
    }
    // What was read and not served must be raised anew, for the engine or thread that serves this memory next.
    if !worker.pending.is_empty()
        && let Err(error) = view.wake_all()
    {
        tracing::debug!(vm = vm.state.name(), pid = view.pid, "Waking what was not served: {error}");
    }
}

struct FaultWorker<'a> {
    vm: &'a Vm,
    view: &'a Arc<View>,
    shard: usize,
    pending: Vec<PendingFault>,
    sampler: Sampler,
    cluster: Cluster,
    readahead: Readahead,
    buffer: Box<[PageBytes; readahead::MOST as usize]>,
    /// When a long wait was reported last.
    reported: Option<Instant>,
    /// Where credits are told of, and the least that the faults in hand need.
    waiter: Option<Arc<Waiter>>,
    short_of: u64,
}

impl FaultWorker<'_> {
    /// Every fault in hand waits for credits: sleep until there are some, or another fault, or one has waited for long
    /// enough.
    fn wait_for_credits(&self, uffd: &Uffd, now: Instant) {
        let Some(waiter) = &self.waiter else {
            sleep_until_readable(uffd, RETRY);
            return;
        };
        let oldest = self.pending.iter().map(|pending| pending.since).min().unwrap_or(now);
        let left = (oldest + MOST_WAIT).saturating_duration_since(Instant::now());
        if self.vm.mail.throttle.begin_wait(waiter, self.short_of) && !left.is_zero() {
            let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: left.as_nanos() as _ };
            let credits = waiter.fd();
            let mut fds = [PollFd::new(uffd, PollFlags::IN), PollFd::new(&credits, PollFlags::IN)];
            let _ = poll(&mut fds, Some(&timeout));
        }
        waiter.ends();
    }

    fn update_stall(&self) {
        self.view.stall.update(self.vm.stats(), |waiters| {
            waiters.here[self.shard] = self.pending.len();
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

    /// Try every pending fault once; keeps those that must wait on. Returns whether any was served.
    fn serve_round(&mut self) -> bool {
        let before = self.pending.len();
        self.short_of = u64::MAX;
        let mut still = std::mem::take(&mut self.pending);
        still.retain_mut(|pending| !self.serve_one(pending));
        let served = still.len() < before;
        self.pending = still;
        served
    }

    /// Serve one fault; false if it must be tried again.
    fn serve_one(&mut self, pending: &mut PendingFault) -> bool {
        let vm = self.vm;
        let _serving = self.view.serving();
        let Some((region, page, memory)) = target(vm, self.view, pending) else { return true };
        let mut touch = None;
        if let Some(unit) = region.units().of(page).filter(|unit| !unit.is_quiet()) {
            match touched(vm, self.view, &region, page, unit, pending) {
                // The kernel may be copying the unit into a huge page: no other fault shall wait for that.
                Touch::Aside => {
                    return settle(vm, &region, page, pending, Served::Later.into()).is_some();
                }
                Touch::Mapped => return settle(vm, &region, page, pending, Served::Mapped.into()).is_some(),
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
        // Only near stores are asked here. A page that leaves them just now is tried again, and then it is in a slow
        // one.
        if vm.stores.has_slow() && region.is_slow(page) {
            vm.mail.slow.take(vm.stats(), self.view, *pending);
            return true;
        }
        let came_along = is_missing && granule.pages() == 1 && self.read_ahead(&region, page);
        let times = self.sampler.start();
        let Some((served, away)) = resolve(vm, &region, page, pending, &memory, &vm.stores.near(), &times) else {
            return false;
        };
        if let Some((tracked, around)) = touch {
            let around = around && served == Served::Mapped;
            touch::served(vm, &region, &memory, page, pending, (tracked, around));
        }
        if served == Served::Restored && granule.pages() == 1 && !came_along {
            for pages in self.cluster.restored(&region, page, away, vm.mail.throttle.is_tight(), Instant::now()) {
                vm.mail.prefetch.request(self.view, region.number, pages);
            }
        }
        true
    }

    /// If the thread touches one page after the other, bring back some that it touches next, before the one it waits
    /// for. Returns whether any came.
    fn read_ahead(&mut self, region: &Region, page: PageIdx) -> bool {
        let vm = self.vm;
        if !is_near(region, page) {
            return false;
        }
        let far = |page| is_near(region, PageIdx(page));
        let (ahead, mut pages) = self.readahead.fault(region.number, page.0, region.pages().0, far);
        if ahead == 0 {
            return false;
        }
        // All who move pages that no fault waits for hold this, so that these are still this region's addresses. If it
        // is about to change, it is no time for guesses.
        let Some(_layout) = vm.try_layout() else { return false };
        let Some(memory) = self.view.of_region(region).filter(|_| !region.is_removed()) else { return false };
        let mut left = ahead.min(vm.readahead_credits());
        while left > 0 {
            match restore_next_run(vm, region, &memory, pages, &mut self.buffer[..left as usize]) {
                Ok(Some(came)) if !came.is_empty() => {
                    self.readahead.came(came.end().0);
                    pages = pages.from(came.end());
                    left -= came.count();
                }
                // None is far, or what is far cannot be had now.
                Ok(_) => break,
                Err(error) => {
                    // The page that is waited for meets the same error, and that one counts.
                    tracing::debug!(vm = vm.state.name(), region = region.number, %page, "Reading ahead: {error}");
                    break;
                }
            }
        }
        let came = pages.start().0 > page.0 + 1;
        if came {
            self.cluster.read_in_order(region, page);
        }
        came
    }
}

/// Wait for input; true if there is some.
pub(crate) fn sleep_until_readable(fd: impl AsFd, at_most: Duration) -> bool {
    let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: at_most.as_nanos() as _ };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready > 0)
}
