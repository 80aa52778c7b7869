//! Follow: keep a fault worker on the CPU whose guest thread faults.
//!
//! Before: the worker has read faults. After: it runs where the thread that waits ran, so that waking the worker and
//! resuming the guest need no interrupt to another CPU: a faulting thread leaves its CPU idle at that very moment.
//! Threads: each fault worker has its own. Units: CPU numbers as the kernel counts them.
//! Promise: a hint and nothing more. What cannot be found out or set leaves the worker where the scheduler puts it.
//!
//! The worker moves when two samples agree and may run anywhere when they do not, so a VM whose threads fault on many
//! CPUs does not move its worker all the time.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// How often the CPU of a faulting thread is sampled, at first and when nothing changes. A sample costs some 5 us.
const SAMPLE_EVERY: Duration = Duration::from_millis(1);
const SAMPLE_RARELY: Duration = Duration::from_millis(64);

/// Where a fault worker runs.
#[derive(Debug)]
pub struct Follow {
    pid: u32,
    /// Where it may run when it follows nobody; `None` if the kernel would not say, and then it stays there.
    anywhere: Option<CpuSet>,
    /// Where it was put.
    at: Option<usize>,
    /// What the last sample found.
    seen: Option<usize>,
    next_sample: Instant,
    interval: Duration,
    /// The thread sampled last, and its `stat`.
    thread: Option<(u32, File)>,
}

impl Follow {
    /// For the calling thread, which serves faults of process `pid`.
    pub fn new(pid: u32) -> Self {
        Self {
            pid,
            anywhere: sched_getaffinity(None).ok(),
            at: None,
            seen: None,
            next_sample: Instant::now(),
            interval: SAMPLE_EVERY,
            thread: None,
        }
    }

    /// `thread` of the process waits for us now.
    pub fn faulted(&mut self, thread: u32, now: Instant) {
        if now < self.next_sample {
            return;
        }
        let Some(anywhere) = self.anywhere else { return };
        let cpu = self.cpu_of(thread);
        let agreed = cpu.filter(|_| cpu == self.seen);
        self.seen = cpu;
        self.interval = if agreed.is_some() && agreed == self.at { self.interval * 2 } else { SAMPLE_EVERY };
        self.interval = self.interval.min(SAMPLE_RARELY);
        self.next_sample = now + self.interval;
        if agreed == self.at {
            return;
        }
        let set = agreed.map_or(anywhere, |cpu| {
            let mut only = CpuSet::new();
            only.set(cpu);
            only
        });
        if agreed.is_none_or(|cpu| anywhere.is_set(cpu)) && sched_setaffinity(None, &set).is_ok() {
            self.at = agreed;
        }
    }

    /// The CPU a thread ran on last.
    fn cpu_of(&mut self, thread: u32) -> Option<usize> {
        if self.thread.as_ref().is_none_or(|(known, _)| *known != thread) {
            let path = format!("/proc/{}/task/{thread}/stat", self.pid);
            self.thread = Some((thread, File::open(path).ok()?));
        }
        let mut stat = [0; 1024];
        let (_, file) = self.thread.as_ref()?;
        let len = file.read_at(&mut stat, 0).ok()?;
        processor(std::str::from_utf8(&stat[..len]).ok()?)
    }
}

impl Drop for Follow {
    fn drop(&mut self) {
        if let Some(anywhere) = self.anywhere.filter(|_| self.at.is_some()) {
            let _ = sched_setaffinity(None, &anywhere);
        }
    }
}

/// The field `processor` of a `stat` file: the 39th. The second may hold anything, up to the last closing parenthesis.
/// `None` for a real-time thread (the 41st field, `policy`, is not 0): a worker beside it might never run.
fn processor(stat: &str) -> Option<usize> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(36);
    let cpu = fields.next()?.parse().ok()?;
    (cpu < CpuSet::MAX_CPU && fields.nth(1)? == "0").then_some(cpu)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_needs::skip;

    #[test]
    fn the_processor_is_the_39th_field_whatever_the_name() {
        let fields = |name: &str| {
            let rest: Vec<String> = (4..=52).map(|number| number.to_string()).collect();
            format!("17 ({name}) S {}\n", rest.join(" ")).replace(" 41 ", " 0 ")
        };
        assert_eq!(processor(&fields("kvm 1) S 3")), Some(39));
        assert_eq!(processor(&fields("CPU 0/KVM").replace(" 39 ", " 99999999 ")), None);
        assert_eq!(processor(&fields("fifo").replace(" 40 0 42 ", " 40 1 42 ")), None, "a real-time thread");
        assert_eq!(processor("17 (short) S 1 2"), None);
        assert_eq!(processor(""), None);
    }

    #[test]
    fn a_worker_comes_to_the_cpu_of_the_thread_that_faults_and_is_let_go_when_they_differ() {
        let allowed = sched_getaffinity(None).expect("affinity");
        let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).take(2).collect();
        let [first, second] = cpus[..] else { return skip("native", "two CPUs") };
        let pinned = |cpu: usize| {
            let (tell, told) = std::sync::mpsc::channel();
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let thread = std::thread::spawn(move || {
                let mut only = CpuSet::new();
                only.set(cpu);
                sched_setaffinity(None, &only).expect("pin");
                tell.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).expect("tell");
                let _ = ended.recv();
            });
            (told.recv().expect("told"), end, thread)
        };
        let (guests, worker) = ([pinned(first), pinned(second)], Follow::new(std::process::id()));
        let mut worker = worker;
        let mut now = Instant::now();
        let mut fault = |worker: &mut Follow, guest: usize| {
            now += SAMPLE_RARELY;
            worker.faulted(guests[guest].0, now);
            sched_getaffinity(None).expect("affinity")
        };
        fault(&mut worker, 1);
        let there = fault(&mut worker, 1);
        assert!(there.is_set(second) && !there.is_set(first), "two samples agree");
        assert!(fault(&mut worker, 0) == allowed, "they do not");
        let there = fault(&mut worker, 0);
        assert!(there.is_set(first) && !there.is_set(second), "they agree on the other");
        for (_, end, thread) in guests {
            drop(end);
            thread.join().expect("guest");
        }
        sched_setaffinity(None, &allowed).expect("restore");
    }
}
