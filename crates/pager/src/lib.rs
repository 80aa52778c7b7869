//! The loop around one VM's pages: what goes, what comes back, and who is hot.
//!
//! ```text
//!            heat picks            T over, untouched           copy complete
//! Resident ─────────► Quarantine ────────────────► Evicting ─────────────────► Far / Zero
//!    ▲  reclaim: top_up    │            reclaim: drain │  evict::evict              │
//!    └─────────────────────┴───────── fault::serve ────┴────────────────────────────┘
//! ```
//!
//! The moves of one page are in `ballast_page`. A reader's way through the rooms of this crate: [`vm`] (one VM:
//! regions, address spaces, what outlives an engine, the ledger), [`reclaim`] and [`fault`] (the two loops that drive
//! it, with throttle, readahead and prefetch), [`scan`] (what is touched, and what is mapped huge), [`tier`] (the
//! stores, and the way to the file store and back). No files name each other in a circle.
//!
//! Before: `daemon` opens a VM from descriptors. After: the guest runs, within its limit.
//! Promise: invariants 1 to 6 of ARCHITECTURE.md. This crate cannot name `policy` or `daemon`.

pub mod fault;
pub mod reclaim;
pub mod run;
pub mod scan;
pub mod tier;
pub mod vm;
