//! The moves of one page, which the model checker runs.
//!
//! Before: nothing; this crate knows no VM, thread or file. After: the pager calls it for the pages of real regions.
//! Threads: any number, of any number of engines. Units: pages of a region.
//! Promise: a word changes only as the table in [`page_state`] says.

pub mod ahead;
pub mod copies;
pub mod discard;
pub mod evict;
pub mod fault;
pub mod granule;
pub mod memory;
pub mod outcome;
pub mod page_state;
pub mod punch;
pub mod shift;
pub mod sync;
pub mod unit;
