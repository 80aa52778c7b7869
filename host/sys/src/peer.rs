//! The process at the other end of a Unix socket, its number, its user and its supplementary groups.
//!
//! Before: a connection was accepted. After: the daemon decides what this peer may do. Promise: the result describes
//! the peer at its connect; nothing is looked up by process id, which may be reused.

use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd};

/// The user and the process at the other end of a Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The process; `None` if it is in no PID namespace that this process sees.
    pub pid: Option<NonZeroU32>,
    /// The user; the kernel's overflow user if this process's user namespace does not have it.
    pub uid: u32,
}

/// The credentials of the process that connected (`SO_PEERCRED`).
pub fn credentials(socket: impl AsFd) -> io::Result<Credentials> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the struct is alive and exclusively ours, and `len` is its size; any numbers are values of it.
    let answer = unsafe {
        let fd = socket.as_fd().as_raw_fd();
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut found).cast(), &raw mut len)
    };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Credentials { pid: u32::try_from(found.pid).ok().and_then(NonZeroU32::new), uid: found.uid })
}

/// The supplementary groups that the peer had when it connected (`SO_PEERGROUPS`, since Linux 4.13).
pub fn groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
    const FEW: usize = 32;
    let mut groups = vec![0u32; FEW];
    loop {
        let mut len = size_of_val(groups.as_slice()) as libc::socklen_t;
        // SAFETY: the buffer is alive, exclusively ours and `len` bytes long; the kernel writes group ids (u32) within
        // it, and the needed or written length into `len`.
        let answer = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        let count = len as usize / size_of::<u32>();
        if answer == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_this_process_and_its_user() {
        let (here, _there) = std::os::unix::net::UnixStream::pair().expect("socket pair");
        let uid = rustix::process::geteuid().as_raw();
        let pid = NonZeroU32::new(std::process::id());
        assert_eq!(credentials(&here).expect("ask"), Credentials { pid, uid });
        credentials(std::fs::File::open("/dev/null").expect("open")).expect_err("no socket");
    }

    #[test]
    fn a_peer_in_this_process_has_the_groups_of_this_process() {
        let (here, _there) = std::os::unix::net::UnixStream::pair().expect("socket pair");
        let mut found = groups(&here).expect("peer groups");
        let mut ours: Vec<u32> =
            rustix::process::getgroups().expect("groups").into_iter().map(|group| group.as_raw()).collect();
        found.sort_unstable();
        ours.sort_unstable();
        assert_eq!(found, ours);
    }
}
