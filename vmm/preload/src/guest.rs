//! Guest-physical addresses: read from QEMU's monitor, and sent to the keeper.
//!
//! Before: `ballast run` has given QEMU a monitor for this library, which has attached before QEMU assigned
//! guest-physical addresses. After: each region has its ranges, or none if the guest does not see it.
//! Threads: one of its own, `ballast-guest`. Units: bytes.
//! Promise: the ranges are those of QEMU's last reply. QEMU is asked after the machine was made, after each plug of
//! memory, and at growing intervals while some memory has no ranges. It is asked at least each minute for the size of
//! the guest's RAM, and the keeper learns how much of it is not managed. Without a monitor nothing is sent.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use ballast_base::guest::{GuestRange, MAX_GUEST_RANGES};
use ballast_base::{Bytes, Hva};
use ballast_client::{Client, RequestError, thread};
use ballast_sys::lock::Lock;

use crate::announce::announce;
use crate::mode::is_required;
use crate::monitor::Monitor;

/// The environment variable with two descriptor numbers: our end and QEMU's.
pub const VARIABLE: &str = "BALLAST_MONITOR";
/// First pause between two requests while some memory has no ranges: the backend of a DIMM is made before the DIMM.
const FIRST: Duration = Duration::from_millis(100);
/// Longest pause between two requests: a reply costs QEMU a millisecond.
const LAST: Duration = Duration::from_secs(60);

static HAS_MONITOR: AtomicBool = AtomicBool::new(false);
static MONITOR: Mutex<Option<UnixStream>> = Mutex::new(None);
/// The socket that tells the thread of added RAM.
static NEWS: OnceLock<UnixStream> = OnceLock::new();

pub fn take_named() {
    let Ok(value) = std::env::var(VARIABLE) else { return };
    let numbers: Option<Vec<RawFd>> = value.split(',').map(|number| number.parse().ok()).collect();
    let Some([ours, theirs]) = numbers.as_deref() else { return };
    // Programs that QEMU starts do not inherit the descriptors.
    // SAFETY: changes a flag of a descriptor, or returns EBADF.
    let set = |fd| is_socket(fd) && unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } == 0;
    if set(*ours) && set(*theirs) {
        HAS_MONITOR.store(true, Ordering::Relaxed);
        // SAFETY: it is open, and `ballast run` made it for this library alone.
        let stream = unsafe { UnixStream::from_raw_fd(*ours) };
        *MONITOR.locked() = Some(stream);
    } else {
        announce(
            "the program that started QEMU has closed the descriptors of its monitor, without which QEMU cannot start; \
             have it leave descriptors open (Python: close_fds=False)",
        );
    }
}

pub fn is_socket(fd: RawFd) -> bool {
    // SAFETY: zeros are a `stat`, which the call fills; or it returns EBADF.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe { libc::fstat(fd, &raw mut stat) == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFSOCK }
}

pub fn has_monitor() -> bool {
    HAS_MONITOR.load(Ordering::Relaxed)
}

pub fn drop_monitor() {
    drop(MONITOR.locked().take());
}

/// Starts the thread that reads the guest-physical addresses, because this process is attached.
pub fn learn(client: &Client) {
    let Some(stream) = MONITOR.locked().take() else { return };
    let started = UnixStream::pair().and_then(|(news, heard)| {
        news.set_nonblocking(true)?;
        heard.set_nonblocking(true)?;
        let _ = NEWS.set(news);
        let client = client.clone();
        thread::spawn("ballast-guest", move || match run(stream, &heard, &client) {
            // QEMU has ended.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
            Err(error) => announce(format_args!("guest-physical addresses are not known any more: {error}")),
            Ok(()) => {}
        })
    });
    if let Err(error) = started {
        announce(format_args!("guest-physical addresses are not known: {error}"));
    }
}

pub fn changed() {
    if let Some(mut news) = NEWS.get() {
        // If the socket is full, the thread has a notification to read.
        let _ = io::Write::write(&mut news, &[1]);
    }
}

fn run(stream: UnixStream, heard: &UnixStream, client: &Client) -> io::Result<()> {
    let mut monitor = Monitor::greet(stream)?;
    let (mut pause, mut told, mut all, mut shown, mut is_first) = (FIRST, 0, false, Vec::new(), true);
    loop {
        if !all {
            (all, shown) = tell(&mut monitor, client)?;
        }
        told = tell_unmanaged(&mut monitor, client, &shown, told, is_first)?;
        is_first = false;
        // A private DIMM is plugged some time after its backend was made, and no call of QEMU shows it.
        if wait(&mut monitor, heard, pause)? {
            (pause, all) = (FIRST, false);
        } else {
            pause = (pause * 2).min(LAST);
        }
    }
}

/// Tells operator and keeper how much of the guest's RAM is not managed, if the amount has changed. Returns the amount.
fn tell_unmanaged(monitor: &mut Monitor, client: &Client, shown: &[Hva], told: u64, is_first: bool) -> io::Result<u64> {
    let regions = client.regions();
    let regions: Vec<_> = regions.iter().map(|(hva, len)| (hva.0, *len, shown.contains(hva))).collect();
    let unmanaged = monitor.unmanaged(&regions)?;
    if unmanaged == told {
        return Ok(told);
    }
    if unmanaged > 0 {
        announce(format_args!("{} of the guest's RAM is not managed: it is no shared memory file", Bytes(unmanaged)));
        // RAM of a backend that QEMU does not show yet may only seem to be missing.
        let all: Vec<_> = regions.iter().map(|(start, len, _)| (*start, *len, true)).collect();
        if is_first && is_required() && monitor.unmanaged(&all)? > 0 {
            announce("stopping the VM, as BALLAST_REQUIRE=1 asks");
            // SAFETY: ends the process without running exit handlers of a VMM that has just started.
            unsafe { libc::_exit(1) };
        }
    }
    match client.set_unmanaged(Bytes(unmanaged)) {
        Ok(()) => Ok(unmanaged),
        Err(RequestError::Refused(why)) => Err(io::Error::other(why)),
        Err(_) => Ok(told),
    }
}

/// Waits until RAM is added, or for this long. Returns whether RAM was added.
fn wait(monitor: &mut Monitor, heard: &UnixStream, pause: Duration) -> io::Result<bool> {
    loop {
        let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds = [poll(monitor.stream().as_raw_fd()), poll(heard.as_raw_fd())];
        let timeout = pause.as_millis() as i32;
        // SAFETY: two entries, as stated.
        let count = unsafe { libc::poll(fds.as_mut_ptr(), 2, timeout) };
        if count < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
            continue;
        }
        if fds[0].revents != 0 {
            monitor.drain()?;
        }
        if fds[1].revents != 0 {
            while io::Read::read(&mut &*heard, &mut [0; 64]).is_ok_and(|count| count > 0) {}
            return Ok(true);
        }
        if count == 0 {
            return Ok(false);
        }
    }
}

/// Asks QEMU, and tells the keeper. Returns whether the keeper has the ranges of all regions, and those the guest sees.
fn tell(monitor: &mut Monitor, client: &Client) -> io::Result<(bool, Vec<Hva>)> {
    let regions = client.regions();
    let mut seen: Vec<Vec<GuestRange>> = vec![Vec::new(); regions.len()];
    for (address, len) in monitor.memory()? {
        let Some(hva) = monitor.host_address(address)? else { continue };
        let inside = |(start, size): &(Hva, u64)| start.0 <= hva && hva.saturating_add(len) <= start.0 + size;
        let Some(number) = regions.iter().position(inside) else { continue };
        // A range of something else than the guest's memory may begin at that address, too, so the end is compared.
        if monitor.host_address(address + (len - 1))? != Some(hva + (len - 1)) {
            continue;
        }
        let offset = Bytes(hva - regions[number].0.0);
        match seen[number].last_mut() {
            // The range is a part of a known range, or its direct continuation.
            Some(range)
                if address <= range.address + range.len.0
                    && address - range.address == offset.0.wrapping_sub(range.offset.0) =>
            {
                range.len = Bytes(range.len.0.max(address + len - range.address));
            }
            _ => seen[number].push(GuestRange { address, offset, len: Bytes(len) }),
        }
    }
    let mut all = true;
    for ((hva, _), ranges) in regions.iter().zip(&seen) {
        if ranges.is_empty() || ranges.len() > MAX_GUEST_RANGES {
            all = false;
            continue;
        }
        match client.set_guest_ranges(*hva, ranges) {
            Ok(()) => {}
            Err(RequestError::Refused(why)) => return Err(io::Error::other(why)),
            // The region was unmapped since, or there is no keeper now.
            Err(RequestError::Invalid(_) | RequestError::NoAnswer | RequestError::Later(_)) => all = false,
        }
    }
    let shown = regions.iter().zip(&seen).filter(|(_, ranges)| !ranges.is_empty()).map(|((hva, _), _)| *hva);
    Ok((all, shown.collect()))
}
