//! Finds how much of a guest's memory can be taken before it is slower than allowed.
//!
//! Before: a spec, and the side that takes the memory: Ballast by its limit, or the kernel by a memory cgroup and swap.
//! After: the largest part of RAM is known that was taken while the guest was no slower than allowed.
//! Threads: the bench's one; guests are processes. Units: fractions of the guest's RAM; percent of its speed.
//! Promise: the reference is a second guest with the same spec and no limit. The two run in short turns, never at once,
//! so the machine's other load affects both alike. Their difference without a limit is measured first and subtracted.
//! Nothing is measured before the guest has settled, and a limit that is not kept does not count as taken.
//!
//! ```text
//! warm up | base: both free | bisection: limit, settle, slices in turns | ... | every word is compared
//! ```

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use ballast_api::Track;
use ballast_testvm::Spec;

use crate::cgroup;
use crate::idle::Contestant;
use crate::order::{Answer, Backing, GuestKind, Order, WorkloadConfig};
use crate::rig::Bench;
use crate::stats::median;

/// The side that takes the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Ballast, by its limit.
    Ballast,
    /// The kernel: a memory cgroup and swap. The bench must have taken the swap ([`crate::guard::Guard::swap`]).
    Kernel,
    /// Ballast's policies with the kernel's swap: VMs that are adopted. The bench must have taken the swap.
    Adopted,
}

/// The steps and times of a search.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Time before the first limit, in which a tracker gets to know the guest.
    pub warm_ms: u64,
    /// Time from a new limit until the first slice.
    pub settle_ms: u64,
    /// Length of a slice.
    pub slice_ms: u64,
    /// Slices of each guest; their median counts.
    pub slices: usize,
    /// Limits that are tried: the result is exact to `1 / 2^steps` of RAM.
    pub steps: u32,
    /// Slowdown that is allowed.
    pub allowed_pct: f64,
}

impl Plan {
    /// A sweep takes some 25 s.
    pub(crate) const FULL: Self =
        Self { warm_ms: 8000, settle_ms: 2000, slice_ms: 150, slices: 7, steps: 5, allowed_pct: 5.0 };
    /// A sweep takes some 5 s, and is exact to an eighth.
    pub(crate) const QUICK: Self =
        Self { warm_ms: 2000, settle_ms: 500, slice_ms: 50, slices: 3, steps: 3, allowed_pct: 5.0 };
}

/// A sweep.
#[derive(Clone, Debug)]
pub(crate) struct Sweep {
    /// The workload of both guests; without an end.
    pub spec: Spec,
    /// The side that takes the memory of one of them.
    pub side: Side,
    /// Percent of RAM that is mapped huge once it is filled; the rest is in base pages.
    pub huge_pct: u32,
    /// Ballast tracks the guest all the time.
    pub track: bool,
    /// How to search.
    pub plan: Plan,
}

/// The result.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Found {
    /// The part of RAM that was taken.
    pub taken: f64,
    /// Slowdown of the guest then, in percent.
    pub slowdown_pct: f64,
    /// Difference of the two without a limit, in percent: the noise.
    pub noise_pct: f64,
}

/// The guest whose memory is taken, and the one beside it.
struct Pair {
    guest: Contestant,
    reference: Contestant,
    held: Held,
    ram: u64,
}

/// The means by which its memory is taken.
enum Held {
    Ballast { name: String },
    Kernel { cgroup: PathBuf, unlimited: u64 },
}

impl Sweep {
    /// Run it.
    pub(crate) fn run(&self, bench: &mut Bench) -> Result<Found> {
        let mut pair = self.start(bench)?;
        let plan = self.plan;
        pair.reference.speed(plan.settle_ms)?;
        // The guest runs last, because a stopped guest looks cold.
        pair.guest.speed(plan.warm_ms)?;
        let base = pair.ratio(plan)?;
        let mut found = Found { noise_pct: (1.0 - pair.ratio(plan)? / base).abs() * 100.0, ..Found::default() };
        let (mut least, mut most) = (0.0, 1.0);
        for _ in bench.progress.over("size", 0..plan.steps) {
            let taken = f64::midpoint(least, most);
            let mut is_bearable = false;
            // It is tried twice if necessary: by then the guest has refaulted the pages it needs.
            for _ in 0..2 {
                let (ratio, is_kept) = match pair.squeeze(bench, taken, plan) {
                    Ok(outcome) => outcome,
                    // The kernel kills a guest that it cannot squeeze, and then there is no guest to ask.
                    Err(_) if self.side == Side::Kernel => return Ok(found),
                    Err(error) => return Err(error),
                };
                let slowdown_pct = (1.0 - ratio / base) * 100.0;
                if is_kept && slowdown_pct <= plan.allowed_pct {
                    (found.taken, found.slowdown_pct, is_bearable) = (taken, slowdown_pct, true);
                    break;
                }
            }
            (least, most) = if is_bearable { (taken, most) } else { (least, taken) };
        }
        pair.guest.turn(&Order::Verify)?;
        Ok(found)
    }

    fn start(&self, bench: &mut Bench) -> Result<Pair> {
        let kvm = bench.options.is(GuestKind::Kvm);
        let start = |backing: Backing| -> Result<Contestant> {
            let config = WorkloadConfig { spec: self.spec.clone(), kvm, backing };
            let mut guest = Contestant::start(config)?;
            if self.huge_pct > 0 {
                guest.turn(&Order::MapHuge { percent: self.huge_pct })?;
            }
            Ok(guest)
        };
        let reference = start(Backing::Floor)?;
        let ram = self.spec.ram.0;
        if self.side == Side::Kernel {
            let cgroup = bench.guard.cgroup()?;
            let guest = start(Backing::Kernel { procs: cgroup.join("cgroup.procs") })?;
            let unlimited = cgroup::usage(&cgroup)?;
            return Ok(Pair { guest, reference, held: Held::Kernel { cgroup, unlimited }, ram });
        }
        let name = bench.vm_name();
        let mut guest = start(Backing::Ballast { socket: bench.daemon.attach_socket(), name: name.clone() })?;
        guest.turn(&Order::Attach)?;
        bench.daemon.wait_for_vm(&name)?;
        if self.track {
            bench.daemon.api().set_track(&name, Track::On)?;
        }
        Ok(Pair { guest, reference, held: Held::Ballast { name }, ram })
    }
}

impl Pair {
    /// The guest's speed over the reference's.
    fn ratio(&mut self, plan: Plan) -> Result<f64> {
        let mut ratios = Vec::new();
        for slice in 0..plan.slices {
            let (guest, reference) = if slice % 2 == 0 {
                let guest = self.guest.speed(plan.slice_ms)?;
                (guest, self.reference.speed(plan.slice_ms)?)
            } else {
                let reference = self.reference.speed(plan.slice_ms)?;
                (self.guest.speed(plan.slice_ms)?, reference)
            };
            ratios.push(guest[0] / reference[0]);
        }
        median(&ratios).context("there are slices")
    }

    /// Take a part of RAM. Returns the speed, and whether the limit is kept.
    fn squeeze(&mut self, bench: &Bench, taken: f64, plan: Plan) -> Result<(f64, bool)> {
        let taken = (self.ram as f64 * taken) as u64;
        match &self.held {
            Held::Ballast { name } => bench.daemon.api().set_limit(name, Some(self.ram - taken)).map(drop)?,
            Held::Kernel { cgroup, unlimited } => {
                // The kernel refuses a limit that it cannot reach at once, or reaches it during the write.
                let Ok(()) = cgroup::limit(cgroup, unlimited.saturating_sub(taken)) else { return Ok((0.0, false)) };
            }
        }
        let Answer::Sliced { .. } = self.guest.turn(&Order::Slice { ms: plan.settle_ms })? else {
            bail!("a VM stands")
        };
        let ratio = self.ratio(plan)?;
        // A little above the limit is allowed.
        let kept = match &self.held {
            Held::Ballast { name } => bench.daemon.api().vm(name)?.resident_bytes <= self.ram - taken + self.ram / 64,
            Held::Kernel { .. } => true,
        };
        Ok((ratio, kept))
    }
}
