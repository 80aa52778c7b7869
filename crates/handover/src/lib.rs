//! What keeper and engine hand over to each other and to their successors.
//!
//! Before: the keeper makes the files of a VM, and checks those that a client brings back. After: an engine maps them
//! and serves the VM (`ballast-pager`); its successor finds in them the state that must outlive it.
//!
//! [`state_file`] is the file of one VM: who it is, who serves it ([`threads`]; for a moment that may be two engines,
//! `beside`), its regions ([`records`]), and the tables of its page-state words ([`table`]). What those words mean is
//! `ballast-page`'s, which this crate does not know. [`arena`] is the head of a store's file, and which file on a disk
//! an index belongs to; what is in it is `ballast-store`'s.
//!
//! [`kept`] is all that a keeper holds, for the program that takes its place in the same process.
//! [`orders`] are the messages between keeper and engine. Both also look at other processes: [`watch`]
//! finds those that map a VM's RAM behind our back, [`sleep`] says over what a thread sleeps.
#![forbid(unsafe_code)]

pub mod arena;
mod beside;
mod guest;
pub mod kept;
mod listed;
mod maps;
mod operator;
pub mod orders;
pub mod records;
pub mod sleep;
pub mod state_file;
pub mod table;
pub mod threads;
pub mod watch;
