//! The memory of the pool on this host: huge pages of 2 MiB in files, reserved, lent, zeroed, and handed to VMs.
//!
//! ```text
//! grow ─► the kernel reserves pages ─► refill (allocates, so zeroes) ─► grant ─► a VM maps the files
//!                                        ▲                                          │
//!                                        └──── tend: nobody has the files ◄─────────┘
//! ```
//!
//! [`host`] reads and sets what the kernel has for each node; [`balance`] says how much each node gives; [`files`] are
//! the bricks, named files in a hugetlbfs of our own; [`journal`] makes a change of the kernel's number be undone when
//! its author dies; [`failed`] finds memory that failed; [`refill`] is the worker's part; `owed` keeps pages that
//! others have theirs; [`reserve`] has it all; [`lend`] and [`overview`] add to it.
//!
//! Everything is in one directory: the state of `ballast-pool`, who has what by name, the journal, and the mount with
//! the bricks. Nothing else is kept, no process is asked, and no descriptor is handed from one owner to the next: who
//! opens the directory has the pool as it was. Whether a VM is gone the kernel says (`sys/src/huge_files.rs`): nobody
//! has its files any more, neither a descriptor nor a mapping nor a message under way.
//!
//! **Zeroing.** A page that a VM had is not written over: it goes out of its file, and the kernel, which zeroes what it
//! gives, allocates another one. So it does not matter who holds on to the old page (a device, a pipe that the VMM
//! filled by `vmsplice`): while somebody does, the kernel has one page less, and the slice waits.
//!
//! Before: a host with memory to spare. After: files that are zero and there. Threads: the owner's one, and a worker's
//! that has a [`Job`]. Units: slices of 2 MiB. Promise: no mapping of guest memory, no unsafe code; two processes
//! never have one pool; what dies at whatever moment leaves a pool that opens, and no page of the kernel's reservation
//! without an owner.
#![forbid(unsafe_code)]

pub mod balance;
pub mod failed;
mod failure;
pub mod files;
pub mod host;
mod journal;
mod lend;
pub mod overview;
mod owed;
pub mod refill;
pub mod reserve;
mod shared;

pub use balance::Want;
pub use failure::Failure;
pub use host::Host;
pub use lend::Lending;
pub use overview::{Node, Overview, Tenant};
pub use refill::{Done, Job};
pub use reserve::{Error, FILES, Grant, Reserve};
pub use shared::Shared;
