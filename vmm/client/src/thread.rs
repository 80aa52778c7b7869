//! A thread in the VMM's process that does not disturb the VMM.
//!
//! Before: the client or the preload library must wait for something. After: it waits on its own thread.
//! Threads: the new one; hooks ignore its calls.
//! Promise: it takes no signal meant for the VMM's threads.

use crate::visit;

/// Starts a thread that runs `body`.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets live across the calls; `sigfillset` fills the first and `pthread_sigmask` the second.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    // A new thread inherits the mask.
    let body = move || {
        visit::enter_permanently();
        body();
    };
    let started = std::thread::Builder::new().name(name.into()).stack_size(256 * 1024).spawn(body);
    // SAFETY: `before` was filled by the successful call above (SIG_SETMASK with valid sets cannot fail).
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    started.map(drop)
}
