//! Tests of the stores in one program, which is linked once.

mod arena_memory;
mod file_processes;
mod file_store;
mod group;
mod group_attacks;
mod late_reads;
mod layout;
mod ledger;
mod ram_store;
mod two_processes;
