//! Maestro's policy: limits by least squares over working sets and fault counts (the paper's section 2).
//!
//! Before: the frame's bounds. After: [`crate::solve`] finds the minimum of equation 1 under 2 and 3, with shares as
//! weights. Units: the window in milliseconds; the controller's own sums in faults and seconds, as in the paper.
//! Promise: it remembers one window of fault counts, in the state.
//!
//! A working set cannot be measured often, so refaults show changes since the last measurement. Equations 4 to 6 are a
//! PID controller over a window W, all coefficients 1, whose error is the number of pages restored since the window
//! began. Its output, times the size of a page, is added to the working set. The larger the pages, the more each fault
//! weighs.
//!
//! Three rules are not the paper's. An unmeasured working set is remembered, not taken from resident memory: a VM with
//! a larger limit has more resident memory, so each division would confirm itself ([`VmState::need`]). A VM needs at
//! most its resident memory and the restored pages. A raise begins a new window; otherwise the delay of the window
//! would make the loop oscillate.

use crate::frame::Frame;
use crate::kind::Kind;
use crate::memory::{Need, State, VmState};
use crate::reason::Reason;
use crate::snapshot::{Plan, Snapshot, VmSample};
use crate::solve::weight;

/// The window W, over which faults count.
const WINDOW_MS: u64 = 10_000;

/// Milliseconds in which an unmeasured working set decays to 1/e without refaults. A limit may fall faster, so this
/// decides how soon memory moves. With half of it, memory oscillates in the model of `tests/closed_loop.rs`.
const DECAY_MS: f64 = 20_000.0;

/// A raise by 1/RAISED_BY begins a new window.
const RAISED_BY: u64 = 64;

pub fn decide(snapshot: &Snapshot, state: &mut State) -> Plan {
    let mut frame = Frame::new(Kind::Maestro, snapshot, state);
    let mut weights = Vec::with_capacity(frame.managed.len());
    for part in &mut frame.managed {
        let vm = part.vm;
        let memory = state.vm(&vm.id);
        remember(memory, snapshot.at_ms, vm.restores, WINDOW_MS);
        memory.begin_window_after_raise(vm.target_bytes);
        let window = Window::of(&memory.restores, snapshot.at_ms, WINDOW_MS);
        let fault_weight = window.control() * vm.page_bytes as f64;
        let measured = vm.working_set_bytes.map(|bytes| bytes.min(vm.size_bytes));
        let working_set_bytes = measured.unwrap_or_else(|| memory.need(vm, snapshot.at_ms));
        let headroom_bytes = vm.headroom_of(working_set_bytes);
        // However often it faults, a VM needs at most its resident memory and the restored pages, and at most its size:
        // a VM that lacks little gets little.
        let known = working_set_bytes.saturating_add(headroom_bytes) as f64;
        let most = known.max(vm.resident_bytes as f64 + window.restored * vm.page_bytes as f64);
        let demand = (known + fault_weight).min(most).min(vm.size_bytes as f64);
        let shares = vm.settings.effective_shares();
        weights.push(weight(shares, demand / ballast_base::PAGE_SIZE as f64));
        part.reasons.push(Reason::Need {
            working_set_bytes,
            estimated: measured.is_none(),
            headroom_bytes,
            fault_weight_bytes: fault_weight as u64,
            restores: window.restored as u64,
            shares,
        });
    }
    frame.divide(&weights, true)
}

impl VmState {
    /// Begins a new window after a raise: faults under a smaller limit say nothing about the new limit. Otherwise a VM
    /// would get more memory for a whole window, whatever it needs.
    fn begin_window_after_raise(&mut self, target_bytes: Option<u64>) {
        let before = std::mem::replace(&mut self.target_bytes, target_bytes);
        if let (Some(before), Some(now)) = (before, target_bytes)
            && now > before.saturating_add(before / RAISED_BY)
        {
            // The last two samples bound the time since the raise.
            self.restores.drain(..self.restores.len().saturating_sub(2));
        }
    }

    /// Estimates the working set of a VM that is not tracked. Resident memory says little about the memory in use, so
    /// the estimate decays until pages refault.
    fn need(&mut self, vm: &VmSample, at_ms: u64) -> u64 {
        let restored = |before: u64| vm.restores.saturating_sub(before).saturating_mul(vm.page_bytes);
        let need = match self.need {
            Some(Need { at_ms: then, bytes, restores }) if then <= at_ms && restores <= vm.restores => {
                let kept = (-((at_ms - then) as f64) / DECAY_MS).exp();
                ((bytes as f64 * kept) as u64).saturating_add(restored(restores)).min(vm.size_bytes)
            }
            _ => vm.resident_bytes.min(vm.size_bytes),
        };
        self.need = Some(Need { at_ms, bytes: need, restores: vm.restores });
        need
    }
}

fn remember(memory: &mut VmState, at_ms: u64, restored: u64, window_ms: u64) {
    let samples = &mut memory.restores;
    // A counter or clock that went back comes from another run of the VM.
    if samples.last().is_some_and(|(then, before)| *then > at_ms || *before > restored) {
        samples.clear();
    }
    if samples.last().is_none_or(|(then, _)| *then < at_ms) {
        samples.push((at_ms, restored));
    }
    // One sample before the window is kept, as a bound of its beginning.
    let begins = at_ms.saturating_sub(window_ms);
    let first = samples.partition_point(|(then, _)| *then <= begins).saturating_sub(1);
    samples.drain(..first);
}

#[derive(Clone, Copy, Debug)]
struct Window {
    /// Equation 4: pages restored in it.
    restored: f64,
    /// The integral of equation 5, in pages times seconds.
    integral: f64,
    /// W in seconds.
    length_s: f64,
}

impl Window {
    fn of(samples: &[(u64, u64)], at_ms: u64, window_ms: u64) -> Self {
        let begins = at_ms.saturating_sub(window_ms) as f64;
        let mut window = Self { restored: 0.0, integral: 0.0, length_s: window_ms as f64 / 1e3 };
        for pair in samples.windows(2) {
            let [(mut from, mut before), (to, after)] = [pair[0], pair[1]].map(|(at, count)| (at as f64, count as f64));
            if to <= begins {
                continue;
            }
            if from < begins {
                // The window begins between two samples: interpolate.
                before += (after - before) * (begins - from) / (to - from);
                from = begins;
            }
            let more = after - before;
            let seconds = (to - from) / 1e3;
            self::add(&mut window, more, seconds);
        }
        window
    }

    /// Equation 5.
    fn control(&self) -> f64 {
        self.restored + self.integral + self.restored / self.length_s
    }
}

fn add(window: &mut Window, more: f64, seconds: f64) {
    window.integral += (window.restored + more / 2.0) * seconds;
    window.restored += more;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::HostSample;
    use ballast_base::{GIB, MIB};

    #[test]
    fn the_controller_is_the_papers_sum_of_three_terms() {
        // 10 pages per second for 4 s, seen once a second, in a window of 4 s.
        let samples: Vec<(u64, u64)> = (0..=4).map(|second| (second * 1000, second * 10)).collect();
        let window = Window::of(&samples, 4000, 4000);
        assert_eq!((window.restored, window.integral), (40.0, 80.0));
        assert_eq!(window.control(), 40.0 + 80.0 + 10.0);
        let late = Window::of(&samples, 4000, 2500);
        assert!((late.restored - 25.0).abs() < 1e-9 && (late.integral - 31.25).abs() < 1e-9, "{late:?}");
        assert_eq!(Window::of(&[], 0, 1000).control(), 0.0);
    }

    #[test]
    fn the_estimated_need_decays_until_pages_refault() {
        let mut memory = VmState::default();
        let mut vm =
            VmSample { size_bytes: GIB, resident_bytes: GIB / 2, page_bytes: 4096, restores: 7, ..VmSample::default() };
        assert_eq!(memory.need(&vm, 1000), GIB / 2, "at first all resident memory");
        let needs: Vec<u64> = (2..22).map(|second| memory.need(&vm, second * 1000)).collect();
        assert!(needs.is_sorted_by(|a, b| a > b) && needs[19] < GIB / 5 && needs[19] > GIB / 6, "{needs:?}");
        vm.restores += 10_000;
        assert!(memory.need(&vm, 22_000).abs_diff(needs[19] + 10_000 * 4096) < 16 * MIB, "what refaulted was needed");
        // A counter that went back begins a new window.
        vm.restores = 3;
        assert_eq!(memory.need(&vm, 23_000), GIB / 2);
    }

    #[test]
    fn a_raise_starts_a_new_window_and_a_cut_does_not() {
        let mut memory = VmState::default();
        let mut window = |second: u64, target: u64| {
            remember(&mut memory, second * 1000, second * 100, 10_000);
            memory.begin_window_after_raise(Some(target));
            Window::of(&memory.restores, second * 1000, 10_000).restored
        };
        assert_eq!([window(0, GIB), window(1, GIB), window(2, GIB), window(3, GIB - MIB)], [0.0, 100.0, 200.0, 300.0]);
        assert_eq!([window(4, GIB), window(5, 2 * GIB), window(6, 2 * GIB)], [400.0, 100.0, 200.0]);
    }

    #[test]
    fn one_window_of_counts_is_remembered_and_a_counter_that_went_back_starts_again() {
        let mut memory = VmState::default();
        for second in 0..100 {
            remember(&mut memory, second * 1000, second, 10_000);
        }
        assert_eq!((memory.restores.len(), memory.restores[0]), (11, (89_000, 89)));
        remember(&mut memory, 100_000, 3, 10_000);
        assert_eq!(memory.restores, [(100_000, 3)]);
    }

    #[test]
    fn memory_goes_to_the_vm_whose_pages_refault_and_large_pages_weigh_more() {
        let vm = |name: &str, page_bytes| VmSample {
            name: name.into(),
            id: name.into(),
            size_bytes: GIB,
            resident_bytes: 512 * MIB,
            working_set_bytes: Some(400 * MIB),
            page_bytes,
            ..VmSample::default()
        };
        let host = HostSample { budget_bytes: GIB, free_bytes: 10 * GIB, ..HostSample::default() };
        let limits = |vms: [VmSample; 2], restores: [u64; 2]| {
            let mut state = State::default();
            let mut snapshot = Snapshot { at_ms: 1000, host, vms: vms.into() };
            decide(&snapshot, &mut state);
            snapshot.at_ms = 2000;
            for (vm, restores) in snapshot.vms.iter_mut().zip(restores) {
                vm.restores = restores;
            }
            let plan = decide(&snapshot, &mut state);
            [0, 1].map(|at| plan.decisions[at].limit_bytes.expect("a limit"))
        };
        let [a, b] = limits([vm("a", 4096), vm("b", 4096)], [0, 0]);
        assert_eq!((a, b), (512 * MIB, 512 * MIB));
        let [a, b] = limits([vm("a", 4096), vm("b", 4096)], [0, 20_000]);
        assert!(b > a + 50 * MIB && a + b <= GIB, "{a} {b}");
        let [a, b] = limits([vm("a", 4096), vm("b", 2 * MIB)], [100, 100]);
        assert!(b > a + 50 * MIB, "{a} {b}");
    }
}
