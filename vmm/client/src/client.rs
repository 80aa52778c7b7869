//! An attachment: the requests of a VMM's threads to Ballast.
//!
//! Before: `builder` has attached. After: the keeper has replied, or the engine has dropped its far copies.
//! Threads: any VMM thread. Units: bytes; addresses of this process.
//! Promise: `Ok` means that the request is done. After an error the memory in question is unchanged, except after
//! [`DiscardError::Failed`].

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::guest::{GuestRange, check_guest_ranges};
use ballast_base::units::MIB;
use ballast_base::wire::{ClientToKeeper, MAX_RANGES, Range, VmId};
use ballast_base::{Bytes, Hva, PAGE_SIZE};
use ballast_sys::lock::Lock;
use ballast_sys::memfd::FileId;
use ballast_sys::uffd::HUGETLB_FEATURES;

use crate::control::DiscardError;
use crate::error::RequestError;
use crate::link::{self, Asked};
use crate::ram::Ram;
use crate::regions::Region;
use crate::shared::{Shared, announce, cut};
use crate::visit;
use crate::zapped::Freeing;

/// An attachment. To drop it does not detach; see the crate's documentation.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
    vm: VmId,
}

impl Client {
    pub(crate) fn new(shared: Arc<Shared>, vm: VmId) -> Self {
        Self { shared, vm }
    }

    /// The id that the keeper gave this VM.
    pub fn vm(&self) -> VmId {
        self.vm
    }

    /// Size of the announced guest RAM.
    pub fn ram(&self) -> Bytes {
        self.shared.table.locked().total()
    }

    /// Announces hot-plugged RAM; call it before the guest can see the RAM. Without a keeper this succeeds at once, and
    /// the next attach message announces the region; if that keeper refuses it, a message on standard error says so,
    /// and the RAM is not managed. While far pages of an earlier VM are written back to this file, this waits, but only
    /// for seconds, because the VMM may stop its guest during the call. It then fails with [`RequestError::Later`], and
    /// the RAM must not be used: it may read as zeros where pages are far. After any other error the RAM is not
    /// managed, but a keeper that did not reply may know it: call [`Client::remove_region`] before you unmap it.
    pub fn add_region(&self, fd: OwnedFd, hva: Hva, len: Bytes, file_offset: Bytes) -> Result<(), RequestError> {
        self.add_ram(Ram::one(fd, hva, len, file_offset))
    }

    /// Like [`Client::add_region`], for RAM in several pieces, or with a known guest-physical address.
    pub fn add_ram(&self, ram: Ram) -> Result<(), RequestError> {
        let _quiet = visit::enter();
        let (shared, hva) = (&self.shared, ram.hva);
        let region = Region::checked(ram).map_err(RequestError::Invalid)?;
        if region.is_huge() && shared.features & HUGETLB_FEATURES != HUGETLB_FEATURES {
            let why = format!("RAM at {hva}: this kernel's userfaultfd has no huge pages");
            return Err(RequestError::Invalid(why.into()));
        }
        region.ram.register(&shared.uffds).map_err(|error| {
            let why = format!("RAM at {hva} comes on demand, and cannot be registered: {error}");
            RequestError::Invalid(why.into())
        })?;
        // Why the keeper asked to wait, or why this RAM cannot wait for the next keeper: nobody would serve its faults.
        let mut waits =
            region.ram.is_on_demand.then(|| "there is no keeper, and this memory comes on demand".to_owned());
        let (info, fds) = region.describe();
        let sent = fds.iter().map(|fd| fd.try_clone_to_owned()).collect::<std::io::Result<Vec<_>>>();
        let sent = sent.map_err(|error| RequestError::Invalid(error.to_string().into()))?;
        let mut region = Some(region);
        shared.table.locked().check_with(&mut region).map_err(RequestError::Invalid)?;
        let fds: Vec<_> = sent.iter().map(AsFd::as_fd).collect();
        let until = Instant::now() + shared.timing.answer;
        loop {
            let message = ClientToKeeper::AddRegion { region: info.clone(), files: fds.len() as u8 };
            let answer = shared.link.ask(&message, &fds, shared.timing.handshake, false, |_| {
                shared.table.locked().extend(region.take());
            });
            if matches!(answer, Ok(Asked::Later))
                && let Some(why) = waits
            {
                // The keeper that asked to wait is gone. Pages of this RAM may be far, so the next keeper must not get
                // it in an attach message after the VMM has begun to use it.
                drop(self.remove_region(hva));
                return Err(RequestError::Later(why));
            }
            match &answer {
                Ok(Asked::Again(why)) => {
                    // If it stayed in the table, an attach message or the next request would announce it.
                    region = shared.table.locked().take(hva);
                    if region.is_none() {
                        let why = format!("RAM at {hva} was unmapped before it was announced");
                        return Err(RequestError::Invalid(why.into()));
                    }
                    if Instant::now() >= until {
                        return Err(RequestError::Later(why.clone()));
                    }
                    waits = Some(why.clone());
                    std::thread::sleep(shared.timing.again);
                    continue;
                }
                // The service thread has confirmed it, or will with the next attach message.
                Ok(Asked::Done | Asked::Later) => {}
                Err(RequestError::Refused(_)) => drop(shared.table.locked().remove(hva)),
                Err(RequestError::Later(_)) => drop(self.remove_region(hva)),
                Err(_) => shared.table.locked().fail(hva),
            }
            return answer.map(drop);
        }
    }

    /// Sets the guest-physical ranges of the region at `hva`, once the VMM knows them. They replace earlier ranges; an
    /// empty list means unknown. Without a keeper this waits, for at most a minute.
    pub fn set_guest_ranges(&self, hva: Hva, ranges: &[GuestRange]) -> Result<(), RequestError> {
        const WAIT: Duration = Duration::from_secs(60);
        let _quiet = visit::enter();
        let region = self.regions().into_iter().find(|region| region.0 == hva);
        let (_, len) = region.ok_or_else(|| RequestError::Invalid(format!("no RAM region begins at {hva}").into()))?;
        check_guest_ranges(Bytes(len), ranges).map_err(RequestError::Invalid)?;
        let message = ClientToKeeper::GuestRanges { hva, ranges: ranges.to_vec() };
        loop {
            match self.shared.link.ask(&message, &[], self.shared.timing.answer, false, |_| ())? {
                Asked::Done => return Ok(()),
                // The next attach message does not contain them.
                Asked::Later | Asked::Again(_) => self.shared.link.wait_for_keeper(WAIT)?,
            }
        }
    }

    /// Reports how much of the guest's RAM is not managed now. Replaces the last value.
    pub fn set_unmanaged(&self, len: Bytes) -> Result<(), RequestError> {
        let _quiet = visit::enter();
        let why = "it is no shared memory file that was announced".into();
        let message = ClientToKeeper::Unmanaged { name: self.shared.name.clone(), len, why };
        match self.shared.link.ask(&message, &[], self.shared.timing.answer, false, |_| ())? {
            Asked::Done => Ok(()),
            // The next attach message does not contain it.
            Asked::Later | Asked::Again(_) => Err(RequestError::NoAnswer),
        }
    }

    /// The address ranges of announced RAM, region by region.
    pub fn regions(&self) -> Vec<Range> {
        let _quiet = visit::enter();
        self.shared.table.locked().iter().map(|region| (region.hva(), region.ram.span.len.0)).collect()
    }

    /// Removes RAM that is about to be unplugged: call it before the unmap, and unmap then, whatever it returns.
    pub fn remove_region(&self, hva: Hva) -> Result<(), RequestError> {
        /// Most keepers that are asked in turn: more do not die during one unplug.
        const MOST_KEEPERS: usize = 8;
        let _quiet = visit::enter();
        let shared = &self.shared;
        if !shared.table.locked().iter().any(|region| region.hva() == hva) {
            return Err(RequestError::Invalid(format!("no RAM region begins at {hva}").into()));
        }
        let mut answer = Ok(Asked::Later);
        let mut unlisted = false;
        // If the keeper dies before it replies, its successor may have read of the region, so it is asked, too.
        for _ in 0..MOST_KEEPERS {
            let timing = shared.timing;
            answer = shared.link.ask(&ClientToKeeper::RemoveRegion(hva), &[], timing.answer, false, |state| {
                // Without a keeper, the next attach message must not contain the region. With one, it stays until the
                // reply.
                if state.phase != link::Phase::Up {
                    unlisted = shared.table.locked().remove(hva);
                }
            });
            if unlisted || !matches!(answer, Ok(Asked::Later | Asked::Again(_))) {
                break;
            }
        }
        // No zap may hit the next mapping there.
        shared.table.locked().remove(hva);
        answer.map(|_: Asked| ())
    }

    /// From now on no page may be reclaimed, for this reason. `Ok` means that the keeper has confirmed it; without it,
    /// do not do anything that needs the pin. The keeper confirms a pin when all far pages are restored, so this waits
    /// while they return.
    pub fn pin(&self, reason: &str) -> Result<(), RequestError> {
        let _quiet = visit::enter();
        let reason = cut(reason.to_owned());
        let message = ClientToKeeper::Pin(reason.clone());
        let change = |state: &mut link::State| {
            state.pinned.get_or_insert(reason);
        };
        let limit = self.shared.timing.answer;
        self.shared.link.ask_while(&message, &[], limit, true, change, &self.pages_return()).map(drop)
    }

    /// A function that returns whether pages have returned since its last call.
    fn pages_return(&self) -> impl Fn() -> bool {
        let seen = std::cell::Cell::new(self.shared.table.locked().resident());
        move || {
            let now = self.shared.table.locked().resident();
            now > seen.replace(now)
        }
    }

    /// From now on [`crate::Builder::may_pin`] is true. `Ok` means that the keeper has confirmed it (now or earlier);
    /// without it, do not let the kernel or a device write to guest RAM past the page table.
    pub fn may_pin(&self) -> Result<(), RequestError> {
        let _quiet = visit::enter();
        self.shared.link.may_pin(self.shared.timing.answer)
    }

    /// Prepares to hand this process's RAM on: to a program that it executes, or to another VMM that opens the file.
    /// Restores each far page, and from now on reclaims none, for this reason, as after [`Client::pin`]. `Ok` means
    /// that all pages are in their files; without it, do not hand the RAM on. Takes a second per 100,000 far pages, and
    /// gives up when no page was restored for 30 seconds (no memory, or a store that does not respond).
    pub fn bring_back(&self, reason: &str) -> Result<(), RequestError> {
        let _quiet = visit::enter();
        let (shared, limit) = (&self.shared, self.shared.timing.handshake);
        let reason = cut(reason.to_owned());
        let message = ClientToKeeper::Pin(reason.clone());
        // If a keeper dies during this, the next one is asked: only a reply proves that the pages are back.
        loop {
            let change = |state: &mut link::State| {
                state.pinned.get_or_insert(reason.clone());
            };
            match shared.link.ask_while(&message, &[], limit, false, change, &self.pages_return())? {
                Asked::Done => return Ok(()),
                Asked::Later | Asked::Again(_) => shared.link.wait_for_keeper(limit)?,
            }
        }
    }

    /// Touches each page of guest RAM on this thread, so that none is far afterwards (if the VM is pinned). Pages that
    /// the guest never used become resident, too.
    pub fn restore_all(&self) -> std::io::Result<()> {
        let _quiet = visit::enter();
        let parts: Vec<Range> = {
            let table = self.shared.table.locked();
            table.iter().flat_map(|region| table.overlap(region.hva(), region.ram.span.len.0)).collect()
        };
        parts.into_iter().try_for_each(populate)
    }

    /// Announces that the VMM is about to free these ranges (balloon, free page reporting, virtio-mem): whole pages,
    /// each range inside one region, at most 1024 ranges. Free the memory only after `Ok`. After an error keep it: its
    /// content is unchanged, except after [`DiscardError::Failed`].
    pub fn discard(&self, ranges: &[Range]) -> Result<(), DiscardError> {
        let _quiet = visit::enter();
        if ranges.is_empty() {
            return Ok(());
        }
        if ranges.len() > MAX_RANGES {
            let text = format!("{} ranges in one call; at most {MAX_RANGES} are allowed", ranges.len());
            return Err(DiscardError::Invalid(text));
        }
        {
            let table = self.shared.table.locked();
            if let Some((hva, len)) = ranges.iter().find(|range| !table.allows(**range)) {
                let text = format!("{len} bytes at {hva} are not whole pages inside one RAM region");
                return Err(DiscardError::Invalid(text));
            }
        }
        let waiting_on =
            || announce("an engine has read a discard and does not reply; for safety the VMM thread keeps waiting");
        self.shared.control.discard(ranges.to_vec(), self.shared.timing.answer, waiting_on)
    }

    /// Like [`Client::discard`], for a VMM that frees the memory while it holds the result, and then drops it. Memory
    /// that is known to be in DRAM, without a copy anywhere, is freed without a message to an engine (see `zapped.rs`).
    pub fn freeing(&self, ranges: &[Range]) -> Result<Freeing<'_>, DiscardError> {
        if ranges.is_empty() {
            return Ok(Freeing(None));
        }
        let _quiet = visit::enter();
        let gate = self.shared.gate.free();
        if self.shared.link.phase() == link::Phase::Up && self.shared.table.locked().is_never_zapped(ranges) {
            return Ok(Freeing(Some(gate)));
        }
        drop(gate);
        self.discard(ranges).map(|()| Freeing(None))
    }

    /// The parts of `[hva, hva + len)` that are announced RAM.
    pub fn overlap(&self, hva: Hva, len: u64) -> Vec<Range> {
        let _quiet = visit::enter();
        self.shared.table.locked().overlap(hva, len)
    }

    /// The addresses at which `[offset, offset + len)` of a file is mapped as announced RAM.
    pub fn of_file(&self, file: FileId, offset: u64, len: u64) -> Vec<Range> {
        let _quiet = visit::enter();
        self.shared.table.locked().of_file(file, offset, len)
    }

    /// Announces that these addresses are about to be unmapped or mapped over. Regions that are covered completely are
    /// removed as by [`Client::remove_region`]; a part of a region is never zapped again, and so never reclaimed. This
    /// thread first touches that part to restore its far pages, because the next mapping there may be of this RAM, and
    /// raises no faults.
    pub fn unmapping(&self, hva: Hva, len: u64) -> Result<(), RequestError> {
        self.leave(hva, len, false)
    }

    /// Like [`Client::unmapping`], before a call that may fail: also restores far pages of completely covered regions.
    pub fn mapping_over(&self, hva: Hva, len: u64) -> Result<(), RequestError> {
        self.leave(hva, len, true)
    }

    fn leave(&self, hva: Hva, len: u64, may_fail: bool) -> Result<(), RequestError> {
        let _quiet = visit::enter();
        let (whole, parts) = self.shared.table.locked().unmapping(hva, len, may_fail);
        // One unreadable page must not keep the others far: a memory error may be the reason for the new mapping.
        for (hva, len) in parts {
            for piece in pieces(hva, len, 2 * MIB) {
                if populate(piece).is_err() {
                    pieces(piece.0, piece.1, PAGE_SIZE as u64).for_each(|page| drop(populate(page)));
                }
            }
        }
        whole.into_iter().map(|hva| self.remove_region(hva)).fold(Ok(()), Result::and)
    }
}

fn pieces(hva: Hva, len: u64, size: u64) -> impl Iterator<Item = Range> {
    let end = hva.0 + len;
    (hva.0..end).step_by(size as usize).map(move |at| (Hva(at), (end - at).min(size)))
}

fn populate((hva, len): Range) -> std::io::Result<()> {
    let advice = rustix::mm::Advice::LinuxPopulateRead;
    // SAFETY: MADV_POPULATE_READ changes no bytes and frees nothing; an address that is unmapped meanwhile is an error,
    // not a fault.
    unsafe { rustix::mm::madvise(hva.0 as *mut std::ffi::c_void, len as usize, advice)? };
    Ok(())
}
