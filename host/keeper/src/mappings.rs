//! Mappings: how many of an engine's the VMs may take. A process may have `vm.max_map_count` of them, and one that has
//! no more cannot start a thread: the engine would end.
//!
//! Before: a VM is new, or gets RAM. After: it is within its user's share and that of all VMs, or it is refused.
//! Threads: the keeper's one. Units: mappings, estimated from above.
//! Promise: an engine has mappings left for its threads. A VM that returns is not refused.

use ballast_handover::state_file::RegionRecord;

use crate::keeper::Keeper;

/// Mappings for a VM: its state file, its stores, and threads that work for it.
const FOR_A_VM: u64 = 12;
/// Mappings for a region: its table of words, and what is remembered of it.
const FOR_A_REGION: u64 = 3;
/// Mappings for an extent: while the engine asks for the pages of hugetlbfs, and while far pages are written back.
const FOR_AN_EXTENT: u64 = 2;
/// A user's share is 1/N of all that a process may have.
const USERS: u64 = 8;
/// The kernel's own default, if it does not say.
const DEFAULT: u64 = 65_530;

/// Mappings for regions, each of a number of extents.
pub(crate) fn of_regions(extents: impl IntoIterator<Item = usize>) -> u64 {
    extents.into_iter().map(|extents| FOR_A_REGION + FOR_AN_EXTENT * extents as u64).sum()
}

/// Mappings for a new VM with such regions.
pub(crate) fn of_vm(extents: impl IntoIterator<Item = usize>) -> u64 {
    FOR_A_VM + of_regions(extents)
}

fn of_records(records: Vec<RegionRecord>) -> u64 {
    of_vm(records.iter().filter(|record| !record.removed).map(|record| record.extents.list().len()))
}

/// May VMs of this user take `more`, if they have `own`, all VMs have `all`, and a process may have `most`?
fn has_mappings(uid: u32, own: u64, all: u64, more: u64, most: u64) -> Result<(), String> {
    let (share, limit) = (most / USERS, most / 4 * 3);
    if uid != 0 && own + more > share {
        return Err(format!(
            "{more} mappings of the engine, and the {own} for this user's other VMs, are more than the {share} one \
             user may have (1/{USERS} of vm.max_map_count)"
        ));
    }
    if all + more > limit {
        return Err(format!(
            "{more} mappings of the engine, and the {all} for all other VMs, are more than {limit} (3/4 of \
             vm.max_map_count, which may be raised)"
        ));
    }
    Ok(())
}

impl Keeper {
    /// May this user's VMs take `more` of the engine's mappings?
    pub(crate) fn check_mappings(&self, uid: u32, more: u64) -> Result<(), String> {
        let (mut own, mut all) = (0, 0);
        let entries = self.vms.iter().chain(self.closing.iter().map(|closing| &closing.entry));
        for entry in entries {
            let has = of_records(entry.state.regions());
            all += has;
            own += if entry.uid == uid { has } else { 0 };
        }
        let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        let most = most.and_then(|most| most.trim().parse().ok()).unwrap_or(DEFAULT);
        has_mappings(uid, own, all, more, most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_users_vms_take_an_eighth_of_the_mappings_and_all_vms_leave_a_reserve() {
        let many = of_vm([1024]);
        let fit = (0..).take_while(|vms| has_mappings(7, vms * many, vms * many, many, DEFAULT).is_ok()).count();
        assert!(fit > 0 && fit as u64 * many <= DEFAULT / 8, "{fit} VMs");
        let why = has_mappings(7, DEFAULT / 8, DEFAULT / 8, 1, DEFAULT).expect_err("a user's share");
        assert!(why.contains("vm.max_map_count"), "{why}");
        assert_eq!(has_mappings(8, 0, DEFAULT / 2, many, DEFAULT), Ok(()), "another user");
        assert_eq!(has_mappings(0, DEFAULT / 2, DEFAULT / 2, many, DEFAULT), Ok(()), "root's VMs are everybody's");
        has_mappings(0, 0, DEFAULT / 4 * 3, many, DEFAULT).expect_err("the reserve for threads");
    }
}
