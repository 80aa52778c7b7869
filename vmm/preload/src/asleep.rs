//! Prevents an endless sleep of a vCPU that is reset while it waits for a far page.
//!
//! KVM lets a kernel thread fault in the page that a vCPU of the guest's kernel touches, and meanwhile puts the vCPU to
//! sleep (an *asynchronous page fault*). At a reset QEMU writes 0 to `MSR_KVM_ASYNC_PF_EN`. KVM then forgets those
//! threads, but not that the vCPU sleeps (Linux 6.12, and others): it stays at its first instruction, where no
//! interrupt wakes it, and no further reset helps. Swap has that effect, too, for a shorter time.
//!
//! Before: `hooks` sees the `ioctl`s of vCPUs. After: that write is made when the vCPU has run up to an exit, so that
//! the page wakes it. Until then it is in firmware, at privilege level 0, where KVM sends it no asynchronous page
//! faults.
//! Threads: a vCPU's own, which makes all of its `ioctl`s.
//! Promise: only the first vCPU's write is delayed. The others wait for INIT, which resets all of a vCPU.

use std::cell::Cell;
use std::ffi::{c_int, c_ulong, c_void};

use crate::decide::{self, KVM_RUN};
use crate::next;

const KVM_GET_SREGS: c_ulong = 0x8138_AE83;
const KVM_SET_MSRS: c_ulong = 0x4008_AE89;
const MSR_KVM_ASYNC_PF_EN: u32 = 0x4B56_4D02;
const ENABLED: u64 = 1;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Msr {
    index: u32,
    reserved: u32,
    data: u64,
}

thread_local! {
    /// The vCPU whose write is delayed.
    static DELAYED: Cell<Option<(c_int, Msr)>> = const { Cell::new(None) };
}

/// Makes this call, if it is a call that matters here (`KVM_RUN`, `KVM_SET_MSRS`).
///
/// # Safety
/// As `ioctl`.
pub unsafe fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> Option<c_int> {
    match request & 0xFFFF_FFFF {
        // SAFETY: the caller's promise.
        KVM_RUN => DELAYED.get().map(|delayed| unsafe { run(fd, request, arg, delayed) }),
        // SAFETY: the caller's promise.
        KVM_SET_MSRS => unsafe { set(fd, request, arg) },
        _ => None,
    }
}

/// # Safety
/// As `ioctl`.
unsafe fn run(fd: c_int, request: c_ulong, arg: *mut c_void, (of, msr): (c_int, Msr)) -> c_int {
    // SAFETY: the caller's promise.
    let answer = unsafe { next::ioctl(fd, request, arg) };
    // A signal ends the call of a vCPU that sleeps; any other exit is caused by its instructions.
    if answer == 0 && fd == of {
        DELAYED.set(None);
        // SAFETY: it is a vCPU, which has just run.
        unsafe { write(fd, &[msr]) };
    }
    answer
}

/// # Safety
/// As `ioctl` for `KVM_SET_MSRS`.
unsafe fn set(fd: c_int, request: c_ulong, arg: *mut c_void) -> Option<c_int> {
    if arg.is_null() || decide::client().is_none() {
        return None;
    }
    // SAFETY: the caller's promise: a count, padding, and as many entries.
    let msrs = unsafe {
        let count = *arg.cast::<u32>();
        std::slice::from_raw_parts(arg.cast::<u8>().add(8).cast::<Msr>(), count as usize)
    };
    let at = msrs.iter().position(|msr| msr.index == MSR_KVM_ASYNC_PF_EN)?;
    // This value replaces a delayed one.
    DELAYED.set(None);
    if msrs[at].data & ENABLED != 0 || !is_first(fd) {
        // SAFETY: the caller's promise.
        return Some(unsafe { next::ioctl(fd, request, arg) });
    }
    DELAYED.set(Some((fd, msrs[at])));
    let others = [&msrs[..at], &msrs[at + 1..]].concat();
    // SAFETY: the caller's promise.
    let answer = if others.is_empty() { 0 } else { unsafe { write(fd, &others) } };
    // The kernel returns the number of MSRs that it has set, from the first on.
    Some(if answer >= at as c_int { answer + 1 } else { answer })
}

/// Writes these MSRs of a vCPU. Returns how many were written, or -1.
///
/// # Safety
/// `fd` is a vCPU.
unsafe fn write(fd: c_int, msrs: &[Msr]) -> c_int {
    let mut list = vec![msrs.len() as u64];
    list.extend(msrs.iter().flat_map(|msr| [u64::from(msr.index) | u64::from(msr.reserved) << 32, msr.data]));
    // SAFETY: the list is a count with its padding, and as many entries of 16 bytes.
    unsafe { next::ioctl(fd, KVM_SET_MSRS, list.as_mut_ptr().cast()) }
}

/// Whether this is the vCPU that runs first after a reset.
fn is_first(fd: c_int) -> bool {
    /// Offset of `apic_base` in `struct kvm_sregs`, in words.
    const APIC_BASE: usize = 34;
    /// The bit of the bootstrap processor (BSP) in `apic_base`.
    const FIRST: u64 = 1 << 8;
    let mut sregs = [0_u64; 39];
    // SAFETY: the kernel writes as many bytes as the request's number says, which is the size of the array.
    let answer = unsafe { next::ioctl(fd, KVM_GET_SREGS, sregs.as_mut_ptr().cast()) };
    answer == 0 && sregs[APIC_BASE] & FIRST != 0
}
