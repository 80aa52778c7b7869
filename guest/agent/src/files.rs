//! The kernel's files, and the signals that end the agent.
//!
//! Promise: an error names its file. Before the agent ends by a signal, it restores the settings that it changed.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

pub use ballast_tier::kernel_files::{read, write};

static ENDS: AtomicBool = AtomicBool::new(false);

pub fn ends() -> bool {
    ENDS.load(Ordering::Acquire)
}

extern "C" fn end(_: libc::c_int) {
    ENDS.store(true, Ordering::Release);
}

/// Makes [`ends`] report SIGTERM and SIGINT from now on. A signal interrupts a waiting system call.
pub fn handle_signals() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: a zeroed sigaction is one without flags and mask; the handler stores a flag, which it may.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = end as *const () as usize;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
    // SAFETY: plain system call; a peer that is gone is an error of the write instead.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// Returns the number after this name, in lines such as `MemFree:  123 kB`.
pub fn number_after(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.split_once(name).map(|(_, rest)| rest))?;
    rest.trim_start_matches([':', ' ', '\t']).split_whitespace().next()?.parse().ok()
}

pub fn last_error<T>(what: &str) -> io::Result<T> {
    let error = io::Error::last_os_error();
    Err(io::Error::new(error.kind(), format!("{what}: {error}")))
}
