//! Tests of the stores in one program, which is linked once.

mod arena_memory;
mod common;
mod file_store;
mod group;
mod group_attacks;
mod late_reads;
mod layout;
mod processes;
mod ram_store;
