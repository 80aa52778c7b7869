//! State and messages that keeper and engine pass to each other and to their successors.
//!
//! Before: the keeper makes the files of a VM, and checks those that a client brings back. After: an engine maps them
//! and serves the VM (`ballast-pager`); its successor finds in them the state that must outlive it.
//!
//! [`state_file`] is the file of one VM: its identity, its engine ([`threads`]; during an upgrade two, `beside`), its
//! regions ([`records`]), the key of its pages on other machines ([`secret`]), and the tables of its page-state words
//! ([`table`]). The meaning of those words is in `ballast-page`, which this crate does not know. [`arena`] is the head
//! of a store's file, and names the file of an index; the contents are in `ballast-store`.
//!
//! [`kept`] is the whole state of a keeper, for the next program in the same process. [`orders`] are the messages
//! between keeper and engine, and [`upgrading`] is their state of an upgrade. Both processes also examine others:
//! [`mappers`] finds those that map a VM's RAM where it is not served ([`places`]), [`holder`] those that can reach a
//! file, and [`sleep`] finds where a thread sleeps in the kernel.
#![forbid(unsafe_code)]

pub mod arena;
mod beside;
pub mod failure;
mod guest;
pub mod holder;
mod identity;
pub mod kept;
mod listed;
pub mod mappers;
mod maps;
mod operator;
pub mod orders;
pub mod places;
pub mod records;
pub mod secret;
pub mod sleep;
pub mod state_file;
pub mod table;
pub mod threads;
pub mod upgrading;
