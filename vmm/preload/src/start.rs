//! Work before `main`: removes the library from `LD_PRELOAD` in QEMU, and keeps it out of forked children.
//!
//! Promise: no program that QEMU executes loads this library, nor a program that another VMM executes after it has
//! attached (`through`); a child forked after attaching is left alone. A child forked *before* RAM exists
//! (`-daemonize`) is the VMM, and attaches.

use std::ffi::{CStr, CString};

use crate::{agent, decide, guest, shape, through};

#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    let _ = std::panic::catch_unwind(|| {
        shape::learn_program();
        through::begin();
        if shape::is_qemu_here() {
            leave_preload();
            take_gifts();
        }
        crate::next::find_executing();
        // SAFETY: the handler is a plain function that stores to an atomic, which is allowed in a forked child.
        unsafe { libc::pthread_atfork(None, None, Some(decide::in_child)) };
    });
}

/// Removes this library (known by its file name) from `LD_PRELOAD`; other entries stay.
fn leave_preload() {
    const VARIABLE: &CStr = c"LD_PRELOAD";
    // SAFETY: constructors run on the only thread there is, so the environment does not change during these calls;
    // `getenv` returns NULL or a NUL-terminated string.
    unsafe {
        let value = libc::getenv(VARIABLE.as_ptr());
        if value.is_null() {
            return;
        }
        let value = CStr::from_ptr(value).to_string_lossy().into_owned();
        let others = without(&value);
        match CString::new(others) {
            Ok(others) if !others.is_empty() => libc::setenv(VARIABLE.as_ptr(), others.as_ptr(), 1),
            _ => libc::unsetenv(VARIABLE.as_ptr()),
        };
    }
}

/// Takes the descriptors that `ballast run` gave QEMU, and removes their variables from the environment, because the
/// numbers mean nothing to programs that QEMU starts.
fn take_gifts() {
    guest::take_named();
    agent::take_named();
    for variable in [guest::VARIABLE, agent::VARIABLE] {
        // SAFETY: constructors run on the only thread there is, so no other thread reads the environment.
        unsafe { std::env::remove_var(variable) };
    }
}

/// The entries of an `LD_PRELOAD` list (separated by colons or blanks) that are not this library.
fn without(list: &str) -> String {
    let keep = |entry: &&str| !entry.is_empty() && !through::is_ours(entry);
    list.split([':', ' ']).filter(keep).collect::<Vec<_>>().join(":")
}
