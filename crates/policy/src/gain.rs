//! Gain: memory goes where a byte more saves most time, of the VM and of the host.
//!
//! Before: the frame's bounds. After: each VM gains or loses a part of what it has, by how much time a byte more would have
//! saved, compared with the others. Units: bytes and seconds.
//! Promise: all that it remembers are a few sums per VM, in the state, forgotten over [`REMEMBERED_MS`] or sooner.
//!
//! Not from the papers. Maestro weighs how much a VM uses and how often it faults, and so gives much to those who use much,
//! whatever that helps. This asks what the next byte would do. A VM *waits* for what comes back; and the host *works* for it: a
//! fault is served, another page goes in its stead, and all who share the CPUs are slower for that, often by more than the VM
//! waited. Both, in a second, over how much of what comes back is away at a time, is what a byte saves on average:
//! *(waits + works) / wanted*. What is away and never comes back is not in it. How much is wanted is known without a list
//! of pages: what comes back in a second, times how long it was away (Little's law).
//!
//! The next byte is not an average one: it will hold what comes back soonest. Pages that come back once in half a minute make
//! up most of that product, and would hide that others come back twice a second. So *wanted* is reckoned from how soon pages
//! come back (the mean of one over the time, not of the time), as if all that comes back in a second did so as often:
//! it is the same where all pages are alike, and less where they are not.
//!
//! Taken alone that would sacrifice the VM that is slowest already, where two use their memory alike: a slow VM comes back to
//! its memory less often. So what a VM waits counts more the slower it is, by the square of its slowdown: that is the
//! gradient of the sum of squared slowdowns.
//!
//! *Who has all it wants* waits for nothing, and more would save it nothing. If others need memory, a little is taken from it
//! (a 32nd at a time, and more as more of it stays away unmissed). What it comes back to makes it wait, and that is
//! remembered. Headroom that was asked for counts as wanted, where the working set was measured. Nor does anybody *have* what
//! its limit leaves room for and it does not fill: that is lent to who gains most.

use serde::{Deserialize, Serialize};

use crate::frame::{Frame, Managed, bytes, pages};
use crate::reason::Reason;
use crate::snapshot::{Plan, Snapshot, VmSample};
use crate::{Policy, State};

/// Sums shrink to a third in this time, or sooner where they hold more than enough returns to be sure: then a VM whose
/// demand jumps is not judged by the seconds before. Not much sooner, or each phase of a program would move limits.
const REMEMBERED_MS: f64 = 5_000.0;
const ENOUGH_RETURNS: f64 = 2_000.0;
const REMEMBERED_AT_LEAST: f64 = 0.3;
/// A VM to which a byte is worth e times as much as to the others gains one part in this many of what it has, and so on.
const STEP: f64 = 1.0 / 5.0;
/// Nobody more than doubles, or gains more than so many times what it wants.
const MOST: f64 = 1.0;
const MARGIN: f64 = 1.25;
/// A VM of which little is away loses no more than one part in this many at a time,
const PROBE: u64 = 32;
/// another one no more than one part in this many of what is away.
const MORE: u64 = 4;
/// One part in this many of what a VM has is taken to be wanted besides, so that few pages say little: in any VM some come
/// back at once, because they went by mistake, and more memory would not save them.
const DOUBT: u64 = 32;
/// A VM below its limit has room for one part in this many of what it holds,
const ROOM: u64 = 16;
/// or for as much as it grew in this many ticks like the last one.
const GROWS_FOR: u64 = 2;
/// Seconds of a CPU for each time something comes back, and for each byte of it: measured in `bench balance` and `huge`, the
/// eviction of what goes in its stead included.
const WORK_S: f64 = 15e-6;
const WORK_S_PER_BYTE: f64 = 2.5e-6 / ballast_base::PAGE_SIZE as f64;
/// No VM is taken to wait longer than this share of the time.
const WAITS_AT_MOST: f64 = 0.9;

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Gain;

/// Sums of one VM, of the past, forgotten exponentially.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sums {
    /// When.
    pub at_ms: u64,
    /// For how long restored pages had been away by then, since the VM attached, in page-milliseconds.
    pub away_page_ms: u64,
    /// How often something had come back by then.
    #[serde(default)]
    pub restores: u64,
    /// And how soon, in all.
    #[serde(default)]
    pub back_milli_hz: u64,
    /// What was away.
    pub far_bytes: u64,
    /// What it held.
    #[serde(default)]
    pub resident_bytes: u64,
    /// Time, in seconds.
    pub time_s: f64,
    /// Of that, waiting.
    pub waited_s: f64,
    /// How often something came back.
    #[serde(default)]
    pub returned: f64,
    /// One over the time that each was away, in 1/s.
    #[serde(default)]
    pub returned_hz: f64,
    /// Bytes that came back, times how long they were away, in byte-seconds.
    pub away_byte_s: f64,
}

impl Sums {
    /// Add what happened since the last time.
    fn add(&mut self, vm: &VmSample, at_ms: u64) {
        let VmSample { away_page_ms, restores, back_milli_hz, far_bytes, resident_bytes, .. } = *vm;
        let now = Self { at_ms, away_page_ms, restores, back_milli_hz, far_bytes, resident_bytes, ..*self };
        let before = std::mem::replace(self, now);
        if before.at_ms == 0 || before.at_ms > at_ms || before.away_page_ms > vm.away_page_ms {
            // The first look, or another life of the VM.
            *self = Self { at_ms, away_page_ms, restores, back_milli_hz, far_bytes, resident_bytes, ..Self::default() };
            return;
        }
        let elapsed_ms = (at_ms - before.at_ms) as f64;
        let enough = (ENOUGH_RETURNS / before.returned.max(1.0)).clamp(REMEMBERED_AT_LEAST, 1.0);
        let kept = (-elapsed_ms / (REMEMBERED_MS * enough)).exp();
        let away = (vm.away_page_ms - before.away_page_ms) as f64 / 1e3 * vm.page_bytes as f64;
        // A VM that was idle comes back to what has been away for long: no more is wanted than was away.
        let most = before.far_bytes.max(vm.far_bytes) as f64 * elapsed_ms / 1e3;
        self.time_s = before.time_s * kept + elapsed_ms / 1e3;
        self.waited_s = before.waited_s * kept + vm.worst_stall() * elapsed_ms / 1e3;
        let returned = vm.restores.saturating_sub(before.restores) as f64;
        self.returned = before.returned * kept + returned;
        self.returned_hz = before.returned_hz * kept + back_milli_hz.saturating_sub(before.back_milli_hz) as f64 / 1e3;
        self.away_byte_s = before.away_byte_s * kept + away.min(most);
    }

    /// Share of the time it waited.
    fn waits(&self) -> f64 {
        if self.time_s > 0.0 { (self.waited_s / self.time_s).min(WAITS_AT_MOST) } else { 0.0 }
    }

    /// Share of a CPU that the host worked for it.
    fn works(&self, page_bytes: u64) -> f64 {
        let each_s = WORK_S + WORK_S_PER_BYTE * page_bytes as f64;
        if self.time_s > 0.0 { self.returned * each_s / self.time_s } else { 0.0 }
    }

    /// How much of what is away is wanted.
    fn wanted_bytes(&self) -> f64 {
        if self.time_s > 0.0 { self.away_byte_s / self.time_s } else { 0.0 }
    }

    /// How much of that is wanted soonest: as much as comes back in a second, over how often it does on average.
    fn wanted_soon_bytes(&self, page_bytes: u64) -> f64 {
        // Nothing came back, or a recording does not say how soon.
        if self.returned_hz <= 0.0 || self.time_s <= 0.0 {
            return self.wanted_bytes();
        }
        self.returned * self.returned / self.returned_hz / self.time_s * page_bytes as f64
    }

    /// Seconds in a second that a byte more saves, if it has so much now: its own, which count more the slower it is, and
    /// the host's.
    fn saves(&self, has_bytes: u64, page_bytes: u64) -> f64 {
        let fair = (1.0 - self.waits()).powi(2);
        let wanted = self.wanted_soon_bytes(page_bytes);
        (self.waits() / fair + self.works(page_bytes)) / (wanted + (has_bytes / DOUBT).max(1) as f64)
    }
}

/// What a VM has: its limit, or what it holds and some room if that is less.
fn has(part: &Managed<'_>, grew_bytes: u64) -> u64 {
    let vm = part.vm;
    let room = (vm.resident_bytes / ROOM).max(grew_bytes.saturating_mul(GROWS_FOR));
    let holds = vm.resident_bytes.saturating_add(room);
    pages(vm.target_bytes.unwrap_or(vm.resident_bytes).min(holds)).clamp(part.lo, part.hi).max(1)
}

impl Policy for Gain {
    fn name(&self) -> &'static str {
        "gain"
    }

    fn decide(&self, snapshot: &Snapshot, state: &mut State) -> Plan {
        let mut frame = Frame::new(self.name(), snapshot, state);
        let seen: Vec<(u64, f64, Sums)> = (frame.managed.iter())
            .map(|part| {
                let (vm, sums) = (part.vm, &mut state.vm(&part.vm.id).gain);
                // At the first look nothing is known of what was before.
                let held = if sums.at_ms == 0 { vm.resident_bytes } else { sums.resident_bytes };
                sums.add(vm, snapshot.at_ms);
                let shares = f64::from(vm.settings.effective_shares()) / 1000.0;
                let has = has(part, vm.resident_bytes.saturating_sub(held));
                (has, shares * sums.saves(bytes(has), vm.page_bytes), *sums)
            })
            .collect();
        let sum = |of: fn(&(u64, f64, Sums)) -> f64| seen.iter().map(of).sum::<f64>();
        let (all, total) = (sum(|vm| vm.0 as f64), sum(|vm| vm.0 as f64 * vm.1));
        let (mut weights, mut goals) = (Vec::with_capacity(seen.len()), Vec::with_capacity(seen.len()));
        for (part, (has, worth, sums)) in frame.managed.iter_mut().zip(seen) {
            // Of the others: one that alone lacks memory would otherwise be compared with itself.
            let average = ((total - has as f64 * worth) / (all - has as f64).max(1.0)).max(0.0);
            let wanted = sums.wanted_bytes() / ballast_base::PAGE_SIZE as f64;
            let wants = wants(has, pages(part.vm.far_bytes), wanted, worth / average);
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
                let working_set_bytes = part.vm.working_set_bytes();
                let headroom_bytes = part.vm.headroom_of(working_set_bytes);
                part.reasons.push(Reason::Headroom { working_set_bytes, headroom_bytes });
            }
        }
        lend(&mut weights, &goals, &frame.ranges().0, frame.budget_pages() as f64);
        frame.divide(&weights, true)
    }
}

/// Give what nobody has to those who would gain from it: each a part of what it lacks of its goal. Who should have less than
/// the least that it will have all the same has that, and more than the most is of no use to anybody.
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

/// What a VM should have that has so many pages, with so many far, of which so many are wanted, if a page is worth so much
/// more to it than to the others.
fn wants(has: u64, far: u64, wanted: f64, worth: f64) -> f64 {
    let now = has as f64;
    // Not a number: nobody waits.
    if worth.is_nan() {
        return now;
    }
    let times = worth.ln();
    if times > 0.0 {
        let most = wanted * MARGIN + now / PROBE as f64;
        return now + (now * (STEP * times * times.max(1.0)).min(MOST)).min(most);
    }
    let most = (has / PROBE).max(far / MORE) as f64;
    now - (now * STEP * (-times).min(1.0)).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostSample, Settings, WorkingSet};
    use ballast_base::MIB;

    fn vm(stall: f64, away_page_ms: u64) -> VmSample {
        VmSample { page_bytes: 4096, far_bytes: 64 * MIB, stall, away_page_ms, ..VmSample::default() }
    }

    #[test]
    fn what_is_wanted_of_what_is_away_is_what_comes_back_in_a_second_times_how_long_it_was_away() {
        let mut sums = Sums::default();
        // 1000 pages a second come back, each after 2 s: 2000 are away at a time.
        (0..60).for_each(|second| sums.add(&vm(0.25, second * 1000 * 2000), second * 1000 + 1));
        assert!((sums.wanted_bytes() / 4096.0 - 2000.0).abs() < 1.0, "{sums:?}");
        assert!((sums.waits() - 0.25).abs() < 1e-9, "{sums:?}");
        let saves = sums.saves(64 * MIB, 4096) * 4096.0;
        // A quarter of the time, sixteen ninths as bad for being as slow, over 2000 pages and 512 more for doubt.
        assert!((saves - 0.25 / 0.5625 / 2512.0).abs() < 1e-6, "{saves}");
        // No more than was away, however long that was.
        sums.add(&vm(0.25, 1 << 50), 60_001);
        assert!(sums.wanted_bytes() < (64 * MIB) as f64, "{sums:?}");
    }

    #[test]
    fn what_comes_back_without_being_waited_for_is_worth_the_work_it_makes() {
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
    fn the_next_byte_holds_what_comes_back_soonest() {
        // 1000 pages a second come back, each after 2 s; or 50 of them after 40 s, and the others after a quarter.
        let [mut alike, mut unlike] = [Sums::default(); 2];
        for second in 0..60 {
            let sample = |away_ms: u64, milli_hz: u64| VmSample {
                restores: second * 1000,
                away_page_ms: second * away_ms,
                back_milli_hz: second * milli_hz,
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
    fn who_comes_back_often_is_judged_by_the_last_seconds_and_who_rarely_does_by_more() {
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
    fn what_nobody_has_is_lent_to_who_gains_and_no_more_than_that() {
        let lent = |goals: [f64; 3], ranges: [(u64, u64); 3], budget| {
            let mut weights = [100.0, 50.0, 10.0];
            lend(&mut weights, &goals, &ranges, budget);
            weights
        };
        let any = [(0, 1000); 3];
        assert_eq!(lent([0.0, 0.0, 90.0], any, 200.0), [100.0, 50.0, 50.0]);
        assert_eq!(lent([130.0, 0.0, 30.0], any, 300.0), [130.0, 50.0, 30.0], "the rest is for whoever divides");
        assert_eq!(lent([130.0, 0.0, 30.0], any, 150.0), [100.0, 50.0, 10.0], "there is nothing left");
        let kept = [(0, 1000), (100, 1000), (0, 40)];
        assert_eq!(lent([0.0, 80.0, 90.0], kept, 300.0), [100.0, 100.0, 40.0], "as much as it will have, or may have");
        assert_eq!(lent([0.0, 120.0, 20.0], kept, 225.0), [100.0, 110.0, 15.0], "half of what each lacks");
    }

    #[test]
    fn a_counter_or_clock_that_went_back_begins_anew_and_the_past_is_forgotten() {
        let mut sums = Sums::default();
        (0..10).for_each(|second| sums.add(&vm(0.5, second * 1_000_000), second * 1000 + 1));
        let before = sums.saves(64 * MIB, 4096);
        (10..40).for_each(|second| sums.add(&vm(0.0, 9_000_000), second * 1000 + 1));
        assert!(sums.saves(64 * MIB, 4096) < before / 10.0, "it has not waited for long");
        sums.add(&vm(0.5, 3), 40_001);
        assert_eq!((sums.time_s, sums.waited_s, sums.away_byte_s), (0.0, 0.0, 0.0));
    }

    #[test]
    fn a_working_set_that_was_measured_and_its_headroom_count_as_wanted_though_nobody_waits_for_them() {
        let idle = |headroom_percent, estimated| {
            let settings = Settings { headroom_percent, ..Settings::default() };
            let set = WorkingSet { bytes: 40 * MIB, estimated };
            let vm =
                |id: &str| VmSample { id: id.into(), size_bytes: 64 * MIB, page_bytes: 4096, ..VmSample::default() };
            let held = VmSample { resident_bytes: 50 * MIB, working_set: Some(set), settings, ..vm("idle") };
            let busy = VmSample { resident_bytes: 46 * MIB, far_bytes: 18 * MIB, stall: 0.5, ..vm("busy") };
            let host = HostSample { budget_bytes: 96 * MIB, free_bytes: 96 * MIB, ..HostSample::default() };
            let (mut state, mut vms) = (State::default(), vec![held, busy]);
            for second in 1..60 {
                (vms[1].restores, vms[1].away_page_ms) = (second * 5000, second * 5000 * 500);
                let plan = Gain.decide(&Snapshot { at_ms: second * 1000, host, vms: vms.clone() }, &mut state);
                for (vm, decision) in vms.iter_mut().zip(&plan.decisions) {
                    vm.target_bytes = decision.limit_bytes;
                    vm.resident_bytes = vm.resident_bytes.min(vm.target_bytes.unwrap_or(u64::MAX));
                }
            }
            vms[0].target_bytes.expect("a target") / MIB
        };
        assert!(idle(0, false) < 36, "nobody asked for headroom");
        assert!(idle(10, true) < 36, "nobody knows the working set");
        assert!((38..=44).contains(&idle(10, false)), "40 MiB and a tenth are its part when the budget is divided");
    }

    #[test]
    fn who_saves_more_gains_who_saves_less_loses_gently_and_nobody_moves_while_nobody_waits() {
        assert_eq!(wants(6400, 0, 0.0, 1.0), 6400.0);
        assert_eq!(wants(6400, 0, 0.0, f64::NAN), 6400.0);
        assert_eq!(wants(6400, 0, 1e6, 1e9), 12_800.0, "no more than double");
        assert_eq!(wants(6400, 0, 800.0, 1e9), 7600.0, "a little more than it wants");
        assert_eq!(wants(6400, 0, 0.0, 0.0), 6200.0, "a 32nd, as long as little is away");
        assert_eq!(wants(6400, 6400, 0.0, 0.0), 5120.0, "a fifth");
        assert!(wants(6400, 6400, 0.0, 0.9) > 6200.0);
    }
}
