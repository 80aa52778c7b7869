//! Many VMs in less memory than they want: Ballast's policies against the kernel, which balances one memory cgroup.
//!
//! Before: Maestro's experiment, scaled to this machine. After: rows have the slowdown of VMs at each level of memory,
//! and the time until a VM whose demand jumps has its memory.
//! Threads: the caller's. Units: a slowdown is operations per second without pressure over operations per second with
//! it, of one VM among the same others, so the number of VMs that share a CPU cancels out.
//! Promise: the sides take turns at each level and never run at once. The memory of VMs is sampled while they run; the
//! compressed bytes of either side are not included in it and are reported.

mod adopted;
mod cast;
mod converge;
mod levels;
mod setup;

use anyhow::Result;

use self::setup::Scale;
use crate::options::Part;
use crate::report::Row;
use crate::rig::Bench;

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let scale = Scale::of(bench);
    type Run = fn(&mut Bench, Scale, &mut dyn FnMut(Row) -> Result<()>) -> Result<()>;
    let parts: [(Part, Run); 3] =
        [(Part::Levels, levels::run), (Part::Adopted, adopted::run), (Part::Jump, converge::run)];
    let only = bench.options.part;
    parts
        .iter()
        .filter(|(part, _)| only.is_none_or(|only| only == *part))
        .try_for_each(|(_, run)| run(bench, scale, each))
}
