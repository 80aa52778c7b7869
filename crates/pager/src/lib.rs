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
//! `pinned` (what somebody holds), `prefetch` (what comes back unasked), `track`, `scans`, `zap_scan`, `rwp_scan` and `touch`
//! (who is hot), [`unit`], `units` and `coalesce` (what is mapped huge again), `spill` and `slow` (to a file and back),
//! `threads` and `recover` (after a death), `stats` and `stages` (what operators see).
//!
//! Before: `daemon` opens a VM from descriptors. After: the guest runs, within its limit.
//! Promise: invariants 1 to 6 of ARCHITECTURE.md. This crate cannot name `policy` or `daemon`.

pub mod fault;
pub mod reclaim;
pub mod scan;
pub mod tier;
pub mod vm;
