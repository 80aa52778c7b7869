//! The process at the other end of a Unix socket, beyond `SO_PEERCRED`: its supplementary groups.
//!
//! Before: a connection was accepted. After: the daemon decides what this peer may do.
//! Promise: the result is what the peer had when it connected; nothing is looked up by process id, which may be reused.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

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
