//! Each operation of the document gets valid and invalid requests, with backends that obey, refuse and fail: each
//! status must be in the document, and each status of the document must occur.

use std::collections::{BTreeMap, BTreeSet};

use ballast_api::{
    AdoptRequest, AdoptResult, DecisionRecord, KeptVm, LendRequest, PlanRequest, PolicyPatch, PolicyStat, PoolRequest,
    PoolStat, UpgradeStat,
};
use ballast_policy::{Kind, Plan};
use serde_json::Value;

use super::*;

/// How a backend answers all requests. No VM is named `nobody`.
#[derive(Clone, Copy, PartialEq)]
enum Backing {
    Works,
    Refuses,
    Fails,
}

impl Backing {
    fn value<T: Default>(self) -> T {
        assert!(self != Self::Fails, "the backend was asked to panic");
        T::default()
    }

    fn one<T: Default>(self, name: &str) -> Option<T> {
        (name != "nobody").then(|| self.value())
    }

    fn word<T: Default>(self) -> anyhow::Result<T> {
        if self == Self::Refuses { anyhow::bail!("refused") } else { Ok(self.value()) }
    }

    fn change<T: Default>(self, name: &str) -> Result<T, ChangeError> {
        self.one::<()>(name).ok_or(ChangeError::NotFound)?;
        Ok(self.word()?)
    }
}

impl Backend for Backing {
    fn vms(&self) -> Vec<VmStat> {
        self.value()
    }
    fn vm(&self, name: &str) -> Option<VmStat> {
        self.one(name)
    }
    fn heat(&self, name: &str, _cells: usize) -> Option<VmHeat> {
        self.one(name)
    }
    fn set_track(&self, name: &str, _track: bool) -> Option<VmHeat> {
        self.one(name)
    }
    fn patch_vm(&self, name: &str, _patch: &VmPatch) -> Result<VmStat, ChangeError> {
        self.change(name)
    }
    fn keep(&self, name: &str, _kept: bool) -> Result<VmStat, ChangeError> {
        self.change(name)
    }
    fn kept(&self) -> anyhow::Result<Vec<KeptVm>> {
        self.word()
    }
    fn forget(&self, vm: &str) -> anyhow::Result<Vec<KeptVm>> {
        self.word::<()>().map(|()| self.one(vm).into_iter().collect())
    }
    fn host(&self) -> HostStat {
        self.value()
    }
    fn events(&self, _after: u64, _decisions: bool) -> Vec<Event> {
        self.value()
    }
    fn event_watch(&self) -> watch::Receiver<u64> {
        watch::Sender::new(0).subscribe()
    }
    fn event_counts(&self) -> BTreeMap<String, u64> {
        self.value()
    }
    fn host_history(&self, _minutes: u64) -> History {
        self.value()
    }
    fn vm_history(&self, name: &str, _minutes: u64) -> Option<History> {
        self.one(name)
    }
    fn fault_histogram(&self, name: &str) -> Option<Histogram> {
        self.one(name)
    }
    fn stage_histograms(&self) -> Vec<(&'static str, Histogram)> {
        self.value()
    }
    fn snapshot(&self) -> ballast_policy::Snapshot {
        self.value()
    }
    fn plan(&self, _policy: Option<Kind>) -> anyhow::Result<Plan> {
        self.word()
    }
    fn put_plan(&self, _request: PlanRequest) -> anyhow::Result<Plan> {
        self.word()
    }
    fn policy(&self) -> PolicyStat {
        self.value()
    }
    fn patch_policy(&self, _patch: &PolicyPatch) -> anyhow::Result<PolicyStat> {
        self.word()
    }
    fn decisions(&self, name: &str) -> Option<Vec<DecisionRecord>> {
        self.one(name)
    }
    fn adopt(&self, _request: &AdoptRequest) -> anyhow::Result<AdoptResult> {
        self.word()
    }
    fn release(&self, name: &str, _bring_back: bool) -> Result<VmStat, ChangeError> {
        self.change(name)
    }
    fn upgrade(&self) -> UpgradeStat {
        self.value()
    }
    fn begin_upgrade(&self, _program: Option<String>) -> anyhow::Result<UpgradeStat> {
        self.word()
    }
    fn pool(&self) -> PoolStat {
        self.value()
    }
    fn reserve_pool(&self, _request: &PoolRequest) -> anyhow::Result<PoolStat> {
        self.word()
    }
    fn lend_pool(&self, _request: &LendRequest) -> anyhow::Result<PoolStat> {
        self.word()
    }
}

/// Bodies: for each request that takes one, one of them is valid; the last one is always too long.
fn bodies() -> Vec<String> {
    let right = ["{}", r#"{"limit_bytes":null}"#, r#"{"track":true}"#, r#"{"policy":"x","lease_ms":1,"limits":[]}"#];
    let long = " ".repeat(ballast_api::MAX_BODY_BYTES) + "{}";
    right.into_iter().chain([r#"{"bytes":1}"#, "[]"]).map(str::to_owned).chain([long]).collect()
}

fn request(method: &str, path: &str, body: &str) -> Vec<u8> {
    let method = method.to_uppercase();
    format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into()
}

/// The status of an answer, without the rest, because a stream continues.
fn status_of(mut stream: Stream, request: &[u8]) -> String {
    // A request that is refused early may not be read completely.
    let _ = stream.write_all(request);
    let mut start = [0; 12];
    stream.read_exact(&mut start).expect("an answer");
    String::from_utf8_lossy(&start[9..]).into_owned()
}

/// All statuses with which these servers answer an operation.
fn walk(servers: &[Server], impatient: &Server, method: &str, path: &str, operation: &Value) -> BTreeSet<String> {
    let names: &[&str] = if path.contains("{name}") { &["web", "nobody", "%ff"] } else { &[""] };
    let queries: &[&str] = if operation["parameters"].is_array() { &["", "?unknown=1"] } else { &[""] };
    let has_body = operation["requestBody"].is_object();
    let bodies = if has_body { bodies() } else { vec![String::new()] };
    let mut seen = BTreeSet::new();
    for server in servers {
        for name in names {
            let place = path.replace("{name}", name);
            let asked = queries.iter().map(|query| request(method, &format!("{place}{query}"), &bodies[0]));
            let asked = asked.chain(bodies[1..].iter().map(|body| request(method, &place, body)));
            seen.extend(asked.map(|bytes| status_of(Stream::connect(&server.socket).expect("connect"), &bytes)));
        }
    }
    if has_body {
        let whole = request(method, &path.replace("{name}", "web"), "{}");
        let stream = Stream::connect(&impatient.socket).expect("connect");
        seen.insert(status_of(stream, &whole[..whole.len() - 1]));
    }
    seen
}

#[test]
fn a_walk_of_all_routes_sees_exactly_the_statuses_of_the_document() {
    let start = |backing, bounds| start_with(Arc::new(backing), PeerPolicy::new(None), bounds);
    let servers = [Backing::Works, Backing::Refuses, Backing::Fails].map(|backing| start(backing, BOUNDS));
    let impatient = start(Backing::Works, Bounds { body: Duration::from_millis(1), ..BOUNDS });
    let document: Value = serde_json::from_str(&routes::document_json()).expect("JSON");
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("methods") {
            let mut seen = walk(&servers, &impatient, method, path, operation);
            let place = path.replace("{name}", "web");
            seen.insert(status_for(Access::Denied, request(method, &place, "")).to_string());
            // These come before any handler, and have their own tests: a failure without a backend, no place.
            seen.extend(["500", "503"].map(str::to_owned));
            let has: BTreeSet<String> =
                operation["responses"].as_object().expect("responses").keys().cloned().collect();
            assert_eq!(seen, has, "{method} {path}: on the left those that came, on the right the document's");
        }
    }
}
