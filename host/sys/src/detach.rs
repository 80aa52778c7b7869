//! Detach: keeps this process running when its terminal or its unit is told to end.
//!
//! Before: the keeper started an engine. After: a hangup, an interrupt from a terminal or a request to end does not end
//! the engine, because guests cannot run without it: it ends by itself, when no VM is left. Threads: call it before
//! there are others. Promise: `SIGKILL` ends it as before.

use std::ffi::CStr;

/// Ignores the signals that ask a process to end, and names the process: a program that was started from a descriptor
/// otherwise has the descriptor's number as its name.
pub fn detach(name: &CStr) {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
        // SAFETY: nothing else of this program handles these signals, and to ignore one runs no code.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    let _ = rustix::thread::set_name(name);
}
