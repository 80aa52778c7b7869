//! The lifecycle of a VM's workers: its tasks, its userfaultfds that are served, its clients that are listened to, and
//! whether they are to end.
//!
//! Before: the VM is open. After: all of them have ended. Threads: any.
//! Promise: a wait here is for visits that are under way, and for nothing else. One that a client can make as long as
//! it likes is waited for for a second.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ballast_base::store::{Ends, IoContext};

use crate::run::pool::Pool;
use crate::run::queue::GroupId;
use crate::run::servers::Served;
use crate::run::servers::stuck::Stuck;
use crate::vm::view::View;

/// Time that taking one message of each client may need at most: it needs microseconds, unless a client keeps it.
const LONGEST_MESSAGE: Duration = Duration::from_secs(1);

/// The workers of one VM, and whether they are to end.
#[derive(Debug, Default)]
pub(crate) struct Lifecycle {
    group: OnceLock<GroupId>,
    /// The group of tasks that serve faults.
    serving: OnceLock<GroupId>,
    /// Clients, until they are gone.
    clients: Mutex<Vec<(Arc<View>, Served)>>,
    /// Userfaultfds of each view, until no worker can be at them any more.
    faults: Mutex<Vec<(Arc<View>, Served)>>,
    /// Discards are carried out.
    has_discards: AtomicBool,
    /// Faults on pages of slow stores are served.
    has_slow: AtomicBool,
    /// No other engine serves the VM.
    is_alone: AtomicBool,
    /// Tasks are to end.
    is_stopping: AtomicBool,
    /// Faults are to be served no more.
    is_over: AtomicBool,
    /// Then 1: ends the reads of slow workers, as if these had a lock.
    slow_wanted: AtomicU32,
}

impl Lifecycle {
    /// The pool and group of its tasks.
    pub fn pool(&self) -> (Pool, GroupId) {
        let pool = Pool::of_process();
        (pool.clone(), *self.group.get_or_init(|| pool.add_group()))
    }

    /// The pool and group of its tasks that serve faults.
    pub fn serving_pool(&self) -> (Pool, GroupId) {
        let pool = Pool::of_process();
        (pool.clone(), *self.serving.get_or_init(|| pool.add_group()))
    }

    /// From now on faults on pages of slow stores are served. Returns whether they were not before.
    pub fn begins_slow(&self) -> bool {
        !self.has_slow.swap(true, Ordering::AcqRel)
    }

    /// From now on discards are carried out. Returns whether they were not before.
    pub fn begins_discards(&self) -> bool {
        !self.has_discards.swap(true, Ordering::AcqRel)
    }

    /// No other engine serves the VM from now on.
    pub fn set_alone(&self) {
        self.is_alone.store(true, Ordering::Release);
    }

    /// Is there no other engine that serves the VM?
    pub fn is_alone(&self) -> bool {
        self.is_alone.load(Ordering::Acquire)
    }

    /// Records that the client of this view is listened to.
    pub fn add_client(&self, view: Arc<View>, client: Served) {
        self.clients.lock().expect("no panic while held").push((view, client));
    }

    /// Is the client of this view listened to?
    pub fn has_client(&self, view: &Arc<View>) -> bool {
        self.clients.lock().expect("no panic while held").iter().any(|(known, _)| Arc::ptr_eq(known, view))
    }

    /// Stops listening to the clients of these views. Waits while a message is being taken, unless a client keeps that
    /// from ending.
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

    /// Records that faults of this view are served.
    pub fn add_faults(&self, view: Arc<View>, served: Served) {
        let mut faults = self.faults.lock().expect("no panic while held");
        faults.retain(|(_, served)| !served.is_over());
        faults.push((view, served));
    }

    /// Are faults of this view served?
    pub fn has_faults(&self, view: &Arc<View>) -> bool {
        let faults = self.faults.lock().expect("no panic while held");
        faults.iter().any(|(known, served)| Arc::ptr_eq(known, view) && !served.is_over())
    }

    /// Stops serving faults of those views. Does not wait for those that are being served.
    pub fn forget_faults(&self, which: impl Fn(&View) -> bool) {
        let faults = self.faults.lock().expect("no panic while held").clone();
        faults.iter().filter(|(view, _)| which(view)).for_each(|(_, served)| served.close());
    }

    /// Waits until no worker is at the faults that were forgotten.
    pub fn wait_for_faults(&self) {
        let faults = std::mem::take(&mut *self.faults.lock().expect("no panic while held"));
        faults.iter().for_each(|(_, served)| served.wait());
    }

    /// Are faults to be served no more?
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// The context of a slow worker's read. Until the reads of all have ended, nobody serves a VM that goes to another
    /// engine: they are given up after a tenth of a second when the serving of faults ends.
    pub fn reads_slow<'a>(&'a self, context: IoContext<'a>) -> IoContext<'a> {
        context.ended_by(Ends::Wanted(&self.slow_wanted))
    }

    /// Ends the serving of faults.
    pub fn end_faults(&self) {
        self.is_over.store(true, Ordering::Release);
        self.slow_wanted.store(1, Ordering::Release);
        self.forget_faults(|_| true);
    }

    /// Are tasks to end?
    pub fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// Ends the tasks.
    pub fn stop_tasks(&self) {
        self.is_stopping.store(true, Ordering::Release);
    }
}
