//! Clocks of the kernel.
//!
//! Before: code needs a time that other processes share, or the cost of work. After: it has the time, or the CPU time
//! used, which does not include what the CPU ran for others meanwhile.
//! Threads: any; a thread reads its own CPU time, and that of any process. Units: time. Promise: a clock never goes
//! back.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since the host started, without the time it was suspended: the clock that all processes share.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Time since the host started, with the time it was suspended: other hosts' clocks went on then.
pub fn boot_time() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// The value of [`monotonic_ns`] at a moment in the past.
pub fn monotonic_ns_at(moment: Instant) -> u64 {
    monotonic_ns().saturating_sub(moment.elapsed().as_nanos() as u64)
}

/// CPU time that the calling thread has used.
pub fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// CPU time that all threads of a process have used, including ended ones; `None` if there is no such process. It takes
/// no lock of that process. It does not include what a running thread has used since the last tick of its CPU.
pub fn process_time(pid: u32) -> Option<Duration> {
    /// All threads of the process, by the scheduler's clock, as in the kernel's `posix-timers.h`.
    const SCHED: libc::clockid_t = 2;
    let clock = (!pid.cast_signed() << 3) | SCHED;
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, to the variable above.
    let answer = unsafe { libc::clock_gettime(clock, &raw mut now) };
    (answer == 0).then(|| Duration::new(now.tv_sec as u64, now.tv_nsec as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_does_not_run_uses_no_time_and_one_that_is_gone_has_no_clock() {
        let mut other = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
        let stat = format!("/proc/{}/wchan", other.id());
        while !std::fs::read_to_string(&stat).expect("wchan").contains("nanosleep") {
            std::thread::yield_now();
        }
        let time = process_time(other.id()).expect("a process");
        let before = process_time(std::process::id()).expect("this process");
        while process_time(std::process::id()).expect("this process") == before {
            std::hint::spin_loop();
        }
        assert!(time > Duration::ZERO && process_time(other.id()) == Some(time));
        other.kill().expect("end it");
        other.wait().expect("reap it");
        assert_eq!(process_time(other.id()), None);
    }
}
