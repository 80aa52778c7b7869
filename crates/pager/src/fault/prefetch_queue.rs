//! The queue of prefetch requests of a VM.
//!
//! Before: a fault worker found that a cluster pays. After: the prefetch worker takes the newest request, a window at a
//! time.
//! Threads: any push, one pops. Units: a *window* is an aligned group of [`WINDOW`] pages.
//! Promise: a push never waits for the worker, and the queue is bounded: the oldest requests are dropped.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ballast_base::{Bytes, MIB, PageRange};

use super::busy::Busy;
use crate::vm::view::View;

/// Pages of a window: 64 KiB.
pub const WINDOW: u64 = 16;
/// Pages requested at most, 8 MiB: older guesses are out of date.
const BUDGET: Bytes = Bytes(8 * MIB);
/// Waking a thread costs the fault worker up to 30 us where CPUs sleep deeply. So the prefetch worker polls for
/// requests, this often, until there was none for a while, or other threads want its CPU ([`Busy`]).
const POLL_EVERY: Duration = Duration::from_micros(200);
const POLL_FOR: Duration = Duration::from_millis(50);

/// Pages of one region to bring back through one view.
#[derive(Debug)]
pub(crate) struct Request {
    pub view: Arc<View>,
    pub region: u32,
    pub pages: PageRange,
}

/// Pages to bring back.
#[derive(Debug, Default)]
pub struct PrefetchQueue {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    requests: VecDeque<Request>,
    /// Pages in it.
    pages: u64,
    /// The worker waits to be notified.
    asleep: bool,
    /// The worker is to end.
    ended: bool,
}

impl Queue {
    fn push(&mut self, request: Request) {
        self.pages += request.pages.count();
        self.requests.push_back(request);
        while self.pages > BUDGET.pages_floor().0 {
            let Some(oldest) = self.requests.pop_front() else { return };
            self.pages -= oldest.pages.count();
        }
    }

    /// The next window of the newest request.
    fn pop(&mut self) -> Option<Request> {
        let newest = self.requests.back_mut()?;
        let pages = PageRange::of(newest.pages.start(), WINDOW).before(newest.pages.end());
        self.pages -= pages.count();
        newest.pages = newest.pages.from(pages.end());
        let next = Request { view: newest.view.clone(), region: newest.region, pages };
        if newest.pages.is_empty() {
            self.requests.pop_back();
        }
        Some(next)
    }
}

impl PrefetchQueue {
    /// Request these pages of a region.
    pub fn request(&self, view: &Arc<View>, region: u32, pages: PageRange) {
        if pages.is_empty() {
            return;
        }
        let mut queue = self.queue.lock().expect("no panic while held");
        queue.push(Request { view: view.clone(), region, pages });
        if queue.asleep {
            self.changed.notify_one();
        }
    }

    /// The worker is to stop.
    pub fn end(&self) {
        self.queue.lock().expect("no panic while held").ended = true;
        self.changed.notify_all();
    }

    /// The newest request, at most a window of it; `None` when it is time to end. `served` is when the last one was.
    pub(crate) fn next(&self, served: Option<Instant>, cpus: &mut Busy) -> Option<Request> {
        loop {
            let mut queue = self.queue.lock().expect("no panic while held");
            if queue.requests.is_empty() && (cpus.ran() || served.is_none_or(|served| served.elapsed() > POLL_FOR)) {
                queue.asleep = true;
                let wait = self.changed.wait_while(queue, |queue| queue.requests.is_empty() && !queue.ended);
                queue = wait.expect("no panic while held");
                queue.asleep = false;
            }
            if queue.ended {
                return None;
            }
            if let Some(newest) = queue.pop() {
                return Some(newest);
            }
            drop(queue);
            std::thread::sleep(POLL_EVERY);
        }
    }
}
