//! Programs that start the VMM (`taskset`, `env`, a shell): the library stays with them until the VMM runs.
//!
//! Before: `ballast run` started a program with this library, which need not be the VMM. After: the process that is
//! QEMU, or that attaches, has removed the library from its environment and taken the monitor.
//! Threads: the one before `main`, or the one that attaches; `exec` is checked on any.
//! Promise: the library is not lost on the way without a message, and with `BALLAST_REQUIRE=1` the `exec` that would
//! lose it fails.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use ballast_client::visit;

use crate::announce::announce;
use crate::{guest, mode, shape};

pub const OURS: &str = "libballast_preload.so";
/// The variable with the pid of the program that `ballast run` became.
const STARTED: &str = "BALLAST_STARTED";
/// The value of [`STARTED`] at the start: `env -i` empties this process's environment before it executes a program.
static FIRST_ID: AtomicI32 = AtomicI32::new(0);
static IS_REQUIRED: AtomicBool = AtomicBool::new(false);
const VARIABLE: &str = "LD_PRELOAD=";

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// A list of strings that ends with a null pointer.
pub type Words = *const *const c_char;

/// Called before `main`.
pub fn begin() {
    let first = std::env::var(STARTED).ok().and_then(|id| id.parse().ok());
    FIRST_ID.store(first.unwrap_or(0), Ordering::Relaxed);
    IS_REQUIRED.store(mode::is_required(), Ordering::Relaxed);
}

/// This process is the VMM, but not QEMU: programs that it starts do not load the library, and the monitor is its own.
pub fn arrive() {
    if shape::is_qemu_here() {
        return;
    }
    // SAFETY: `environ` is a valid list, or null; a thread that changes it now breaks the rules of `setenv` itself.
    for entry in unsafe { list(environ) } {
        let Some(value) = entry.to_str().ok().and_then(|text| text.strip_prefix(VARIABLE)) else { continue };
        let (at, value) = (entry.as_ptr() as usize + VARIABLE.len(), value.to_owned());
        for (start, name) in pieces(&value).filter(|(_, name)| is_ours(name)) {
            // The loader skips empty names.
            put(at + start, &vec![b':'; name.len()]);
        }
        if pieces(&value).all(|(_, name)| name.is_empty() || is_ours(name)) {
            put(at, b"\0");
        }
    }
    guest::take_named();
}

/// Writes these bytes at this address, if it is writable. Other threads may read them; no string moves or grows.
fn put(address: usize, bytes: &[u8]) {
    let from = libc::iovec { iov_base: bytes.as_ptr() as *mut c_void, iov_len: bytes.len() };
    let to = libc::iovec { iov_base: address as *mut c_void, iov_len: bytes.len() };
    // SAFETY: the kernel checks both ranges, the second is inside one string of the environment, and no Rust reference
    // to it is alive.
    unsafe { libc::process_vm_writev(libc::getpid(), &raw const from, 1, &raw const to, 1, 0) };
}

/// The names in a value of `LD_PRELOAD`, with the offset of each.
fn pieces(value: &str) -> impl Iterator<Item = (usize, &str)> {
    value.split([':', ' ']).map(|name| (name.as_ptr() as usize - value.as_ptr() as usize, name))
}

pub fn is_ours(name: &str) -> bool {
    name.rsplit('/').next() == Some(OURS)
}

/// The strings of a list.
///
/// # Safety
/// It is null, or valid and ends with a null pointer.
unsafe fn list<'a>(mut words: Words) -> Vec<&'a CStr> {
    let mut found = Vec::new();
    // SAFETY: the caller's promise.
    while let Some(word) = unsafe { words.as_ref() }.filter(|word| !word.is_null()) {
        // SAFETY: as above.
        found.push(unsafe { CStr::from_ptr(*word) });
        // SAFETY: the null pointer was not reached yet.
        words = unsafe { words.add(1) };
    }
    found
}

/// Checks an `exec` of a program on the way to the VMM. `Err` is the errno with which to refuse it.
///
/// # Safety
/// The words are those of `execve`. `variables` is `None` where the program keeps the environment of this one.
pub unsafe fn hands_on(file: *const c_char, words: Words, variables: Option<Words>) -> Result<(), c_int> {
    // SAFETY: it has no arguments and no effects. A child is not the first process.
    let is_first = unsafe { libc::getpid() } == FIRST_ID.load(Ordering::Relaxed);
    // SAFETY: the caller's promise.
    unsafe { keeps_library(file, words, variables, is_first) }
}

/// Like [`hands_on`], for a program that a new child executes.
///
/// # Safety
/// As [`hands_on`].
pub unsafe fn hands_to_child(file: *const c_char, words: Words, variables: Words) -> Result<(), c_int> {
    // SAFETY: the caller's promise.
    unsafe { keeps_library(file, words, Some(variables), false) }
}

/// # Safety
/// As [`hands_on`].
unsafe fn keeps_library(
    file: *const c_char,
    words: Words,
    variables: Option<Words>,
    is_first: bool,
) -> Result<(), c_int> {
    if visit::inside() || !mode::is_waiting() || shape::is_qemu_here() || file.is_null() {
        return Ok(());
    }
    let _quiet = visit::enter();
    // SAFETY: the caller's promise.
    let (file, words) = unsafe { (CStr::from_ptr(file).to_string_lossy(), list(words)) };
    // SAFETY: as above, and `environ` as in `arrive`.
    let variables = unsafe { list(variables.unwrap_or(environ)) };
    let names_vmm =
        shape::is_path_of_qemu(&file) || words.iter().any(|word| shape::names_qemu(&word.to_string_lossy()));
    // A script may start many other programs.
    if !is_first && !names_vmm {
        return Ok(());
    }
    let has_library = |text: &CStr| {
        let text = text.to_string_lossy();
        text.strip_prefix(VARIABLE).is_some_and(|value| pieces(value).any(|(_, name)| is_ours(name)))
    };
    let why = if !variables.into_iter().any(has_library) {
        "without this library in its environment"
    } else if gains_rights(&file) {
        "with the rights of another user, so that the system does not load this library into it"
    } else {
        return Ok(());
    };
    // A shell tries each folder of its search path.
    if file.contains('/') && !std::path::Path::new(&*file).exists() {
        return Ok(());
    }
    let is_required = IS_REQUIRED.load(Ordering::Relaxed);
    let end = if is_required { "refused, as BALLAST_REQUIRE=1 asks" } else { "a VM that it starts runs unmanaged" };
    announce(format_args!("{file} is executed {why}: {end}"));
    if is_required { Err(libc::EPERM) } else { Ok(()) }
}

/// Whether this program is set-user-ID or set-group-ID, for a user who is not root.
fn gains_rights(file: &str) -> bool {
    // SAFETY: it has no arguments and no effects.
    if unsafe { libc::getuid() } == 0 {
        return false;
    }
    let mode =
        |path: std::path::PathBuf| Some(std::fs::metadata(path).ok().filter(|meta| meta.is_file())?.permissions());
    let found = match file.contains('/') {
        true => mode(file.into()),
        false => {
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path).find_map(|folder| mode(folder.join(file)))
        }
    };
    found.is_some_and(|permissions| permissions.mode() & 0o6000 != 0)
}
