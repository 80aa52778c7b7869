//! Mappings of QEMU that may be unmanaged RAM.
//!
//! Before: QEMU mapped, in a place of RAM, something else than a shared memory file, or `decide` could not add RAM.
//! After: `guest` asks QEMU's monitor how much RAM is not managed; without a monitor, `main_loop` reports what may be
//! RAM.
//! Threads: any. Units: bytes.
//! Promise: buffers of displays, and images of an NVDIMM or a virtio-pmem, are not counted.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ballast_client::visit;
use ballast_sys::memfd;

use crate::guest;

pub static SEEN: AtomicBool = AtomicBool::new(false);
/// Bytes of private memory that may be RAM. Used if there is no monitor.
pub static PRIVATE: AtomicU64 = AtomicU64::new(0);
/// Private memory of up to this size may be a display's (qxl has 64 MiB twice), and is not reported.
const DISPLAY: u64 = 64 << 20;

/// QEMU has mapped private memory in a place of RAM: anonymous, or of this file. A file on a disk may be an image.
pub fn mapped_private(fd: c_int, len: u64) {
    let _quiet = visit::enter();
    // SAFETY: QEMU has just mapped it; borrowed for calls that fail if it is not open.
    let is_memory = || memfd::ram_page(unsafe { BorrowedFd::borrow_raw(fd) }).is_ok_and(|page| page.is_some());
    mapped(if fd < 0 || is_memory() { len } else { 0 });
}

/// Notes that QEMU has mapped something else than a shared memory file in a place of RAM, or that RAM could not be
/// added. `len` is 0 if the memory may be an operator's image.
pub fn mapped(len: u64) {
    SEEN.store(true, Ordering::Relaxed);
    if len > DISPLAY && !guest::has_monitor() {
        PRIVATE.fetch_add(len, Ordering::Relaxed);
    }
    guest::changed();
}
