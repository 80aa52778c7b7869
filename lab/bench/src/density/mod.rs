//! Many small VMs at once: their speed while all of them read all of their memory, also when the engine is killed.
//!
//! Before: the kernel's swap to zram, if it is available. After: a row for each number of busy VMs, and one for each
//! number of VMs whose engine is killed. Each row has a daemon of its own.
//! Threads: the bench's one; guests are processes. Units: in every key.
//! Promise: the two sides take turns, forwards and backwards; only one side's guests run at a time; every page that is
//! read is compared as a whole.

mod busy;
pub(crate) mod fleet;

use anyhow::{Context, Result};
use ballast_base::units::MIB;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::options::Part;
use crate::report::Row;
use crate::rig::Bench;

const VMS: [usize; 6] = [1, 2, 8, 32, 128, 256];
const QUICK: [usize; 1] = [4];

/// RAM of a guest, so that all of them fit into a host of 16 GiB.
fn ram_bytes(bench: &Bench, vms: usize) -> u64 {
    match vms {
        _ if bench.options.quick => 4 * MIB,
        0..=64 => 32 * MIB,
        65..=256 => 16 * MIB,
        _ => 4 * MIB,
    }
}

/// Raises the limit on descriptors: each guest needs two here.
fn raise_descriptors() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).context("Raising RLIMIT_NOFILE")
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    raise_descriptors()?;
    let quick = bench.options.quick;
    let numbers = match bench.options.vms {
        Some(vms) => vec![vms.into()],
        None if quick => QUICK.to_vec(),
        None => VMS.to_vec(),
    };
    type Run = fn(&mut Bench, usize, u64) -> Result<Row>;
    let parts: [(Part, Run); 2] = [(Part::Busy, busy::row), (Part::Recovery, busy::recovery_row)];
    let only = bench.options.part;
    for (part, run) in parts {
        if only.is_some_and(|only| only != part) {
            continue;
        }
        for vms in numbers.iter().copied() {
            let row = bench.with_settings("", |bench| run(bench, vms, ram_bytes(bench, vms)))?;
            each(row)?;
        }
    }
    Ok(())
}
