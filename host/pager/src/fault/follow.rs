//! Follow: the CPU on which the guest threads of a userfaultfd fault, so that the worker of that CPU serves it.
//!
//! Before: faults were read. After: the userfaultfd is served where the waiting thread ran. Waking the worker and
//! resuming the guest then need no IPI: a faulting thread leaves its CPU idle at that moment.
//! Threads: the worker that serves the userfaultfd. Units: CPU numbers of the kernel.
//! Promise: it is only a hint. If the kernel does not tell the CPU, the userfaultfd stays where it is.
//!
//! The userfaultfd moves when two samples agree. If a VM faults on many CPUs, it stays, or goes to an idle worker.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::run::serve::Placement;

/// Time between samples of a faulting thread's CPU, while they differ and while they agree. A sample costs some 5 us.
const SAMPLE_EVERY: Duration = Duration::from_millis(1);
const SAMPLE_RARELY: Duration = Duration::from_millis(64);

#[derive(Debug)]
pub struct Follow {
    pid: u32,
    seen: Option<Ran>,
    next_sample: Instant,
    interval: Duration,
    thread: Option<(u32, File)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ran {
    On(usize),
    /// A real-time thread: on its CPU, a worker might never run.
    RealTime,
}

impl Follow {
    pub fn new(pid: u32) -> Self {
        Self { pid, seen: None, next_sample: Instant::now(), interval: SAMPLE_EVERY, thread: None }
    }

    /// A fault of this thread was read. Returns where to serve the userfaultfd.
    pub fn faulted(&mut self, thread: u32, now: Instant) -> Placement {
        if now < self.next_sample {
            return Placement::Stay;
        }
        let (ran, last) = (self.ran(thread), self.seen);
        self.seen = ran;
        let agrees = ran.is_some() && ran == last;
        self.interval = if agrees { (self.interval * 2).min(SAMPLE_RARELY) } else { SAMPLE_EVERY };
        self.next_sample = now + self.interval;
        match ran {
            Some(Ran::On(cpu)) if agrees => Placement::Cpu(cpu),
            Some(Ran::RealTime) => Placement::Roam,
            Some(Ran::On(_)) if last.is_some() => Placement::Any,
            _ => Placement::Stay,
        }
    }

    fn ran(&mut self, thread: u32) -> Option<Ran> {
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

/// The CPU from `processor`, field 39 of a `stat` file, unless `policy`, field 41, is a real-time one. Field 2 may
/// contain anything, up to the last closing parenthesis.
fn processor(stat: &str) -> Option<Ran> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(36);
    let cpu = fields.next()?.parse().ok()?;
    // SCHED_FIFO, SCHED_RR, SCHED_DEADLINE.
    Some(if matches!(fields.nth(1)?, "1" | "2" | "6") { Ran::RealTime } else { Ran::On(cpu) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_testkit::skip;
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    #[test]
    fn the_processor_is_field_39_whatever_the_name_of_the_thread() {
        let fields = |name: &str| {
            let rest: Vec<String> = (4..=52).map(|number| number.to_string()).collect();
            format!("17 ({name}) S {}\n", rest.join(" ")).replace(" 41 ", " 0 ")
        };
        assert_eq!(processor(&fields("kvm 1) S 3")), Some(Ran::On(39)));
        assert_eq!(processor(&fields("fifo").replace(" 40 0 42 ", " 40 1 42 ")), Some(Ran::RealTime));
        assert_eq!(processor("17 (short) S 1 2"), None);
        assert_eq!(processor(""), None);
    }

    #[test]
    fn a_userfaultfd_moves_where_two_samples_agree_or_to_an_idle_worker() {
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
        let (guests, mut follow) = ([pinned(first), pinned(second)], Follow::new(std::process::id()));
        let mut now = Instant::now();
        let mut fault = |guest: usize| {
            now += SAMPLE_RARELY;
            follow.faulted(guests[guest].0, now)
        };
        assert_eq!([fault(1), fault(1)], [Placement::Stay, Placement::Cpu(second)], "two samples agree");
        assert_eq!([fault(0), fault(0)], [Placement::Any, Placement::Cpu(first)], "they do not, then on the other");
        for (_, end, thread) in guests {
            drop(end);
            thread.join().expect("guest");
        }
    }
}
