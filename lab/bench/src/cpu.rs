//! CPU time of threads and processes, from `/proc`; and the CPU on which a thread runs.
//!
//! Units: microseconds. Promise: time in which a thread waits does not count.

use std::fs;

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

pub(crate) fn of_thread() -> Result<f64> {
    let text = fs::read_to_string("/proc/thread-self/schedstat").context("Reading /proc/thread-self/schedstat")?;
    run_us(&text).with_context(|| format!("/proc/thread-self/schedstat says {text:?}"))
}

pub(crate) fn of_process() -> Result<f64> {
    of_threads(std::process::id(), |_| true)
}

/// CPU time of the threads of a process whose names are wanted.
pub(crate) fn of_threads(pid: u32, wanted: impl Fn(&str) -> bool) -> Result<f64> {
    let tasks = format!("/proc/{pid}/task");
    let mut sum = 0.0;
    for task in fs::read_dir(&tasks).with_context(|| format!("Reading {tasks}"))? {
        let task = task.with_context(|| format!("Reading {tasks}"))?.path();
        // A thread may end between the listing and the reading; then its time is lost.
        let Ok(name) = fs::read_to_string(task.join("comm")) else { continue };
        let Ok(text) = fs::read_to_string(task.join("schedstat")) else { continue };
        if wanted(name.trim_end()) {
            sum += run_us(&text).with_context(|| format!("{} says {text:?}", task.display()))?;
        }
    }
    Ok(sum)
}

/// Includes ended threads.
pub(crate) fn of_process_id(pid: u32) -> Result<f64> {
    let time = ballast_sys::clock::process_time(pid).with_context(|| format!("there is no process {pid}"))?;
    Ok(time.as_secs_f64() * 1e6)
}

pub(crate) fn of_machine() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat").context("Reading /proc/stat")?;
    busy_us(&text).context("/proc/stat does not begin with the time of all CPUs")
}

/// User, nice and system time, in hundredths of a second; time of interrupts is not counted.
fn busy_us(stat: &str) -> Option<f64> {
    let mut words = stat.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace();
    (0..3).map(|_| words.next()?.parse::<f64>().ok()).sum::<Option<f64>>().map(|ticks| ticks * 1e4)
}

/// Major faults of a process: those for which pages were read from a device, which may be a compressed one.
pub(crate) fn major_faults(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("Reading {path}"))?;
    majflt(&text).with_context(|| format!("{path} says {text:?}"))
}

/// The twelfth word. The second word is a name in parentheses, which may contain anything.
fn majflt(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(9)?.parse().ok()
}

/// The first number of `schedstat` is nanoseconds on a CPU.
fn run_us(schedstat: &str) -> Option<f64> {
    Some(schedstat.split_ascii_whitespace().next()?.parse::<u64>().ok()? as f64 / 1e3)
}

/// While this value lives, the thread that made it stays on its CPU, and so do threads that it starts.
#[derive(Debug)]
pub(crate) struct Stay {
    before: Option<CpuSet>,
}

impl Stay {
    pub(crate) fn here() -> Self {
        let before = sched_getaffinity(None).ok();
        let mut here = CpuSet::new();
        here.set(sched_getcpu());
        // If this fails, the thread moves: its figures are then worse, and not wrong.
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
    fn machine_times_and_process_faults_are_read_from_the_right_words() {
        assert_eq!(busy_us("cpu  10 2 30 400 5 0 0 0 0 0\ncpu0 1 1 1"), Some(420_000.0));
        assert_eq!(majflt("7 (a ) b) S 1 7 7 0 -1 4194304 11 22 33 44 55 66 0 0 20"), Some(33));
        assert!(of_machine().expect("machine") > 0.0);
        major_faults(std::process::id()).expect("this process");
    }

    #[test]
    fn work_shows_as_cpu_time_of_thread_and_process() {
        let (thread, process) = (of_thread().expect("thread"), of_process().expect("process"));
        let mut sum = 0u64;
        while of_thread().expect("thread") - thread < 1000.0 {
            (0..10_000u64).for_each(|i| sum = std::hint::black_box(sum ^ i));
        }
        assert!(of_process().expect("process") > process);
        let whole = of_process_id(std::process::id()).expect("whole process");
        let work = || (0..1_000_000u64).fold(0, |sum, i| std::hint::black_box(sum ^ i));
        std::thread::spawn(work).join().expect("a thread");
        assert!(of_process_id(std::process::id()).expect("whole process") > whole && whole >= process);
        assert_eq!(of_threads(std::process::id(), |_| false).expect("none"), 0.0);
    }
}
