//! The server on a real socket, with a canned backend: its responses, and the misuse that it survives.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream as Stream;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use ballast_api::{
    AdoptRequest, AdoptResult, AgentStat, Client, ClientError, DecisionRecord, Event, History, HostStat, HostTierStat,
    KeptVm, LendRequest, LimitsPatch, PlanRequest, PolicyPatch, PolicyStat, PoolRequest, PoolStat, Problem,
    TieringStat, UpgradeStat, VmHeat, VmPatch, VmStat, VmStatus,
};
use ballast_base::MIB;
use ballast_policy::{Plan, Snapshot};
use ballast_testkit::random::Random;
use tokio::sync::watch;

use super::*;
use crate::events::Events;
use metrics::metric::{Kind, Metric};
use metrics::table::{EVENTS, FAULT_DURATION, HEAT, HOST, POOL, RESTORE_STAGE, VM};

mod document;
mod walk;

struct Canned {
    vms: Mutex<Vec<VmStat>>,
    events: Arc<Events>,
    refuses: bool,
}

impl Canned {
    fn new(refuses: bool) -> Self {
        let vm = |name: &str, status| VmStat {
            name: name.into(),
            id: "00112233445566778899aabbccddeeff".into(),
            vmm: "qemu \"x\\y\"\n".into(),
            status,
            size_bytes: 10 * MIB,
            resident_bytes: 6 * MIB,
            far_bytes: 2 * MIB,
            zero_bytes: MIB,
            untouched_bytes: MIB,
            ..VmStat::default()
        };
        let events = Arc::new(Events::default());
        events.add(None, "started", "The engine serves".into());
        Self { vms: Mutex::new(vec![vm("web", VmStatus::Running), vm("old", VmStatus::Halted)]), events, refuses }
    }

    fn word<T: Default>(&self) -> anyhow::Result<T> {
        if self.refuses { anyhow::bail!("refused") } else { Ok(T::default()) }
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut VmStat)) -> Result<VmStat, ChangeError> {
        let mut vms = self.vms.lock().expect("lock");
        let vm = vms.iter_mut().find(|vm| vm.name == name).ok_or(ChangeError::NotFound)?;
        self.word::<()>()?;
        change(vm);
        Ok(vm.clone())
    }
}

impl Backend for Canned {
    fn vms(&self) -> Vec<VmStat> {
        self.vms.lock().expect("lock").clone()
    }
    fn vm(&self, name: &str) -> Option<VmStat> {
        assert_ne!(name, "panic", "the backend was asked to panic");
        self.vms().into_iter().find(|vm| vm.name == name)
    }
    fn heat(&self, name: &str, cells: usize) -> Option<VmHeat> {
        let strip = vec![ballast_api::HeatCell::default(); cells];
        let ages = vec![ballast_api::AgeBucket { up_to_s: None, bytes: 7 }];
        self.vm(name).map(|vm| VmHeat { name: vm.name, is_tracked: true, cycles: 3, ages, strip, ..VmHeat::default() })
    }
    fn set_track(&self, name: &str, track: bool) -> Option<VmHeat> {
        self.heat(name, 0).map(|heat| VmHeat { track, ..heat })
    }
    fn patch_vm(&self, name: &str, patch: &VmPatch) -> Result<VmStat, ChangeError> {
        if patch.limit_bytes == Some(Some(0)) {
            return Err(ChangeError::Invalid("the limit must be at least 2 MiB".into()));
        }
        self.change(name, |vm| {
            vm.limit_bytes = patch.limit_bytes.unwrap_or(vm.limit_bytes);
            vm.settings = patch.settings_after(vm.settings);
        })
    }
    fn keep(&self, name: &str, kept: bool) -> Result<VmStat, ChangeError> {
        self.change(name, |vm| vm.status = if kept { VmStatus::Blocked } else { VmStatus::Running })
    }
    fn kept(&self) -> anyhow::Result<Vec<KeptVm>> {
        self.word()
    }
    fn forget(&self, vm: &str) -> anyhow::Result<Vec<KeptVm>> {
        self.word::<()>().map(|()| self.vm(vm).map(|_| KeptVm::default()).into_iter().collect())
    }
    fn host(&self) -> HostStat {
        HostStat { version: "9.9.9".into(), vms: 1, mem_total_bytes: 64 * MIB, ..HostStat::default() }
    }
    fn events(&self, after: u64, decisions: bool) -> Vec<Event> {
        self.events.after(after, decisions)
    }
    fn event_watch(&self) -> watch::Receiver<u64> {
        self.events.watch()
    }
    fn event_counts(&self) -> BTreeMap<String, u64> {
        self.events.counts()
    }
    fn host_history(&self, _minutes: u64) -> History {
        History::default()
    }
    fn vm_history(&self, name: &str, minutes: u64) -> Option<History> {
        self.vm(name).map(|_| History { step_s: minutes as u32, ..History::default() })
    }
    fn fault_histogram(&self, name: &str) -> Option<Histogram> {
        (name == "web").then(|| Histogram { buckets: vec![(1e-5, 3), (1e-4, 5)], count: 6, sum_s: 0.25 })
    }
    fn stage_histograms(&self) -> Vec<(&'static str, Histogram)> {
        vec![("read", Histogram { buckets: vec![(1e-6, 1)], count: 2, sum_s: 0.5 })]
    }
    fn snapshot(&self) -> Snapshot {
        Snapshot::default()
    }
    fn plan(&self, _policy: Option<ballast_policy::Kind>) -> anyhow::Result<Plan> {
        self.word()
    }
    fn put_plan(&self, _request: PlanRequest) -> anyhow::Result<Plan> {
        self.word()
    }
    fn policy(&self) -> PolicyStat {
        PolicyStat::default()
    }
    fn patch_policy(&self, _patch: &PolicyPatch) -> anyhow::Result<PolicyStat> {
        self.word()
    }
    fn decisions(&self, name: &str) -> Option<Vec<DecisionRecord>> {
        self.vm(name).map(|_| Vec::new())
    }
    fn adopt(&self, _request: &AdoptRequest) -> anyhow::Result<AdoptResult> {
        self.word()
    }
    fn release(&self, name: &str, _bring_back: bool) -> Result<VmStat, ChangeError> {
        self.change(name, |_| ())
    }
    fn upgrade(&self) -> UpgradeStat {
        UpgradeStat::default()
    }
    fn begin_upgrade(&self, _program: Option<String>) -> anyhow::Result<UpgradeStat> {
        self.word()
    }
    fn pool(&self) -> PoolStat {
        PoolStat::default()
    }
    fn reserve_pool(&self, _request: &PoolRequest) -> anyhow::Result<PoolStat> {
        self.word()
    }
    fn lend_pool(&self, _request: &LendRequest) -> anyhow::Result<PoolStat> {
        self.word()
    }
}

struct Server {
    _directory: tempfile::TempDir,
    socket: PathBuf,
    events: Arc<Events>,
}

fn start(backend: Canned, bounds: Bounds) -> Server {
    let events = backend.events.clone();
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("api.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("bind");
    listener.set_nonblocking(true).expect("non-blocking");
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        runtime.block_on(async {
            let listener = UnixListener::from_std(listener).expect("listener");
            serve_within(listener, Arc::new(backend), PeerPolicy::new(None), Gate::default(), bounds).await;
        });
    });
    Server { _directory: directory, socket, events }
}

fn usual() -> Server {
    start(Canned::new(false), BOUNDS)
}

/// Sends bytes, shuts that direction down, and reads until the server ends the connection.
fn raw(socket: &Path, bytes: &[u8]) -> Vec<u8> {
    let mut stream = Stream::connect(socket).expect("connect");
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

fn status_and_problem(answer: &[u8]) -> (u16, Option<Problem>) {
    let text = String::from_utf8_lossy(answer);
    let status = text.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    (status, text.split_once("\r\n\r\n").and_then(|(_, body)| serde_json::from_str(body).ok()))
}

fn patch(path: &str, body: &str) -> Vec<u8> {
    format!("PATCH {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into()
}

fn put(path: &str, body: &str) -> Vec<u8> {
    format!("PUT {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into()
}

fn refused(error: ClientError) -> Problem {
    match error {
        ClientError::Refused(problem) => problem,
        other => panic!("not a refusal: {other}"),
    }
}

#[test]
fn the_client_reads_what_the_backend_returned() {
    let server = usual();
    let client = Client::new(&server.socket).expect("client");
    let canned = Canned::new(false);
    assert_eq!(client.vms().expect("vms"), canned.vms());
    assert_eq!(client.vm("web").expect("vm"), canned.vms()[0]);
    assert_eq!(client.host().expect("host"), canned.host());
    assert_eq!(client.events().expect("events"), server.events.list());
    assert_eq!(client.heat("web", 7).expect("heat"), canned.heat("web", 7).expect("web"));
    assert_eq!(client.set_track("web", true).expect("track"), canned.set_track("web", true).expect("web"));
    assert_eq!(client.set_limit("web", Some(MIB)).expect("limit").limit_bytes, Some(MIB));
    assert_eq!(client.vm("web").expect("vm").limit_bytes, Some(MIB));
    assert_eq!(client.set_limit("web", None).expect("limit").limit_bytes, None);
    let document = raw(&server.socket, b"GET /v1/openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    let document = String::from_utf8(document).expect("UTF-8");
    assert!(document.ends_with(&routes::document_json()), "the document served is not the generated one");
}

#[test]
fn a_refusal_is_a_problem_that_says_what_was_wrong() {
    let server = usual();
    let client = Client::new(&server.socket).expect("client");
    assert!(client.vm("nobody").expect_err("no such VM").is_no_such_vm());
    assert!(client.set_limit("nobody", None).expect_err("no such VM").is_no_such_vm());
    let problem = refused(client.set_limit("web", Some(0)).expect_err("refused"));
    assert_eq!((problem.status, problem.detail.as_str()), (422, "the limit must be at least 2 MiB"));

    let long = format!("{{\"limit_bytes\":{}1}}", " ".repeat(ballast_api::MAX_BODY_BYTES));
    let long_path = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "a".repeat(MAX_HEAD_BYTES));
    let cases: &[(u16, Vec<u8>, &str)] = &[
        (400, patch("/v1/vms/web", r#"{"limit":1}"#), "unknown field"),
        (400, patch("/v1/vms/web", r#"{"limit_bytes":-1}"#), "expected u64"),
        (400, patch("/v1/vms/web", r#"{"limit_bytes":"1G"}"#), "expected u64"),
        (400, patch("/v1/vms/web", "[4096]"), "object"),
        (400, patch("/v1/vms/web", "\u{0}\u{1}"), "not a change"),
        (400, patch("/v1/vms/%ff%fe", "{}"), "UTF-8"),
        (400, patch("/v1/vms/web", r#"{"class":"platinum"}"#), "platinum"),
        (400, patch("/v1/vms/web", r#"{"shares":-1}"#), "expected u32"),
        (400, patch("/v1/policy", r#"{"policy":"best"}"#), "unknown variant"),
        (400, patch("/v1/policy", "[1]"), "object"),
        (400, put("/v1/plan", r#"{"policy":"x","lease_ms":1}"#), "missing field"),
        (
            400,
            put("/v1/plan", r#"{"policy":"x","lease_ms":1,"limits":[{"name":"web","limit_bytes":-1}]}"#),
            "expected u64",
        ),
        (400, b"GET /v1/plan?policy=best HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), "is no policy"),
        (400, b"GET /v1/plan?when=now HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), "policy=NAME is"),
        (404, b"GET /v1/vms/nobody/decisions HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), "nobody"),
        (405, put("/v1/snapshot", "{}"), "PUT"),
        (413, patch("/v1/vms/web", &long), "65536 bytes"),
        (404, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), "openapi.json"),
        (404, b"GET /v1/vms/a/b HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), "Nothing is at"),
        (400, patch("/v1/vms/web/heat", r#"{"track":"maybe"}"#), "maybe"),
        (400, patch("/v1/vms/web/heat", r#"{"tracks":true}"#), "unknown field"),
        (404, b"GET /v1/vms/nobody/heat HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), "nobody"),
        (400, b"GET /v1/vms/web/heat?cells=0 HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), "1 to 4096"),
        (400, b"GET /v1/vms/web/heat?cells=x HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), "whole number"),
        (405, b"DELETE /v1/vms/web HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), "DELETE"),
        (400, b"garbage\r\n\r\n".to_vec(), ""),
        (431, long_path.into_bytes(), ""),
    ];
    for (status, request, detail) in cases {
        let start = String::from_utf8_lossy(&request[..request.len().min(60)]).into_owned();
        let (found, problem) = status_and_problem(&raw(&server.socket, request));
        assert_eq!(found, *status, "{start:?}");
        let text = problem.map(|problem| problem.detail).unwrap_or_default();
        assert!(text.contains(detail), "{start:?} answered {text:?}");
    }
}

#[test]
fn a_panic_in_the_backend_is_a_500_and_the_next_request_is_answered() {
    let server = usual();
    let client = Client::new(&server.socket).expect("client");
    assert_eq!(refused(client.vm("panic").expect_err("it panicked")).status, 500);
    assert!(client.vm("web").is_ok());
}

/// The status of an answer to a peer with these rights. Root always has all rights, so `peer` tests the policy.
fn status_for(access: Access, request: Vec<u8>) -> u16 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let (here, there) = tokio::net::UnixStream::pair().expect("pair");
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().expect("place");
        let backend = Arc::new(Canned::new(false));
        let readers = Arc::new(Semaphore::new(1));
        let state = Connection { backend, access, body_time: BOUNDS.body, readers };
        let service = TowerToHyperService::new(routes::of_connection(routes::router(), state));
        let inside = (place, Gate::default().enter());
        tokio::spawn(connection(there, service, BOUNDS, inside));
        let here = here.into_std().expect("std");
        here.set_nonblocking(false).expect("blocking");
        let asked = tokio::task::spawn_blocking(move || {
            let mut here = here;
            here.write_all(&request).expect("write");
            here.shutdown(std::net::Shutdown::Write).expect("shutdown");
            let mut answer = Vec::new();
            here.read_to_end(&mut answer).expect("read");
            status_and_problem(&answer).0
        });
        asked.await.expect("answer")
    })
}

#[test]
fn a_user_without_access_is_refused_everything_and_a_reader_every_change() {
    for (access, looking, changing) in [(Access::Denied, 403, 403), (Access::Read, 200, 403), (Access::Write, 200, 200)]
    {
        let ask = |request: Vec<u8>| status_for(access, request);
        assert_eq!(ask(b"GET /v1/vms HTTP/1.1\r\nhost: x\r\n\r\n".to_vec()), looking, "{access:?}");
        assert_eq!(ask(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n".to_vec()), looking, "{access:?}");
        assert_eq!(ask(patch("/v1/vms/web", "{}")), changing, "{access:?}");
        assert_eq!(ask(b"GET /v1/snapshot HTTP/1.1\r\nhost: x\r\n\r\n".to_vec()), looking, "{access:?}");
        let plan = put("/v1/plan", r#"{"policy":"x","lease_ms":1,"limits":[]}"#);
        assert_eq!(ask(plan), changing, "{access:?}");
    }
}

#[test]
fn slow_and_silent_peers_are_cut_and_free_their_places() {
    // Longer than this thread may be delayed between a connect and a write.
    let short = Duration::from_secs(1);
    let bounds = Bounds { head: short, body: short, connection: 3 * short, last_answer: short, places: [4, 4, 4] };
    let server = start(Canned::new(false), bounds);
    let beginnings: [&[u8]; 4] = [
        b"",
        b"GET /v1/vms HTTP/1.1\r\nho",
        b"PATCH /v1/vms/web HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
        // Sends a request, does not read the answer, and stays: cut between requests.
        b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n",
    ];
    let mut peers: Vec<Stream> = beginnings
        .iter()
        .map(|bytes| {
            let mut stream = Stream::connect(&server.socket).expect("connect");
            stream.write_all(bytes).expect("write");
            stream
        })
        .collect();
    // All places are taken, so one more connection is refused, unless a place was freed in between: both are correct.
    let (status, _) = status_and_problem(&raw(&server.socket, b"GET /v1/host HTTP/1.1\r\nhost: x\r\n\r\n"));
    assert!(matches!(status, 503 | 200), "{status}");
    for (peer, beginning) in peers.iter_mut().zip(beginnings) {
        let mut answer = Vec::new();
        let _ = peer.read_to_end(&mut answer);
        if beginning.starts_with(b"PATCH") {
            assert_eq!(status_and_problem(&answer).0, 408);
        }
    }
    let client = Client::new(&server.socket).expect("client");
    assert!(client.host().is_ok(), "the places were not freed");
}

#[test]
fn random_and_broken_requests_never_stop_the_server() {
    const REQUESTS: usize = 3000;
    let seeds: [Vec<u8>; 7] = [
        b"GET /v1/vms HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
        b"GET /v1/vms/web HTTP/1.1\r\nhost: x\r\nconnection: keep-alive\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n".to_vec(),
        patch("/v1/vms/web", r#"{"limit_bytes":1048576}"#),
        patch("/v1/vms/web", r#"{"limit_bytes":{"a":[[[[[[1,2,null,"\ud800"]]]]]]}}"#),
        b"PATCH /v1/vms/w HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{\"lim\r\nFFFFFFFFFFFFFFFFF\r\n".to_vec(),
        put("/v1/plan", r#"{"policy":"x","lease_ms":1000,"limits":[{"name":"web","limit_bytes":1048576}]}"#),
        b"POST /v1/events HTTP/1.0\r\ncontent-length: 99999999999999999999\r\nupgrade: h2c\r\n\r\n".to_vec(),
    ];
    let server = usual();
    let client = Client::new(&server.socket).expect("client");
    let mut rng = Random(0x00BA_11A5_7F0C_5EED);
    for round in 0..REQUESTS {
        let mut request = seeds[rng.index(seeds.len())].clone();
        match rng.index(4) {
            0 => request = (0..rng.index(600)).map(|_| rng.index(256) as u8).collect(),
            1 => request.truncate(rng.index(request.len())),
            2 => request.splice(5..5, std::iter::repeat_n(b'/', rng.index(40_000))).for_each(drop),
            _ => (0..=rng.index(8)).for_each(|_| {
                let at = rng.index(request.len());
                request[at] = rng.index(256) as u8;
            }),
        }
        let answer = raw(&server.socket, &request);
        let (status, _) = status_and_problem(&answer);
        assert!(answer.is_empty() || (200..500).contains(&status), "{request:?} answered {status}");
        if round % 100 == 0 {
            assert!(client.vm("web").is_ok(), "the server stopped answering after {request:?}");
        }
    }
    assert_eq!(client.vms().expect("vms").len(), 2);
}

#[test]
fn the_metrics_page_is_well_formed_and_sums_to_the_size() {
    let server = usual();
    let page = Client::new(&server.socket).expect("client").metrics().expect("metrics");
    let value = |sample: &str| -> f64 {
        let line =
            page.lines().find(|line| line.starts_with(sample)).unwrap_or_else(|| panic!("no {sample} in {page}"));
        line.rsplit(' ').next().expect("value").parse().expect("number")
    };
    let tiers = ["resident", "far", "zero", "untouched", "poisoned"];
    let sum: f64 =
        tiers.map(|tier| value(&format!("ballast_vm_memory_bytes{{domain=\"web\",tier=\"{tier}\"}}"))).iter().sum();
    assert_eq!(sum, value("ballast_vm_size_bytes{domain=\"web\"}"));
    assert_eq!(value("ballast_vm_fault_duration_seconds_bucket{domain=\"web\",le=\"0.00001\"}"), 3.0);
    assert_eq!(value("ballast_vm_fault_duration_seconds_bucket{domain=\"web\",le=\"+Inf\"}"), 6.0);
    assert_eq!(value("ballast_vm_fault_duration_seconds_sum"), 0.25);
    assert_eq!(value("ballast_restore_stage_seconds_bucket{stage=\"read\",le=\"0.000001\"}"), 1.0);
    assert_eq!(value("ballast_restore_stage_seconds_count{stage=\"read\"}"), 2.0);
    assert!(page.contains(r#"vmm="qemu \"x\\y\"\\u{a}""#), "labels are not escaped: {page}");
    assert_eq!(value("ballast_vm_status{domain=\"old\",status=\"halted\"}"), 1.0);
    assert_eq!(value("ballast_vm_status{domain=\"web\",status=\"halted\"}"), 0.0);
    assert!(!page.contains("ballast_vm_limit_bytes{"), "a limit is shown where there is none");
    for (name, _) in all_metrics() {
        assert!(page.contains(&format!("# HELP {name} ")) && page.contains(&format!("# TYPE {name} ")), "{name}");
    }
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').expect("name and value");
        assert!(name.starts_with("ballast_") && value.parse::<f64>().is_ok(), "{line}");
    }
}

fn all_metrics() -> Vec<(&'static str, Kind)> {
    fn of<S>(table: &[Metric<S>]) -> Vec<(&'static str, Kind)> {
        table.iter().map(|metric| (metric.name, metric.kind)).collect()
    }
    let others = [&FAULT_DURATION, &RESTORE_STAGE, &EVENTS].map(|metric| (metric.name, metric.kind));
    [of(HOST), of(VM), of(POOL), of(HEAT), others.into()].concat()
}

#[test]
fn every_metric_is_documented_and_its_name_tells_its_type() {
    let document = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md"));
    let mut entries = 0;
    for (name, kind) in all_metrics() {
        entries += 1;
        let entry = document.split("\n* ").find(|entry| entry.starts_with(&format!("`{name}`")));
        let entry = entry.unwrap_or_else(|| panic!("{name} is not in docs/metrics.md"));
        let is_histogram = kind == Kind::Histogram;
        assert_eq!(entry.contains("histogram"), is_histogram, "{name} is a {kind}, and the page says: {entry}");
        assert_eq!(name.ends_with("_total"), kind == Kind::Counter, "{name} is a {kind}");
    }
    let documented = document.lines().filter(|line| line.starts_with("* `ballast_")).count();
    assert_eq!(documented, entries, "docs/metrics.md lists a metric that does not exist");
}

#[test]
fn one_limit_for_several_vms_needs_its_limit_and_returns_the_result_for_each() {
    let server = usual();
    let refused = |body: &str| status_and_problem(&raw(&server.socket, &patch("/v1/vms", body))).0;
    for wrong in ["", "[]", "{}", r#"{"vms":["web"]}"#, r#"{"limit_bytes":"1G"}"#, r#"{"limit_bytes":1,"name":"web"}"#]
    {
        assert_eq!(refused(wrong), 400, "{wrong}");
    }
    let client = Client::new(&server.socket).expect("client");
    let known: Vec<String> = client.vms().expect("a list").into_iter().map(|vm| vm.name).collect();
    let names = |vms: Option<Vec<String>>| -> Vec<(String, bool)> {
        let changes = client.set_limits(&LimitsPatch { vms, limit_bytes: None }).expect("changes");
        changes.into_iter().map(|change| (change.name, change.vm.is_some() && change.problem.is_none())).collect()
    };
    assert_eq!(names(None), known.iter().map(|name| (name.clone(), true)).collect::<Vec<_>>());
    assert_eq!(names(Some(vec!["nobody".into()])), [("nobody".into(), false)]);
}

fn read_until(stream: &mut Stream, wanted: &str) -> String {
    let (mut text, mut piece) = (String::new(), [0; 4096]);
    while !text.contains(wanted) {
        let read = stream.read(&mut piece).expect("more");
        assert!(read > 0, "it ended without {wanted:?}: {text}");
        text.push_str(&String::from_utf8_lossy(&piece[..read]));
    }
    text
}

#[test]
fn a_stream_of_events_begins_after_the_last_one_read_and_continues() {
    let server = usual();
    let mut stream = Stream::connect(&server.socket).expect("connect");
    stream.write_all(b"GET /v1/events/stream HTTP/1.1\r\nHost: b\r\n\r\n").expect("sent");
    let first = read_until(&mut stream, "The engine serves");
    assert!(first.contains("content-type: text/event-stream"), "{first}");
    server.events.add(Some("web".into()), "attached", "web came".into());
    read_until(&mut stream, "web came");
    let client = Client::new(&server.socket).expect("client");
    let all = client.events().expect("events");
    assert_eq!(client.events_after(all[0].id).expect("events"), all[1..]);
    server.events.decided("web".into(), "it may use less".into());
    assert_eq!((client.events().expect("events").len(), client.decisions_after(0).expect("events").len()), (2, 3));
    let mut again = Stream::connect(&server.socket).expect("connect");
    let head = format!("GET /v1/events/stream HTTP/1.1\r\nHost: b\r\nLast-Event-ID: {}\r\n\r\n", all[0].id);
    again.write_all(head.as_bytes()).expect("sent");
    let rest = read_until(&mut again, "web came");
    assert!(!rest.contains("The engine serves"), "{rest}");
}

#[test]
fn history_has_bounds_and_an_unknown_vm_has_none() {
    let server = usual();
    let get = |path: &str| raw(&server.socket, format!("GET {path} HTTP/1.1\r\nHost: b\r\n\r\n").as_bytes());
    for (path, status) in [
        ("/v1/history", 200),
        ("/v1/history?minutes=0", 400),
        ("/v1/history?minutes=1441", 400),
        ("/v1/history/vms?minutes=60", 200),
        ("/v1/history/vms?minutes=61", 400),
        ("/v1/vms/web/history?minutes=7", 200),
        ("/v1/vms/nobody/history", 404),
        ("/v1/events?before=1", 400),
    ] {
        assert_eq!(status_and_problem(&get(path)).0, status, "{path}");
    }
    assert_eq!(Client::new(&server.socket).expect("client").vm_history("web", 7).expect("a history").step_s, 7);
}

#[test]
fn a_vm_with_all_metrics_has_at_most_90_series() {
    let agent = AgentStat {
        tiering: Some(TieringStat { fast_hits_bp: Some(1), ..TieringStat::default() }),
        ..AgentStat::default()
    };
    let vm = VmStat {
        limit_bytes: Some(1),
        target_bytes: Some(1),
        agent: Some(agent),
        host_tiers: Some(HostTierStat::default()),
        ..VmStat::default()
    };
    let of_vm: usize = VM.iter().map(|metric| (metric.samples)(&vm).len()).sum();
    let heat = VmHeat { ages: vec![ballast_api::AgeBucket { up_to_s: Some(1), bytes: 0 }; 6], ..VmHeat::default() };
    let of_heat: usize = HEAT.iter().map(|metric| (metric.samples)(&heat).len()).sum();
    use ballast_pager::vm::stats::Histogram;
    let faults = crate::backend::fault_bounds(&Histogram {
        counts: vec![0; ballast_pager::vm::stats::BUCKETS],
        sum_ns: 0,
        max_ns: 0,
    });
    let series = of_vm + of_heat + faults.buckets.len() + 3;
    println!("series_per_vm {series}: {of_vm} of figures, {of_heat} of heat, {} buckets", faults.buckets.len());
    assert!(series <= 90, "{series}");
}
