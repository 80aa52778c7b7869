//! Admission: checks the descriptors of an attach, once.
//!
//! Before: the keeper decoded an [`Attach`]. After: each descriptor has a meaning, or a person can read why not.
//! Promise: no message of a client makes us map a file that the client could shrink under us, or use a descriptor of
//! the wrong kind. The kind is checked only by calls that cannot wait: `fstat` on a file of a dead FUSE server would.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use anyhow::{Context, bail};
use ballast_base::wire::{Attach, RegionInfo, Span};
use ballast_base::{Bytes, Extent, Extents, PAGE_SIZE};
use ballast_sys::file_ranges::FileRanges;
use ballast_sys::memfd::{self, FileId};
use ballast_sys::uffd;
use rustix::fs::{OFlags, fcntl_get_seals, fcntl_getfl, fcntl_setfl};
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::store_files::{Files, reopen_ours};
use ballast_sys::slow_fd::SlowFd;

#[derive(Debug)]
pub struct Admitted {
    /// The userfaultfds, non-blocking and all different.
    pub uffds: Vec<SlowFd>,
    pub control: SlowFd,
    pub ram: Vec<Ram>,
    /// On resume: the client's escrow, reopened for writing.
    pub resumed: Option<Escrow>,
}

/// Files that clients keep for the next keeper.
#[derive(Debug)]
pub struct Escrow {
    pub state: SlowFd,
    pub stores: Vec<Files>,
}

#[derive(Debug)]
pub struct Ram {
    pub span: Span,
    pub guest_address: Option<u64>,
    pub extents: Extents,
    /// The files that extents name, each once.
    pub files: Vec<(Arc<SlowFd>, FileId)>,
}

impl Ram {
    /// Its extents: file, first byte, and the byte after the last one.
    pub fn places(&self) -> impl Iterator<Item = (FileId, u64, u64)> + use<'_> {
        let place = |extent: &Extent| (self.files[usize::from(extent.file)].1, extent.offset.0, extent.end());
        self.extents.list().iter().map(place)
    }

    pub fn ranges(all: &[Self]) -> FileRanges {
        all.iter().flat_map(Self::places).collect()
    }
}

pub fn admit(attach: &Attach, fds: Vec<SlowFd>) -> anyhow::Result<Admitted> {
    attach.validate()?;
    if fds.len() != attach.fd_count() {
        bail!("{} descriptors came with an attach that needs {}", fds.len(), attach.fd_count());
    }
    let missing = uffd::REQUIRED_FEATURES & !attach.uffd_features;
    if missing != 0 {
        bail!(
            "its userfaultfds lack features {missing:#x}; the kernel must be Linux 5.14 or newer (try `ballast doctor`)"
        );
    }
    let mut fds = fds.into_iter();
    let uffds: Vec<SlowFd> = fds.by_ref().take(usize::from(attach.shards)).collect();
    check_uffds(&uffds)?;
    let control = check_socket(fds.next().expect("counted above"))?;
    let files = fds.by_ref().take(usize::from(attach.files)).collect();
    let ram = check_ram(&attach.regions, files, attach.uffd_features)?;
    let resumed = match attach.resume {
        Some(vm) => {
            let state = reopen_ours(fds.next().expect("counted above"), "state")?;
            Some(Escrow { state, stores: Files::take_back(vm, &attach.stores, &mut fds)? })
        }
        None => None,
    };
    Ok(Admitted { uffds, control, ram, resumed })
}

/// The largest region: 16 TiB, whose table takes 32 GiB of address space.
const LARGEST_REGION: Bytes = Bytes(16 << 40);

struct RamFile {
    fd: Arc<SlowFd>,
    id: FileId,
    page: Bytes,
    size: Bytes,
}

/// Checks the files of regions that [`ballast_base::wire::check_regions`] has accepted, and whose faults arrive through
/// userfaultfds with these features.
pub fn check_ram(regions: &[RegionInfo], fds: Vec<SlowFd>, uffd_features: u64) -> anyhow::Result<Vec<Ram>> {
    let files = fds.into_iter().enumerate().map(|(number, fd)| check_file(number, fd));
    let files = files.collect::<anyhow::Result<Vec<_>>>()?;
    let mut seen = HashMap::new();
    for (number, file) in files.iter().enumerate() {
        // Two numbers for one file would hide that extents overlap.
        if let Some(other) = seen.insert(file.id, number) {
            bail!("RAM files {other} and {number} are the same file");
        }
    }
    regions.iter().map(|region| ram_of(region, &files, uffd_features)).collect()
}

fn ram_of(region: &RegionInfo, files: &[RamFile], uffd_features: u64) -> anyhow::Result<Ram> {
    let RegionInfo { span, guest_address, .. } = region;
    let at = span.hva;
    // The guest's address space is no larger than ours.
    let fits = |start: u64| start.checked_add(span.len.0).is_some_and(|end| end <= 1 << 56);
    if let Some(start) = guest_address.filter(|start| !fits(*start) || !start.is_multiple_of(PAGE_SIZE as u64)) {
        bail!("region {at} cannot begin at guest-physical address {start:#x}");
    }
    if span.len > LARGEST_REGION {
        bail!("region {at} of {} is larger than {LARGEST_REGION}", span.len);
    }
    let extents = region.checked()?;
    let mut used: Vec<u16> = extents.list().iter().map(|extent| extent.file).collect();
    used.sort_unstable();
    used.dedup();
    let first = used.first().and_then(|first| files.get(usize::from(*first)));
    let page = first.with_context(|| format!("the RAM of region {at} has no file"))?.page;
    if let Some(other) =
        used.iter().find(|number| files.get(usize::from(**number)).is_some_and(|file| file.page != page))
    {
        bail!("the RAM of region {at}: files {} and {other} have pages of different sizes", used[0]);
    }
    let sizes: Vec<_> = files.iter().map(|file| file.size).collect();
    extents.check(&sizes, page.0).with_context(|| format!("the RAM of region {at}"))?;
    if !at.0.is_multiple_of(page.0) {
        bail!("the RAM of region {at}: its address is not a multiple of its pages of {page}");
    }
    if page.0 > PAGE_SIZE as u64 && uffd_features & uffd::HUGETLB_FEATURES != uffd::HUGETLB_FEATURES {
        bail!("the RAM of region {at} has pages of {page}, and the userfaultfd does not serve such pages");
    }
    let extents = extents.renumbered(|file| used.partition_point(|other| *other < file) as u16);
    let files = used.iter().map(|number| &files[usize::from(*number)]);
    let files = files.map(|file| (file.fd.clone(), file.id)).collect();
    Ok(Ram { span: *span, guest_address: *guest_address, extents, files })
}

fn check_file(number: usize, fd: SlowFd) -> anyhow::Result<RamFile> {
    // Only files of these kinds have seals, and the kernel returns those without asking the file's own file system. The
    // later calls are safe for such files, too.
    if fcntl_get_seals(&fd).is_err() {
        bail!("RAM file {number} is not a shared memory file (memfd, tmpfs or hugetlbfs)");
    }
    let page = memfd::check_ram_file(&fd).with_context(|| format!("RAM file {number}"))?;
    let unreadable = || format!("Reading the properties of RAM file {number}");
    let flags = fcntl_getfl(&fd).with_context(unreadable)?;
    if flags & OFlags::RWMODE != OFlags::RDWR {
        bail!("RAM file {number} is not open for reading and writing");
    }
    let size = memfd::size(&fd).with_context(unreadable)?;
    let id = memfd::file_id(&fd).with_context(unreadable)?;
    Ok(RamFile { fd: Arc::new(fd), id, page, size })
}

fn check_uffds(fds: &[SlowFd]) -> anyhow::Result<()> {
    let mut seen = HashSet::new();
    for (index, fd) in fds.iter().enumerate() {
        check_uffd(index + 1, fd.as_fd())?;
        // Each has an inode of its own since Linux 5.12. Two fault workers that read one userfaultfd would get each
        // other's faults.
        let id = memfd::file_id(fd).with_context(|| format!("Looking at userfaultfd {}", index + 1))?;
        if !seen.insert(id) {
            bail!("descriptor {} is a userfaultfd that came before", index + 1);
        }
    }
    Ok(())
}

fn check_uffd(number: usize, fd: BorrowedFd<'_>) -> anyhow::Result<()> {
    let target = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default();
    if target.as_os_str() != "anon_inode:[userfaultfd]" {
        bail!("descriptor {number} is {target:?}, not a userfaultfd");
    }
    // A blocking userfaultfd polls as an error, and a fault worker that reads it would never notice that it should
    // stop.
    let nonblocking = fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
    nonblocking.context("Making the userfaultfd non-blocking")
}

fn check_socket(fd: SlowFd) -> anyhow::Result<SlowFd> {
    let is_local = sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX);
    if !is_local || sockopt::socket_type(&fd) != Ok(SocketType::SEQPACKET) {
        bail!("the descriptor after the userfaultfds is not a sequenced-packet Unix socket");
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    #[test]
    fn only_local_sequenced_packet_sockets_are_control_sockets() {
        let check = |fd: OwnedFd| check_socket(fd.into());
        let (ours, _theirs) = ballast_sys::scm::pair().expect("pair");
        check(ours).expect("one");
        let (stream, _other) = std::os::unix::net::UnixStream::pair().expect("pair");
        check(stream.into()).expect_err("a stream");
        check(std::fs::File::open("/dev/null").expect("open").into()).expect_err("no socket");
        check(std::net::UdpSocket::bind("127.0.0.1:0").expect("bind").into()).expect_err("not local");
    }
}
