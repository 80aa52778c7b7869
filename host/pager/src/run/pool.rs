//! The pool: the threads that run tasks, one for each CPU, and a spare for each that waits in the kernel.
//!
//! Before: [`Pool::add`] gives it a task. After: the task runs after each [`Notifier::notify`], and at the times that
//! it asks for, one run at a time, until it is done.
//! Threads: one for each CPU, at the default nice value ([`thread`]); spares; one watchdog.
//! Promise: a task that waits delays other tasks only by some milliseconds: a spare takes its thread's place, and ends
//! when it is not needed any more. [`blocking`] announces a wait; otherwise the watchdog finds it.

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, RwLock};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use super::queue::{GroupId, Next, Queue, TaskId, USUAL_SHARES};

pub mod thread;
pub(super) mod watchdog;

/// A task: it runs again and again, each time for a few milliseconds unless it waits.
pub trait Task: Send {
    /// Runs once. `now` is the present time.
    fn run(&mut self, now: Instant) -> Next;

    /// The weight of its group, by which the run is charged.
    fn shares(&self) -> u32 {
        USUAL_SHARES
    }
}

impl<F: FnMut(Instant) -> Next + Send> Task for F {
    fn run(&mut self, now: Instant) -> Next {
        self(now)
    }
}

/// Notifies a task that it has work. Without effect until it is connected: a new task runs anyway.
#[derive(Debug, Default)]
pub struct Notifier(RwLock<Option<Handle>>);

impl Notifier {
    /// Has the task run soon, or once more if it is running. Never waits for it.
    pub fn notify(&self) {
        if let Some(task) = &*self.0.read().expect("no panic while held") {
            task.notify();
        }
    }

    /// Connects it to this task.
    pub fn connect(&self, task: Handle) {
        *self.0.write().expect("no panic while held") = Some(task);
    }

    /// Connects it to the task of the other one.
    pub fn connect_to(&self, other: &Self) {
        let task = other.0.read().expect("no panic while held").clone();
        *self.0.write().expect("no panic while held") = task;
    }
}

/// A task of a pool.
#[derive(Clone, Debug)]
pub struct Handle(Pool, TaskId);

impl Handle {
    /// See [`Notifier::notify`].
    pub fn notify(&self) {
        self.0.notify(self.1);
    }
}

/// A pool of threads. A clone is the same pool.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    /// A task is ready, or a timer is due earlier than before.
    work: Condvar,
    over: Condvar,
    /// Wakes the watchdog when a task runs after none did.
    watch: Condvar,
    /// Number of threads that should not be waiting in the kernel.
    base: usize,
}

#[derive(Default)]
struct Inner {
    queue: Queue,
    tasks: HashMap<TaskId, Body>,
    threads: HashMap<ThreadId, Worker>,
    idle: usize,
    /// Time until which one of the idle threads waits, for the next timer.
    timed: Option<Instant>,
    has_watchdog: bool,
    is_watched: bool,
    runs: u64,
}

struct Body {
    name: Arc<str>,
    /// `None` while it runs.
    task: Option<Box<dyn Task>>,
}

#[derive(Debug)]
struct Worker {
    number: u32,
    runs: Option<Running>,
    is_blocked: bool,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    task: TaskId,
    since: Instant,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("threads", &self.threads).field("idle", &self.idle).finish_non_exhaustive()
    }
}

impl Inner {
    fn unblocked(&self) -> usize {
        self.threads.values().filter(|worker| !worker.is_blocked).count()
    }
}

thread_local! {
    /// The pool of the calling thread; `None` inside [`blocking`].
    static POOL: Cell<Option<Pool>> = const { Cell::new(None) };
}

/// One pause in a loop that has waited since `begun` for something that takes microseconds if the other thread has a
/// CPU: yields, and after 1 ms sleeps, while another thread of the pool takes this one's place.
pub fn pause(begun: Instant) {
    const AT_ONCE: Duration = Duration::from_millis(1);
    const PAUSE: Duration = Duration::from_micros(50);
    match begun.elapsed() < AT_ONCE {
        true => std::thread::yield_now(),
        false => blocking(|| std::thread::sleep(PAUSE)),
    }
}

/// Calls a function that may wait for long (for a disk or another process), while a spare takes this thread's place.
pub fn blocking<T>(wait: impl FnOnce() -> T) -> T {
    struct Ends(Pool);
    impl Drop for Ends {
        fn drop(&mut self) {
            POOL.set(Some(self.0.clone()));
            self.0.set_blocked(false);
        }
    }
    // `None` during the wait: a nested wait changes nothing.
    let Some(pool) = POOL.take() else { return wait() };
    pool.set_blocked(true);
    let _ends = Ends(pool);
    wait()
}

impl Pool {
    /// The pool of all VMs' tasks.
    pub fn of_process() -> Self {
        static POOL: OnceLock<Pool> = OnceLock::new();
        POOL.get_or_init(Self::of_cpus).clone()
    }

    /// A pool of one thread for each CPU.
    pub fn of_cpus() -> Self {
        Self::new(std::thread::available_parallelism().map_or(1, |cpus| cpus.get()))
    }

    /// A pool of this number of threads, which start with the first task.
    pub fn new(threads: usize) -> Self {
        let shared = Shared {
            inner: Mutex::default(),
            work: Condvar::new(),
            over: Condvar::new(),
            watch: Condvar::new(),
            base: threads.max(1),
        };
        Self(Arc::new(shared))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().expect("no panic while held")
    }

    /// A new group of tasks, which have their turns together.
    pub fn add_group(&self) -> GroupId {
        self.lock().queue.add_group()
    }

    /// Adds a task, which runs now and whenever it is notified. Its thread has this name during a run.
    ///
    /// # Errors
    /// No thread exists to run it, and the kernel cannot start one.
    pub fn add(&self, group: GroupId, name: &str, task: impl Task + 'static) -> io::Result<Handle> {
        let mut inner = self.lock();
        if let Err(error) = self.start_missing(&mut inner)
            && inner.threads.is_empty()
        {
            return Err(error);
        }
        let id = inner.queue.add(group);
        inner.tasks.insert(id, Body { name: name.into(), task: Some(Box::new(task)) });
        self.dispatch(&mut inner);
        Ok(Handle(self.clone(), id))
    }

    fn notify(&self, task: TaskId) {
        let mut inner = self.lock();
        if inner.queue.notify(task) {
            self.dispatch(&mut inner);
        }
    }

    /// A task is ready: has a thread run it.
    fn dispatch(&self, inner: &mut Inner) {
        if inner.idle > 0 {
            self.0.work.notify_one();
        } else {
            self.make_up(inner);
        }
    }

    /// Notifies all tasks of a group, which must end, and waits until they are done; not for one that this thread runs.
    pub fn join(&self, group: GroupId) {
        let this = std::thread::current().id();
        let mut inner = self.lock();
        let mine = inner.threads.get(&this).and_then(|worker| worker.runs).map(|run| run.task);
        let others = |inner: &Inner| {
            let mut tasks = inner.queue.of(group);
            tasks.retain(|task| Some(*task) != mine);
            tasks
        };
        for task in others(&inner) {
            if inner.queue.notify(task) {
                self.dispatch(&mut inner);
            }
        }
        drop(inner);
        blocking(|| {
            let waits = |inner: &mut Inner| !others(inner).is_empty();
            drop(self.0.over.wait_while(self.lock(), waits).expect("no panic while held"));
        });
    }

    /// Number of threads, without the watchdog.
    pub fn threads(&self) -> usize {
        self.lock().threads.len()
    }

    /// Records that the calling thread begins or ceases to wait in the kernel.
    fn set_blocked(&self, is_blocked: bool) {
        let mut inner = self.lock();
        if let Some(worker) = inner.threads.get_mut(&std::thread::current().id()) {
            worker.is_blocked = is_blocked;
        }
        self.make_up(&mut inner);
    }

    /// Starts spares for blocked threads, if there is work.
    fn make_up(&self, inner: &mut Inner) {
        if !inner.queue.is_ready() && inner.queue.next_due().is_none() || inner.idle > 0 {
            return;
        }
        if let Err(error) = self.start_missing(inner) {
            tracing::error!("Starting a thread: {error}");
        }
    }

    fn start_missing(&self, inner: &mut Inner) -> io::Result<()> {
        if !inner.has_watchdog {
            let pool = self.clone();
            std::thread::Builder::new().name("watchdog".into()).spawn(move || pool.watch())?;
            inner.has_watchdog = true;
        }
        while inner.unblocked() < self.0.base {
            let pool = self.clone();
            // The new thread needs the lock that this thread holds before it can look itself up.
            let thread = std::thread::Builder::new().name(IDLE.into()).spawn(move || pool.work())?;
            let worker = Worker { number: 0, runs: None, is_blocked: false };
            inner.threads.insert(thread.thread().id(), worker);
        }
        Ok(())
    }
}

const IDLE: &str = "pool";

#[cfg(test)]
mod tests {
    use super::super::until;
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn a_task_runs_each_time_it_is_notified_until_it_is_done_and_its_group_is_joined() {
        let pool = Pool::new(2);
        let group = pool.add_group();
        let (said, says) = mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = stop.clone();
        let task = move |_: Instant| {
            said.send(()).expect("heard");
            if stopping.load(Ordering::Acquire) { Next::Done } else { Next::Idle }
        };
        let handle = pool.add(group, "test", task).expect("a thread");
        for _ in 0..1000 {
            says.recv().expect("it runs");
            handle.notify();
        }
        stop.store(true, Ordering::Release);
        pool.join(group);
        assert!(pool.lock().tasks.is_empty());
        handle.notify();
    }

    #[test]
    fn tasks_that_wait_delay_no_other_and_their_spares_end() {
        let pool = Pool::new(2);
        let group = pool.add_group();
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        for announced in [true, false, true, false, true] {
            let released = released.clone();
            // The lock stays held, so that the other tasks sleep in the kernel.
            let wait = move || {
                let _ = released.lock().expect("held").recv();
            };
            let task = move |_: Instant| {
                if announced {
                    blocking(&wait)
                } else {
                    wait()
                }
                Next::Done
            };
            pool.add(group, "waits", task).expect("a thread");
        }
        let (said, says) = mpsc::channel();
        let other = pool.add_group();
        let task = move |_: Instant| {
            said.send(()).expect("heard");
            Next::Done
        };
        pool.add(other, "test", task).expect("a thread");
        says.recv().expect("it runs");
        assert!(pool.threads() > 5);
        drop(release);
        pool.join(group);
        until(|| pool.threads() == 2);
    }

    #[test]
    fn a_panic_ends_its_task_alone_and_timers_fire() {
        let pool = Pool::new(1);
        let group = pool.add_group();
        pool.add(group, "panics", |_: Instant| -> Next { panic!("a bug") }).expect("a thread");
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = runs.clone();
        let task = move |now: Instant| match counted.fetch_add(1, Ordering::AcqRel) {
            0..3 => Next::At(now + Duration::from_millis(1)),
            _ => Next::Done,
        };
        pool.add(group, "test", task).expect("a thread");
        until(|| runs.load(Ordering::Acquire) == 4);
        pool.join(group);
    }
}
