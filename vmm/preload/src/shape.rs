//! Classifies a new mapping by the way it is made: guest RAM, a place for it, or something else.
//!
//! Before: `hooks` sees a call of `mmap`. After: `decide` attaches with RAM.
//! Threads: any VMM thread; QEMU makes a reservation and the mapping inside it on one thread. Units: bytes.
//! Promise: guest RAM is never left out. Under QEMU nothing else is taken for it: QEMU maps RAM at a fixed address in a
//! reservation that it has just made for it, and buffers (of a display, a virtio-gpu, sound, vhost's log) at any
//! address. For another VMM, each large shared mapping counts as RAM.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use ballast_base::{HUGE_SIZE, PAGE_SIZE};

static IS_QEMU: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Address and length of this thread's last reservation, if nothing was mapped in it yet.
    static RESERVED: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Notes which program this is. Called before `main`.
pub fn learn_program() {
    let program = std::env::current_exe().ok();
    let name = program.as_deref().and_then(|path| path.file_name()).unwrap_or_default().to_string_lossy();
    IS_QEMU.store(is_qemu(&name), Ordering::Relaxed);
}

/// If an `ioctl` takes a long-term reference to guest memory: the reason, and whether the memory must be restored
/// first, because the kernel reads the pages from the file, past our userfaultfd.
pub fn ioctl_holds_ram(request: libc::c_ulong) -> Option<(&'static str, bool)> {
    // Numbers from linux/vfio.h, linux/iommufd.h, linux/vhost.h, linux/kvm.h and linux/udmabuf.h.
    const VFIO_IOMMU_MAP_DMA: libc::c_ulong = 0x3B71;
    const IOMMU_IOAS_MAP: libc::c_ulong = 0x3B85;
    const IOMMU_IOAS_MAP_FILE: libc::c_ulong = 0x3B8F;
    const VHOST_VDPA_GET_DEVICE_ID: libc::c_ulong = 0x8004_AF70;
    const KVM_MEMORY_ENCRYPT_REG_REGION: libc::c_ulong = 0x8010_AEBB;
    const UDMABUF_CREATE: libc::c_ulong = 0x4018_7542;
    const UDMABUF_CREATE_LIST: libc::c_ulong = 0x4008_7543;
    // Some callers sign-extend the request; its meaning is in the low 32 bits.
    match request & 0xFFFF_FFFF {
        VFIO_IOMMU_MAP_DMA | IOMMU_IOAS_MAP => Some(("a VFIO device holds its memory for DMA", false)),
        IOMMU_IOAS_MAP_FILE => Some(("a VFIO device holds its memory for DMA", true)),
        VHOST_VDPA_GET_DEVICE_ID => Some(("a vDPA device holds its memory for DMA", false)),
        KVM_MEMORY_ENCRYPT_REG_REGION => Some(("its memory is encrypted for the guest (SEV)", false)),
        UDMABUF_CREATE | UDMABUF_CREATE_LIST => Some(("its memory is exported as a DMA buffer (udmabuf)", true)),
        _ => None,
    }
}

pub fn is_qemu_here() -> bool {
    IS_QEMU.load(Ordering::Relaxed)
}

/// Whether this word of a command line is QEMU's path or name.
pub fn names_qemu(word: &str) -> bool {
    let name = word.rsplit('/').next().unwrap_or_default();
    (name.starts_with("qemu-system-") || name == "qemu-kvm") && !word.contains(char::is_whitespace)
}

/// Whether this path or name, about to be executed, is QEMU's. The first word of its command line may be anything.
pub fn is_path_of_qemu(file: &str) -> bool {
    names_qemu(file) || file.rsplit('/').next() == Some("kvm")
}

/// Whether this is a name of QEMU, such as `qemu-system-x86_64`, `qemu-kvm` or `.qemu-system-x86_64-wrapped`.
fn is_qemu(program: &str) -> bool {
    program.contains("qemu") || program == "kvm"
}

/// Whether this mapping could be guest RAM, by its length, protection and flags, whatever its file and place.
pub fn looks_like_ram(len: usize, prot: c_int, flags: c_int, fd: c_int) -> bool {
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let kind = flags & libc::MAP_TYPE;
    fd >= 0
        && len >= HUGE_SIZE
        && prot & both == both
        && (kind == libc::MAP_SHARED || kind == libc::MAP_SHARED_VALIDATE)
        && flags & libc::MAP_ANONYMOUS == 0
}

pub fn is_reservation(addr: *mut c_void, prot: c_int, flags: c_int, fd: c_int) -> bool {
    addr.is_null()
        && fd == -1
        && prot == libc::PROT_NONE
        && flags & !libc::MAP_NORESERVE == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS
}

/// Whether this is a reservation of a multiple of 2 MiB plus one guard page, as QEMU makes before it maps RAM into it.
/// The guard page breaks the alignment to 2 MiB, so that RAM mapped there could never have huge pages.
pub fn is_ram_reservation(addr: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int) -> bool {
    is_reservation(addr, prot, flags, fd) && len > HUGE_SIZE && len % HUGE_SIZE == PAGE_SIZE
}

pub fn reserved(addr: *mut c_void, len: usize) {
    RESERVED.set((addr as usize, len));
}

/// Whether this thread's last mapping is where this VMM maps RAM. It must be called for each mapping, because a
/// reservation that a fixed mapping fills is no longer fresh.
pub fn is_place_of_ram(addr: *mut c_void, len: usize, flags: c_int) -> bool {
    let fills = flags & libc::MAP_FIXED != 0 && fills(RESERVED.take(), addr as usize, len);
    fills || !IS_QEMU.load(Ordering::Relaxed)
}

/// Whether a mapping of QEMU in a place of RAM could be RAM that cannot be managed. A small one is a table or a ROM.
pub fn may_be_missed(len: usize, prot: c_int) -> bool {
    is_qemu_here() && len >= HUGE_SIZE && prot & libc::PROT_WRITE != 0
}

/// Whether a mapping fills a reservation, which is larger by an alignment of at most the mapping's length.
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
    fn qemu_is_recognised_by_its_name() {
        for name in ["qemu-system-x86_64", "qemu-kvm", "kvm", ".qemu-system-aarch64-wrapped"] {
            assert!(is_qemu(name), "{name}");
        }
        assert!(
            names_qemu("/usr/bin/qemu-system-x86_64") && !names_qemu("qemu-system-x86_64 -m 1G") && !names_qemu("kvm")
        );
        assert!(is_path_of_qemu("/usr/bin/kvm") && !is_path_of_qemu("/usr/bin/qemu-img"));
        assert!(!is_qemu("cloud-hypervisor") && !is_qemu("kvmtool") && !is_qemu(""));
    }
}
