//! The pool's metadata, in bytes.
//!
//! Before: the size of a host is given. After: there is a row. Units: bytes; GiB, where the paper says GB.
//! Promise: the figures are computed from a pool of that size with all its VMs, and not measured as memory of a
//! process. They contain the used part of the state, and the memory that a process keeps for it. Memory that the kernel
//! keeps (`struct page`, page tables) is not included.

use anyhow::{Result, bail};
use ballast_base::GIB;
use ballast_pool::map::{FRAME_SLICES, SLICE_SIZE};

use super::allocators::{Allocator, Ours};
use super::sizes;
use crate::report::Row;

/// Vmem, Table 5: slice states, and one map for each VM with 24 bytes an entry.
fn paper_bytes(nodes: u64, slices: u64, vms: u64, entries: u64) -> u64 {
    const MODULES: u64 = 16_384 + 225_280 + 224 + 16 + 1520;
    MODULES + 112 * nodes + slices + vms * 120 * nodes + 24 * entries
}

/// The row of a host of this size, with bricks of a frame and of 64 MiB, full of VMs of 4 GiB or of a cloud's sizes.
pub(super) fn row(mut row: Row, gib: u32) -> Result<Row> {
    const NODES: u8 = 2;
    let frames = gib / u32::from(NODES);
    let slices = u64::from(gib) * GIB / SLICE_SIZE;
    row.fact("measures", "metadata");
    row.fact("modelled", true);
    row.fact("gib", gib);
    row.fact("nodes", NODES);
    let per_gib = |bytes: u64| bytes as f64 / f64::from(gib);
    let mut bytes = Vec::new();
    for (name, brick, fixed) in
        [("", FRAME_SLICES, Some(4 * FRAME_SLICES)), ("_64mib_files", 32, Some(4 * FRAME_SLICES)), ("_azure", 32, None)]
    {
        let mut ours = Ours::new(NODES, frames, brick, 4096, true)?;
        let (mut seed, mut vms, mut entries, mut used) = (0, 0, 0, [0; NODES as usize]);
        loop {
            let node = u8::from(used[1] < used[0]);
            let left = frames * FRAME_SLICES - used[usize::from(node)];
            let slices = fixed.unwrap_or_else(|| sizes::draw(&mut seed)).min(left);
            if slices == 0 {
                break;
            }
            let Some(got) = ours.allocate(vms, node, slices)? else { bail!("{slices} slices of {left} were refused") };
            used[usize::from(node)] += slices;
            vms += 1;
            entries += u64::from(got.extents);
        }
        let now = ours.pool.metadata_bytes();
        bytes.push(now);
        row.fact(&format!("metadata_bytes{name}"), now);
        row.fact(&format!("vms{name}"), vms);
        row.fact(&format!("entries{name}"), entries);
        row.figure(&format!("metadata_bytes_per_gib{name}"), &[per_gib(now)]);
        row.figure(&format!("paper_bytes_per_gib{name}"), &[per_gib(paper_bytes(2, slices, vms, entries))]);
    }
    // In the worst case every slice is an entry of its own: 24 bytes stored and 12 in the look-ups.
    let worst = bytes[1] + slices * 36;
    row.figure("metadata_bytes_per_gib_worst", &[per_gib(worst)]);
    Ok(row)
}
