//! The frame of all policies: the VMs that take part, their bounds, the budget, and rules for another program's plan.
//!
//! Before: a snapshot. After: a policy gives each part a weight, and [`Frame::divide`] makes the plan.
//! Units: bytes outside, whole pages inside.
//! Promise: a limit lies between the VM's least and most. The limits and the memory of VMs without a limit fit the
//! budget, unless reservations alone exceed it; then each VM has its reservation, and the plan says so.
//!
//! There are two floors. While all *protected* memory fits the budget, a VM keeps at least its protected memory.
//! Otherwise no VM has more than its protected or reserved memory, and only reservations are floors.

use ballast_base::{Bytes, Invalid, PageCount};

use crate::host_state::HostState;
use crate::memory::State;
use crate::reason::Reason;
use crate::settings::Class;
use crate::snapshot::{Action, Decision, Plan, Snapshot, VmSample};
use crate::solve::{Part, solve, sum};

/// A limit that would change by at most 1/SETTLED_WITHIN stays: that is reclaim's own margin, so a VM hardly feels it.
/// The exception is a raise to the most that the VM may have: it ends reclaim of the VM.
const SETTLED_WITHIN: u64 = 32;

/// A VM loses at most 1/LOSES_AT_MOST of its limit in one decision, if the budget allows. Estimates are noisy: a VM
/// that was cut too far must have time to show it.
const LOSES_AT_MOST: u64 = 8;

#[derive(Debug)]
pub(crate) struct Managed<'a> {
    pub vm: &'a VmSample,
    /// Least and most, in pages.
    pub lo: u64,
    pub hi: u64,
    pub reasons: Vec<Reason>,
    /// Index of its decision in the plan.
    at: usize,
}

#[derive(Debug)]
pub(crate) struct Frame<'a> {
    pub managed: Vec<Managed<'a>>,
    /// Pages to divide among the managed VMs.
    budget: u64,
    plan: Plan,
    common: Vec<Reason>,
}

pub(crate) fn pages(bytes: u64) -> u64 {
    Bytes(bytes).pages_floor().0
}

fn pages_ceil(bytes: u64) -> u64 {
    pages(bytes.saturating_add(ballast_base::PAGE_SIZE as u64 - 1))
}

pub(crate) fn bytes(pages: u64) -> u64 {
    PageCount(pages).bytes().0
}

/// Least and most pages of a VM, regardless of others.
fn bounds(vm: &VmSample, smallest: u64) -> (u64, u64) {
    let hi = pages(vm.most_bytes());
    let reserved = vm.settings.effective_reservation(vm.most_bytes()).max(smallest);
    (pages_ceil(reserved).min(hi), hi)
}

fn protected(part: &Managed<'_>) -> u64 {
    pages_ceil(part.vm.settings.protect_bytes).clamp(part.lo, part.hi.max(part.lo))
}

/// The reason why no plan sets a limit for this VM, if there is one.
fn left_alone(vm: &VmSample) -> Option<(Action, Reason)> {
    if let Some(why) = &vm.held {
        return Some((Action::Leave, Reason::Held { why: why.clone() }));
    }
    if vm.settings.class == Class::Pinned {
        return Some((Action::Leave, Reason::Held { why: "the VM is pinned".into() }));
    }
    (vm.settings.effective_shares() == 0).then_some((Action::Free, Reason::HandsOff))
}

/// Returns whether no plan sets a limit for this VM.
pub fn is_left_alone(vm: &VmSample) -> bool {
    left_alone(vm).is_some()
}

impl<'a> Frame<'a> {
    pub fn new(policy: impl ToString, snapshot: &'a Snapshot, state: &mut State) -> Self {
        state.keep_only(snapshot);
        let host = &snapshot.host;
        let (host_state, exhaustion_ms) = state.ladder.update(host, snapshot.at_ms);
        let policy = policy.to_string();
        let mut frame = Self {
            managed: Vec::new(),
            budget: host.budget_bytes,
            plan: Plan { at_ms: snapshot.at_ms, policy, host_state, exhaustion_ms, ..Plan::default() },
            common: Vec::new(),
        };
        if host_state >= HostState::Hard {
            // Memory still moves between VMs: with frozen targets, the VM that needs memory most would wait.
            let times = if host_state == HostState::Low { 2 } else { 1 };
            let by_bytes = host.min_free_bytes.saturating_mul(times).min(frame.budget);
            frame.budget -= by_bytes;
            frame.common.push(Reason::Tightened { state: host_state, by_bytes });
        }
        for (at, vm) in snapshot.vms.iter().enumerate() {
            let mut decision = Decision {
                name: vm.name.clone(),
                id: vm.id.clone(),
                before_bytes: vm.target_bytes,
                ..Decision::default()
            };
            if let Some((action, reason)) = left_alone(vm) {
                (decision.action, decision.reasons) = (action, vec![reason]);
                // The memory that it uses is not available to other VMs.
                frame.budget = frame.budget.saturating_sub(vm.resident_bytes);
            } else {
                let (lo, hi) = bounds(vm, host.smallest_bytes);
                frame.managed.push(Managed { vm, lo, hi, reasons: Vec::new(), at });
            }
            frame.plan.decisions.push(decision);
        }
        frame.budget = pages(frame.budget);
        frame
    }

    pub fn budget_pages(&self) -> u64 {
        self.budget
    }

    fn total(&self, of: impl Fn(&Managed<'_>) -> u64) -> u64 {
        sum(self.managed.iter().map(of))
    }

    /// Least and most pages of each of `managed`, and the reason for them. While the budget covers all protected
    /// memory, each VM gets at least its protected memory, and otherwise at most that.
    pub fn ranges(&self) -> (Vec<(u64, u64)>, Reason) {
        let budget_bytes = bytes(self.budget);
        let most_bytes = bytes(self.total(|part| part.hi));
        let protected_bytes = bytes(self.total(protected));
        let reserved_bytes = bytes(self.total(|part| part.lo));
        let each = |of: fn(&Managed<'_>) -> (u64, u64)| self.managed.iter().map(of).collect();
        if most_bytes <= budget_bytes {
            (each(|part| (part.lo, part.hi)), Reason::Enough { most_bytes, budget_bytes })
        } else if protected_bytes <= budget_bytes {
            (each(|part| (protected(part), part.hi)), Reason::Scarce { most_bytes, budget_bytes })
        } else if reserved_bytes <= budget_bytes {
            (each(|part| (part.lo, protected(part))), Reason::ProtectedOnly { protected_bytes, budget_bytes })
        } else {
            (each(|part| (part.lo, part.lo)), Reason::ReservedOnly { reserved_bytes, budget_bytes })
        }
    }

    /// Divides the budget by these weights, one for each of `managed`. With `settle`, small changes are skipped.
    pub fn divide(mut self, weights: &[f64], settle: bool) -> Plan {
        let (ranges, why) = self.ranges();
        let scarce = !matches!(why, Reason::Enough { .. });
        self.common.push(why);
        self.managed.iter_mut().zip(ranges).for_each(|(part, range)| (part.lo, part.hi) = range);
        let floors = self.floors(settle);
        let parts: Vec<Part> = (self.managed.iter().zip(&floors).zip(weights))
            .map(|((part, lo), weight)| Part { lo: *lo, hi: part.hi, weight: *weight })
            .collect();
        let mut limits = solve(&parts, self.budget);
        if settle && scarce {
            self.settle(&mut limits);
        }
        self.plan.divided_bytes = bytes(self.budget);
        for ((part, limit), floor) in self.managed.into_iter().zip(limits).zip(floors) {
            let decision = &mut self.plan.decisions[part.at];
            (decision.action, decision.limit_bytes) = (Action::Limit, Some(bytes(limit)));
            decision.reasons = part.reasons;
            decision.reasons.extend(self.common.iter().cloned());
            if limit == floor && floor > part.lo && floor < part.hi {
                decision.reasons.push(Reason::Gently { one_in: LOSES_AT_MOST });
            }
            if limit == part.lo && limit < pages(part.vm.most_bytes()) {
                decision.reasons.push(Reason::AtReservation { reservation_bytes: bytes(part.lo) });
            }
            if let Some(cap) = part.vm.limit_bytes.filter(|cap| *cap < part.vm.size_bytes && limit == pages(*cap)) {
                decision.reasons.push(Reason::AtLimit { limit_bytes: cap });
            }
        }
        self.plan
    }

    fn floors(&self, gently: bool) -> Vec<u64> {
        let keeps = |part: &Managed<'_>| {
            let old = part.vm.target_bytes.map_or(0, pages);
            (old - old / LOSES_AT_MOST).clamp(part.lo, part.hi)
        };
        let gentle: Vec<u64> = self.managed.iter().map(keeps).collect();
        if gently && sum(gentle.iter().copied()) <= self.budget {
            return gentle;
        }
        self.managed.iter().map(|part| part.lo).collect()
    }

    /// Keeps limits that would hardly change: first skips small raises; then, with the saved memory, small cuts.
    fn settle(&mut self, limits: &mut [u64]) {
        for raises in [true, false] {
            for (at, part) in self.managed.iter_mut().enumerate() {
                let Some(old) = part.vm.target_bytes.map(pages) else { continue };
                let new = limits[at];
                let near = old.abs_diff(new) <= old / SETTLED_WITHIN && (part.lo..=part.hi).contains(&old);
                let gets_all = old < new && new == pages(part.vm.most_bytes());
                if !near || old == new || (old < new) != raises || gets_all {
                    continue;
                }
                limits[at] = old;
                if raises || sum(limits.iter().copied()) <= self.budget {
                    part.reasons.push(Reason::Settled { one_in: SETTLED_WITHIN });
                } else {
                    limits[at] = new;
                }
            }
        }
    }
}

/// Limits requested by another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct External {
    /// Name of the program.
    pub policy: String,
    /// Names of VMs, with their limits; other VMs keep their limits.
    pub limits: Vec<(String, u64)>,
}

/// Checks a plan of another program against the rules, and returns it as a plan. `first`: the program has just sent it;
/// later, VMs that no longer exist are skipped.
///
/// # Errors
/// The rule that it breaks, with the figures.
pub fn check_external(snapshot: &Snapshot, wanted: &External, state: &mut State, first: bool) -> Result<Plan, Invalid> {
    let mut frame = Frame::new(&wanted.policy, snapshot, state);
    let mut names: Vec<&str> = wanted.limits.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("VM {} is in the plan twice", twice[0]).into());
    }
    for (name, limit) in &wanted.limits {
        let limit_pages = pages(*limit);
        let Some(part) = frame.managed.iter_mut().find(|part| part.vm.name == *name) else {
            match snapshot.vms.iter().find(|vm| vm.name == *name) {
                None if first => return Err(format!("no VM is named {name:?}").into()),
                Some(vm) if vm.settings.effective_shares() == 0 => {
                    return Err(format!("the shares of VM {name} are 0: no plan may limit it").into());
                }
                // The VM has ended, or is held for now.
                _ => continue,
            }
        };
        let (lo, hi) = bounds(part.vm, snapshot.host.smallest_bytes);
        let words = |pages| Bytes(bytes(pages));
        if limit_pages < lo {
            return Err(format!("{} for VM {name} is less than the {} it must have", Bytes(*limit), words(lo)).into());
        }
        if limit_pages > hi {
            return Err(format!("{} for VM {name} is more than the {} it may have", Bytes(*limit), words(hi)).into());
        }
        let decision = &mut frame.plan.decisions[part.at];
        (decision.action, decision.limit_bytes) = (Action::Limit, Some(bytes(limit_pages)));
        decision.reasons = vec![Reason::External { policy: wanted.policy.clone() }];
    }
    let used = |(vm, decision): (&VmSample, &Decision)| match (decision.action, &vm.held) {
        (Action::Limit, _) => decision.limit_bytes.unwrap_or(0),
        (Action::Free, _) => vm.resident_bytes,
        // A VM that is held for a moment may hold more than its limit, which breaks no rule.
        (Action::Leave, Some(_)) => vm.resident_bytes.min(vm.target_bytes.unwrap_or(u64::MAX)),
        (Action::Leave, None) => vm.target_bytes.unwrap_or(vm.resident_bytes).min(vm.most_bytes()),
    };
    let all = sum(snapshot.vms.iter().zip(&frame.plan.decisions).map(used));
    // The program may use memory that the states hard and low keep back.
    let budget = snapshot.host.budget_bytes;
    if all > budget {
        let (all, budget) = (Bytes(all), Bytes(budget));
        return Err(format!("the limits and what else is used come to {all}, and the budget is {budget}").into());
    }
    frame.plan.divided_bytes = budget;
    Ok(frame.plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostSample;
    use ballast_base::MIB;

    #[test]
    fn a_limit_that_would_hardly_change_stays_unless_the_vm_can_have_all_of_its_memory() {
        let vm = |id: &str, target: u64| VmSample {
            id: id.into(),
            size_bytes: 64 * MIB,
            page_bytes: 4096,
            target_bytes: Some(target * MIB),
            ..VmSample::default()
        };
        let limits = |weights: [f64; 2]| {
            let host = HostSample { budget_bytes: 104 * MIB, free_bytes: 104 * MIB, ..HostSample::default() };
            let snapshot = Snapshot { at_ms: 1000, host, vms: vec![vm("a", 63), vm("b", 40)] };
            let plan = Frame::new("test", &snapshot, &mut State::default()).divide(&weights, true);
            plan.decisions.iter().map(|decision| decision.limit_bytes.expect("a limit") / MIB).collect::<Vec<_>>()
        };
        let pages = |mib: u64| (mib * MIB / 4096) as f64;
        assert_eq!(limits([pages(64), pages(40)]), [64, 40]);
        assert_eq!(limits([pages(63), pages(41)]), [63, 40]);
    }
}
