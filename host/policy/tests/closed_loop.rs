//! Policies in a loop with guests that feel their limits: a model of VMs with hot memory, in which a touch of far
//! memory costs a measured time. A VM with a jump of its demand gets memory; steady demand causes no changes.

use ballast_base::{GIB, MIB, PAGE_SIZE};
use ballast_policy::{HostSample, Kind, Setup, Snapshot, State, VmSample};

const PAGE: u64 = PAGE_SIZE as u64;
/// Seconds of work per touched page, and of waiting for a far one.
const WORK_S: f64 = 20e-6;
const WAIT_S: f64 = 12e-6;

/// A VM that keeps touching `hot` bytes of its memory at random.
struct Guest {
    hot: u64,
    sample: VmSample,
    /// Pages touched per second.
    speed: f64,
}

impl Guest {
    fn new(name: &str, hot: u64) -> Self {
        let sample = VmSample {
            name: name.into(),
            id: name.into(),
            size_bytes: GIB,
            resident_bytes: GIB,
            page_bytes: PAGE,
            ..VmSample::default()
        };
        Self { hot, sample, speed: 0.0 }
    }

    fn run(&mut self, measured: bool) {
        let vm = &mut self.sample;
        let limit = vm.target_bytes.unwrap_or(vm.size_bytes);
        // Hot memory is resident first; a touch of the rest of it misses.
        let misses = 1.0 - (limit.min(self.hot) as f64 / self.hot as f64);
        self.speed = 1.0 / (WORK_S + misses * WAIT_S);
        vm.restores += (self.speed * misses) as u64;
        // All hot pages are touched equally often: a page that refaults was far until its next turn.
        vm.refault_page_ms += (self.speed * misses * (self.hot / PAGE) as f64 / self.speed * 1e3) as u64;
        vm.refault_milli_hz += (self.speed * misses * 1e3 * self.speed / (self.hot / PAGE) as f64) as u64;
        vm.stall = self.speed * misses * WAIT_S;
        // Resident memory that is not hot stays until the limit takes it.
        vm.resident_bytes = limit.min(vm.resident_bytes.max(self.hot));
        vm.far_bytes = vm.size_bytes - vm.resident_bytes;
        vm.working_set_bytes = measured.then_some(self.hot);
    }

    fn full_speed(&self) -> f64 {
        self.speed * WORK_S
    }
}

struct Host {
    setup: Setup,
    state: State,
    guests: Vec<Guest>,
    budget: u64,
    at_ms: u64,
    course: Vec<Vec<u64>>,
    measured: bool,
}

impl Host {
    fn new(kind: Kind, budget: u64, guests: Vec<Guest>, measured: bool) -> Self {
        let setup = Setup { policy: kind, ..Setup::default() };
        Self { setup, state: State::default(), guests, budget, at_ms: 0, course: Vec::new(), measured }
    }

    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.at_ms += 1000;
            self.guests.iter_mut().for_each(|guest| guest.run(self.measured));
            let vms: Vec<VmSample> = self.guests.iter().map(|guest| guest.sample.clone()).collect();
            let used: u64 = vms.iter().map(|vm| vm.resident_bytes).sum();
            let host = HostSample {
                budget_bytes: self.budget,
                free_bytes: self.budget.saturating_sub(used),
                min_free_bytes: 0,
                ..HostSample::default()
            };
            let plan = self.setup.decide(&Snapshot { at_ms: self.at_ms, host, vms }, &mut self.state);
            let plan = plan.expect("it decides");
            let limits = plan.decisions.iter().map(|decision| decision.limit_bytes.expect("a limit"));
            let limits: Vec<u64> = limits.collect();
            for (guest, limit) in self.guests.iter_mut().zip(&limits) {
                guest.sample.target_bytes = Some(*limit);
            }
            self.course.push(limits);
        }
    }
}

impl Host {
    fn speeds(&self) -> Vec<f64> {
        self.guests.iter().map(Guest::full_speed).collect()
    }

    /// Least and most of each VM's limit over the last seconds, and how often any limit changed.
    fn last(&self, seconds: usize) -> (Vec<(u64, u64)>, usize) {
        let last = &self.course[self.course.len() - seconds..];
        let range = |at: usize| {
            let of = last.iter().map(|limits| limits[at]);
            (of.clone().min().unwrap_or(0), of.max().unwrap_or(0))
        };
        ((0..self.guests.len()).map(range).collect(), last.windows(2).filter(|pair| pair[0] != pair[1]).count())
    }

    /// Seconds until each VM runs at this part of its full speed.
    fn seconds_to(&mut self, part: f64) -> u64 {
        let mut seconds = 0;
        loop {
            self.run(1);
            seconds += 1;
            if seconds == 100 || self.speeds().iter().all(|speed| *speed >= part) {
                return seconds;
            }
        }
    }
}

fn two(kind: Kind, measured: bool) -> Host {
    let guests = vec![Guest::new("a", 700 * MIB), Guest::new("b", 200 * MIB)];
    let mut host = Host::new(kind, GIB, guests, measured);
    host.run(60);
    host
}

#[test]
fn steady_demand_that_fits_the_budget_is_met_and_then_nothing_changes() {
    let host = two(Kind::Maestro, true);
    assert!(host.speeds().iter().all(|speed| *speed > 0.999), "{:?}", host.speeds());
    assert_eq!(host.last(50).1, 0, "changes in the last 50 s");
}

#[test]
fn a_vm_with_a_jump_of_its_demand_gets_memory_within_seconds_and_no_other_suffers() {
    for (kind, measured) in [(Kind::Maestro, true), (Kind::Maestro, false), (Kind::Pressure, true), (Kind::Gain, false)]
    {
        let mut host = two(kind, measured);
        host.guests[0].hot = 200 * MIB;
        host.guests[1].hot = 700 * MIB;
        let seconds = host.seconds_to(0.9);
        assert!(seconds <= 8, "{kind}: {seconds} s until both have 90 % of their speed");
        for _ in 0..60 {
            host.run(1);
            assert!(host.speeds().iter().all(|speed| *speed >= 0.9), "{kind}: {:?}", host.speeds());
        }
    }
}

#[test]
fn a_vm_with_a_jump_of_its_demand_is_lent_the_unused_memory_of_others_at_once() {
    let hot = [("idle", 8 * MIB), ("b", 100 * MIB), ("c", 100 * MIB), ("d", 100 * MIB)];
    let mut host = Host::new(Kind::Gain, 544 * MIB, hot.map(|(name, hot)| Guest::new(name, hot)).into(), false);
    for guest in &mut host.guests {
        (guest.sample.size_bytes, guest.sample.resident_bytes) = (200 * MIB, 200 * MIB);
    }
    host.run(2);
    let second = |host: &mut Host| {
        for guest in &mut host.guests[1..] {
            let vm = &mut guest.sample;
            // Hardly touched memory is restored slowly, whatever the limit; and some pages were evicted by mistake.
            vm.resident_bytes = vm.resident_bytes.min(140 * MIB) + MIB / 4;
            vm.restores += 200;
            vm.refault_page_ms += 200 * 250;
            vm.refault_milli_hz += 200 * 4000;
        }
        host.run(1);
    };
    (0..40).for_each(|_| second(&mut host));
    assert!(host.course.last().is_some_and(|limits| limits[0] < 20 * MIB), "it was idle");
    host.guests[0].hot = 190 * MIB;
    let seconds = (1..100).find(|_| {
        second(&mut host);
        host.speeds()[0] >= 0.9
    });
    assert!(seconds.is_some_and(|seconds| seconds <= 4), "{seconds:?} s");
}

#[test]
fn where_memory_is_short_no_vm_is_sacrificed_and_limits_hardly_move() {
    for (kind, measured) in [(Kind::Maestro, true), (Kind::Maestro, false), (Kind::Pressure, true), (Kind::Gain, false)]
    {
        let hot = [("a", 900 * MIB), ("b", 500 * MIB), ("c", 100 * MIB)];
        let mut host = Host::new(kind, GIB, hot.map(|(name, hot)| Guest::new(name, hot)).into(), measured);
        // Former needs of VMs are forgotten slowly.
        host.run(120);
        let (ranges, _) = host.last(60);
        for ((least, most), (name, _)) in ranges.iter().zip(hot) {
            // These two keep trying whether less suffices.
            let swing = if matches!(kind, Kind::Pressure | Kind::Gain) { most / 3 } else { most / 5 };
            assert!(most - least <= swing, "{kind}, {name}: from {least} to {most}");
        }
        for _ in 0..30 {
            host.run(1);
            // A third of the needed memory is missing, and gain takes it where each byte of it is used least.
            let least = if kind == Kind::Gain { 0.7 } else { 0.75 };
            assert!(host.speeds().iter().all(|speed| *speed > least), "{kind}: {:?}", host.speeds());
            assert!(host.course.last().is_some_and(|limits| limits.iter().sum::<u64>() <= GIB));
        }
    }
}

#[test]
fn memory_that_a_vm_holds_and_does_not_use_moves_to_others_without_a_measurement() {
    for kind in [Kind::Maestro, Kind::Gain] {
        let hot = [("a", 600 * MIB), ("b", 600 * MIB), ("c", 100 * MIB)];
        let mut host = Host::new(kind, GIB, hot.map(|(name, hot)| Guest::new(name, hot)).into(), false);
        host.run(60);
        let (ranges, _) = host.last(1);
        // Each begins with a third.
        assert!(ranges[2].1 < 150 * MIB && ranges[0].0 > 430 * MIB && ranges[1].0 > 430 * MIB, "{kind}: {ranges:?}");
    }
}

#[test]
fn the_pressure_policy_takes_unneeded_memory_and_keeps_stall_below_its_threshold() {
    let guests = vec![Guest::new("a", 300 * MIB), Guest::new("b", 100 * MIB)];
    let mut host = Host::new(Kind::Pressure, 8 * GIB, guests, true);
    host.run(300);
    let (ranges, _) = host.last(60);
    assert!(ranges[0].1 < 400 * MIB && ranges[1].1 < 150 * MIB, "of 1 GiB each: {ranges:?}");
    let mut stalled = [0.0; 2];
    for _ in 0..200 {
        host.run(1);
        for (sum, guest) in stalled.iter_mut().zip(&host.guests) {
            *sum += guest.sample.stall / 200.0;
        }
    }
    assert!(stalled.iter().all(|stall| *stall <= 0.04), "{stalled:?}");
}
