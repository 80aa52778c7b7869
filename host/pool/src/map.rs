//! The map of a pool: which VM has which slice, after Vmem (section 4). It only decides, and touches no memory of VMs.
//!
//! ```text
//! reserve ─► dirty ─► next_dirty ─► Dirty ─zero─► Zeroed ─► clean ─► ready ─► allocate ─► used ─► release ─► dirty ...
//!                                                              └► lend ─► the host's ─► take_back ─► dirty
//! ```
//!
//! Read the files in this order: [`mod@unit`] (slices, frames, names), [`state`] (one byte and its truth table),
//! [`layout`] (places of the state), `words` (its memory), `table` (the state as values), `intent` (atomic changes),
//! `check` (consistency), [`request`], `plan` (the bidirectional strategy), [`zero`] (dirty memory and the proof that
//! it is not), [`stats`], `pool`, `zeroing`.
//!
//! A brick is a file, of a frame or less. It belongs to one trust domain at a time, and to none when no VM has a slice
//! of it: a process that maps a part of a shared file can reach the rest. A VM that is its own trust domain, and whose
//! memory is not a multiple of a brick, keeps the rest of its last brick from others.
//!
//! Before: the host has memory to spare. After: a VM's RAM is a few extents of allocated, zeroed memory.
//! Threads: the owner's one. Units: slices, of 2 MiB where bytes are meant (in a pool of pages of 1 GiB, a
//! slice is such a page). Promise: no I/O; nothing here names another file of the crate. The state is a fixed
//! layout in words that may be shared memory, and a writer may die between any two stores (`intent`). Damaged words are
//! refused, never followed.

mod check;
mod damage;
mod intent;
pub mod layout;
mod plan;
mod pool;
pub mod request;
pub mod state;
pub mod stats;
mod table;
pub mod unit;
mod words;
pub mod zero;
mod zeroing;

pub use damage::Damage;
pub use layout::{Layout, NodeSpec};
pub use pool::{Hit, Invalid, Pool, Tenant};
pub use request::{Grant, Part, Refused, Request, Segment};
pub use state::{Content, SliceState};
pub use stats::NodeStats;
pub use unit::{Domain, Extent, FRAME_SLICES, GuestIdx, Mode, NodeIdx, SliceIdx, VmId};
pub use words::Words;
pub use zero::{Dirty, Zeroed};
