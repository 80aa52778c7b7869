//! Scans: access tracking, huge mappings, and placement on NUMA nodes.
//!
//! Before: a VM is tracked. After: heat knows which units and pages are touched. `worker` runs the cycles of `source`
//! by the `zap` scan; `coalesce` maps units huge again; `place` moves pages between two nodes by their heat.
//! Threads: a tracking worker and a coalescing worker for each VM.
//! Promise: no byte changes.

pub(crate) mod coalesce;
pub(crate) mod place;
pub mod source;
pub(crate) mod touch;
pub(crate) mod worker;
pub(crate) mod zap;
