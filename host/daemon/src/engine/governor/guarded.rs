//! A policy that may panic.
//!
//! Before: a snapshot. After: a plan, or none. Threads: the governor's. Promise: a panic ends this decision alone.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ballast_policy::{Plan, Policy, Snapshot, State};

/// The plan of this policy; none if it panics: then its state, which may be the cause, begins anew.
pub fn guarded(policy: &dyn Policy, snapshot: &Snapshot, state: &mut State) -> Option<Plan> {
    let mut next = state.clone();
    let plan = catch_unwind(AssertUnwindSafe(|| policy.decide(snapshot, &mut next))).ok();
    *state = if plan.is_some() { next } else { State::default() };
    plan
}
