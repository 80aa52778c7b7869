//! Memory of the daemon's pool that comes as it is touched, beside memory that is all there at once, and beside huge
//! pages that the kernel gives when they are touched (hugetlb).
//!
//! Before: the pool has memory for one VM. After: there is a row. Threads: the bench's one, which is also the VM's.
//! Units: in the keys; a touch is of a page of 2 MiB. Promise: the sides take turns, forwards and backwards, after a
//! round that is not counted, and one has the memory at a time; what a touch finds is checked.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ballast_base::{Bytes, HUGE_SIZE, Hva};
use ballast_client::{Client, Ram};
use ballast_sys::{Mapping, memfd};

use super::product::{Product, huge_pages};
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::Summary;

/// Figures of the rounds.
#[derive(Default)]
struct Figures {
    ready: [Vec<f64>; 3],
    touch: [Vec<f64>; 3],
    /// Median, and 99th percentile.
    touches: [[Vec<f64>; 2]; 3],
}

const SIDES: [&str; 3] = ["at_once", "on_demand", "hugetlb"];

/// Median and 99th percentile of these times of a round, in microseconds.
pub(super) fn percentiles(times_ns: &mut [u32]) -> [f64; 2] {
    let summary = Summary::of(times_ns);
    [summary.p50_us, summary.p99_us]
}

/// Attaches the bench as a VM with other RAM, to which the measured memory is added. Returns that RAM, too.
pub(super) fn attach(bench: &Bench, name: String) -> Result<(Client, Mapping)> {
    let own = memfd::create("bench", Bytes(HUGE_SIZE as u64)).context("Making a memory file")?;
    let map = Mapping::shared(&own, 0, HUGE_SIZE).context("Mapping it")?;
    let builder = Client::builder().name(name).socket(bench.daemon.attach_socket());
    let builder = builder.region(own, Hva(map.addr() as u64), Bytes(HUGE_SIZE as u64), Bytes(0));
    Ok((builder.attach().context("Attaching the bench")?, map))
}

/// The row.
pub(super) fn row(bench: &mut Bench, product: &Product, mut row: Row, size: Bytes, rounds: u32) -> Result<Row> {
    row.fact("measures", "on_demand");
    row.fact("ram_bytes", size.0);
    let name = bench.vm_name();
    let (client, map) = attach(bench, name)?;
    let mut figures = Figures::default();
    let progress = bench.progress.clone();
    for round in progress.over("round", 0..=rounds) {
        for side in if round % 2 == 0 { [0, 1, 2] } else { [2, 1, 0] } {
            product.hold(if side == 2 { Bytes(0) } else { size })?;
            if side == 2 {
                bench.guard.huge_pages(huge_pages(size))?;
            }
            let start = Instant::now();
            let map = match side {
                0 => product.take(size)?,
                1 => on_demand(product, &client, size)?,
                _ => hugetlb(size)?,
            };
            let ready = start.elapsed();
            let (start, mut touches) = (Instant::now(), Vec::with_capacity(map.len() / HUGE_SIZE));
            for at in (0..map.len()).step_by(HUGE_SIZE) {
                let begun = Instant::now();
                let found = map.words(at, 1)[0].swap(1, Relaxed);
                touches.push(begun.elapsed().as_nanos() as u32);
                ensure!(found == 0, "a VM found {found:#x} at {at:#x}: memory of another VM");
            }
            let touched = start.elapsed();
            if side == 1 {
                client.remove_region(Hva(map.addr() as u64)).context("Removing the memory")?;
            }
            drop(map);
            if side == 2 {
                bench.guard.no_huge_pages()?;
            }
            if round > 0 {
                figures.ready[side].push(ready.as_secs_f64() * 1e6);
                figures.touch[side].push(touched.as_secs_f64() * 1e6 / touches.len() as f64);
                let found = percentiles(&mut touches);
                figures.touches[side].iter_mut().zip(found).for_each(|(all, one)| all.push(one));
            }
        }
    }
    drop(map);
    for (side, name) in SIDES.into_iter().enumerate() {
        row.figure(&format!("{name}_ready_us"), &figures.ready[side]);
        row.figure(&format!("{name}_touch_us"), &figures.touch[side]);
        let [half, most] = &figures.touches[side];
        row.figure(&format!("{name}_touch_us_p50"), half);
        row.figure(&format!("{name}_touch_us_p99"), most);
    }
    row.ratio("ratio_touch_on_demand", &figures.touch[1], &figures.touch[2]);
    Ok(row)
}

/// A file of huge pages that the host has reserved, none of which was touched.
fn hugetlb(size: Bytes) -> Result<Mapping> {
    let file = memfd::create_huge("ballast-bench-hugetlb", size).context("Making a file of huge pages")?;
    Mapping::shared(&file, 0, size.0 as usize).context("Mapping it")
}

/// Memory on demand, until a VM may touch it.
pub(super) fn on_demand(product: &Product, client: &Client, size: Bytes) -> Result<Mapping> {
    let pieces = product.take_on_demand(size)?;
    let places: Vec<_> = pieces.iter().map(|piece| (piece.fd.as_fd(), piece.offset.0, piece.len.0 as usize)).collect();
    let map = Mapping::shared_pieces(&places).context("Mapping memory of the pool")?;
    drop(places);
    let ram = Ram { hva: Hva(map.addr() as u64), extents: pieces, guest_address: None };
    client.add_ram(ram).context("Adding memory of the pool")?;
    Ok(map)
}
