//! The slow workers: serve faults on pages that are on a disk or in a cluster.
//!
//! Before: a fault worker met a page of a slow store (`slow_queue`). After: a slow worker, which may wait for the
//! store, has served the fault.
//! Threads: [`WORKERS`](crate::vm::far::slow_queue::WORKERS) tasks per VM that has a slow store; each waits for the
//! store for up to 0.1 s at a time, and longer for a late page, but not while the VM is being stopped. One of them
//! never waits for a late page.
//! Promise: no fault on another page waits for the disk, and a page that arrives in time waits for few late ones. A
//! fault taken here is served or, if the worker panics or the engine dies, raised again by a wake.
//!
//! *Readahead.* A thread that reads memory in order gets up to 64 pages by the request for the page that it waits for.
//! The next 64 are requested at the same time by another worker. A thread that is faster than the store then waits for
//! one of these, and the next ones are requested: so two requests are under way, through two connections, and at two
//! nodes where a chunk ends. No page is requested that is more than 128 pages ahead.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::store::IoContext;
use ballast_base::{PAGE_SIZE, PAGES_PER_UNIT, PageIdx, PageRange};
use ballast_store::PageBytes;
use ballast_sys::uffd::FaultKind;

use crate::run::pool::blocking;
use crate::run::queue::Next;
use crate::vm::Vm;
use crate::vm::far::slow_queue::{Ahead, Caller, Work};
use crate::vm::far::stores;
use crate::vm::region::Region;
use crate::vm::serve::resolve::{Target, resolve, settle, target};
use crate::vm::serve::stages::Times;
use crate::vm::serve::stall::PendingFault;
use crate::vm::stats::Counter;
use crate::vm::view::View;
use ballast_page::copies::StoreOf;
use ballast_page::fault::restore_some;
use ballast_page::memory::Mapped;
use ballast_page::outcome::{Move, Outcome, Served};

/// Pause after a try at a page that is not available: its store is busy, or another thread has locked it.
const RETRY: Duration = Duration::from_micros(200);

/// A try that takes this long in vain means that the page is late: a page lock is not held for so long.
const LATE: Duration = Duration::from_millis(2);

/// Most pages of one request: they are all locked.
const READ_AT_ONCE: u64 = 65;

thread_local! {
    /// Pages of one request; a thread that never reads ahead needs no memory for them.
    static BUFFER: RefCell<Vec<PageBytes>> = const { RefCell::new(Vec::new()) };
}

/// Guard: counts a worker that reads ahead until it is dropped, also by a panic.
struct Reads<'a>(&'a Vm);

impl Drop for Reads<'_> {
    fn drop(&mut self) {
        self.0.mail.slow.ahead_is_over();
    }
}

/// Guard: counts a fault as waiting until it is dropped, also by a panic.
struct Waits<'a>(&'a Vm, &'a View);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.1.stall.update(self.0.stats(), Instant::now(), |waiters| waiters.slow = waiters.slow.saturating_sub(1));
    }
}

pub(crate) struct SlowWorker {
    vm: Arc<Vm>,
    number: usize,
}

impl SlowWorker {
    pub fn new(vm: Arc<Vm>, number: usize) -> Self {
        Self { vm, number }
    }

    pub fn run(&mut self, now: Instant) -> Next {
        let vm = &self.vm;
        if vm.is_over() {
            return Next::Done;
        }
        let (view, mut pending) = match vm.mail.slow.pop(self.number) {
            None => return Next::Idle,
            Some(Work::Fault(view, pending)) => (view, pending),
            Some(Work::Ahead(ahead)) => {
                let _reads = Reads(vm);
                blocking(|| read_ahead(vm, &ahead));
                return Next::Again;
            }
        };
        let waits = Waits(vm, &view);
        if view.is_closed() {
            // No other worker has this fault: it is raised again, for the engine that serves this memory next.
            let _ = view.wake_all();
            return Next::Again;
        }
        if blocking(|| serve_one(vm, &view, &pending)) {
            return Next::Again;
        }
        std::mem::forget(waits);
        pending.is_late |= now.elapsed() >= LATE;
        vm.mail.slow.put_back(self.number, view, pending);
        Next::At(now + RETRY)
    }
}

/// Serves one fault; returns false if it must be retried.
fn serve_one(vm: &Vm, view: &Arc<View>, pending: &PendingFault) -> bool {
    // A disk takes much longer than reading the clock, so each restore is timed.
    let times = Times::start();
    let _serving = view.serving_from_disk();
    let Some(target) = target(vm, view, pending) else { return true };
    let (region, page) = (&*target.region, target.page);
    let was_slow = region.is_slow(page);
    if was_slow && pending.fault.kind == FaultKind::Missing && region.granule_pages() == 1 {
        let with = request_ahead(vm, view, region, page, Caller::Slow);
        if !with.is_empty() && came_with(vm, &target, with, pending, &times) {
            vm.stats().add(Counter::FaultFile, 1);
            return true;
        }
    }
    let stores = vm.stores.reads(vm.life.reads_slow(IoContext::GUEST));
    let resolved = resolve(vm, &target, pending, &stores, &times);
    if was_slow && matches!(resolved, Some(Served::Restored | Served::Filled { .. })) {
        vm.stats().add(Counter::FaultFile, 1);
    }
    resolved.is_some()
}

/// A fault worker restored a page: queues the pages to read ahead of it.
pub(crate) fn restored_one(vm: &Vm, view: &Arc<View>, region: &Region, page: PageIdx) {
    let pages = request_ahead(vm, view, region, page, Caller::Fault);
    if !pages.is_empty() {
        vm.mail.slow.read_ahead(Ahead { view: view.clone(), region: region.number, pages });
    }
}

/// If the thread reads in order, queues the next pages. Returns those to request with its page, all of one unit.
fn request_ahead(vm: &Vm, view: &Arc<View>, region: &Region, page: PageIdx, caller: Caller) -> PageRange {
    let unit_end = |page: PageIdx| PageIdx((page.0 + 1).next_multiple_of(PAGES_PER_UNIT));
    let is_far = |page| region.is_slow_and_free(PageIdx(page));
    let none = PageRange::of(page, 0);
    let credits = vm.readahead_credits();
    let asked = vm.mail.slow.requested((region.number, page.0), region.pages().0, is_far, caller);
    let all = |with: PageRange, rest: PageRange| with.count() + rest.from(with.end()).count();
    let Some((with, rest)) = asked.filter(|(with, rest)| all(*with, *rest) <= credits) else { return none };
    // A locked page arrives with the request that was made for it; the pages that would have come with it are queued.
    let with = if region.word(page).is_locked() { none } else { with.before(unit_end(page)) };
    let mut more = rest.from(with.end());
    while !more.is_empty() {
        let pages = more.before(unit_end(more.start()));
        more = more.from(pages.end());
        vm.mail.slow.read_ahead(Ahead { view: view.clone(), region: region.number, pages });
    }
    with
}

/// Restores the page of a fault, and those of `with`, by one request. Returns whether that page arrived.
fn came_with(vm: &Vm, target: &Target<'_>, with: PageRange, pending: &PendingFault, times: &Times) -> bool {
    let (region, page) = (&*target.region, target.page);
    let run = PageRange::new(page, with.end());
    let stores = background(vm);
    let moves = match restore_slow(region, run, &times.memory(&target.memory), &times.stores(&stores)) {
        Ok(moves) => moves,
        Err(error) => {
            // The thread's fault then fails with this error, too, and reports it.
            tracing::debug!(vm = vm.state.name(), region = region.number, %page, "Reading ahead: {error}");
            return false;
        }
    };
    let [(_, first), others @ ..] = &moves[..] else { return false };
    if moves[0].0 != page {
        book(vm, region, &moves);
        return false;
    }
    times.restored(vm.stats(), pending.since);
    settle(vm, target, pending, Outcome { moved: Some(*first), served: Ok(Served::Restored) });
    book(vm, region, others);
    true
}

fn read_ahead(vm: &Vm, ahead: &Ahead) {
    // While `_serving` lives, the region cannot be unplugged.
    let _serving = ahead.view.serving_from_disk();
    let Some(region) = vm.region(ahead.region).filter(|region| !region.is_removed()) else { return };
    let Some(memory) = ahead.view.of_region(&region) else { return };
    let mut rest = ahead.pages;
    // An unplug waits for this loop.
    let is_served = || !vm.is_over() && !ahead.view.is_closed() && ahead.view.base(ahead.region).is_some();
    while is_served() {
        let Some(first) = rest.iter().find(|page| region.is_slow_and_free(*page)) else { return };
        let run = PageRange::of(first, READ_AT_ONCE).before(rest.end());
        match restore_slow(&region, run, &memory, &background(vm)) {
            Ok(moves) => {
                book(vm, &region, &moves);
                // A thread that touches a page that did not arrive faults, which tells the reason.
                let Some((last, _)) = moves.last() else { return };
                rest = rest.from(PageIdx(last.0 + 1));
            }
            Err(error) => {
                tracing::debug!(vm = vm.state.name(), region = region.number, %first, "Reading ahead: {error}");
                return;
            }
        }
    }
}

fn book(vm: &Vm, region: &Region, moves: &[(PageIdx, Move)]) {
    for run in moves.chunk_by(|(a, _), (b, _)| a.0 + 1 == b.0) {
        vm.ledger().prefetched(region, run[0].0, &run.iter().map(|(_, moved)| *moved).collect::<Vec<_>>());
    }
}

/// The stores for readahead and restores: no thread waits for these pages. If such a page cannot be read, its fault
/// requests it again, by itself.
fn background(vm: &Vm) -> stores::Reads<'_> {
    vm.stores.reads(vm.life.reads_slow(IoContext::BACKGROUND))
}

/// Restores the far pages among `pages`, which are of one unit, by one request.
fn restore_slow(
    region: &Region,
    pages: PageRange,
    memory: &impl Mapped,
    stores: &impl StoreOf,
) -> io::Result<Vec<(PageIdx, Move)>> {
    let cells = pages.iter().map(|page| (page, region.granule(page).cell()));
    BUFFER.with_borrow_mut(|buffer| {
        let count = pages.count().min(READ_AT_ONCE) as usize;
        if buffer.len() < count {
            buffer.resize(count, [0; PAGE_SIZE]);
        }
        restore_some(region.region_key(), cells, memory, stores, &mut buffer[..count])
    })
}
