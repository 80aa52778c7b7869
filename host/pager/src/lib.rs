//! The loop around one VM's pages: it picks pages for eviction, evicts them, and restores them on a fault.
//!
//! ```text
//!            heat picks            T over, untouched           copy complete
//! Resident ─────────► Quarantine ────────────────► Evicting ─────────────────► Far / Zero
//!    ▲  reclaim: top_up    │            reclaim: drain │  evict::evict              │
//!    └─────────────────────┴───────── fault::serve ────┴────────────────────────────┘
//! ```
//!
//! [`ballast_page`] has the moves of one page. A file here names only files of its own room and of lower ones, which
//! `lab/tidy` checks; the lowest room comes first:
//!
//! | Room | What | May name |
//! |---|---|---|
//! | [`run`] | threads and queues, which know no VM | |
//! | [`vm`] | the core: what the workers of one VM share (regions, views, stores, queues, ledger) | `run` |
//! | [`scan`] | which memory is touched, and which is mapped huge | `vm` |
//! | `agent` | a guest's reports of its memory | `vm` |
//! | `tier` | the way to slow stores and back | `vm` |
//! | `reclaim` | which pages go, and how far | `vm`, `agent` |
//! | `fault` | how a fault is served | `vm`, `scan`, `tier` |
//! | `assemble` | which workers a VM has | all |
//!
//! Before: `daemon` opens a VM from descriptors. After: the guest runs, within its limit.
//! Promise: invariants 1 to 6 of ARCHITECTURE.md. This crate cannot name `policy` or `daemon`.

mod agent;
mod assemble;
mod fault;
mod reclaim;
pub mod run;
pub mod scan;
mod tier;
pub mod vm;
