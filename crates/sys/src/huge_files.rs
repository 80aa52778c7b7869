//! Files of huge pages that a pool consists of: their file system, the node of their pages, and who else has them.
//!
//! Before: `reserve` wants memory that outlives every process. After: files in a hugetlbfs of our own.
//! Threads: any; [`on_node`] is about the calling thread alone. Units: bytes.
//! Promise: nothing here maps a file or reads one.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ballast_base::{Bytes, HUGE_SIZE};

use crate::memfd;

/// Make a hugetlbfs of 2 MiB pages at this directory, unless it is one. Only its owner may enter it.
///
/// # Errors
/// This process may not mount, or the kernel has no such file system. Caused by the setting.
pub fn mount(dir: &Path) -> io::Result<()> {
    if memfd::ram_page(std::fs::File::open(dir)?)? == Some(Bytes(HUGE_SIZE as u64)) {
        return Ok(());
    }
    let target = CString::new(dir.as_os_str().as_bytes())?;
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    let options = c"pagesize=2M,mode=0700";
    // SAFETY: all arguments are C strings that live for the length of the call, which only reads them.
    let done = unsafe {
        libc::mount(c"ballast-pool".as_ptr(), target.as_ptr(), c"hugetlbfs".as_ptr(), flags, options.as_ptr().cast())
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns whether this descriptor's own opening of the file is the only one: no other descriptor, no mapping through
/// one, none in flight in a socket. The kernel grants a lease only then. The lease is returned at once.
///
/// # Errors
/// The file system has no leases.
pub fn is_only_holder(file: impl AsFd) -> io::Result<bool> {
    let fd = file.as_fd().as_raw_fd();
    let control = |command: libc::c_int, value: libc::c_int| -> io::Result<()> {
        // SAFETY: these commands take a number and touch no memory of this process.
        if unsafe { libc::fcntl(fd, command, value) } == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    // A process that opens the file in between waits, and the kernel sends us a signal, which kills by default.
    control(F_SETSIG, libc::SIGURG)?;
    match control(libc::F_SETLEASE, libc::F_WRLCK) {
        Ok(()) => {
            control(libc::F_SETLEASE, libc::F_UNLCK)?;
            Ok(true)
        }
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
        Err(error) => Err(error),
    }
}

/// `F_SETSIG` of Linux, which `libc` does not have for all targets.
const F_SETSIG: libc::c_int = 10;

/// Allocate the pages for this thread from this node alone; `None`: from any.
///
/// # Errors
/// There is no such node, or the kernel has no NUMA.
pub fn on_node(node: Option<u32>) -> io::Result<()> {
    const MOST: usize = 1024;
    let mut mask = [0u64; MOST / 64];
    if let Some(node) = node {
        let word = mask.get_mut(node as usize / 64).ok_or(io::ErrorKind::InvalidInput)?;
        *word = 1 << (node % 64);
    }
    let (mode, nodes, bits) = match node {
        Some(_) => (libc::MPOL_BIND, mask.as_ptr(), MOST + 1),
        None => (libc::MPOL_DEFAULT, std::ptr::null(), 0),
    };
    // SAFETY: the mask, if there is one, has the bits that are announced, and is read for the length of the call.
    let done = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, nodes, bits) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;

    #[test]
    fn a_file_that_somebody_maps_opens_or_sends_has_another_holder() {
        let made = memfd::create("ballast-test", Bytes(4096)).expect("memfd");
        // As a file that was opened by its name: the first descriptor of a memfd does not count.
        let file = memfd::reopen(made.as_fd(), true).expect("reopen");
        drop(made);
        let is_ours = || is_only_holder(&file).expect("ask");
        assert!(is_ours());
        let own = Mapping::shared(&file, 0, 4096).expect("map");
        assert!(is_ours(), "a mapping of our own opening is ours");
        let other = memfd::reopen(file.as_fd(), true).expect("reopen");
        assert!(!is_ours(), "a descriptor");
        let map = Mapping::shared(&other, 0, 4096).expect("map");
        drop(other);
        assert!(!is_ours(), "a mapping");
        drop(map);
        assert!(is_ours());
        let (one, two) = crate::scm::pair().expect("pair");
        let other = memfd::reopen(file.as_fd(), true).expect("reopen");
        crate::scm::send(&one, b"x", &[other.as_fd()]).expect("send");
        drop(other);
        assert!(!is_ours(), "it is on its way");
        drop((one, two, own));
        assert!(is_ours());
    }

    #[test]
    fn a_thread_takes_pages_from_a_node_that_there_is() {
        std::thread::spawn(|| {
            on_node(Some(0)).expect("every host has node 0");
            on_node(None).expect("any");
            assert!(on_node(Some(1023)).is_err() && on_node(Some(u32::MAX)).is_err());
        })
        .join()
        .expect("joined");
    }
}
