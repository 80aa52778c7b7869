//! What a new mapping is, by the way it is made: guest RAM, a place for it, or something else.
//!
//! Before: `hooks` sees a call of `mmap`. After: `decide` attaches with what is RAM.
//! Threads: any VMM thread; QEMU makes a reservation and the mapping inside it on one. Units: bytes.
//! Promise: guest RAM is never left out. Under QEMU nothing else is taken for it: QEMU maps RAM at a fixed address in a
//! reservation that it has just made for it, and buffers (of a display, a virtio-gpu, sound, vhost's log) wherever
//! there is room. Of another VMM every large shared mapping counts as RAM.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use ballast_base::{HUGE_SIZE, PAGE_SIZE};

static IS_QEMU: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Address and length of the reservation that this thread made last, if nothing was mapped in it yet.
    static RESERVED: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Note which program this is. Before `main`.
pub fn learn_program() {
    let program = std::env::current_exe().ok();
    let name = program.as_deref().and_then(|path| path.file_name()).unwrap_or_default().to_string_lossy();
    IS_QEMU.store(is_qemu(&name), Ordering::Relaxed);
}

/// `qemu-system-x86_64`, `qemu-kvm`, `.qemu-system-x86_64-wrapped`, ...
fn is_qemu(program: &str) -> bool {
    program.contains("qemu") || program == "kvm"
}

/// Could this mapping be guest RAM, by its length, protection and flags? The file and the place are not looked at.
pub fn looks_like_ram(len: usize, prot: c_int, flags: c_int, fd: c_int) -> bool {
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let kind = flags & libc::MAP_TYPE;
    fd >= 0
        && len >= HUGE_SIZE
        && prot & both == both
        && (kind == libc::MAP_SHARED || kind == libc::MAP_SHARED_VALIDATE)
        && flags & libc::MAP_ANONYMOUS == 0
}

/// Is this a reservation of address space?
pub fn is_reservation(addr: *mut c_void, prot: c_int, flags: c_int, fd: c_int) -> bool {
    addr.is_null()
        && fd == -1
        && prot == libc::PROT_NONE
        && flags & !libc::MAP_NORESERVE == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS
}

/// Is this a reservation of a multiple of 2 MiB plus one guard page: what QEMU makes before it maps RAM into it? The
/// guard page pushes it off the 2 MiB border, and RAM mapped there could never be mapped by huge pages.
pub fn is_ram_reservation(addr: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int) -> bool {
    is_reservation(addr, prot, flags, fd) && len > HUGE_SIZE && len % HUGE_SIZE == PAGE_SIZE
}

/// Note a reservation that this thread has made.
pub fn reserved(addr: *mut c_void, len: usize) {
    RESERVED.set((addr as usize, len));
}

/// Is a mapping that this thread has just made where this VMM maps RAM? Asked of each mapping, because what one at a
/// fixed address fills is no fresh reservation any more.
pub fn is_place_of_ram(addr: *mut c_void, len: usize, flags: c_int) -> bool {
    let fills = flags & libc::MAP_FIXED != 0 && fills(RESERVED.take(), addr as usize, len);
    fills || !IS_QEMU.load(Ordering::Relaxed)
}

/// Does a mapping fill a reservation, which is the larger by an alignment of at most the mapping's length?
fn fills((start, size): (usize, usize), addr: usize, len: usize) -> bool {
    addr >= start && len <= size && addr - start <= size - len && size - len <= len
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn ram_fills_a_reservation_but_for_its_alignment() {
        let reservation = (512 * MIB, 64 * MIB + PAGE_SIZE);
        assert!(fills(reservation, 512 * MIB, 64 * MIB));
        assert!(fills((511 * MIB, 128 * MIB), 512 * MIB, 64 * MIB));
        for (addr, len) in [(512, 8), (511, 64), (513, 64), (512, 65), (900, 64)] {
            assert!(!fills(reservation, addr * MIB, len * MIB), "{len} MiB at {addr} MiB");
        }
        assert!(!fills((0, 0), 512 * MIB, 64 * MIB), "no reservation");
    }

    #[test]
    fn qemu_is_known_by_its_name() {
        for name in ["qemu-system-x86_64", "qemu-kvm", "kvm", ".qemu-system-aarch64-wrapped"] {
            assert!(is_qemu(name), "{name}");
        }
        assert!(!is_qemu("cloud-hypervisor") && !is_qemu("kvmtool") && !is_qemu(""));
    }
}
