//! Policies: how much memory each VM gets, as pure functions from a [`Snapshot`] to a [`Plan`].
//!
//! ```text
//! sample (daemon) ─► Snapshot ─► ladder (host state) ─► frame (bounds) ─► policy ─► solve ─► Plan ─► apply (daemon)
//!                                        └────────────── State, in and out ──────────┘
//! ```
//!
//! Read the files in this order: [`settings`] (what an operator sets of a VM), [`snapshot`] (input and output),
//! [`reason`] (why, as data), [`solve`](mod@solve) (divide a budget exactly), `memory` (what a policy is and
//! remembers), `frame` (what all policies share), then [`Maestro`], [`Pressure`], [`Gain`], and [`replay`] (a recording
//! under another policy). [`balloon`] asks the guest before memory is paged.
//!
//! Before: the governor samples all VMs. After: it sets one limit per VM and nothing else.
//! Threads: none. Units: in the names; memory is in bytes, and every limit is a whole number of pages.
//! Promise: no clock, no I/O, no randomness, no unsafe code. The same snapshot and state give the same plan, on any
//! machine; both serialise, so that a recording can be played again. The pager cannot name this crate: no fault waits
//! for a decision.
#![forbid(unsafe_code)]

pub mod admission;
pub mod balloon;
mod frame;
mod gain;
mod host_state;
mod kind;
pub mod ladder;
mod maestro;
mod memory;
mod pressure;
pub mod reason;
pub mod replay;
pub mod settings;
pub mod snapshot;
pub mod solve;
mod sums;

pub use frame::{External, check_external, is_left_alone};
pub use gain::Gain;
pub use host_state::HostState;
pub use kind::{Kind, Params, Setup};
pub use ladder::Ladder;
pub use maestro::Maestro;
pub use memory::{Need, Policy, State, VmState};
pub use pressure::Pressure;
pub use reason::Reason;
pub use settings::{Class, Settings};
pub use snapshot::{Action, Decision, HostSample, Plan, Snapshot, VmSample, WorkingSet};
pub use sums::Sums;
