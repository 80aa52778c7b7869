//! Are two descriptors one file? Device and inode say which files are *not* the same. Equal numbers prove nothing: an
//! inode of hugetlbfs has a number of 32 bits from a counter that every user of the host turns.
//!
//! Before: another user sent a file that has the numbers of a VM's RAM. After: it is that file, or it is refused.
//! Threads: any; no call waits. Promise: the proof does not depend on anything that the sender of the file may choose.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

use crate::presence::Seen;
use crate::{memfd, presence};

/// Times that a lock is set or not, by a coin. An impostor would have to answer each in the microsecond before it is
/// asked for.
const ROUNDS: usize = 32;

/// Is `other` the file that `known` is? A lock on a byte is set, or not, through an opening of one that no other
/// process has, and asked for through the other.
///
/// # Errors
/// It cannot be told: one of them has no locks, or its user holds locks on all of it, or it cannot be opened once more.
pub fn same_file(known: impl AsFd, other: impl AsFd) -> io::Result<bool> {
    let (known, other) = (known.as_fd(), other.as_fd());
    Ok(memfd::file_id(known)? == memfd::file_id(other)? && proves(known, other)?)
}

/// The same, whatever their numbers are.
fn proves(known: BorrowedFd<'_>, other: BorrowedFd<'_>) -> io::Result<bool> {
    match shows(known, other) {
        Ok(Some(same)) => Ok(same),
        _ => shows(other, known)?.ok_or_else(|| io::Error::other("its user holds locks on all of a file")),
    }
}

/// The result, if locks of others do not hide it.
fn shows(locked: BorrowedFd<'_>, asked: BorrowedFd<'_>) -> io::Result<Option<bool>> {
    let own = opening(locked)?;
    let mut random = [0u8; ROUNDS * 8];
    let filled = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    if filled != random.len() {
        return Err(io::Error::other("the kernel gave no random numbers"));
    }
    let mut is_hidden = false;
    for bytes in random.chunks_exact(8) {
        let name = bytes.iter().fold(0, |name, byte| name << 8 | u64::from(*byte));
        let sets = name & 1 == 1;
        if sets {
            presence::announce(&own, name)?;
        }
        let seen = presence::seen(asked, name)?;
        if sets {
            presence::withdraw(&own, name)?;
        }
        match (sets, seen) {
            // A lock for writing is not beside ours in one file.
            (true, Seen::Nothing | Seen::Exclusive) => return Ok(Some(false)),
            (true, Seen::Shared) | (false, Seen::Nothing) => {}
            (false, _) => is_hidden = true,
        }
    }
    Ok((!is_hidden).then_some(true))
}

/// Another opening of a file. It does not wait: a lease of the file's owner would delay it for 45 s.
fn opening(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::Bytes;

    fn two() -> [OwnedFd; 2] {
        [(); 2].map(|()| memfd::create("ballast-test", Bytes(4096)).expect("memfd"))
    }

    #[test]
    fn a_file_is_the_same_through_any_descriptor_and_another_file_is_not() {
        let [one, other] = two();
        let again = memfd::reopen(one.as_fd(), true).expect("reopen");
        let duplicate = one.try_clone().expect("duplicate");
        assert!(same_file(&one, &again).expect("ask") && same_file(&again, &duplicate).expect("ask"));
        assert!(!same_file(&one, &other).expect("ask"));
        // As if it had the same numbers.
        assert!(!proves(one.as_fd(), other.as_fd()).expect("ask"));
    }

    #[test]
    fn locks_on_all_of_an_impostor_do_not_make_it_the_file() {
        for kind in [libc::F_RDLCK, libc::F_WRLCK] {
            let [file, impostor] = two();
            let holder = memfd::reopen(impostor.as_fd(), true).expect("reopen");
            presence::lock_all(&holder, kind).expect("lock");
            assert!(!proves(file.as_fd(), impostor.as_fd()).expect("ask"));
            assert!(!proves(impostor.as_fd(), file.as_fd()).expect("ask"));
            // Of the file itself it cannot be told then, which is no proof either.
            let again = memfd::reopen(impostor.as_fd(), true).expect("reopen");
            proves(impostor.as_fd(), again.as_fd()).expect_err("hidden by its user's locks");
        }
    }
}
