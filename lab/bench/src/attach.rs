//! The cost of an attach: the time for a large VM, and the memory for ten VMs. `ballast bench scale` runs it.
//!
//! Before: a daemon without these VMs. After: the row has the figures, and the VMs and their processes are gone.
//! Units: milliseconds, bytes. Promise: the RAM is sparse, like a new VM's; no page of it is touched.

use std::time::Instant;

use anyhow::{Result, bail};
use ballast_base::units::{GIB, MIB};
use ballast_base::{Bytes, PAGE_SIZE};

use crate::machine;
use crate::order::{Answer, Order, Role, SparseConfig};
use crate::report::Row;
use crate::rig::Bench;
use crate::worker::Worker;

const LARGE: Bytes = Bytes(64 * GIB);
const MANY: usize = 10;
/// Bytes of a page-state word.
const WORD: u64 = 8;

fn start(bench: &mut Bench, ram: Bytes) -> Result<(Worker, f64, f64)> {
    let name = bench.vm_name();
    let config = SparseConfig { socket: bench.daemon.attach_socket(), name: name.clone(), ram_bytes: ram.0 };
    let mut worker = Worker::start(&Role::Sparse(config))?;
    let start = Instant::now();
    let Answer::Attached { wall_us } = worker.ask(&Order::Attach)? else { bail!("a sparse guest does not attach") };
    bench.daemon.wait_for_vm(&name)?;
    Ok((worker, wall_us / 1e3, start.elapsed().as_secs_f64() * 1e3))
}

pub(crate) fn measure(bench: &mut Bench, repetitions: u64, row: &mut Row) -> Result<()> {
    let (mut attach, mut known) = (Vec::new(), Vec::new());
    for _ in bench.progress.over("large VM", 0..=repetitions) {
        let (_worker, attach_ms, known_ms) = start(bench, LARGE)?;
        attach.push(attach_ms);
        known.push(known_ms);
    }
    // The first warms up.
    row.figure("attach_64_gib_ms", &attach[1..]);
    row.figure("attach_64_gib_until_listed_ms", &known[1..]);
    let before = machine::rss_anon(bench.engine_pid()?)?;
    let vms = (0..MANY).map(|_| start(bench, Bytes(64 * MIB))).collect::<Result<Vec<_>>>()?;
    let after = machine::rss_anon(bench.engine_pid()?)?;
    row.fact("engine_rss_bytes_per_vm", after.saturating_sub(before) / vms.len() as u64);
    row.fact("state_bytes_per_gib_of_managed_ram", GIB / PAGE_SIZE as u64 * WORD);
    Ok(())
}
