//! The queue of faults that wait for a disk or a network, and of pages to read ahead from there.
//!
//! Before: a fault worker met a page of a slow store. After: a slow worker takes the fault.
//! Threads: any. Promise: a push never waits for a worker, and notifies one as long as one is idle. A fault counts as
//! pending until it is served, and goes before pages that no thread waits for.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ballast_base::PageRange;

use super::cluster::Cluster;
use crate::run::pool::Notifier;
use crate::vm::serve::readahead::Readahead;
use crate::vm::serve::stall::PendingFault;
use crate::vm::stats::Stats;
use crate::vm::view::View;

/// Most reads of one VM that threads wait for at a time.
pub const WORKERS: usize = 4;

/// This worker has the faults whose pages no worker has waited for yet, and nothing else: however many pages are late,
/// the others come.
const FIRST_TRIES: usize = 0;

/// Workers that read ahead at a time. The others are there for faults.
const AHEAD_WORKERS: usize = 2;
/// Requests to read ahead that wait; more are dropped, and faults read these pages.
const AHEAD_KEPT: usize = 4;

/// What a slow worker does next.
#[derive(Debug)]
pub(crate) enum Work {
    /// Serve this fault.
    Fault(Arc<View>, PendingFault),
    /// Bring back pages that a thread is about to want. [`SlowQueue::ahead_is_over`] follows.
    Ahead(Ahead),
}

/// Pages of a region to bring back through a view.
#[derive(Debug)]
pub(crate) struct Ahead {
    pub view: Arc<View>,
    pub region: u32,
    pub pages: PageRange,
    /// Nothing says yet that a thread reads there.
    pub is_guess: bool,
}

/// The kind of worker that decides what is read next. A fault worker does not wait for a slow worker that decides now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    Slow,
    Fault,
}

impl Caller {
    fn lock<T>(self, mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
        match self {
            Self::Slow => Some(mutex.lock().unwrap_or_else(PoisonError::into_inner)),
            Self::Fault => mutex.try_lock().ok(),
        }
    }
}

/// Faults that wait for a disk.
#[derive(Debug)]
pub struct SlowQueue {
    queue: Mutex<Queue>,
    /// The order in which pages of slow stores are touched.
    readahead: Mutex<Readahead>,
    /// Whether pages that are near each other are wanted together.
    cluster: Mutex<Cluster>,
    /// Notify the slow workers.
    pub(crate) notifiers: [Notifier; WORKERS],
}

impl Default for SlowQueue {
    fn default() -> Self {
        let (readahead, cluster) = (Mutex::new(Readahead::slow()), Mutex::<Cluster>::default());
        Self { queue: Mutex::default(), readahead, cluster, notifiers: Default::default() }
    }
}

#[derive(Debug, Default)]
struct Queue {
    faults: VecDeque<(Arc<View>, PendingFault)>,
    ahead: VecDeque<Ahead>,
    /// Workers that read ahead.
    reading: usize,
    /// Workers that found nothing.
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
    /// Takes a fault over from its view's fault worker.
    pub(crate) fn take(&self, stats: Stats<'_>, view: &Arc<View>, pending: PendingFault) {
        view.stall.update(stats, Instant::now(), |waiters| waiters.slow += 1);
        self.notify_after(|queue| queue.faults.push_back((view.clone(), pending)), |_| true);
    }

    /// Puts a fault back that counts as pending already. This worker, which had it, comes back for it, unless it has
    /// first tries alone.
    pub(crate) fn put_back(&self, worker: usize, view: Arc<View>, pending: PendingFault) {
        let is_for_others = worker == FIRST_TRIES && pending.is_late;
        let add = |queue: &mut Queue| queue.faults.push_back((view, pending));
        self.notify_after(add, |other| is_for_others && other != FIRST_TRIES);
    }

    /// The slow workers have ended. Drops what is left, and returns the views of its faults, which the caller wakes.
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

    /// Has pages brought back that no fault waits for yet.
    pub(crate) fn read_ahead(&self, ahead: Ahead) {
        let add = |queue: &mut Queue| {
            if queue.ahead.len() < AHEAD_KEPT {
                queue.ahead.push_back(ahead);
            }
        };
        self.notify_after(add, |worker| worker != FIRST_TRIES);
    }

    /// A worker that had [`Work::Ahead`] has done it.
    pub(crate) fn ahead_is_over(&self) {
        self.lock().reading -= 1;
    }

    /// The pages to request after a fault on this page, as [`Readahead::request`] has it.
    pub(crate) fn requested(
        &self,
        (region, page): (u32, u64),
        pages: u64,
        is_far: impl Fn(u64) -> bool,
        caller: Caller,
    ) -> Option<(PageRange, PageRange)> {
        caller.lock(&self.readahead)?.request(region, page, pages, is_far)
    }

    /// Decides which pages are wanted together.
    pub(crate) fn cluster(&self, caller: Caller) -> Option<MutexGuard<'_, Cluster>> {
        caller.lock(&self.cluster)
    }

    /// Does this page continue an order in which pages are read, so that it comes with others?
    pub(crate) fn is_in_order(&self, region: u32, page: u64, is_far: impl Fn(u64) -> bool) -> bool {
        // If it is being changed, a page of this VM is asked for by another worker at this moment.
        self.readahead.try_lock().map_or(true, |readahead| readahead.is_in_order(region, page, is_far))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("no panic while held")
    }

    /// Notifies an idle worker that may have what this adds; one that is not idle comes by itself.
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

    /// The oldest fault, for this worker, or pages to read ahead; if there is nothing, the worker is notified of the
    /// next.
    pub(crate) fn pop(&self, worker: usize) -> Option<Work> {
        let mut queue = self.lock();
        let next = queue.pop(worker);
        if next.is_none() && !queue.idle.contains(&worker) {
            queue.idle.push(worker);
        }
        next
    }
}
