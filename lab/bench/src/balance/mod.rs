//! Many VMs in less memory than they want: Ballast's policies against the kernel, which balances one memory cgroup.
//!
//! Before: Maestro's experiment and Blowfish's (5.2), scaled to this machine. After: by how much VMs get slower at each
//! level of memory, in pairs, how soon a VM whose demand jumps has what it needs, and how much can be taken for 5 %.
//! Threads: the caller's. Units: a slowdown is operations per second without pressure over those with it, of the same VM
//! beside the same others: how many VMs share a CPU is the same above and below the line.
//! Promise: the sides take turns at each level and never run at once; what VMs hold is looked at while they run, and the
//! compressed bytes of either side are on top of it and reported.

mod cast;
mod converge;
mod levels;
mod pairs;
mod ratio;
mod stages;

use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use ballast_base::MIB;
use ballast_policy::Kind;
use ballast_testvm::Workload;

use crate::order::GuestKind;
use crate::report::Row;
use crate::sweep::Side;
use crate::{Bench, Part};

/// The four workloads.
const CAST: [Workload; 4] = [Workload::Store, Workload::Graph, Workload::Matrix, Workload::Scan];

/// What divides the memory on Ballast's side, unless a key names another policy.
const POLICY: Kind = Kind::Gain;

/// How large and how long.
#[derive(Clone, Copy, Debug)]
struct Scale {
    /// RAM of a VM.
    ram_bytes: u64,
    /// From a change of limits until VMs are measured, and for how long, and how often.
    settle: Duration,
    window: Duration,
    windows: usize,
    /// Operations of the store with each pattern: some seconds among eight VMs on two CPUs.
    store_ops: u64,
}

impl Scale {
    fn of(bench: &Bench) -> Self {
        let s = Duration::from_secs;
        if bench.options.quick {
            Self { ram_bytes: 32 * MIB, settle: s(2), window: s(1), windows: 2, store_ops: 10_000 }
        } else {
            Self { ram_bytes: 64 * MIB, settle: s(12), window: s(6), windows: 4, store_ops: 100_000 }
        }
    }
}

/// Measure Ballast, then the kernel, whose figures have `kernel_` before their keys. A kernel that cannot be measured, or ends a
/// VM, leaves its `figure` without a value, and the row says why.
fn both_sides(
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

/// Each two of these; of a quick bench the first two.
fn pairs_of<T>(all: &[T], quick: bool) -> Vec<[&T; 2]> {
    let pairs = all.iter().enumerate().flat_map(|(at, first)| all[at + 1..].iter().map(move |second| [first, second]));
    pairs.take(if quick { 1 } else { usize::MAX }).collect()
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    if bench.options.is(GuestKind::Qemu) {
        bail!("this bench has native and KVM guests alone");
    }
    let scale = Scale::of(bench);
    type Run = fn(&mut Bench, Scale, &mut dyn FnMut(Row) -> Result<()>) -> Result<()>;
    let parts: [(Part, Run); 5] = [
        (Part::Levels, levels::run),
        (Part::Jump, converge::run),
        (Part::Pairs, pairs::run),
        (Part::Stages, stages::run),
        (Part::Memory, ratio::run),
    ];
    let only = bench.options.part;
    parts
        .iter()
        .filter(|(part, _)| only.is_none_or(|only| only == *part))
        .try_for_each(|(_, run)| run(bench, scale, each))
}
