//! Workers: carry out the orders about each VM in turn, on threads that all VMs share. A long order delays no other VM,
//! and never the thread that takes orders.
//!
//! Before: an order about a VM came. After: it is done, after earlier ones about that VM.
//! Threads: those of a pool of its own (`ballast_pager::run`), which replaces a thread that waits. In the pool of the
//! VMs' tasks an order would wait for the reclaim of hundreds of VMs. The longest work (restoring each page of a VM) is
//! a thread of [`Jobs`], so that later orders about the VM need not wait for it, either.
//! Promise: orders about one VM are carried out one at a time, in the order in which they came, even if the VM was
//! closed and comes again.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_pager::run::pool::thread::go_first;
use ballast_pager::run::pool::{Handle, Pool};
use ballast_pager::run::queue::Next;
use ballast_sys::lock::Lock;

type Work = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
pub struct Workers {
    pool: Pool,
    vms: HashMap<VmId, Worker>,
    /// Set when no guest waits any more for this engine to open its VM.
    is_serving: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Worker {
    orders: Arc<Mutex<Orders>>,
    task: Handle,
    /// Set when the VM's last work is done and no more is expected.
    ended: Arc<AtomicBool>,
}

#[derive(Default)]
struct Orders {
    waiting: VecDeque<Work>,
    is_closed: bool,
}

impl std::fmt::Debug for Orders {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Orders").field("waiting", &self.waiting.len()).finish_non_exhaustive()
    }
}

impl Worker {
    fn new(pool: &Pool, is_serving: Arc<AtomicBool>) -> io::Result<Self> {
        let orders = Arc::new(Mutex::new(Orders::default()));
        let taken = orders.clone();
        let next = move |_: Instant| {
            // Guests whose VMs are open run again. They must not take the CPUs that are needed to open the others.
            go_first(!is_serving.load(Ordering::Acquire));
            let (work, is_closed) = {
                let mut orders = taken.locked();
                (orders.waiting.pop_front(), orders.is_closed)
            };
            match work {
                Some(work) => run(work),
                None if is_closed => return Next::Done,
                None => return Next::Idle,
            }
            Next::Again
        };
        let task = pool.add(pool.add_group(), "orders", next)?;
        Ok(Self { orders, task, ended: Arc::default() })
    }

    fn give(&self, work: Work) {
        self.orders.locked().waiting.push_back(work);
        self.task.notify();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.orders.locked().is_closed = true;
        self.task.notify();
    }
}

impl Default for Workers {
    fn default() -> Self {
        Self { pool: Pool::of_cpus(), vms: HashMap::new(), is_serving: Arc::default() }
    }
}

impl Workers {
    pub fn is_serving(&self) -> Arc<AtomicBool> {
        self.is_serving.clone()
    }

    pub fn give(&mut self, vm: VmId, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.sweep();
        let worker = match self.vms.entry(vm) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => {
                new.insert(Worker::new(&self.pool, self.is_serving.clone())?)
            }
        };
        // A VM that comes again before its end was carried out goes to the same worker.
        worker.ended = Arc::default();
        worker.give(Box::new(work));
        Ok(())
    }

    /// Like [`Self::give`], for work that is the VM's last, as far as is known.
    pub fn give_last(&mut self, vm: VmId, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let ended = Arc::new(AtomicBool::new(false));
        let sign = ended.clone();
        self.give(vm, move || {
            let _ = catch_unwind(AssertUnwindSafe(work));
            sign.store(true, Ordering::Release);
        })?;
        if let Some(worker) = self.vms.get_mut(&vm) {
            worker.ended = ended;
        }
        Ok(())
    }

    fn sweep(&mut self) {
        self.vms.retain(|_, worker| !worker.ended.load(Ordering::Acquire));
    }

    /// A handle that is done when all orders so far are.
    pub fn all_so_far(&mut self) -> Done {
        let (sender, receiver) = mpsc::channel();
        for worker in self.vms.values() {
            let sender = sender.clone();
            worker.give(Box::new(move || drop(sender)));
        }
        Done(receiver)
    }
}

fn run(work: Work) {
    // Unfinished work affects only its own VM, and the next order may close the VM.
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        tracing::error!("carrying out an order panicked");
    }
}

#[derive(Debug)]
pub struct Done(Receiver<()>);

impl Done {
    pub fn wait(&self, at_most: Duration) -> bool {
        self.0.recv_timeout(at_most) == Err(RecvTimeoutError::Disconnected)
    }

    pub fn is_over(&self) -> bool {
        self.0.try_recv() == Err(TryRecvError::Disconnected)
    }
}

/// Threads that work on one VM, each for as long as its work takes. They must end before the VM may be reopened.
#[derive(Debug, Default)]
pub struct Jobs(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    closed: bool,
    threads: Vec<JoinHandle<()>>,
}

impl Jobs {
    /// Starts `work` on a thread of its own. Fails after [`Jobs::close`], or if no thread can be started.
    pub fn begin(&self, name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut state = self.0.locked();
        state.threads.retain(|thread| !thread.is_finished());
        if state.closed {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the VM is being closed"));
        }
        state.threads.push(std::thread::Builder::new().name(name.into()).spawn(work)?);
        Ok(())
    }

    #[cfg(test)]
    pub fn has_begun(&self) -> bool {
        !self.0.locked().threads.is_empty()
    }

    pub fn close(&self) {
        let threads = {
            let mut state = self.0.locked();
            state.closed = true;
            std::mem::take(&mut state.threads)
        };
        for thread in threads {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: VmId = VmId([1; 16]);
    const B: VmId = VmId([2; 16]);

    #[test]
    fn an_order_that_never_ends_delays_only_later_orders_of_its_vm() {
        let mut workers = Workers::default();
        let (release, released) = mpsc::channel::<()>();
        let (said, says) = mpsc::channel();
        let tell = |what| {
            let said = said.clone();
            move || said.send(what).expect("heard")
        };
        workers.give(A, move || assert!(released.recv().is_err())).expect("a thread");
        workers.give(A, tell("a")).expect("given");
        let a_done = workers.all_so_far();
        workers.give(B, tell("b")).expect("a thread");
        assert_eq!(says.recv(), Ok("b"), "another VM's order is carried out, and this thread is free");
        assert!(!a_done.is_over() && !a_done.wait(Duration::ZERO) && says.try_recv().is_err());
        drop(release);
        while !a_done.wait(Duration::from_secs(60)) {}
        assert_eq!(says.recv(), Ok("a"));
    }

    #[test]
    fn a_vm_that_comes_again_is_opened_after_it_was_closed_and_leaves_no_worker() {
        let mut workers = Workers::default();
        let (release, released) = mpsc::channel::<()>();
        let (said, says) = mpsc::channel();
        let again = said.clone();
        workers
            .give_last(A, move || {
                let _ = released.recv();
                said.send("closed").expect("heard");
                panic!("a bug");
            })
            .expect("a thread");
        workers.give(A, move || again.send("opened again").expect("heard")).expect("given");
        drop(release);
        assert_eq!([says.recv(), says.recv()], [Ok("closed"), Ok("opened again")]);
        workers.give_last(A, || ()).expect("given");
        while !workers.all_so_far().wait(Duration::from_secs(60)) {}
        workers.sweep();
        assert!(workers.vms.is_empty());
    }

    #[test]
    fn closing_waits_for_jobs_and_lets_none_begin() {
        let jobs = Arc::new(Jobs::default());
        let (release, released) = mpsc::channel::<()>();
        let (ended, ends) = mpsc::channel();
        jobs.begin("test", move || {
            let _ = released.recv();
            ended.send(()).expect("heard");
        })
        .expect("a thread");
        let closing = {
            let jobs = jobs.clone();
            std::thread::spawn(move || jobs.close())
        };
        drop(release);
        closing.join().expect("closed");
        assert_eq!(ends.try_recv(), Ok(()), "it was waited for");
        jobs.begin("test", || panic!("begun after the end")).expect_err("it is closed");
    }
}
