//! Presence: the kernel tells which processes are alive. A name is the place of a byte in a file. Each holder of the
//! name has a lock on that byte, which lasts until the last descriptor of that opening of the file is closed.
//!
//! Before: a process opened a file that other processes have open, too. After: the others can ask whether a process, or
//! a message on its way to one, still has that opening.
//! Threads: any. Units: a name is 64 bits, of which 62 count.
//! Promise: no process has to be alive to remove a lock. A lock that another process sets can make a dead holder look
//! alive, never a living one dead.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

/// A lock for reading on a name's byte.
fn lock_of(name: u64, kind: libc::c_int) -> libc::flock {
    // SAFETY: it is a struct of numbers, for which zeros are values.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = (name >> 2) as libc::off_t;
    lock.l_len = 1;
    lock
}

fn control(file: impl AsFd, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the struct is valid for the length of the call, and these commands touch nothing else.
    let done = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, std::ptr::from_mut(lock)) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// From now on this opening of the file announces `name`, in every process that has a descriptor of it.
pub fn announce(file: impl AsFd, name: u64) -> io::Result<()> {
    control(file, libc::F_OFD_SETLK, &mut lock_of(name, libc::F_RDLCK))
}

/// As [`announce`], after waiting until no process holds the name exclusively, for this long at most: a killed process
/// holds it until its last thread has left the kernel.
///
/// # Errors
/// As for [`announce`]; `WouldBlock` if a process holds it still.
pub fn announce_within(file: impl AsFd, name: u64, at_most: Duration) -> io::Result<()> {
    const PAUSE: Duration = Duration::from_micros(500);
    let begun = Instant::now();
    loop {
        match announce(&file, name) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && begun.elapsed() < at_most => {
                std::thread::sleep(PAUSE);
            }
            done => return done,
        }
    }
}

/// Take this name exclusively, until this opening announces it again. Returns false if another opening announces it.
/// The file must be open for writing.
pub fn alone(file: impl AsFd, name: u64) -> io::Result<bool> {
    match control(file, libc::F_OFD_SETLK, &mut lock_of(name, libc::F_WRLCK)) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Does any other opening of the file announce `name`?
pub fn is_present(file: impl AsFd, name: u64) -> io::Result<bool> {
    // If a lock on all of the byte would be granted, no other process has one.
    let mut lock = lock_of(name, libc::F_WRLCK);
    control(file, libc::F_OFD_GETLK, &mut lock)?;
    Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::in_time;
    use crate::memfd;
    use ballast_base::Bytes;

    #[test]
    fn a_name_is_present_until_the_last_descriptor_of_its_opening_is_closed_in_any_process() {
        let file = memfd::create("ballast-test", Bytes(0)).expect("memfd");
        let opened = |writable| memfd::reopen(file.as_fd(), writable).expect("reopen");
        let (asks, one, other) = (opened(true), opened(false), opened(true));
        let there = |name| is_present(&asks, name).expect("ask");
        let (first, second) = (u64::MAX, 4);
        announce(&one, first).expect("a descriptor for reading is enough");
        announce(&other, second).expect("announce");
        assert!(there(first) && there(second) && !there(8));
        let (ours, theirs) = crate::scm::pair().expect("pair");
        crate::scm::send(&ours, b"x", &[one.as_fd()]).expect("send");
        drop(one);
        assert!(there(first), "its descriptor is on its way");
        drop(theirs);
        assert!(in_time(|| !there(first)) && there(second));
        let again = opened(false);
        announce(&again, second).expect("announce");
        drop(other);
        assert!(there(second));
        drop(again);
        assert!(in_time(|| !there(second)));
    }

    #[test]
    fn an_opening_takes_a_name_exclusively_if_no_other_opening_has_it() {
        let file = memfd::create("ballast-test", Bytes(0)).expect("memfd");
        let [one, other] = [(); 2].map(|()| memfd::reopen(file.as_fd(), true).expect("reopen"));
        announce(&one, 0).expect("announce");
        assert!(alone(&one, 0).expect("ask"), "its own is in nobody's way");
        let held = announce_within(&other, 0, Duration::from_millis(2)).expect_err("it is held");
        assert_eq!(held.kind(), io::ErrorKind::WouldBlock);
        announce(&one, 0).expect("announce again");
        announce_within(&other, 0, Duration::ZERO).expect("announce");
        assert!(!alone(&one, 0).expect("ask"));
        drop(other);
        assert!(in_time(|| alone(&one, 0).expect("ask")));
    }
}
