//! The largest pool: how much of the host's memory a reservation gets in pages of one size, beside what the kernel
//! alone finds by one write.
//!
//! Before: no huge page of this size is the bench's. After: there is a row, and none is. Threads: the bench's one.
//! Units: in the keys; percent of the memory of all nodes. Promise: the two take turns, forwards and backwards, and
//! both are asked for the same: what the host has to spare at that moment, less [`SPARE`].

use anyhow::{Context, Result};
use ballast_api::PoolPages;
use ballast_base::{Bytes, GIB, HUGE_SIZE, MIB};
use ballast_sys::meminfo;

use super::product::Product;
use crate::machine;
use crate::report::Row;
use crate::rig::Bench;

/// Memory that other programs keep.
const SPARE: u64 = GIB;

/// The row of pages of this size.
pub(super) fn row(bench: &mut Bench, product: &Product, mut row: Row, pages: PoolPages, rounds: u32) -> Result<Row> {
    let (page, dir) = match pages {
        PoolPages::Huge => (HUGE_SIZE as u64, "hugepages-2048kB"),
        PoolPages::Gib => (GIB, "hugepages-1048576kB"),
    };
    let file = format!("/sys/kernel/mm/hugepages/{dir}/nr_hugepages");
    row.fact("measures", "largest");
    row.fact("page_bytes", page);
    let all = meminfo::bytes("MemTotal").context("The kernel does not tell how much memory there is")?;
    if !std::path::Path::new(&file).exists() {
        row.because("the kernel has no huge pages of this size");
        row.figure("pool_largest_pct", &[]);
        return Ok(row);
    }
    let (mut share, mut times) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
    let progress = bench.progress.clone();
    for round in progress.over("round", 0..rounds) {
        for side in if round % 2 == 0 { [0usize, 1] } else { [1, 0] } {
            product.hold(Bytes(0))?;
            let wanted = match bench.options.quick {
                true => (128 * MIB).max(page),
                false => machine::mem_available().unwrap_or_default().saturating_sub(SPARE) / page * page,
            };
            let (got, took) = if side == 0 {
                let got = product.reserve(pages, Bytes(wanted))?;
                product.give_back(pages)?;
                got
            } else {
                let (got, took) = bench.guard.in_one_go(&file, wanted / page)?;
                (Bytes(got * page), took)
            };
            share[side].push(got.0 as f64 / all as f64 * 100.0);
            times[side].push(took);
        }
    }
    if share.iter().flatten().all(|share| *share == 0.0) {
        row.because("the kernel found no such page in one piece");
    }
    for (side, name) in ["pool", "hugetlb"].into_iter().enumerate() {
        row.figure(&format!("{name}_largest_pct"), &share[side]);
        row.figure(&format!("{name}_largest_s"), &times[side]);
    }
    Ok(row)
}
