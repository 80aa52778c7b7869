//! A VM's memory in base pages of the daemon's pool, beside the pool's pages of 2 MiB and a memory file that is
//! touched.
//!
//! Before: the host has this much memory, and some to spare. After: there is a row, and the pool has none. Threads: the
//! bench's one. Units: in the keys. Promise: as in [`start`](super::start), whose code it is: the sides take turns, and
//! one has the memory at a time. A pool of base pages is empty before it is filled.

use std::time::Instant;

use anyhow::{Context, Result};
use ballast_api::PoolPages;
use ballast_base::pool::Pages;
use ballast_base::{Bytes, KIB};
use ballast_sys::Mapping;

use super::product::Product;
use super::start::{Side, check_and_mark, ready};
use crate::report::Row;
use crate::rig::Bench;

/// The sides, what the pool has for each, and their names in the figures.
const SIDES: [(Side, Option<PoolPages>, &str); 3] = [
    (Side::Pool(Pages::Base), Some(PoolPages::Base), "base"),
    (Side::Pool(Pages::Mix), Some(PoolPages::Huge), "product"),
    (Side::Memfd, None, "memfd_touch"),
];

/// The row of one size.
pub(super) fn row(bench: &mut Bench, product: &Product, mut row: Row, size: Bytes, rounds: u32) -> Result<Row> {
    row.fact("measures", "base");
    row.fact("ram_bytes", size.0);
    let (mut times, mut filled, mut huge) = ([const { Vec::new() }; SIDES.len()], Vec::new(), Vec::new());
    let progress = bench.progress.clone();
    for round in progress.over("round", 0..=rounds) {
        for at in if round % 2 == 0 { [0, 1, 2] } else { [2, 1, 0] } {
            let (side, pages, _) = SIDES[at];
            for pages in [PoolPages::Huge, PoolPages::Base] {
                product.hold_of(pages, Bytes(0))?;
            }
            let start = Instant::now();
            pages.map_or(Ok(()), |pages| product.hold_of(pages, size))?;
            let took = start.elapsed().as_secs_f64();
            let (time, map) = ready(product, side, size)?;
            let share = huge_bytes(&map)? as f64 / size.0 as f64 * 100.0;
            if pages.is_some() {
                check_and_mark(&map)?;
            }
            // The first round warms up.
            if round > 0 {
                times[at].push(time);
                if pages == Some(PoolPages::Base) {
                    filled.push(took);
                    huge.push(share);
                }
            }
        }
    }
    product.hold_of(PoolPages::Base, Bytes(0))?;
    SIDES.iter().zip(&times).for_each(|((.., name), times)| row.figure(&format!("{name}_ready_us"), times));
    row.ratio("ratio_base_ready", &times[0], &times[1]);
    row.figure("base_filled_s", &filled);
    row.figure("base_huge_pct", &huge);
    Ok(row)
}

/// How much of shared memory is mapped in huge pages.
fn huge_bytes(map: &Mapping) -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps").context("Asking for huge pages")?;
    let (mut is_ours, mut bytes) = (false, 0);
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(first), Some(second)) = (words.next(), words.next()) else { continue };
        if let Some((start, _)) = first.split_once('-') {
            let start = usize::from_str_radix(start, 16).unwrap_or(0);
            is_ours = (map.addr()..map.addr() + map.len()).contains(&start);
        } else if is_ours && first == "ShmemPmdMapped:" {
            bytes += second.parse::<u64>().unwrap_or(0) * KIB;
        }
    }
    Ok(bytes)
}
