//! The queue of prefetch requests of a VM.
//!
//! Before: a fault worker found that a cluster pays. After: the prefetch worker takes the newest request, one window at
//! a time.
//! Threads: any push, one pops. Units: a *window* is an aligned group of [`WINDOW`] pages.
//! Promise: a push never waits for the worker, and the queue is bounded: the oldest requests are dropped.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_base::{Bytes, MIB, PageRange};

use super::busy;
use crate::run::pool::Notifier;
use crate::run::queue::Next;
use crate::vm::view::View;

/// Pages of a window: 64 KiB.
pub const WINDOW: u64 = 16;
/// Most pages requested, 8 MiB: older guesses are out of date.
const BUDGET: Bytes = Bytes(8 * MIB);
/// The prefetch worker polls this often until there was no request for a while, or until other threads want its CPU
/// ([`busy`]). To wake a thread costs the fault worker up to 30 us where CPUs sleep deeply.
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
    /// Notifies the prefetch worker.
    pub(crate) notifier: Notifier,
}

#[derive(Debug, Default)]
struct Queue {
    requests: VecDeque<Request>,
    /// Pages in it.
    pages: u64,
    /// The worker waits to be notified.
    asleep: bool,
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
        let asleep = std::mem::take(&mut queue.asleep);
        drop(queue);
        if asleep {
            self.notifier.notify();
        }
    }

    /// The newest request, at most a window of it.
    pub(crate) fn pop(&self) -> Option<Request> {
        self.queue.lock().expect("no panic while held").pop()
    }

    /// When the worker looks again, after it found nothing. `served` is when it served the last request.
    pub(crate) fn pause(&self, served: Option<Instant>, now: Instant) -> Next {
        let mut queue = self.queue.lock().expect("no panic while held");
        if !queue.requests.is_empty() {
            return Next::Again;
        }
        if busy::ran() || served.is_none_or(|served| now.saturating_duration_since(served) > POLL_FOR) {
            queue.asleep = true;
            return Next::Idle;
        }
        Next::At(now + POLL_EVERY)
    }
}
