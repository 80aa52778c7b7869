//! Tests of the pager in one program, which is linked once.

#[macro_use]
mod store_over;

mod answered;
mod begun;
mod beside;
mod coalesce;
mod common;
mod extents;
mod foreign_mappers;
mod huge;
mod layout;
mod memory_error;
mod native;
mod pins;
mod placed;
mod shard;
mod spill;
mod tiers;
mod track;
mod workers;
