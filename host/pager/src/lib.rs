//! The loop around one VM's pages: which are evicted, which are restored, and which are hot.
//!
//! ```text
//!            heat picks            T over, untouched           copy complete
//! Resident ─────────► Quarantine ────────────────► Evicting ─────────────────► Far / Zero
//!    ▲  reclaim: top_up    │            reclaim: drain │  evict::evict              │
//!    └─────────────────────┴───────── fault::serve ────┴────────────────────────────┘
//! ```
//!
//! The moves of one page are in `ballast_page`. Read the rooms of this crate in this order: [`vm`] (one VM: regions,
//! address spaces, the state that outlives an engine, the ledger), [`reclaim`] and [`fault`] (the two loops that drive
//! it, with throttle and readahead), [`scan`] (which memory is touched, and which is mapped huge), [`tier`]
//! (the stores, and the way to the file store and back), [`agent`] (what a guest says of its memory). No files name
//! each other in a circle.
//!
//! Before: `daemon` opens a VM from descriptors. After: the guest runs, within its limit.
//! Promise: invariants 1 to 6 of ARCHITECTURE.md. This crate cannot name `policy` or `daemon`.

pub mod agent;
pub mod fault;
pub mod reclaim;
pub mod run;
pub mod scan;
pub mod tier;
pub mod vm;
