//! The routes of API version 1.
//!
//! Before: `mod` accepted a connection and decided its peer's rights. After: JSON, metrics text or a problem.
//! Threads: any of the runtime; the backend is called on blocking threads.
//! Promise: each refusal is a problem document that says what was wrong.

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{Method, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use ballast_api::{
    DEFAULT_CELLS, HeatPatch, HostStat, KeptVm, LimitsPatch, MAX_CELLS, Problem, VmChange, VmHeat, VmPatch, VmStat,
};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::backend::{Backend, ChangeError};
use super::openapi::{Cells, Invalid, Name, NoSuchVm, NothingKept};
use super::peer::Access;
use super::request::{
    Answer, Connection, Named, Refusal, ask, ask_vm, bad_request, invalid, json, no_such_vm, query_number, read,
};
use super::{adopted, governor, metrics, openapi, past, pool, upgrade};

pub(super) fn routes() -> OpenApiRouter<Connection> {
    OpenApiRouter::with_openapi(openapi::empty())
        .routes(routes!(vms, limit_vms))
        .routes(routes!(vm, patch_vm))
        .routes(routes!(restore, end_restore))
        .routes(routes!(heat, patch_heat))
        .routes(routes!(kept))
        .routes(routes!(forget))
        .merge(adopted::routes())
        .merge(governor::routes())
        .merge(upgrade::routes())
        .merge(pool::routes())
        .merge(past::routes())
        .routes(routes!(host))
        .routes(routes!(document))
        .routes(routes!(metrics_page))
}

pub(super) fn document_json() -> String {
    openapi::to_json(routes().into_openapi())
}

/// The routes, made only once; each connection has its own state.
pub(super) fn router() -> Router<Connection> {
    Router::from(routes()).fallback(not_found).method_not_allowed_fallback(wrong_method)
}

pub(super) fn of_connection(router: Router<Connection>, state: Connection) -> Router {
    router.layer(middleware::from_fn_with_state(state.clone(), check_access)).with_state(state)
}

async fn check_access(State(connection): State<Connection>, request: Request, next: Next) -> Response {
    let looks = matches!(*request.method(), Method::GET | Method::HEAD);
    let refusal = match connection.access {
        Access::Write => None,
        Access::Read if looks => None,
        Access::Read => Some("This user may look but not change; changing needs root or the daemon's own user"),
        Access::Denied => Some("This user may not use the API; looking needs membership in the daemon's API group"),
    };
    match refusal {
        None => next.run(request).await,
        Some(detail) => Refusal(Problem::new(403, Problem::FORBIDDEN, "Forbidden", detail)).into_response(),
    }
}

/// Every VM.
#[utoipa::path(get, path = "/v1/vms", operation_id = "listVms", responses((status = 200, body = Vec<VmStat>)))]
async fn vms(State(connection): State<Connection>) -> Answer {
    json(&ask(&connection, |backend| backend.vms()).await?)
}

/// One VM.
#[utoipa::path(
    get, path = "/v1/vms/{name}", operation_id = "getVm",
    params(Name),
    responses((status = 200, body = VmStat), NoSuchVm),
)]
async fn vm(State(connection): State<Connection>, name: Named) -> Answer {
    ask_vm(&connection, name, |backend, name| backend.vm(name).ok_or(ChangeError::NotFound)).await
}

/// How hot the memory of a VM is.
#[utoipa::path(
    get, path = "/v1/vms/{name}/heat", operation_id = "getVmHeat",
    params(Name, Cells),
    responses((status = 200, body = VmHeat), NoSuchVm),
)]
async fn heat(State(connection): State<Connection>, name: Named, uri: Uri) -> Answer {
    let cells = query_number(&uri, "cells", DEFAULT_CELLS as u64)?;
    if !(1..=MAX_CELLS as u64).contains(&cells) {
        return Err(bad_request(format!("{cells} cells are asked for; 1 to {MAX_CELLS} are possible")));
    }
    let cells = cells as usize;
    ask_vm(&connection, name, move |backend, name| backend.heat(name, cells).ok_or(ChangeError::NotFound)).await
}

/// Change how a VM is tracked; returns its heat.
#[utoipa::path(
    patch, path = "/v1/vms/{name}/heat", operation_id = "patchVmHeat",
    params(Name),
    request_body = HeatPatch,
    responses((status = 200, body = VmHeat), NoSuchVm),
)]
async fn patch_heat(State(connection): State<Connection>, name: Named, request: Request) -> Answer {
    let patch: HeatPatch = read(&connection, request, "a change to how a VM is tracked").await?;
    let heat = move |backend: &dyn Backend, name: &str| match patch.track {
        Some(track) => backend.set_track(name, track),
        None => backend.heat(name, DEFAULT_CELLS),
    };
    ask_vm(&connection, name, move |backend, name| heat(backend, name).ok_or(ChangeError::NotFound)).await
}

/// Change one VM; returns its new state.
#[utoipa::path(
    patch, path = "/v1/vms/{name}", operation_id = "patchVm",
    params(Name),
    request_body = VmPatch,
    responses((status = 200, body = VmStat), NoSuchVm, Invalid),
)]
async fn patch_vm(State(connection): State<Connection>, name: Named, request: Request) -> Answer {
    let patch: VmPatch = read(&connection, request, "a change to a VM").await?;
    let change = move |backend: &dyn Backend, name: &str| match patch == VmPatch::default() {
        true => backend.vm(name).ok_or(ChangeError::NotFound),
        false => backend.patch_vm(name, &patch),
    };
    ask_vm(&connection, name, change).await
}

/// Set or remove the limit of several VMs, or of all; returns the result for each.
#[utoipa::path(
    patch, path = "/v1/vms", operation_id = "limitVms",
    request_body = LimitsPatch,
    responses((status = 200, body = Vec<VmChange>)),
)]
async fn limit_vms(State(connection): State<Connection>, request: Request) -> Answer {
    let LimitsPatch { vms, limit_bytes } = read(&connection, request, "one limit for several VMs").await?;
    let patch = VmPatch { limit_bytes: Some(limit_bytes), ..VmPatch::default() };
    let changes = ask(&connection, move |backend| {
        let all = || backend.vms().into_iter().map(|vm| vm.name).collect();
        let names: Vec<String> = vms.unwrap_or_else(all);
        let change = |(name, changed): (String, Result<_, _>)| {
            let (vm, problem) = match changed {
                Ok(vm) => (Some(vm), None),
                Err(ChangeError::NotFound) => (None, Some(no_such_vm(&name).0)),
                Err(ChangeError::Invalid(why)) => (None, Some(invalid(why).0)),
            };
            VmChange { name, vm, problem }
        };
        let changed = backend.patch_vms(&names, &patch);
        names.into_iter().zip(changed).map(change).collect::<Vec<_>>()
    });
    json(&changes.await?)
}

/// Restore all of one VM and keep it in memory, whatever its limit; returns its state now.
#[utoipa::path(
    put, path = "/v1/vms/{name}/restore", operation_id = "restoreVm",
    params(Name),
    responses((status = 200, body = VmStat), NoSuchVm, Invalid),
)]
async fn restore(State(connection): State<Connection>, name: Named) -> Answer {
    ask_vm(&connection, name, |backend, name| backend.keep(name, true)).await
}

/// End that; the limit of the VM counts again.
#[utoipa::path(
    delete, path = "/v1/vms/{name}/restore", operation_id = "endRestore",
    params(Name),
    responses((status = 200, body = VmStat), NoSuchVm, Invalid),
)]
async fn end_restore(State(connection): State<Connection>, name: Named) -> Answer {
    ask_vm(&connection, name, |backend, name| backend.keep(name, false)).await
}

/// What is kept of VMs for the next time that they attach.
#[utoipa::path(
    get, path = "/v1/kept", operation_id = "listKept",
    responses((status = 200, body = Vec<KeptVm>), Invalid),
)]
async fn kept(State(connection): State<Connection>) -> Answer {
    json(&ask(&connection, |backend| backend.kept()).await?.map_err(invalid)?)
}

/// Forget what is kept of VMs of this name or UUID; returns it.
#[utoipa::path(
    delete, path = "/v1/kept/{name}", operation_id = "forgetVm",
    params(Name),
    responses((status = 200, body = Vec<KeptVm>), NothingKept, Invalid),
)]
async fn forget(State(connection): State<Connection>, Named(vm): Named) -> Answer {
    let asked = vm.clone();
    let forgotten = ask(&connection, move |backend| backend.forget(&asked)).await?.map_err(invalid)?;
    if forgotten.is_empty() {
        let detail = format!("Nothing is kept of a VM with the name or UUID {vm:?}; GET /v1/kept lists what there is");
        return Err(Refusal(Problem::new(404, Problem::NOT_FOUND, "Not found", detail)));
    }
    json(&forgotten)
}

/// The host and Ballast.
#[utoipa::path(get, path = "/v1/host", operation_id = "getHost", responses((status = 200, body = HostStat)))]
async fn host(State(connection): State<Connection>) -> Answer {
    json(&ask(&connection, |backend| backend.host()).await?)
}

/// This document.
#[utoipa::path(
    get, path = "/v1/openapi.json", operation_id = "getOpenapi",
    responses((status = 200, body = serde_json::Value)),
)]
async fn document() -> Answer {
    Ok(([(header::CONTENT_TYPE, "application/json")], document_json()).into_response())
}

/// Prometheus metrics.
#[utoipa::path(
    get, path = "/metrics", operation_id = "getMetrics",
    responses((status = 200, content_type = metrics::MEDIA_TYPE, body = String)),
)]
async fn metrics_page(State(connection): State<Connection>) -> Answer {
    let page = ask(&connection, metrics::page).await?;
    Ok(([(header::CONTENT_TYPE, metrics::MEDIA_TYPE)], page).into_response())
}

async fn not_found(request: Request) -> Refusal {
    let detail = format!("Nothing is at {:?}; GET /v1/openapi.json lists what there is", request.uri().path());
    Refusal(Problem::new(404, Problem::NOT_FOUND, "Not found", detail))
}

async fn wrong_method(request: Request) -> Refusal {
    let detail = format!("{:?} does not take {}", request.uri().path(), request.method());
    Refusal(Problem::new(405, Problem::METHOD, "Method not allowed", detail))
}
