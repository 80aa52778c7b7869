//! What a GiB of a VM costs the host beside the GiB: on the pool and managed, on plain huge pages, and in base pages.
//!
//! Before: the host has this much memory twice. After: there is a row. Threads: the bench's one; a VM is a process.
//! Units: bytes per GiB of guest RAM; percent. Promise: every part is measured on this host, except for the size of
//! `struct page`, which is 64 bytes for 4 KiB. KVM's own page tables are not among them: they are as large for a VM of
//! the pool as on huge pages.

use anyhow::{Context, Result};
use ballast_base::{Bytes, GIB, PAGE_SIZE};
use ballast_testvm::{Spec, Workload};

use super::product::Product;
use super::ready::{page_tables_of, touch};
use crate::order::{Backing, Order, Role, WorkloadConfig};
use crate::overhead::Held;
use crate::report::Row;
use crate::rig::Bench;
use crate::worker::Worker;

/// HVO: the kernel frees most of the `struct page`s of a huge page that is reserved from then on.
const HVO: &str = "/proc/sys/vm/hugetlb_optimize_vmemmap";
/// Bytes of `struct page`s for a GiB.
const STRUCT_PAGES: f64 = (64 * GIB / PAGE_SIZE as u64) as f64;

/// The row. From here on, the host has HVO until the bench ends.
pub(super) fn row(bench: &mut Bench, product: &Product, mut row: Row, size: Bytes, rounds: u32) -> Result<Row> {
    row.fact("measures", "cost");
    row.fact("ram_bytes", size.0);
    let gib = size.0 as f64 / GIB as f64;
    let mut parts: [Vec<f64>; 5] = Default::default();
    let mut base = Vec::new();
    let progress = bench.progress.clone();
    for _ in progress.over("round", 0..rounds) {
        product.hold(size)?;
        let before = page_tables_of("self");
        let map = product.take(size)?;
        let pool_tables = (page_tables_of("self") - before) as f64 / gib;
        drop(map);
        product.hold(size)?;
        let engine = bench.engine_pid()?;
        let service_tables =
            || page_tables_of(&engine.to_string()) + page_tables_of(&bench.daemon.keeper_pid().to_string());
        let (held, tables) = (Held::now(bench)?, service_tables());
        let (socket, name) = (bench.daemon.attach_socket(), "cost".to_owned());
        let backing = Backing::Pool { socket, name: name.clone() };
        let spec = Spec::new(Workload::Idle, size);
        let mut vm = Worker::start(&Role::Workload(WorkloadConfig { spec, kvm: false, backing }))?;
        vm.ask(&Order::Attach)?;
        bench.daemon.wait_for_vm(&name)?;
        vm.ask(&Order::Fill)?;
        let now = Held::now(bench)?;
        parts[0].push((now.files - held.files) / gib);
        parts[1].push((now.own - held.own) / gib);
        parts[2].push((service_tables() - tables) as f64 / gib);
        parts[3].push(pool_tables);
        parts[4].push(product.state_bytes()? as f64 / gib);
        drop(vm);
        bench.daemon.wait_until_gone(&name)?;
        product.hold(Bytes(0))?;
        let before = page_tables_of("self");
        let (_, map) = touch(size)?;
        base.push((page_tables_of("self") - before) as f64 / gib);
        drop(map);
    }
    let keys = ["page_words", "engine_memory", "engine_page_tables", "vmm_page_tables", "pool_state"];
    for (key, part) in keys.iter().zip(&parts) {
        row.figure(&format!("{key}_bytes_per_gib"), part);
    }
    row.figure("base_page_tables_bytes_per_gib", &base);
    row.fact("struct_page_bytes_per_gib", STRUCT_PAGES);
    let freed = match freed_by_hvo(bench, product, size) {
        Ok(freed) => Some(freed / gib),
        Err(error) => {
            row.because(&format!("HVO: {error:#}"));
            None
        }
    };
    row.figure("hvo_freed_bytes_per_gib", freed.as_slice());
    // For each round: the sum of all parts, and of the VMM's page tables alone.
    let all: Vec<f64> = (0..base.len()).map(|round| parts.iter().map(|part| part[round]).sum()).collect();
    row.figure("managed_bytes_per_gib", &all);
    let share = |of: &[f64], struct_pages: f64| -> Vec<f64> {
        let gib = GIB as f64;
        of.iter().map(|cost| 100.0 * gib / (gib + cost + struct_pages)).collect()
    };
    row.figure("sellable_share_pct", &share(&all, STRUCT_PAGES));
    row.figure("hugetlb_sellable_share_pct", &share(&parts[3], STRUCT_PAGES));
    row.figure("plain_sellable_share_pct", &share(&base, STRUCT_PAGES));
    for (key, of) in [("sellable_share_hvo_pct", &all), ("hugetlb_sellable_share_hvo_pct", &parts[3])] {
        let shares = freed.map(|freed| share(of, STRUCT_PAGES - freed)).unwrap_or_default();
        row.figure(key, &shares);
    }
    Ok(row)
}

/// Memory of `struct page`s that the host has less of, once the pool has this much with HVO.
fn freed_by_hvo(bench: &mut Bench, product: &Product, size: Bytes) -> Result<f64> {
    product.hold(Bytes(0))?;
    bench.guard.set(HVO, "1")?;
    let before = struct_pages()?;
    product.hold(size)?;
    let after = struct_pages()?;
    product.hold(Bytes(0))?;
    Ok(before - after)
}

/// Bytes of `struct page`s that the kernel has allocated, since Linux 6.11.
fn struct_pages() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/vmstat").context("Reading /proc/vmstat")?;
    let pages = |key: &str| -> Result<f64> {
        let found = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.parse().ok());
        found.with_context(|| format!("/proc/vmstat has no {key}"))
    };
    // The second one shrinks when pages that the kernel allocated at boot are freed.
    Ok((pages("nr_memmap_pages")? + pages("nr_memmap_boot_pages")?) * PAGE_SIZE as f64)
}
