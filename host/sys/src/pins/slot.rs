//! The layout of a slot of the pin check's map: the descriptor and the number of pages, the program's state from page
//! to page, the pages, and the findings for each.
//!
//! Before: `check` writes a descriptor and page numbers into a slot. After: `program` reads them and writes its
//! findings, which `found` reads. Threads: one a slot. Units: bytes from the start of the slot.

/// Pages per run of the program. With twice as many a page costs hardly less: 0.13 us after 0.15.
pub(super) const BATCH: usize = 32;

pub(super) const FD: i16 = 0;
pub(super) const COUNT: i16 = 8;
pub(super) const NODE: i16 = 16;
pub(super) const SHIFT: i16 = 24;
pub(super) const PREFIX: i16 = 32;
pub(super) const PAGES: i32 = 64;
pub(super) const FOUND: i32 = PAGES + 8 * BATCH as i32;
pub(super) const FOUND_BYTES: i32 = 48;
pub(super) const BYTES: usize = (FOUND + FOUND_BYTES * BATCH as i32) as usize;
