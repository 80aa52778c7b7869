//! CPU time of threads and processes, from `/proc`; and where a thread runs.
//!
//! Units: microseconds. Promise: time spent waiting for a CPU or for anything else is not in it.

use std::fs;

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Of the calling thread.
pub(crate) fn of_thread() -> Result<f64> {
    let text = fs::read_to_string("/proc/thread-self/schedstat").context("Reading /proc/thread-self/schedstat")?;
    run_us(&text).with_context(|| format!("/proc/thread-self/schedstat says {text:?}"))
}

/// Of all threads of this process that are alive.
pub(crate) fn of_process() -> Result<f64> {
    of_threads(std::process::id(), |_| true)
}

/// Of the threads of a process whose name is wanted.
pub(crate) fn of_threads(pid: u32, wanted: impl Fn(&str) -> bool) -> Result<f64> {
    let tasks = format!("/proc/{pid}/task");
    let mut sum = 0.0;
    for task in fs::read_dir(&tasks).with_context(|| format!("Reading {tasks}"))? {
        let task = task.with_context(|| format!("Reading {tasks}"))?.path();
        // A thread may end between the listing and the reading; then its share is lost.
        let Ok(name) = fs::read_to_string(task.join("comm")) else { continue };
        let Ok(text) = fs::read_to_string(task.join("schedstat")) else { continue };
        if wanted(name.trim_end()) {
            sum += run_us(&text).with_context(|| format!("{} says {text:?}", task.display()))?;
        }
    }
    Ok(sum)
}

/// The first number of `schedstat` is nanoseconds on a CPU.
fn run_us(schedstat: &str) -> Option<f64> {
    Some(schedstat.split_ascii_whitespace().next()?.parse::<u64>().ok()? as f64 / 1e3)
}

/// While it lives, the thread that made it stays on the CPU it was on.
pub(crate) struct Stay {
    before: Option<CpuSet>,
}

impl Stay {
    pub(crate) fn here() -> Self {
        let before = sched_getaffinity(None).ok();
        let mut here = CpuSet::new();
        here.set(sched_getcpu());
        // Without it the figures are those of a thread that moves: worse, and not wrong.
        let _ = sched_setaffinity(None, &here);
        Self { before }
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = sched_setaffinity(None, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_shows_as_cpu_time_of_thread_and_process() {
        let (thread, process) = (of_thread().expect("thread"), of_process().expect("process"));
        let mut sum = 0u64;
        while of_thread().expect("thread") - thread < 1000.0 {
            (0..10_000u64).for_each(|i| sum = std::hint::black_box(sum ^ i));
        }
        assert!(of_process().expect("process") > process);
        assert_eq!(of_threads(std::process::id(), |_| false).expect("none"), 0.0);
    }
}
