//! The kernel's side of userfaultfd: the structs and numbers of `include/uapi/linux/userfaultfd.h`.
//!
//! Before: nothing; no system call is made here. After: `Uffd` passes these to `ioctl` and reads messages of this
//! shape.
//! Promise: each request number encodes the size of the struct it is called with, and equals the header's. Both are
//! checked when this is compiled.

/// Version of the interface, and the letter of its requests.
pub(super) const UFFD_API: u64 = 0xAA;

#[repr(C)]
pub(super) struct ApiArg {
    pub api: u64,
    pub features: u64,
    pub ioctls: u64,
}

#[repr(C)]
pub(super) struct RangeArg {
    pub start: u64,
    pub len: u64,
}

#[repr(C)]
pub(super) struct RegisterArg {
    pub range: RangeArg,
    pub mode: u64,
    pub ioctls: u64,
}

#[repr(C)]
pub(super) struct CopyArg {
    pub dst: u64,
    pub src: u64,
    pub len: u64,
    pub mode: u64,
    pub copied: i64,
}

/// `UFFDIO_ZEROPAGE`, `UFFDIO_CONTINUE` and `UFFDIO_POISON` share this shape.
#[repr(C)]
pub(super) struct FillArg {
    pub range: RangeArg,
    pub mode: u64,
    pub done: i64,
}

/// `struct uffd_msg`: 32 bytes, packed by hand so that no field is misaligned.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawMessage {
    pub event: u8,
    pub reserved1: u8,
    pub reserved2: u16,
    pub reserved3: u32,
    pub flags: u64,
    pub address: u64,
    pub thread: u32,
    pub padding: u32,
}

const fn request(direction: u64, number: u64, size: usize) -> u64 {
    (direction << 30) | ((size as u64) << 16) | (UFFD_API << 8) | number
}
const READ: u64 = 2;
const READ_WRITE: u64 = 3;

pub(super) const UFFDIO_REGISTER: u64 = request(READ_WRITE, 0x00, size_of::<RegisterArg>());
pub(super) const UFFDIO_UNREGISTER: u64 = request(READ, 0x01, size_of::<RangeArg>());
pub(super) const UFFDIO_WAKE: u64 = request(READ, 0x02, size_of::<RangeArg>());
pub(super) const UFFDIO_COPY: u64 = request(READ_WRITE, 0x03, size_of::<CopyArg>());
pub(super) const UFFDIO_ZEROPAGE: u64 = request(READ_WRITE, 0x04, size_of::<FillArg>());
pub(super) const UFFDIO_CONTINUE: u64 = request(READ_WRITE, 0x07, size_of::<FillArg>());
pub(super) const UFFDIO_POISON: u64 = request(READ_WRITE, 0x08, size_of::<FillArg>());
pub(super) const UFFDIO_API: u64 = request(READ_WRITE, 0x3F, size_of::<ApiArg>());

// The numbers of include/uapi/linux/userfaultfd.h, compared with those that the formula above gives for our structs.
const _: () = assert!(UFFDIO_REGISTER == 0xC020_AA00 && UFFDIO_UNREGISTER == 0x8010_AA01);
const _: () = assert!(UFFDIO_WAKE == 0x8010_AA02 && UFFDIO_COPY == 0xC028_AA03);
const _: () = assert!(UFFDIO_ZEROPAGE == 0xC020_AA04 && UFFDIO_CONTINUE == 0xC020_AA07);
const _: () = assert!(UFFDIO_POISON == 0xC020_AA08 && UFFDIO_API == 0xC018_AA3F);
const _: () = assert!(size_of::<RawMessage>() == 32);

pub(super) const REGISTER_MODE_MISSING: u64 = 1 << 0;
pub(super) const REGISTER_MODE_MINOR: u64 = 1 << 2;
pub(super) const EVENT_PAGEFAULT: u8 = 0x12;
pub(super) const PAGEFAULT_FLAG_MINOR: u64 = 1 << 2;
