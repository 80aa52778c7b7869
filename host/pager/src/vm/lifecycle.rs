//! The lifecycle of a VM's workers: its tasks, the userfaultfds and clients that it serves, and the orders to end.
//!
//! Before: the VM is open. After: all workers have ended.
//! Threads: any.
//! Promise: a wait here is only for a visit under way; if a client can prolong the visit, the wait is at most a second.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ballast_base::store::{Ends, IoContext};

use crate::run::pool::Pool;
use crate::run::queue::GroupId;
use crate::run::servers::Served;
use crate::run::servers::stuck::Stuck;
use crate::vm::view::View;

/// Longest wait for a visit that reads a client's message: it takes microseconds, unless a client prolongs it.
const LONGEST_MESSAGE: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct Lifecycle {
    group: OnceLock<GroupId>,
    serving: OnceLock<GroupId>,
    clients: Mutex<Vec<(Arc<View>, Served)>>,
    /// Userfaultfds of each view, until no fault worker can be visiting them.
    faults: Mutex<Vec<(Arc<View>, Served)>>,
    has_discards: AtomicBool,
    has_slow: AtomicBool,
    is_alone: AtomicBool,
    is_stopping: AtomicBool,
    is_over: AtomicBool,
    /// Set to 1 when the serving of faults ends: gives up the reads of slow workers, as a wanted lock does.
    slow_wanted: AtomicU32,
}

impl Lifecycle {
    pub fn pool(&self) -> (Pool, GroupId) {
        let pool = Pool::of_process();
        (pool.clone(), *self.group.get_or_init(|| pool.add_group()))
    }

    /// Pool and group of the tasks that serve faults.
    pub fn serving_pool(&self) -> (Pool, GroupId) {
        let pool = Pool::of_process();
        (pool.clone(), *self.serving.get_or_init(|| pool.add_group()))
    }

    /// The slow workers are about to start. Returns false if they were started before.
    pub fn begins_slow(&self) -> bool {
        !self.has_slow.swap(true, Ordering::AcqRel)
    }

    /// The discard worker is about to start. Returns false if it was started before.
    pub fn begins_discards(&self) -> bool {
        !self.has_discards.swap(true, Ordering::AcqRel)
    }

    pub fn set_alone(&self) {
        self.is_alone.store(true, Ordering::Release);
    }

    pub fn is_alone(&self) -> bool {
        self.is_alone.load(Ordering::Acquire)
    }

    pub fn add_client(&self, view: Arc<View>, client: Served) {
        self.clients.lock().expect("no panic while held").push((view, client));
    }

    pub fn has_client(&self, view: &Arc<View>) -> bool {
        self.clients.lock().expect("no panic while held").iter().any(|(known, _)| Arc::ptr_eq(known, view))
    }

    /// Stops listening to the clients of these views. Waits for a message that is being read, for at most a second.
    pub fn forget_clients(&self, which: impl Fn(&View) -> bool) {
        let mut clients = self.clients.lock().expect("no panic while held");
        let (gone, stay): (Vec<_>, _) = std::mem::take(&mut *clients).into_iter().partition(|(view, _)| which(view));
        *clients = stay;
        drop(clients);
        gone.iter().for_each(|(_, client)| client.close());
        let until = Instant::now() + LONGEST_MESSAGE;
        for (view, client) in gone {
            client.wait_until(until);
            if let Some(user) = view.user().filter(|_| !client.is_over()) {
                Stuck::of_process().add(user, client);
            }
        }
    }

    pub fn add_faults(&self, view: Arc<View>, served: Served) {
        let mut faults = self.faults.lock().expect("no panic while held");
        faults.retain(|(_, served)| !served.is_over());
        faults.push((view, served));
    }

    pub fn has_faults(&self, view: &Arc<View>) -> bool {
        let faults = self.faults.lock().expect("no panic while held");
        faults.iter().any(|(known, served)| Arc::ptr_eq(known, view) && !served.is_over())
    }

    /// Stops serving faults of these views. Does not wait for faults that are being served.
    pub fn forget_faults(&self, which: impl Fn(&View) -> bool) {
        let faults = self.faults.lock().expect("no panic while held").clone();
        faults.iter().filter(|(view, _)| which(view)).for_each(|(_, served)| served.close());
    }

    /// Waits until no fault worker visits the userfaultfds that [`Lifecycle::forget_faults`] closed.
    pub fn wait_for_faults(&self) {
        let faults = std::mem::take(&mut *self.faults.lock().expect("no panic while held"));
        faults.iter().for_each(|(_, served)| served.wait());
    }

    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// The context of a slow worker's read. A VM that moves to another engine has no server until these reads have
    /// ended; they are given up 0.1 s after the serving of faults was to end.
    pub fn reads_slow<'a>(&'a self, context: IoContext<'a>) -> IoContext<'a> {
        context.ended_by(Ends::Wanted(&self.slow_wanted))
    }

    pub fn end_faults(&self) {
        self.is_over.store(true, Ordering::Release);
        self.slow_wanted.store(1, Ordering::Release);
        self.forget_faults(|_| true);
    }

    pub fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    pub fn stop_tasks(&self) {
        self.is_stopping.store(true, Ordering::Release);
    }
}
