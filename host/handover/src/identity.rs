//! The identity of a VM, in its state file: the operator's UUID, and the user and the process that first attached it.
//!
//! Before: the keeper writes it when the VM first attaches. After: engines find the VM's settings by it.
//! Threads: any; each word is one atomic, and does not change later.

use ballast_base::Uuid;

use crate::state_file::{Field, StateFile};

impl StateFile {
    /// The operator's UUID of the VM, if it has one.
    pub fn uuid(&self) -> Option<Uuid> {
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&self.get(Field::Uuid0).to_le_bytes());
        uuid[8..].copy_from_slice(&self.get(Field::Uuid1).to_le_bytes());
        (uuid != [0; 16]).then_some(Uuid(uuid))
    }

    /// Uid and pid that first attached it, if known.
    pub fn owner(&self) -> Option<(u32, u32)> {
        let word = self.get(Field::Owner);
        ((word >> 32) as u32).checked_sub(1).map(|uid| (uid, word as u32))
    }

    /// Sets the identity of a new VM.
    pub fn set_identity(&self, uuid: Option<Uuid>, uid: u32, pid: u32) {
        let (a, b) = uuid.map_or((0, 0), |Uuid(uuid)| {
            let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| uuid[at + byte]));
            (half(0), half(8))
        });
        self.set(Field::Uuid0, a);
        self.set(Field::Uuid1, b);
        self.set(Field::Owner, u64::from(uid.saturating_add(1)) << 32 | u64::from(pid));
        self.remember();
    }

    /// The sources of the VM's settings, as the daemon encodes them; 0 if not set.
    pub fn sources(&self) -> u64 {
        self.get(Field::Sources)
    }

    /// Sets the sources of the VM's settings.
    pub fn set_sources(&self, sources: u64) {
        self.set(Field::Sources, sources);
        self.remember();
    }
}

#[cfg(test)]
mod tests {
    use ballast_base::wire::VmId;

    use super::*;

    #[test]
    fn a_vm_keeps_its_identity_in_its_file() {
        let state = StateFile::create(VmId([1; 16]), "db").expect("a state file");
        assert_eq!((state.uuid(), state.owner(), state.sources()), (None, None, 0));
        let uuid = Uuid(std::array::from_fn(|at| at as u8));
        state.set_identity(Some(uuid), 0, 77);
        state.set_sources(5);
        let again = StateFile::open(state.fd().try_clone_to_owned().expect("a duplicate")).expect("the same file");
        assert_eq!((again.uuid(), again.owner(), again.sources()), (Some(uuid), Some((0, 77)), 5));
        again.set_identity(None, 64055, u32::MAX);
        assert_eq!((state.uuid(), state.owner()), (None, Some((64055, u32::MAX))));
    }
}
