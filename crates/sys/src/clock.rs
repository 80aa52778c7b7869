//! Clocks that are asked of the kernel.
//!
//! Before: a worker wants to know what its work costs. After: its CPU time, whatever else the CPU ran meanwhile.
//! Threads: any; each asks of itself. Units: time. Promise: never fails, never goes back.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CPU time that the calling thread has used.
pub fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
