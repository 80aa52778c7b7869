//! Unit: the stage of 2 MiB of a region, by which a whole unit may be mapped at once without its pages' locks.
//!
//! Before: reclaim zaps single pages of a unit that was mapped huge, or tracking zaps all of it. After: `coalesce`, or
//! the fault that records a touch, maps it huge again. `units.rs` has the unit's other data, on which no byte depends.
//! Threads: any; every change is one compare-exchange. The next engine begins with all units Plain.
//! Promise: from the acknowledgement of a zap for quarantine on, no page that is still in Quarantine becomes mapped.
//!
//! | Stage | Meaning | Changed by |
//! |---|---|---|
//! | Plain | pages are mapped one by one, under their locks | a thread that will map or watch it: to Arming |
//! | Arming | its words are being read | the reader: to Watched or Mapping if all are Resident. Reclaim: to Cancelled |
//! | Cancelled | its words are being read, and may change | the reader: to Plain |
//! | Watched | zapped; the next touch maps all of it | fault worker, tracker: to Mapping. Reclaim: to Plain |
//! | Mapping | its pages are being mapped | only its holder: to Plain. Reclaim waits; a fault is put aside |
//!
//! Why this is sound: a page is mapped under its lock ([`crate::page_state`]), **or with its whole unit in stage
//! Mapping**. Reclaim first marks words Quarantine, then disturbs their units ([`Unit::disturb`]), then zaps. A unit
//! gets to Mapping only through Arming. If Arming comes before the disturbance, the disturbance cancels it, or waits
//! until the unit was mapped, and the zap comes after. If Arming comes after it, the reader sees the words, which were
//! written before, and gives up. Both sides use read-modify-writes of one byte, so one of them is first, and the later
//! one sees all writes of the earlier one. A unit that is Cancelled cannot be armed by another thread: the first reader
//! would take that Arming for its own, although it read the words before the disturbance.
//!
//! A hole in a unit whose words are all Resident means zeros, so even a kernel that fills holes when it maps a unit
//! changes nothing that the guest can see.

use crate::sync::{AtomicU8, Ordering};

/// See the table above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Pages are mapped one by one.
    Plain = 0,
    /// Its words are being read.
    Arming = 1,
    /// Its words are being read, and it was disturbed.
    Cancelled = 2,
    /// The next touch maps all of it.
    Watched = 3,
    /// All of it is being mapped.
    Mapping = 4,
}

/// The byte with the stage of one unit.
#[derive(Clone, Copy, Debug)]
pub struct Unit<'a>(&'a AtomicU8);

impl<'a> Unit<'a> {
    /// The unit of this byte.
    pub fn new(byte: &'a AtomicU8) -> Self {
        Self(byte)
    }

    fn swap(self, from: Stage, to: Stage) -> bool {
        self.0.compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Its stage.
    pub fn stage(self) -> Stage {
        match self.0.load(Ordering::Acquire) {
            0 => Stage::Plain,
            1 => Stage::Arming,
            2 => Stage::Cancelled,
            3 => Stage::Watched,
            _ => Stage::Mapping,
        }
    }

    /// Returns whether all its pages are being mapped now.
    pub fn is_mapping(self) -> bool {
        self.stage() == Stage::Mapping
    }

    /// The caller has put pages of the unit in Quarantine, and zaps them next. Waits while the unit is Mapping.
    pub fn disturb(self, pause: impl Fn()) {
        loop {
            let stage = self.stage();
            // A read-modify-write even without a change: see the module.
            let to = match stage {
                Stage::Mapping => {
                    pause();
                    continue;
                }
                Stage::Arming | Stage::Cancelled => Stage::Cancelled,
                Stage::Watched | Stage::Plain => Stage::Plain,
            };
            if self.swap(stage, to) {
                return;
            }
        }
    }

    /// Changes Plain to Mapping, if `is_resident`, called after Arming, finds all its words Resident.
    pub fn map(self, is_resident: impl FnOnce() -> bool) -> Option<Mapping<'a>> {
        self.arm(Stage::Mapping, is_resident).then(|| Mapping(self))
    }

    /// Changes Plain to Watched, if `is_resident`, called after Arming, finds all words Resident. The caller then zaps.
    pub fn watch(self, is_resident: impl FnOnce() -> bool) -> bool {
        self.arm(Stage::Watched, is_resident)
    }

    /// Changes Watched to Mapping: the unit was touched, or tracking ends.
    pub fn enter(self) -> Option<Mapping<'a>> {
        self.swap(Stage::Watched, Stage::Mapping).then(|| Mapping(self))
    }

    fn arm(self, to: Stage, is_resident: impl FnOnce() -> bool) -> bool {
        if !self.swap(Stage::Plain, Stage::Arming) {
            return false;
        }
        let to = if is_resident() { to } else { Stage::Plain };
        if self.swap(Stage::Arming, to) {
            return to != Stage::Plain;
        }
        // Disturbed, perhaps more than once. Only this thread may change the stage.
        self.swap(Stage::Cancelled, Stage::Plain);
        false
    }
}

/// A unit in stage Mapping; Plain again when dropped.
#[derive(Debug)]
pub struct Mapping<'a>(Unit<'a>);

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        self.0.swap(Stage::Mapping, Stage::Plain);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_mapped_only_when_its_words_are_resident_and_no_other_thread_has_it() {
        let byte = AtomicU8::new(0);
        let unit = Unit::new(&byte);
        assert!(unit.map(|| false).is_none());
        assert!(unit.map(|| unit.map(|| true).is_none()).is_some(), "a unit that is Arming was armed again");
        assert_eq!(unit.stage(), Stage::Plain, "dropped");
        let mapping = unit.map(|| true).expect("free");
        assert!(unit.is_mapping() && unit.map(|| true).is_none());
        drop(mapping);
    }

    #[test]
    fn a_unit_disturbed_while_its_words_are_read_is_not_mapped() {
        let byte = AtomicU8::new(0);
        let unit = Unit::new(&byte);
        let read = || {
            unit.disturb(|| unreachable!("nobody maps it"));
            true
        };
        assert!(unit.map(read).is_none());
        assert_eq!(unit.stage(), Stage::Plain);
        let read = || {
            unit.disturb(|| unreachable!("nobody maps it"));
            assert!(unit.map(|| true).is_none() && !unit.watch(|| true), "armed again while its words are read");
            true
        };
        assert!(unit.map(read).is_none());
        assert!(unit.map(|| true).is_some());
    }
}
