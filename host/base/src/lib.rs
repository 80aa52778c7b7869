//! The vocabulary of all other crates: units, ids, and the messages that cross a process border.
//!
//! Before: nothing. After: `sys`, and through it everything else.
//! Promise: no I/O, no unsafe code, no clock, no threads.
//!
//! # Glossary
//!
//! | Word | Meaning |
//! |---|---|
//! | page | a 4 KiB base page, always |
//! | huge page, unit | 2 MiB, naturally aligned |
//! | region | a contiguous range of guest RAM's addresses, made of extents |
//! | extent | neighbouring bytes of a file that are guest RAM |
//! | resident | the page's bytes are in DRAM, in the region's file |
//! | far | the page's bytes are in a store |
//! | zap | drop the VMM's page-table entries of a range; the data stays in the file |
//! | punch | free a range of the file: the memory returns to the host |
//! | quarantine | the time between a page's zap and its eviction; a touch in it is a *quarantine hit* |
//! | ticket | the number of a batch of zapped pages; a word with another ticket was touched and zapped again |
//! | granule | the unit of a move: a page, or the 512 pages of a huge page |
//! | refault, refault interval | a touch of a page that was evicted; the time from its eviction to that touch |
//! | poison | the page's bytes are lost; a touch is a memory error |
//! | fence | kill an engine, and keep its threads from a VM until they are gone |
//! | escrow | the fd store in the VMM: descriptors that the client keeps for the next keeper |
//! | fault worker, reclaim worker | a thread of the engine that serves faults, one per CPU; the task that takes a VM's
//! pages |
//! | cycle | the time in which a source of heat watches; *coarse*: all units; *fine*: chosen units page by page |
//! | fine scan | one unit in a fine cycle: a *sample* of its pages, or a *full scan* of all |
//! | bloated | a hot unit of which few pages are hot |
//! | slice, frame, brick | parts of the pool: 2 MiB, 1 GiB, and a file, which belongs to one VM or domain at a time |
//! | governor | the engine's policy loop: sample, decide, apply |
//! | foreign mapper | a process that maps a VM's RAM and has not attached |
//! | view | one process's mapping of a VM's RAM with its own userfaultfd |
//! | client | the small library inside the VMM process |
//! | engine | the process that serves faults and reclaims |
//! | keeper | the tiny process that holds every descriptor and outlives engines |
#![forbid(unsafe_code)]

pub mod extent;
pub mod extents;
pub mod fill;
pub mod format;
pub mod guest;
pub mod invalid;
pub mod pool;
pub mod range;
pub mod store;
pub mod stripes;
pub mod text;
pub mod units;
pub mod uuid;
pub mod wire;

pub use extent::Extent;
pub use extents::Extents;
pub use invalid::Invalid;
pub use range::PageRange;
pub use units::{Bytes, GIB, HUGE_SIZE, Hva, KIB, MIB, PAGE_SIZE, PAGES_PER_UNIT, PageCount, PageIdx};
pub use uuid::Uuid;
