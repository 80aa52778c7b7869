//! The decision log: the last decisions about each VM, and their inputs.
//!
//! Before: the governor decided. After: `ballast explain` shows the records. Promise: it is bounded: equal decisions in
//! a row are one record, a VM has at most [`MOST`], and a VM that is gone has none.

use std::collections::{BTreeMap, VecDeque};
use std::mem::discriminant;

use ballast_api::DecisionRecord;
use ballast_policy::{Action, Decision, Plan, Reason, Snapshot, VmSample};

const MOST: usize = 64;

#[derive(Debug, Default)]
pub struct Log(BTreeMap<String, VecDeque<DecisionRecord>>);

impl Log {
    /// Records the decisions on this snapshot. For each that differs from the VM's last decision, returns the VM's name
    /// and the decision with its reasons as text.
    pub fn add(&mut self, snapshot: &Snapshot, plan: &Plan, unix_ms: u64) -> Vec<(String, String)> {
        let mut new = Vec::new();
        self.0.retain(|id, _| snapshot.vms.iter().any(|vm| vm.id == *id));
        // Without a policy, there are decisions only about VMs that are limited for the pool.
        let said = |(_, decision): &(_, &Decision)| decision.action != Action::Free || !decision.reasons.is_empty();
        for (vm, decision) in snapshot.vms.iter().zip(&plan.decisions).filter(said) {
            let records = self.0.entry(vm.id.clone()).or_default();
            let record = record(vm, decision, plan, unix_ms);
            match records.back_mut().filter(|last| says_the_same(last, &record)) {
                Some(last) => {
                    *last = DecisionRecord { first_unix_ms: last.first_unix_ms, times: last.times + 1, ..record }
                }
                None => {
                    new.push((vm.name.clone(), text(&record)));
                    records.push_back(record);
                }
            }
            if records.len() > MOST {
                records.pop_front();
            }
        }
        new
    }

    pub fn of(&self, id: &str) -> Vec<DecisionRecord> {
        self.0.get(id).map(|records| records.iter().cloned().collect()).unwrap_or_default()
    }
}

fn record(vm: &VmSample, decision: &Decision, plan: &Plan, unix_ms: u64) -> DecisionRecord {
    DecisionRecord {
        first_unix_ms: unix_ms,
        last_unix_ms: unix_ms,
        times: 1,
        policy: plan.policy.clone(),
        host_state: plan.host_state,
        vm: vm.clone(),
        decision: decision.clone(),
        sentences: decision.reasons.iter().map(Reason::to_string).collect(),
    }
}

fn text(record: &DecisionRecord) -> String {
    format!("{}: it {}: {}", record.policy, record.decision.words(), record.sentences.join("; "))
}

/// Whether both records have one limit and the same kinds of reasons. Figures in the reasons may differ.
fn says_the_same(last: &DecisionRecord, new: &DecisionRecord) -> bool {
    let kinds = |record: &DecisionRecord| record.decision.reasons.iter().map(discriminant).collect::<Vec<_>>();
    let outcome = |record: &DecisionRecord| (record.decision.action, record.decision.after_bytes());
    last.policy == new.policy
        && last.host_state == new.host_state
        && outcome(last) == outcome(new)
        && kinds(last) == kinds(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_decisions_in_a_row_are_one_record_and_the_log_is_bounded() {
        let snapshot =
            |id: &str| Snapshot { vms: vec![VmSample { id: id.into(), ..VmSample::default() }], ..Snapshot::default() };
        let plan = |limit| {
            let reasons = vec![Reason::Paused { left_ms: limit % 7 }];
            let decision = Decision { action: Action::Limit, limit_bytes: Some(limit), reasons, ..Decision::default() };
            Plan { decisions: vec![decision], ..Plan::default() }
        };
        let mut log = Log::default();
        let said: Vec<_> = (0..10).flat_map(|at| log.add(&snapshot("a"), &plan(4096), at)).collect();
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].1.contains("it may use 4 KiB: "), "{said:?}");
        let records = log.of("a");
        assert_eq!((records.len(), records[0].times, records[0].first_unix_ms, records[0].last_unix_ms), (1, 10, 0, 9));
        assert!(records[0].sentences[0].contains("stalled not long ago"), "{:?}", records[0].sentences);
        for limit in 0..1000 {
            log.add(&snapshot("a"), &plan(limit), 10 + limit);
        }
        assert_eq!((log.of("a").len(), log.of("a")[MOST - 1].decision.limit_bytes), (MOST, Some(999)));
        log.add(&snapshot("b"), &plan(1), 2000);
        assert_eq!((log.of("a").len(), log.of("b").len()), (0, 1), "a VM that is gone leaves nothing");
    }
}
