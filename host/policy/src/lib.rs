//! Policies: how much memory each VM gets, as pure functions from a [`Snapshot`] to a [`Plan`].
//!
//! ```text
//! sample (daemon) ─► Snapshot ─► ladder (host state) ─► frame (bounds) ─► policy ─► solve ─► Plan ─► apply (daemon)
//!                                        └────────────── State, in and out ──────────┘
//! ```
//!
//! Read the files in this order: [`settings`] (an operator's settings of a VM), [`snapshot`] (input and output),
//! [`reason`] (reasons, as data), [`solve`](mod@solve) (divides a budget exactly), `memory` (the state of a policy),
//! `frame` (the rules of all policies), then `maestro`, `pressure`, `gain`. [`balloon`] asks the guest before memory is
//! paged.
//!
//! Before: the governor samples all VMs. After: it sets one limit per VM and nothing else.
//! Threads: none. Units: in the names; memory is in bytes, and each limit is a whole number of pages.
//! Promise: no clock, no I/O, no randomness, no unsafe code. Equal snapshots and states give equal plans, on any
//! machine. The pager cannot name this crate: no fault waits for a decision.
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
pub mod settings;
mod setup;
pub mod snapshot;
pub mod solve;
mod sums;

pub use frame::{External, check_external, is_left_alone};
pub use host_state::HostState;
pub use kind::Kind;
pub use ladder::Ladder;
pub use memory::{Need, State, VmState};
pub use reason::Reason;
pub use settings::{Class, Settings};
pub use setup::Setup;
pub use snapshot::{Action, Decision, HostSample, Plan, Snapshot, VmSample};
pub use sums::Sums;
