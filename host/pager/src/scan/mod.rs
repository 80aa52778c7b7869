//! Scans: which memory the guest touches, and which is mapped huge.
//!
//! Before: a VM is tracked. After: heat knows which units and pages are touched. `worker` runs the cycles of `source`,
//! by the `zap` scan; `coalesce` maps units huge again. `place` moves memory between a fast and a slow node by what is
//! known.
//! Threads: a tracking worker and a coalescing worker for each VM. Promise: no byte changes.

pub mod coalesce;
pub(crate) mod place;
pub mod source;
pub(crate) mod touch;
pub mod worker;
pub(crate) mod zap;
