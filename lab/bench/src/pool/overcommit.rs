//! Memory on demand of which half as much again is promised as the pool has: a VM that goes through all of it again and
//! again, so that every page of 2 MiB that it touches has gone far.
//!
//! Before: the pool has this much memory. After: there is a row. Threads: the bench's one, which is also the VM's.
//! Units: in the keys; a touch is of a page of 2 MiB. Promise: half of each 128 bytes are noise, and what a touch finds
//! is checked.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_base::{Bytes, HUGE_SIZE, Hva};
use ballast_sys::Mapping;

use super::on_demand::{attach, on_demand, percentiles};
use super::product::Product;
use crate::report::Row;
use crate::rig::Bench;

/// What may be promised, in percent.
const PERCENT: u32 = 150;
const SERVED_WITHIN: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(2);

/// The row of a pool of this size.
pub(super) fn row(bench: &mut Bench, product: &Product, mut row: Row, size: Bytes, rounds: u32) -> Result<Row> {
    row.fact("measures", "overcommit");
    row.fact("pool_bytes", size.0);
    row.fact("promised_pct", PERCENT);
    product.hold(size)?;
    product.overcommit(size, PERCENT)?;
    let name = bench.vm_name();
    let (client, _ram) = attach(bench, name.clone())?;
    // Two parts of three quarters: the second one is promised because the first can go far.
    let half = Bytes(size.0 * 3 / 4 / HUGE_SIZE as u64 * HUGE_SIZE as u64);
    let first = on_demand(product, &client, half)?;
    fill(&first);
    // It counts once the engine has it.
    let start = Instant::now();
    while product.vm(&name)?.size_bytes < half.0 {
        ensure!(start.elapsed() < SERVED_WITHIN, "the engine does not serve memory that was added");
        std::thread::sleep(PAUSE);
    }
    let second = on_demand(product, &client, half)?;
    fill(&second);
    let (mut rates, mut refaults, mut p50, mut p99) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let progress = bench.progress.clone();
    for round in progress.over("round", 0..=rounds) {
        let before = product.vm(&name)?.faults.restore;
        let (start, mut touches) = (Instant::now(), Vec::new());
        for part in [&first, &second] {
            for at in (0..part.len()).step_by(HUGE_SIZE) {
                let begun = Instant::now();
                let found = part.words(at, 1)[0].load(Relaxed);
                touches.push(begun.elapsed().as_nanos() as u32);
                ensure!(found == noise(at), "a VM lost what it wrote at {at:#x}");
            }
        }
        let took = start.elapsed().as_secs_f64();
        let restored = product.vm(&name)?.faults.restore - before;
        if round > 0 {
            rates.push(restored as f64 * 2.0 / took);
            refaults.push(restored as f64 / touches.len() as f64 * 100.0);
            let [half, most] = percentiles(&mut touches);
            p50.push(half);
            p99.push(most);
        }
    }
    row.figure("overcommit_refault_mib_per_s", &rates);
    row.figure("overcommit_refaults_pct", &refaults);
    row.figure("overcommit_touch_us_p50", &p50);
    row.figure("overcommit_touch_us_p99", &p99);
    for part in [first, second] {
        client.remove_region(Hva(part.addr() as u64)).context("Removing the memory")?;
    }
    drop(client);
    product.hold(size)?;
    product.overcommit(size, 100)?;
    Ok(row)
}

/// What is at this place.
fn noise(at: usize) -> u64 {
    (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

fn fill(map: &Mapping) {
    for at in (0..map.len()).step_by(HUGE_SIZE) {
        for (number, word) in map.words(at, HUGE_SIZE / 8).iter().enumerate().filter(|(number, _)| number % 16 < 8) {
            word.store(noise(at + number * 8), Relaxed);
        }
    }
}
