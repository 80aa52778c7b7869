//! The loop around one page.
//!
//! ```text
//!            heat picks            T over, untouched           copy complete
//! Resident ─────────► Quarantine ────────────────► Evicting ─────────────────► Far / Zero
//!    ▲  reclaim::top_up    │            reclaim::drain │  evict::evict              │
//!    └─────────────────────┴───────── fault::serve ────┴────────────────────────────┘
//! ```
//!
//! A reader's way through it: [`page_state`] (the word and its truth table), [`fault`] and [`evict`] (the moves),
//! [`memory`] (what they ask of the kernel), [`stores`] and [`shift`] (where far pages are, and their way from RAM to a
//! file), then `region`, `shard`, `view` and `vm` (the real thing), `lane` and `reclaim` (the two loops that drive it),
//! `prefetch` (what comes back unasked), `track`, `scans`, `zap_scan`, `rwp_scan` and `touch` (who is hot), [`unit`], `units` and
//! `coalesce` (what is mapped huge again), `spill` and `slow` (to a file and back), `threads` and `recover` (after a death), `stats` and `stages` (what
//! operators see).
//!
//! Before: `daemon` opens a VM from descriptors. After: the guest runs, within its limit.
//! Promise: invariants 1 to 6 of ARCHITECTURE.md. This crate cannot name `policy` or `daemon`.

pub mod evict;
pub mod fault;
pub mod gate;
pub mod granule;
pub mod memory;
pub mod page_state;
pub mod shift;
pub mod stores;
pub mod sync;
pub mod unit;

#[cfg(not(loom))]
pub mod away;
#[cfg(not(loom))]
pub mod busy;
#[cfg(not(loom))]
pub mod coalesce;
#[cfg(not(loom))]
pub mod follow;
#[cfg(not(loom))]
pub(crate) mod forgotten;
#[cfg(not(loom))]
pub(crate) mod kept;
#[cfg(not(loom))]
pub mod lane;
#[cfg(not(loom))]
pub mod prefetch;
#[cfg(not(loom))]
pub mod recent;
#[cfg(not(loom))]
pub mod reclaim;
#[cfg(not(loom))]
pub mod recover;
#[cfg(not(loom))]
pub mod region;
#[cfg(not(loom))]
pub(crate) mod rwp_scan;
#[cfg(not(loom))]
pub mod scans;
#[cfg(not(loom))]
pub mod shard;
#[cfg(not(loom))]
pub mod slow;
#[cfg(not(loom))]
pub mod spill;
#[cfg(not(loom))]
pub(crate) mod stages;
#[cfg(not(loom))]
pub mod state_file;
#[cfg(not(loom))]
pub mod stats;
#[cfg(not(loom))]
pub mod streams;
#[cfg(not(loom))]
pub(crate) mod table;
#[cfg(not(loom))]
pub mod threads;
#[cfg(not(loom))]
pub mod touch;
#[cfg(not(loom))]
pub mod track;
#[cfg(not(loom))]
pub mod units;
#[cfg(not(loom))]
pub mod view;
#[cfg(not(loom))]
pub mod vm;
#[cfg(not(loom))]
pub(crate) mod zap_scan;
