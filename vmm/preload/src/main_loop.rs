//! QEMU's main loop: its first wait for events shows that the machine is made, and that its guest may run.
//!
//! Before: all RAM is mapped. After: a VM without managed RAM has stopped, or was reported to run unmanaged.
//! Threads: QEMU's main one. Safety: a hook has the contract of the C function of its name.
//! Promise: on any other thread, and once nothing is left to report, a call costs some loads.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use ballast_base::Bytes;
use libc::{nfds_t, pollfd, sigset_t, timespec};

use crate::announce::announce;
use crate::hooks::quietly;
use crate::missed::{PRIVATE, SEEN};
use crate::{decide, mode, next};

static TOLD: AtomicU64 = AtomicU64::new(0);

/// Handles the first wait of QEMU's main thread for events: its guest may run. Under TCG no call starts a vCPU.
fn waits() {
    let may_start = SEEN.load(Ordering::Relaxed) && mode::is_waiting();
    if !may_start && PRIVATE.load(Ordering::Relaxed) == TOLD.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: neither has arguments or effects.
    let is_main = unsafe { libc::gettid() == libc::getpid() };
    if is_main && SEEN.load(Ordering::Relaxed) && mode::is_waiting() {
        quietly((), decide::starting);
    }
    if is_main && PRIVATE.load(Ordering::Relaxed) != TOLD.load(Ordering::Relaxed) {
        quietly((), tell_private);
    }
}

fn tell_private() {
    let Some(client) = decide::client() else { return };
    let len = PRIVATE.load(Ordering::Relaxed);
    TOLD.store(len, Ordering::Relaxed);
    announce(format_args!("{} of private memory are not managed, and may be RAM of the guest", Bytes(len)));
    if let Err(error) = client.set_unmanaged(Bytes(len)) {
        announce(format_args!("the keeper does not hear of it: {error}"));
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    waits();
    // SAFETY: the caller's promise.
    unsafe { next::ppoll(fds, count, timeout, mask) }
}

/// # Safety
/// As the C function, which fails where `count` entries do not fit into `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    size: libc::size_t,
) -> c_int {
    if (size / size_of::<pollfd>()) < count as usize {
        std::process::abort();
    }
    // SAFETY: the caller's promise.
    unsafe { ppoll(fds, count, timeout, mask) }
}
