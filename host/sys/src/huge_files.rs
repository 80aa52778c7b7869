//! Files that a pool consists of: their file system, the node of their pages, and whether another process has them.
//!
//! Before: `reserve` wants memory that outlives every process. After: files in a hugetlbfs of our own, or in a tmpfs.
//! Threads: any; [`on_node`] is about the calling thread alone. Units: bytes.
//! Promise: nothing here maps a file or reads one.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use ballast_base::Bytes;

use crate::memfd;

/// Mount a hugetlbfs of pages of this size at this directory, unless one is there. Only its owner may enter it.
///
/// # Errors
/// This process may not mount, or the kernel has no such file system. Caused by the setting.
pub fn mount(dir: &Path, page: Bytes) -> io::Result<()> {
    if memfd::ram_page(std::fs::File::open(dir)?)? != Some(page) {
        let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
        let options = CString::new(format!("pagesize={},mode=0700", page.0))?;
        mount_call(c"hugetlbfs", c"ballast-pool", dir, flags, Some(&options))?;
    }
    keep_private(dir)
}

/// Mount the directory as private: a door below a shared mount would appear below every other door, too.
fn keep_private(dir: &Path) -> io::Result<()> {
    mount_call(c"none", c"none", dir, libc::MS_PRIVATE, None)
}

/// Make a *door* to this file system: the directory `door` shows it as well, as a mount of its own. The kernel knows
/// whether a file is open that was opened through it.
pub fn open_door(dir: &Path, door: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().mode(0o700).create(door)?;
    mount_call(c"none", &path(dir)?, door, libc::MS_BIND, None)
}

/// Remove a door if no process has a file that was opened through it: no descriptor, not even one that only names it
/// (`O_PATH`), no mapping, none that travels in a socket. Returns whether it is gone, now or before.
pub fn close_door(door: &Path) -> io::Result<bool> {
    // SAFETY: the argument is a C string that lives for the length of the call, which only reads it.
    if unsafe { libc::umount2(path(door)?.as_ptr(), libc::UMOUNT_NOFOLLOW) } == -1 {
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EBUSY) => return Ok(false),
            Some(libc::ENOENT) => return Ok(true),
            // The kernel also returns this for a directory that is not a mount: then only the directory is left.
            Some(libc::EINVAL) if !is_mount(door)? => {}
            _ => return Err(error),
        }
    }
    std::fs::remove_dir(door).map(|()| true)
}

/// Is something mounted at this directory?
pub fn is_mount(dir: &Path) -> io::Result<bool> {
    use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
    let found = statx(CWD, dir, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT, StatxFlags::BASIC_STATS)?;
    // STATX_ATTR_MOUNT_ROOT, since Linux 5.8.
    const MOUNT_ROOT: u64 = 0x2000;
    Ok(found.stx_attributes.bits() & MOUNT_ROOT != 0)
}

fn path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn mount_call(
    kind: &CStr,
    source: &CStr,
    target: &Path,
    flags: libc::c_ulong,
    options: Option<&CStr>,
) -> io::Result<()> {
    let (target, options) = (path(target)?, options.map_or(std::ptr::null(), CStr::as_ptr));
    // SAFETY: all arguments are C strings that live for the length of the call, which only reads them; no options are a
    // null pointer.
    let done = unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, options.cast()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Allocate the calling thread's pages from this node alone; `None` allows every node.
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

/// While this value lives, the calling thread allocates on one node alone; afterwards on any node.
#[derive(Debug)]
pub struct OnNode(());

impl OnNode {
    /// `None` if no node is named, or this process may not have memory of it: then pages are of any node.
    pub fn of(node: Option<u32>) -> Option<Self> {
        on_node(Some(node?)).ok().map(|()| Self(()))
    }
}

impl Drop for OnNode {
    fn drop(&mut self) {
        // The default is always allowed.
        let _ = on_node(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;
    use crate::alone::in_time;
    use ballast_base::HUGE_SIZE;
    use std::os::fd::AsFd;

    fn unmount(pool: &Path) -> bool {
        std::process::Command::new("umount").arg(pool).status().expect("umount").success()
    }

    #[test]
    fn a_door_stays_while_a_file_that_came_through_it_is_named_open_mapped_or_on_its_way() {
        use rustix::fs::{Mode, OFlags, open};
        if !rustix::process::geteuid().is_root() {
            return ballast_testkit::skip("root", "only root mounts file systems");
        }
        let dir = tempfile::tempdir().expect("a directory");
        let (pool, door) = (dir.path().join("pool"), dir.path().join("pool/door"));
        std::fs::create_dir(&pool).expect("make");
        if let Err(why) = mount(&pool, Bytes(HUGE_SIZE as u64)) {
            return ballast_testkit::skip("hugetlb", why);
        }
        mount(&pool, Bytes(HUGE_SIZE as u64)).expect("again");
        let size = 2 * HUGE_SIZE;
        let own = std::fs::File::create_new(pool.join("file")).expect("make");
        own.set_len(size as u64).expect("size");
        open_door(&pool, &door).expect("a door");
        let other_door = pool.join("other");
        open_door(&pool, &other_door).expect("another door");
        assert!(!door.join("other/file").exists(), "doors are not seen through doors");
        let through = |flags| open(door.join("file"), flags | OFlags::CLOEXEC, Mode::empty()).expect("open");
        let is_gone = || close_door(&door).expect("ask");
        let named = through(OFlags::PATH);
        assert!(!is_gone(), "it is named");
        let file = memfd::reopen(named.as_fd(), true).expect("reopen");
        drop(named);
        assert!(!is_gone(), "it is open");
        let map = Mapping::shared(&file, 0, size).expect("map");
        drop(file);
        assert!(!is_gone(), "it is mapped");
        let (one, two) = crate::scm::pair().expect("pair");
        let file = through(OFlags::RDWR);
        drop(map);
        crate::scm::send(&one, b"x", &[file.as_fd()]).expect("send");
        drop(file);
        assert!(!is_gone(), "it is on its way");
        drop((one, two));
        assert!(in_time(is_gone) && !door.exists(), "only those who opened it elsewhere have it");
        assert!(is_gone(), "and again");
        std::fs::create_dir(&door).expect("what a dead process left");
        assert!(is_gone() && !door.exists());
        assert!(in_time(|| close_door(&other_door).expect("ask")));
        drop(own);
        assert!(in_time(|| unmount(&pool)));
    }

    #[test]
    fn a_thread_takes_pages_from_an_existing_node_only() {
        std::thread::spawn(|| {
            on_node(Some(0)).expect("every host has node 0");
            on_node(None).expect("any");
            assert!(on_node(Some(1023)).is_err() && on_node(Some(u32::MAX)).is_err());
        })
        .join()
        .expect("joined");
    }
}
