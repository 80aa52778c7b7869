//! Decides what a call of the VMM means for guest RAM, and tells the client.
//!
//! Before: `hooks` sees a call. After: it goes through, or fails with an errno that the VMM understands.
//! Threads: any VMM thread; calls of a thread inside the client are ignored.
//! Promise: each function returns in bounded time, except for a discard that an engine has read (see `ballast_client`).

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

use ballast_base::{Bytes, Hva, PAGE_SIZE};
use ballast_client::{Client, DiscardError, Freeing, Ram, Range, RequestError, chain, visit};
use ballast_sys::lock::Lock;
use ballast_sys::memfd::{self, FileId};

use crate::announce::announce;
use crate::mode::{MANAGED, MODE, OFF, WAITING, is_required, text};
use crate::{agent, guest, identity, missed, pool, through};

/// The process that attached. A child between `vfork` and `exec` shares this memory, but is another process.
static OWNER: AtomicU32 = AtomicU32::new(0);
static CLIENT: OnceLock<Client> = OnceLock::new();
/// Held by the thread that attaches; others that map RAM at that time wait, and then add theirs.
static ATTACHING: Mutex<()> = Mutex::new(());
/// The reason of a pin that was requested before there was RAM.
static EARLY_PIN: Mutex<Option<&'static str>> = Mutex::new(None);
/// `mlockall(MCL_FUTURE)` was called: all memory that is mapped from now on is locked.
pub static LOCKS_ALL: AtomicBool = AtomicBool::new(false);

const LOCKED: &str = "memory is locked (mlock)";
pub const MAPPED_TWICE: &str = "the VMM maps the same RAM twice";

/// A child forked after attaching has no guest RAM (QEMU marks it DONTFORK), and no thread of the client.
pub extern "C" fn in_child() {
    if MODE.load(Ordering::Relaxed) == MANAGED {
        MODE.store(OFF, Ordering::Relaxed);
    }
}

/// Whether hooks check the calls of this thread.
pub fn watching() -> bool {
    !visit::inside() && (MODE.load(Ordering::Acquire) == WAITING || is_attached())
}

/// Whether this process has attached. A child made by the plain system call (`in_child` is not called there) has not,
/// though it has a copy of its parent's memory.
fn is_attached() -> bool {
    MODE.load(Ordering::Acquire) == MANAGED && OWNER.load(Ordering::Acquire) == std::process::id()
}

/// The client, if this process is attached and the calling thread is not inside it.
pub fn client() -> Option<&'static Client> {
    if visit::inside() || !is_attached() {
        return None;
    }
    CLIENT.get()
}

/// Handles a mapping that is RAM if its file is shared memory. `Err` is the errno for the VMM, which must not keep it.
pub fn new_ram(addr: *mut c_void, len: usize, flags: c_int, fd: c_int, offset: i64) -> Result<(), c_int> {
    let _quiet = visit::enter();
    // SAFETY: the VMM just mapped this descriptor successfully; it is borrowed for the duration of this call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    // The client checks the size of the pages, and `manage` reports its error.
    if !memfd::ram_page(fd).is_ok_and(|page| page.is_some()) {
        missed::mapped(0);
        return Ok(());
    }
    let (Ok(fd), Ok(file)) = (fd.try_clone_to_owned(), memfd::file_id(fd)) else { return Ok(()) };
    let len = len.next_multiple_of(PAGE_SIZE) as u64;
    let (hva, len, offset) = (Hva(addr as u64), Bytes(len), Bytes(offset as u64));
    let is_there = |client: &Client| !client.of_file(file, offset.0, len.0).is_empty();
    manage(Ram::one(fd, hva, len, offset), flags, is_there)
}

/// Like `new_ram`, for memory of the pool, which is mapped nowhere else.
pub fn new_ram_of_pool(ram: Ram, flags: c_int) -> Result<(), c_int> {
    let _quiet = visit::enter();
    manage(ram, flags, |_| false)
}

/// Attaches with RAM, or adds it. Does not wait for long, because the VMM may stop its whole guest while it plugs RAM.
/// A keeper that does not reply, or is not ready, may know of far pages in it: the VMM then does not get it.
fn manage(ram: Ram, flags: c_int, is_there: impl FnOnce(&Client) -> bool) -> Result<(), c_int> {
    let (hva, len) = (ram.hva, Bytes(ram.extents.iter().map(|extent| extent.len.0).sum()));
    // With unmanaged on-demand memory, the VMM would get a SIGBUS when no page is free.
    let must_be_managed = ram.extents.iter().any(|extent| memfd::is_on_demand(&extent.fd).is_ok_and(|is| is));
    if flags & libc::MAP_LOCKED != 0 || LOCKS_ALL.load(Ordering::Relaxed) {
        *EARLY_PIN.locked() = Some(LOCKED);
    }

    let _one = ATTACHING.locked();
    let Some(client) = CLIENT.get() else {
        if MODE.load(Ordering::Acquire) == WAITING {
            attach(ram);
        }
        let is_refused = must_be_managed && CLIENT.get().is_none();
        return if is_refused { Err(libc::ENOMEM) } else { Ok(()) };
    };
    if is_there(client) {
        // Another thread has attached with this RAM since the check of `twice`.
        pin_or_die(client, MAPPED_TWICE);
        return Ok(());
    }
    if flags & libc::MAP_LOCKED != 0 {
        pin_or_die(client, LOCKED);
    }
    match client.add_ram(ram) {
        Ok(()) => {}
        Err(error @ (RequestError::Later(_) | RequestError::NoAnswer)) => {
            announce(format_args!("RAM of {len} at {hva} cannot be plugged now: {error}"));
            // A keeper that reads the region late reads the removal next.
            if matches!(error, RequestError::NoAnswer)
                && let Err(error) = client.remove_region(hva)
            {
                announce(format_args!("withdrawing RAM of {len} at {hva}: {error}"));
            }
            return Err(libc::ENOMEM);
        }
        Err(error) => {
            announce(format_args!("RAM of {len} at {hva} is not managed: {error}"));
            missed::mapped(len.0);
            (!must_be_managed).then_some(()).ok_or(libc::ENOMEM)?;
        }
    }
    guest::changed();
    Ok(())
}

/// Ends a VMM whose guest has not started and that cannot have its RAM.
pub fn stop_if_starting() {
    if MODE.load(Ordering::Acquire) == WAITING {
        announce("stopping before the guest starts");
        // SAFETY: ends the process without running exit handlers of a VMM that is half started.
        unsafe { libc::_exit(1) };
    }
}

fn attach(ram: Ram) {
    through::arrive();
    // A VMM without support for Ballast promises nothing: direct I/O, vhost and some reads bypass the page table.
    let mut builder = agent::give_port(Client::builder().ram(ram).may_pin(true));
    if let Some(name) = identity::name() {
        builder = builder.name(name);
    }
    if let Some(uuid) = identity::uuid() {
        builder = builder.uuid(uuid);
    }
    if let Some(reason) = *EARLY_PIN.locked() {
        builder = builder.pinned(reason);
    }
    let result = match text("BALLAST_LIMIT").map(|value| (value.parse::<u64>(), value)) {
        Some((Err(_), value)) => Err(format!("BALLAST_LIMIT={value:?} is not a number of bytes")),
        Some((Ok(limit), _)) => builder.limit(limit).attach().map_err(|error| chain(&error)),
        None => builder.attach().map_err(|error| chain(&error)),
    };
    match result {
        Ok(client) => {
            let _ = CLIENT.set(client);
            OWNER.store(std::process::id(), Ordering::Release);
            MODE.store(MANAGED, Ordering::Release);
            if let Some(client) = CLIENT.get() {
                guest::learn(client);
            }
        }
        Err(error) => no_client(&error),
    }
}

/// Handles that nothing will be managed: ends the VMM, if the operator asked for that.
fn no_client(why: &str) {
    if is_required() {
        announce(format_args!("{why}. Stopping before the guest starts, as BALLAST_REQUIRE=1 asks"));
        // SAFETY: ends the process without running exit handlers of a VMM that is half started.
        unsafe { libc::_exit(1) };
    }
    announce(format_args!("{why}. The VM runs unmanaged"));
    if let Err(error) = ballast_client::report_unmanaged(identity::name().as_deref(), why) {
        announce(format_args!("the keeper does not hear of it: {error}"));
    }
    MODE.store(OFF, Ordering::Release);
    guest::drop_monitor();
}

fn pin_or_die(client: &Client, reason: &str) {
    if let Err(error) = client.pin(reason) {
        announce(format_args!("{reason}, and {error}: stopping the VM before its memory can be corrupted"));
        std::process::abort();
    }
}

/// The client for a request. Without a client, `note` stores the request for [`attach`].
fn client_or_note(note: impl FnOnce()) -> Option<&'static Client> {
    if !watching() {
        return None;
    }
    let _visit = visit::enter();
    // An attach on another thread either sees the note or is done.
    let _one = ATTACHING.locked();
    let client = CLIENT.get();
    if client.is_none() {
        note();
    }
    client
}

/// Pins the VM before a call of the VMM. `Err` is the errno with which to refuse the call.
pub fn pin_before(reason: &'static str, restore: bool) -> Result<(), c_int> {
    if restore && pool::is_used() {
        announce(format_args!("{reason}: refused, because its RAM is the pool's, and not in the VMM's own file"));
        return Err(libc::EOPNOTSUPP);
    }
    let early = || {
        EARLY_PIN.locked().get_or_insert(reason);
    };
    let Some(client) = client_or_note(early) else { return Ok(()) };
    client.pin(reason).map_err(|error| {
        announce(format_args!("{reason}: refused, because {error}"));
        libc::EAGAIN
    })?;
    if restore {
        announce(format_args!("{reason}: this VM is pinned; restoring all of its memory"));
        client.restore_all().map_err(|error| {
            announce(format_args!("{reason}: refused, because not all memory was restored: {error}"));
            libc::EAGAIN
        })?;
    }
    Ok(())
}

/// Prepares for an `exec` of this process. A VMM may hand its RAM on, as QEMU's `cpr-exec` does, so each page must be
/// in its file before: `exec` closes the userfaultfds, and the next program would read zeros where pages are far.
pub fn executing() -> Result<(), c_int> {
    let Some(client) = client() else { return Ok(()) };
    if pool::is_used() {
        announce("the VMM may not execute another program: its RAM is the pool's, which it cannot hand on");
        return Err(libc::EOPNOTSUPP);
    }
    announce("the VMM executes another program: restoring all of its memory first");
    client.bring_back("the VMM executes another program").map_err(|error| {
        announce(format_args!("the VMM may not execute another program: not all of its memory was restored: {error}"));
        libc::EAGAIN
    })
}

/// Notes that the `exec` failed: the VMM continues, and its pin stays.
pub fn executed_nothing() {
    if client().is_some() {
        announce("the other program could not be executed; this VM stays pinned");
    }
}

/// Prepares for a lock of memory: all of it (`None`) or a range.
pub fn locking(range: Option<(*const c_void, usize)>, future: bool) -> Result<(), c_int> {
    if future {
        LOCKS_ALL.store(true, Ordering::Relaxed);
    }
    match (client(), range) {
        (Some(client), Some((addr, len))) if client.overlap(Hva(addr as u64), len as u64).is_empty() => Ok(()),
        // There is no RAM to lock yet; RAM that is added later is checked then.
        (None, _) => Ok(()),
        _ => pin_before(LOCKED, false),
    }
}

/// Held while the VMM frees a piece of guest RAM.
pub type Held = Option<Freeing<'static>>;

/// Prepares for a call that frees or fills a piece of a file: if that is guest RAM, the engine must be told first. The
/// caller holds the result during the call.
pub fn punching(fd: c_int, mode: c_int, offset: i64, len: i64) -> Result<Held, c_int> {
    let Some(client) = client() else { return Ok(None) };
    if fd < 0 || offset < 0 || len <= 0 {
        return Ok(None);
    }
    let visit = visit::enter();
    // SAFETY: borrowed for `fstat` only, which returns EBADF if it is not open.
    let Ok(file) = memfd::file_id(unsafe { BorrowedFd::borrow_raw(fd) }) else { return Ok(None) };
    drop(visit);
    let ranges = client.of_file(file, offset as u64, len as u64);
    if ranges.is_empty() {
        return Ok(None);
    }
    if mode & libc::FALLOC_FL_PUNCH_HOLE == 0 {
        announce("refusing to fill guest RAM with fallocate: it would put zeros where pages are far");
        return Err(libc::EOPNOTSUPP);
    }
    freeing(client, &ranges)
}

/// Prepares for a call that frees a piece of the address space (`MADV_REMOVE`). The caller holds the result during the
/// call.
pub fn removing(addr: *mut c_void, len: usize) -> Result<Held, c_int> {
    let Some(client) = client() else { return Ok(None) };
    let ranges = client.overlap(Hva(addr as u64), (len as u64).next_multiple_of(PAGE_SIZE as u64));
    freeing(client, &ranges)
}

pub fn discarding(ranges: &[Range]) -> Result<(), c_int> {
    client().map_or(Ok(()), |client| client.discard(ranges).map_err(refused))
}

fn freeing(client: &'static Client, ranges: &[Range]) -> Result<Held, c_int> {
    // The pool counts the memory that a VM frees.
    if pool::is_used() {
        return client.discard(ranges).map(|()| None).map_err(refused);
    }
    client.freeing(ranges).map(Some).map_err(refused)
}

fn refused(error: DiscardError) -> c_int {
    announce(&error);
    match error {
        DiscardError::Invalid(_) => libc::EINVAL,
        DiscardError::NoAnswer(_) => libc::EAGAIN,
        DiscardError::Failed(_) => libc::EIO,
    }
}

/// Tells the client and the pool that these addresses will be unmapped, unless the kernel would refuse the call.
pub fn unmapping(addr: *mut c_void, len: usize) {
    if (addr as usize).is_multiple_of(PAGE_SIZE) {
        leave(addr, len, Client::unmapping);
    }
}

/// Like `unmapping`, before a call that maps other memory there, or fails and leaves the mapping.
pub fn mapping_over(addr: *mut c_void, len: usize) {
    leave(addr, len, Client::mapping_over);
}

fn leave(addr: *mut c_void, len: usize, how: impl FnOnce(&Client, Hva, u64) -> Result<(), RequestError>) {
    pool::unmapping(addr, len);
    let Some(client) = client() else { return };
    let len = (len as u64).next_multiple_of(PAGE_SIZE as u64);
    if let Err(error) = how(client, Hva(addr as u64), len) {
        announce(format_args!("RAM at {addr:?} is being unplugged, and {error}"));
    }
}

pub fn touches_ram(addr: *mut c_void, len: usize) -> bool {
    client().is_some_and(|client| !client.overlap(Hva(addr as u64), len as u64).is_empty())
}

pub const KVM_RUN: libc::c_ulong = 0xAE80;

/// Whether this `ioctl` runs a vCPU before anything was attached.
pub fn runs_a_vcpu(request: libc::c_ulong) -> bool {
    request & 0xFFFF_FFFF == KVM_RUN && MODE.load(Ordering::Relaxed) == WAITING
}

/// Notes that the guest starts. If none of its RAM was found, it is private memory, and stays unmanaged.
pub fn starting() {
    let _one = ATTACHING.locked();
    if MODE.load(Ordering::Acquire) == WAITING {
        no_client("the guest's RAM is not a shared memory file");
    }
}

/// Also true of a stand-in for one.
pub fn is_ram_file(fd: c_int) -> bool {
    let Some(client) = client().filter(|_| fd >= 0) else { return false };
    let quiet = visit::enter();
    // SAFETY: borrowed for `fstat` only, which returns EBADF if it is not open.
    let Ok(file) = memfd::file_id(unsafe { BorrowedFd::borrow_raw(fd) }) else { return false };
    drop(quiet);
    pool::has(file) || !client.of_file(file, 0, u64::MAX).is_empty()
}

/// Whether this message sends a file of guest RAM to another process.
///
/// # Safety
/// `message` is a valid `msghdr` for `sendmsg`, or null.
pub unsafe fn carries_ram(message: *const libc::msghdr) -> bool {
    let Some(client) = client() else { return false };
    // SAFETY: the caller's promise.
    unsafe { carries(message, |file| !client.of_file(file, 0, u64::MAX).is_empty()) }
}

/// Refuses a message that would give another process a stand-in, which has no pages, as guest RAM. `Err` is the errno.
///
/// # Safety
/// As [`carries_ram`].
pub unsafe fn keep_stand_ins(message: *const libc::msghdr) -> Result<(), c_int> {
    // SAFETY: the caller's promise.
    if visit::inside() || !pool::is_used() || !unsafe { carries(message, pool::has) } {
        return Ok(());
    }
    announce("another process may not map the RAM of this VM: it is the pool's (vhost-user needs RAM of its own)");
    Err(libc::EOPNOTSUPP)
}

/// Whether this message sends a file for which `is` returns true.
///
/// # Safety
/// As [`carries_ram`].
unsafe fn carries(message: *const libc::msghdr, is: impl Fn(FileId) -> bool) -> bool {
    /// Most descriptors in a message (the kernel's `SCM_MAX_FD`); a longer list is not read.
    const MOST: usize = 253;
    // SAFETY: the caller's promise.
    let Some(header) = (unsafe { message.as_ref() }) else { return false };
    if header.msg_control.is_null() || header.msg_controllen == 0 {
        return false;
    }
    let _quiet = visit::enter();
    // SAFETY: the control buffer is valid for `msg_controllen` bytes; the CMSG functions stay inside it, and a header's
    // length is bounded against the buffer's end before its descriptors are read (unaligned, as they may be).
    unsafe {
        let end = header.msg_control as usize + header.msg_controllen;
        let mut entry = libc::CMSG_FIRSTHDR(message);
        while !entry.is_null() {
            let data = libc::CMSG_DATA(entry);
            let stop = (entry as usize).saturating_add((*entry).cmsg_len).min(end);
            if (*entry).cmsg_level == libc::SOL_SOCKET && (*entry).cmsg_type == libc::SCM_RIGHTS {
                let count = stop.saturating_sub(data as usize) / size_of::<c_int>();
                for index in 0..count.min(MOST) {
                    let fd = data.cast::<c_int>().add(index).read_unaligned();
                    if fd < 0 {
                        continue;
                    }
                    if memfd::file_id(BorrowedFd::borrow_raw(fd)).is_ok_and(&is) {
                        return true;
                    }
                }
            }
            entry = libc::CMSG_NXTHDR(message, entry);
        }
    }
    false
}
