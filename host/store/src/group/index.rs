//! The index of a group: its blobs by content, and how many pages name each. It is in memory; each engine builds its
//! own.
//!
//! Before: a page of a member is evicted or restored. After: the blob with its bytes, if one is known; or the fact that
//! no page here names a blob any more.
//! Threads: one at a time, by the locks of the group and its members. Units: references are pages of members.
//! Promise: a page's reference is noted as often as it was put and not freed, so that a handle freed twice, or under
//! another page, costs no other page a reference.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ballast_base::wire::VmId;

use crate::{Handle, PageKey};

/// The blobs and the members.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// The blobs, by their checksums.
    pub by_content: HashMap<u64, Blob>,
    /// References of blobs whose checksum belongs to another blob in `by_content`.
    pub others: HashMap<Handle, u32>,
    /// The members here.
    pub members: HashMap<VmId, Arc<Mutex<Pages>>>,
    /// Members, by their words in the arena, that have not come.
    pub missing: HashSet<u64>,
    /// Missing members that were here before: another engine has them, or is about to.
    pub parted: HashSet<u64>,
    /// When the kernel was last asked which of these are gone.
    pub asked: Option<Instant>,
    /// There may be blobs that no word names and that are not known here.
    pub unswept: bool,
}

/// A blob that a page may be equal to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blob {
    pub handle: Handle,
    pub references: u32,
}

/// The references of a member's pages.
#[derive(Debug, Default)]
pub(super) struct Pages {
    named: HashMap<u64, Handle>,
    /// Second references of pages: one copy is on its way while another is not freed yet.
    more: Vec<(u64, Handle)>,
}

/// The number of a page within its VM: regions have less than 2^36 pages.
pub(super) fn number_of(key: PageKey) -> u64 {
    u64::from(key.region.number) << 36 | key.page.0
}

impl Pages {
    /// Add one.
    pub fn add(&mut self, page: u64, handle: Handle) {
        match self.named.entry(page) {
            Entry::Vacant(place) => drop(place.insert(handle)),
            Entry::Occupied(_) => self.more.push((page, handle)),
        }
    }

    /// Does this page name it?
    pub fn has(&self, page: u64, handle: Handle) -> bool {
        self.named.get(&page) == Some(&handle) || self.more.contains(&(page, handle))
    }

    /// Named references that are not in `live`, which has a handle for each page.
    pub fn not_in(&self, live: &HashMap<u64, Handle>) -> Vec<(u64, Handle)> {
        let named = self.named.iter().map(|(page, handle)| (*page, *handle)).chain(self.more.iter().copied());
        named.filter(|(page, handle)| live.get(page) != Some(handle)).collect()
    }

    /// Remove one; returns false if there is none.
    pub fn remove(&mut self, page: u64, handle: Handle) -> bool {
        if self.named.get(&page) == Some(&handle) {
            self.named.remove(&page);
            return true;
        }
        let at = self.more.iter().position(|more| *more == (page, handle));
        at.map(|at| self.more.swap_remove(at)).is_some()
    }

    /// All references, in no order.
    pub fn handles(&self) -> impl Iterator<Item = Handle> {
        self.named.values().copied().chain(self.more.iter().map(|(_, handle)| *handle))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.named.len() + self.more.len()
    }
}

impl Index {
    /// The references of a blob.
    pub fn references(&mut self, handle: Handle, checksum: u64) -> Option<&mut u32> {
        match self.by_content.get_mut(&checksum) {
            Some(blob) if blob.handle == handle => Some(&mut blob.references),
            _ => self.others.get_mut(&handle),
        }
    }

    /// Add a reference of a known blob.
    pub fn add(&mut self, handle: Handle, checksum: u64) {
        if let Some(references) = self.references(handle, checksum) {
            *references += 1;
        } else if let Entry::Vacant(place) = self.by_content.entry(checksum) {
            place.insert(Blob { handle, references: 1 });
        } else {
            self.others.insert(handle, 1);
        }
    }

    /// No page names it any more, and it is freed.
    pub fn forget(&mut self, handle: Handle, checksum: u64) {
        if self.others.remove(&handle).is_none() {
            self.by_content.remove(&checksum);
        }
    }
}
