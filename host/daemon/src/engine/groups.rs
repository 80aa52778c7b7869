//! Groups: VMs of a group store equal pages once, in an arena that this engine opens once.
//!
//! Before: a member VM is opened, with its own opening of the arena. After: it shares the store with the members that
//! are open here already.
//! Threads: the workers of VMs; an arena's entry is locked while it is opened, which may take a second.
//! Promise: members of one arena have one store while any of them is open here. A group delays no member of another.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};

use ballast_base::wire::VmId;
use ballast_store::{Group, GroupMember, RamOptions};
use ballast_sys::lock::Lock;
use ballast_sys::memfd::{self, FileId};

type Entry = Arc<Mutex<Weak<Group>>>;

/// The groups with open members. Device and inode identify an arena: each is a memfd that a keeper made, whose inode
/// number is never used again, and the keeper takes back no file that another user could have made.
#[derive(Debug, Default)]
pub struct Groups(Mutex<Vec<(FileId, Entry)>>);

impl Groups {
    fn entry(&self, id: FileId) -> Entry {
        let mut groups = self.0.locked();
        // A thread that has an entry is just opening the group.
        let is_used = |entry: &Entry| Arc::strong_count(entry) > 1 || entry.locked().strong_count() > 0;
        groups.retain(|(_, entry)| is_used(entry));
        if let Some((_, entry)) = groups.iter().find(|(other, _)| *other == id) {
            return entry.clone();
        }
        let entry = Entry::default();
        groups.push((id, entry.clone()));
        entry
    }

    /// The store of this member. A member that is not `new` may have words that name pages in the store. Fails if the
    /// arena cannot be opened, or takes no more members.
    pub fn join(&self, opening: OwnedFd, vm: VmId, options: RamOptions, new: bool) -> std::io::Result<GroupMember> {
        let id = memfd::file_id(&opening)?;
        let entry = self.entry(id);
        let mut known = entry.locked();
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use ballast_base::Bytes;
    use ballast_handover::arena::{self, ENGINES};
    use ballast_store::Budget;
    use ballast_sys::presence;

    use super::*;

    #[test]
    fn a_group_that_another_engine_has_exclusively_delays_no_member_of_another_group() {
        let groups = Groups::default();
        let [kept, other] = [(); 2].map(|()| arena::create().expect("an arena"));
        let opening = |arena: &OwnedFd| memfd::reopen(arena.as_fd(), true).expect("an opening");
        let options = RamOptions::new(Budget::new(Bytes(1 << 20)));
        let join = |arena: &OwnedFd, vm| groups.join(opening(arena), VmId([vm; 16]), options.clone(), true);
        let keeps = opening(&kept);
        assert!(presence::alone(&keeps, ENGINES).expect("ask"), "as an engine that sweeps it");
        let id = memfd::file_id(&kept).expect("stat");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| join(&kept, 1).map(drop));
            let is_being_opened = || {
                let all = groups.0.locked();
                all.iter().any(|(known, entry)| *known == id && Arc::strong_count(entry) > 1)
            };
            while !is_being_opened() && !waits.is_finished() {
                std::thread::yield_now();
            }
            join(&other, 2).expect("another group");
            drop(keeps);
            // On a slow host it may have given up; then it tries again.
            assert!(waits.join().expect("no panic").is_ok() || join(&kept, 1).is_ok());
        });
    }
}
