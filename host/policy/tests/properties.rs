//! The promises of each policy, for any snapshot.

use ballast_base::{MIB, PAGE_SIZE};
use ballast_policy::snapshot::Action;
use ballast_policy::solve::{Part, solve, weight};
use ballast_policy::{
    Class, External, HostSample, Kind, Plan, Settings, Setup, Snapshot, State, VmSample, check_external,
};
use proptest::prelude::*;

const PAGE: u64 = PAGE_SIZE as u64;
const DECIDERS: [Kind; 3] = [Kind::Maestro, Kind::Pressure, Kind::Gain];

fn policy(kind: Kind) -> impl Fn(&Snapshot, &mut State) -> Plan {
    let setup = Setup { policy: kind, ..Setup::default() };
    move |snapshot, state| setup.decide(snapshot, state).expect("it decides")
}

/// A VM of up to 4 GiB whose settings do not contradict each other.
fn any_vm() -> impl Strategy<Value = VmSample> {
    let amounts = (1u64..1 << 20, 0.0..1.0f64, 0.0..1.0f64, proptest::option::of(0.05..1.2f64), 0.0..1.0f64);
    let words = (0.0..1.0f64, 0.0..1.0f64, proptest::option::of(0u32..4000), 0u32..100, 0u8..4, any::<bool>());
    let needs = (proptest::option::of(0.0..1.2f64), 0u64..1 << 20, 0.0..1.0f64, 0u8..20);
    (amounts, words, needs).prop_map(|(amounts, words, needs)| {
        let (pages, resident, target, limit, far) = amounts;
        let size_bytes = pages * PAGE;
        let part = |share: f64, of: u64| (of as f64 * share) as u64 / PAGE * PAGE;
        let limit_bytes = limit.map(|share| part(share, size_bytes).max(PAGE));
        let most = limit_bytes.unwrap_or(size_bytes).min(size_bytes);
        let (reserve, protect, shares, headroom_percent, class, has_target) = words;
        let class = [Class::Guaranteed, Class::Burstable, Class::Burstable, Class::BestEffort][class as usize];
        let reservation_bytes = if class == Class::BestEffort { 0 } else { part(reserve * reserve, most / 2) };
        let protect_bytes = if protect < 0.5 { 0 } else { part(protect, most).max(reservation_bytes) };
        let settings = Settings { class, reservation_bytes, protect_bytes, shares, headroom_percent };
        assert_eq!(settings.contradiction(size_bytes, limit_bytes), None);
        let resident_bytes = part(resident, size_bytes);
        let (set, restores, stall, held) = needs;
        VmSample {
            size_bytes,
            resident_bytes,
            far_bytes: part(far, size_bytes - resident_bytes),
            limit_bytes,
            target_bytes: has_target.then(|| part(target, most)),
            settings,
            held: (held == 0).then(|| "a test".into()),
            working_set_bytes: set.map(|share| part(share, size_bytes)),
            page_bytes: PAGE,
            restores,
            stall: stall.powi(4),
            ..VmSample::default()
        }
    })
}

fn any_snapshot() -> impl Strategy<Value = Snapshot> {
    (proptest::collection::vec(any_vm(), 0..9), 0.0..1.3f64, 0.0..1.0f64, 0u64..4).prop_map(
        |(mut vms, share, free, smallest)| {
            for (at, vm) in vms.iter_mut().enumerate() {
                (vm.name, vm.id) = (format!("vm{at}"), format!("id{at}"));
            }
            let all: u64 = vms.iter().map(|vm| vm.size_bytes).sum();
            let budget_bytes = (all as f64 * share) as u64;
            let host = HostSample {
                budget_bytes,
                free_bytes: (budget_bytes as f64 * free) as u64,
                min_free_bytes: budget_bytes / 64,
                far_capacity_bytes: all,
                smallest_bytes: smallest * MIB,
            };
            Snapshot { at_ms: 1_000_000, host, vms }
        },
    )
}

fn decide(kind: Kind, snapshot: &Snapshot) -> Plan {
    policy(kind)(snapshot, &mut State::default())
}

fn least(snapshot: &Snapshot, vm: &VmSample) -> u64 {
    let most = vm.most_bytes() / PAGE * PAGE;
    let reserved = vm.settings.effective_reservation(vm.most_bytes()).max(snapshot.host.smallest_bytes);
    (reserved.div_ceil(PAGE) * PAGE).min(most)
}

fn limit_of(plan: &Plan, at: usize) -> Option<u64> {
    plan.decisions[at].limit_bytes
}

proptest! {
    // Some errors show in only one of a thousand or a hundred thousand snapshots.
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn limits_are_within_bounds_and_budget_for_any_snapshot(snapshot in any_snapshot()) {
        for kind in DECIDERS {
            let plan = decide(kind, &snapshot);
            prop_assert_eq!(plan.decisions.len(), snapshot.vms.len());
            let (mut given, mut reserved, mut alone) = (0, 0, 0);
            for (vm, decision) in snapshot.vms.iter().zip(&plan.decisions) {
                prop_assert!(!decision.reasons.is_empty(), "{} gives no reason", kind);
                let untouchable = vm.held.is_some() || vm.settings.effective_shares() == 0;
                prop_assert_eq!(decision.action != Action::Limit, untouchable);
                if let Some(limit) = decision.limit_bytes {
                    prop_assert!(limit.is_multiple_of(PAGE));
                    prop_assert!(least(&snapshot, vm) <= limit && limit <= vm.most_bytes(), "{}: {}", kind, limit);
                    given += limit;
                    reserved += least(&snapshot, vm);
                } else {
                    alone += vm.resident_bytes;
                }
            }
            // Reservations are kept even if the budget cannot hold them.
            let budget = snapshot.host.budget_bytes.saturating_sub(alone);
            prop_assert!(given <= budget.max(reserved), "{} gave {} of {}", kind, given, budget);
        }
    }

    #[test]
    fn equal_snapshots_and_states_give_equal_plans_also_through_json(
        snapshot in any_snapshot(), restored in proptest::collection::vec(0u64..10_000, 9),
        kind in 0usize..DECIDERS.len(),
    ) {
        let policy = policy(DECIDERS[kind]);
        let mut state = State::default();
        policy(&snapshot, &mut state);
        let mut later = snapshot;
        later.at_ms += 1000;
        for (vm, more) in later.vms.iter_mut().zip(restored) {
            vm.restores += more;
            vm.refault_page_ms += more * 300;
        }
        let mut copy: State = serde_json::from_str(&serde_json::to_string(&state).expect("write")).expect("read");
        let read: Snapshot = serde_json::from_str(&serde_json::to_string(&later).expect("write")).expect("read");
        prop_assert_eq!(&read, &later);
        let plan = policy(&later, &mut state);
        prop_assert_eq!(&policy(&read, &mut copy), &plan);
        prop_assert_eq!(copy, state);
        let read: Plan = serde_json::from_str(&serde_json::to_string(&plan).expect("write")).expect("read");
        prop_assert_eq!(read, plan);
    }

    #[test]
    fn more_shares_never_mean_less_memory(snapshot in any_snapshot(), at in 0usize..9, more in 1u32..5000) {
        prop_assume!(!snapshot.vms.is_empty());
        let at = at % snapshot.vms.len();
        prop_assume!(snapshot.vms[at].settings.effective_shares() > 0);
        for kind in DECIDERS {
            let mut richer = snapshot.clone();
            // No last limits, because small changes of a limit are skipped.
            for vm in &mut richer.vms { if kind != Kind::Pressure { vm.target_bytes = None; } }
            let before = limit_of(&decide(kind, &richer), at);
            let shares = &mut richer.vms[at].settings.shares;
            *shares = Some(shares.unwrap_or(2000) + more);
            let after = limit_of(&decide(kind, &richer), at);
            // One page for rounding.
            prop_assert!(after.map(|after| after + PAGE) >= before, "{}: {:?} became {:?}", kind, before, after);
        }
    }

    #[test]
    fn more_need_never_means_less_memory(snapshot in any_snapshot(), at in 0usize..9, more in 1u64..1 << 20) {
        prop_assume!(!snapshot.vms.is_empty());
        let at = at % snapshot.vms.len();
        let mut snapshot = snapshot;
        for vm in &mut snapshot.vms { vm.target_bytes = None; }
        let vm = &snapshot.vms[at];
        let bytes = vm.working_set_bytes.unwrap_or(vm.resident_bytes).min(vm.size_bytes);
        snapshot.vms[at].working_set_bytes = Some(bytes);
        let mut needier = snapshot.clone();
        needier.vms[at].working_set_bytes = Some(bytes + more * PAGE);
        let (before, after) = (decide(Kind::Maestro, &snapshot), decide(Kind::Maestro, &needier));
        let limits = [limit_of(&before, at), limit_of(&after, at)];
        prop_assert!(limits[1].map(|after| after + PAGE) >= limits[0], "working set: {:?}", limits);

        // Need shows by refaults.
        let after = |restored: u64| {
            let policy = policy(Kind::Maestro);
            let mut state = State::default();
            policy(&snapshot, &mut state);
            let mut later = snapshot.clone();
            later.at_ms += 1000;
            later.vms[at].restores += restored;
            limit_of(&policy(&later, &mut state), at)
        };
        let limits = [after(0), after(more)];
        prop_assert!(limits[1].map(|after| after + PAGE) >= limits[0], "restores: {:?}", limits);

        // Under the pressure policy, need shows by stall.
        let stalling = |stall| {
            let mut snapshot = snapshot.clone();
            snapshot.vms[at].stall = stall;
            limit_of(&decide(Kind::Pressure, &snapshot), at)
        };
        let limits = [stalling(0.0), stalling(0.03), stalling(0.05), stalling(0.5)];
        for pair in limits.windows(2) {
            prop_assert!(pair[1].map(|after| after + PAGE) >= pair[0], "stall: {:?}", limits);
        }
    }

    #[test]
    fn more_waiting_or_more_shares_never_mean_less_memory_under_gain(
        snapshot in any_snapshot(), at in 0usize..9,
        intervals in proptest::collection::vec(0u64..1 << 30, 9), more in 1u32..5000,
    ) {
        prop_assume!(!snapshot.vms.is_empty());
        let at = at % snapshot.vms.len();
        let mut snapshot = snapshot;
        for vm in &mut snapshot.vms { vm.target_bytes = None; }
        let after = |change: &dyn Fn(&mut VmSample)| {
            let (policy, mut state) = (policy(Kind::Gain), State::default());
            policy(&snapshot, &mut state);
            let mut later = snapshot.clone();
            later.at_ms += 1000;
            for (vm, interval) in later.vms.iter_mut().zip(&intervals) { vm.refault_page_ms += interval; }
            change(&mut later.vms[at]);
            limit_of(&policy(&later, &mut state), at)
        };
        let [waiting, lots] = [0.1, 0.8].map(|stall| after(&|vm| vm.stall = stall));
        prop_assert!(lots.map(|lots| lots + PAGE) >= waiting, "waiting: {:?} {:?}", waiting, lots);
        let shares = snapshot.vms[at].settings.effective_shares();
        if shares > 0 {
            let [few, many] = [shares, shares + more].map(|shares| after(&|vm| vm.settings.shares = Some(shares)));
            prop_assert!(many.map(|many| many + PAGE) >= few, "shares: {:?} {:?}", few, many);
        }
    }

    #[test]
    fn scaling_all_memory_scales_the_plan(snapshot in any_snapshot(), by in 2u64..40) {
        for kind in DECIDERS {
            // Sizes near a page are rounded, so the VMs have at least some MiB.
            let scaled = |by: u64| {
                let mut snapshot = snapshot.clone();
                let host = &mut snapshot.host;
                for bytes in [&mut host.budget_bytes, &mut host.free_bytes, &mut host.min_free_bytes,
                              &mut host.smallest_bytes] { *bytes *= by; }
                for vm in &mut snapshot.vms {
                    // A VM that uses nothing counts as using a page, of whatever size that is.
                    vm.resident_bytes = vm.resident_bytes.max(PAGE);
                    if let Some(bytes) = &mut vm.working_set_bytes { *bytes = (*bytes).max(PAGE); }
                    for bytes in [&mut vm.size_bytes, &mut vm.resident_bytes, &mut vm.far_bytes,
                                  &mut vm.settings.reservation_bytes, &mut vm.settings.protect_bytes] { *bytes *= by; }
                    for bytes in [&mut vm.limit_bytes, &mut vm.target_bytes, &mut vm.working_set_bytes]
                        .into_iter().flatten() { *bytes *= by; }
                }
                decide(kind, &snapshot)
            };
            let (small, large) = (scaled(64), scaled(64 * by));
            for (small, large) in small.decisions.iter().zip(&large.decisions) {
                prop_assert_eq!(small.action, large.action);
                let (Some(small), Some(large)) = (small.limit_bytes, large.limit_bytes) else { continue };
                // A page of each VM, and the error of floating point.
                let slack = 16 * PAGE * by + large / 1_000_000;
                prop_assert!((small * by).abs_diff(large) <= slack, "{}: {} times {}: {}", kind, small, by, large);
            }
        }
    }

    #[test]
    fn no_random_feasible_plan_beats_the_optimum(
        vms in proptest::collection::vec(
            (1u64 << 12..1 << 22, 0.0..0.5f64, 0.0..1.0f64, 1u32..5000, 1.0..4e6f64), 2..9),
        tightness in 0.05..0.95f64,
        tries in proptest::collection::vec(proptest::collection::vec(0.0..1.0f64, 9), 30),
        nudges in proptest::collection::vec((0usize..9, 0usize..9, 1u64..5000), 30),
    ) {
        let parts: Vec<Part> = vms.iter().map(|(pages, lo, span, shares, demand)| {
            let lo = (*pages as f64 * lo) as u64 + 16;
            let hi = lo + ((*pages - pages / 2) as f64 * span) as u64;
            Part { lo, hi, weight: weight(*shares, *demand) }
        }).collect();
        let (least, most) = parts.iter().fold((0, 0), |(lo, hi), part| (lo + part.lo, hi + part.hi));
        let budget = least + ((most - least) as f64 * tightness) as u64;
        let cost = |limits: &[f64]| -> f64 {
            limits.iter().zip(&vms).map(|(limit, vm)| f64::from(vm.3) * (vm.4 / limit).powi(2)).sum()
        };
        let float = |limits: &[u64]| limits.iter().map(|limit| *limit as f64).collect::<Vec<f64>>();
        let best = solve(&parts, budget);
        prop_assert!(best.iter().sum::<u64>() <= budget);
        let ours = cost(&float(&best));
        // Limits are whole pages: each may be up to one page off the exact optimum.
        let exactly = |limits: &[f64]| cost(&limits.iter().map(|limit| limit + 1.0).collect::<Vec<f64>>());
        for shares in tries {
            // A random point between the bounds, shrunk towards `lo` until it fits.
            let room: f64 = parts.iter().zip(&shares).map(|(part, share)| (part.hi - part.lo) as f64 * share).sum();
            let fits = ((budget - least) as f64 / room.max(1.0)).min(1.0);
            let other: Vec<f64> = parts.iter().zip(&shares)
                .map(|(part, share)| part.lo as f64 + (part.hi - part.lo) as f64 * share * fits).collect();
            prop_assert!(exactly(&float(&best)) <= cost(&other) * (1.0 + 1e-9), "{:?} beats {:?}", other, best);
        }
        for (from, to, pages) in nudges {
            // A neighbour: some pages move from one VM to another.
            let (from, to) = (from % parts.len(), to % parts.len());
            let moved = pages.min(best[from] - parts[from].lo).min(parts[to].hi - best[to]);
            let mut other = best.clone();
            other[from] -= moved;
            other[to] += moved;
            prop_assert!(exactly(&float(&best)) <= cost(&float(&other)) * (1.0 + 1e-9), "{:?} beats {:?}", other, best);
        }
        prop_assert!(ours.is_finite());
    }

    #[test]
    fn a_plan_of_ours_passes_as_another_programs_and_a_broken_rule_is_refused(snapshot in any_snapshot()) {
        let plan = decide(Kind::Maestro, &snapshot);
        let limits: Vec<(String, u64)> = plan.decisions.iter()
            .filter_map(|decision| Some((decision.name.clone(), decision.limit_bytes?))).collect();
        let reserved: u64 = snapshot.vms.iter().zip(&plan.decisions)
            .filter(|(_, decision)| decision.limit_bytes.is_some()).map(|(vm, _)| least(&snapshot, vm)).sum();
        let alone: u64 = snapshot.vms.iter().zip(&plan.decisions)
            .filter(|(_, decision)| decision.limit_bytes.is_none()).map(|(vm, _)| vm.resident_bytes).sum();
        prop_assume!(reserved + alone <= snapshot.host.budget_bytes);
        let ask = |limits: &[(String, u64)]| {
            let wanted = External { policy: "x".into(), limits: limits.into() };
            check_external(&snapshot, &wanted, &mut State::default(), true)
        };
        let accepted = ask(&limits).expect("ours keeps the rules");
        for (ours, theirs) in plan.decisions.iter().zip(&accepted.decisions) {
            prop_assert_eq!(ours.limit_bytes, theirs.limit_bytes);
        }
        for (at, (name, _)) in limits.iter().enumerate() {
            let vm = snapshot.vms.iter().find(|vm| vm.name == *name).expect("named");
            let mut wrong = limits.clone();
            wrong[at].1 = vm.most_bytes() / PAGE * PAGE + PAGE;
            prop_assert!(ask(&wrong).is_err(), "more than it may have");
            if least(&snapshot, vm) > 0 {
                wrong[at].1 = least(&snapshot, vm) - PAGE;
                prop_assert!(ask(&wrong).is_err(), "less than is reserved");
            }
            wrong[at] = limits[(at + 1) % limits.len()].clone();
            prop_assert!(limits.len() == 1 || ask(&wrong).is_err(), "a VM twice");
        }
        let mut wrong = limits;
        wrong.push(("nobody".into(), PAGE));
        prop_assert!(ask(&wrong).expect_err("no such VM").to_string().contains("nobody"));
    }
}
