//! Groups: the arenas in which VMs of a group store equal pages once, each opened once by this engine.
//!
//! Before: a member VM is opened, with an opening of its own of the arena. After: it shares the store with the members
//! that are here already.
//! Threads: the workers of VMs; the list is locked while an arena is opened.
//! Promise: two members of one arena have one store, as long as either is here.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ballast_base::wire::VmId;
use ballast_store::{Group, GroupMember, RamOptions};
use ballast_sys::memfd::{self, FileId};

/// The groups that have members here.
#[derive(Debug, Default)]
pub struct Groups(Mutex<Vec<(FileId, Weak<Group>)>>);

impl Groups {
    /// The store of this member. One that is not `new` may have words that name pages of it.
    ///
    /// # Errors
    /// The arena cannot be opened, or takes no more members.
    pub fn join(&self, opening: OwnedFd, vm: VmId, options: RamOptions, new: bool) -> std::io::Result<GroupMember> {
        let id = memfd::file_id(&opening)?;
        let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|(_, group)| group.strong_count() > 0);
        let known = groups.iter().find(|(other, _)| *other == id).and_then(|(_, group)| group.upgrade());
        let group = match known {
            Some(group) => group,
            None => {
                let group = Group::open(&opening, options)?;
                groups.push((id, Arc::downgrade(&group)));
                group
            }
        };
        drop(groups);
        group.join(vm, opening, new)
    }
}
