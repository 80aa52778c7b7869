//! Who a VM is, in its state file: the operator's UUID, the user and the process that attached it first.
//!
//! Before: the keeper writes it when the VM attaches for the first time. After: engines find the VM's settings by it.
//! Threads: any; each word is one atomic, and nobody changes one later.

use ballast_base::Uuid;

use crate::state_file::{Field, StateFile};

impl StateFile {
    /// The operator's UUID of the VM, if there is one.
    pub fn uuid(&self) -> Option<Uuid> {
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&self.get(Field::Uuid0).to_le_bytes());
        uuid[8..].copy_from_slice(&self.get(Field::Uuid1).to_le_bytes());
        (uuid != [0; 16]).then_some(Uuid(uuid))
    }

    /// The user that attached it and its process then, if they are known.
    pub fn owner(&self) -> Option<(u32, u32)> {
        let word = self.get(Field::Owner);
        ((word >> 32) as u32).checked_sub(1).map(|uid| (uid, word as u32))
    }

    /// Say so, of a new VM.
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

    /// Where its settings come from, as the daemon encodes it; zero if nobody has said so yet.
    pub fn sources(&self) -> u64 {
        self.get(Field::Sources)
    }

    /// Change that.
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
