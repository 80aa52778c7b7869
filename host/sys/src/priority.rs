//! Priority: which of our threads run before guests.
//!
//! Before: a guest's thread, or an operator, waits for the work of a thread. After: the scheduler gives this thread a
//! CPU before threads that compute. Threads: a call is about the calling thread. Units: nice values.
//! Promise: a call is a request only: without `CAP_SYS_NICE` a thread is scheduled like others. A thread or program
//! that it starts begins at nice 0.

use rustix::process::{getpriority_process, setpriority_process};

/// Nice value of a thread that a guest's thread waits for and that runs for microseconds. -20 would be too much: the
/// kernel distributes threads over CPUs by weight, counts a worker that runs a tenth of the time at -20 as nine guests,
/// and leaves its CPU to it and one of them. At -8 it counts as half a guest.
const BEFORE_GUESTS: i32 = -8;

/// From now on the calling thread runs before guests.
pub fn run_first() {
    let policy = libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK;
    // SAFETY: it reads the parameters for the length of the call; 0 is the calling thread, and SCHED_OTHER has the one
    // static priority 0, so only the nice value of what it starts changes.
    unsafe { libc::sched_setscheduler(0, policy, &libc::sched_param { sched_priority: 0 }) };
    // For this thread alone, as on Linux.
    let _ = setpriority_process(None, BEFORE_GUESTS);
}

/// Calls [`run_first`] if `first` is true.
pub fn run_first_if(first: bool) {
    if first {
        run_first();
    }
}

/// Does the calling thread run before guests?
pub fn runs_first() -> bool {
    getpriority_process(None).is_ok_and(|nice| nice < 0)
}

/// From now on the calling thread runs beside guests again.
pub fn run_beside() {
    let _ = setpriority_process(None, 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_testkit::skip;

    #[test]
    fn a_thread_that_runs_first_starts_threads_and_programs_that_do_not() {
        let body = || {
            run_first();
            if getpriority_process(None).expect("nice") != BEFORE_GUESTS {
                return skip("root", "no right to a negative nice value");
            }
            let thread = std::thread::spawn(|| getpriority_process(None).expect("nice"));
            assert_eq!(thread.join().expect("joined"), 0);
            let program = std::process::Command::new("nice").output().expect("nice");
            assert_eq!(String::from_utf8_lossy(&program.stdout).trim(), "0");
            run_beside();
            assert_eq!(getpriority_process(None), Ok(0));
        };
        std::thread::spawn(body).join().expect("joined");
    }
}
