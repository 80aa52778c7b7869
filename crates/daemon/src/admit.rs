//! Admit: is this attach what it claims to be? Everything about the descriptors is looked at here, once.
//!
//! Before: the keeper decoded an [`Attach`]. After: descriptors with meanings, or a reason a person understands.
//! Promise: nothing a client sends makes us map a file it could shrink under us, or use a descriptor as what it is not.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use ballast_base::Bytes;
use ballast_base::wire::{Attach, RegionInfo};
use ballast_sys::memfd::{self, FileId};
use ballast_sys::uffd;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};

/// The descriptors of an admitted attach.
#[derive(Debug)]
pub struct Admitted {
    /// The userfaultfd, non-blocking.
    pub uffd: OwnedFd,
    /// The engine's end of the control socket.
    pub control: OwnedFd,
    /// One RAM file per region.
    pub ram: Vec<(OwnedFd, FileId)>,
    /// On resume: state file and arena file, opened anew for writing.
    pub resumed: Option<(OwnedFd, OwnedFd)>,
}

/// Check an attach and its descriptors.
pub fn admit(attach: &Attach, fds: Vec<OwnedFd>) -> Result<Admitted, String> {
    attach.validate()?;
    if fds.len() != attach.fd_count() {
        return Err(format!("{} descriptors came with an attach that needs {}", fds.len(), attach.fd_count()));
    }
    let missing = uffd::REQUIRED_FEATURES & !attach.uffd_features;
    if missing != 0 {
        return Err(format!(
            "the userfaultfd lacks features {missing:#x}; the host kernel must be Linux 5.14 or newer (try `ballast doctor`)"
        ));
    }
    let mut fds = fds.into_iter();
    let mut next = || fds.next().expect("counted above");
    let (uffd, control) = (next(), next());
    check_uffd(uffd.as_fd())?;
    check_socket(control.as_fd())?;
    let ram = attach.regions.iter().map(|region| check_ram(region, next())).collect::<Result<Vec<_>, String>>()?;
    for (index, (info, (_, id))) in attach.regions.iter().zip(&ram).enumerate() {
        let before = attach.regions.iter().zip(&ram).take(index);
        if let Some((other, _)) = before.into_iter().find(|(other, (_, file))| file == id && overlap(info, other)) {
            return Err(format!("regions {} and {} are the same bytes of one file", other.hva, info.hva));
        }
    }
    let resumed = match attach.resume {
        Some(_) => Some((reopen_ours(next(), "state")?, reopen_ours(next(), "arena")?)),
        None => None,
    };
    Ok(Admitted { uffd, control, ram, resumed })
}

/// Do two regions of one file share bytes of it? Two tables over the same bytes would each evict under the other's feet.
pub fn overlap(a: &RegionInfo, b: &RegionInfo) -> bool {
    a.file_offset.0 < b.file_offset.0 + b.len.0 && b.file_offset.0 < a.file_offset.0 + a.len.0
}

/// The largest region: 16 TiB, whose table takes 32 GiB of address space.
const LARGEST_REGION: Bytes = Bytes(16 << 40);

/// Check the file of a region.
pub fn check_ram(region: &RegionInfo, file: OwnedFd) -> Result<(OwnedFd, FileId), String> {
    let at = region.hva;
    if region.len > LARGEST_REGION {
        return Err(format!("region {at} of {} is larger than {LARGEST_REGION}", region.len));
    }
    let shmem = memfd::is_shmem(&file).map_err(|error| format!("Looking at the RAM file of region {at}: {error}"))?;
    if !shmem {
        return Err(format!(
            "the RAM of region {at} is not a shared memory file (memfd or tmpfs); huge-page files are not managed yet"
        ));
    }
    let flags = fcntl_getfl(&file).map_err(|error| format!("Looking at the RAM file of region {at}: {error}"))?;
    if flags & OFlags::RWMODE != OFlags::RDWR {
        return Err(format!("the RAM file of region {at} is not open for reading and writing"));
    }
    let size = memfd::size(&file).map_err(|error| format!("Looking at the RAM file of region {at}: {error}"))?;
    if region.file_offset.0 + region.len.0 > size.0 {
        let Bytes(len) = region.len;
        return Err(format!("region {at} of {len} bytes is larger than its RAM file of {} bytes", size.0));
    }
    let id = memfd::file_id(&file).map_err(|error| format!("Looking at the RAM file of region {at}: {error}"))?;
    Ok((file, id))
}

fn check_uffd(fd: BorrowedFd<'_>) -> Result<(), String> {
    let target = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default();
    if target.as_os_str() != "anon_inode:[userfaultfd]" {
        return Err(format!("the first descriptor is {target:?}, not a userfaultfd"));
    }
    // A blocking one polls as an error, and a lane that reads it would never notice that it should stop.
    let nonblocking = fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
    nonblocking.map_err(|error| format!("Making the userfaultfd non-blocking: {error}"))
}

fn check_socket(fd: BorrowedFd<'_>) -> Result<(), String> {
    let is_socket = fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket);
    if !is_socket || rustix::net::sockopt::socket_type(fd) != Ok(rustix::net::SocketType::SEQPACKET) {
        return Err("the second descriptor is not a sequenced-packet socket".into());
    }
    Ok(())
}

/// Open anew, for writing, a file that we made and gave away read-only. That it is ours is seen by its owner and mode:
/// nobody else can make a file of this user with mode 0600.
fn reopen_ours(fd: OwnedFd, what: &str) -> Result<OwnedFd, String> {
    let say = |error: &dyn std::fmt::Display| format!("Taking back the {what} file: {error}");
    let stat = fstat(&fd).map_err(|error| say(&error))?;
    let ours = stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o777 == 0o600;
    if !ours || !memfd::is_shmem(&fd).map_err(|error| say(&error))? {
        return Err(say(&"it is not the file this client was given"));
    }
    memfd::reopen(fd.as_fd(), true).map_err(|error| say(&error))
}
