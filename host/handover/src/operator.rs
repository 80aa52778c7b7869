//! A VM's settings by the operator and the governor, in its state file, where they outlive engines.
//!
//! Before: the keeper writes the limit with which a VM attached; the API and the governor change settings. After: the
//! reclaim worker reads them in its next round, and so does the next engine.
//! Threads: any; each word is one atomic.

use std::sync::atomic::Ordering;

use ballast_base::Bytes;

use crate::state_file::{Field, SETTINGS, StateFile};

impl StateFile {
    /// The operator's limit.
    pub fn limit(&self) -> Option<Bytes> {
        Some(self.get(Field::Limit)).filter(|limit| *limit != u64::MAX).map(Bytes)
    }

    /// Sets the operator's limit. The reclaim worker reads it in its next round.
    pub fn set_limit(&self, limit: Option<Bytes>) {
        self.set(Field::Limit, limit.map_or(u64::MAX, |limit| limit.0));
        self.remember();
    }

    /// The governor's limit. The lower of this and [`Self::limit`] holds.
    pub fn target(&self) -> Option<Bytes> {
        Some(self.get(Field::Target)).filter(|target| *target != 0).map(Bytes)
    }

    /// Sets the governor's limit. The reclaim worker reads it in its next round.
    pub fn set_target(&self, target: Option<Bytes>) {
        self.set(Field::Target, target.map_or(0, |target| target.0.max(1)));
        self.remember();
    }

    /// The operator's settings of the VM, as the daemon encodes them; all zero if there are none.
    pub fn settings(&self) -> [u64; SETTINGS] {
        std::array::from_fn(|at| self.words()[Field::Settings as usize + at].load(Ordering::Acquire))
    }

    /// Sets the operator's settings, word by word.
    pub fn set_settings(&self, settings: [u64; SETTINGS]) {
        for (at, word) in settings.into_iter().enumerate() {
            self.words()[Field::Settings as usize + at].store(word, Ordering::Release);
        }
        self.remember();
    }

    /// Whether an operator wants all of the VM in memory, whatever its limit.
    pub fn kept(&self) -> bool {
        self.get(Field::Kept) != 0
    }

    /// Sets whether all of the VM must be in memory.
    pub fn set_kept(&self, kept: bool) {
        self.set(Field::Kept, kept.into());
        self.remember();
    }
}
