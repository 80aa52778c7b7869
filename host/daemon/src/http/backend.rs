//! The API's view of the engine: a backend that shows its VMs, the host and the governor, and changes them.
//!
//! Before: the engine implements [`Backend`]. After: the routes and the metrics page call it.
//! Threads: any; every call runs on a blocking thread.

use std::collections::BTreeMap;

use ballast_api::{
    AdoptRequest, AdoptResult, DecisionRecord, Event, History, HostStat, KeptVm, LendRequest, PlanRequest, PolicyPatch,
    PolicyStat, PoolRequest, PoolStat, Track, UpgradeStat, VmHeat, VmPatch, VmStat,
};
use ballast_policy::{Kind, Plan, Snapshot};
use tokio::sync::watch;

/// The backend of the API. Calls may block for a short time; a panic in one becomes a 500 and nothing else.
pub trait Backend: Governing + Upgrades + Pooling + Adopting + Send + Sync + 'static {
    /// Every VM, in the order to show them.
    fn vms(&self) -> Vec<VmStat>;
    /// The VM of that name.
    fn vm(&self, name: &str) -> Option<VmStat>;
    /// The heat of its memory, with a strip of `cells` cells.
    fn heat(&self, name: &str, cells: usize) -> Option<VmHeat>;
    /// Set when it is tracked. Returns its heat.
    fn set_track(&self, name: &str, track: Track) -> Option<VmHeat>;
    /// Its access cycles after that number, as a recording; empty while there are none.
    fn heat_cycles(&self, name: &str, after: u64) -> Option<Vec<u8>>;
    /// Change the operator's settings of a VM, all of them or none. Returns its state after the change.
    fn patch_vm(&self, name: &str, patch: &VmPatch) -> Result<VmStat, ChangeError>;
    /// The same change of each of these VMs; one that is not known is waited for with all others, not by itself.
    fn patch_vms(&self, names: &[String], patch: &VmPatch) -> Vec<Result<VmStat, ChangeError>> {
        names.iter().map(|name| self.patch_vm(name, patch)).collect()
    }
    /// Restore all of a VM and keep it in memory, or end that. Returns its state now.
    fn keep(&self, name: &str, kept: bool) -> Result<VmStat, ChangeError>;
    /// What is kept of VMs for the next time that they attach.
    fn kept(&self) -> Result<Vec<KeptVm>, String> {
        Ok(Vec::new())
    }
    /// Forget what is kept of VMs of this name or UUID. Returns it.
    fn forget(&self, _vm: &str) -> Result<Vec<KeptVm>, String> {
        Ok(Vec::new())
    }
    /// The host and Ballast.
    fn host(&self) -> HostStat;
    /// Recent events after this number, oldest first; with decisions of the policy, if that is asked for.
    fn events(&self, after: u64, decisions: bool) -> Vec<Event>;
    /// Changes with each event.
    fn event_watch(&self) -> watch::Receiver<u64>;
    /// How many events of each kind there were.
    fn event_counts(&self) -> BTreeMap<String, u64>;
    /// The last minutes of the host.
    fn host_history(&self, _minutes: u64) -> History {
        History::default()
    }
    /// The last minutes of a VM; none if there is no such VM.
    fn vm_history(&self, _name: &str, _minutes: u64) -> Option<History> {
        None
    }
    /// How long the VM's faults took, for the metrics page.
    fn fault_histogram(&self, name: &str) -> Option<Histogram>;
    /// The stages of restores of all VMs, by their names.
    fn stage_histograms(&self) -> Vec<(&'static str, Histogram)>;
}

/// Why a VM was not changed. Caused by the operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// No VM has that name.
    #[error("no VM has that name")]
    NotFound,
    /// The value is impossible; the text says why and gives the possible ones.
    #[error("{0}")]
    Invalid(String),
}

/// A cumulative histogram of seconds, as Prometheus counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// Upper bound of each bucket in seconds, rising, and how many measurements were at or below it. The infinite
    /// bucket is `count` and is not listed.
    pub buckets: Vec<(f64, u64)>,
    /// All measurements.
    pub count: u64,
    /// Their sum in seconds.
    pub sum_s: f64,
}

impl Histogram {
    /// The measurements of both, which have the same bounds.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.buckets.iter_mut().zip(&other.buckets).for_each(|((_, count), (_, more))| *count += more);
        Self { count: self.count + other.count, sum_s: self.sum_s + other.sum_s, ..self }
    }
}

/// The governor. A backend without one returns errors.
pub trait Governing {
    /// The input of policies.
    fn snapshot(&self) -> Snapshot {
        Snapshot::default()
    }
    /// The plan that the policy in force, or this one, would make now.
    fn plan(&self, _policy: Option<Kind>) -> Result<Plan, String> {
        Err("there is no governor here".into())
    }
    /// Decide in place of the policy for a while. Returns the plan as it was understood.
    fn put_plan(&self, _request: PlanRequest) -> Result<Plan, String> {
        Err("there is no governor here".into())
    }
    /// The state of the governor.
    fn policy(&self) -> PolicyStat {
        PolicyStat::default()
    }
    /// Change it. Returns its state after the change.
    fn patch_policy(&self, _patch: &PolicyPatch) -> Result<PolicyStat, String> {
        Err("there is no governor here".into())
    }
    /// The last decisions about a VM, oldest first; none if there is no such VM.
    fn decisions(&self, _name: &str) -> Option<Vec<DecisionRecord>> {
        None
    }
}

/// Adopted VMs. A backend without them returns errors.
pub trait Adopting {
    /// Adopt VMs that run already. Returns those that were not adopted before.
    fn adopt(&self, _request: &AdoptRequest) -> Result<AdoptResult, String> {
        Err("VMs cannot be adopted here".into())
    }
    /// Release one, when its memory has come back if that is asked for. Returns its state now.
    fn release(&self, _name: &str, _bring_back: bool) -> Result<VmStat, ChangeError> {
        Err(ChangeError::NotFound)
    }
}

/// Upgrades. A backend without a keeper returns errors.
pub trait Upgrades {
    /// The state of the last one.
    fn upgrade(&self) -> UpgradeStat {
        UpgradeStat::default()
    }
    /// Begin one to this program, or to the one that engines are started from. Returns the state.
    fn begin_upgrade(&self, _program: Option<String>) -> Result<UpgradeStat, String> {
        Err("there is no keeper here".into())
    }
}

/// The pool. A backend without one returns errors.
pub trait Pooling {
    /// The pool.
    fn pool(&self) -> PoolStat {
        PoolStat::default()
    }
    /// Reserve memory for it. Returns the pool after the change.
    fn reserve_pool(&self, _request: &PoolRequest) -> Result<PoolStat, String> {
        Err("there is no pool here".into())
    }
    /// Lend some of it, or take it back. Returns the pool after the change.
    fn lend_pool(&self, _request: &LendRequest) -> Result<PoolStat, String> {
        Err("there is no pool here".into())
    }
}
