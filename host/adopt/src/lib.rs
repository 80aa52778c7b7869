//! VMs that run already, with any kind of memory: the kernel's swap moves their pages, and the caller decides how many.
//!
//! ```text
//! found (which process is a VMM) ─► Adopted ─► memory: where it is        ─► the caller decides a limit
//!   vmm: its command line             │   ▲                                        │
//!   maps: which mappings are RAM      │   └── kernel: swap-in by itself            ▼
//!                                     └── reclaim: memory.reclaim, or MADV_PAGEOUT in the order of `order`
//! ```
//!
//! Before: a VMM that was started without Ballast. After: a part of its RAM is in swap.
//! Threads: any; one at a time works for a VM. Units: bytes unless a name says otherwise.
//! Promise: the VMM has no code of ours, and no setting of it or of its cgroup is changed, so nothing is left to undo.
//! No call can make the kernel kill the VMM, because nothing limits its memory.
#![forbid(unsafe_code)]

pub mod adopted;
pub mod cgroup;
pub mod found;
pub mod maps;
pub mod memory;
pub mod order;
pub mod swap;
pub mod vmm;

pub use adopted::{Adopted, How, Step};
pub use found::{Found, Refusal, look};
pub use memory::Memory;
pub use vmm::{Program, Vmm};
