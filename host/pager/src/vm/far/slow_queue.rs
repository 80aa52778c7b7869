//! The queue of faults that wait for a disk or a network, and of pages to read ahead from there.
//!
//! Before: a fault worker met a page of a slow store. After: a slow worker takes the fault.
//! Threads: any.
//! Promise: a push never waits for a worker, and notifies an idle one. A fault counts as pending until it is served,
//! and goes before pages that no thread waits for.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use ballast_base::PageRange;
use ballast_sys::lock::Lock;

use crate::run::pool::Notifier;
use crate::vm::serve::readahead::Readahead;
use crate::vm::serve::stall::PendingFault;
use crate::vm::stats::Stats;
use crate::vm::view::View;

/// Most reads of one VM for which threads wait at the same time.
pub const WORKERS: usize = 4;

/// This worker takes only faults whose pages no worker has waited for yet: late pages do not delay the others.
const FIRST_TRIES: usize = 0;

/// Most workers that read ahead at a time; the others are free for faults.
const AHEAD_WORKERS: usize = 2;
/// Most queued requests to read ahead; further ones are dropped, and faults read their pages.
const AHEAD_KEPT: usize = 4;

#[derive(Debug)]
pub(crate) enum Work {
    Fault(Arc<View>, PendingFault),
    /// Read these pages ahead. [`SlowQueue::ahead_is_over`] follows.
    Ahead(Ahead),
}

/// Pages of a region to restore through a view before a thread touches them.
#[derive(Debug)]
pub(crate) struct Ahead {
    pub view: Arc<View>,
    pub region: u32,
    pub pages: PageRange,
}

/// The kind of worker that decides what to read next. A fault worker does not wait for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    Slow,
    Fault,
}

impl Caller {
    fn lock<T>(self, mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
        match self {
            Self::Slow => Some(mutex.locked()),
            Self::Fault => mutex.try_lock().ok(),
        }
    }
}

/// Faults that wait for a disk.
#[derive(Debug)]
pub struct SlowQueue {
    queue: Mutex<Queue>,
    /// Order of touches of pages in slow stores.
    readahead: Mutex<Readahead>,
    pub(crate) notifiers: [Notifier; WORKERS],
}

impl Default for SlowQueue {
    fn default() -> Self {
        let (queue, notifiers) = Default::default();
        Self { queue, readahead: Mutex::new(Readahead::slow()), notifiers }
    }
}

#[derive(Debug, Default)]
struct Queue {
    faults: VecDeque<(Arc<View>, PendingFault)>,
    ahead: VecDeque<Ahead>,
    reading: usize,
    idle: Vec<usize>,
}

impl Queue {
    fn pop(&mut self, worker: usize) -> Option<Work> {
        let is_for_it = |pending: &PendingFault| worker != FIRST_TRIES || !pending.is_late;
        let first = self.faults.iter().position(|(_, pending)| is_for_it(pending));
        if let Some((view, pending)) = first.and_then(|at| self.faults.remove(at)) {
            return Some(Work::Fault(view, pending));
        }
        if worker == FIRST_TRIES || self.reading >= AHEAD_WORKERS {
            return None;
        }
        let ahead = self.ahead.pop_front()?;
        self.reading += 1;
        Some(Work::Ahead(ahead))
    }
}

impl SlowQueue {
    pub(crate) fn take(&self, stats: Stats<'_>, view: &Arc<View>, pending: PendingFault) {
        view.stall.update(stats, Instant::now(), |waiters| waiters.slow += 1);
        self.notify_after(|queue| queue.faults.push_back((view.clone(), pending)), |_| true);
    }

    /// Puts back a fault that counts as pending already, for the worker that had it. A late fault of the worker
    /// [`FIRST_TRIES`] is for the other workers.
    pub(crate) fn put_back(&self, worker: usize, view: Arc<View>, pending: PendingFault) {
        let is_for_others = worker == FIRST_TRIES && pending.is_late;
        let add = |queue: &mut Queue| queue.faults.push_back((view, pending));
        self.notify_after(add, |other| is_for_others && other != FIRST_TRIES);
    }

    /// The slow workers have ended: drops the queue. Returns the views of its faults, which the caller wakes.
    pub(crate) fn leave(&self, stats: Stats<'_>) -> Vec<Arc<View>> {
        let Queue { faults, .. } = std::mem::take(&mut *self.lock());
        let mut views = Vec::<Arc<View>>::new();
        for (view, _) in faults {
            view.stall.update(stats, Instant::now(), |waiters| waiters.slow = waiters.slow.saturating_sub(1));
            if !views.iter().any(|known| Arc::ptr_eq(known, &view)) {
                views.push(view);
            }
        }
        views
    }

    /// Queues pages for which no fault waits yet.
    pub(crate) fn read_ahead(&self, ahead: Ahead) {
        let add = |queue: &mut Queue| {
            if queue.ahead.len() < AHEAD_KEPT {
                queue.ahead.push_back(ahead);
            }
        };
        self.notify_after(add, |worker| worker != FIRST_TRIES);
    }

    /// The caller has carried out a [`Work::Ahead`].
    pub(crate) fn ahead_is_over(&self) {
        self.lock().reading -= 1;
    }

    /// The pages to request after a fault on this page: see [`Readahead::request`].
    pub(crate) fn requested(
        &self,
        (region, page): (u32, u64),
        pages: u64,
        is_far: impl Fn(u64) -> bool,
        caller: Caller,
    ) -> Option<(PageRange, PageRange)> {
        caller.lock(&self.readahead)?.request(region, page, pages, is_far)
    }

    /// Returns whether this page continues a stream, so that it is read with others.
    pub(crate) fn is_in_order(&self, region: u32, page: u64, is_far: impl Fn(u64) -> bool) -> bool {
        // If it is locked, another worker is asking for a page of this VM at this moment.
        self.readahead.try_lock().map_or(true, |readahead| readahead.is_in_order(region, page, is_far))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("no panic while held")
    }

    /// Notifies an idle worker that may take the added work; a worker that is not idle looks by itself.
    fn notify_after(&self, change: impl FnOnce(&mut Queue), may_have: impl Fn(usize) -> bool) {
        let idle = {
            let mut queue = self.lock();
            change(&mut queue);
            let at = queue.idle.iter().rposition(|worker| may_have(*worker));
            at.map(|at| queue.idle.remove(at))
        };
        if let Some(idle) = idle {
            self.notifiers[idle].notify();
        }
    }

    /// The oldest fault that this worker may take, or pages to read ahead. If there is none, the worker counts as idle,
    /// and is notified of the next.
    pub(crate) fn pop(&self, worker: usize) -> Option<Work> {
        let mut queue = self.lock();
        let next = queue.pop(worker);
        if next.is_none() && !queue.idle.contains(&worker) {
            queue.idle.push(worker);
        }
        next
    }
}
