//! The API's interface to the engine: reads its VMs, the host and the governor, and changes them.
//!
//! Before: the engine implements [`Backend`]. After: the routes and the metrics page call it.
//! Threads: any; each call runs on a blocking thread.

use std::collections::BTreeMap;

use ballast_api::{
    AdoptRequest, AdoptResult, DecisionRecord, Event, History, HostStat, KeptVm, LendRequest, PlanRequest, PolicyPatch,
    PolicyStat, PoolRequest, PoolStat, UpgradeStat, VmHeat, VmPatch, VmStat,
};
use ballast_policy::{Kind, Plan, Snapshot};
use tokio::sync::watch;

/// The backend of the API. Calls may block briefly; a panic in a call becomes a 500 and has no other effect.
pub trait Backend: Send + Sync + 'static {
    /// All VMs, in the order to show them.
    fn vms(&self) -> Vec<VmStat>;
    /// The VM of this name.
    fn vm(&self, name: &str) -> Option<VmStat>;
    /// The heat of a VM's memory, with a strip of `cells` cells.
    fn heat(&self, name: &str, cells: usize) -> Option<VmHeat>;
    /// Sets whether a VM is tracked. Returns its heat.
    fn set_track(&self, name: &str, track: bool) -> Option<VmHeat>;
    /// Changes the operator's settings of a VM, all of them or none. Returns its new state.
    fn patch_vm(&self, name: &str, patch: &VmPatch) -> Result<VmStat, ChangeError>;
    /// Makes one change to each of these VMs. Unknown VMs are waited for together.
    fn patch_vms(&self, names: &[String], patch: &VmPatch) -> Vec<Result<VmStat, ChangeError>> {
        names.iter().map(|name| self.patch_vm(name, patch)).collect()
    }
    /// Restores all of a VM and keeps it in memory, or no longer keeps it. Returns the VM's state now.
    fn keep(&self, name: &str, kept: bool) -> Result<VmStat, ChangeError>;
    /// The settings that are kept of VMs for the next time that they attach.
    fn kept(&self) -> anyhow::Result<Vec<KeptVm>>;
    /// Forgets the settings that are kept of VMs with this name or UUID. Returns them.
    fn forget(&self, vm: &str) -> anyhow::Result<Vec<KeptVm>>;
    /// The host and Ballast.
    fn host(&self) -> HostStat;
    /// Recent events after this number, oldest first; with decisions of the policy, if requested.
    fn events(&self, after: u64, decisions: bool) -> Vec<Event>;
    /// Changes with each event.
    fn event_watch(&self) -> watch::Receiver<u64>;
    /// Number of events of each kind.
    fn event_counts(&self) -> BTreeMap<String, u64>;
    /// The last minutes of the host.
    fn host_history(&self, minutes: u64) -> History;
    /// The last minutes of a VM; `None` if there is no such VM.
    fn vm_history(&self, name: &str, minutes: u64) -> Option<History>;
    /// Durations of a VM's faults, for the metrics page.
    fn fault_histogram(&self, name: &str) -> Option<Histogram>;
    /// The stages of restores of all VMs, by name.
    fn stage_histograms(&self) -> Vec<(&'static str, Histogram)>;
    /// The input of policies.
    fn snapshot(&self) -> Snapshot;
    /// The plan that the policy in force, or the policy `policy`, would make now.
    fn plan(&self, policy: Option<Kind>) -> anyhow::Result<Plan>;
    /// Decides in place of the policy for a while. Returns the plan as it was understood.
    fn put_plan(&self, request: PlanRequest) -> anyhow::Result<Plan>;
    /// The state of the governor.
    fn policy(&self) -> PolicyStat;
    /// Changes the governor. Returns its state after the change.
    fn patch_policy(&self, patch: &PolicyPatch) -> anyhow::Result<PolicyStat>;
    /// The last decisions about a VM, oldest first; `None` if there is no such VM.
    fn decisions(&self, name: &str) -> Option<Vec<DecisionRecord>>;
    /// Adopts VMs that run already. Returns those that were not adopted before.
    fn adopt(&self, request: &AdoptRequest) -> anyhow::Result<AdoptResult>;
    /// Releases an adopted VM; if `bring_back`, once all of its memory is restored. Returns the VM's state now.
    fn release(&self, name: &str, bring_back: bool) -> Result<VmStat, ChangeError>;
    /// The state of the last upgrade.
    fn upgrade(&self) -> UpgradeStat;
    /// Begins an upgrade to this program, or to the program that engines are started from. Returns the upgrade's state.
    fn begin_upgrade(&self, program: Option<String>) -> anyhow::Result<UpgradeStat>;
    /// The pool.
    fn pool(&self) -> PoolStat;
    /// Reserves memory for the pool. Returns the pool after the change.
    fn reserve_pool(&self, request: &PoolRequest) -> anyhow::Result<PoolStat>;
    /// Lends some of the pool to the host, or takes it back. Returns the pool after the change.
    fn lend_pool(&self, request: &LendRequest) -> anyhow::Result<PoolStat>;
}

/// Why a VM was not changed. The operator's request is the cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// No VM has that name.
    #[error("no VM has that name")]
    NotFound,
    /// The value is impossible; the text says why and lists the possible values.
    #[error("{0}")]
    Invalid(String),
}

impl From<anyhow::Error> for ChangeError {
    fn from(why: anyhow::Error) -> Self {
        Self::Invalid(format!("{why:#}"))
    }
}

/// A cumulative histogram of seconds, as Prometheus counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// Upper bound of each bucket in seconds, rising, and the number of measurements at or below it. The infinite
    /// bucket is `count` and is not listed.
    pub buckets: Vec<(f64, u64)>,
    /// Number of all measurements.
    pub count: u64,
    /// The sum of all measurements in seconds.
    pub sum_s: f64,
}

impl Histogram {
    /// Adds the measurements of another histogram with equal bounds.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.buckets.iter_mut().zip(&other.buckets).for_each(|((_, count), (_, more))| *count += more);
        Self { count: self.count + other.count, sum_s: self.sum_s + other.sum_s, ..self }
    }
}
