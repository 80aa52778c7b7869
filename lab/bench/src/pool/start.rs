//! A VM's start on the daemon's own pool: memory for a VMM, pinned as for a device or not, and QEMU until it answers.
//!
//! Before: the host has this much memory, and some to spare. After: there is a row. Units: microseconds and, of QEMU,
//! milliseconds.
//! Promise: the sides take turns, forwards and backwards, after an uncounted round. One side at a time has the memory,
//! so a VM may be nearly as large as the host. No side pays for memory that a hypervisor below must find first: the
//! memory of the kernel's ways was touched once before they are measured. Memory of the pool is checked for data of
//! others.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use ballast_base::{Bytes, GIB, MIB, PAGE_SIZE};
use ballast_sys::{Mapping, memfd};
use ballast_testkit::program::Ends;
use ballast_testvm::qemu::{QEMU, qemu_missing};
use rustix::process::Signal;

use super::pin::Pinned;
use super::product::{Product, huge_pages};
use crate::report::{Figures, Row};
use crate::rig::Bench;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Pool,
    /// Huge pages that the kernel has reserved.
    Hugetlb,
    Memfd,
}

/// Names of the sides, in the order of the figures.
const NAMES: [&str; 3] = ["product", "hugetlb", "memfd_touch"];
const SIDES: [Side; 3] = [Side::Pool, Side::Hugetlb, Side::Memfd];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ram {
    /// 128 MiB of its own, without Ballast.
    Plain,
    /// 128 MiB in a memory file, by `ballast run`.
    Run,
    /// Memory of the pool, by `ballast run --pool`.
    Pool,
    PoolOnDemand,
    /// As `Pool`, and QEMU locks all its memory.
    PoolLocked,
    /// Huge pages, faulted in by QEMU (`prealloc=on`), without Ballast.
    Hugetlb,
    /// Huge pages, and QEMU locks all its memory.
    HugetlbLocked,
    /// A memory file, faulted in by QEMU.
    Memfd,
}

const RAMS: [(Ram, &str); 8] = [
    (Ram::Plain, "qemu_plain_128mib_ms"),
    (Ram::Run, "qemu_run_128mib_ms"),
    (Ram::Pool, "qemu_pool_ms"),
    (Ram::PoolLocked, "qemu_pool_locked_ms"),
    (Ram::Hugetlb, "qemu_hugetlb_prealloc_ms"),
    (Ram::HugetlbLocked, "qemu_hugetlb_locked_ms"),
    (Ram::Memfd, "qemu_memfd_prealloc_ms"),
    (Ram::PoolOnDemand, "qemu_pool_on_demand_ms"),
];

/// The largest VM in base pages, because touching more takes minutes.
const MOST_BASE: Bytes = Bytes(4 * GIB);

pub(super) fn row(bench: &mut Bench, product: &Product, mut row: Row, size: Bytes, rounds: u32) -> Result<Row> {
    let without = qemu_missing();
    let mut figures = Figures::default();
    let progress = bench.progress.clone();
    for round in progress.over("round", 0..=rounds) {
        let groups: [&[Ram]; 4] = [
            &[Ram::Plain, Ram::Run],
            &[Ram::Pool, Ram::PoolOnDemand, Ram::PoolLocked],
            &[Ram::Hugetlb, Ram::HugetlbLocked],
            &[Ram::Memfd],
        ];
        for group in if round % 2 == 0 { [0usize, 1, 2, 3] } else { [3, 2, 1, 0] } {
            if group == 3 && size > MOST_BASE {
                continue;
            }
            let of_pool = if group == 1 { size } else { Bytes(0) };
            product.hold(of_pool)?;
            if group == 2 {
                bench.guard.huge_pages(huge_pages(size))?;
            }
            if let Some(at) = group.checked_sub(1) {
                let (ready, pinned) = memory(product, SIDES[at], size)?;
                figures.add(&format!("{}_ready_us", NAMES[at]), ready);
                figures.add(&format!("{}_pinned_ready_us", NAMES[at]), pinned);
            }
            for ram in groups[group].iter().filter(|_| without.is_none()) {
                product.hold(of_pool)?;
                let (_, key) = RAMS.iter().find(|(other, _)| other == ram).context("every way is in the list")?;
                let took = until_qmp(bench, *ram, size).with_context(|| format!("Starting QEMU: {ram:?}"))?;
                figures.add(key, took);
            }
            if group == 2 {
                bench.guard.no_huge_pages()?;
            }
        }
        // The first round warms up: memory that the host uses for the first time is slow.
        if round == 0 {
            figures = Figures::default();
        }
    }
    product.hold(Bytes(0))?;
    let of = |key: &str| figures.of(key);
    for end in ["ready", "pinned_ready"] {
        let keys = NAMES.map(|name| format!("{name}_{end}_us"));
        keys.iter().for_each(|key| row.figure(key, of(key)));
        row.ratio(&format!("ratio_product_{end}"), of(&keys[0]), of(&keys[1]));
    }
    RAMS.iter().for_each(|(_, key)| row.figure(key, of(key)));
    for name in ["qemu_run", "qemu_pool"] {
        let ours = if name == "qemu_run" { of("qemu_run_128mib_ms") } else { of("qemu_pool_ms") };
        let beyond = ours.iter().zip(of("qemu_plain_128mib_ms")).map(|(ours, plain)| ours - plain);
        row.difference(&format!("{name}_beyond_plain_ms"), &beyond.collect::<Vec<_>>());
    }
    row.ratio("ratio_qemu_pool", of("qemu_pool_ms"), of("qemu_hugetlb_prealloc_ms"));
    row.ratio("ratio_qemu_locked", of("qemu_pool_locked_ms"), of("qemu_hugetlb_locked_ms"));
    without.iter().for_each(|why| row.because(why));
    if size > MOST_BASE {
        row.because("a memory file this large is not touched");
    }
    Ok(row)
}

/// The time until memory of this side can be used, and the time until it is pinned.
fn memory(product: &Product, side: Side, size: Bytes) -> Result<(f64, f64)> {
    let (ready, map) = ready(product, side, size)?;
    let (pin, pinned) = Pinned::new(&map)?;
    if side == SIDES[0] {
        check_and_mark(&map)?;
    }
    drop(pinned);
    Ok((ready, ready + pin))
}

/// The time until memory of this side can be used, and the memory.
fn ready(product: &Product, side: Side, size: Bytes) -> Result<(f64, Mapping)> {
    match side {
        Side::Pool => {
            let start = Instant::now();
            let map = product.take(size)?;
            Ok((start.elapsed().as_secs_f64() * 1e6, map))
        }
        Side::Hugetlb => {
            drop(hugetlb(size)?);
            hugetlb(size)
        }
        Side::Memfd => {
            drop(touch(size)?);
            touch(size)
        }
    }
}

/// A file of huge pages that the host has reserved, mapped and faulted in: the kernel zeroes them.
fn hugetlb(size: Bytes) -> Result<(f64, Mapping)> {
    let start = Instant::now();
    let file = memfd::create_huge("ballast-bench-hugetlb", size).context("Making a file of huge pages")?;
    let map = Mapping::shared(&file, 0, size.0 as usize)?;
    map.populate(0, map.len()).context("Faulting huge pages in")?;
    Ok((start.elapsed().as_secs_f64() * 1e6, map))
}

fn touch(size: Bytes) -> Result<(f64, Mapping)> {
    let start = Instant::now();
    let file = memfd::create("ballast-bench-touch", size).context("Making a memory file")?;
    let map = Mapping::shared(&file, 0, size.0 as usize)?;
    (0..map.len()).step_by(PAGE_SIZE).for_each(|offset| map.words(offset, 1)[0].store(1, Relaxed));
    Ok((start.elapsed().as_secs_f64() * 1e6, map))
}

/// Checks that no page has data of another VM, and writes data for the next check to find.
fn check_and_mark(map: &Mapping) -> Result<()> {
    for at in (0..map.len()).step_by(PAGE_SIZE) {
        let found = map.words(at, 1)[0].swap(0x005e_c2e7_005e_c2e7, Relaxed);
        ensure!(found == 0, "a VM found {found:#x} at {at:#x}: memory of another VM");
    }
    Ok(())
}

/// Milliseconds from the start of QEMU, stopped and without devices, until it answers.
fn until_qmp(bench: &mut Bench, ram: Ram, size: Bytes) -> Result<f64> {
    let ours = match ram {
        Ram::Run => Some("--add-memory-backend"),
        Ram::Pool | Ram::PoolLocked => Some("--pool=2M"),
        Ram::PoolOnDemand => Some("--pool=on-demand"),
        _ => None,
    };
    let mut command = match ours {
        None => Command::new(QEMU),
        Some(how) => {
            let name = bench.vm_name();
            let words = bench.daemon.run_words(&name, &[how])?;
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]).arg(QEMU);
            command
        }
    };
    let mib = if matches!(ram, Ram::Plain | Ram::Run) { 128 } else { size.0 / MIB };
    let own = match ram {
        Ram::Hugetlb => Some(",hugetlb=on,hugetlbsize=2M,prealloc=on"),
        Ram::HugetlbLocked => Some(",hugetlb=on,hugetlbsize=2M"),
        Ram::Memfd => Some(",prealloc=on"),
        _ => None,
    };
    command.args(["-nodefaults", "-display", "none", "-accel", "tcg,tb-size=16", "-S", "-qmp", "stdio"]);
    command.args(["-m", &format!("{mib}M"), "-machine", if own.is_some() { "pc,memory-backend=r" } else { "pc" }]);
    if let Some(own) = own {
        command.args(["-object", &format!("memory-backend-memfd,id=r,size={mib}M,share=on{own}")]);
    }
    if matches!(ram, Ram::PoolLocked | Ram::HugetlbLocked) {
        command.args(["-overcommit", "mem-lock=on"]);
    }
    // SAFETY: the closure makes one system call in the child, which also holds after `ballast run` has become QEMU.
    unsafe {
        command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?));
    }
    let start = Instant::now();
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut running = Ends(child.context("Starting QEMU")?);
    let (input, output) = (running.0.stdin.take(), running.0.stdout.take());
    let (mut input, output) = input.zip(output).context("QEMU has no input or no output")?;
    input.write_all(b"{\"execute\":\"qmp_capabilities\"}\n").context("Asking QEMU")?;
    for line in BufReader::new(output).lines() {
        if line.context("Reading QEMU's answer")?.contains("\"return\"") {
            return Ok(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    let mut said = String::new();
    if let Some(mut errors) = running.0.stderr.take() {
        let _ = std::io::Read::read_to_string(&mut errors, &mut said);
    }
    bail!("QEMU ended: {said}")
}
