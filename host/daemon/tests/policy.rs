//! The governor over real VMs: limits follow the policy, operators' settings hold, programs come and go, and no byte is
//! wrong whatever the limits are.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ballast_api::policy::{Action, Kind};
use ballast_api::{ClientError, DecisionRecord, PlanLimit, PlanRequest, PolicyPatch, VmClass, VmPatch, VmStatus};
use ballast_base::MIB;
use ballast_testkit::program::Ends;

use common::guest::Guest;
use common::raw::Ram;
use common::{Daemon, until};

const VM: &str = "--workload uniform --ram 48M --zero-fraction 0.1";

fn config(policy: &str, budget: &str) -> String {
    format!("quarantine_ms = 5\n[policy]\nname = \"{policy}\"\ntick_ms = 20\nbudget = \"{budget}\"\n")
}

fn targets(daemon: &Daemon) -> Vec<Option<u64>> {
    daemon.api.vms().expect("VMs").iter().map(|vm| vm.target_bytes).collect()
}

/// Whether this VM has this target, except for memory kept free while the host is short: 2/64 of the budget.
fn has(daemon: &Daemon, name: &str, target: u64) -> bool {
    daemon.api.vm(name).is_ok_and(|vm| vm.target_bytes.is_some_and(|has| has <= target && has >= target - target / 32))
}

fn has_event(daemon: &Daemon, kind: &str, text: &str) -> bool {
    daemon.events(kind).iter().any(|event| event.message.contains(text))
}

fn refusal(result: Result<impl std::fmt::Debug, ClientError>) -> (u16, String) {
    match result.expect_err("refused") {
        ClientError::Refused(problem) => (problem.status, problem.detail),
        other => panic!("not a refusal: {other}"),
    }
}

fn set(policy: Kind) -> PolicyPatch {
    PolicyPatch { policy: Some(policy), ..PolicyPatch::default() }
}

#[test]
fn maestro_divides_too_small_a_budget_between_busy_vms_and_no_byte_is_wrong() {
    let Some(daemon) = Daemon::with_uffd(&config("maestro", "60M")) else { return };
    let guests = ["one", "two"].map(|name| Guest::start(&daemon, name, "--workload hotset --ram 48M"));
    until("both have targets below their size, which fit the budget", || {
        let targets: Vec<u64> = targets(&daemon).into_iter().flatten().collect();
        targets.len() == 2 && targets.iter().sum::<u64>() <= 60 * MIB && targets.iter().all(|target| *target < 48 * MIB)
    });
    until("the limits are obeyed, and pages go and come back", || {
        let vms = daemon.api.vms().expect("VMs");
        // Reclaim may be some way behind at any instant.
        vms.iter().all(|vm| vm.resident_bytes < 46 * MIB && vm.faults.restore > 0)
    });
    until("it is explained", || {
        let records = daemon.api.decisions("one").expect("decisions");
        let Some(last) = records.last() else { return false };
        let text = last.sentences.join("\n");
        (last.policy.as_str(), last.decision.action) == ("maestro", Action::Limit)
            && text.contains("its working set is")
            && text.contains("all VMs may have 96 MiB and there are ")
    });
    let host = daemon.host();
    assert_eq!((host.policy, host.guest_budget_bytes), (Kind::Maestro, 60 * MIB));
    assert!(host.state.is_some());
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}

#[test]
fn without_a_policy_nobody_has_a_target_and_a_policy_leaves_none_when_it_ends() {
    let Some(daemon) = Daemon::with_uffd("quarantine_ms = 5\n") else { return };
    let guest = Guest::start(&daemon, "one", VM);
    let stat = daemon.api.policy().expect("policy");
    assert_eq!((stat.policy, stat.state, targets(&daemon)), (Kind::None, None, vec![None]));
    assert_eq!(daemon.api.decisions("one").expect("decisions"), []);
    assert_eq!(refusal(daemon.api.plan(None)).0, 422);
    let tight = PolicyPatch { budget_bytes: Some(Some(24 * MIB)), tick_ms: Some(20), ..set(Kind::Maestro) };
    let plan = daemon.api.plan(Some(Kind::Maestro)).expect("a dry run of another policy");
    assert_eq!((plan.policy.as_str(), targets(&daemon)), ("maestro", vec![None]));
    daemon.api.patch_policy(&tight).expect("set");
    until("the VM has a target", || has(&daemon, "one", 24 * MIB));
    until("it is obeyed", || daemon.vm("one").resident_bytes < 36 * MIB);
    assert!(has_event(&daemon, "policy", "the policy is maestro (was none)"));
    daemon.api.patch_policy(&set(Kind::None)).expect("set");
    until("the target is gone", || targets(&daemon) == [None]);
    until("nothing is reclaimed any more", || daemon.vm("one").resident_bytes > 40 * MIB);
    guest.finish();
}

#[test]
fn operators_settings_and_a_policy_set_while_it_ran_outlive_the_engine() {
    let Some(daemon) = Daemon::with_uffd(&config("none", "64M")) else { return };
    let guest = Guest::start(&daemon, "one", VM);
    let words = VmPatch {
        reservation_bytes: Some(Some(20 * MIB)),
        protect_bytes: Some(Some(24 * MIB)),
        shares: Some(Some(0)),
        headroom_percent: Some(Some(25)),
        limit_bytes: Some(Some(40 * MIB)),
        class: Some(Some(VmClass::Guaranteed)),
        ..VmPatch::default()
    };
    let vm = daemon.api.patch_vm("one", &words).expect("set");
    assert_eq!(vm.settings, words.settings_after(Default::default()));
    assert_eq!(vm.warnings.len(), 2, "limit below size; shares 0 beside a reservation: {:?}", vm.warnings);
    daemon.api.patch_policy(&PolicyPatch { tick_ms: Some(30), ..set(Kind::Pressure) }).expect("set");
    until("it runs", || daemon.api.policy().is_ok_and(|stat| stat.ticks > 2));
    daemon.replace_engine();
    until("the VM is back", || daemon.api.vm("one").is_ok_and(|vm| vm.status == VmStatus::Running));
    let again = daemon.vm("one");
    assert_eq!((again.settings, again.limit_bytes, again.class), (vm.settings, Some(40 * MIB), VmClass::Guaranteed));
    let stat = daemon.api.policy().expect("policy");
    assert_eq!((stat.policy, stat.tick_ms, stat.budget_bytes), (Kind::Pressure, 30, Some(64 * MIB)));
    // Without authority over it, no policy gives it a target.
    until("it decided about the VM", || !daemon.api.decisions("one").expect("decisions").is_empty());
    assert_eq!(daemon.vm("one").target_bytes, None);
    guest.finish();
}

#[test]
fn contradictions_and_impossible_promises_are_refused_and_change_nothing() {
    let Some(daemon) = Daemon::with_uffd(&config("maestro", "64M")) else { return };
    let guests = ["one", "two"].map(|name| Guest::start(&daemon, name, VM));
    let reserve = |name: &str, bytes| {
        let patch = VmPatch { reservation_bytes: Some(Some(bytes)), ..VmPatch::default() };
        daemon.api.patch_vm(name, &patch)
    };
    assert_eq!(reserve("one", 40 * MIB).expect("it fits").settings.reservation_bytes, 40 * MIB);
    let limit = |bytes| VmPatch { limit_bytes: Some(Some(bytes)), ..VmPatch::default() };
    for (name, patch, text) in [
        ("one", limit(30 * MIB), "more than the limit, 30 MiB"),
        (
            "two",
            VmPatch { reservation_bytes: Some(Some(30 * MIB)), ..VmPatch::default() },
            "would be 70 MiB, and the budget is 64 MiB",
        ),
        ("two", VmPatch { class: Some(Some(VmClass::Guaranteed)), ..VmPatch::default() }, "the budget is 64 MiB"),
    ] {
        let before = daemon.vm(name);
        let (status, why) = refusal(daemon.api.patch_vm(name, &patch));
        assert!(status == 422 && why.contains(text), "{patch:?}: {why}");
        let after = daemon.vm(name);
        assert_eq!((before.settings, before.limit_bytes), (after.settings, after.limit_bytes));
    }
    let (status, why) =
        refusal(daemon.api.patch_policy(&PolicyPatch { budget_bytes: Some(Some(32 * MIB)), ..Default::default() }));
    assert!(status == 422 && why.contains("40 MiB, and the budget is 32 MiB"), "{why}");
    until("the reservation is kept", || daemon.vm("one").target_bytes.is_some_and(|target| target >= 40 * MIB));
    // A limit and a reservation that are only consistent together are set together.
    let both = VmPatch { reservation_bytes: Some(Some(10 * MIB)), ..limit(12 * MIB) };
    assert_eq!(daemon.api.patch_vm("one", &both).expect("both").limit_bytes, Some(12 * MIB));
    until("no plan exceeds the limit", || daemon.vm("one").target_bytes.is_some_and(|target| target <= 12 * MIB));
    until("the other gets the rest", || daemon.vm("two").target_bytes == Some(48 * MIB));
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}

#[test]
fn the_pressure_policy_takes_idle_memory_and_leaves_protected_memory() {
    const PAGES: u64 = 4096;
    let Some(daemon) = Daemon::with_uffd(&config("pressure", "1G")) else { return };
    let ram = Ram::new(PAGES);
    ram.mark();
    let _client = ram.vm(&daemon, "idle").attach().expect("attach");
    until("the engine knows the VM", || daemon.api.vm("idle").is_ok());
    let protect = VmPatch { protect_bytes: Some(Some(10 * MIB)), ..VmPatch::default() };
    daemon.api.patch_vm("idle", &protect).expect("protect");
    until("it is down to what is protected", || {
        let vm = daemon.vm("idle");
        vm.target_bytes == Some(10 * MIB) && vm.resident_bytes <= 10 * MIB
    });
    daemon.api.patch_vm("idle", &VmPatch { protect_bytes: Some(None), ..VmPatch::default() }).expect("no more");
    until("it is down to half of that", || daemon.vm("idle").resident_bytes <= 5 * MIB);
    let records: Vec<DecisionRecord> = daemon.api.decisions("idle").expect("decisions");
    assert!(records.iter().any(|record| record.sentences[0].contains("less than 4.00 %")), "{records:?}");
    assert!(records.len() <= 64);
    for page in 0..PAGES {
        assert!(ram.is_marked(page), "page {page}");
    }
    // A read of all pages stalls the VM: then it may have more, until it is idle again.
    until("it gets memory back", || {
        assert!((0..PAGES).all(|page| ram.is_marked(page)));
        daemon.vm("idle").target_bytes.is_some_and(|target| target > 6 * MIB)
    });
}

#[test]
fn a_pinned_vm_and_one_with_an_orphaned_engine_are_left_alone() {
    let Some(mut daemon) = Daemon::with_uffd(&config("maestro", "32M")) else { return };
    let ram = Ram::new(4096);
    let client = ram.vm(&daemon, "pinned").attach().expect("attach");
    client.pin("a device").expect("pinned");
    let guest = Guest::start(&daemon, "one", VM);
    let left = |daemon: &Daemon, name: &str| {
        let records = daemon.api.decisions(name).expect("decisions");
        records.last().is_some_and(|record| record.decision.action == Action::Leave)
    };
    until("the pinned one is left alone", || left(&daemon, "pinned"));
    until("the other has a target", || has(&daemon, "one", 32 * MIB));
    daemon.kill_keeper();
    until("the engine is an orphan", || daemon.vm("one").status == VmStatus::Blocked);
    until("and leaves its VMs alone", || left(&daemon, "one"));
    let tight = PolicyPatch { budget_bytes: Some(Some(16 * MIB)), ..PolicyPatch::default() };
    let ticks = daemon.api.patch_policy(&tight).expect("set").ticks;
    until("it has decided again", || daemon.api.policy().is_ok_and(|stat| stat.ticks > ticks + 1));
    assert!(has(&daemon, "one", 32 * MIB));
    daemon.restart_keeper();
    until("the next engine has the VM, and the configured budget", || {
        daemon.api.vm("one").is_ok_and(|vm| vm.status == VmStatus::Running) && has(&daemon, "one", 32 * MIB)
    });
    guest.finish();
}

#[test]
fn a_program_with_a_lease_decides_until_it_is_silent_and_then_the_policy_does() {
    let Some(daemon) = Daemon::with_uffd(&config("maestro", "64M")) else { return };
    let guest = Guest::start(&daemon, "one", VM);
    until("the policy decides", || daemon.vm("one").target_bytes == Some(48 * MIB));
    let plan = |limit_bytes, lease_ms| PlanRequest {
        policy: "mine".into(),
        lease_ms,
        limits: vec![PlanLimit { name: "one".into(), limit_bytes }],
    };
    let reserve = VmPatch { reservation_bytes: Some(Some(8 * MIB)), ..VmPatch::default() };
    daemon.api.patch_vm("one", &reserve).expect("reserve");
    until("the loop knows", || {
        daemon.api.snapshot().is_ok_and(|seen| seen.vms[0].settings.reservation_bytes == 8 * MIB)
    });
    let nobody = PlanRequest { limits: vec![PlanLimit { name: "nobody".into(), limit_bytes: MIB }], ..plan(0, 1000) };
    for (request, text) in [
        (plan(7 * MIB, 1000), "less than the 8 MiB it must have"),
        (plan(49 * MIB, 1000), "more than the 48 MiB it may have"),
        (nobody, "no VM is named"),
        (plan(20 * MIB, 1), "lease of 1 ms"),
        (PlanRequest { policy: "a b".into(), ..plan(20 * MIB, 1000) }, "no name for a policy"),
    ] {
        let (status, why) = refusal(daemon.api.put_plan(&request));
        assert!(status == 422 && why.contains(text), "{request:?}: {why}");
    }
    // A lease that is renewed in time, during this test.
    let renew = || daemon.api.put_plan(&plan(20 * MIB, 2000)).expect("accepted");
    assert_eq!(renew().decisions[0].limit_bytes, Some(20 * MIB));
    until("its limit holds", || {
        renew();
        let vm = daemon.vm("one");
        vm.target_bytes == Some(20 * MIB) && vm.resident_bytes < 40 * MIB
    });
    // This thread may be delayed for longer than a lease lasts.
    until("it has the lease", || {
        renew();
        daemon.api.policy().expect("policy").lease.is_some_and(|lease| lease.holder == "mine")
    });
    let records = daemon.api.decisions("one").expect("decisions");
    assert!(records.iter().any(|record| record.sentences == ["the program mine decided"]), "{records:?}");
    until("the policy decides again", || daemon.vm("one").target_bytes == Some(48 * MIB));
    assert!(has_event(&daemon, "policy-lease", "the program mine decides from now on"));
    assert!(has_event(&daemon, "policy-lease-lost", "put no plan for 2000 ms: the policy maestro decides again"));
    // A plan that contradicts an operator's new settings ends the lease, too.
    daemon.api.put_plan(&plan(20 * MIB, 60_000)).expect("accepted");
    let more = VmPatch { reservation_bytes: Some(Some(30 * MIB)), ..VmPatch::default() };
    daemon.api.patch_vm("one", &more).expect("reserve");
    until("its plan keeps the rules no more", || has_event(&daemon, "policy-lease-lost", "keeps the rules no more"));
    until("the policy decides again", || daemon.vm("one").target_bytes == Some(48 * MIB));
    guest.finish();
}

#[test]
fn the_example_policy_in_python_decides_and_after_its_death_the_policy_does() {
    let python = Command::new("python3").arg("--version").output().err();
    if common::raw::no_uffd() || common::missing("python3", python.map(|error| error.to_string())) {
        return;
    }
    let daemon = Daemon::start(&config("none", "64M"));
    let guests = ["small", "large"].map(|name| Guest::start(&daemon, name, VM));
    let words = VmPatch { shares: Some(Some(4000)), reservation_bytes: Some(Some(16 * MIB)), ..VmPatch::default() };
    daemon.api.patch_vm("large", &words).expect("words");
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/policy.py");
    let program = Command::new("python3").arg(example).arg(daemon.dir().join("api.sock")).stdin(Stdio::null()).spawn();
    let program = Ends(program.expect("start python3"));
    until("it has given both a target, the larger to the one with more shares", || {
        let [small, large] = ["small", "large"].map(|name| daemon.vm(name).target_bytes.unwrap_or(0));
        small > 0 && large > small && small + large <= 64 * MIB
    });
    until("it has the lease", || {
        daemon.api.policy().expect("policy").lease.is_some_and(|lease| lease.holder == "policy.py")
    });
    until("its limits are obeyed", || daemon.vm("small").resident_bytes < 40 * MIB);
    drop(program);
    until("nobody decides any more", || targets(&daemon) == [None, None]);
    assert!(has_event(&daemon, "policy-lease-lost", "the program policy.py put no plan"));
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}

struct Cgroup(PathBuf);

impl Cgroup {
    fn new() -> Result<Self, String> {
        let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
        let mount = mounts.into_iter().find(|mount| mount.join("cgroup.controllers").exists());
        let path = mount.ok_or("no cgroup version 2 is mounted")?.join(format!("ballast-test-{}", std::process::id()));
        std::fs::create_dir(&path).map_err(|error| error.to_string())?;
        let cgroup = Self(path);
        let pressure = cgroup.0.join("memory.pressure").exists();
        pressure.then_some(cgroup).ok_or("its cgroups have no memory.pressure".into())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn the_kernels_stall_is_read_if_a_vm_has_a_cgroup_to_itself() {
    let Ok(cgroup) = Cgroup::new().inspect_err(|why| ballast_testkit::skip("cgroup2", why)) else { return };
    let Some(daemon) = Daemon::with_uffd(&config("maestro", "64M")) else { return };
    let guest = Guest::start(&daemon, "one", VM);
    let stall = || daemon.api.snapshot().expect("snapshot").vms[0].kernel_stall;
    until("the loop sees the VM", || daemon.api.snapshot().is_ok_and(|seen| seen.vms.len() == 1));
    assert_eq!(stall(), None, "it shares its cgroup with this test");
    std::fs::write(cgroup.0.join("cgroup.procs"), guest.pid().to_string()).expect("move the VM");
    until("it has a stall of its own", || stall().is_some_and(|stall| (0.0..=1.0).contains(&stall)));
    guest.finish();
}
