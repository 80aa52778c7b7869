//! Tiering inside a guest, after Demeter (§3.2): the guest samples its own accesses and moves its own pages between
//! NUMA nodes of different speed; the host only sets how large each node is.
//!
//! ```text
//! source (DAMON) ─► ballast-ranges ─► relocate::plan ─► mover ─► move_pages(2)
//!                                              ▲
//!             nodes (which is fast)   pages (where each page is)   beside (others that move pages)
//! ```
//!
//! Read the files in this order: [`settings`], [`nodes`], [`programs`], [`source`], [`pages`], `watched.rs`, [`mover`],
//! `carry.rs`, [`beside`], [`engine`], [`status`]. [`kernel_files`] reads `/proc` and `/sys` for all of them;
//! [`kernel`] asks the kernel for page tables and moves; tests have a model of it.
//!
//! Before: a guest with two tiers, and root in it. After: the pages that its programs touch most are in fast memory.
//! Threads: the caller's one. Units: bytes, pages of 4 KiB, epochs of 500 ms. Promise: no page's content changes, no
//! other program that tiers is disturbed, and an error names what this machine lacks.
#![forbid(unsafe_code)]

pub mod all;
mod beside;
mod carry;
pub mod engine;
pub mod kernel;
pub mod kernel_files;
pub mod mover;
pub mod nodes;
pub mod pages;
pub mod programs;
pub mod settings;
pub mod source;
pub mod status;
mod unit;
mod watched;
mod worth;

pub use engine::Tierer;
pub use nodes::Tiers;
pub use settings::{EPOCH, Settings, Unavailable};
pub use status::Status;
