//! Why the state of a pool cannot be used, or is not what it must be.
//!
//! Before: a file was opened, or [`crate::Pool::validate`] was asked. After: a message with names and places.
//! Causes: a program of another version; memory that failed; a bug. No guest and no VMM can write there.

use ballast_base::format::Unreadable;

use crate::unit::{Extent, SliceIdx};

/// What is wrong with the state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// It is something else.
    #[error("Opening a pool: its first word is {0:#x}, not that of a pool")]
    Magic(u64),
    /// Written by a program that is too new, or too old.
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
    /// A byte that stands for no class.
    #[error("Opening a pool: frame {frame} has the class byte {byte:#04x}, which is none")]
    Class {
        /// The frame.
        frame: u32,
        /// What is there.
        byte: u8,
    },
    /// What was under way when the last writer ended cannot be understood.
    #[error("Opening a pool: its intent is {0:#x}, which is none")]
    Intent(u64),
    /// An entry of the map that points nowhere.
    #[error("Checking a pool: entry {entry} of the map, {extent} for VM slot {slot}: {why}")]
    Entry {
        /// Which one.
        entry: u32,
        /// What it names.
        extent: Extent,
        /// Whose it is.
        slot: u16,
        /// What is wrong.
        why: &'static str,
    },
    /// A VM that cannot be.
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
    /// What this process keeps beside the state is not what the state says.
    #[error("Checking a pool: {0}")]
    Index(&'static str),
}
