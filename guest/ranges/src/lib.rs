//! Finds the hot ranges of a program's memory, and plans moves to fast memory: tiering inside a guest (Demeter §3.2).
//!
//! ```text
//! samples of accesses ─► Fitted ─► ranges ─► rank ─► plan ─► an agent moves pages
//!   (virtual addresses)   Fitted                          ▲
//!                                                      placement (page table)
//! ```
//!
//! Read the files in this order: `roots` (what is classified), `range` (ranges and their order), `histogram` and
//! `fitted` (the rule), [`relocate`].
//!
//! Before: a source samples accesses with their *virtual* addresses. Data that is used together is often adjacent in
//! virtual memory, but not in physical memory. After: an agent moves pages between the nodes of its guest. Threads:
//! none. Units: bytes and epochs of 500 ms. Promise: no clock, no I/O, no randomness, no unsafe code; no sample makes
//! anything panic, and memory grows only with the sampled units.
//!
//! ```
//! use ballast_ranges::{Fitted, Roots, UNIT, rank};
//!
//! let roots = Roots::new(&[(1 << 30, 64 << 40)]).expect("one root");
//! let mut classifier = Fitted::new(roots);
//! for sample in 0..100 {
//!     classifier.record((20 << 40) + sample * 4096, 1, 1);
//! }
//! classifier.end_epoch();
//! let hottest = rank(classifier.ranges())[0];
//! assert_eq!((hottest.start, hottest.bytes()), (20 << 40, UNIT));
//! ```
#![forbid(unsafe_code)]

mod fitted;
mod histogram;
mod range;
pub mod relocate;
mod roots;

pub use fitted::Fitted;
pub use range::{Range, SAMPLE, rank};
pub use roots::{Roots, UNIT};
