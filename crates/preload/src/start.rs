//! Work before `main`: takes the library out of `LD_PRELOAD`, and keeps it out of forked children.
//!
//! Promise: a program that the VMM executes never loads this library; a child forked after attaching is left alone. A
//! child forked *before* RAM exists (`-daemonize`) is the VMM, and attaches.

use std::ffi::{CStr, CString};

use crate::{agent, decide, guest, shape};

#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    let _ = std::panic::catch_unwind(|| {
        leave_preload();
        take_out(guest::VARIABLE, guest::take);
        take_out(agent::VARIABLE, agent::take);
        shape::learn_program();
        crate::next::find_executing();
        // SAFETY: the handler is a plain function that stores to an atomic, which is allowed in a forked child.
        unsafe { libc::pthread_atfork(None, None, Some(decide::in_child)) };
    });
}

/// Take this library (known by its file name) out of `LD_PRELOAD`; other entries stay.
fn leave_preload() {
    const OURS: &str = "libballast_preload.so";
    const VARIABLE: &CStr = c"LD_PRELOAD";
    // SAFETY: constructors run on the only thread there is, so the environment does not change during these calls;
    // `getenv` returns NULL or a NUL-terminated string.
    unsafe {
        let value = libc::getenv(VARIABLE.as_ptr());
        if value.is_null() {
            return;
        }
        let value = CStr::from_ptr(value).to_string_lossy().into_owned();
        let others = without(&value, OURS);
        match CString::new(others) {
            Ok(others) if !others.is_empty() => libc::setenv(VARIABLE.as_ptr(), others.as_ptr(), 1),
            _ => libc::unsetenv(VARIABLE.as_ptr()),
        };
    }
}

/// Take what `ballast run` passes in this variable, and the variable out of the environment: descriptors of this
/// process mean nothing to programs that it starts.
fn take_out(variable: &str, take: fn(&str)) {
    let Ok(value) = std::env::var(variable) else { return };
    take(&value);
    // SAFETY: constructors run on the only thread there is, so no other thread reads the environment meanwhile.
    unsafe { std::env::remove_var(variable) };
}

/// The entries of an `LD_PRELOAD` list (separated by colons or blanks) whose file name is not `ours`.
fn without(list: &str, ours: &str) -> String {
    let keep = |entry: &&str| !entry.is_empty() && entry.rsplit('/').next() != Some(ours);
    list.split([':', ' ']).filter(keep).collect::<Vec<_>>().join(":")
}
