//! Two engines of one VM, in its state file: during an upgrade the next engine serves faults beside the leaving engine,
//! which does nothing else for the VM.
//!
//! Before: the engine of a VM was told to only serve its faults. After: one engine has the VM.
//! Threads: any.
//! Promise: from the file, a program can find and end each engine that may change anything of the VM.
//!
//! While there are two engines, the list of threads (`threads`) does not tell whose thread is whose. If one of them
//! dies, its whole process must be gone before another engine may repair the VM's words.

use std::sync::atomic::Ordering;

use crate::state_file::{FORMAT, Field, StateFile};

/// A bit beside the pid of the leaving engine: the other engine serves each process of the VM.
const FOLLOWED: u64 = 1 << 32;

impl StateFile {
    /// Records that this engine may open the VM beside the named one, which leaves. The keeper calls this before it
    /// gives the order.
    pub fn name_beside(&self, pid: u32, start_time: u64) {
        let Some((leaving, leaving_start)) = self.engine() else { return self.name_engine(pid, start_time) };
        self.set(Field::Layout, FORMAT.raise(self.stamp()).to_word());
        self.thread_list().share();
        // In this order: wherever the keeper dies here, the engine that serves is named.
        self.set(Field::LeavingStart, leaving_start);
        self.set(Field::LeavingPid, u64::from(leaving));
        self.set(Field::EngineStart, start_time);
        self.set(Field::EnginePid, u64::from(pid));
        self.remember();
    }

    /// Pid and start time of the leaving engine, while there are two.
    pub fn leaving(&self) -> Option<(u32, u64)> {
        Some((self.get(Field::LeavingPid) as u32, self.get(Field::LeavingStart))).filter(|engine| engine.0 != 0)
    }

    pub(crate) fn is_one_of_two(&self, pid: u32, start_time: u64) -> bool {
        let this = Some((pid, start_time));
        self.leaving().is_some() && (self.leaving() == this || self.engine() == this)
    }

    /// Records that this engine serves the VM beside another one; returns its epoch.
    pub fn open_beside(&self, pid: u32, start_time: u64) -> u64 {
        self.begin_epoch(pid, start_time)
    }

    /// Records that the second engine serves each process of the VM: if the keeper dies now, that engine continues
    /// alone.
    pub fn set_followed(&self) {
        if self.leaving().is_some() {
            self.words()[Field::LeavingPid as usize].fetch_or(FOLLOWED, Ordering::AcqRel);
        }
    }

    /// Whether the second engine serves each process of the VM.
    pub fn is_followed(&self) -> bool {
        self.leaving().is_some() && self.get(Field::LeavingPid) & FOLLOWED != 0
    }

    /// Records that the leaving engine has closed the VM: the other engine has it alone.
    pub fn has_left(&self) {
        let Some((pid, start_time)) = self.engine() else { return };
        self.thread_list().own(pid, start_time);
        self.forget_leaving();
        self.remember();
    }

    pub(crate) fn forget_leaving(&self) {
        if self.leaving().is_none() {
            return;
        }
        self.set(Field::LeavingPid, 0);
        self.set(Field::LeavingStart, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Lost;
    use ballast_base::wire::VmId;

    const LOST: Lost = Lost { flags: 0, word: 0 };

    #[test]
    fn two_engines_are_named_until_one_has_left() {
        let state = StateFile::create(VmId([5; 16]), "test").expect("state");
        state.take_over(10, 99, LOST).expect("no journal");
        assert_eq!((state.engine(), state.leaving()), (Some((10, 99)), None));
        state.name_beside(12, 100);
        assert_eq!((state.engine(), state.leaving()), (Some((12, 100)), Some((10, 99))));
        assert_eq!(state.open_beside(12, 100), 2, "as many have opened it");
        assert!(!state.is_followed());
        state.set_followed();
        assert_eq!((state.is_followed(), state.leaving()), (true, Some((10, 99))));
        state.has_left();
        assert_eq!((state.engine(), state.leaving()), (Some((12, 100)), None));
        state.set_followed();
        assert!(!state.is_followed(), "nobody leaves");
    }

    #[test]
    fn of_two_engines_the_threads_are_unknown_and_none_is_forgotten() {
        let state = StateFile::create(VmId([5; 16]), "test").expect("state");
        state.take_over(10, 99, LOST).expect("no journal");
        let old = state.list(7).expect("not fenced");
        state.name_beside(12, 100);
        state.open_beside(12, 100);
        let new = state.list(8).expect("not fenced");
        assert_eq!(state.threads(), [7, 8]);
        assert_eq!(state.fence_threads(10, 99), None, "all of it must be gone");
        assert_eq!(state.fence_threads(12, 100), None, "all of it must be gone");
        drop(old);
        state.has_left();
        assert_eq!(state.fence_threads(12, 100), Some(vec![8]));
        drop(new);
    }

    #[test]
    fn the_engine_that_takes_over_after_both_has_the_vm_alone() {
        let state = StateFile::create(VmId([5; 16]), "test").expect("state");
        state.take_over(10, 99, LOST).expect("no journal");
        state.name_beside(12, 100);
        state.take_over(14, 101, LOST).expect("no journal");
        assert_eq!((state.engine(), state.leaving()), (Some((14, 101)), None));
    }
}
