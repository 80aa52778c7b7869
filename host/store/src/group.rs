//! The group store: keeps equal pages of several VMs once.
//!
//! Before: the evict side of a member (a VM of a group) hands over a page. After: its word names a blob that other
//! words, of this VM or another, may name as well; a touch restores a private copy.
//! Threads: any; look-ups hold a lock briefly, and nothing is compressed or compared under a lock. Units: one object is
//! one page; memory is charged in slabs of 64 KiB, to each member by its shares of the blobs.
//! Promise: a blob stays as long as a word of any member may name it. `Found` means the bytes that were put under that
//! key and handle: a member gets only pages that its own words name. The death or the damage of a member costs only
//! that member.
//!
//! The blobs are in an arena like the RAM store's, with checksums of the bytes alone, seeded by the group. A put looks
//! up blobs by that checksum, and then compares the bytes. Which words name a blob, and how often, is only in this
//! process's memory. Each engine builds both from the words of each member (`recover`), one member after the other. A
//! member whose words were not read yet is *missing*: it may name a blob that no member here names.
//!
//! The arena lists its members, and the kernel says which of them exist ([`ballast_sys::presence`]): each process with
//! a member's words (its engine, the keeper, the member's processes, in escrow) has an opening of the arena that shows
//! it. So the end of a member need not be reported.
//!
//! | Blob | References here | Words that name it | A put of equal bytes | Freed |
//! |---|---|---|---|---|
//! | known | n > 0 | n; fewer while a page is evicted or restored, or if its engine dies | adds a reference | no |
//! | known | 0, a member is missing | of missing members only | adds a reference | by a sweep, once none is missing |
//! | known | 0, none is missing | none | | at once, by the thread that dropped the last reference |
//! | not known | | of missing members; or none, if an engine died | stores it again | by a sweep, as above |
//! | damaged | n > 0 | n: each page is poisoned when it is touched | stores it again | its slot, by the next engine |
//!
//! | Member | Its references | Its word in the arena |
//! |---|---|---|
//! | joins, new | none yet | written before its first put |
//! | joins, with words | what its words name, from `recover` on; it is missing before | is there |
//! | joins while another engine has it | at most what its words named; missing until it is here alone | is there |
//! | is given to another engine | stay; it is missing until it is back | is there |
//! | ends here ([`GroupMember::end`]) | dropped | removed |
//! | ended while no engine had it | never known | removed when the kernel says that it is gone |
//!
//! *Two engines at once* (an upgrade) have different members of one arena, except for members that are just moving,
//! which both have; new VMs may join either. Neither engine frees blobs that the other's members name. A blob that this
//! engine knows is named by a member of the other only if that member was here before, and it is missing here from then
//! on, until it is back. So from the moment at which an engine is to give up its first member (`part`), it frees
//! nothing, and no put adds a reference to a blob that the other engine might free. A blob that this engine does not
//! know may belong to the other. So an engine sweeps only if it alone has the arena, which a lock shows
//! ([`ENGINES`](ballast_handover::arena::ENGINES)), and if all members that the arena lists are here. A member that
//! both have is missing in both, so neither frees a blob that the words of any member named when the second engine
//! opened it.

mod blobs;
mod index;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use ballast_base::wire::VmId;
use ballast_handover::arena::member as word_of;
use ballast_sys::lock::Lock;

pub use self::blobs::{Group, GroupUsage};
use self::index::{Pages, number_of};
use crate::codec;
use crate::handle::{self, Named};
use crate::{
    Attach, DurableStore, GetOutcome, Handle, IoContext, NearStore, PageBytes, PageKey, PutOutcome, Recovered, Store,
    StoreUsage,
};

/// A member's charge is estimated from this many references, or from all if it has fewer.
const SAMPLE: usize = 4096;

impl Group {
    /// Adds a member, with the opening of the arena that shows it. Unless it is `new`, it is missing until `recover`.
    ///
    /// # Errors
    /// The arena has no space for one more.
    pub fn join(self: &Arc<Self>, vm: VmId, opening: OwnedFd, new: bool) -> io::Result<GroupMember> {
        let (word, arena) = (word_of(vm), self.ram.arena());
        let mut index = self.index.locked();
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
    /// Shared with the other members.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Another engine will have the VM. Called before the other engine opens it; may be repeated.
    pub fn part(&self) {
        self.group.part(self.vm);
    }

    /// The VM has ended, and does not come back.
    pub fn end(&self) {
        let pages = std::mem::take(&mut *self.pages.locked());
        self.group.in_pieces(pages.handles(), |handle| self.group.drop_reference(handle));
        let mut index = self.group.index.locked();
        index.members.remove(&self.vm);
        index.missing.remove(&word_of(self.vm));
        index.parted.remove(&word_of(self.vm));
        self.group.strike(word_of(self.vm));
        drop(index);
        self.group.tidy();
    }

    fn names(&self, key: PageKey, handle: Handle) -> bool {
        key.region.vm == self.vm && self.pages.locked().has(number_of(key), handle)
    }

    /// The member's share of the memory: of each blob, the slot divided by the number of words that name it.
    fn charge(&self) -> u64 {
        let pages = self.pages.locked();
        let mut index = self.group.index.locked();
        let (mut bytes, mut seen) = (0.0, 0);
        // The order is that of a hash table, so the sample is arbitrary.
        for handle in pages.handles().take(SAMPLE) {
            seen += 1;
            let Some((checksum, slot)) = self.group.ram.checksum_and_slot(handle) else { continue };
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
            self.pages.locked().add(number_of(key), handle);
        }
        outcome
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, context: IoContext<'_>) -> GetOutcome {
        if let Named::SameFilled(filled) = Named::by(handle) {
            return filled.get(key, out);
        }
        if !self.names(key, handle) {
            return GetOutcome::Absent;
        }
        self.group.ram.get(self.group.key, handle, out, context)
    }

    fn free(&self, key: PageKey, handle: Handle) {
        if let Named::SameFilled(filled) = Named::by(handle) {
            if filled.may_be_of(key) {
                let _ = self.same_filled.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
            }
            return;
        }
        if key.region.vm == self.vm && self.pages.locked().remove(number_of(key), handle) {
            let _using = self.group.using();
            self.group.drop_reference(handle);
        }
    }

    fn tidy(&self) {
        self.group.ask();
        self.group.tidy();
    }

    fn usage(&self) -> StoreUsage {
        let pages = self.pages.locked().len() as u64 + self.same_filled.load(Relaxed);
        StoreUsage { pages, bytes: self.charge(), budget_bytes: self.group.ram.budget_limit().0 }
    }
}

impl DurableStore for GroupMember {
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

    fn attach(&self) -> Option<&dyn Attach> {
        Some(self)
    }
}

impl Attach for GroupMember {
    fn attach_shared(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        let mut blobs = live.filter(|(_, handle)| matches!(Named::by(*handle), Named::Blob { .. }));
        self.group.follow(&self.pages, &mut blobs);
    }

    fn attach_exclusive(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
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
}

impl NearStore for GroupMember {
    fn get_blob(&self, key: PageKey, handle: Handle, out: &mut PageBytes, blob: &mut Vec<u8>) -> GetOutcome {
        if let Named::SameFilled(_) = Named::by(handle) {
            blob.clear();
            return self.get(key, handle, out, IoContext::BACKGROUND);
        }
        if !self.names(key, handle) {
            return GetOutcome::Absent;
        }
        self.group.ram.get_blob(self.group.key, handle, out, blob)
    }

    fn still_has(&self, key: PageKey, handle: Handle, bytes: &PageBytes, blob: &[u8]) -> bool {
        let is_blob = matches!(Named::by(handle), Named::Blob { .. });
        (!is_blob || self.names(key, handle)) && self.group.ram.still_has(key, handle, bytes, blob)
    }

    fn takes_room(&self, handle: Handle) -> bool {
        matches!(Named::by(handle), Named::Blob { .. })
    }

    fn is_short(&self) -> bool {
        self.group.ram.is_short()
    }
}
