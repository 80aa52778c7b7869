//! The index of a group, in each engine's memory: its blobs by content, and the number of pages that name each.
//!
//! Before: a page of a member is evicted or restored. After: the blob with its bytes, if one is known; or the fact that
//! no page here names a blob any more.
//! Threads: one at a time, by the locks of the group and its members. Units: references are pages of members.
//! Promise: a page's references are noted one by one, so that a handle that is freed twice, or under another page,
//! costs no other page a reference.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ballast_base::wire::VmId;

use crate::{Handle, PageKey};

#[derive(Debug, Default)]
pub(super) struct Index {
    /// The blobs, by their checksums.
    pub by_content: HashMap<u64, Blob>,
    /// References of blobs whose checksum has another blob in `by_content`.
    pub others: HashMap<Handle, u32>,
    pub members: HashMap<VmId, Arc<Mutex<Pages>>>,
    /// Words, in the arena, of members that are not here.
    pub missing: HashSet<u64>,
    /// Missing members that were here before: another engine has them, or will soon.
    pub parted: HashSet<u64>,
    /// The last check whether missing members are gone.
    pub asked: Option<Instant>,
    /// There may be unknown blobs that no word names.
    pub unswept: bool,
}

/// A blob to which new pages are compared.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blob {
    pub handle: Handle,
    pub references: u32,
}

#[derive(Debug, Default)]
pub(super) struct Pages {
    named: HashMap<u64, Handle>,
    /// Second references of a page: one copy is being put while the other is not freed yet.
    more: Vec<(u64, Handle)>,
}

/// The number of a page within its VM: a region has fewer than 2^36 pages.
pub(super) fn number_of(key: PageKey) -> u64 {
    u64::from(key.region.number) << 36 | key.page.0
}

impl Pages {
    pub fn add(&mut self, page: u64, handle: Handle) {
        match self.named.entry(page) {
            Entry::Vacant(place) => drop(place.insert(handle)),
            Entry::Occupied(_) => self.more.push((page, handle)),
        }
    }

    pub fn has(&self, page: u64, handle: Handle) -> bool {
        self.named.get(&page) == Some(&handle) || self.more.contains(&(page, handle))
    }

    /// References that are not in `live`, which has one handle per page.
    pub fn not_in(&self, live: &HashMap<u64, Handle>) -> Vec<(u64, Handle)> {
        let named = self.named.iter().map(|(page, handle)| (*page, *handle)).chain(self.more.iter().copied());
        named.filter(|(page, handle)| live.get(page) != Some(handle)).collect()
    }

    /// Returns false if there is no such reference.
    pub fn remove(&mut self, page: u64, handle: Handle) -> bool {
        if self.named.get(&page) == Some(&handle) {
            self.named.remove(&page);
            return true;
        }
        let at = self.more.iter().position(|more| *more == (page, handle));
        at.map(|at| self.more.swap_remove(at)).is_some()
    }

    pub fn handles(&self) -> impl Iterator<Item = Handle> {
        self.named.values().copied().chain(self.more.iter().map(|(_, handle)| *handle))
    }

    pub fn len(&self) -> usize {
        self.named.len() + self.more.len()
    }
}

impl Index {
    pub fn references(&mut self, handle: Handle, checksum: u64) -> Option<&mut u32> {
        match self.by_content.get_mut(&checksum) {
            Some(blob) if blob.handle == handle => Some(&mut blob.references),
            _ => self.others.get_mut(&handle),
        }
    }

    pub fn add(&mut self, handle: Handle, checksum: u64) {
        if let Some(references) = self.references(handle, checksum) {
            *references += 1;
        } else if let Entry::Vacant(place) = self.by_content.entry(checksum) {
            place.insert(Blob { handle, references: 1 });
        } else {
            self.others.insert(handle, 1);
        }
    }

    /// The blob has no references left, and is freed.
    pub fn forget(&mut self, handle: Handle, checksum: u64) {
        if self.others.remove(&handle).is_none() {
            self.by_content.remove(&checksum);
        }
    }
}
