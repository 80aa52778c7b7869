//! A thread of the pool: takes the task whose turn it is, runs it, and waits if there is none.
//!
//! Before: the pool started it because too few threads could run. After: it runs tasks until it is a spare that nobody
//! needs, and no write to disk that it gave up waiting for is under way. Threads: this is what each of them does; see
//! [`super`] for how many there are.
//! Units: a run is charged by the time it took and the shares of its group. Promise: the pool's lock is not held while
//! a task runs or is dropped. A panic in a task ends that task alone. What goes before guests ends with the run.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use ballast_store::{has_late_writes, notice_late_writes};
use ballast_sys::priority;

use super::{IDLE, Inner, POOL, Pool, Running};
use crate::run::queue::{Next, charge};

/// A timer before this is not left to the watchdog while another thread could wait for it.
const SOON: Duration = Duration::from_millis(5);
/// A spare with nothing to do ends after this long.
const LINGER: Duration = Duration::from_secs(1);

thread_local! {
    /// Does a thread of a pool go before guests?
    static GOES_FIRST: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Sets whether what this thread does now goes before guests, because threads of guests wait for it. This ends with the
/// run of the task. No task goes first for long: each holds page locks now and then that a fault may want.
pub fn go_first(first: bool) {
    if GOES_FIRST.get().is_some_and(|now| now != first) {
        GOES_FIRST.set(Some(first));
        if first { priority::run_first() } else { priority::run_beside() }
    }
}

impl Pool {
    /// Runs tasks, as a thread of the pool.
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
                // Not what it was before: other spares may have ended meanwhile.
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

    /// Waits for work, no longer than a spare does if this is one or `looks_again`. Returns whether there was none for
    /// as long as that.
    fn rest<'a>(
        &'a self,
        mut inner: MutexGuard<'a, Inner>,
        now: Instant,
        looks_again: bool,
    ) -> (MutexGuard<'a, Inner>, bool) {
        inner.idle += 1;
        // One thread wakes for a timer, not all.
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

/// Names the calling thread, cut as the kernel cuts it: at 15 bytes.
fn set_name(name: &str) {
    let end = name.floor_char_boundary(15);
    if let Ok(name) = std::ffi::CString::new(&name[..end]) {
        let _ = rustix::thread::set_name(&name);
    }
}
