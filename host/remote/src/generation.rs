//! Generations: the numbers of the runs of pages that a store has put, each used once.
//!
//! Before: the store is about to send a run. After: it has a number that no run of this VM has, in any engine.
//! Threads: any; a draw may take a tick. Units: ticks of the clock that all processes of the host share.
//! Promise: a generation is larger than all before it, and never ahead of that clock. So the last one used need not be
//! stored.

use std::sync::Mutex;
use std::time::Duration;

use ballast_store::Handle;
use ballast_sys::clock;
use ballast_sys::lock::Lock;

/// Tick of the generations. 40 bits of it are 3.4 years of a host's uptime; then the store is full.
const TICK: Duration = Duration::from_micros(100);

#[derive(Debug)]
pub struct Generations {
    last: Mutex<u64>,
}

/// Returns the largest generation that a page put before now can have.
pub fn tick_now() -> u64 {
    clock::monotonic_ns() / TICK.as_nanos() as u64
}

impl Generations {
    /// Generations that begin after now.
    pub fn new() -> Self {
        Self { last: Mutex::new(tick_now()) }
    }

    pub fn draw(&self) -> Option<Handle> {
        let mut last = self.last.locked();
        while tick_now() <= *last {
            std::thread::sleep(TICK);
        }
        *last = tick_now();
        Handle::new(*last)
    }
}
