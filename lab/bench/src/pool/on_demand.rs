//! Memory of the daemon's pool that comes as it is touched, beside memory that is all there at once.
//!
//! Before: the pool has memory for one VM. After: there is a row. Threads: the bench's one, which is also the VM's.
//! Units: in the keys; a touch is of a page of 2 MiB, and a time is the mean of a round's. Promise: the two take turns,
//! forwards and backwards, after a round that is not counted; what a touch finds is checked.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ballast_base::{Bytes, HUGE_SIZE, Hva};
use ballast_client::{Client, Ram};
use ballast_sys::{Mapping, memfd};

use super::product::Product;
use crate::report::Row;
use crate::rig::Bench;

/// Figures of the rounds.
#[derive(Default)]
struct Figures {
    ready: [Vec<f64>; 2],
    touch: [Vec<f64>; 2],
}

/// The row.
pub(super) fn row(bench: &mut Bench, product: &Product, mut row: Row, size: Bytes, rounds: u32) -> Result<Row> {
    row.fact("measures", "on_demand");
    row.fact("ram_bytes", size.0);
    // The bench is one VM with other RAM, to which the measured memory is added.
    let own = memfd::create("bench", Bytes(HUGE_SIZE as u64)).context("Making a memory file")?;
    let map = Mapping::shared(&own, 0, HUGE_SIZE).context("Mapping it")?;
    let builder = Client::builder().name(bench.vm_name()).socket(bench.daemon.attach_socket());
    let builder = builder.region(own, Hva(map.addr() as u64), Bytes(HUGE_SIZE as u64), Bytes(0));
    let client = builder.attach().context("Attaching the bench")?;
    let mut figures = Figures::default();
    let progress = bench.progress.clone();
    for round in progress.over("round", 0..=rounds) {
        for side in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
            product.hold(size)?;
            let start = Instant::now();
            let map = if side == 0 { product.take(size)? } else { on_demand(product, &client, size)? };
            let ready = start.elapsed();
            let start = Instant::now();
            for at in (0..map.len()).step_by(HUGE_SIZE) {
                let found = map.words(at, 1)[0].swap(1, Relaxed);
                ensure!(found == 0, "a VM found {found:#x} at {at:#x}: memory of another VM");
            }
            let touched = start.elapsed();
            if side == 1 {
                client.remove_region(Hva(map.addr() as u64)).context("Removing the memory")?;
            }
            drop(map);
            if round > 0 {
                figures.ready[side].push(ready.as_secs_f64() * 1e6);
                figures.touch[side].push(touched.as_secs_f64() * 1e6 / (size.0 / HUGE_SIZE as u64) as f64);
            }
        }
    }
    drop(map);
    for (side, name) in ["at_once", "on_demand"].into_iter().enumerate() {
        row.figure(&format!("{name}_ready_us"), &figures.ready[side]);
        row.figure(&format!("{name}_touch_us"), &figures.touch[side]);
    }
    Ok(row)
}

/// Memory on demand, until a VM may touch it.
fn on_demand(product: &Product, client: &Client, size: Bytes) -> Result<Mapping> {
    let pieces = product.take_on_demand(size)?;
    let places: Vec<_> = pieces.iter().map(|piece| (piece.fd.as_fd(), piece.offset.0, piece.len.0 as usize)).collect();
    let map = Mapping::shared_pieces(&places).context("Mapping memory of the pool")?;
    drop(places);
    let ram = Ram { hva: Hva(map.addr() as u64), extents: pieces, guest_address: None };
    client.add_ram(ram).context("Adding memory of the pool")?;
    Ok(map)
}
