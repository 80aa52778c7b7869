//! The speed of a guest on memory of the daemon's pool, managed and without a limit, beside one on plain huge pages.
//!
//! Before: the pool has as much as a guest's RAM, and the host twice that in huge pages. After: there is a row.
//! Threads: guests are processes. Units: operations per second. Promise: three guests run the same workload in short
//! turns, one at a time: one on the pool, and two on huge pages without Ballast, which give the noise. Each repetition
//! has guests of its own, because the place of memory matters, too. Every word that a guest reads is checked.

use anyhow::Result;
use ballast_base::Bytes;
use ballast_testvm::{Spec, Workload};

use super::product::Product;
use crate::idle::Contestant;
use crate::order::{Backing, Order, WorkloadConfig};
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::median;

/// Turns that are not counted, for caches and the processor's clock.
const SETTLE: usize = 2;

/// How much is measured.
pub(super) struct Scale {
    pub(super) ram: Bytes,
    pub(super) repetitions: u32,
    pub(super) turns: usize,
    pub(super) ms: u64,
}

/// The row of one workload.
pub(super) fn row(
    bench: &mut Bench,
    product: &Product,
    mut row: Row,
    workload: Workload,
    kvm: bool,
    scale: &Scale,
) -> Result<Row> {
    row.fact("measures", "guest");
    row.fact("ram_bytes", scale.ram.0);
    row.fact("in_kvm", kvm);
    let (mut speeds, mut ratios, mut noise): ([Vec<f64>; 2], Vec<f64>, Vec<f64>) = Default::default();
    let progress = bench.progress.clone();
    for _ in progress.over("guests", 0..scale.repetitions) {
        product.hold(scale.ram)?;
        let mut start = |on_pool: bool| -> Result<Contestant> {
            let (name, socket) = (bench.vm_name(), bench.daemon.attach_socket());
            let backing = if on_pool { Backing::Pool { socket, name } } else { Backing::Floor };
            let mut spec = Spec::new(workload, scale.ram);
            spec.huge_pages = true;
            spec.move_at = Some(u64::MAX);
            Contestant::attached(WorkloadConfig { spec, kvm, backing }, on_pool)
        };
        let mut guests = [start(true)?, start(false)?, start(false)?];
        let mut turns: [Vec<f64>; 3] = Default::default();
        for turn in 0..SETTLE + scale.turns {
            let order = if turn % 2 == 0 { [0, 1, 2] } else { [2, 1, 0] };
            for guest in order {
                let [ops_per_s, _] = guests[guest].speed(scale.ms)?;
                if turn >= SETTLE {
                    turns[guest].push(ops_per_s);
                }
            }
        }
        let [Some(pool), Some(plain), Some(other)] = turns.map(|turns| median(&turns)) else { continue };
        for guest in &mut guests {
            guest.turn(&Order::Verify)?;
        }
        speeds[0].push(pool);
        speeds[1].push(plain);
        ratios.push(pool / (plain * other).sqrt());
        noise.push(other / plain);
    }
    row.figure("pool_ops_per_s", &speeds[0]);
    row.figure("hugetlb_ops_per_s", &speeds[1]);
    row.figure("ratio_guest_speed_pool", &ratios);
    row.figure("ratio_guest_speed_aa", &noise);
    Ok(row)
}
