//! Why the state of a pool cannot be used, or is inconsistent.
//!
//! Before: a file was opened, or [`crate::map::Pool::validate`] was called. After: a message with names and places.
//! Causes: a program of another version; memory that failed; a bug. No guest and no VMM can write there.

use ballast_base::format::Unreadable;

use crate::map::unit::{Extent, SliceIdx};

/// An error in the state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// The file is not the state of a pool.
    #[error("Opening a pool: its first word is {0:#x}, not that of a pool")]
    Magic(u64),
    /// The program that wrote the state is too new, or too old.
    #[error("Opening a pool: {0}")]
    Version(Unreadable),
    /// The header contradicts itself or the file.
    #[error("The header of a pool: {0}")]
    Header(String),
    /// A byte that stands for no state.
    #[error("Opening a pool: {at} has the state byte {byte:#04x}, which is none")]
    State {
        /// The slice.
        at: SliceIdx,
        /// What is there.
        byte: u8,
    },
    /// The intent of the last writer is invalid.
    #[error("Opening a pool: its intent is {0:#x}, which is none")]
    Intent(u64),
    /// An entry of the map with an invalid place.
    #[error("Checking a pool: entry {entry} of the map, {extent} for VM slot {slot}: {why}")]
    Entry {
        /// Which one.
        entry: u32,
        /// Its slices.
        extent: Extent,
        /// Its VM slot.
        slot: u16,
        /// What is wrong.
        why: &'static str,
    },
    /// An invalid VM.
    #[error("Checking a pool: VM slot {slot}: {why}")]
    Vm {
        /// Which one.
        slot: u16,
        /// What is wrong.
        why: &'static str,
    },
    /// A slice that contradicts its frame, its brick, or the map.
    #[error("Checking a pool: {at}: {why}")]
    Slice {
        /// Which one.
        at: SliceIdx,
        /// What is wrong.
        why: &'static str,
    },
    /// The counts that this process keeps differ from the state.
    #[error("Checking a pool: the slices of a frame are not those that were counted")]
    Counts,
}
