//! Which guest RAM this client was ever asked to zap: the rest of it is freed without asking an engine.
//!
//! Before: this process made its VM. After: `Client::freeing` asks for what was zapped only.
//! Threads: any; records are behind the table's lock. A zap is noted under [`ZapGate::zap`], and a VMM frees memory
//! under [`ZapGate::free`], so none is noted between a look at the record and the end of the VMM's call.
//! Units: bytes from the start of a region.
//! Promise: a page is never freed unasked if its only copy, or a second one, may be in a store.
//!
//! Why that is right: a copy is read only after each process of the VM has zapped the page, and its word leaves
//! Resident, Quarantine and Evicting only after the copy was read. So a page of a unit that was never zapped here is in
//! DRAM, and has no copy. If its zap is on the way, it waits until the VMM's call has ended, and the copy that is read
//! then has zeros. A hole whose page is Resident reads as zeros, which is what a discard is to leave.
//!
//! An engine that is asked for page after page of a unit brings the others back, and says so (`Settled`): the unit is
//! as if it had never been zapped, up to the next zap, which comes on the same socket after that.
//!
//! What an engine must hear of has no record: RAM of a process that joined a VM (pages may be far already), RAM that
//! was plugged (another process may have had it before), huge pages (a granule has many words), and memory on demand
//! (the pool counts it). While no keeper is there, an engine may serve the VM's other processes without this one: then
//! it asks, and if another was there first, the record ends.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ballast_base::units::MIB;
use ballast_base::{Bytes, GIB};

/// Bytes for which the record has one bit: the unit in which an engine watches memory.
const UNIT: u64 = 2 * MIB;
/// Most that is freed in one call while zaps wait: it takes some 50 ms if all of it is in memory.
pub const MOST: u64 = GIB;

/// Keeps zaps and unasked punches apart.
#[derive(Debug, Default)]
pub(crate) struct ZapGate(RwLock<()>);

impl ZapGate {
    /// A VMM may free memory unasked while this is held.
    pub fn free(&self) -> RwLockReadGuard<'_, ()> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no VMM thread frees memory unasked.
    pub fn zap(&self) -> RwLockWriteGuard<'_, ()> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The VMM may free the memory while it holds this; it drops this after its call.
#[derive(Debug)]
#[must_use = "a zap that came before the memory is free would find pages of it"]
pub struct Freeing<'a>(#[expect(dead_code, reason = "held")] pub(crate) Option<RwLockReadGuard<'a, ()>>);

/// The units of one region that were zapped.
#[derive(Debug)]
pub(crate) struct Record(Vec<u64>);

impl Record {
    /// Nothing of a region of this length.
    pub fn new(len: Bytes) -> Self {
        Self(vec![0; len.0.div_ceil(UNIT).div_ceil(64) as usize])
    }

    /// These bytes are about to be zapped.
    pub fn note(&mut self, (from, to): (u64, u64)) {
        for unit in from / UNIT..to.div_ceil(UNIT) {
            self.0[(unit / 64) as usize] |= 1 << (unit % 64);
        }
    }

    /// These bytes are as if they had never been zapped.
    pub fn forget(&mut self, (from, to): (u64, u64)) {
        for unit in from.div_ceil(UNIT)..to / UNIT {
            self.0[(unit / 64) as usize] &= !(1 << (unit % 64));
        }
    }

    /// Was a byte in a unit of these zapped?
    pub fn has_any(&self, (from, to): (u64, u64)) -> bool {
        (from / UNIT..to.div_ceil(UNIT)).any(|unit| self.0[(unit / 64) as usize] & 1 << (unit % 64) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zap_is_noted_for_its_whole_units_and_for_no_other() {
        let mut record = Record::new(Bytes(200 * UNIT + 4096));
        assert!(!record.has_any((0, 200 * UNIT + 4096)));
        record.note((64 * UNIT - 4096, 64 * UNIT + 4096));
        record.note((200 * UNIT, 200 * UNIT + 4096));
        let zapped = (0..201).filter(|unit| record.has_any((unit * UNIT, unit * UNIT + 4096))).collect::<Vec<_>>();
        assert_eq!(zapped, [63, 64, 200]);
        assert!(!record.has_any((62 * UNIT, 63 * UNIT)) && record.has_any((62 * UNIT, 63 * UNIT + 1)));
        assert!(!record.has_any((65 * UNIT, 200 * UNIT)), "ends are not in a range");
        record.forget((63 * UNIT, 65 * UNIT - 4096));
        assert!(!record.has_any((63 * UNIT, 64 * UNIT)), "forgotten");
        assert!(record.has_any((64 * UNIT, 65 * UNIT)), "not a whole unit");
    }
}
