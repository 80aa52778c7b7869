//! The control loop's part of the API: snapshot, plan, policy, decisions.
//!
//! Before: `routes` mounts it. After: the engine's `control` answers.
//! Promise: as for the other routes; a plan that breaks a rule is 422 with the rule.

use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::routing::get;
use ballast_api::{DecisionRecord, PlanRequest, PolicyPatch, PolicyStat};
use ballast_policy::{Kind, Plan, Snapshot};

use super::routes::{Answer, Connection, Refusal, ask, bad_request, invalid, json, no_such_vm, parse, read_body};

/// What the API shows and changes of the control loop. A backend without one says so.
pub trait Control {
    /// What policies look at.
    fn snapshot(&self) -> Snapshot {
        Snapshot::default()
    }
    /// What the policy in force, or this one, would do now.
    fn plan(&self, _policy: Option<Kind>) -> Result<Plan, String> {
        Err("nobody decides here".into())
    }
    /// Decide in place of the policy for a while. Returns the plan as it was understood.
    fn put_plan(&self, _request: PlanRequest) -> Result<Plan, String> {
        Err("nobody decides here".into())
    }
    /// The loop.
    fn policy(&self) -> PolicyStat {
        PolicyStat::default()
    }
    /// Change it. Returns its state after the change.
    fn patch_policy(&self, _patch: &PolicyPatch) -> Result<PolicyStat, String> {
        Err("nobody decides here".into())
    }
    /// The last decisions about a VM, oldest first; none if there is no such VM.
    fn decisions(&self, _name: &str) -> Option<Vec<DecisionRecord>> {
        None
    }
}

pub(super) fn routes() -> Router<Connection> {
    Router::new()
        .route("/v1/snapshot", get(snapshot))
        .route("/v1/plan", get(plan).put(put_plan))
        .route("/v1/policy", get(policy).patch(patch_policy))
        .route("/v1/vms/{name}/decisions", get(decisions))
}

async fn snapshot(State(connection): State<Connection>) -> Answer {
    json(&ask(&connection, |backend| backend.snapshot()).await?)
}

async fn plan(State(connection): State<Connection>, request: Request) -> Answer {
    let kind = match request.uri().query() {
        None | Some("") => None,
        Some(query) => Some(kind_of(query)?),
    };
    json(&ask(&connection, move |backend| backend.plan(kind)).await?.map_err(invalid)?)
}

/// `policy=maestro`
fn kind_of(query: &str) -> Result<Kind, Refusal> {
    let word = query.strip_prefix("policy=").filter(|word| !word.contains('&'));
    let word = word.ok_or_else(|| bad_request(format!("{query:?} is not understood: policy=NAME is")))?;
    word.parse().map_err(bad_request)
}

async fn put_plan(State(connection): State<Connection>, request: Request) -> Answer {
    let body = read_body(request.into_body(), connection.body_time).await?;
    let wanted: PlanRequest = parse(&body, "a plan")?;
    json(&ask(&connection, move |backend| backend.put_plan(wanted)).await?.map_err(invalid)?)
}

async fn policy(State(connection): State<Connection>) -> Answer {
    json(&ask(&connection, |backend| backend.policy()).await?)
}

async fn patch_policy(State(connection): State<Connection>, request: Request) -> Answer {
    let body = read_body(request.into_body(), connection.body_time).await?;
    let patch: PolicyPatch = parse(&body, "a change to the policy")?;
    json(&ask(&connection, move |backend| backend.patch_policy(&patch)).await?.map_err(invalid)?)
}

async fn decisions(State(connection): State<Connection>, name: Result<Path<String>, PathRejection>) -> Answer {
    let Path(name) = name.map_err(|error| bad_request(error.body_text()))?;
    let asked = name.clone();
    let records = ask(&connection, move |backend| backend.decisions(&asked)).await?;
    json(&records.ok_or_else(|| no_such_vm(&name))?)
}
