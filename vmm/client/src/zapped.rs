//! The record of the guest RAM that this client ever zapped: other memory is freed without a message to an engine.
//!
//! Before: this process made its VM. After: `Client::freeing` asks an engine only about memory that was zapped.
//! Threads: any; records are behind the table's lock. A zap is recorded under [`ZapGate::zap`], and a VMM frees memory
//! under [`ZapGate::free`], so no zap is recorded between a look at the record and the end of the VMM's call. Units:
//! bytes from the start of a region.
//! Promise: no page is freed without a message if its only copy, or a second one, may be in a store.
//!
//! Why this is right: a copy is read only after each process of the VM has zapped the page, and its word leaves
//! Resident, Quarantine and Evicting only after the copy was read. So a page of a unit that was never zapped here is in
//! DRAM, and has no copy. If its zap is in flight, the zap waits until the VMM's call has ended, and the copy that is
//! then read has zeros. A hole whose page is Resident reads as zeros, as after a discard.
//!
//! If an engine is asked about page after page of a unit, it restores the unit's other pages and reports that
//! (`Settled`): the unit counts as never zapped until the next zap, which comes later on that socket.
//!
//! There is no record where an engine must know about each discard: RAM of a process that joined a VM (pages may be
//! far), RAM that was plugged (another process may have had it before), huge pages (a granule has many words), and
//! memory on demand (the pool counts it). Without a keeper, an engine may serve the VM's other processes without this
//! process: then an engine is asked, and if another process was there first, the record ends.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ballast_base::units::MIB;
use ballast_base::{Bytes, GIB};

/// Bytes per bit of the record: the unit in which an engine watches memory.
const UNIT: u64 = 2 * MIB;
/// Most memory freed in one call while zaps wait: takes some 50 ms if all of it is in DRAM.
pub const MOST: u64 = GIB;

/// Excludes zaps while memory is freed without a message.
#[derive(Debug, Default)]
pub(crate) struct ZapGate(RwLock<()>);

impl ZapGate {
    /// While the result is held, a VMM may free memory without a message.
    pub fn free(&self) -> RwLockReadGuard<'_, ()> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no VMM thread frees memory without a message.
    pub fn zap(&self) -> RwLockWriteGuard<'_, ()> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The VMM frees the memory while it holds this value, and then drops it.
#[derive(Debug)]
#[must_use = "a zap that came before the memory is free would find pages of it"]
pub struct Freeing<'a>(#[expect(dead_code, reason = "held")] pub(crate) Option<RwLockReadGuard<'a, ()>>);

#[derive(Debug)]
pub(crate) struct Record(Vec<u64>);

impl Record {
    pub fn new(len: Bytes) -> Self {
        Self(vec![0; len.0.div_ceil(UNIT).div_ceil(64) as usize])
    }

    /// Notes that these bytes will be zapped now.
    pub fn note(&mut self, (from, to): (u64, u64)) {
        for unit in from / UNIT..to.div_ceil(UNIT) {
            self.0[(unit / 64) as usize] |= 1 << (unit % 64);
        }
    }

    /// Notes that these bytes count as never zapped.
    pub fn forget(&mut self, (from, to): (u64, u64)) {
        for unit in from.div_ceil(UNIT)..to / UNIT {
            self.0[(unit / 64) as usize] &= !(1 << (unit % 64));
        }
    }

    pub fn has_any(&self, (from, to): (u64, u64)) -> bool {
        (from / UNIT..to.div_ceil(UNIT)).any(|unit| self.0[(unit / 64) as usize] & 1 << (unit % 64) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zap_is_recorded_for_its_whole_units_and_for_no_other() {
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
