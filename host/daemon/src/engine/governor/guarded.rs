//! Calls a policy, which may panic.
//!
//! Before: a snapshot. After: a plan, or none.
//! Threads: the governor's.
//! Promise: a panic ends this decision alone.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ballast_policy::{Plan, Setup, Snapshot, State};

/// The plan of the policy. `None` without a policy, and after a panic, which also resets the policy's state, because
/// the state may be the cause.
pub fn guarded(setup: &Setup, snapshot: &Snapshot, state: &mut State) -> Option<Plan> {
    let mut next = state.clone();
    let plan = catch_unwind(AssertUnwindSafe(|| setup.decide(snapshot, &mut next))).ok().flatten();
    *state = if plan.is_some() { next } else { State::default() };
    plan
}
