//! Stores: where far pages are kept.
//!
//! Before: the evict side of `pager` hands over the bytes of one page. After: the fault side reads them, once or more
//! often, and then frees the handle.
//! Threads: every method may be called from any thread; a store never calls back. Units: one object is one base page of
//! 4096 bytes.
//! Promise: [`Store::get`] returns the exact bytes that were put under that handle, or an error.
//!
//! [`RamStore`] is the compressed store in RAM. In a [`Group`], VMs that trust each other store equal pages once.
//! [`FileStore`] keeps pages in a file on a disk. [`blob`] is for stores on other machines, in crates of their own.

mod alloc;
mod arena;
pub mod blob;
mod budget;
mod codec;
mod file;
mod group;
mod handle;
mod lz4;
mod ram;
mod slab;
mod unlz4;

pub use file::{AREA_BYTES, DiskFault, DiskFaults, FileOptions, FileStore, FileUsage, Refusal};
pub use file::{has_late_writes, notice_late_writes};
pub use group::{Group, GroupMember, GroupUsage};
pub use ram::{Budget, Codec, Inconsistent, MAX_SLABS, RamOptions, RamStore, RamUsage};
pub use slab::SLAB_BYTES;

pub use ballast_base::store::{
    Attach, DurableStore, Ends, GetOutcome, Handle, IoContext, NearStore, PageBytes, PageKey, PutOutcome, Reader,
    Recovered, RegionKey, SlowStore, Store, StoreUsage,
};

fn is_short(used: u64, budget: u64) -> bool {
    used > budget - budget / 16
}
