//! The layout of the file and its index: areas, blocks, and the index's own words.
//!
//! Before: `file` creates or opens a store. After: `blocks` finds the header of a block, `file` the block of a page.
//! Threads: none; constants. Units: a block is 4096 bytes, an area 512 blocks.
//! Promise: a change here raises the version of the index.

use ballast_base::PAGE_SIZE;
use ballast_handover::arena;

use crate::arena::Shape;
use crate::codec::HEADER_BYTES;

/// Blocks of an area, and pages of the longest extent.
pub(super) const AREA_BLOCKS: usize = 512;
/// Bytes of an area, the unit that is charged to the budget, and punched when its last block is freed.
pub const AREA_BYTES: u64 = (AREA_BLOCKS * PAGE_SIZE) as u64;

/// The index: each slab describes an area of the file, by the headers of its blocks.
pub(super) static INDEX: Shape =
    Shape { layout: &arena::INDEX, charge_bytes: AREA_BYTES, capacities: &[AREA_BLOCKS; 2] };
const _: () = assert!(AREA_BLOCKS * HEADER_BYTES == arena::INDEX.slab_bytes);

/// The block after all areas: it holds no page.
pub(super) fn spare_block(areas: u32) -> u64 {
    u64::from(areas) * AREA_BLOCKS as u64
}
