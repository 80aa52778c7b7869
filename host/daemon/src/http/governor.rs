//! The governor's part of the API: snapshot, plan, policy, decisions.
//!
//! Before: `routes` mounts it. After: the engine's governor serves it.
//! Promise: as for the other routes; a plan that breaks a rule is 422 with the rule.

use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::routing::get;
use ballast_api::{PlanRequest, PolicyPatch};
use ballast_policy::Kind;

use super::request::{Answer, Connection, Refusal, ask, bad_request, invalid, json, no_such_vm, parse, read_body};

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
