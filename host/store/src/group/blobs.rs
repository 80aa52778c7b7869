//! The blobs and the members of a group, in one engine.
//!
//! Before: `group` has a page of a member, or a member that joins or leaves. After: the page is a blob with one more
//! reference, or one less; blobs without references are freed when the head of `group.rs` says so.
//! Threads: any; look-ups hold a lock briefly, and nothing is compressed or compared under a lock. Units: one object is
//! one page.
//! Promise: a blob stays as long as a word of any member may name it.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock, TryLockError};
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_base::{PAGE_SIZE, PageIdx};
use ballast_handover::arena::{ENGINES, UNKNOWN_MEMBER, member as word_of};
use ballast_sys::lock::Lock;
use ballast_sys::{memfd, presence};

use super::index::{Index, Pages, number_of};
use crate::arena::{self, Arena};
use crate::codec;
use crate::ram::{RamOptions, RamStore};
use crate::{GetOutcome, Handle, IoContext, PageBytes, PageKey, PutOutcome, RegionKey, Store};

/// Time between two checks whether missing members are gone.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// Another engine formats a new arena, or sweeps one, in less than this; otherwise it was killed and has not ended yet.
const LEFT_WITHIN: Duration = Duration::from_secs(1);

/// References that a thread takes or drops before it lets a sweep have its turn, for which all puts and frees wait.
const PIECE: usize = 1024;

/// The contents of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupUsage {
    /// Pages of all members here that name a blob.
    pub references: u64,
    /// Number of blobs.
    pub blobs: u64,
    /// Memory of the blobs, in slabs.
    pub bytes: u64,
    /// Puts, since this engine started, that found an equal page.
    pub equal_puts: u64,
    /// Members whose words were not read yet: until then nothing is freed.
    pub missing: u64,
}

/// A group's arena, in one engine.
#[derive(Debug)]
pub struct Group {
    pub(super) ram: RamStore,
    /// The key under which all its blobs are sealed.
    pub(super) key: PageKey,
    /// A separate open file description, whose locks mark no member as present.
    file: OwnedFd,
    pub(super) index: Mutex<Index>,
    /// Shared by threads that take or free slots, or return memory; exclusive for a sweep.
    using: RwLock<()>,
    references: AtomicU64,
    equal_puts: AtomicU64,
}

impl Group {
    /// The group of this arena, without its members yet. A file without a layout becomes an empty arena.
    ///
    /// # Errors
    /// It is not a group's arena, or has a layout that this program cannot read. `WouldBlock`: a killed engine still
    /// has it exclusively; try again later.
    pub fn open(arena: impl AsFd, options: RamOptions) -> io::Result<Arc<Self>> {
        let reopen = || memfd::reopen(arena.as_fd(), true);
        let (fd, file) = (reopen()?, reopen()?);
        // Another engine may also find it new: the one that has it exclusively formats it.
        let begun = Instant::now();
        while ballast_handover::arena::is_new(&fd)? {
            if presence::alone(&file, ENGINES)? {
                if ballast_handover::arena::is_new(&fd)? {
                    ballast_handover::arena::format(arena::GROUP.layout, &fd, options.max_slabs)?;
                }
                break;
            }
            if begun.elapsed() > LEFT_WITHIN {
                // `WouldBlock` if that engine was killed while it formatted the arena.
                presence::announce(&file, ENGINES)?;
                return Err(io::Error::new(io::ErrorKind::TimedOut, "a process that has a group's new arena keeps it"));
            }
            std::thread::yield_now();
        }
        let id = memfd::file_id(&fd)?;
        let opened = Arena::open(&arena::GROUP, fd)?;
        // If the list of members is lost, nothing that they may name is ever freed.
        let words = opened.members().iter().map(|word| word.load(Relaxed)).filter(|word| *word != 0);
        let index = Index { missing: words.collect(), unswept: true, ..Index::default() };
        let mut seed = [0; 16];
        let [low, high] = [id.dev, id.ino].map(u64::to_le_bytes);
        seed.iter_mut().zip(low.into_iter().chain(high)).for_each(|(seed, byte)| *seed = byte);
        // Waits for an engine that sweeps, for milliseconds.
        presence::announce_within(&file, ENGINES, LEFT_WITHIN)?;
        Ok(Arc::new(Self {
            key: RegionKey { vm: VmId(seed), number: u32::MAX }.page(PageIdx(0)),
            file,
            ram: RamStore::on(opened, options),
            index: Mutex::new(index),
            using: RwLock::new(()),
            references: AtomicU64::new(0),
            equal_puts: AtomicU64::new(0),
        }))
    }

    /// Another engine has, or will have, a member that was here: see the head of `group.rs`.
    pub(super) fn part(&self, vm: VmId) {
        let mut index = self.index.locked();
        index.missing.insert(word_of(vm));
        index.parted.insert(word_of(vm));
        index.unswept = true;
    }

    /// The contents now.
    pub fn usage(&self) -> GroupUsage {
        let detail = self.ram.usage_detail();
        GroupUsage {
            references: self.references.load(Relaxed),
            blobs: detail.blob_pages,
            bytes: detail.slabs * crate::SLAB_BYTES as u64,
            equal_puts: self.equal_puts.load(Relaxed),
            missing: self.index.locked().missing.len() as u64,
        }
    }

    /// Texts of the losses of its arena that were not returned before.
    pub fn losses(&self) -> Vec<String> {
        self.ram.losses().0
    }

    /// Checks the counts, while nobody uses the group and no member is missing. The error is the first contradiction.
    pub fn validate(&self) -> Result<(), crate::Inconsistent> {
        self.ram.validate()?;
        // A member's lock is taken before the index's.
        let members: Vec<_> = self.index.locked().members.values().cloned().collect();
        let named: usize = members.iter().map(|pages| pages.locked().len()).sum();
        let index = self.index.locked();
        let references = index.by_content.values().map(|blob| blob.references).chain(index.others.values().copied());
        let (blobs, counted) = references.fold((0, 0), |(blobs, sum), one| (blobs + 1, sum + u64::from(one)));
        let (references, held) = (self.references.load(Relaxed), self.ram.usage_detail().blob_pages);
        if (named as u64, counted, blobs) == (references, references, held) {
            return Ok(());
        }
        Err(crate::Inconsistent(format!(
            "{named} pages name blobs, {counted} and {references} are counted; {blobs} blobs are known of {held}"
        )))
    }

    pub(super) fn using(&self) -> std::sync::RwLockReadGuard<'_, ()> {
        self.using.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `each` for all of these, under the shared lock, a piece at a time.
    pub(super) fn in_pieces<T>(&self, all: impl Iterator<Item = T>, mut each: impl FnMut(T)) {
        let mut all = all.peekable();
        while all.peek().is_some() {
            let _using = self.using();
            all.by_ref().take(PIECE).for_each(&mut each);
        }
    }

    pub(super) fn put(&self, bytes: &PageBytes) -> PutOutcome {
        let _using = self.using();
        let checksum = codec::checksum(self.key, bytes);
        let known = {
            let mut index = self.index.locked();
            let alone = index.parted.is_empty();
            let known = index.by_content.get_mut(&checksum).filter(|blob| alone && blob.references < u32::MAX);
            // From now on the blob stays, even if every other reference is dropped.
            known.map(|blob| {
                blob.references += 1;
                blob.handle
            })
        };
        if let Some(handle) = known {
            self.references.fetch_add(1, Relaxed);
            let mut kept: PageBytes = [0; PAGE_SIZE];
            if self.ram.get(self.key, handle, &mut kept, IoContext::BACKGROUND) == GetOutcome::Found && kept == *bytes {
                self.equal_puts.fetch_add(1, Relaxed);
                return PutOutcome::Stored(handle);
            }
            self.drop_reference(handle);
        }
        let outcome = self.ram.put(self.key, bytes);
        if let PutOutcome::Stored(handle) = outcome {
            self.index.locked().add(handle, checksum);
            self.references.fetch_add(1, Relaxed);
        }
        outcome
    }

    /// Drops a reference. The caller holds the shared lock.
    pub(super) fn drop_reference(&self, handle: Handle) {
        let freed = {
            let mut index = self.index.locked();
            // A blob with a damaged header is not found: its references and its slot stay.
            let Some((checksum, _)) = self.ram.checksum_and_slot(handle) else { return };
            let Some(references) = index.references(handle, checksum) else { return };
            *references = references.saturating_sub(1);
            let freed = *references == 0 && index.missing.is_empty();
            if freed {
                index.forget(handle, checksum);
            }
            freed
        };
        self.references.fetch_sub(1, Relaxed);
        if freed {
            self.ram.free(self.key, handle);
        }
    }

    /// Sets the references of a member. Returns their number, and how many more name no blob. A sweep between two
    /// pieces frees none of them: the member is missing until the end, or its former references are not dropped yet.
    pub(super) fn recover(
        &self,
        vm: VmId,
        pages: &Mutex<Pages>,
        live: &mut dyn Iterator<Item = (PageKey, Handle)>,
    ) -> (u64, u64) {
        let (mut named, mut missing) = (Pages::default(), 0);
        self.in_pieces(live, |(key, handle)| {
            let mut index = self.index.locked();
            match self.ram.checksum_and_slot(handle) {
                Some((checksum, _)) => {
                    index.add(handle, checksum);
                    self.references.fetch_add(1, Relaxed);
                    named.add(number_of(key), handle);
                }
                None => missing += 1,
            }
        });
        // Members that moved to the other engine may name the blobs that this one no longer names.
        self.find_missing_members(&mut self.index.locked());
        let before = std::mem::replace(&mut *pages.locked(), named);
        self.in_pieces(before.handles(), |handle| self.drop_reference(handle));
        self.index.locked().missing.remove(&word_of(vm));
        self.sweep();
        (pages.locked().len() as u64, missing)
    }

    /// Sets the references of a member that another engine has, too. Its words name no blobs but these.
    pub(super) fn follow(&self, pages: &Mutex<Pages>, live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        let before = std::mem::take(&mut *pages.locked());
        self.in_pieces(live, |(key, handle)| {
            // The other engine freed the others before it gave up any member.
            let Some((checksum, _)) = self.ram.checksum_and_slot(handle) else { return };
            self.index.locked().add(handle, checksum);
            self.references.fetch_add(1, Relaxed);
            pages.locked().add(number_of(key), handle);
        });
        self.in_pieces(before.handles(), |handle| self.drop_reference(handle));
    }

    /// This engine alone has a member now. The member's words name exactly these blobs, except for pages being freed.
    pub(super) fn own(&self, vm: VmId, pages: &Mutex<Pages>, live: &HashMap<u64, Handle>) {
        let gone = pages.locked().not_in(live);
        self.in_pieces(gone.into_iter(), |(page, handle)| {
            if pages.locked().remove(page, handle) {
                self.drop_reference(handle);
            }
        });
        {
            let mut index = self.index.locked();
            self.find_missing_members(&mut index);
            index.missing.remove(&word_of(vm));
        }
        self.sweep();
    }

    /// Frees blobs that no word names. If a member is missing or another engine has the arena, a later call does so.
    fn sweep(&self) {
        // While a thread waits for the exclusive lock, all puts and frees wait for it.
        if self.index.locked().missing.is_empty() {
            self.sweep_alone();
            // No caller waits, so the memory is returned at once.
            self.tidy();
        }
    }

    /// The lock admits one thread of this engine at a time: at the end, other engines may open the arena again.
    fn sweep_alone(&self) {
        let _alone_here = self.using.write().unwrap_or_else(PoisonError::into_inner);
        if !self.index.locked().missing.is_empty() || !presence::alone(&self.file, ENGINES).unwrap_or(false) {
            return;
        }
        let _shares_again = Shares(&self.file);
        let mut index = self.index.locked();
        self.find_missing_members(&mut index);
        if !index.missing.is_empty() {
            return;
        }
        index.unswept = false;
        index.by_content.retain(|_, blob| blob.references > 0);
        index.others.retain(|_, references| *references > 0);
        let live = index.by_content.values().map(|blob| blob.handle).chain(index.others.keys().copied());
        self.ram.sweep_only(live);
    }

    /// Adds the members that joined another engine to those missing here.
    fn find_missing_members(&self, index: &mut Index) {
        let here: Vec<u64> = index.members.keys().map(|vm| word_of(*vm)).collect();
        let words = self.ram.arena().members().iter().map(|word| word.load(Relaxed));
        index.missing.extend(words.filter(|word| *word != 0 && !here.contains(word)));
        index.unswept |= !index.missing.is_empty();
    }

    pub(super) fn ask(&self) {
        let mut index = self.index.locked();
        let now = Instant::now();
        if !index.unswept || index.asked.is_some_and(|asked| now - asked < ASK_EVERY) {
            return;
        }
        index.asked = Some(now);
        // If the check fails, the member counts as existing.
        let is_there = |word: &u64| *word == UNKNOWN_MEMBER || presence::is_present(&self.file, *word).unwrap_or(true);
        let gone: Vec<u64> = index.missing.iter().copied().filter(|word| !is_there(word)).collect();
        for word in &gone {
            index.missing.remove(word);
            index.parted.remove(word);
            self.strike(*word);
        }
        let all = index.missing.is_empty();
        drop(index);
        if all {
            self.sweep();
        }
    }

    /// Returns the memory of emptied slabs to the host, except during a sweep: it frees them itself, and they may have
    /// blobs again before this thread would punch them.
    pub(super) fn tidy(&self) {
        let using = self.using.try_read();
        if !matches!(using, Err(TryLockError::WouldBlock)) {
            self.ram.tidy();
        }
    }

    pub(super) fn strike(&self, word: u64) {
        let arena = self.ram.arena();
        for at in 0..arena.members().len() {
            arena.set_member(at, word, 0);
        }
    }
}

/// Lets other engines open the arena again when dropped, even by a panic.
struct Shares<'a>(&'a OwnedFd);

impl Drop for Shares<'_> {
    fn drop(&mut self) {
        // Weakening a held lock does not fail.
        let _ = presence::announce(self.0, ENGINES);
    }
}

#[cfg(test)]
mod tests;
