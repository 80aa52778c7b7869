//! A small blocking client: one connection per request, over the daemon's Unix socket.
//!
//! Before: `ballastd` listens. After: the CLI and tests send requests.
//! Threads: one runtime on the calling thread; not for use inside an async runtime.
//! Units: timeouts are per request. Promise: a request that is cut off because an engine is being replaced is sent
//! again for up to 5 s (every request of version 1 may be repeated), and an error names the socket and a remedy.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ballast_policy::{Kind, Plan, Snapshot};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};

use crate::{
    AdoptRequest, AdoptResult, DecisionRecord, Event, HeatPatch, History, HostStat, KeptVm, LendRequest, LimitsPatch,
    PlanRequest, PolicyPatch, PolicyStat, PoolRequest, PoolStat, Problem, UpgradeRequest, UpgradeStat, VmChange,
    VmHeat, VmHistory, VmPatch, VmStat,
};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// For requests about the pool: the kernel may move memory for seconds to find a page of 1 GiB.
const POOL_TIMEOUT: Duration = Duration::from_secs(60);
const RETRY_FOR: Duration = Duration::from_secs(5);
const RETRY_PAUSE: Duration = Duration::from_millis(50);
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// Why a request got no response.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens on the socket, or this user may not connect.
    #[error("Connecting to {}: {advice}", socket.display())]
    Unreachable {
        /// The daemon's socket.
        socket: PathBuf,
        /// The remedy.
        advice: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The connection was made, but no complete response was received.
    #[error("Talking to {}: {what}", socket.display())]
    Broken {
        /// The daemon's socket.
        socket: PathBuf,
        /// What went wrong.
        what: String,
    },
    /// The daemon refused.
    #[error(transparent)]
    Refused(#[from] Problem),
}

impl ClientError {
    /// Whether the daemon replied that no VM has that name.
    pub fn is_no_such_vm(&self) -> bool {
        matches!(self, Self::Refused(problem) if problem.kind == Problem::NO_SUCH_VM)
    }
}

/// Result of one try: a response, a cut connection that may come from a change of engines, or a reason to stop.
enum Try {
    Cut(ClientError),
    Final(ClientError),
}

/// A client of one daemon.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    runtime: Runtime,
    retry_for: Duration,
}

impl Client {
    /// Makes a client of the daemon at `socket`. It does not connect yet.
    pub fn new(socket: impl Into<PathBuf>) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        Ok(Self { socket: socket.into(), runtime, retry_for: RETRY_FOR })
    }

    /// Gives up on a daemon that refuses connections after this long instead of 5 s.
    #[must_use]
    pub fn retry_for(mut self, time: Duration) -> Self {
        self.retry_for = time;
        self
    }

    /// The daemon's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns every VM.
    pub fn vms(&self) -> Result<Vec<VmStat>, ClientError> {
        self.get("/v1/vms")
    }

    /// Returns one VM.
    pub fn vm(&self, name: &str) -> Result<VmStat, ClientError> {
        self.get(&vm_path(name))
    }

    /// Returns how hot the memory of a VM is, with a strip of `cells` cells.
    pub fn heat(&self, name: &str, cells: usize) -> Result<VmHeat, ClientError> {
        self.get(&format!("{}/heat?cells={cells}", vm_path(name)))
    }

    /// Sets whether a VM is tracked. Returns its heat.
    pub fn set_track(&self, name: &str, track: bool) -> Result<VmHeat, ClientError> {
        self.json(Method::PATCH, &format!("{}/heat", vm_path(name)), body(&HeatPatch { track: Some(track) }))
    }

    /// Sets or, with `None`, removes the limit of a VM. Returns its state after the change.
    pub fn set_limit(&self, name: &str, limit_bytes: Option<u64>) -> Result<VmStat, ClientError> {
        self.patch_vm(name, &VmPatch { limit_bytes: Some(limit_bytes), ..VmPatch::default() })
    }

    /// Sets or removes the limit of several VMs, or of all. Returns the result for each.
    pub fn set_limits(&self, patch: &LimitsPatch) -> Result<Vec<VmChange>, ClientError> {
        self.json(Method::PATCH, "/v1/vms", body(patch))
    }

    /// Changes the operator's settings of a VM. Returns its state after the change.
    pub fn patch_vm(&self, name: &str, patch: &VmPatch) -> Result<VmStat, ClientError> {
        self.json(Method::PATCH, &vm_path(name), body(patch))
    }

    /// Starts to restore all of a VM, and keeps it in memory whatever its limit. Returns its state now.
    pub fn restore(&self, name: &str) -> Result<VmStat, ClientError> {
        self.json(Method::PUT, &(vm_path(name) + "/restore"), Vec::new())
    }

    /// Ends a restore: the VM's limit counts again.
    pub fn end_restore(&self, name: &str) -> Result<VmStat, ClientError> {
        self.json(Method::DELETE, &(vm_path(name) + "/restore"), Vec::new())
    }

    /// Returns the settings that are kept of VMs for the next time that they attach.
    pub fn kept(&self) -> Result<Vec<KeptVm>, ClientError> {
        self.get("/v1/kept")
    }

    /// Forgets the settings that are kept of VMs with this name or UUID. Returns them.
    pub fn forget(&self, vm: &str) -> Result<Vec<KeptVm>, ClientError> {
        let path = vm_path(vm).replacen("/v1/vms", "/v1/kept", 1);
        self.json(Method::DELETE, &path, Vec::new())
    }

    /// Adopts VMs that run already. Returns them, and the VMMs that could not be adopted.
    pub fn adopt(&self, request: &AdoptRequest) -> Result<AdoptResult, ClientError> {
        self.json(Method::PUT, "/v1/adopted", body(request))
    }

    /// Releases an adopted VM, at once or when its memory has come back from swap. Returns its state now.
    pub fn release(&self, name: &str, bring_back: bool) -> Result<VmStat, ClientError> {
        let path = vm_path(name).replacen("/v1/vms", "/v1/adopted", 1);
        self.json(Method::DELETE, &format!("{path}?bring_back={}", u8::from(bring_back)), Vec::new())
    }

    /// Returns the last decisions about a VM, oldest first.
    pub fn decisions(&self, name: &str) -> Result<Vec<DecisionRecord>, ClientError> {
        self.get(&(vm_path(name) + "/decisions"))
    }

    /// Returns the snapshot that policies read.
    pub fn snapshot(&self) -> Result<Snapshot, ClientError> {
        self.get("/v1/snapshot")
    }

    /// Returns the plan that the policy, or another one, would make now. Changes nothing.
    pub fn plan(&self, policy: Option<Kind>) -> Result<Plan, ClientError> {
        self.get(&policy.map_or("/v1/plan".into(), |kind| format!("/v1/plan?policy={kind}")))
    }

    /// Decides in place of the policy, for the length of the lease.
    pub fn put_plan(&self, plan: &PlanRequest) -> Result<Plan, ClientError> {
        self.json(Method::PUT, "/v1/plan", body(plan))
    }

    /// Returns the state of the governor.
    pub fn policy(&self) -> Result<PolicyStat, ClientError> {
        self.get("/v1/policy")
    }

    /// Changes the governor. Returns its state after the change.
    pub fn patch_policy(&self, patch: &PolicyPatch) -> Result<PolicyStat, ClientError> {
        self.json(Method::PATCH, "/v1/policy", body(patch))
    }

    /// Returns the state of the last upgrade.
    pub fn upgrade(&self) -> Result<UpgradeStat, ClientError> {
        self.get("/v1/upgrade")
    }

    /// Starts an upgrade to this program, or to the program that engines are started from. Returns the upgrade's state.
    pub fn begin_upgrade(&self, request: &UpgradeRequest) -> Result<UpgradeStat, ClientError> {
        self.json(Method::PUT, "/v1/upgrade", body(request))
    }

    /// Returns the pool of VM memory.
    pub fn pool(&self) -> Result<PoolStat, ClientError> {
        self.get("/v1/pool")
    }

    /// Reserves memory of the host for VMs. Returns the pool after the change.
    pub fn reserve_pool(&self, request: &PoolRequest) -> Result<PoolStat, ClientError> {
        self.json(Method::PUT, "/v1/pool", body(request))
    }

    /// Lends memory of the pool to the host, or takes it back. Returns the pool after the change.
    pub fn lend_pool(&self, request: &LendRequest) -> Result<PoolStat, ClientError> {
        self.json(Method::PUT, "/v1/pool/lent", body(request))
    }

    /// Returns the state of the host and of Ballast.
    pub fn host(&self) -> Result<HostStat, ClientError> {
        self.get("/v1/host")
    }

    /// Returns recent events, oldest first.
    pub fn events(&self) -> Result<Vec<Event>, ClientError> {
        self.events_after(0)
    }

    /// Returns the events after number `after`, oldest first.
    pub fn events_after(&self, after: u64) -> Result<Vec<Event>, ClientError> {
        self.get(&format!("/v1/events?after={after}"))
    }

    /// Returns the events after number `after`, oldest first, with the policy's decisions (kind `decision`).
    pub fn decisions_after(&self, after: u64) -> Result<Vec<Event>, ClientError> {
        self.get(&format!("/v1/events?after={after}&decisions=1"))
    }

    /// Returns the past of the host: the last `minutes`, at most a day.
    pub fn host_history(&self, minutes: u64) -> Result<History, ClientError> {
        self.get(&format!("/v1/history?minutes={minutes}"))
    }

    /// Returns the past of a VM: the last `minutes`, at most a day.
    pub fn vm_history(&self, name: &str, minutes: u64) -> Result<History, ClientError> {
        self.get(&format!("{}/history?minutes={minutes}", vm_path(name)))
    }

    /// Returns the past of all VMs: the last `minutes`, at most an hour.
    pub fn vm_histories(&self, minutes: u64) -> Result<Vec<VmHistory>, ClientError> {
        self.get(&format!("/v1/history/vms?minutes={minutes}"))
    }

    /// Returns the metrics page.
    pub fn metrics(&self) -> Result<String, ClientError> {
        let answer = self.request(&Method::GET, "/metrics", &Bytes::new())?;
        String::from_utf8(answer.into()).map_err(|error| self.broken(format!("the metrics are not UTF-8: {error}")))
    }

    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.json(Method::GET, path, Vec::new())
    }

    fn json<T: DeserializeOwned>(&self, method: Method, path: &str, body: Vec<u8>) -> Result<T, ClientError> {
        let answer = self.request(&method, path, &Bytes::from(body))?;
        serde_json::from_slice(&answer)
            .map_err(|error| self.broken(format!("the answer to {method} {path} is not understood: {error}")))
    }

    fn request(&self, method: &Method, path: &str, body: &Bytes) -> Result<Bytes, ClientError> {
        let give_up = Instant::now() + self.retry_for;
        let within = if path.starts_with("/v1/pool") { POOL_TIMEOUT } else { REQUEST_TIMEOUT };
        self.runtime.block_on(async {
            loop {
                match self.in_time(within, self.once(method, path, body)).await {
                    Ok(answer) => return Ok(answer),
                    Err(Try::Cut(error)) if Instant::now() >= give_up => return Err(error),
                    Err(Try::Cut(_)) => tokio::time::sleep(RETRY_PAUSE).await,
                    Err(Try::Final(error)) => return Err(error),
                }
            }
        })
    }

    async fn in_time<T>(&self, within: Duration, work: impl Future<Output = Result<T, Try>>) -> Result<T, Try> {
        tokio::time::timeout(within, work).await.unwrap_or_else(|_| {
            let seconds = within.as_secs();
            Err(Try::Final(self.broken(format!("no answer within {seconds} s; is ballastd stopped or overloaded?"))))
        })
    }

    async fn once(&self, method: &Method, path: &str, body: &Bytes) -> Result<Bytes, Try> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| self.unreachable(error))?;
        let cut = |error: hyper::Error| Try::Cut(self.broken(format!("the connection was cut: {error}")));
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(cut)?;
        let driver = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "ballast")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body.clone()))
            .map_err(|error| Try::Final(self.broken(format!("{path:?} cannot be asked for: {error}"))))?;
        let response = sender.send_request(request).await.map_err(cut)?;
        let (head, answer) = response.into_parts();
        let answer = Limited::new(answer, MAX_ANSWER_BYTES).collect().await;
        driver.abort();
        let answer = answer.map_err(|error| Try::Cut(self.broken(format!("the answer was cut: {error}"))))?.to_bytes();
        if head.status.is_success() { Ok(answer) } else { Err(Try::Final(refusal(head.status, &answer).into())) }
    }

    fn unreachable(&self, source: io::Error) -> Try {
        let retry = matches!(source.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset);
        let advice = match source.kind() {
            io::ErrorKind::PermissionDenied => "not permitted; run as root or as a member of the daemon's API group",
            io::ErrorKind::NotFound => "there is no such socket; is ballastd running? (--socket names another)",
            _ => "no answer; is ballastd running?",
        };
        let error = ClientError::Unreachable { socket: self.socket.clone(), advice, source };
        if retry { Try::Cut(error) } else { Try::Final(error) }
    }

    fn broken(&self, what: String) -> ClientError {
        ClientError::Broken { socket: self.socket.clone(), what }
    }
}

fn body(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data serialises")
}

/// The problem document of a refusal, or one made from its status if it has none.
fn refusal(status: StatusCode, body: &[u8]) -> Problem {
    serde_json::from_slice(body).unwrap_or_else(|_| {
        let title = status.canonical_reason().unwrap_or("refused");
        Problem::new(status.as_u16(), "about:blank", title, "")
    })
}

/// The path of a VM. Each character that is not a plain name character is percent-encoded.
fn vm_path(name: &str) -> String {
    let mut path = String::from("/v1/vms/");
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' => path.push(char::from(byte)),
            _ => path.push_str(&format!("%{byte:02X}")),
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_leave_its_place_in_the_path() {
        assert_eq!(vm_path("web-1.a_b"), "/v1/vms/web-1.a_b");
        assert_eq!(vm_path("a/b?c d"), "/v1/vms/a%2Fb%3Fc%20d");
    }

    #[test]
    fn a_missing_socket_is_named_with_advice() {
        let client = Client::new("/nonexistent/api.sock").expect("client");
        let error = client.host().expect_err("nobody is there").to_string();
        assert!(error.contains("/nonexistent/api.sock") && error.contains("is ballastd running?"), "{error}");
    }
}
