//! RAM from the pool instead of QEMU's own huge pages.
//!
//! Before: `ballast run --pool` makes QEMU use a memfd of huge pages as its RAM, the *stand-in*, which QEMU puts at a
//! multiple of their size. After: parts of the pool's files are mapped where QEMU maps it, and the stand-in never has a
//! page. Later operations of QEMU on the stand-in are applied to those parts, or refused.
//! Threads: any VMM thread. Units: bytes; addresses of this process.
//! Promise: the stand-in is never mapped and never leaves this process, so that no process takes its holes for guest
//! RAM. Only the client has descriptors of the pool's files, and an `exec` closes them.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock};

use ballast_base::pool::{Nodes, Pages, Take};
use ballast_base::{Bytes, HUGE_SIZE, Hva};
use ballast_client::{Ram, Range, pool, visit};
use ballast_sys::lock::Lock;
use ballast_sys::memfd::{self, FileId};

use crate::announce::announce;
use crate::{identity, next};

/// The environment variable with the kind of pages of RAM (`2M`, `mix`, `1G`, `on-demand`). Without it: no pool.
pub const VARIABLE: &str = "BALLAST_POOL";
/// The environment variable with the NUMA nodes for RAM. Without it, any node.
pub const NODES: &str = "BALLAST_POOL_NODES";
pub const SOCKET: &str = "BALLAST_POOL_SOCKET";

/// A part of a stand-in, and the address of the pool's memory for it.
#[derive(Clone, Copy)]
struct StandIn {
    file: FileId,
    offset: u64,
    hva: u64,
    len: u64,
}

static STAND_INS: Mutex<Vec<StandIn>> = Mutex::new(Vec::new());

fn stand_ins() -> MutexGuard<'static, Vec<StandIn>> {
    STAND_INS.locked()
}

/// The value of the variable, if RAM must come from the pool.
fn wanted() -> Option<&'static str> {
    static WANTED: OnceLock<Option<String>> = OnceLock::new();
    WANTED.get_or_init(|| std::env::var(VARIABLE).ok().filter(|value| !value.is_empty())).as_deref()
}

pub fn is_wanted() -> bool {
    wanted().is_some()
}

/// Maps memory of the pool instead of a stand-in that the VMM is about to map. `None` if this is no stand-in. An error
/// is the errno for the VMM; the reason was announced.
///
/// # Safety
/// As `mmap`.
pub unsafe fn provide(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> Option<Result<Ram, c_int>> {
    let pages = wanted()?;
    let _quiet = visit::enter();
    // SAFETY: borrowed for calls that only query it, and return EBADF if it is not open.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    let page = memfd::ram_page(file).ok().flatten().filter(|page| page.0 >= HUGE_SIZE as u64)?;
    let file = memfd::file_id(file).ok()?;
    let stand_in = StandIn { file, offset: offset as u64, hva: addr as u64, len: len as u64 };
    let pages = pages.parse::<Pages>().map_err(|why| format!("{VARIABLE}: {why}"));
    let provided = pages.and_then(|pages| {
        if pages.size() != page {
            return Err(format!("its backend has pages of {page}, and {VARIABLE} is {pages}"));
        }
        if pages == Pages::OnDemand && flags & libc::MAP_LOCKED != 0 {
            // The lock would make the kernel allocate all of it before an engine serves its touches.
            return Err("memory that is locked does not come on demand".into());
        }
        if flags & libc::MAP_FIXED == 0 || !(addr as u64).is_multiple_of(page.0) {
            return Err(format!("the VMM maps its RAM at no fixed address, or not at a multiple of {page}"));
        }
        // SAFETY: the caller's promise: its mapping at this address may be replaced.
        unsafe { map(stand_in, prot, flags, pages) }
    });
    Some(provided.map_err(|why: String| {
        announce(format_args!("RAM of {} from the pool: {why}", Bytes(len as u64)));
        libc::ENOMEM
    }))
}

/// Takes memory for a stand-in, and maps it.
///
/// # Safety
/// The mapping at its address may be replaced.
unsafe fn map(place: StandIn, prot: c_int, flags: c_int, pages: Pages) -> Result<Ram, String> {
    let socket = std::env::var_os(SOCKET).map_or_else(|| PathBuf::from("/run/ballast/pool.sock"), PathBuf::from);
    let name = identity::name();
    let name = name.unwrap_or_else(|| format!("vm-{}", std::process::id()));
    let nodes = std::env::var(NODES).ok().filter(|value| !value.is_empty());
    let nodes: Nodes = nodes.map_or(Ok(Nodes::Any), |nodes| nodes.parse().map_err(|why| format!("{NODES}: {why}")))?;
    let size = Bytes(place.len);
    let extents = pool::take(&socket, &Take { name, size, pages, nodes: nodes.of_piece(size) });
    let extents = extents.map_err(|error| error.to_string())?;
    // Pages are allocated, except on demand, so filling the page tables costs less than the faults would.
    let populate = if pages == Pages::OnDemand { 0 } else { libc::MAP_POPULATE };
    let flags = libc::MAP_SHARED
        | libc::MAP_FIXED
        | libc::MAP_NORESERVE
        | populate
        | flags & (libc::MAP_LOCKED | libc::MAP_NONBLOCK);
    let mut at = place.hva;
    for piece in &extents {
        let (len, fd) = (piece.len.0 as usize, piece.fd.as_raw_fd());
        // SAFETY: the caller's promise, for a part of the range.
        let mapped = unsafe { next::mmap(at as *mut c_void, len, prot, flags, fd, piece.offset.0 as i64) };
        if mapped == libc::MAP_FAILED {
            return Err(format!("mapping {} of it: {}", piece.len, io::Error::last_os_error()));
        }
        at += piece.len.0;
    }
    stand_ins().push(place);
    Ok(Ram { hva: Hva(place.hva), extents, guest_address: None })
}

pub fn is_used() -> bool {
    !stand_ins().is_empty()
}

pub fn has(file: FileId) -> bool {
    stand_ins().iter().any(|stand_in| stand_in.file == file)
}

pub fn has_part(file: FileId, offset: u64, len: u64) -> bool {
    !parts(&stand_ins(), file, offset, len).is_empty()
}

/// Frees a piece of a stand-in, after `discard` has told the engine; a fill is refused. `None`: it is no stand-in.
pub fn punching(
    fd: c_int,
    mode: c_int,
    offset: i64,
    len: i64,
    discard: impl FnOnce(&[Range]) -> Result<(), c_int>,
) -> Option<Result<(), c_int>> {
    if fd < 0 || offset < 0 || len <= 0 || visit::inside() || !is_used() {
        return None;
    }
    let quiet = visit::enter();
    // SAFETY: borrowed for `fstat` only, which returns EBADF if it is not open.
    let file = memfd::file_id(unsafe { BorrowedFd::borrow_raw(fd) }).ok().filter(|file| has(*file))?;
    drop(quiet);
    if mode & libc::FALLOC_FL_PUNCH_HOLE == 0 {
        announce("refusing to fill guest RAM with fallocate: it is the pool's, and is present already");
        return Some(Err(libc::EOPNOTSUPP));
    }
    let ranges = parts(&stand_ins(), file, offset as u64, len as u64);
    Some(discard(&ranges).and_then(|()| ranges.iter().try_for_each(|range| remove(*range))))
}

/// The addresses at which this piece of a stand-in is mapped.
fn parts(all: &[StandIn], file: FileId, offset: u64, len: u64) -> Vec<Range> {
    let end = offset.saturating_add(len);
    let part = |at: &StandIn| {
        let (from, to) = (offset.max(at.offset), end.min(at.offset + at.len));
        (from < to).then(|| (Hva(at.hva + (from - at.offset)), to - from))
    };
    all.iter().filter(|stand_in| stand_in.file == file).filter_map(part).collect()
}

/// Returns pages of the pool's files to the kernel.
fn remove((hva, len): Range) -> Result<(), c_int> {
    // SAFETY: the VMM does not need the contents any more; the next touch of these addresses finds zeros.
    if unsafe { next::madvise(hva.0 as *mut c_void, len as usize, libc::MADV_REMOVE) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Forgets stand-ins at these addresses, which are about to be unmapped or mapped over.
pub fn unmapping(addr: *mut c_void, len: usize) {
    let (from, to) = (addr as u64, (addr as u64).saturating_add(len as u64));
    let mut all = stand_ins();
    if all.iter().all(|at| to <= at.hva || at.hva + at.len <= from) {
        return;
    }
    let rest = |at: &StandIn| {
        let before = StandIn { len: from.saturating_sub(at.hva).min(at.len), ..*at };
        let skip = to.saturating_sub(at.hva).min(at.len);
        let after = StandIn { offset: at.offset + skip, hva: at.hva + skip, len: at.len - skip, ..*at };
        if to <= at.hva || at.hva + at.len <= from { vec![*at] } else { vec![before, after] }
    };
    *all = all.iter().flat_map(rest).filter(|at| at.len > 0).collect();
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const FILE: FileId = FileId { dev: 1, ino: 2 };
    const OTHER: FileId = FileId { dev: 1, ino: 3 };

    fn at(file: FileId, offset: u64, hva: u64, len: u64) -> StandIn {
        StandIn { file, offset: offset * MIB, hva: hva * MIB, len: len * MIB }
    }

    #[test]
    fn a_punch_of_a_stand_in_punches_all_addresses_where_it_is_mapped() {
        let all = [at(FILE, 0, 100, 8), at(FILE, 8, 300, 8), at(OTHER, 0, 200, 8)];
        let found = |file, offset: u64, len: u64| {
            let ranges = parts(&all, file, offset, len).into_iter();
            ranges.map(|(hva, len)| (hva.0 / MIB, len / MIB)).collect::<Vec<_>>()
        };
        assert_eq!(found(FILE, 2 * MIB, 4 * MIB), [(102, 4)]);
        assert_eq!(found(FILE, 6 * MIB, 4 * MIB), [(106, 2), (300, 2)]);
        assert_eq!(found(OTHER, 0, u64::MAX), [(200, 8)]);
        assert_eq!(found(FILE, 16 * MIB, MIB), []);
        assert_eq!(found(FILE, u64::MAX, u64::MAX), []);
    }

    #[test]
    fn an_unmapped_part_leaves_the_stand_in_and_the_rest_keeps_its_place() {
        let unmap = |from: u64, len: u64| unmapping((from * MIB) as *mut c_void, (len * MIB) as usize);
        let now = || stand_ins().iter().map(|at| (at.offset / MIB, at.hva / MIB, at.len / MIB)).collect::<Vec<_>>();
        *stand_ins() = vec![at(FILE, 16, 100, 8), at(OTHER, 0, 200, 8)];
        assert!(is_used() && has(FILE));
        unmap(108, 92);
        assert_eq!(now(), [(16, 100, 8), (0, 200, 8)]);
        unmap(102, 2);
        assert_eq!(now(), [(16, 100, 2), (20, 104, 4), (0, 200, 8)]);
        unmap(90, 12);
        assert_eq!(now(), [(20, 104, 4), (0, 200, 8)]);
        unmap(106, 96);
        assert_eq!(now(), [(20, 104, 2), (2, 202, 6)]);
        unmap(0, 1000);
        assert!(!is_used() && !has(FILE) && !has(OTHER), "{:?}", now());
    }
}
