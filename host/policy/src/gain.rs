//! The gain policy: gives memory to where one more byte saves most time, of the VM and of the host.
//!
//! Before: the frame's bounds. After: each VM gets more or less than it has, by the time that one more byte would have
//! saved, compared with the others. Units: bytes and seconds.
//! Promise: it remembers a few sums per VM (`sums`), in the state.
//!
//! This policy is not from the papers. Maestro weighs how much memory a VM uses and how often it faults, so it gives
//! much memory to VMs that use much, whether that helps or not. This policy estimates what the next byte would save. A
//! VM *waits* for refaults. The host *works* for them: it serves the fault and evicts another page, and everything that
//! shares the CPUs slows down. The sum of both per second, divided by the amount of far memory in use, is what one byte
//! saves on average: *(waits + works) / wanted*. Far memory that never refaults does not count. The amount in use
//! follows without a list of pages: refaults per second times their mean interval (Little's law).
//!
//! The next byte is not an average one: it will hold the page that refaults soonest. Pages with a refault interval of
//! half a minute make up most of that product, and would hide pages with half a second. So *wanted* uses the mean
//! frequency instead, as if each refault had it. If all pages are alike, both results are equal.
//!
//! That alone would sacrifice the slowest VM, because a slow VM touches its memory less often. So the waiting of a VM
//! counts more the slower it is, by the square of its slowdown: the gradient of the sum of squared slowdowns.
//!
//! A VM that has all the memory that it uses does not wait, and more memory would save it nothing. If others lack
//! memory, it loses a little at a time (1/32 a second, and more while much of its far memory does not refault). If the
//! VM needed the lost memory, it waits for refaults, and the sums show that. Headroom counts as wanted if the working
//! set was measured. If a VM does not fill its limit, the rest is lent to the VMs that gain most.

use crate::frame::{Frame, Managed, bytes, pages};
use crate::kind::Kind;
use crate::memory::State;
use crate::reason::Reason;
use crate::snapshot::{Plan, Snapshot};
use crate::sums::Sums;

/// A VM to which a byte is worth e times as much as to the others gains this share of its memory; a VM to which it is
/// worth e^2 times as much gains twice the share.
const STEP: f64 = 1.0 / 5.0;
/// A VM at most doubles, and gains at most this multiple of its wanted memory.
const MARGIN: f64 = 1.25;
/// A VM loses at most 1/PROBE of its memory in a second and in one decision, or 1/MORE of its far memory if that is
/// more. The bound is per second, because the sums show only after seconds that lost memory was needed: with short
/// ticks, the VM would lose memory twice before that.
const PROBE: u64 = 32;
const MORE: u64 = 4;
/// A VM below its limit counts as having 1/ROOM more than is resident, or its growth in this number of ticks if more.
const ROOM: u64 = 16;
const GROWS_FOR: u64 = 2;

/// Pages that count as the VM's: its limit, or its resident memory and some room, if that is less.
fn has(part: &Managed<'_>, grew_bytes: u64) -> u64 {
    let vm = part.vm;
    let room = (vm.resident_bytes / ROOM).max(grew_bytes.saturating_mul(GROWS_FOR));
    let holds = vm.resident_bytes.saturating_add(room);
    pages(vm.target_bytes.unwrap_or(vm.resident_bytes).min(holds)).clamp(part.lo, part.hi).max(1)
}

pub fn decide(snapshot: &Snapshot, state: &mut State) -> Plan {
    let mut frame = Frame::new(Kind::Gain, snapshot, state);
    let seen: Vec<(u64, f64, f64, Sums)> = (frame.managed.iter())
        .map(|part| {
            let (vm, sums) = (part.vm, &mut state.vm(&part.vm.id).gain);
            // Before the first sample, its former size is unknown.
            let held = if sums.at_ms == 0 { vm.resident_bytes } else { sums.resident_bytes };
            let seconds = snapshot.at_ms.saturating_sub(sums.at_ms).min(1000) as f64 / 1e3;
            sums.add(vm, snapshot.at_ms);
            let shares = f64::from(vm.settings.effective_shares()) / 1000.0;
            let has = has(part, vm.resident_bytes.saturating_sub(held));
            (has, shares * sums.saves(bytes(has), vm.page_bytes), seconds, *sums)
        })
        .collect();
    let sum = |of: fn(&(u64, f64, f64, Sums)) -> f64| seen.iter().map(of).sum::<f64>();
    let (all, total) = (sum(|vm| vm.0 as f64), sum(|vm| vm.0 as f64 * vm.1));
    let (mut weights, mut goals) = (Vec::with_capacity(seen.len()), Vec::with_capacity(seen.len()));
    for (part, (has, worth, seconds, sums)) in frame.managed.iter_mut().zip(seen) {
        // The mean of the others: a VM that alone lacks memory must not be compared with itself.
        let average = ((total - has as f64 * worth) / (all - has as f64).max(1.0)).max(0.0);
        let wanted = sums.wanted_bytes() / ballast_base::PAGE_SIZE as f64;
        let wants = wants(has, pages(part.vm.far_bytes), wanted, worth / average, seconds);
        let floor = pages(part.vm.with_headroom_bytes().unwrap_or(0)) as f64;
        weights.push(wants.max(floor));
        goals.push(if worth > average { has as f64 + wanted * MARGIN } else { 0.0 });
        part.reasons.push(Reason::Gain {
            waits: sums.waits(),
            works: sums.works(part.vm.page_bytes),
            wanted_bytes: sums.wanted_bytes() as u64,
            worth_us_per_mib: worth * ballast_base::MIB as f64 * 1e6,
            others_us_per_mib: average * ballast_base::MIB as f64 * 1e6,
            shares: part.vm.settings.effective_shares(),
        });
        if floor > wants {
            let working_set_bytes = part.vm.working_set_bytes.unwrap_or(0);
            let headroom_bytes = part.vm.headroom_of(working_set_bytes);
            part.reasons.push(Reason::Headroom { working_set_bytes, headroom_bytes });
        }
    }
    lend(&mut weights, &goals, &frame.ranges().0, frame.budget_pages() as f64);
    frame.divide(&weights, true)
}

/// Lends unused memory to the VMs that would gain: to each an equal part of its lack of its goal, within its range.
fn lend(weights: &mut [f64], goals: &[f64], ranges: &[(u64, u64)], budget: f64) {
    let within = |pages: f64, range: &(u64, u64)| pages.clamp(range.0 as f64, range.1 as f64);
    weights.iter_mut().zip(ranges).for_each(|(weight, range)| *weight = within(*weight, range));
    let lacks: Vec<f64> = (goals.iter().zip(ranges).zip(&*weights))
        .map(|((goal, range), weight)| (within(*goal, range) - weight).max(0.0))
        .collect();
    let (left, lack) = (budget - weights.iter().sum::<f64>(), lacks.iter().sum::<f64>());
    if left > 0.0 && lack > 0.0 {
        let part = (left / lack).min(1.0);
        weights.iter_mut().zip(lacks).for_each(|(weight, lacks)| *weight += lacks * part);
    }
}

/// Pages that a VM should have: it has `has`, `far` are far and `wanted` of them in use, a page is worth `worth` times
/// as much to it as to the others, and the last decision was `seconds` (at least one) ago.
fn wants(has: u64, far: u64, wanted: f64, worth: f64, seconds: f64) -> f64 {
    let now = has as f64;
    // NaN: no VM waits.
    if worth.is_nan() {
        return now;
    }
    let times = worth.ln();
    if times > 0.0 {
        let most = wanted * MARGIN + now / PROBE as f64;
        return now + (now * (STEP * times * times.max(1.0)).min(1.0)).min(most);
    }
    let most = (has / PROBE).max(far / MORE) as f64 * seconds;
    now - (now * STEP * (-times).min(1.0)).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostSample, Settings, VmSample};
    use ballast_base::MIB;

    fn vm(stall: f64, refault_page_ms: u64) -> VmSample {
        VmSample { page_bytes: 4096, far_bytes: 64 * MIB, stall, refault_page_ms, ..VmSample::default() }
    }

    #[test]
    fn wanted_is_refaults_a_second_times_their_mean_interval() {
        let mut sums = Sums::default();
        // 1000 refaults per second, each after 2 s: 2000 pages are far at a time.
        (0..60).for_each(|second| sums.add(&vm(0.25, second * 1000 * 2000), second * 1000 + 1));
        assert!((sums.wanted_bytes() / 4096.0 - 2000.0).abs() < 1.0, "{sums:?}");
        assert!((sums.waits() - 0.25).abs() < 1e-9, "{sums:?}");
        let saves = sums.saves(64 * MIB, 4096) * 4096.0;
        // A quarter of the time, times 16/9 for the slowdown, over 2000 pages and 512 more for doubt.
        assert!((saves - 0.25 / 0.5625 / 2512.0).abs() < 1e-6, "{saves}");
        // At most the memory that was far.
        sums.add(&vm(0.25, 1 << 50), 60_001);
        assert!(sums.wanted_bytes() < (64 * MIB) as f64, "{sums:?}");
    }

    #[test]
    fn a_refault_without_a_wait_is_worth_its_work() {
        let [mut idle, mut busy] = [Sums::default(); 2];
        for second in 0..60 {
            let sample = |restores| VmSample { restores, ..vm(0.0, second * 1_000_000) };
            idle.add(&sample(0), second * 1000 + 1);
            busy.add(&sample(second * 1000), second * 1000 + 1);
        }
        assert_eq!(idle.saves(64 * MIB, 4096), 0.0);
        assert!((busy.works(4096) - 17.5e-3).abs() < 1e-6, "{busy:?}");
        assert!(busy.saves(64 * MIB, 4096) > 0.0);
    }

    #[test]
    fn the_next_byte_holds_the_page_that_refaults_soonest() {
        // 1000 refaults per second, each after 2 s; or 50 of them after 40 s, and the others after 0.25 s.
        let [mut alike, mut unlike] = [Sums::default(); 2];
        for second in 0..60 {
            let sample = |interval_ms: u64, milli_hz: u64| VmSample {
                restores: second * 1000,
                refault_page_ms: second * interval_ms,
                refault_milli_hz: second * milli_hz,
                ..vm(0.25, 0)
            };
            alike.add(&sample(1000 * 2000, 1000 * 500), second * 1000 + 1);
            unlike.add(&sample(50 * 40_000 + 950 * 250, 50 * 25 + 950 * 4000), second * 1000 + 1);
        }
        let pages = |sums: &Sums| (sums.wanted_bytes() / 4096.0, sums.wanted_soon_bytes(4096) / 4096.0);
        assert!((pages(&alike).0 - 2000.0).abs() < 1.0 && (pages(&alike).1 - 2000.0).abs() < 1.0, "{alike:?}");
        assert!((pages(&unlike).0 - 2237.5).abs() < 1.0 && (pages(&unlike).1 - 263.0).abs() < 1.0, "{unlike:?}");
        assert!(unlike.saves(64 * MIB, 4096) > 3.0 * alike.saves(64 * MIB, 4096));
    }

    #[test]
    fn a_vm_with_many_refaults_is_judged_by_the_last_seconds_and_one_with_few_by_more() {
        for (returns, least, most) in [(4000, 0.7, 0.8), (40, 0.3, 0.4)] {
            let mut sums = Sums::default();
            let sample = |second, stall| VmSample { restores: second * returns, ..vm(stall, second * 1_000_000) };
            (0..60).for_each(|second| sums.add(&sample(second, 0.0), second * 1000 + 1));
            (60..62).for_each(|second| sums.add(&sample(second, 1.0), second * 1000 + 1));
            let share = sums.waited_s / sums.time_s;
            assert!((least..most).contains(&share), "{returns} a second: {share} of the time, after two seconds of it");
        }
    }

    #[test]
    fn unused_memory_is_lent_to_the_vms_that_gain_and_no_more() {
        let lent = |goals: [f64; 3], ranges: [(u64, u64); 3], budget| {
            let mut weights = [100.0, 50.0, 10.0];
            lend(&mut weights, &goals, &ranges, budget);
            weights
        };
        let any = [(0, 1000); 3];
        assert_eq!(lent([0.0, 0.0, 90.0], any, 200.0), [100.0, 50.0, 50.0]);
        assert_eq!(lent([130.0, 0.0, 30.0], any, 300.0), [130.0, 50.0, 30.0], "the rest is left to the division");
        assert_eq!(lent([130.0, 0.0, 30.0], any, 150.0), [100.0, 50.0, 10.0], "there is nothing left");
        let kept = [(0, 1000), (100, 1000), (0, 40)];
        assert_eq!(lent([0.0, 80.0, 90.0], kept, 300.0), [100.0, 100.0, 40.0], "as much as it will have, or may have");
        assert_eq!(lent([0.0, 120.0, 20.0], kept, 225.0), [100.0, 110.0, 15.0], "half of what each lacks");
    }

    #[test]
    fn a_counter_or_clock_that_went_back_begins_anew_and_the_past_decays() {
        let mut sums = Sums::default();
        (0..10).for_each(|second| sums.add(&vm(0.5, second * 1_000_000), second * 1000 + 1));
        let before = sums.saves(64 * MIB, 4096);
        (10..40).for_each(|second| sums.add(&vm(0.0, 9_000_000), second * 1000 + 1));
        assert!(sums.saves(64 * MIB, 4096) < before / 10.0, "it has not waited for long");
        sums.add(&vm(0.5, 3), 40_001);
        assert_eq!((sums.time_s, sums.waited_s, sums.refault_byte_s), (0.0, 0.0, 0.0));
    }

    #[test]
    fn a_measured_working_set_and_its_headroom_count_as_wanted() {
        let idle = |headroom_percent, is_measured: bool| {
            let settings = Settings { headroom_percent, ..Settings::default() };
            let working_set_bytes = is_measured.then_some(40 * MIB);
            let vm =
                |id: &str| VmSample { id: id.into(), size_bytes: 64 * MIB, page_bytes: 4096, ..VmSample::default() };
            let held = VmSample { resident_bytes: 50 * MIB, working_set_bytes, settings, ..vm("idle") };
            let busy = VmSample { resident_bytes: 46 * MIB, far_bytes: 18 * MIB, stall: 0.5, ..vm("busy") };
            let host = HostSample { budget_bytes: 96 * MIB, free_bytes: 96 * MIB, ..HostSample::default() };
            let (mut state, mut vms) = (State::default(), vec![held, busy]);
            for second in 1..60 {
                (vms[1].restores, vms[1].refault_page_ms) = (second * 5000, second * 5000 * 500);
                let plan = decide(&Snapshot { at_ms: second * 1000, host, vms: vms.clone() }, &mut state);
                for (vm, decision) in vms.iter_mut().zip(&plan.decisions) {
                    vm.target_bytes = decision.limit_bytes;
                    vm.resident_bytes = vm.resident_bytes.min(vm.target_bytes.unwrap_or(u64::MAX));
                }
            }
            vms[0].target_bytes.expect("a target") / MIB
        };
        assert!(idle(0, true) < 36, "nobody asked for headroom");
        assert!(idle(10, false) < 36, "nobody knows the working set");
        assert!((38..=44).contains(&idle(10, true)), "40 MiB and a tenth are its part when the budget is divided");
    }

    #[test]
    fn a_vm_that_saves_more_gains_one_that_saves_less_loses_slowly_and_none_else_moves() {
        assert_eq!(wants(6400, 0, 0.0, 1.0, 1.0), 6400.0);
        assert_eq!(wants(6400, 0, 0.0, f64::NAN, 1.0), 6400.0);
        assert_eq!(wants(6400, 0, 1e6, 1e9, 1.0), 12_800.0, "no more than double");
        assert_eq!(wants(6400, 0, 800.0, 1e9, 1.0), 7600.0, "a little more than it wants");
        assert_eq!(wants(6400, 0, 0.0, 0.0, 1.0), 6200.0, "a 32nd, as long as little is far");
        assert_eq!(wants(6400, 6400, 0.0, 0.0, 1.0), 5120.0, "a fifth");
        assert_eq!(wants(6400, 0, 0.0, 0.0, 0.1), 6380.0, "a tenth of that in a tenth of a second");
        assert!(wants(6400, 6400, 0.0, 0.9, 1.0) > 6200.0);
    }
}
