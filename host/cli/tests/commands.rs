//! Tests of the command as people and scripts use it: against the real API server over canned figures, and without a
//! daemon.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use ballast_api::policy::{Action, Decision, HostState, Kind, Plan, Reason, Snapshot};
use ballast_api::{
    AdoptRequest, AdoptResult, AgeBucket, Client, DecisionRecord, EngineTime, Event, FaultCounts, HeatCell, History,
    HostStat, KeptVm, Latency, LendRequest, PlanRequest, PolicyPatch, PolicyStat, PoolNode, PoolPages, PoolRequest,
    PoolStat, PoolVm, RegionStat, UpgradeStage, UpgradeStat, VmHeat, VmPatch, VmStat,
};
use ballast_base::{GIB, MIB};
use ballast_daemon::http::{Backend, ChangeError, Gate, Histogram, PeerPolicy, serve};
use ballast_testkit::program::{self, install_script};
use ballast_testkit::skip;
use tokio::sync::watch;

struct Canned(Mutex<Vec<VmStat>>);

fn canned_vms() -> Vec<VmStat> {
    let region = |index, resident_bytes| RegionStat {
        index,
        size_bytes: GIB,
        resident_bytes,
        far_bytes: GIB - resident_bytes,
        ..RegionStat::default()
    };
    let web = VmStat {
        name: "web-1".into(),
        id: "0011".into(),
        pid: 4242,
        vmm: "qemu-system-x86_64".into(),
        size_bytes: 2 * GIB,
        limit_bytes: Some(GIB),
        resident_bytes: 900 * MIB,
        quarantine_bytes: 8 * MIB + 4096,
        far_bytes: 800 * MIB,
        zero_bytes: 100 * MIB,
        untouched_bytes: 248 * MIB,
        store_bytes: 200 * MIB,
        registered_bytes: GIB,
        unmanaged_bytes: 0,
        faults: FaultCounts {
            minor: 1500,
            restore: 1_234_567,
            restored_pages: 1_234_567,
            file: 7,
            zero: 10,
            zeroed_pages: 10,
            fresh: 3,
            deferred: 1,
            throttled: 42,
            throttled_us: 1_260_000,
        },
        restore_latency: Latency { count: 1_234_567, p50_us: 4.25, p90_us: 9.0, p99_us: 38.1, max_us: 412.0 },
        engine_time: EngineTime { faults_us: 12_340_000, tasks_us: 560_000 },
        regions: vec![region(0, 500 * MIB), region(1, 400 * MIB)],
        ..VmStat::default()
    };
    vec![web.clone(), VmStat { name: "db".into(), limit_bytes: None, regions: Vec::new(), ..web }]
}

impl Backend for Canned {
    fn vms(&self) -> Vec<VmStat> {
        self.0.lock().expect("lock").clone()
    }
    fn vm(&self, name: &str) -> Option<VmStat> {
        self.vms().into_iter().find(|vm| vm.name == name)
    }
    fn heat(&self, name: &str, cells: usize) -> Option<VmHeat> {
        let hot = |cell: usize| if cell < cells / 4 { 1.0 } else { 0.0 };
        self.vm(name).map(|vm| VmHeat {
            name: vm.name,
            is_tracked: name == "web-1",
            cycles: 3,
            period_ms: 2000,
            present_bytes: 8 * MIB,
            wss_bytes: 2 * MIB,
            wss_huge_bytes: 2 * MIB,
            wss_span_s: 30.0,
            ages: vec![AgeBucket { up_to_s: Some(1), bytes: 2 * MIB }, AgeBucket { up_to_s: None, bytes: 6 * MIB }],
            strip: (0..cells).map(|cell| HeatCell { present: 1.0, hot: hot(cell), age_s: None }).collect(),
            ..VmHeat::default()
        })
    }
    fn set_track(&self, name: &str, track: bool) -> Option<VmHeat> {
        self.heat(name, 64).map(|heat| VmHeat { track, ..heat })
    }
    fn patch_vm(&self, name: &str, patch: &VmPatch) -> Result<VmStat, ChangeError> {
        let mut vms = self.0.lock().expect("lock");
        let vm = vms.iter_mut().find(|vm| vm.name == name).ok_or(ChangeError::NotFound)?;
        if patch.limit_bytes.flatten().is_some_and(|limit| limit < 2 * MIB) {
            return Err(ChangeError::Invalid("a limit must be at least 2 MiB".into()));
        }
        vm.limit_bytes = patch.limit_bytes.unwrap_or(vm.limit_bytes);
        vm.settings = patch.settings_after(vm.settings);
        vm.class = vm.settings.class;
        Ok(vm.clone())
    }
    fn keep(&self, name: &str, kept: bool) -> Result<VmStat, ChangeError> {
        let mut vms = self.0.lock().expect("lock");
        let vm = vms.iter_mut().find(|vm| vm.name == name).ok_or(ChangeError::NotFound)?;
        if kept {
            vm.resident_bytes += vm.far_bytes;
            (vm.far_bytes, vm.zero_bytes, vm.quarantine_bytes, vm.registered_bytes) = (0, 0, 0, 0);
        }
        Ok(vm.clone())
    }
    fn host(&self) -> HostStat {
        HostStat {
            version: "0.1.0".into(),
            uptime_s: 3700,
            vms: 2,
            mem_total_bytes: 16 * GIB,
            mem_available_bytes: 9 * GIB,
            store_bytes: 400 * MIB,
            store_budget_bytes: 4 * GIB,
            ..HostStat::default()
        }
    }
    fn events(&self, after: u64, _: bool) -> Vec<Event> {
        let message = "QEMU attached\u{1b}[2J\u{9b}2J with 2 regions".into();
        let at_unix_ms = 1_798_761_599_999;
        let event = Event { id: at_unix_ms, at_unix_ms, vm: Some("web-1".into()), kind: "attached".into(), message };
        if after < event.id { vec![event] } else { Vec::new() }
    }
    fn event_watch(&self) -> watch::Receiver<u64> {
        watch::Sender::default().subscribe()
    }
    fn event_counts(&self) -> BTreeMap<String, u64> {
        BTreeMap::new()
    }
    fn kept(&self) -> anyhow::Result<Vec<KeptVm>> {
        Ok(Vec::new())
    }
    fn forget(&self, _: &str) -> anyhow::Result<Vec<KeptVm>> {
        Ok(Vec::new())
    }
    fn host_history(&self, _: u64) -> History {
        History::default()
    }
    fn vm_history(&self, _: &str, _: u64) -> Option<History> {
        None
    }
    fn fault_histogram(&self, _: &str) -> Option<Histogram> {
        None
    }
    fn snapshot(&self) -> Snapshot {
        Snapshot::default()
    }
    fn put_plan(&self, _: PlanRequest) -> anyhow::Result<Plan> {
        anyhow::bail!("no program decides here")
    }
    fn release(&self, _: &str, _: bool) -> Result<VmStat, ChangeError> {
        Err(ChangeError::NotFound)
    }
    fn stage_histograms(&self) -> Vec<(&'static str, Histogram)> {
        Vec::new()
    }
    fn plan(&self, policy: Option<Kind>) -> anyhow::Result<Plan> {
        let policy = policy.unwrap_or(Kind::Maestro).to_string();
        Ok(Plan { policy, divided_bytes: 3 * GIB, decisions: vec![canned_decision()], ..Plan::default() })
    }
    fn policy(&self) -> PolicyStat {
        PolicyStat {
            policy: Kind::Maestro,
            tick_ms: 20,
            state: Some(HostState::Soft),
            threshold: 0.04,
            ..Default::default()
        }
    }
    fn patch_policy(&self, patch: &PolicyPatch) -> anyhow::Result<PolicyStat> {
        if patch.tick_ms == Some(1) {
            anyhow::bail!("a tick of 1 ms is out of range");
        }
        Ok(PolicyStat {
            policy: patch.policy.unwrap_or_default(),
            budget_bytes: patch.budget_bytes.flatten(),
            ..self.policy()
        })
    }
    fn decisions(&self, name: &str) -> Option<Vec<DecisionRecord>> {
        let decision = canned_decision();
        let sentences = decision.reasons.iter().map(ToString::to_string).collect();
        let record =
            DecisionRecord { times: 1, policy: "maestro".into(), decision, sentences, ..DecisionRecord::default() };
        (name == "web-1").then(|| vec![record])
    }
    fn adopt(&self, request: &AdoptRequest) -> anyhow::Result<AdoptResult> {
        match request.pid {
            Some(pid) => anyhow::bail!("process {pid}: it runs sleep, which is no VMM that Ballast knows"),
            None => Ok(AdoptResult { adopted: self.vms().into_iter().take(1).collect(), refused: Vec::new() }),
        }
    }
    fn upgrade(&self) -> UpgradeStat {
        let (program, stage) = ("/opt/ballastd".into(), UpgradeStage::Done);
        UpgradeStat { number: 4, program, stage, vms: 2, checked: 2, moved: 2, took_us: 81_500, ..Default::default() }
    }

    fn begin_upgrade(&self, program: Option<String>) -> anyhow::Result<UpgradeStat> {
        match program.as_deref() {
            Some("/bad/ballastd") => anyhow::bail!("Running /bad/ballastd engine: No such file or directory"),
            _ => Ok(UpgradeStat { stage: UpgradeStage::Checking, moved: 0, ..self.upgrade() }),
        }
    }
    fn pool(&self) -> PoolStat {
        let node = PoolNode {
            reserved_bytes: 6 * GIB,
            ready_bytes: GIB,
            ready_gib_bytes: GIB,
            used_bytes: 4 * GIB,
            fenced_bytes: GIB,
            map: "UUUu-z".into(),
            ..PoolNode::default()
        };
        let vms = vec![PoolVm { name: "web-1".into(), bytes: 4 * GIB, extents: 1, touched_bytes: None }];
        let notes = vec!["every node gives 6 GiB".into()];
        PoolStat { file_bytes: GIB, nodes: vec![node], vms, notes, metadata_bytes: 4096, ..PoolStat::default() }
    }

    fn reserve_pool(&self, request: &PoolRequest) -> anyhow::Result<PoolStat> {
        let node = |bytes| PoolNode { reserved_bytes: bytes, map: "-".into(), ..PoolNode::default() };
        let of = |bytes| PoolStat { nodes: vec![node(bytes)], notes: vec!["whole".into()], ..PoolStat::default() };
        match (request.node, request.pages) {
            (Some(node), _) => anyhow::bail!("there is no node {node}; the host has [0]"),
            (None, PoolPages::Huge) => Ok(self.pool()),
            (None, PoolPages::Gib) => {
                Ok(PoolStat { gib: request.bytes.map(|bytes| Box::new(of(bytes))), ..self.pool() })
            }
        }
    }

    fn lend_pool(&self, request: &LendRequest) -> anyhow::Result<PoolStat> {
        let mut pool = self.pool();
        pool.nodes[0].lent_bytes = request.bytes;
        Ok(pool)
    }
}

fn canned_decision() -> Decision {
    Decision {
        name: "web-1".into(),
        id: "0011".into(),
        action: Action::Limit,
        limit_bytes: Some(GIB),
        before_bytes: Some(2 * GIB),
        reasons: vec![Reason::Scarce { most_bytes: 4 * GIB, budget_bytes: 3 * GIB }],
    }
}

struct Daemon {
    _directory: tempfile::TempDir,
    socket: PathBuf,
}

fn daemon() -> Daemon {
    daemon_for(PeerPolicy::new(None))
}

fn daemon_for(policy: PeerPolicy) -> Daemon {
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("api.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("bind");
    listener.set_nonblocking(true).expect("non-blocking");
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        runtime.block_on(async {
            let listener = tokio::net::UnixListener::from_std(listener).expect("listener");
            serve(listener, Arc::new(Canned(Mutex::new(canned_vms()))), policy, Gate::default()).await;
        });
    });
    Daemon { _directory: directory, socket }
}

/// Returns exit code, standard output and standard error.
fn ballast(socket: &Path, args: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_ballast"))
        .env("BALLAST_API", socket)
        .args(args)
        .output()
        .expect("start ballast");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (status.code().expect("exit code"), text(stdout), text(stderr))
}

fn fine(socket: &Path, args: &[&str]) -> String {
    let (code, out, err) = ballast(socket, args);
    assert_eq!((code, err.as_str()), (0, ""), "{args:?}");
    out
}

#[test]
fn vms_that_run_are_adopted_by_pid_by_name_or_all() {
    let daemon = daemon();
    for args in [&["adopt", "--all"][..], &["adopt", "web-1"], &["adopt", "web-1", "--name", "w"]] {
        assert_eq!(fine(&daemon.socket, args), "adopted web-1 (pid 4242, qemu-system-x86_64)\n", "{args:?}");
    }
    let (code, _, err) = ballast(&daemon.socket, &["adopt", "7"]);
    assert!(code == 1 && err.contains("process 7: it runs sleep"), "{code}: {err}");
    let (code, _, err) = ballast(&daemon.socket, &["release", "web-11"]);
    assert!(code == 3 && err.contains("did you mean web-1"), "{code}: {err}");
    for wrong in [&["adopt"][..], &["adopt", "--all", "web-1"], &["adopt", "--all", "--name", "w"], &["release"]] {
        assert_eq!(ballast(&daemon.socket, wrong).0, 2, "{wrong:?}");
    }
}

#[test]
fn vm_stat_shows_on_one_screen_that_the_parts_make_the_size() {
    let screen = fine(&daemon().socket, &["vm", "stat", "web-1"]);
    let expected = [
        "web-1: burstable, running, limit 1 GiB",
        "qemu-system-x86_64, pid 4242, id 0011",
        "size = resident + far + zero + untouched: 2,097,152 = 921,600 + 819,200 + 102,400 + 253,952 KiB",
        "far pages occupy 200 MiB of store (4.0 to 1); 50.0 % of the size is under userfaultfd",
        "FAULTS 1,236,080: minor 1,500  restore 1,234,567  zero 10  fresh 3  \
         (from disk: 7; put back and served later: 1)",
        "  throttled: 42 waited 1.3 s for reclaim",
        "ENGINE TIME: 12.3 s on faults, 0.6 s of CPU on reclaim and the like",
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=0",
    ];
    for line in expected {
        assert!(screen.lines().any(|found| found == line), "no line {line:?} in\n{screen}");
    }
    let words = |start: &str| -> Vec<&str> {
        let line =
            screen.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start} in\n{screen}"));
        line.split_ascii_whitespace().collect()
    };
    assert_eq!(words("  in quarantine"), ["in", "quarantine", "8,196", "2,049", "0.4", "%", "part", "of", "resident"]);
    assert_eq!(words("restore"), ["restore", "1,234,567", "4.2", "9.0", "38.1", "412"]);
    assert!(screen.lines().count() < 40 && !screen.contains("ADD UP"), "{screen}");
}

#[test]
fn json_everywhere_is_the_api_in_bytes() {
    let daemon = daemon();
    let json = |args: &[&str]| -> serde_json::Value {
        let out = fine(&daemon.socket, &[args, &["--json"]].concat());
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{args:?}: {error} in {out}"))
    };
    let client = Client::new(&daemon.socket).expect("client");
    assert_eq!(json(&["vm", "list"]), serde_json::to_value(client.vms().expect("vms")).expect("JSON"));
    assert_eq!(json(&["vm", "stat", "db"]), serde_json::to_value(client.vm("db").expect("vm")).expect("JSON"));
    assert_eq!(json(&["host"]), serde_json::to_value(client.host().expect("host")).expect("JSON"));
    assert_eq!(json(&["events"])[0]["kind"], "attached");
    assert_eq!(json(&["top", "--once"])["vms"][0]["size_bytes"], 2 * GIB);
    assert_eq!(json(&["vm", "limit", "db", "512M"])["limit_bytes"], 512 * MIB);
    assert_eq!(json(&["vm", "limit", "db", "none"])["limit_bytes"], serde_json::Value::Null);
    assert!(json(&["doctor"])["features"].as_array().is_some_and(|features| !features.is_empty()));
}

#[test]
fn people_read_tables() {
    let daemon = daemon();
    let list = fine(&daemon.socket, &["vm", "list"]);
    assert!(list.starts_with("NAME") && list.contains("web-1") && list.contains("900 MiB"), "{list}");
    assert!(fine(&daemon.socket, &["host"]).contains("up 1h 1m"));
    assert!(fine(&daemon.socket, &["events"]).contains("2026-12-31 23:59:59.999 UTC  web-1  attached"));
    let frame = fine(&daemon.socket, &["top", "--once", "--sort", "name"]);
    let rows = frame.lines().skip_while(|line| !line.starts_with("NAME")).skip(1);
    let rows: Vec<&str> = rows.filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(rows, ["db", "web-1"], "{frame}");
    assert!(fine(&daemon.socket, &["vm", "limit", "db", "1G"]).contains("limit 1 GiB"));
    assert!(fine(&daemon.socket, &["vm", "limit", "db", "64MiB"]).contains("goes far"));
    let restored = fine(&daemon.socket, &["vm", "restore", "web-1"]);
    assert!(restored.contains("stays there until `ballast vm restore web-1 --end`"), "{restored}");
    assert!(fine(&daemon.socket, &["vm", "restore", "web-1", "--end"]).contains("its limit counts again"));
    assert_eq!(ballast(&daemon.socket, &["vm", "restore", "nobody"]).0, 3);
    for shell in ["bash", "zsh", "fish"] {
        assert!(fine(&daemon.socket, &["completions", shell]).contains("ballast"), "{shell}");
    }
}

#[test]
fn a_shell_completes_the_names_of_vms_and_without_a_daemon_none() {
    let daemon = daemon();
    let ask = |socket: &Path, words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
        command.env("BALLAST_API", socket).env("BALLAST_COMPLETE", "fish").args(["--", "ballast"]).args(words);
        let Output { status, stdout, stderr } = command.output().expect("start ballast");
        assert!(status.success() && stderr.is_empty(), "{status}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).expect("UTF-8")
    };
    assert_eq!(ask(&daemon.socket, &["vm", "stat", "w"]), "web-1\n");
    assert_eq!(ask(&daemon.socket, &["vm", "limit", "db", "web"]), "web-1\n");
    assert!(!ask(&daemon.socket, &["policy", "set", ""]).contains("web-1"));
    assert_eq!(ask(Path::new("/nonexistent"), &["vm", "stat", "w"]), "");
}

#[test]
fn several_vms_or_all_are_limited_at_once_and_a_failure_for_one_does_not_affect_the_others() {
    let daemon = daemon();
    let limits = || -> Vec<Option<u64>> {
        let list = fine(&daemon.socket, &["vm", "list", "--json"]);
        let vms: Vec<VmStat> = serde_json::from_str(&list).expect("a list");
        vms.iter().map(|vm| vm.limit_bytes).collect()
    };
    let said = fine(&daemon.socket, &["vm", "limit", "web-1", "db", "1G"]);
    assert_eq!((said.lines().count(), limits()), (2, vec![Some(1024 * MIB); 2]), "{said}");
    let said = fine(&daemon.socket, &["vm", "limit", "--all", "none"]);
    assert_eq!((said.matches("no limit").count(), limits()), (2, vec![None; 2]), "{said}");
    let (code, out, err) = ballast(&daemon.socket, &["vm", "limit", "nobody", "db", "512M"]);
    assert_eq!((code, limits()), (1, vec![None, Some(512 * MIB)]), "{out}");
    assert!(err.contains("1 of 2 limits could not be set: VM nobody: No VM is named"), "{err}");
    let json = fine(&daemon.socket, &["vm", "limit", "--all", "256M", "--json"]);
    let changes: Vec<ballast_api::VmChange> = serde_json::from_str(&json).expect("changes");
    assert!(changes.iter().all(|change| change.vm.is_some() && change.problem.is_none()), "{json}");
    for wrong in [&["vm", "limit", "512M"][..], &["vm", "limit", "--all", "db", "512M"], &["vm", "limit", "--all"]] {
        assert_eq!(ballast(&daemon.socket, wrong).0, 2, "{wrong:?}");
    }
}

#[test]
fn settings_of_a_vm_are_printed_and_unnamed_ones_stay() {
    let daemon = daemon();
    let set = |args: &[&str]| fine(&daemon.socket, &[&["vm", "set", "db"], args].concat());
    let said = set(&["--class", "guaranteed", "--shares", "high"]);
    assert_eq!(said, "VM db: class guaranteed, shares 2000, reservation 2 GiB\n");
    let said = set(&["--reservation", "512M", "--protect", "1G", "--headroom", "20"]);
    assert!(said.contains("guaranteed, shares 2000, reservation 512 MiB, protected 1 GiB, headroom 20 %"), "{said}");
    let said = set(&["--class", "none", "--shares", "none", "--protect", "none", "--headroom", "none"]);
    assert_eq!(said, "VM db: class burstable, shares 1000, reservation 512 MiB\n");
    assert_eq!(ballast(&daemon.socket, &["vm", "set", "db"]).0, 2, "nothing to set");
    assert_eq!(ballast(&daemon.socket, &["vm", "set", "db", "--shares", "much"]).0, 2);
}

#[test]
fn policy_plan_and_explain_speak_in_sentences_and_in_the_apis_json() {
    let daemon = daemon();
    let said = fine(&daemon.socket, &["policy", "show"]);
    assert!(said.contains("policy     maestro, every 20 ms") && said.contains("host       soft"), "{said}");
    let said = fine(&daemon.socket, &["policy", "set", "pressure", "--budget", "8G", "--json"]);
    assert!(said.contains("\"policy\": \"pressure\"") && said.contains("\"budget_bytes\": 8589934592"), "{said}");
    let said = fine(&daemon.socket, &["plan", "--policy", "gain"]);
    assert!(said.contains("gain would divide 3 GiB") && said.contains("Nothing was done"), "{said}");
    let is_it = |line: &str| line.split_whitespace().take(5).eq(["web-1", "2", "GiB", "1", "GiB"]);
    assert!(said.lines().any(is_it), "{said}");
    let said = fine(&daemon.socket, &["explain", "web-1"]);
    assert!(said.contains("web-1 may use 1 GiB (before: 2 GiB), by maestro"), "{said}");
    assert!(said.contains("- all VMs may have 4 GiB and there are 3 GiB"), "{said}");
    let json = fine(&daemon.socket, &["explain", "web-1", "--json"]);
    let records: Vec<DecisionRecord> = serde_json::from_str(&json).expect("the API's records");
    assert_eq!(records[0].decision, canned_decision());
    for (args, code, text) in [
        (["explain", "wbe-1"].as_slice(), 3, "did you mean web-1?"),
        (
            &["policy", "set", "maestro", "--tick-ms", "1"],
            1,
            "Setting the policy maestro: a tick of 1 ms is out of range",
        ),
        (&["policy", "set", "best"], 2, "there are none, maestro, pressure and gain"),
    ] {
        let (found, _, err) = ballast(&daemon.socket, args);
        assert!(found == code && err.contains(text), "{args:?}: {found} {err}");
    }
}

#[test]
fn no_terminal_obeys_what_others_have_written() {
    let daemon = daemon();
    let events = fine(&daemon.socket, &["events"]);
    assert!(events.contains(r"attached\u{1b}[2J\u{9b}2J with") && events.lines().count() == 2, "{events:?}");
    let missing = daemon.socket.with_file_name("\u{1b}[2J.sock");
    let (_, _, err) = ballast(&missing, &["host"]);
    assert!(err.contains(r"\u{1b}[2J.sock"), "{err:?}");
    for text in [events, err] {
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
    }
    let json = fine(&daemon.socket, &["events", "--json"]);
    let parsed: Vec<Event> = serde_json::from_str(&json).expect("JSON as it is");
    assert!(parsed[0].message.contains('\u{1b}'));
}

#[test]
fn an_error_is_one_line_with_advice_and_its_own_exit_code() {
    let daemon = daemon();
    let missing = daemon.socket.with_file_name("missing.sock");
    let cases: &[(&Path, &[&str], i32, &str)] = &[
        (&daemon.socket, &["vm", "stat", "wbe-1"], 3, "No VM is named \"wbe-1\"; did you mean web-1?"),
        (&daemon.socket, &["vm", "limit", "bd", "1G"], 3, "did you mean db?"),
        (
            &daemon.socket,
            &["vm", "limit", "web-1", "1M"],
            1,
            "Setting the limit of VM web-1: a limit must be at least 2 MiB",
        ),
        (&daemon.socket, &["vm", "limit", "web-1", "512"], 2, "write a number with a unit, such as 512M"),
        (&daemon.socket, &["vm", "frobnicate"], 2, "frobnicate"),
        (&daemon.socket, &["top"], 2, "--once"),
        (&missing, &["vm", "list"], 4, "is ballastd running?"),
        (&missing, &["host", "--json"], 4, "missing.sock"),
    ];
    for (socket, args, code, text) in cases {
        let (found, out, err) = ballast(socket, args);
        assert_eq!((found, out.as_str()), (*code, ""), "{args:?}: {err}");
        assert!(err.contains(text), "{args:?} said {err:?}");
        assert!(*code == 2 || err.lines().count() == 1, "{args:?} said {err:?}");
    }
}

#[test]
fn the_pool_is_shown_with_its_map_and_notes_are_on_standard_error() {
    let daemon = daemon();
    let (code, out, err) = ballast(&daemon.socket, &["pool", "show"]);
    assert_eq!((code, err.as_str()), (0, "ballast: every node gives 6 GiB\n"), "{out}");
    for line in ["node 0, 1 GiB a letter", "  UUUu-z\n", "VM web-1: 4 GiB in 1 piece\n", "own state: 4 KiB"] {
        assert!(out.contains(line), "{line} is not in {out}");
    }
    let json = |args: &[&str]| ballast(&daemon.socket, args).1;
    assert!(json(&["pool", "lend", "2G", "--json"]).contains("\"lent_bytes\": 2147483648"));
    assert!(json(&["pool", "take-back", "--json"]).contains("\"lent_bytes\": 0"));
    assert!(json(&["pool", "reserve", "80%", "--file-size", "64M"]).contains("RESERVED"));
    let (code, out, err) = ballast(&daemon.socket, &["pool", "reserve", "8G", "--pages", "1G"]);
    assert_eq!((code, err.as_str()), (0, "ballast: whole\n"), "of those pages alone");
    let (huge, gib) = out.split_once("pages of 1 GiB:\n").expect("both are shown");
    assert!(huge.starts_with("pages of 2 MiB:\n") && huge.contains("web-1") && gib.contains("8 GiB"), "{out}");
    assert_eq!(ballast(&daemon.socket, &["pool", "lend", "1G", "--pages", "4K"]).0, 2);
    let (code, out, err) = ballast(&daemon.socket, &["pool", "reserve", "4G", "--node", "3"]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.contains("there is no node 3; the host has [0]"), "{err}");
    assert_eq!(ballast(&daemon.socket, &["pool", "reserve", "101%"]).0, 2);
}

#[test]
fn doctor_and_completions_need_no_daemon() {
    let nowhere = Path::new("/nonexistent/api.sock");
    let (code, out, err) = ballast(nowhere, &["doctor"]);
    let fit = out.contains("required features are there");
    assert_eq!((code, err.as_str()), (i32::from(!fit), ""), "{out}");
    assert!(out.contains("userfaultfd") && out.contains("Linux 5.14"), "{out}");
    assert!(fine(nowhere, &["completions", "bash"]).contains("complete"));
}

#[test]
fn bench_and_demo_become_ballast_bench_where_it_is_installed() {
    // The tested program has a ballast-bench beside it, so a link to the program from elsewhere is run.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("directory");
    let (program, on_path) = (directory.path().join("ballast"), directory.path().join("path"));
    std::fs::hard_link(env!("CARGO_BIN_EXE_ballast"), &program).expect("link");
    std::fs::create_dir(&on_path).expect("directory");
    let run = |args: &[&str]| {
        let output = Command::new(&program).env("PATH", &on_path).args(args).output().expect("start ballast");
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, _, err) = run(&["bench", "restore"]);
    assert!(code == Some(5) && err.contains("needs the program ballast-bench"), "{code:?} {err}");
    assert!(err.contains(&*program.with_file_name("ballast-bench").to_string_lossy()) && err.contains("PATH"), "{err}");

    let install = |place: &Path, name: &str| {
        install_script(&place.join("ballast-bench"), &format!("echo {name} \"$@\"\nexit 7"));
    };
    install(&on_path, "listed");
    for (args, words) in [
        (["--json", "bench", "restore", "--quick"].as_slice(), "bench --json restore --quick"),
        (&["bench", "restore", "--quick", "--json"], "bench restore --quick --json"),
        (&["bench", "--dir", "a b", "spill"], "bench --dir a b spill"),
        (&["bench", "--help"], "bench --help"),
        (&["demo", "-h"], "demo -h"),
        (&["demo"], "demo"),
    ] {
        assert_eq!(run(args), (Some(7), format!("listed {words}\n"), String::new()));
    }
    install(directory.path(), "beside");
    assert_eq!(run(&["demo", "--seconds", "3"]).1, "beside demo --seconds 3\n");
}

#[test]
fn a_daemon_that_is_replaced_in_between_is_asked_again() {
    // The old engine takes the connection and dies; the client must connect again and reach the new one.
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("api.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("bind");
    let engines = std::thread::spawn(move || {
        let (mut old, _) = listener.accept().expect("first try");
        let _ = old.read(&mut [0; 16]);
        drop(old);
        listener.set_nonblocking(true).expect("non-blocking");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        runtime.block_on(async {
            let listener = tokio::net::UnixListener::from_std(listener).expect("listener");
            serve(listener, Arc::new(Canned(Mutex::new(canned_vms()))), PeerPolicy::new(None), Gate::default()).await;
        });
    });
    assert!(fine(&socket, &["vm", "list"]).contains("web-1"));
    assert!(!engines.is_finished());
}

#[test]
fn a_reader_that_goes_away_is_not_an_error() {
    let daemon = daemon();
    // `top --json` would never end if it did not notice that its reader has ended.
    for args in [["completions", "bash"].as_slice(), &["top", "--json", "--interval-s", "0.1"]] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_ballast"))
            .env("BALLAST_API", &daemon.socket)
            .args(args)
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .expect("start ballast");
        drop(child.stdout.take());
        let mut err = String::new();
        child.stderr.take().expect("stderr").read_to_string(&mut err).expect("read");
        assert_eq!((child.wait().expect("wait").code(), err.as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn another_user_looks_only_as_a_member_of_the_group_and_changes_nothing() {
    const NOBODY: u32 = 65_534;
    const READERS: u32 = 54_321;
    let daemon = daemon_for(PeerPolicy::new(Some(READERS)));
    for (path, mode) in [(daemon.socket.parent().expect("directory"), 0o755), (&daemon.socket, 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("permissions");
    }
    // The program is copied to a place from which any user may run it.
    let program = daemon.socket.with_file_name("ballast");
    program::install(Path::new(env!("CARGO_BIN_EXE_ballast")), &program);
    let cases: [(u32, &[&str], i32, &str); 4] = [
        (NOBODY, &["vm", "list"], 1, "may not use the API"),
        (NOBODY, &["vm", "limit", "db", "1G"], 1, "may not use the API"),
        (READERS, &["vm", "list"], 0, ""),
        (READERS, &["vm", "limit", "db", "1G"], 1, "may look but not change"),
    ];
    for (group, args, code, text) in cases {
        let mut command = Command::new(&program);
        match command.uid(NOBODY).gid(group).env("BALLAST_API", &daemon.socket).args(args).output() {
            Ok(output) => {
                let err = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.code(), Some(code), "{args:?} as group {group}: {err}");
                assert!(err.contains(text), "{args:?} as group {group} said {err:?}");
            }
            Err(error) => return skip("root", error),
        }
    }
}

#[test]
fn vm_heat_shows_working_set_ages_and_strip() {
    let daemon = daemon();
    let screen = fine(&daemon.socket, &["vm", "heat", "web-1"]);
    let expected = [
        "web-1: tracked every 2.0 s; 3 cycles, 0 fine cycles; takes 0.00 % of a CPU and 0.00 % of \
         the guest's time",
        "working set 2 MiB of 8 MiB in DRAM: touched within 30.0 s (2 MiB by huge pages; fine scans of 0 % of those)",
        "older    6 MiB  75.0 %  100.0 %  #######################",
        "|████████████████................................................|",
    ];
    for line in expected {
        assert!(screen.lines().any(|found| found == line), "no line {line:?} in\n{screen}");
    }
    let heat: VmHeat = serde_json::from_str(&fine(&daemon.socket, &["--json", "vm", "heat", "web-1"])).expect("JSON");
    assert_eq!((heat.cycles, heat.wss_bytes, heat.strip.len()), (3, 2 * MIB, 64));
    assert_eq!(heat.ages.iter().map(|bucket| bucket.bytes).sum::<u64>(), heat.present_bytes);
    assert!(fine(&daemon.socket, &["vm", "heat", "db"]).starts_with("db: 3 cycles; not tracked now (track off)\n"));
    fine(&daemon.socket, &["vm", "heat", "db", "--track", "on"]);
    assert_eq!(ballast(&daemon.socket, &["vm", "heat", "db", "--track", "maybe"]).0, 2);
    assert_eq!(ballast(&daemon.socket, &["vm", "heat", "web"]).0, 3);
}

#[test]
fn libvirts_domains_are_shown_with_what_each_lacks() {
    const UUID: &str = "8fd83c3e-6ee5-4d23-9ca4-3f9b7e5f0b11";
    let dir = tempfile::tempdir().expect("a directory");
    let qemu = "LC_ALL=C /usr/bin/qemu-system-x86_64 -m 1G";
    let script = format!(
        "case \"$2 $3\" in 'list --uuid') echo {UUID};; 'list --all') echo '{UUID} web 1';; \
         'dumpxml --inactive') echo \"<$4>\";; domxml*) [ \"$(cat $5)\" = '<{UUID}>' ] && echo {qemu};; esac"
    );
    program::install_script(&dir.path().join("virsh"), &script);
    let status = |path: &str, socket: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
        command.env("PATH", path).env("BALLAST_API", socket).args(["libvirt", "status"]);
        let Output { status, stdout, stderr } = command.output().expect("start ballast");
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        (status.code().expect("exit code"), text(stdout), text(stderr))
    };
    let path = format!("{}:/usr/bin:/bin", dir.path().display());
    let (code, out, err) = status(&path, &dir.path().join("no-daemon"));
    let lines: Vec<&str> = out.lines().collect();
    let edit = "virt-xml 'web 1' --edit --boot emulator=/usr/lib/ballast/qemu-system-x86_64";
    assert_eq!((code, lines.len(), lines[1]), (0, 2, format!("web 1   unknown  {edit}").as_str()), "{out}{err}");
    assert!(err.contains("is not known"), "{err}");
    let (code, _, err) = status("/nonexistent", &dir.path().join("no-daemon"));
    assert!(code == 5 && err.contains("libvirt-clients"), "{code}: {err}");
}
