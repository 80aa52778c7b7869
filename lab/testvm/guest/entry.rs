//! The program that a KVM vCPU runs: the workload of `src/guest.rs`, with a port write for each event.
//!
//! Before: `src/kvm.rs` starts a vCPU at `_start`, in user mode, with the job's address in `rdi` and a stack.
//! After: every event leaves as an `out` to `guest::PORT`, which is a KVM exit.
//! Promise: it needs no kernel, library or interrupt. It touches only its job, its tables and guest RAM.
#![no_std]
#![no_main]

#[path = "../src/guest.rs"]
#[allow(dead_code)]
mod guest;

struct IoPort;

impl guest::Port for IoPort {
    #[inline]
    fn tell(&self, event: u32) -> bool {
        // SAFETY: user mode may use this port; `out` leaves the guest and comes back with all registers unchanged.
        unsafe {
            core::arch::asm!("out dx, eax", in("dx") guest::PORT, in("eax") event, options(nostack, preserves_flags));
        }
        true
    }
}

/// # Safety
/// `job` is a job whose addresses are mapped in this guest.
#[unsafe(no_mangle)]
#[unsafe(link_section = ".text._start")]
pub unsafe extern "C" fn _start(job: *const guest::Job) -> ! {
    use guest::Port;
    // SAFETY: the caller promises what `run` requires.
    unsafe { guest::run(&*job, &IoPort) };
    loop {
        IoPort.tell(guest::EVENT_DONE);
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    use guest::Port;
    loop {
        IoPort.tell(guest::EVENT_PANIC);
    }
}
