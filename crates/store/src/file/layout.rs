//! How the file and its index are laid out: areas, blocks, and the index's own words.
//!
//! Before: `file` creates or opens a store. After: `blocks` finds the header of a block, `file` the block of a page.
//! Threads: none; these are constants. Units: a block is 4096 bytes, an area 512 blocks.
//! Promise: a change here raises the version of the index.

use ballast_base::PAGE_SIZE;
use ballast_base::format::Format;

use crate::arena::Shape;
use crate::codec::HEADER_BYTES;

/// Blocks of an area, and pages of the longest extent.
pub(super) const AREA_BLOCKS: usize = 512;
/// Bytes of an area: what is charged to the budget, and punched when its last block is freed.
pub const AREA_BYTES: u64 = (AREA_BLOCKS * PAGE_SIZE) as u64;

/// The index: its slabs are headers, and each describes an area of the file. Version 2: it states its least reader.
/// Version 3: the VM's id seeds the checksums; nothing older is read.
pub(super) static INDEX: Shape = Shape {
    name: "file store index",
    magic: u64::from_le_bytes(*b"BALFILES"),
    format: Format { version: 3, least_reader: 3, oldest: 3 },
    slab_bytes: AREA_BLOCKS * HEADER_BYTES,
    charge_bytes: AREA_BYTES,
    capacities: &[AREA_BLOCKS; 2],
};

/// Own words of the index: the identity of the file it belongs to, then what was written today (see `limits`).
pub(super) const WORD_FILE_DEV: usize = 0;
pub(super) const WORD_FILE_INO: usize = 1;
pub(super) const WORD_TODAY: usize = 2;
