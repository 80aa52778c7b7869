//! RAM that is not managed: what QEMU maps that may be some.
//!
//! Before: `hooks` saw QEMU map, in a place of RAM, what is no shared memory file, or `decide` could not add RAM.
//! After: `guest` asks QEMU's monitor how much RAM is not managed; without a monitor, `main_loop` reports what may be
//! some.
//! Threads: any. Units: bytes. Promise: buffers of displays and images of an NVDIMM or a virtio-pmem are not counted.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ballast_client::visit;
use ballast_sys::memfd;

use crate::guest;

/// QEMU has mapped what may be RAM that is not managed.
pub static SEEN: AtomicBool = AtomicBool::new(false);
/// Bytes of private memory that may be RAM, if there is no monitor to ask.
pub static PRIVATE: AtomicU64 = AtomicU64::new(0);
/// Private memory of up to this size may be a display's: qxl has 64 MiB twice. It is not reported.
const DISPLAY: u64 = 64 << 20;

/// QEMU has mapped, in a place of RAM, private memory: anonymous, or of this file. A file of a disk may be an image.
pub fn mapped_private(fd: c_int, len: u64) {
    let _quiet = visit::enter();
    // SAFETY: QEMU has just mapped it; borrowed for calls that fail if it is not open.
    let is_memory = || memfd::ram_page(unsafe { BorrowedFd::borrow_raw(fd) }).is_ok_and(|page| page.is_some());
    mapped(if fd < 0 || is_memory() { len } else { 0 });
}

/// QEMU has mapped, in a place of RAM, what is no shared memory file; or RAM could not be added. `len` is 0 where this
/// may be an image of the operator's.
pub fn mapped(len: u64) {
    SEEN.store(true, Ordering::Relaxed);
    if len > DISPLAY && !guest::has_monitor() {
        PRIVATE.fetch_add(len, Ordering::Relaxed);
    }
    guest::changed();
}
