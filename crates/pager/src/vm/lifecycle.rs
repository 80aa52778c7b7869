//! The life of what works for a VM: its tasks, threads, and clients listened to, and whether they are to end.
//!
//! Before: the VM is open. After: all of them have ended. Threads: any.
//! Promise: a thread that sleeps here is woken as soon as the VM is to stop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::run::listener::Watched;
use crate::run::pool::Pool;
use crate::run::queue::GroupId;
use crate::vm::view::View;

/// See above.
#[derive(Debug, Default)]
pub(crate) struct Lifecycle {
    group: OnceLock<GroupId>,
    /// Clients, until they are gone.
    clients: Mutex<Vec<(Arc<View>, Watched)>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    is_stopping: AtomicBool,
    sleeping: Mutex<()>,
    stopped: Condvar,
}

impl Lifecycle {
    /// Where its tasks run, and as what.
    pub fn pool(&self) -> (Pool, GroupId) {
        let pool = Pool::of_process();
        (pool.clone(), *self.group.get_or_init(|| pool.add_group()))
    }

    /// The client of this view is listened to.
    pub fn add_client(&self, view: Arc<View>, client: Watched) {
        self.clients.lock().expect("no panic while held").push((view, client));
    }

    /// Is the client of this view listened to?
    pub fn has_client(&self, view: &Arc<View>) -> bool {
        self.clients.lock().expect("no panic while held").iter().any(|(known, _)| Arc::ptr_eq(known, view))
    }

    /// Listen no more to those clients whose views these are.
    pub fn forget_clients(&self, which: impl Fn(&View) -> bool) {
        let mut clients = self.clients.lock().expect("no panic while held");
        let (gone, stay) = std::mem::take(&mut *clients).into_iter().partition(|(view, _)| which(view));
        *clients = stay;
        drop(clients);
        // Without the lock, because it waits for the listener.
        let _: Vec<(Arc<View>, Watched)> = gone;
    }

    /// This thread runs. Those that have ended are forgotten: a thread that is not joined keeps its stack.
    pub fn add(&self, thread: JoinHandle<()>) {
        let mut threads = self.threads.lock().expect("no panic while held");
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
    }

    /// Are they to end?
    pub fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// They are to end; those that sleep are woken.
    pub fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        // With the lock, so that no thread is between its check and its sleep.
        drop(self.sleeping.lock().expect("no panic while held"));
        self.stopped.notify_all();
    }

    /// Take the threads, to join them.
    pub fn take(&self) -> Vec<JoinHandle<()>> {
        std::mem::take(&mut self.threads.lock().expect("no panic while held"))
    }

    /// Sleep this long, or until the VM is to stop; returns whether it goes on.
    pub fn sleep(&self, time: Duration) -> bool {
        let guard = self.sleeping.lock().expect("no panic while held");
        let waited = self.stopped.wait_timeout_while(guard, time, |()| !self.is_stopping());
        drop(waited.expect("no panic while held"));
        !self.is_stopping()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_ended_are_forgotten_while_others_start() {
        let life = Lifecycle::default();
        for _ in 0..50 {
            let thread = std::thread::spawn(|| {});
            while !thread.is_finished() {
                std::thread::yield_now();
            }
            life.add(thread);
        }
        assert_eq!(life.take().len(), 1, "each thread that is not joined keeps its stack");
    }
}
