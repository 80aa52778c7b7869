//! The governor's part of the API: snapshot, plan, policy, decisions.
//!
//! Before: `routes` mounts it. After: the engine's governor answers or obeys. Promise: a plan that breaks a rule gets a
//! 422 that names the rule.

use axum::extract::{Request, State};
use ballast_api::{DecisionRecord, PlanRequest, PolicyPatch, PolicyStat};
use ballast_policy::{Kind, Plan, Snapshot};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::backend::ChangeError;
use super::openapi::{Invalid, Name, NoSuchVm, PolicyName};
use super::request::{Answer, Connection, Named, Refusal, ask, ask_vm, bad_request, invalid, json, read};

pub(super) fn routes() -> OpenApiRouter<Connection> {
    OpenApiRouter::new()
        .routes(routes!(snapshot))
        .routes(routes!(plan, put_plan))
        .routes(routes!(policy, patch_policy))
        .routes(routes!(decisions))
}

/// The snapshot that policies read.
#[utoipa::path(get, path = "/v1/snapshot", operation_id = "getSnapshot", responses((status = 200, body = Snapshot)))]
async fn snapshot(State(connection): State<Connection>) -> Answer {
    json(&ask(&connection, |backend| backend.snapshot()).await?)
}

/// The plan that would be made now; changes nothing.
#[utoipa::path(
    get, path = "/v1/plan", operation_id = "getPlan",
    params(PolicyName),
    responses((status = 200, body = Plan), Invalid),
)]
async fn plan(State(connection): State<Connection>, request: Request) -> Answer {
    let kind = match request.uri().query() {
        None | Some("") => None,
        Some(query) => Some(kind_of(query)?),
    };
    json(&ask(&connection, move |backend| backend.plan(kind)).await?.map_err(invalid)?)
}

/// The policy in a query such as `policy=maestro`.
fn kind_of(query: &str) -> Result<Kind, Refusal> {
    let word = query.strip_prefix("policy=").filter(|word| !word.contains('&'));
    let word = word.ok_or_else(|| bad_request(format!("{query:?} is not understood: policy=NAME is")))?;
    word.parse().map_err(|why: ballast_base::Invalid| bad_request(why.to_string()))
}

/// Decide, for the length of a lease.
#[utoipa::path(
    put, path = "/v1/plan", operation_id = "putPlan",
    request_body = PlanRequest,
    responses((status = 200, body = Plan), Invalid),
)]
async fn put_plan(State(connection): State<Connection>, request: Request) -> Answer {
    let wanted: PlanRequest = read(&connection, request, "a plan").await?;
    json(&ask(&connection, move |backend| backend.put_plan(wanted)).await?.map_err(invalid)?)
}

/// The governor.
#[utoipa::path(get, path = "/v1/policy", operation_id = "getPolicy", responses((status = 200, body = PolicyStat)))]
async fn policy(State(connection): State<Connection>) -> Answer {
    json(&ask(&connection, |backend| backend.policy()).await?)
}

/// Change the governor; returns its new state.
#[utoipa::path(
    patch, path = "/v1/policy", operation_id = "patchPolicy",
    request_body = PolicyPatch,
    responses((status = 200, body = PolicyStat), Invalid),
)]
async fn patch_policy(State(connection): State<Connection>, request: Request) -> Answer {
    let patch: PolicyPatch = read(&connection, request, "a change to the policy").await?;
    json(&ask(&connection, move |backend| backend.patch_policy(&patch)).await?.map_err(invalid)?)
}

/// The last decisions about one VM, oldest first.
#[utoipa::path(
    get, path = "/v1/vms/{name}/decisions", operation_id = "listDecisions",
    params(Name),
    responses((status = 200, body = Vec<DecisionRecord>), NoSuchVm),
)]
async fn decisions(State(connection): State<Connection>, name: Named) -> Answer {
    ask_vm(&connection, name, |backend, name| backend.decisions(name).ok_or(ChangeError::NotFound)).await
}
