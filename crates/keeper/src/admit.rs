//! Admit: is this attach what it claims to be? Everything about the descriptors is looked at here, once.
//!
//! Before: the keeper decoded an [`Attach`]. After: descriptors with meanings, or a reason a person understands.
//! Promise: nothing a client sends makes us map a file it could shrink under us, or use a descriptor as what it is not.
//! What a descriptor is, is asked only in ways that cannot wait: `fstat` on a file of a FUSE server that is gone would.

use std::collections::HashSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use ballast_base::wire::{Attach, RegionInfo};
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_handover::arena;
use ballast_sys::memfd::{self, FileId};
use ballast_sys::{direct, uffd};
use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_get_seals, fcntl_getfl, fcntl_setfl, fstat, makedev, statx};
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::closer::SentFd;

/// The descriptors of an admitted attach.
#[derive(Debug)]
pub struct Admitted {
    /// The userfaultfds, non-blocking, no two the same.
    pub uffds: Vec<SentFd>,
    /// The engine's end of the control socket.
    pub control: SentFd,
    /// One RAM file per region.
    pub ram: Vec<(SentFd, FileId)>,
    /// On resume: what the client had in escrow, opened anew for writing.
    pub resumed: Option<Escrow>,
}

/// What clients keep for the next keeper.
#[derive(Debug)]
pub struct Escrow {
    /// The state file.
    pub state: SentFd,
    /// The arena file.
    pub arena: SentFd,
    /// The file of the file store, as a place only, and its index, if there is one.
    pub file: Option<[SentFd; 2]>,
}

/// Check an attach and its descriptors.
pub fn admit(attach: &Attach, fds: Vec<SentFd>) -> Result<Admitted, String> {
    attach.validate()?;
    if fds.len() != attach.fd_count() {
        return Err(format!("{} descriptors came with an attach that needs {}", fds.len(), attach.fd_count()));
    }
    let missing = uffd::REQUIRED_FEATURES & !attach.uffd_features;
    if missing != 0 {
        return Err(format!(
            "its userfaultfds lack features {missing:#x}; the kernel must be Linux 5.14 or newer (try `ballast doctor`)"
        ));
    }
    let mut fds = fds.into_iter();
    let mut next = || fds.next().expect("counted above");
    let uffds: Vec<SentFd> = (0..attach.shards).map(|_| next()).collect();
    check_uffds(&uffds)?;
    let control = next();
    check_socket(control.as_fd())?;
    let ram = attach
        .regions
        .iter()
        .map(|region| check_ram(region, next(), attach.uffd_features))
        .collect::<Result<Vec<_>, String>>()?;
    for (index, (info, (_, id))) in attach.regions.iter().zip(&ram).enumerate() {
        let before = attach.regions.iter().zip(&ram).take(index);
        if let Some((other, _)) = before.into_iter().find(|(other, (_, file))| file == id && overlap(info, other)) {
            return Err(format!("regions {} and {} are the same bytes of one file", other.hva, info.hva));
        }
    }
    let resumed = match attach.resume {
        Some(_) => {
            let (state, arena) = (reopen_ours(next(), "state")?, reopen_ours(next(), "arena")?);
            let file = if attach.has_file {
                let (file, index) = (next(), reopen_ours(next(), "index")?);
                Some([place_named(file, &index)?, index])
            } else {
                None
            };
            Some(Escrow { state, arena, file })
        }
        None => None,
    };
    Ok(Admitted { uffds, control, ram, resumed })
}

/// Do two regions of one file share bytes of it? Two tables over the same bytes would each evict under the other's
/// feet.
pub fn overlap(a: &RegionInfo, b: &RegionInfo) -> bool {
    a.file_offset.0 < b.file_offset.0 + b.len.0 && b.file_offset.0 < a.file_offset.0 + a.len.0
}

/// The largest region: 16 TiB, whose table takes 32 GiB of address space.
const LARGEST_REGION: Bytes = Bytes(16 << 40);

/// Check the file of a region, whose faults arrive through a userfaultfd with these features.
pub fn check_ram(region: &RegionInfo, file: SentFd, uffd_features: u64) -> Result<(SentFd, FileId), String> {
    let at = region.hva;
    if region.len > LARGEST_REGION {
        return Err(format!("region {at} of {} is larger than {LARGEST_REGION}", region.len));
    }
    // Only files of these kinds have seals, and the kernel answers that without asking the file's own file system; then
    // the rest may be asked, too.
    if fcntl_get_seals(&file).is_err() {
        return Err(format!("the RAM of region {at} is not a shared memory file (memfd, tmpfs or hugetlbfs)"));
    }
    let page = memfd::check_ram_pages(&file, at.0, region.file_offset.0, region.len.0)
        .map_err(|error| format!("the RAM of region {at}: {error}"))?;
    if page.0 > PAGE_SIZE as u64 && uffd_features & uffd::HUGETLB_FEATURES != uffd::HUGETLB_FEATURES {
        return Err(format!(
            "the RAM of region {at} has pages of {page}, and the userfaultfd does not serve such pages"
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

fn check_uffds(fds: &[SentFd]) -> Result<(), String> {
    let mut seen = HashSet::new();
    for (index, fd) in fds.iter().enumerate() {
        check_uffd(index + 1, fd.as_fd())?;
        // Each has an inode of its own since Linux 5.12. Two fault workers that read one would get each other's faults.
        let id = memfd::file_id(fd).map_err(|error| format!("Looking at userfaultfd {}: {error}", index + 1))?;
        if !seen.insert(id) {
            return Err(format!("descriptor {} is a userfaultfd that came before", index + 1));
        }
    }
    Ok(())
}

fn check_uffd(number: usize, fd: BorrowedFd<'_>) -> Result<(), String> {
    let target = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default();
    if target.as_os_str() != "anon_inode:[userfaultfd]" {
        return Err(format!("descriptor {number} is {target:?}, not a userfaultfd"));
    }
    // A blocking one polls as an error, and a fault worker that reads it would never notice that it should stop.
    let nonblocking = fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
    nonblocking.map_err(|error| format!("Making the userfaultfd non-blocking: {error}"))
}

/// Is it a file of the shared-memory file system? Only such files (and huge-page files) have seals, and the kernel
/// answers that without asking the file's own file system; then the rest may be asked, too.
fn is_shmem(fd: impl AsFd) -> std::io::Result<bool> {
    Ok(fcntl_get_seals(&fd).is_ok() && memfd::is_shmem(&fd)?)
}

fn check_socket(fd: BorrowedFd<'_>) -> Result<(), String> {
    let is_local = sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX);
    if !is_local || sockopt::socket_type(fd) != Ok(SocketType::SEQPACKET) {
        return Err("the descriptor after the userfaultfds is not a sequenced-packet Unix socket".into());
    }
    Ok(())
}

/// Open anew, for writing, a file that we made and gave away read-only. That it is ours is seen by its owner and mode:
/// nobody else can make a file of this user with mode 0600.
fn reopen_ours(fd: SentFd, what: &str) -> Result<SentFd, String> {
    let say = |error: &dyn std::fmt::Display| format!("Taking back the {what} file: {error}");
    let strange = "it is not the file this client was given";
    if !is_shmem(&fd).map_err(|error| say(&error))? {
        return Err(say(&strange));
    }
    let stat = fstat(&fd).map_err(|error| say(&error))?;
    let ours = stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o777 == 0o600;
    if !ours {
        return Err(say(&strange));
    }
    let opened = memfd::reopen(fd.as_fd(), true).map_err(|error| say(&error))?;
    Ok(fd.replaced_by(opened))
}

/// Take back the file on a disk that an index of ours names, as a place: only the engine opens it. Its identity is
/// asked without waiting for its file system: until it is known, it may be anything.
fn place_named(fd: SentFd, index: &SentFd) -> Result<SentFd, String> {
    let say = |error: &dyn std::fmt::Display| format!("Taking back the file of the file store: {error}");
    let index = index.as_fd().try_clone_to_owned().map_err(|error| say(&error))?;
    let named = arena::file_of(index).map_err(|error| say(&error))?;
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = statx(&fd, "", flags, StatxFlags::BASIC_STATS).map_err(|error| say(&error))?;
    let found = FileId { dev: makedev(stat.stx_dev_major, stat.stx_dev_minor), ino: stat.stx_ino };
    if found != named {
        return Err(say(&"it is not the file this client was given"));
    }
    let place = direct::place_of(fd.as_fd()).map_err(|error| say(&error))?;
    Ok(fd.replaced_by(place))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::closer::Closer;
    use ballast_needs::skip;
    use std::os::fd::OwnedFd;

    #[test]
    fn memory_files_are_told_from_others_without_asking_their_file_system() {
        let memfd = memfd::create("ballast-test", Bytes(4096)).expect("memfd");
        assert!(is_shmem(&memfd).expect("fcntl"));
        let (reader, _writer) = std::io::pipe().expect("pipe");
        assert!(!is_shmem(&reader).expect("fcntl"));
        assert!(!is_shmem(std::fs::File::open("/proc/self/stat").expect("open")).expect("fcntl"));
        if memfd::is_shmem(std::fs::File::open("/dev/shm").expect("open")).expect("statfs") {
            let file = tempfile::tempfile_in("/dev/shm").expect("a file in a tmpfs");
            assert!(is_shmem(&file).expect("fcntl"), "RAM need not be a memfd");
        }
    }

    #[test]
    fn only_local_sequenced_packet_sockets_are_control_sockets() {
        let (ours, _theirs) = ballast_sys::scm::pair().expect("pair");
        assert_eq!(check_socket(ours.as_fd()), Ok(()));
        let (stream, _other) = std::os::unix::net::UnixStream::pair().expect("pair");
        check_socket(stream.as_fd()).expect_err("a stream");
        check_socket(std::fs::File::open("/dev/null").expect("open").as_fd()).expect_err("no socket");
        check_socket(std::net::UdpSocket::bind("127.0.0.1:0").expect("bind").as_fd()).expect_err("not local");
    }

    #[test]
    fn the_file_of_a_file_store_is_taken_back_only_if_its_index_names_it() {
        use ballast_store::{Budget, FileOptions, FileStore};
        let dir = tempfile::tempdir().expect("a directory");
        let made = FileStore::create(dir.path(), FileOptions::new(Budget::new(Bytes(2 << 20))));
        let Ok((_, file, index)) = made.inspect_err(|error| skip("disk", error)) else { return };
        let closer = Closer::new();
        let sent = |fd: OwnedFd| SentFd::new(fd, 0, closer.clone());
        let index = sent(index);
        let reader = direct::reopen(file.as_fd(), false).expect("reopen");
        let back = place_named(sent(reader), &index).expect("it is the one");
        let other = tempfile::tempfile_in(dir.path()).expect("a file");
        let refused = place_named(sent(other.into()), &index).expect_err("another file");
        assert!(refused.contains("not the file"), "{refused}");
        place_named(back, &sent(memfd::create("ballast-test", Bytes(4096)).expect("memfd"))).expect_err("no index");
    }

    #[test]
    fn a_state_file_is_taken_back_only_if_it_is_ours() {
        let closer = Closer::new();
        let sent = |fd: OwnedFd| SentFd::new(fd, 0, closer.clone());
        let theirs = memfd::create("ballast-test", Bytes(4096)).expect("memfd");
        reopen_ours(sent(theirs), "state").expect_err("mode 0777");
        let (reader, _writer) = std::io::pipe().expect("pipe");
        reopen_ours(sent(reader.into()), "state").expect_err("a pipe");
    }
}
