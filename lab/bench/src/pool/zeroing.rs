//! The rate of zeroing: with ordinary stores, with stores past the caches, and by the kernel.
//!
//! Before: a size is given. After: there is a row. Units: GiB per second. Promise: all ways zero the same huge pages,
//! in turns; none of these is fresh; the last word of the zeroed memory is checked.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ballast_base::{Bytes, GIB};
use ballast_sys::{Mapping, memfd};

use crate::report::Row;

/// The row of one size, which is a multiple of 2 MiB and for which there are as many huge pages.
pub(super) fn row(mut row: Row, size: Bytes, rounds: u32) -> Result<Row> {
    row.fact("measures", "zeroing");
    row.fact("ram_bytes", size.0);
    let file = memfd::create_huge("ballast-bench-zero", size).context("Making a file of huge pages")?;
    let map = Mapping::shared(&file, 0, size.0 as usize)?;
    map.populate(0, map.len()).context("Faulting huge pages in")?;
    let mut rates: [Vec<f64>; 3] = Default::default();
    for round in 0..=rounds {
        for side in if round % 2 == 0 { [0, 1, 2] } else { [2, 1, 0] } {
            let last = &map.words(map.len() - 8, 1)[0];
            last.store(7, std::sync::atomic::Ordering::Relaxed);
            let start = Instant::now();
            match side {
                0 => memset(map.ptr(0, map.len()), map.len()),
                1 => non_temporal(map.ptr(0, map.len()), map.len()),
                _ => {
                    memfd::punch(&file, 0, size.0).context("Punching huge pages")?;
                    map.populate(0, map.len()).context("Faulting huge pages in")?;
                }
            }
            let seconds = start.elapsed().as_secs_f64();
            ensure!(last.load(std::sync::atomic::Ordering::Relaxed) == 0, "memory was not zeroed");
            if round > 0 {
                rates[side].push(size.0 as f64 / GIB as f64 / seconds);
            }
        }
    }
    row.figure("zero_memset_gib_per_s", &rates[0]);
    row.figure("zero_nontemporal_gib_per_s", &rates[1]);
    row.figure("zero_kernel_gib_per_s", &rates[2]);
    row.ratio("ratio_nontemporal_memset", &rates[1], &rates[0]);
    Ok(row)
}

/// Zero this memory of a mapping of the bench's own.
pub(super) fn memset(at: *mut u8, len: usize) {
    // SAFETY: the callers pass ranges that they got from `Mapping::ptr`, which checks them, of memory that no other
    // thread uses.
    unsafe { at.write_bytes(0, len) };
}

/// The same with stores past the caches (MOVNTDQ).
#[cfg(target_arch = "x86_64")]
pub(super) fn non_temporal(at: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_setzero_si128, _mm_sfence, _mm_stream_si128};
    for offset in (0..len).step_by(size_of::<__m128i>()) {
        // SAFETY: as in `memset`; ranges of mappings are multiples of a page, so each store is aligned and inside. SSE2
        // is part of x86-64.
        unsafe { _mm_stream_si128(at.add(offset).cast(), _mm_setzero_si128()) };
    }
    // SAFETY: a fence touches no memory; it is part of x86-64.
    unsafe { _mm_sfence() };
}

/// The same with ordinary stores: such stores are not known here.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn non_temporal(at: *mut u8, len: usize) {
    memset(at, len);
}
