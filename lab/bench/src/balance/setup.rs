//! The common parts of this bench: workloads, policy, sizes and times.
//!
//! Before: `mod` knows which part runs. After: a part starts its VMs.
//! Threads: the caller's. Units: bytes, time. Promise: Ballast is measured before the kernel, whose failure is a reason
//! in the row and not an error.

use std::time::Duration;

use anyhow::{Result, anyhow};
use ballast_base::MIB;
use ballast_policy::Kind;
use ballast_testvm::Workload;

use crate::report::Row;
use crate::rig::Bench;
use crate::sweep::Side;

/// The four workloads.
pub(super) const CAST: [Workload; 4] = [Workload::Store, Workload::Graph, Workload::Matrix, Workload::Scan];

/// The policy that divides the memory on Ballast's side, unless a key names another one.
pub(super) const POLICY: Kind = Kind::Gain;

/// Sizes and times.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// RAM of a VM.
    pub(super) ram_bytes: u64,
    /// Time from a change of limits until VMs are measured.
    pub(super) settle: Duration,
    /// Length of one measurement.
    pub(super) window: Duration,
    /// Number of measurements.
    pub(super) windows: usize,
    /// Operations of the store with each pattern: some seconds among eight VMs on two CPUs.
    pub(super) store_ops: u64,
}

impl Scale {
    /// The scale that the options ask for.
    pub(super) fn of(bench: &Bench) -> Self {
        let s = Duration::from_secs;
        if bench.options.quick {
            Self {
                ram_bytes: 32 * MIB,
                settle: s(1),
                window: Duration::from_millis(500),
                windows: 2,
                store_ops: 10_000,
            }
        } else {
            Self { ram_bytes: 64 * MIB, settle: s(12), window: s(6), windows: 4, store_ops: 100_000 }
        }
    }
}

/// Measure Ballast, then the kernel, whose keys begin with `kernel_`. If the kernel cannot be measured, or ends a VM,
/// its `figure` has no value, and the row says why.
pub(super) fn both_sides(
    bench: &mut Bench,
    row: &mut Row,
    figure: &str,
    mut measure: impl FnMut(&mut Bench, &mut Row, Side, &str) -> Result<()>,
) -> Result<()> {
    measure(bench, row, Side::Ballast, "")?;
    let kernel = match bench.kernel.clone() {
        Ok(_) => measure(bench, row, Side::Kernel, "kernel_"),
        Err(why) => Err(anyhow!("{why}")),
    };
    if let Err(error) = kernel {
        row.because(&format!("the kernel: {error:#}"));
        row.figure(&format!("kernel_{figure}"), &[]);
    }
    Ok(())
}

/// All pairs of these; a quick bench has the first pair.
pub(super) fn pairs_of<T>(all: &[T], quick: bool) -> Vec<[&T; 2]> {
    let pairs = all.iter().enumerate().flat_map(|(at, first)| all[at + 1..].iter().map(move |second| [first, second]));
    pairs.take(if quick { 1 } else { usize::MAX }).collect()
}
