//! The speed of memory of the pool that a VM has, beside a plain file of huge pages.
//!
//! Before: a size is given. After: there is a row. Threads: the bench's one, which is the guest. Units: nanoseconds;
//! GiB per second. Promise: both sides have as many huge pages, every page table entry is there, and the same accesses
//! go to both, by turns.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result};
use ballast_base::{Bytes, GIB};
use ballast_pool::map::SLICE_SIZE;
use ballast_sys::{Mapping, memfd};

use super::bricks::Bricks;
use crate::progress::Progress;
use crate::report::Row;

/// Loads of a round, each of which waits for the previous one.
const LOADS: usize = 4_000_000;

/// The row of one size, for which there are twice as many huge pages.
pub(super) fn row(mut row: Row, slices: u32, rounds: u32, progress: &Progress) -> Result<Row> {
    let size = Bytes(u64::from(slices) * SLICE_SIZE);
    row.fact("measures", "speed");
    row.fact("ram_bytes", size.0);
    let mut bricks = Bricks::new(slices)?;
    let ram = bricks.request()?;
    let file = memfd::create_huge("ballast-bench-hugetlb", size).context("Making a file of huge pages")?;
    let plain = Mapping::shared(&file, 0, size.0 as usize)?;
    plain.populate(0, plain.len()).context("Faulting huge pages in")?;
    let sides = [ram.start(), plain.ptr(0, plain.len()).cast::<u64>()];
    let words = size.0 as usize / size_of::<u64>();
    let (mut loads, mut streams): ([Vec<f64>; 2], [Vec<f64>; 2]) = Default::default();
    for round in progress.over("round", 0..=rounds) {
        for side in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
            // SAFETY: either side is that many words of memory that is mapped, and that nobody else uses.
            let (load_ns, gib_per_s) = unsafe { (chase(sides[side], words), stream(sides[side], words)) };
            if round > 0 {
                loads[side].push(load_ns);
                streams[side].push(gib_per_s);
            }
        }
    }
    row.figure("load_ns", &loads[0]);
    row.figure("hugetlb_load_ns", &loads[1]);
    row.figure("stream_gib_per_s", &streams[0]);
    row.figure("hugetlb_stream_gib_per_s", &streams[1]);
    // Speed is the inverse of time.
    row.ratio("ratio_guest_speed_hugetlb", &loads[1], &loads[0]);
    row.ratio("ratio_guest_stream_hugetlb", &streams[0], &streams[1]);
    Ok(row)
}

/// Nanoseconds of a load from a random place, whose address depends on the previous load.
///
/// # Safety
/// `at` is the start of `words` words that are mapped and nobody else's.
unsafe fn chase(at: *mut u64, words: usize) -> f64 {
    let start = Instant::now();
    let mut place = 1u64;
    for _ in 0..LOADS {
        // An odd multiplier and an odd step visit all places, in no order that a prefetcher knows.
        place = place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let index = ((u128::from(place) * words as u128) >> 64) as usize;
        // SAFETY: the index is below the number of words. The value only changes a bit of the place.
        place ^= unsafe { at.add(index).read_volatile() } & 1;
    }
    black_box(place);
    start.elapsed().as_secs_f64() * 1e9 / LOADS as f64
}

/// GiB per second, written and read in order.
///
/// # Safety
/// As [`chase`].
unsafe fn stream(at: *mut u64, words: usize) -> f64 {
    let start = Instant::now();
    let mut sum = 0u64;
    for index in 0..words {
        // SAFETY: the index is below the number of words.
        unsafe {
            let word = at.add(index);
            word.write(word.read().wrapping_add(index as u64));
            sum = sum.wrapping_add(*word);
        }
    }
    black_box(sum);
    (words * size_of::<u64>()) as f64 / GIB as f64 / start.elapsed().as_secs_f64()
}
