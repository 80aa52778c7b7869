//! Guest-physical addresses: read from QEMU's monitor, and sent to the keeper.
//!
//! Before: `ballast run` has given QEMU a monitor of its own; this library has attached, before QEMU has assigned
//! guest-physical addresses. After: each region has its ranges, or none if QEMU shows it nowhere.
//! Threads: one of its own, `ballast-guest`, which sleeps until QEMU sends something. Units: bytes.
//! Promise: the ranges are those of QEMU's last reply. QEMU is asked after the machine was made, after each plug of
//! memory, and at growing intervals while some memory has no ranges. Without a monitor nothing is sent.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use ballast_base::guest::{GuestRange, MAX_GUEST_RANGES};
use ballast_base::{Bytes, Hva};
use ballast_client::{Client, RequestError, thread};

use crate::announce::announce;
use crate::monitor::Monitor;

/// The environment variable with two descriptor numbers: our end and QEMU's.
pub const VARIABLE: &str = "BALLAST_MONITOR";
/// First pause between two questions while some memory has no ranges: a DIMM's backend is made before the DIMM.
const FIRST: Duration = Duration::from_millis(100);
/// Longest pause between two questions: a reply costs QEMU a millisecond.
const LAST: Duration = Duration::from_secs(60);

static MONITOR: Mutex<Option<UnixStream>> = Mutex::new(None);
/// The socket to notify the thread when RAM was added.
static NEWS: OnceLock<UnixStream> = OnceLock::new();

/// Take the monitor that is named in this value of the environment. Before `main`, on the only thread.
pub fn take(value: &str) {
    let numbers: Option<Vec<RawFd>> = value.split(',').map(|number| number.parse().ok()).collect();
    let Some([ours, theirs]) = numbers.as_deref() else { return };
    // Programs that QEMU starts have neither.
    // SAFETY: changes a flag of a descriptor, or returns EBADF.
    let open = [*ours, *theirs].map(|fd| unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } == 0);
    if open == [true, true] {
        // SAFETY: it is open, and `ballast run` made it for this library alone.
        let stream = unsafe { UnixStream::from_raw_fd(*ours) };
        *MONITOR.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
    }
}

/// Close the monitor, because this process is not managed.
pub fn drop_monitor() {
    drop(MONITOR.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// Start the thread that learns the guest-physical addresses, because this process is attached.
pub fn learn(client: &Client) {
    let Some(stream) = MONITOR.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
    let started = UnixStream::pair().and_then(|(news, heard)| {
        news.set_nonblocking(true)?;
        heard.set_nonblocking(true)?;
        let _ = NEWS.set(news);
        let client = client.clone();
        thread::spawn("ballast-guest", move || match run(stream, &heard, &client) {
            // QEMU ends.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
            Err(error) => announce(format_args!("guest-physical addresses are not known any more: {error}")),
            Ok(()) => {}
        })
    });
    if let Err(error) = started {
        announce(format_args!("guest-physical addresses are not known: {error}"));
    }
}

/// Notify the thread that RAM was added.
pub fn changed() {
    if let Some(mut news) = NEWS.get() {
        // If it is full, a notification is in it already.
        let _ = io::Write::write(&mut news, &[1]);
    }
}

fn run(stream: UnixStream, heard: &UnixStream, client: &Client) -> io::Result<()> {
    let mut monitor = Monitor::greet(stream)?;
    let mut pause = FIRST;
    loop {
        let all = tell(&mut monitor, client)?;
        if wait(&mut monitor, heard, (!all).then_some(pause))? {
            pause = FIRST;
        } else {
            pause = (pause * 2).min(LAST);
        }
    }
}

/// Wait until RAM is added, or for this long. Returns whether it was.
fn wait(monitor: &mut Monitor, heard: &UnixStream, pause: Option<Duration>) -> io::Result<bool> {
    loop {
        let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds = [poll(monitor.stream().as_raw_fd()), poll(heard.as_raw_fd())];
        let timeout = pause.map_or(-1, |pause| pause.as_millis() as i32);
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

/// Ask QEMU, and tell the keeper. Returns whether the keeper has the ranges of all regions.
fn tell(monitor: &mut Monitor, client: &Client) -> io::Result<bool> {
    let regions = client.regions();
    let mut seen: Vec<Vec<GuestRange>> = vec![Vec::new(); regions.len()];
    for (address, len) in monitor.memory()? {
        let Some(hva) = monitor.host_address(address)? else { continue };
        let inside = |(start, size): &(Hva, u64)| start.0 <= hva && hva.saturating_add(len) <= start.0 + size;
        let Some(number) = regions.iter().position(inside) else { continue };
        // A range of something else than the guest's memory may begin at the same address.
        if monitor.host_address(address + (len - 1))? != Some(hva + (len - 1)) {
            continue;
        }
        let offset = Bytes(hva - regions[number].0.0);
        match seen[number].last_mut() {
            // A part of a known range, or its direct continuation.
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
            // An older keeper does not know this message.
            Err(RequestError::Refused(why)) => return Err(io::Error::other(why)),
            // It was unmapped meanwhile; or there is no keeper now.
            Err(RequestError::Invalid(_) | RequestError::NoAnswer | RequestError::Later(_)) => all = false,
        }
    }
    Ok(all)
}
