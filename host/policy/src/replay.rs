//! Replay: the decisions that another policy would have made on a recording.
//!
//! Before: `ballast record` wrote snapshots. After: `ballast replay` prints the comparison.
//! Promise: open loop; the VMs of the recording did not feel the replayed limits. Each decision sees the replay's own
//! last limit, so the policy that was recorded decides the same again from the same state.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::memory::{Policy, State};
use crate::snapshot::{Plan, Snapshot, VmSample};

/// One VM's limit over a recording.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Course {
    /// Mean of the limit; if it has none, of the most that it may have.
    pub mean_bytes: u64,
    /// Least.
    pub least_bytes: u64,
    /// Most.
    pub most_bytes: u64,
    /// Number of changes.
    pub changes: u64,
    /// Mean of (working set / limit)^2: the term whose sum Maestro minimises, without faults and shares.
    pub mean_misfit: f64,
}

/// One VM, as recorded and as replayed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// The VM.
    pub name: String,
    /// Snapshots it is in.
    pub snapshots: u64,
    /// Mean of its working set.
    pub working_set_bytes: u64,
    /// Its limits in the recording.
    pub recorded: Course,
    /// Its limits under the policy.
    pub replayed: Course,
}

/// Decide on each snapshot in turn. Returns the plans.
pub fn plans(policy: &dyn Policy, snapshots: &[Snapshot]) -> Vec<Plan> {
    let mut state = State::default();
    let mut given: BTreeMap<String, Option<u64>> = BTreeMap::new();
    let decide = |snapshot: &Snapshot| {
        let mut snapshot = snapshot.clone();
        for vm in &mut snapshot.vms {
            if let Some(given) = given.get(&vm.id) {
                vm.target_bytes = *given;
            }
        }
        let plan = policy.decide(&snapshot, &mut state);
        given = plan.decisions.iter().map(|decision| (decision.id.clone(), decision.after_bytes())).collect();
        plan
    };
    snapshots.iter().map(decide).collect()
}

/// Compare a recording with the plans for it. A VM's target in a snapshot was decided on the snapshot before.
pub fn compare(snapshots: &[Snapshot], plans: &[Plan]) -> Vec<Compared> {
    let mut tracks: BTreeMap<&str, Track<'_>> = BTreeMap::new();
    for (at, (snapshot, plan)) in snapshots.iter().zip(plans).enumerate() {
        for vm in &snapshot.vms {
            let track = tracks.entry(&vm.id).or_insert_with(|| Track { vm: Some(vm), ..Track::default() });
            let decision = plan.decisions.iter().find(|decision| decision.id == vm.id);
            let replayed = decision.and_then(|decision| decision.after_bytes());
            let next = snapshots.get(at + 1).and_then(|next| next.vms.iter().find(|next| next.id == vm.id));
            let recorded = next.map_or(vm.target_bytes, |next| next.target_bytes);
            track.working_set += vm.working_set_bytes() as f64;
            track.recorded.add(vm, recorded);
            track.replayed.add(vm, replayed);
        }
    }
    let mut compared: Vec<Compared> = tracks.into_values().map(Track::finish).collect();
    compared.sort_by(|a, b| a.name.cmp(&b.name));
    compared
}

#[derive(Default)]
struct Track<'a> {
    vm: Option<&'a VmSample>,
    working_set: f64,
    recorded: Sums,
    replayed: Sums,
}

#[derive(Default)]
struct Sums {
    count: u64,
    sum: f64,
    misfit: f64,
    least: u64,
    most: u64,
    last: Option<u64>,
    changes: u64,
}

impl Sums {
    fn add(&mut self, vm: &VmSample, limit: Option<u64>) {
        let limit = limit.map_or(vm.most_bytes(), |limit| limit.min(vm.most_bytes())).max(1);
        self.least = if self.count == 0 { limit } else { self.least.min(limit) };
        self.most = self.most.max(limit);
        self.changes += u64::from(self.last.is_some_and(|last| last != limit));
        self.last = Some(limit);
        self.count += 1;
        self.sum += limit as f64;
        self.misfit += (vm.working_set_bytes() as f64 / limit as f64).powi(2);
    }

    fn finish(&self) -> Course {
        let count = self.count.max(1) as f64;
        Course {
            mean_bytes: (self.sum / count) as u64,
            least_bytes: self.least,
            most_bytes: self.most,
            changes: self.changes,
            mean_misfit: self.misfit / count,
        }
    }
}

impl Track<'_> {
    fn finish(self) -> Compared {
        Compared {
            name: self.vm.map(|vm| vm.name.clone()).unwrap_or_default(),
            snapshots: self.recorded.count,
            working_set_bytes: (self.working_set / self.recorded.count.max(1) as f64) as u64,
            recorded: self.recorded.finish(),
            replayed: self.replayed.finish(),
        }
    }
}
