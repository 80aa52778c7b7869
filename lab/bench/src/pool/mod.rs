//! The pool: its metadata, the memory that VMs can get from it, and the time until that memory can be used.
//!
//! Before: the bench has its guard. After: there are rows of 13 kinds (`measures`). The pool itself computes *metadata*
//! and *churn*, without memory; *ready*, *sold*, *speed* and *zeroing* use real memory, which the guard returns.
//! *start*, *on_demand*, *overcommit*, *largest*, *guest*, *devices* and *cost* are of the daemon's pool.
//! Threads: the bench's one. Units: in the keys. Promise: the bench takes no memory that others may need: it leaves out
//! sizes for which memory is short, with the reason.

mod allocators;
mod bricks;
mod churn;
mod cost;
mod devices;
mod guest;
mod largest;
mod metadata;
mod on_demand;
mod overcommit;
mod pin;
mod product;
mod ready;
mod sizes;
mod sold;
mod speed;
mod start;
mod zeroing;

use anyhow::{Result, bail};
use ballast_api::PoolPages;
use ballast_base::{Bytes, GIB, HUGE_SIZE, MIB};
use ballast_pool::map::SLICE_SIZE;
use ballast_testvm::Workload;

use crate::machine;
use crate::options::Part;
use crate::order::GuestKind;
use crate::report::Row;
use crate::rig::Bench;
use product::Product;

/// Memory that is left to other programs.
const SPARE: Bytes = Bytes(8 * GIB);

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    if !bench.options.is(GuestKind::Native) {
        bail!("this bench has no guests (--guest native)");
    }
    if bench.options.part.is_none() {
        without_a_daemon(bench, each)?;
    }
    of_the_daemon(bench, each)
}

/// Rows of the pool's library, and of the kernel's ways beside it.
fn without_a_daemon(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let quick = bench.options.quick;
    for gib in [384, 1024] {
        each(metadata::row(bench.row(&format!("metadata of {gib} GiB")), gib)?)?;
    }
    let (rounds, steps) = if quick { (1, 50) } else { (5, 2000) };
    for occupancy in [50, 75, 90] {
        each(churn::row(bench.row(&format!("churn at {occupancy} %")), occupancy, rounds, steps)?)?;
    }
    let sizes: &[u64] = if quick { &[256 * MIB] } else { &[GIB, 2 * GIB, 4 * GIB, 8 * GIB, 16 * GIB] };
    let rounds = if quick { 2 } else { 4 };
    let mut huge = HugePages { pages: 0 };
    for size in sizes {
        let row = bench.row(&format!("{} ready", Bytes(*size)));
        each(ready(bench, row, *size, &mut huge, rounds)?)?;
    }
    let size = if quick { 128 * MIB } else { 4 * GIB };
    let row = bench.row(&format!("sold of {}", Bytes(size)));
    if huge.have(bench, size) {
        let (rounds, steps) = if quick { (1, 10) } else { (4, 100) };
        each(sold::row(row, Bytes(size), rounds, steps)?)?;
    } else {
        each(left_out(row, "sold", size, "real_sellable_pct", NO_HUGE_PAGES))?;
    }
    let size = if quick { 64 * MIB } else { 2 * GIB };
    let row = bench.row(&format!("speed of {}", Bytes(size)));
    if huge.have(bench, 2 * size) {
        each(speed::row(row, (size / SLICE_SIZE) as u32, rounds, &bench.progress)?)?;
    } else {
        each(left_out(row, "speed", size, "ratio_guest_speed_hugetlb", NO_HUGE_PAGES))?;
    }
    let zeroed: &[u64] = if quick { &[64 * MIB] } else { &[2 * MIB, 64 * MIB, GIB] };
    for size in zeroed {
        let row = bench.row(&format!("zeroing {}", Bytes(*size)));
        if huge.have(bench, *size) {
            each(zeroing::row(row, Bytes(*size), rounds)?)?;
        } else {
            each(left_out(row, "zeroing", *size, "zero_memset_gib_per_s", NO_HUGE_PAGES))?;
        }
    }
    bench.guard.no_huge_pages()
}

/// Rows of the daemon's pool.
fn of_the_daemon(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let product = Product::start(bench)?;
    let only = bench.options.part;
    let parts: [(Part, Rows); 6] = [
        (Part::Start, starts),
        (Part::OnDemand, on_demands),
        (Part::Guest, guests),
        (Part::Devices, devices),
        (Part::Cost, costs),
        (Part::Largest, largests),
    ];
    for (part, run) in parts {
        if only.is_none_or(|only| only == part) {
            run(bench, &product, each)?;
        }
    }
    Ok(())
}

type Rows = fn(&mut Bench, &Product, &mut dyn FnMut(Row) -> Result<()>) -> Result<()>;

/// `None` if the host has this much to spare, and the pool gets its part; else the reason.
fn short_of(size: u64, of_pool: Bytes, product: &Product) -> Option<String> {
    let (available, needed) = (machine::mem_available().unwrap_or_default(), size + SPARE.0 / 2);
    if available < needed {
        return Some(format!("{} are available, and {} are needed", Bytes(available), Bytes(needed)));
    }
    product.hold(of_pool).err().map(|error| error.to_string())
}

fn starts(bench: &mut Bench, product: &Product, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let sizes: &[u64] = if bench.options.quick { &[128 * MIB] } else { &[GIB, 2 * GIB, 4 * GIB, 8 * GIB, 16 * GIB] };
    for size in sizes {
        // A round of 16 GiB takes half a minute.
        let rounds = if bench.options.quick {
            1
        } else if *size > 4 * GIB {
            2
        } else {
            4
        };
        let row = bench.row(&format!("start with {}", Bytes(*size)));
        // One side at a time has the memory.
        match short_of(*size, Bytes(*size), product) {
            None => each(start::row(bench, product, row, Bytes(*size), rounds)?)?,
            Some(why) => each(left_out(row, "start", *size, "product_ready_us", &why))?,
        }
    }
    Ok(())
}

fn on_demands(bench: &mut Bench, product: &Product, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (sizes, rounds): (&[u64], _) = if bench.options.quick { (&[128 * MIB], 1) } else { (&[GIB, 4 * GIB], 6) };
    for size in sizes {
        let row = bench.row(&format!("{} on demand", Bytes(*size)));
        match short_of(*size, Bytes(*size), product) {
            None => each(on_demand::row(bench, product, row, Bytes(*size), rounds)?)?,
            Some(why) => each(left_out(row, "on_demand", *size, "on_demand_ready_us", &why))?,
        }
    }
    let (size, rounds) = if bench.options.quick { (128 * MIB, 1) } else { (GIB, 6) };
    let row = bench.row(&format!("1.5 times {} on demand", Bytes(size)));
    match short_of(2 * size, Bytes(size), product) {
        None => each(overcommit::row(bench, product, row, Bytes(size), rounds)?),
        Some(why) => each(left_out(row, "overcommit", size, "overcommit_refault_mib_per_s", &why)),
    }
}

fn largests(bench: &mut Bench, product: &Product, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let rounds = if bench.options.quick { 1 } else { 4 };
    for (pages, name) in [(PoolPages::Huge, "2 MiB"), (PoolPages::Gib, "1 GiB")] {
        // A small machine may have no GiB in one piece.
        if bench.options.quick && pages == PoolPages::Gib {
            continue;
        }
        let row = bench.row(&format!("largest reservation of pages of {name}"));
        each(largest::row(bench, product, row, pages, rounds)?)?;
    }
    Ok(())
}

fn guests(bench: &mut Bench, product: &Product, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let quick = bench.options.quick;
    let scale = match quick {
        true => guest::Scale { ram: Bytes(32 * MIB), repetitions: 1, turns: 2, ms: 20 },
        false => guest::Scale { ram: Bytes(256 * MIB), repetitions: 8, turns: 6, ms: 100 },
    };
    let kvm = ballast_testvm::kvm_missing().is_none();
    let workloads: &[(Workload, &str)] = &[
        (Workload::Matrix, "matrix"),
        (Workload::Sequential, "sequential"),
        (Workload::Uniform, "uniform"),
        (Workload::Store, "store"),
    ];
    for (workload, name) in &workloads[..if quick { 1 } else { workloads.len() }] {
        let mut row = bench.row(&format!("{name} on the pool"));
        row.fact("workload", *name);
        let short = short_of(3 * scale.ram.0, scale.ram, product);
        if short.is_none() && bench.guard.huge_pages(2 * product::huge_pages(scale.ram)).is_ok() {
            each(guest::row(bench, product, row, *workload, kvm, &scale)?)?;
            bench.guard.no_huge_pages()?;
        } else {
            let why = short.unwrap_or_else(|| NO_HUGE_PAGES.into());
            each(left_out(row, "guest", scale.ram.0, "ratio_guest_speed_pool", &why))?;
        }
    }
    Ok(())
}

fn devices(bench: &mut Bench, product: &Product, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    // Two guests boot, which takes minutes on a busy machine.
    if bench.options.quick && bench.options.part.is_none() {
        return Ok(());
    }
    let rounds = if bench.options.quick { 1 } else { 8 };
    let row = bench.row("disk and network on the pool");
    let short = short_of(3 * devices::RAM.0, devices::RAM, product);
    if short.is_none() && bench.guard.huge_pages(product::huge_pages(devices::RAM)).is_ok() {
        each(devices::row(bench, row, rounds)?)?;
        return bench.guard.no_huge_pages();
    }
    let why = short.unwrap_or_else(|| NO_HUGE_PAGES.into());
    each(left_out(row, "devices", devices::RAM.0, "ratio_disk_pool", &why))
}

fn costs(bench: &mut Bench, product: &Product, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (size, rounds) = if bench.options.quick { (128 * MIB, 1) } else { (GIB, 4) };
    let row = bench.row(&format!("cost of {}", Bytes(size)));
    match short_of(2 * size, Bytes(size), product) {
        None => each(cost::row(bench, product, row, Bytes(size), rounds)?),
        Some(why) => each(left_out(row, "cost", size, "sellable_share_pct", &why)),
    }
}

/// The reason for a missing row.
const NO_HUGE_PAGES: &str = "the host does not have that many free huge pages";

/// Huge pages that the guard has reserved and will return.
struct HugePages {
    pages: u64,
}

impl HugePages {
    /// Are there enough for this many bytes? If not, more are reserved.
    fn have(&mut self, bench: &mut Bench, bytes: u64) -> bool {
        let more = (bytes / HUGE_SIZE as u64).saturating_sub(self.pages);
        let got = more == 0 || bench.guard.huge_pages(more).is_ok();
        self.pages += if got { more } else { 0 };
        got
    }
}

/// A row without figures.
fn left_out(mut row: Row, measures: &str, bytes: u64, key: &str, why: &str) -> Row {
    row.fact("measures", measures);
    row.fact("ram_bytes", bytes);
    row.because(why);
    row.figure(key, &[]);
    row
}

/// The row of a size, if there is memory for it: for the pool, a file of huge pages, and one of base pages at a time.
fn ready(bench: &mut Bench, row: Row, size: u64, huge: &mut HugePages, rounds: u32) -> Result<Row> {
    let room = machine::mem_available().unwrap_or_default() + huge.pages * HUGE_SIZE as u64;
    if room < 3 * size + SPARE.0 {
        let why = format!("{} are available, and {} are needed", Bytes(room), Bytes(3 * size + SPARE.0));
        return Ok(left_out(row, "ready", size, "ready_us", &why));
    }
    if !huge.have(bench, 2 * size) {
        return Ok(left_out(row, "ready", size, "ready_us", NO_HUGE_PAGES));
    }
    ready::row(row, (size / SLICE_SIZE) as u32, rounds, &bench.progress)
}
