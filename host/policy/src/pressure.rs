//! The pressure policy: as little memory as each VM's stall allows (Blowfish, section 4.6).
//!
//! Before: the frame's bounds. After: a limit per VM, lowered a little while it stalls less than the threshold and
//! raised a lot as soon as it stalls more. If all VMs together want more than the budget, [`crate::solve`] divides it.
//! Units: stall is a share of time, 0 to 1. Promise: protected and reserved memory is not probed.
//!
//! *Free first*: takes the allowance that a VM does not use, at once, down to a watermark; no page is evicted for it.
//! (Memory that a guest discards by balloon or free page reporting is not resident and costs nothing.) *Then cold*: one
//! step of a percent or two per decision, smaller the nearer the stall is to the threshold. *Above the threshold*:
//! raises the limit by 1/16 of resident memory, up to four times that under heavy stall, and pauses. The pause doubles
//! each time that stall follows soon after the next probe. A raise needs no restore: pages come in by touch, and none
//! is evicted. No fault waits for this policy.

use crate::frame::{Frame, Managed, bytes, pages};
use crate::kind::Kind;
use crate::memory::{State, VmState};
use crate::reason::Reason;
use crate::snapshot::{Plan, Snapshot};
use crate::solve::weight;

/// A VM keeps 1/WATERMARK of its size that it does not use.
const WATERMARK: u64 = 32;
/// One probe takes at most 1/PROBE of resident memory.
const PROBE: u64 = 64;
/// One raise adds 1/RAISE of resident memory, times stall over threshold, at most times [`WORST`].
const RAISE: u64 = 16;
const WORST: f64 = 4.0;
/// First and longest pause, in milliseconds.
const PAUSE_MS: u64 = 4_000;
const LONGEST_PAUSE_MS: u64 = 64_000;
/// After this number of pauses without stall, the next pause is the shortest again.
const FORGIVEN_AFTER: u64 = 8;

pub fn decide(threshold: f64, snapshot: &Snapshot, state: &mut State) -> Plan {
    let mut frame = Frame::new(Kind::Pressure, snapshot, state);
    let mut weights = Vec::with_capacity(frame.managed.len());
    for part in &mut frame.managed {
        let wanted = wanted(threshold, part, snapshot.at_ms, state.vm(&part.vm.id));
        part.hi = wanted.clamp(part.lo, part.hi);
        // If memory is scarce, VMs that stall come first.
        let urgency = 1.0 + (part.vm.worst_stall() / threshold).min(WORST);
        weights.push(weight(part.vm.settings.effective_shares(), wanted as f64 * urgency));
    }
    frame.divide(&weights, false)
}

/// Pages that this VM should have if there is enough for all; records the reason.
fn wanted(threshold: f64, part: &mut Managed<'_>, at_ms: u64, memory: &mut VmState) -> u64 {
    let vm = part.vm;
    let resident = pages(vm.resident_bytes);
    let floor = floor(part);
    // Settings take effect at once: memory protected since the last decision is given now.
    let now = vm.target_bytes.map_or(part.hi, pages).min(part.hi).max(floor);
    let stall = vm.worst_stall();
    if stall >= threshold {
        let times = (stall / threshold).min(WORST);
        let step = ((resident / RAISE).max(1) as f64 * times) as u64;
        memory.pause(at_ms);
        part.reasons.push(Reason::BackOff { stall, threshold, step_bytes: bytes(step) });
        return now.max(resident).saturating_add(step);
    }
    if at_ms < memory.pause_until_ms {
        part.reasons.push(Reason::Paused { left_ms: memory.pause_until_ms - at_ms });
        return now;
    }
    let allowance = resident.saturating_add(pages(vm.size_bytes / WATERMARK));
    if now > allowance.max(floor) {
        let left = allowance.max(floor);
        let taken_bytes = bytes(now - left);
        part.reasons.push(Reason::FreeFirst { taken_bytes, watermark_bytes: bytes(left.saturating_sub(resident)) });
        return left;
    }
    if resident > now {
        part.reasons.push(Reason::CatchingUp { resident_bytes: vm.resident_bytes });
        return now;
    }
    let step = ((resident / PROBE) as f64 * (1.0 - stall / threshold)) as u64;
    let next = now.saturating_sub(step.max(1)).max(floor);
    part.reasons.push(Reason::Probe { stall, threshold, step_bytes: bytes(now - next) });
    next
}

/// Memory that is not probed: protected memory, and a measured working set with its headroom.
fn floor(part: &Managed<'_>) -> u64 {
    let vm = part.vm;
    let wanted = vm.with_headroom_bytes().unwrap_or(0);
    pages(wanted.max(vm.settings.protect_bytes)).clamp(part.lo, part.hi)
}

impl VmState {
    /// After stall: pauses, for twice as long as the last time if that was recent.
    fn pause(&mut self, at_ms: u64) {
        let since = at_ms.saturating_sub(self.raised_at_ms);
        if self.pause_ms == 0 || since > self.pause_ms.saturating_mul(FORGIVEN_AFTER) {
            self.pause_ms = PAUSE_MS;
        } else if at_ms >= self.pause_until_ms {
            self.pause_ms = self.pause_ms.saturating_mul(2).min(LONGEST_PAUSE_MS);
        }
        self.raised_at_ms = at_ms;
        self.pause_until_ms = at_ms.saturating_add(self.pause_ms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{HostSample, VmSample};
    use ballast_base::{GIB, MIB};

    const THRESHOLD: f64 = 0.04;

    /// A VM that stalls only when it has less than `need`.
    fn run(need: u64, ticks: u64) -> Vec<u64> {
        let mut state = State::default();
        let mut vm = VmSample {
            name: "a".into(),
            id: "a".into(),
            size_bytes: 4 * GIB,
            resident_bytes: 2 * GIB,
            page_bytes: 4096,
            ..VmSample::default()
        };
        let host = HostSample { budget_bytes: 64 * GIB, free_bytes: 60 * GIB, ..HostSample::default() };
        let mut limits = Vec::new();
        for tick in 0..ticks {
            let snapshot = Snapshot { at_ms: tick * 1000, host, vms: vec![vm.clone()] };
            let limit = decide(THRESHOLD, &snapshot, &mut state).decisions[0].limit_bytes.expect("a limit");
            vm.target_bytes = Some(limit);
            vm.resident_bytes = limit.min(2 * GIB);
            vm.stall = if limit < need { 0.2 } else { 0.001 };
            limits.push(limit);
        }
        limits
    }

    #[test]
    fn free_memory_is_taken_first_then_cold_memory_in_small_steps() {
        let limits = run(0, 60);
        assert_eq!(limits[0], 2 * GIB + 128 * MIB, "the unused half at once, down to the watermark");
        for pair in limits.windows(2) {
            assert!(pair[1] <= pair[0] && pair[0] - pair[1] <= pair[0] / 60, "{pair:?}");
        }
        assert!(limits[59] < GIB, "{}", limits[59]);
    }

    #[test]
    fn a_vm_that_stalls_gets_memory_at_once_and_then_ever_longer_pauses() {
        let need = GIB;
        let limits = run(need, 600);
        let short = limits.iter().filter(|limit| **limit < need).count();
        assert!(short > 0 && short < 20, "{short} of 600 ticks below the need");
        let late = &limits[300..];
        assert!(late.iter().all(|limit| *limit >= need * 9 / 10), "probing goes just below the need");
        assert!(late.iter().filter(|limit| **limit < need).count() <= 5, "rarely, once it is known");
        assert!(late.iter().all(|limit| *limit < 2 * GIB), "and it does not get all it had");
    }

    #[test]
    fn protected_memory_is_not_probed() {
        let mut vm = VmSample { size_bytes: GIB, resident_bytes: 512 * MIB, ..VmSample::default() };
        vm.settings.protect_bytes = 500 * MIB;
        vm.target_bytes = Some(500 * MIB);
        vm.resident_bytes = 490 * MIB;
        let host = HostSample { budget_bytes: 64 * GIB, free_bytes: 60 * GIB, ..HostSample::default() };
        let snapshot = Snapshot { at_ms: 1, host, vms: vec![vm] };
        let plan = decide(THRESHOLD, &snapshot, &mut State::default());
        assert_eq!(plan.decisions[0].limit_bytes, Some(500 * MIB));
    }
}
