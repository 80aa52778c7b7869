//! The pool: memory for VMs that is reserved before they start, in pages of one size in files.
//!
//! ```text
//! grow ─► the kernel reserves pages ─► refill (allocates, so zeroes) ─► grant ─► a VM maps the files
//!                                        ▲                                          │
//!                                        └──── tend: nobody has the files ◄─────────┘
//! ```
//!
//! [`map`] decides which VM gets which slice, and is pure. [`host`] reads and sets the kernel's number of huge pages
//! for each node. [`balance`] decides how much each node gives. [`files`] are the bricks, named files in a hugetlbfs of
//! our own. [`journal`] lets the next owner repair the kernel's number if an owner dies during a change. [`failed`]
//! finds memory that failed. [`refill`] is the worker's part. `owed` keeps account of surplus pages of others that
//! count as reserved. [`reserve`] combines all of these; [`lend`], `demand` (memory that comes at its first touch) and
//! [`overview`] add to it.
//!
//! One directory has everything: the state of [`map`], the names of the VMs that have memory, the journal, and the
//! mount with the bricks. Nothing else is stored, no process is asked, and no descriptor passes from one owner to the
//! next. A process that opens the directory gets the pool as it was. The kernel tells whether a VM is gone
//! (`sys/src/huge_files.rs`): no descriptor, no mapping and no message in flight refers to its files.
//!
//! **Zeroing.** A page that a VM had is not overwritten. It is punched out of its file, and the kernel allocates
//! another page, which it zeroes. So it does not matter whether a device, or a pipe that the VMM filled by `vmsplice`,
//! still holds the old page. As long as one does, the kernel has one page less, and the slice waits.
//!
//! Before: a host with memory to spare. After: zeroed memory in files, with its pages allocated. Threads: the owner's
//! thread, and a worker's that has a [`Job`]. Units: slices, of one page each: 2 MiB, or 1 GiB in a pool of such pages.
//! Promise: no touch of guest memory and no unsafe code. Two processes never own one pool. If a process dies at any
//! moment, the pool can be opened again, and every page of the kernel's reservation has an owner.
#![forbid(unsafe_code)]

mod backing;
pub mod balance;
mod change;
mod demand;
mod error;
pub mod failed;
mod failure;
pub mod files;
pub mod host;
mod journal;
mod lend;
mod live;
pub mod map;
mod origin;
pub mod overview;
mod owed;
mod promises;
pub mod refill;
pub mod reserve;
mod shared;

pub use balance::Want;
pub use error::Error;
pub use failure::Failure;
pub use host::{Host, Page};
pub use lend::Lending;
pub use live::FILES;
pub use overview::{Node, Overview, Tenant};
pub use promises::{Far, Lacks, Overcommitted};
pub use refill::{Done, Job};
pub use reserve::{Grant, Reserve};
pub use shared::Shared;
