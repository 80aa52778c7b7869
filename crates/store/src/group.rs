//! The group store: keeps equal pages of several VMs once.
//!
//! Before: the evict side of a VM that is a member of a group hands over a page. After: its word names a blob that
//! other words may name as well, of this VM or another; a touch restores a copy of the page's own.
//! Threads: any; look-ups hold a lock for a moment, and nothing is compressed or compared under a lock.
//! Units: one object is one page; memory is charged in slabs of 64 KiB, to each member by its shares of the blobs.
//! Promise: a blob stays as long as a word of any member may name it. `Found` means the bytes that were put under that
//! key and handle: a member gets only what its own pages name. One member's death or damage costs only that member.
//!
//! The blobs are in an arena like the RAM store's, with checksums of the bytes alone, seeded by the group. A put looks
//! blobs up by that checksum, which decides nothing: the bytes are compared then. Only this process's memory knows
//! which words name a blob: the blobs that the pages of each member name, and the number of references of each blob.
//! Each engine makes both anew from the words of each member (`recover`), one member after the other. Until all members
//! have come, a missing member may name a blob that nobody here names.
//!
//! So the arena lists its members, and the kernel says which of them are alive ([`presence`]): every process that has a
//! member's words (its engine, the keeper, the member's processes, in escrow) has an opening of the arena that says so.
//! Nobody has to report a member's end.
//!
//! | Blob | References here | Words that name it | A put of equal bytes | Becomes free |
//! |---|---|---|---|---|
//! | known | n > 0 | n; fewer while a page is evicted or restored, or its engine dies | one more reference | not now |
//! | known | 0, a member is missing | only those of the missing | one reference | when nobody is missing: swept |
//! | known | 0, nobody is missing | none | | at once, by the thread that took the last one |
//! | not known | | those of the missing; or none: a dead engine's | is stored again | when nobody is missing: swept |
//! | damaged | n > 0 | n: each is poisoned when it is touched | is stored again | its slot, by the next engine |
//!
//! | Member | Its references | Its word in the arena |
//! |---|---|---|
//! | comes, new | none yet | written before its first put |
//! | comes, with words | what its words name, from `recover` on; until then it is missing | there |
//! | comes, and another engine has it, too | what its words named, or less; missing until it is here alone | there |
//! | is given to another engine | stay as they are; it is missing until it is back | there |
//! | ends here ([`GroupMember::end`]) | dropped | taken away |
//! | ended while no engine had it | never known | taken away when the kernel says that it is gone |
//!
//! *Two engines at once* (an upgrade) have different members of one arena, except those that move at that moment, which
//! both have; new VMs may come to either. Neither engine frees blobs that the other's members name. A blob that one
//! engine knows is named by members of the other only if they were here before, and from then on they are missing here,
//! until they are back. So from the moment at which an engine is to give up its first member (`part`) it frees nothing,
//! and no put adds a reference of a blob, which the other engine might free. A blob that it does not know may be the
//! other's. So an engine sweeps only if it has the arena alone, which a lock says ([`arena::ENGINES`]), and if all
//! members that the arena names are here. A member that both have is missing in both, so neither frees a blob that the
//! words of any member named when the second engine opened it.

mod index;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_base::{PAGE_SIZE, PageIdx};
use ballast_handover::arena::{ENGINES, member as word_of};
use ballast_sys::{memfd, presence};

use self::index::{Index, Pages, number_of};
use crate::arena::{self, Arena};
use crate::codec;
use crate::handle::{self, Named};
use crate::ram::{RamOptions, RamStore};
use crate::{GetOutcome, Handle, PageBytes, PageKey, PutOutcome, Recovered, RegionKey, Store, StoreUsage};

/// Time between checks which of the missing members are gone.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// References from which a member's charge is estimated; if there are more, they are a sample.
const SAMPLE: usize = 4096;
/// Replaces a member's word: the list of members was lost with the arena's header.
const UNKNOWN: u64 = u64::MAX;

/// The contents of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupUsage {
    /// Pages of all members here that name a blob.
    pub references: u64,
    /// Blobs.
    pub blobs: u64,
    /// Memory they occupy, in slabs.
    pub bytes: u64,
    /// Puts that found an equal page, since this engine began.
    pub equal_puts: u64,
    /// Members whose words are yet to be read: until then nothing is freed.
    pub missing: u64,
}

/// A group's arena, in one engine.
#[derive(Debug)]
pub struct Group {
    ram: RamStore,
    /// The key under which all its blobs are sealed.
    key: PageKey,
    /// An opening of its own, which announces no member.
    file: OwnedFd,
    index: Mutex<Index>,
    /// Held by threads that take or free slots; exclusively for a sweep.
    using: RwLock<()>,
    references: AtomicU64,
    equal_puts: AtomicU64,
}

/// No thread leaves these half changed, so a poisoned lock is usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Group {
    /// The group of this arena, whose members are yet to come. A file without a layout becomes an empty arena.
    ///
    /// # Errors
    /// It is no such arena, or has a layout that this program cannot read.
    pub fn open(arena: impl AsFd, options: RamOptions) -> io::Result<Arc<Self>> {
        let reopen = || memfd::reopen(arena.as_fd(), true);
        let fd = reopen()?;
        if ballast_handover::arena::is_new(&fd)? {
            ballast_handover::arena::format(arena::GROUP.layout, &fd, options.max_slabs)?;
        }
        let id = memfd::file_id(&fd)?;
        let opened = Arena::open(&arena::GROUP, fd)?;
        if opened.header_was_lost() {
            // The members are unknown: nothing that they may name is freed any more.
            opened.set_member(0, 0, UNKNOWN);
        }
        let words = opened.members().iter().map(|word| word.load(Relaxed)).filter(|word| *word != 0);
        let index = Index { missing: words.collect(), unswept: true, ..Index::default() };
        let mut seed = [0; 16];
        let [low, high] = [id.dev, id.ino].map(u64::to_le_bytes);
        seed.iter_mut().zip(low.into_iter().chain(high)).for_each(|(seed, byte)| *seed = byte);
        let file = reopen()?;
        // Waits for an engine that sweeps, which takes milliseconds.
        presence::announce_after(&file, ENGINES)?;
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

    /// Adds a member, with the opening of the arena that announces it. A member that is not `new` is missing until
    /// `recover` has said what its words name.
    ///
    /// # Errors
    /// There is no space for one more.
    pub fn join(self: &Arc<Self>, vm: VmId, opening: OwnedFd, new: bool) -> io::Result<GroupMember> {
        let (word, arena) = (word_of(vm), self.ram.arena());
        let mut index = lock(&self.index);
        index.parted.remove(&word);
        let is_known = arena.members().iter().any(|other| other.load(Relaxed) == word);
        if !is_known && !(0..arena.members().len()).any(|at| arena.set_member(at, 0, word)) {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "the group has no room for one more member"));
        }
        if new {
            index.missing.remove(&word);
        } else {
            index.missing.insert(word);
            index.unswept = true;
        }
        let pages = index.members.entry(vm).or_default().clone();
        drop(index);
        Ok(GroupMember { group: self.clone(), vm, pages, same_filled: AtomicU64::new(0), _opening: opening })
    }

    /// Another engine has, or is to have, a member that was here: see above.
    fn part(&self, vm: VmId) {
        let mut index = lock(&self.index);
        index.missing.insert(word_of(vm));
        index.parted.insert(word_of(vm));
        index.unswept = true;
    }

    /// Its contents.
    pub fn usage(&self) -> GroupUsage {
        let detail = self.ram.usage_detail();
        GroupUsage {
            references: self.references.load(Relaxed),
            blobs: detail.blob_pages,
            bytes: detail.slabs * crate::SLAB_BYTES as u64,
            equal_puts: self.equal_puts.load(Relaxed),
            missing: lock(&self.index).missing.len() as u64,
        }
    }

    /// Losses of its arena not yet returned, in words.
    pub fn losses(&self) -> Vec<String> {
        self.ram.losses().0
    }

    /// Check its counts. Only meaningful while nobody uses it and nobody is missing.
    ///
    /// # Errors
    /// The first contradiction found.
    pub fn validate(&self) -> Result<(), crate::Inconsistent> {
        self.ram.validate()?;
        let index = lock(&self.index);
        let named: usize = index.members.values().map(|pages| lock(pages).len()).sum();
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

    fn using(&self) -> std::sync::RwLockReadGuard<'_, ()> {
        self.using.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Store a page, or add a reference of a blob that has its bytes.
    fn put(&self, bytes: &PageBytes) -> PutOutcome {
        let _using = self.using();
        let checksum = codec::checksum(self.key, bytes);
        let known = {
            let mut index = lock(&self.index);
            let alone = index.parted.is_empty();
            let known = index.by_content.get_mut(&checksum).filter(|blob| alone && blob.references < u32::MAX);
            // From here on the blob stays, whatever else names it.
            known.map(|blob| {
                blob.references += 1;
                blob.handle
            })
        };
        if let Some(handle) = known {
            self.references.fetch_add(1, Relaxed);
            let mut kept: PageBytes = [0; PAGE_SIZE];
            if self.ram.get(self.key, handle, &mut kept) == GetOutcome::Found && kept == *bytes {
                self.equal_puts.fetch_add(1, Relaxed);
                return PutOutcome::Stored(handle);
            }
            self.drop_reference(handle);
        }
        let outcome = self.ram.put(self.key, bytes);
        if let PutOutcome::Stored(handle) = outcome {
            lock(&self.index).add(handle, checksum);
            self.references.fetch_add(1, Relaxed);
        }
        outcome
    }

    /// One page fewer names a blob. Called while slots may be freed.
    fn drop_reference(&self, handle: Handle) {
        let freed = {
            let mut index = lock(&self.index);
            // A blob with a damaged header is not found: its references stay, and so does its slot.
            let Some((checksum, _)) = self.ram.look(handle) else { return };
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

    /// A member's pages name exactly these from now on. Returns how many of them do not exist.
    fn recover(&self, vm: VmId, pages: &Mutex<Pages>, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> (u64, u64) {
        let (mut named, mut missing) = (Pages::default(), 0);
        {
            let _using = self.using();
            for (key, handle) in live {
                let mut index = lock(&self.index);
                match self.ram.look(handle) {
                    Some((checksum, _)) => {
                        index.add(handle, checksum);
                        self.references.fetch_add(1, Relaxed);
                        named.add(number_of(key), handle);
                    }
                    None => missing += 1,
                }
            }
            let kept = named.len() as u64;
            // Members that went to the other engine may name the blobs that this one no longer names.
            self.look_for_others(&mut lock(&self.index));
            let before = std::mem::replace(&mut *lock(pages), named);
            before.handles().for_each(|handle| self.drop_reference(handle));
            lock(&self.index).missing.remove(&word_of(vm));
            if !lock(&self.index).missing.is_empty() {
                return (kept, missing);
            }
        }
        self.sweep();
        (lock(pages).len() as u64, missing)
    }

    /// A member's pages name these at most; another engine has it, too.
    fn follow(&self, pages: &Mutex<Pages>, live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        let _using = self.using();
        let before = std::mem::take(&mut *lock(pages));
        for (key, handle) in live {
            // The other engine freed the missing ones before it gave up any member.
            let Some((checksum, _)) = self.ram.look(handle) else { continue };
            lock(&self.index).add(handle, checksum);
            self.references.fetch_add(1, Relaxed);
            lock(pages).add(number_of(key), handle);
        }
        before.handles().for_each(|handle| self.drop_reference(handle));
    }

    /// A member is here alone. Its pages name exactly these, except what is freed at this moment.
    fn own(&self, vm: VmId, pages: &Mutex<Pages>, live: &HashMap<u64, Handle>) {
        {
            let _using = self.using();
            let gone = lock(pages).not_in(live);
            for (page, handle) in gone {
                if lock(pages).remove(page, handle) {
                    self.drop_reference(handle);
                }
            }
            let mut index = lock(&self.index);
            self.look_for_others(&mut index);
            index.missing.remove(&word_of(vm));
        }
        self.sweep();
    }

    /// Free blobs that no word names, if all members have come and no other engine has the arena; else later.
    fn sweep(&self) {
        if !lock(&self.index).missing.is_empty() || !presence::alone(&self.file, ENGINES).unwrap_or(false) {
            return;
        }
        let _shares_again = Shares(&self.file);
        self.sweep_alone();
    }

    fn sweep_alone(&self) {
        let _alone = self.using.write().unwrap_or_else(PoisonError::into_inner);
        let mut index = lock(&self.index);
        self.look_for_others(&mut index);
        if !index.missing.is_empty() {
            return;
        }
        index.unswept = false;
        index.by_content.retain(|_, blob| blob.references > 0);
        index.others.retain(|_, references| *references > 0);
        let live = index.by_content.values().map(|blob| blob.handle).chain(index.others.keys().copied());
        self.ram.sweep(live);
    }

    /// Members that came to another engine are missing here.
    fn look_for_others(&self, index: &mut Index) {
        let here: Vec<u64> = index.members.keys().map(|vm| word_of(*vm)).collect();
        let words = self.ram.arena().members().iter().map(|word| word.load(Relaxed));
        index.missing.extend(words.filter(|word| *word != 0 && !here.contains(word)));
        index.unswept |= !index.missing.is_empty();
    }

    /// Find out which of the missing members are gone.
    fn ask(&self) {
        let mut index = lock(&self.index);
        let now = Instant::now();
        if !index.unswept || index.asked.is_some_and(|asked| now - asked < ASK_EVERY) {
            return;
        }
        index.asked = Some(now);
        // If the check fails, the member counts as alive.
        let is_there = |word: &u64| *word == UNKNOWN || presence::is_present(&self.file, *word).unwrap_or(true);
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

    /// It is no member any more.
    fn strike(&self, word: u64) {
        let arena = self.ram.arena();
        for at in 0..arena.members().len() {
            arena.set_member(at, word, 0);
        }
    }
}

/// Lets other engines open the arena again when it is dropped, also by a panic.
struct Shares<'a>(&'a OwnedFd);

impl Drop for Shares<'_> {
    fn drop(&mut self) {
        // Weakening a held lock does not fail.
        let _ = presence::announce(self.0, ENGINES);
    }
}

/// The store of one member.
#[derive(Debug)]
pub struct GroupMember {
    group: Arc<Group>,
    vm: VmId,
    pages: Arc<Mutex<Pages>>,
    same_filled: AtomicU64,
    /// While it is open, it shows that this engine has the member's words.
    _opening: OwnedFd,
}

impl GroupMember {
    /// The group that it is a member of.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Another engine is to have the VM: called before that begins, and as often as it is said.
    pub fn part(&self) {
        self.group.part(self.vm);
    }

    /// The VM is gone and will not return.
    pub fn end(&self) {
        let pages = std::mem::take(&mut *lock(&self.pages));
        {
            let _using = self.group.using();
            pages.handles().for_each(|handle| self.group.drop_reference(handle));
        }
        let mut index = lock(&self.group.index);
        index.members.remove(&self.vm);
        index.missing.remove(&word_of(self.vm));
        index.parted.remove(&word_of(self.vm));
        self.group.strike(word_of(self.vm));
        drop(index);
        self.group.ram.tidy();
    }

    /// Its share of the memory: of each blob, its slot divided by the number of words that name it.
    fn charge(&self) -> u64 {
        let pages = lock(&self.pages);
        let mut index = lock(&self.group.index);
        let (mut bytes, mut seen) = (0.0, 0);
        // In the order of a hash table, which is arbitrary.
        for handle in pages.handles().take(SAMPLE) {
            seen += 1;
            let Some((checksum, slot)) = self.group.ram.look(handle) else { continue };
            let references = index.references(handle, checksum).map_or(1, |references| (*references).max(1));
            bytes += slot as f64 / f64::from(references);
        }
        if seen == 0 { 0 } else { (bytes / f64::from(seen) * pages.len() as f64) as u64 }
    }
}

impl Store for GroupMember {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        let fill = codec::fill_pattern(bytes);
        if let Some(handle) = fill.and_then(|pattern| handle::of_same_filled(key, pattern)) {
            self.same_filled.fetch_add(1, Relaxed);
            return PutOutcome::Stored(handle);
        }
        let outcome = self.group.put(bytes);
        if let PutOutcome::Stored(handle) = outcome {
            lock(&self.pages).add(number_of(key), handle);
        }
        outcome
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes) -> GetOutcome {
        if let Named::SameFilled(filled) = Named::by(handle) {
            return filled.get(key, out);
        }
        if key.region.vm != self.vm || !lock(&self.pages).has(number_of(key), handle) {
            return GetOutcome::Absent;
        }
        self.group.ram.get(self.group.key, handle, out)
    }

    fn free(&self, key: PageKey, handle: Handle) {
        if let Named::SameFilled(filled) = Named::by(handle) {
            if filled.may_be_of(key) {
                let _ = self.same_filled.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
            }
            return;
        }
        if key.region.vm == self.vm && lock(&self.pages).remove(number_of(key), handle) {
            let _using = self.group.using();
            self.group.drop_reference(handle);
        }
    }

    fn tidy(&self) {
        self.group.ask();
        self.group.ram.tidy();
    }

    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        let mut same_filled = 0;
        let mut blobs = live.filter(|(_, handle)| {
            let is_blob = matches!(Named::by(*handle), Named::Blob { .. });
            same_filled += u64::from(!is_blob);
            is_blob
        });
        let (kept_blobs, missing) = self.group.recover(self.vm, &self.pages, &mut blobs);
        self.same_filled.store(same_filled, Relaxed);
        Ok(Recovered { kept_blobs, missing, same_filled, ..Recovered::default() })
    }

    fn follow(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        let mut blobs = live.filter(|(_, handle)| matches!(Named::by(*handle), Named::Blob { .. }));
        self.group.follow(&self.pages, &mut blobs);
    }

    fn own(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        let (mut blobs, mut same_filled) = (HashMap::new(), 0);
        for (key, handle) in live {
            match Named::by(handle) {
                Named::SameFilled(_) => same_filled += 1,
                Named::Blob { .. } => drop(blobs.insert(number_of(key), handle)),
            }
        }
        self.same_filled.store(same_filled, Relaxed);
        self.group.own(self.vm, &self.pages, &blobs);
    }

    fn is_told(&self) -> bool {
        true
    }

    fn takes_room(&self, handle: Handle) -> bool {
        matches!(Named::by(handle), Named::Blob { .. })
    }

    fn is_short(&self) -> bool {
        self.group.ram.is_short()
    }

    fn usage(&self) -> StoreUsage {
        let pages = lock(&self.pages).len() as u64 + self.same_filled.load(Relaxed);
        StoreUsage { pages, bytes: self.charge(), budget_bytes: self.group.ram.budget_limit().0 }
    }
}
