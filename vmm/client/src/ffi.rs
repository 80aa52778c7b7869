//! The C interface of the client; `include/ballast.h` declares it in C.
//!
//! Before: a VMM in C calls. After: [`Client`] does the work.
//! Threads: any VMM thread. Units: bytes; addresses of this process.
//! Promise: no panic crosses into C; each failure is a negative errno (or NULL) and a text from `ballast_last_error`.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use ballast_base::extent::MAX_EXTENTS;
use ballast_base::guest::{GuestRange, MAX_GUEST_RANGES};

use crate::{AttachError, Builder, Bytes, Client, DiscardError, Hva, Ram, RamExtent, RequestError, chain};

/// `struct ballast_config`. May grow: `size` states the caller's version, and another version is refused.
#[repr(C)]
#[derive(Debug)]
pub struct BallastConfig {
    /// `sizeof(struct ballast_config)`.
    pub size: usize,
    /// VM name, or NULL.
    pub name: *const c_char,
    /// Socket of the keeper, or NULL.
    pub socket: *const c_char,
    /// DRAM limit in bytes; 0 is none.
    pub limit: u64,
    /// Reason why the VM must never be reclaimed, or NULL.
    pub pinned: *const c_char,
    /// A value other than 0 promises that nothing writes to guest RAM past the page table (O_DIRECT, vhost, reads from
    /// FUSE past the page cache) before `ballast_may_pin`.
    pub never_pins: c_int,
}

/// `struct ballast_region`.
#[repr(C)]
#[derive(Debug)]
pub struct BallastRegion {
    /// Its address.
    pub address: *mut c_void,
    /// Bytes.
    pub length: u64,
    /// Its file; duplicated, so the caller may close its own.
    pub fd: c_int,
    /// Offset of the mapping in the file.
    pub file_offset: u64,
}

/// `struct ballast_extent`.
#[repr(C)]
#[derive(Debug)]
pub struct BallastExtent {
    /// The file; duplicated, so the caller may close its own.
    pub fd: c_int,
    /// Offset of the piece in the file.
    pub file_offset: u64,
    /// Bytes.
    pub length: u64,
}

/// `BALLAST_UNKNOWN`.
pub const UNKNOWN: u64 = u64::MAX;

/// `struct ballast_ram`. May grow: `size` states the caller's version, and another version is refused.
#[repr(C)]
#[derive(Debug)]
pub struct BallastRam {
    /// `sizeof(struct ballast_ram)`.
    pub size: usize,
    /// Its address.
    pub address: *mut c_void,
    /// The extents mapped there, one after the other.
    pub extents: *const BallastExtent,
    /// Their number.
    pub extent_count: usize,
    /// The guest-physical address of the first byte, or [`UNKNOWN`].
    pub guest_address: u64,
}

/// `struct ballast_guest_range`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BallastGuestRange {
    /// Offset of the range in the region.
    pub offset: u64,
    /// Its guest-physical address.
    pub guest_address: u64,
    /// Bytes.
    pub length: u64,
}

/// `struct ballast_range`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BallastRange {
    /// First byte.
    pub address: *mut c_void,
    /// Bytes.
    pub length: u64,
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::new(CString::default());
}

struct Failure(c_int, String);

impl From<AttachError> for Failure {
    fn from(error: AttachError) -> Self {
        let errno = match &error {
            AttachError::Config(_) => libc::EINVAL,
            AttachError::Features(_) => libc::EOPNOTSUPP,
            AttachError::Refused(_) => libc::ECONNREFUSED,
            AttachError::Later(_) => libc::EAGAIN,
            AttachError::NoAnswer(_) => libc::ETIMEDOUT,
            AttachError::Protocol(_) => libc::EPROTO,
            AttachError::Userfault(source)
            | AttachError::Connect { source, .. }
            | AttachError::System { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        };
        Self(errno, chain(&error))
    }
}

impl From<RequestError> for Failure {
    fn from(error: RequestError) -> Self {
        let errno = match error {
            RequestError::Invalid(_) => libc::EINVAL,
            RequestError::Refused(_) => libc::ECONNREFUSED,
            RequestError::Later(_) => libc::EAGAIN,
            RequestError::NoAnswer => libc::ETIMEDOUT,
        };
        Self(errno, error.to_string())
    }
}

impl From<DiscardError> for Failure {
    fn from(error: DiscardError) -> Self {
        let errno = match error {
            DiscardError::Invalid(_) => libc::EINVAL,
            DiscardError::NoAnswer(_) => libc::EAGAIN,
            DiscardError::Failed(_) => libc::EIO,
        };
        Self(errno, error.to_string())
    }
}

fn invalid(text: &str) -> Failure {
    Failure(libc::EINVAL, text.to_owned())
}

/// Runs `body`; keeps the text of its failure, or of a panic, for `ballast_last_error`.
fn guarded<T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, c_int> {
    let result = catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|_| Err(Failure(libc::EFAULT, "a bug in the Ballast client".into())));
    result.map_err(|Failure(errno, text)| {
        let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
        LAST_ERROR.with(|last| *last.borrow_mut() = text);
        errno
    })
}

fn status(body: impl FnOnce() -> Result<(), Failure>) -> c_int {
    guarded(body).map_or_else(|errno| -errno, |()| 0)
}

/// # Safety
/// `text` is NULL or a NUL-terminated string that lives during the call.
unsafe fn text(text: *const c_char) -> Result<Option<String>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not null; the rest is the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(|text| Some(text.to_owned())).map_err(|_| invalid("a text is not UTF-8"))
}

fn region(region: &BallastRegion) -> Result<(OwnedFd, Hva, Bytes, Bytes), Failure> {
    if region.fd < 0 {
        return Err(invalid("a region's fd is negative"));
    }
    // SAFETY: only borrowed for the duplication, which returns EBADF if it is not open.
    let fd = unsafe { BorrowedFd::borrow_raw(region.fd) }
        .try_clone_to_owned()
        .map_err(|error| Failure(error.raw_os_error().unwrap_or(libc::EBADF), format!("a region's fd: {error}")))?;
    Ok((fd, Hva(region.address as u64), Bytes(region.length), Bytes(region.file_offset)))
}

/// # Safety
/// `ram.extents` points to `ram.extent_count` extents.
unsafe fn ram(ram: &BallastRam) -> Result<Ram, Failure> {
    if ram.size != size_of::<BallastRam>() {
        return Err(invalid("ram.size is not the size of struct ballast_ram of this version"));
    }
    if ram.extents.is_null() || ram.extent_count == 0 || ram.extent_count > MAX_EXTENTS {
        return Err(invalid("RAM needs some extents, at most 1024"));
    }
    let mut extents = Vec::with_capacity(ram.extent_count);
    // SAFETY: not null, and `extent_count` are there, by the caller's promise.
    for extent in unsafe { std::slice::from_raw_parts(ram.extents, ram.extent_count) } {
        let one = BallastRegion {
            address: ram.address,
            length: extent.length,
            fd: extent.fd,
            file_offset: extent.file_offset,
        };
        let (fd, _, len, offset) = region(&one)?;
        extents.push(RamExtent { fd, offset, len });
    }
    let guest_address = Some(ram.guest_address).filter(|address| *address != UNKNOWN);
    Ok(Ram { hva: Hva(ram.address as u64), extents, guest_address })
}

/// # Safety
/// `client` is NULL or came from [`ballast_attach`]; handles are never freed.
unsafe fn borrow<'a>(client: *const Client) -> Result<&'a Client, Failure> {
    // SAFETY: the caller's promise.
    unsafe { client.as_ref() }.ok_or_else(|| invalid("the client is NULL"))
}

/// Attaches this process with `count` regions. NULL on failure. The handle lives until the process ends.
///
/// # Safety
/// `config` is NULL or points to a config whose `size` is right and whose texts are NUL-terminated; `regions` points to
/// `count` regions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ballast_attach(
    config: *const BallastConfig,
    regions: *const BallastRegion,
    count: usize,
) -> *const Client {
    let attach = || -> Result<*const Client, Failure> {
        if regions.is_null() || count == 0 {
            return Err(invalid("no RAM region was given"));
        }
        // SAFETY: the caller's promise.
        let mut builder = unsafe { configured(config)? };
        // SAFETY: not null, and `count` regions are there, by the caller's promise.
        for given in unsafe { std::slice::from_raw_parts(regions, count) } {
            let (fd, hva, len, offset) = region(given)?;
            builder = builder.region(fd, hva, len, offset);
        }
        Ok(Box::into_raw(Box::new(builder.attach()?)))
    };
    guarded(attach).unwrap_or(std::ptr::null())
}

/// Attaches with RAM in several extents, or with known guest-physical addresses. NULL on failure.
///
/// # Safety
/// As for [`ballast_attach`]; `rams` points to `count` pieces of RAM of the size in the first one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ballast_attach_ram(
    config: *const BallastConfig,
    rams: *const BallastRam,
    count: usize,
) -> *const Client {
    let attach = || -> Result<*const Client, Failure> {
        if rams.is_null() || count == 0 {
            return Err(invalid("no RAM was given"));
        }
        // SAFETY: the caller's promise.
        let mut builder = unsafe { configured(config)? };
        for at in 0..count {
            // SAFETY: not null, and `count` are there, by the caller's promise. One of another size is refused before
            // the next is read.
            builder = builder.ram(unsafe { ram(&*rams.add(at))? });
        }
        Ok(Box::into_raw(Box::new(builder.attach()?)))
    };
    guarded(attach).unwrap_or(std::ptr::null())
}

/// # Safety
/// `config` is NULL or points to a config whose `size` is right and whose texts are NUL-terminated.
unsafe fn configured(config: *const BallastConfig) -> Result<Builder, Failure> {
    let mut builder = Client::builder();
    // SAFETY: NULL or a readable config, by the caller's promise.
    if let Some(config) = unsafe { config.as_ref() } {
        if config.size != size_of::<BallastConfig>() {
            return Err(invalid("config.size is not the size of struct ballast_config of this version"));
        }
        // SAFETY: texts are NULL or NUL-terminated, by the caller's promise.
        let (name, socket, pinned) = unsafe { (text(config.name)?, text(config.socket)?, text(config.pinned)?) };
        builder = name.into_iter().fold(builder, Builder::name);
        builder = socket.into_iter().fold(builder, Builder::socket);
        builder = pinned.into_iter().fold(builder, Builder::pinned);
        builder = builder.may_pin(config.never_pins == 0);
        if config.limit > 0 {
            builder = builder.limit(config.limit);
        }
    }
    Ok(builder)
}

/// Announces hot-plugged RAM in several extents, or with a known guest-physical address.
///
/// # Safety
/// `client` came from [`ballast_attach`]; `added` points to RAM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ballast_add_ram(client: *const Client, added: *const BallastRam) -> c_int {
    status(|| {
        // SAFETY: the caller's promises.
        let (client, added) = unsafe { (borrow(client)?, added.as_ref()) };
        // SAFETY: the caller's promise.
        Ok(client.add_ram(unsafe { ram(added.ok_or_else(|| invalid("the RAM is NULL"))?)? })?)
    })
}

/// Announces hot-plugged RAM.
///
/// # Safety
/// `client` came from [`ballast_attach`]; `added` points to a region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ballast_add_region(client: *const Client, added: *const BallastRegion) -> c_int {
    status(|| {
        // SAFETY: the caller's promises.
        let (client, added) = unsafe { (borrow(client)?, added.as_ref()) };
        let (fd, hva, len, offset) = region(added.ok_or_else(|| invalid("the region is NULL"))?)?;
        Ok(client.add_region(fd, hva, len, offset)?)
    })
}

/// Sets the guest-physical ranges of a region.
///
/// # Safety
/// `client` came from [`ballast_attach`]; `ranges` points to `count` ranges, or `count` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ballast_set_guest_ranges(
    client: *const Client,
    address: *mut c_void,
    ranges: *const BallastGuestRange,
    count: usize,
) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let client = unsafe { borrow(client)? };
        if (ranges.is_null() && count > 0) || count > MAX_GUEST_RANGES {
            return Err(invalid("a region has at most 8 guest-physical ranges"));
        }
        // SAFETY: not null, and `count` ranges are there, by the caller's promise.
        let ranges = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(ranges, count) } };
        let given = |range: &BallastGuestRange| GuestRange {
            address: range.guest_address,
            offset: Bytes(range.offset),
            len: Bytes(range.length),
        };
        let ranges: Vec<_> = ranges.iter().map(given).collect();
        Ok(client.set_guest_ranges(Hva(address as u64), &ranges)?)
    })
}

/// Removes RAM that is about to be unmapped.
///
/// # Safety
/// `client` came from [`ballast_attach`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ballast_remove_region(client: *const Client, address: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    status(|| Ok(unsafe { borrow(client)? }.remove_region(Hva(address as u64))?))
}

/// Announces that memory is about to be freed; free it only after 0.
///
/// # Safety
/// `client` came from [`ballast_attach`]; `ranges` points to `count` ranges.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ballast_discard(client: *const Client, ranges: *const BallastRange, count: usize) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let client = unsafe { borrow(client)? };
        if ranges.is_null() || count == 0 {
            return Ok(());
        }
        if count > ballast_base::wire::MAX_RANGES {
            return Err(invalid("too many ranges in one call"));
        }
        // SAFETY: not null, and `count` ranges are there, by the caller's promise.
        let ranges = unsafe { std::slice::from_raw_parts(ranges, count) };
        let ranges: Vec<_> = ranges.iter().map(|range| (Hva(range.address as u64), range.length)).collect();
        Ok(client.discard(&ranges)?)
    })
}

/// From now on no page may be reclaimed.
///
/// # Safety
/// `client` came from [`ballast_attach`]; `reason` is a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ballast_pin(client: *const Client, reason: *const c_char) -> c_int {
    status(|| {
        // SAFETY: the caller's promises.
        let (client, reason) = unsafe { (borrow(client)?, text(reason)?) };
        Ok(client.pin(&reason.ok_or_else(|| invalid("the reason is NULL"))?)?)
    })
}

/// Restores each page, because this process is about to hand its RAM on (`exec`).
///
/// # Safety
/// `client` came from [`ballast_attach`]; `reason` is a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ballast_bring_back(client: *const Client, reason: *const c_char) -> c_int {
    status(|| {
        // SAFETY: the caller's promises.
        let (client, reason) = unsafe { (borrow(client)?, text(reason)?) };
        Ok(client.bring_back(&reason.ok_or_else(|| invalid("the reason is NULL"))?)?)
    })
}

/// From now on the kernel or a device may write to guest RAM past the page table.
///
/// # Safety
/// `client` came from [`ballast_attach`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ballast_may_pin(client: *const Client) -> c_int {
    // SAFETY: the caller's promise.
    status(|| Ok(unsafe { borrow(client)? }.may_pin()?))
}

/// Text of the last failure on this thread, valid until the next failing call on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn ballast_last_error() -> *const c_char {
    catch_unwind(|| LAST_ERROR.with(|last| last.borrow().as_ptr())).unwrap_or(c"".as_ptr())
}
