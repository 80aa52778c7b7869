//! Groups: the arenas in which VMs of a group store equal pages once, each opened once by this engine.
//!
//! Before: a member VM is opened, with an opening of its own of the arena. After: it shares the store with the members
//! that are here already.
//! Threads: the workers of VMs; an arena's entry is locked while it is opened, which may wait for a second.
//! Promise: two members of one arena have one store, as long as either is here. A group delays no member of another.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ballast_base::wire::VmId;
use ballast_store::{Group, GroupMember, RamOptions};
use ballast_sys::memfd::{self, FileId};

/// A group, once it is open and as long as it has members here.
type Entry = Arc<Mutex<Weak<Group>>>;

/// The groups that have members here.
#[derive(Debug, Default)]
pub struct Groups(Mutex<Vec<(FileId, Entry)>>);

impl Groups {
    /// The entry of the group of this arena.
    fn entry(&self, id: FileId) -> Entry {
        let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // One that a thread has is being opened.
        let is_used = |entry: &Entry| {
            Arc::strong_count(entry) > 1 || entry.lock().unwrap_or_else(PoisonError::into_inner).strong_count() > 0
        };
        groups.retain(|(_, entry)| is_used(entry));
        if let Some((_, entry)) = groups.iter().find(|(other, _)| *other == id) {
            return entry.clone();
        }
        let entry = Entry::default();
        groups.push((id, entry.clone()));
        entry
    }

    /// The store of this member. One that is not `new` may have words that name pages of it.
    ///
    /// # Errors
    /// The arena cannot be opened, or takes no more members.
    pub fn join(&self, opening: OwnedFd, vm: VmId, options: RamOptions, new: bool) -> std::io::Result<GroupMember> {
        let id = memfd::file_id(&opening)?;
        let entry = self.entry(id);
        let mut known = entry.lock().unwrap_or_else(PoisonError::into_inner);
        let group = match known.upgrade() {
            Some(group) => group,
            None => {
                let group = Group::open(&opening, options)?;
                *known = Arc::downgrade(&group);
                group
            }
        };
        drop(known);
        group.join(vm, opening, new)
    }
}
