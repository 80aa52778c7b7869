//! The pool: the time until a VM can use its memory.
//!
//! Before: the bench has its guard. After: a row for each size of a VM. The guard returns all memory.
//! Threads: the bench's one. Units: in the keys. Promise: the bench takes no memory that others may need: it leaves out
//! sizes for which memory is short, and says why.

mod pin;
mod product;
mod start;

use anyhow::Result;
use ballast_base::{Bytes, GIB, MIB};
use ballast_sys::meminfo;

use crate::report::Row;
use crate::rig::Bench;
use product::Product;

const SPARE: u64 = 4 * GIB;

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let product = Product::start(bench)?;
    let sizes: &[u64] = if bench.options.quick { &[128 * MIB] } else { &[GIB, 2 * GIB, 4 * GIB, 8 * GIB, 16 * GIB] };
    for size in sizes.iter().copied() {
        // A round of 16 GiB takes half a minute.
        let rounds = match bench.options.quick {
            true => 1,
            false if size > 4 * GIB => 2,
            false => 4,
        };
        let mut row = bench.row(&format!("start with {}", Bytes(size)));
        row.fact("measures", "start");
        row.fact("ram_bytes", size);
        match short_of(size, &product) {
            None => each(start::row(bench, &product, row, Bytes(size), rounds)?)?,
            Some(why) => {
                row.because(&why);
                row.figure("product_ready_us", &[]);
                each(row)?;
            }
        }
    }
    Ok(())
}

/// Returns the reason if the host has less to spare; otherwise the pool gets it. One side at a time has memory.
fn short_of(size: u64, product: &Product) -> Option<String> {
    let (available, needed) = (meminfo::bytes("MemAvailable").unwrap_or_default(), size + SPARE);
    if available < needed {
        return Some(format!("{} are available, and {} are needed", Bytes(available), Bytes(needed)));
    }
    product.hold(Bytes(size)).err().map(|error| error.to_string())
}
