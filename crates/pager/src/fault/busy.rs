//! Busy: whether the CPUs have other work, for a worker that could poll for its own.
//!
//! Before: a worker has slept and runs again. After: it knows whether other threads want its CPU.
//! Threads: each worker has its own. Units: nanoseconds, as the kernel counts them.
//! Promise: a hint and nothing more. A kernel that does not count (no `CONFIG_SCHED_INFO`) counts as idle.
//!
//! On idle CPUs a worker that polls costs no one else time, and spares others the wake-up, which is slow where CPUs
//! sleep deeply. On busy ones each poll takes a CPU from a guest, and waking is cheap.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The CPUs are busy if the thread waits longer than this for one, on average. Measured: 8 us in the median beside one
/// guest on two CPUs, 155 us beside eight.
const WAITS_NS: u64 = 50_000;
/// Visits between two readings of the file, each of which costs some 2 us.
const READ_EVERY: u32 = 64;

thread_local! {
    static OF_THIS_THREAD: RefCell<Busy> = RefCell::new(Busy::of_this_thread());
}

/// See [`Busy::ran`], of the calling thread.
pub fn ran() -> bool {
    OF_THIS_THREAD.with_borrow_mut(Busy::ran)
}

/// Tells whether the CPUs are busy, for one thread.
#[derive(Debug)]
pub struct Busy {
    schedstat: Option<File>,
    /// Time it had waited for CPUs, and how often it had run, at the last reading.
    waited_ns: u64,
    runs: u64,
    until_read: u32,
    busy: bool,
}

impl Busy {
    /// For the calling thread.
    pub fn of_this_thread() -> Self {
        let schedstat = File::open("/proc/thread-self/schedstat").ok();
        Self { schedstat, waited_ns: 0, runs: 0, until_read: READ_EVERY, busy: false }
    }

    /// The thread has slept and runs again. Returns whether other threads want its CPU.
    pub fn ran(&mut self) -> bool {
        self.until_read = self.until_read.saturating_sub(1);
        if self.until_read == 0 {
            self.until_read = READ_EVERY;
            let mut text = [0; 64];
            let read = self.schedstat.as_ref().and_then(|file| file.read_at(&mut text, 0).ok());
            if let Some((waited_ns, runs)) = read.and_then(|len| counted(std::str::from_utf8(&text[..len]).ok()?)) {
                self.judge(waited_ns, runs);
            }
        }
        self.busy
    }

    fn judge(&mut self, waited_ns: u64, runs: u64) {
        let waits = waited_ns.saturating_sub(self.waited_ns).checked_div(runs.saturating_sub(self.runs));
        (self.waited_ns, self.runs) = (waited_ns, runs);
        if let Some(waits) = waits {
            self.busy = waits > WAITS_NS;
        }
    }
}

/// Reads a `schedstat` file (time on a CPU, *time waiting for one*, *how often it ran*). Returns the last two.
fn counted(schedstat: &str) -> Option<(u64, u64)> {
    let mut fields = schedstat.split_ascii_whitespace().skip(1).map(|field| field.parse().ok());
    Some((fields.next()??, fields.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_needs::skip;

    #[test]
    fn what_it_waited_each_time_it_ran_tells_since_the_last_reading() {
        let mut busy = Busy { schedstat: None, ..Busy::of_this_thread() };
        assert!((0..1000).all(|_| !busy.ran()), "a kernel that does not count");
        busy.judge(500 * 1000, 1000);
        assert!(!busy.busy, "half a microsecond each time");
        busy.judge(500 * 1000 + 10 * 100_000, 1010);
        assert!(busy.busy, "a tenth of a millisecond, the last ten times");
        busy.judge(500 * 1000 + 10 * 100_000, 1010);
        assert!(busy.busy, "it did not run since");
        busy.judge(500 * 1000 + 10 * 100_000, 1100);
        assert!(!busy.busy);
    }

    #[test]
    fn the_kernel_counts_how_often_a_thread_waited_and_ran() {
        assert_eq!(counted("123 456 7\n"), Some((456, 7)));
        assert_eq!(counted("123 456"), None);
        assert_eq!(counted("0 -1 7"), None);
        let mut busy = Busy::of_this_thread();
        if busy.schedstat.is_none() {
            return skip("native", "/proc/thread-self/schedstat");
        }
        (0..READ_EVERY).for_each(|_| {
            busy.ran();
        });
        assert!(busy.runs > 0, "{busy:?}");
    }
}
