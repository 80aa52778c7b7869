//! A thread of the pool: takes the task whose turn it is, runs it, and waits if there is none.
//!
//! Before: the pool started it because too few threads could run. After: it has run tasks until it was a spare that is
//! not needed, and no disk write that it gave up waiting for is under way.
//! Threads: each thread of the pool; [`super`] has their number. Units: a run is charged by time and group shares.
//! Promise: the pool's lock is not held while a task runs or is dropped. A panic in a task ends only that task. A
//! raised priority ends with the run.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use ballast_store::{has_late_writes, notice_late_writes};
use ballast_sys::priority;

use super::{IDLE, Inner, POOL, Pool, Running};
use crate::run::queue::{Next, charge};

/// A timer due within this time is given to another thread, if none waits for it, before this one runs a task.
const SOON: Duration = Duration::from_millis(5);
/// A spare without work ends after this time.
const LINGER: Duration = Duration::from_secs(1);

thread_local! {
    /// For a thread of a pool: whether its priority is raised.
    static GOES_FIRST: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Raises or lowers this thread's priority above guests, while guest threads wait for its work. It lasts until the end
/// of the run. No task may keep it for long: each sometimes holds page locks that a fault may need.
pub fn go_first(first: bool) {
    if GOES_FIRST.get().is_some_and(|now| now != first) {
        GOES_FIRST.set(Some(first));
        if first { priority::run_first() } else { priority::run_beside() }
    }
}

impl Pool {
    pub(super) fn work(self) {
        POOL.set(Some(self.clone()));
        GOES_FIRST.set(Some(false));
        let me = std::thread::current().id();
        let mut inner = self.lock();
        inner.threads.get_mut(&me).expect("entered at its start").number = rustix::thread::gettid().as_raw_pid() as u32;
        let mut name: Arc<str> = IDLE.into();
        let mut last = None;
        loop {
            let now = Instant::now();
            let Some(id) = inner.queue.take(now) else {
                go_first(false);
                if name.as_ref() != IDLE {
                    name = IDLE.into();
                    set_name(IDLE);
                }
                let has_late = has_late_writes();
                let (guard, timed_out) = self.rest(inner, now, has_late);
                inner = guard;
                if has_late {
                    drop(inner);
                    notice_late_writes();
                    inner = self.lock();
                    continue;
                }
                // Computed again: other spares may have ended.
                if !timed_out || inner.unblocked() <= self.0.base {
                    continue;
                }
                inner.threads.remove(&me);
                return;
            };
            inner.runs += 1;
            if !std::mem::replace(&mut inner.is_watched, true) {
                self.0.watch.notify_one();
            }
            let body = inner.tasks.get_mut(&id).expect("it is not over");
            let mut task = body.task.take().expect("it does not run twice at a time");
            let wanted = body.name.clone();
            inner.threads.get_mut(&me).expect("entered at its start").runs = Some(Running { task: id, since: now });
            let is_soon = |due: Instant| due.saturating_duration_since(now) < SOON;
            if inner.queue.is_ready() || inner.timed.is_none() && inner.queue.next_due().is_some_and(is_soon) {
                self.dispatch(&mut inner);
            }
            drop(inner);
            if last.replace(id) != Some(id) {
                go_first(false);
            }
            if name != wanted {
                set_name(&wanted);
                name = wanted;
            }
            let next = catch_unwind(AssertUnwindSafe(|| task.run(now))).unwrap_or_else(|_| {
                tracing::error!("the task {name} panicked");
                Next::Done
            });
            let spent = charge(now.elapsed(), task.shares());
            // Dropping the task may take as long as a run.
            let task = (next != Next::Done).then_some(task);
            inner = self.lock();
            inner.queue.ran(id, spent, next);
            match task {
                Some(task) => inner.tasks.get_mut(&id).expect("it is not over").task = Some(task),
                None => {
                    inner.tasks.remove(&id);
                    self.0.over.notify_all();
                }
            }
            let worker = inner.threads.get_mut(&me).expect("entered at its start");
            (worker.runs, worker.is_blocked) = (None, false);
        }
    }

    /// Waits for work; a spare, and a thread with `looks_again`, at most for [`LINGER`]. Returns whether it has passed.
    fn rest<'a>(
        &'a self,
        mut inner: MutexGuard<'a, Inner>,
        now: Instant,
        looks_again: bool,
    ) -> (MutexGuard<'a, Inner>, bool) {
        inner.idle += 1;
        // Only one thread waits for the next timer.
        let timed = inner.timed;
        let due = inner.queue.next_due().filter(|due| timed.is_none_or(|timed| *due < timed));
        inner.timed = due.or(timed);
        let lingers = (looks_again || inner.unblocked() > self.0.base).then_some(LINGER);
        let pause = due.map(|due| due.saturating_duration_since(now)).into_iter().chain(lingers).min();
        let timed_out;
        (inner, timed_out) = match pause {
            Some(pause) => {
                let (inner, timeout) = self.0.work.wait_timeout(inner, pause).expect("no panic while held");
                (inner, timeout.timed_out())
            }
            None => (self.0.work.wait(inner).expect("no panic while held"), false),
        };
        inner.idle -= 1;
        if due.is_some() && inner.timed == due {
            inner.timed = None;
        }
        let is_over = timed_out && due.is_none() && !inner.queue.is_ready();
        (inner, is_over)
    }
}

/// Names the calling thread, cut to 15 bytes as the kernel does.
fn set_name(name: &str) {
    let end = name.floor_char_boundary(15);
    if let Ok(name) = std::ffi::CString::new(&name[..end]) {
        let _ = rustix::thread::set_name(&name);
    }
}
