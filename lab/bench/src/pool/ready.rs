//! The time from a request to memory that can be used: the pool beside the kernel's ways.
//!
//! Before: a size is given. After: there is a row. Units: microseconds, GiB per
//! second; bytes per GiB.
//! Promise: the sides take turns, forwards and backwards; an uncounted round comes first, so that no side pays for
//! memory that the host uses for the first time. Memory from the pool is searched for the mark of the previous VM.

use std::time::Instant;

use anyhow::{Context, Result};
use ballast_base::{Bytes, GIB, PAGE_SIZE};
use ballast_pool::map::SLICE_SIZE;
use ballast_sys::{Mapping, memfd, meminfo};
use rustix::mm::{MapFlags, ProtFlags};

use super::bricks::Bricks;
use super::zeroing::memset;
use crate::progress::Progress;
use crate::report::Row;

/// The row of one size, for which there are twice as many huge pages.
pub(super) fn row(mut row: Row, slices: u32, rounds: u32, progress: &Progress) -> Result<Row> {
    let size = Bytes(u64::from(slices) * SLICE_SIZE);
    row.fact("measures", "ready");
    row.fact("ram_bytes", size.0);
    let mut bricks = Bricks::new(slices)?;
    let mut times: [Vec<f64>; 4] = Default::default();
    let mut zero_gib_per_s = Vec::new();
    let (mut tables, gib): ([Vec<f64>; 3], f64) = (Default::default(), size.0 as f64 / GIB as f64);
    for round in progress.over("round", 0..=rounds) {
        let order: [usize; 4] = if round % 2 == 0 { [0, 1, 2, 3] } else { [3, 2, 1, 0] };
        for side in order {
            let before = page_tables();
            let took = match side {
                0 => {
                    let start = Instant::now();
                    let ram = bricks.request()?;
                    let took = micros(start);
                    tables[0].push((page_tables() - before) as f64 / gib);
                    ram.check_and_mark()?;
                    let zeroing_us = bricks.release(ram, memset)?;
                    if round > 0 {
                        zero_gib_per_s.push(size.0 as f64 / GIB as f64 / (zeroing_us / 1e6));
                    }
                    took
                }
                1 => {
                    let (took, _map) = hugetlb(size)?;
                    tables[1].push((page_tables() - before) as f64 / gib);
                    took
                }
                2 => {
                    let (took, _map) = touch(size)?;
                    tables[2].push((page_tables() - before) as f64 / gib);
                    took
                }
                _ => populate(size)?,
            };
            if round > 0 {
                times[side].push(took);
            }
        }
    }
    let [ours, hugetlb, touch, populate] = &times;
    row.figure("ready_us", ours);
    row.figure("hugetlb_ready_us", hugetlb);
    row.figure("memfd_touch_ready_us", touch);
    row.figure("memfd_populate_ready_us", populate);
    row.ratio("ratio_ready", ours, hugetlb);
    row.ratio("ratio_ready_memfd_touch", ours, touch);
    row.figure("state_bytes_per_gib", &[bricks.state_bytes() as f64 / gib]);
    row.figure("page_table_bytes_per_gib", &tables[0]);
    row.figure("hugetlb_page_table_bytes_per_gib", &tables[1]);
    row.figure("memfd_page_table_bytes_per_gib", &tables[2]);
    row.figure("zero_at_release_gib_per_s", &zero_gib_per_s);
    Ok(row)
}

fn micros(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

/// A file of huge pages that the host has reserved, mapped and faulted in: the kernel zeroes them.
pub(super) fn hugetlb(size: Bytes) -> Result<(f64, Mapping)> {
    let start = Instant::now();
    let file = memfd::create_huge("ballast-bench-hugetlb", size).context("Making a file of huge pages")?;
    let map = Mapping::shared(&file, 0, size.0 as usize)?;
    map.populate(0, map.len()).context("Faulting huge pages in")?;
    Ok((micros(start), map))
}

/// A memory file, each page touched.
pub(super) fn touch(size: Bytes) -> Result<(f64, Mapping)> {
    let start = Instant::now();
    let file = memfd::create("ballast-bench-touch", size).context("Making a memory file")?;
    let map = Mapping::shared(&file, 0, size.0 as usize)?;
    for offset in (0..map.len()).step_by(PAGE_SIZE) {
        map.words(offset, 1)[0].store(1, std::sync::atomic::Ordering::Relaxed);
    }
    Ok((micros(start), map))
}

/// Bytes of page tables of this process.
fn page_tables() -> i64 {
    page_tables_of("self")
}

/// Bytes of page tables of a process.
pub(super) fn page_tables_of(pid: &str) -> i64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    meminfo::number_in(&text, "VmPTE").map_or(0, |kib| (kib << 10) as i64)
}

/// A memory file, mapped with `MAP_POPULATE`.
fn populate(size: Bytes) -> Result<f64> {
    let start = Instant::now();
    let file = memfd::create("ballast-bench-populate", size).context("Making a memory file")?;
    let flags = MapFlags::SHARED | MapFlags::POPULATE;
    let len = size.0 as usize;
    // SAFETY: a null hint without MAP_FIXED replaces no mapping.
    let at =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags, &file, 0) };
    let at = at.context("Mapping a memory file")?;
    let took = micros(start);
    // SAFETY: exactly the new mapping, and no other code knows it.
    unsafe { rustix::mm::munmap(at, len) }.context("Unmapping a memory file")?;
    Ok(took)
}
