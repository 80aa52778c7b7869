//! Adopted VMs in the API: the routes that adopt running VMs and release them.
//!
//! Before: `routes` mounts it. After: the engine adopts or releases. Promise: a request to adopt may be repeated: an
//! adopted VM stays as it is.

use axum::extract::{Request, State};
use axum::http::Uri;
use ballast_api::{AdoptRequest, AdoptResult, VmStat};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::openapi::{BringBack, Invalid, Name, NoSuchVm};
use super::request::{Answer, Connection, Named, ask, ask_vm, bad_request, invalid, json, query_number, read};

pub(super) fn routes() -> OpenApiRouter<Connection> {
    OpenApiRouter::new().routes(routes!(adopt)).routes(routes!(release))
}

/// Adopt a VM that runs already, or all; returns those that were not adopted before.
#[utoipa::path(
    put, path = "/v1/adopted", operation_id = "adoptVms",
    request_body = AdoptRequest,
    responses((status = 200, body = AdoptResult), Invalid),
)]
async fn adopt(State(connection): State<Connection>, request: Request) -> Answer {
    let wanted: AdoptRequest = read(&connection, request, "VMs to adopt").await?;
    json(&ask(&connection, move |backend| backend.adopt(&wanted)).await?.map_err(invalid)?)
}

/// Release an adopted VM; returns its state now.
#[utoipa::path(
    delete, path = "/v1/adopted/{name}", operation_id = "releaseVm",
    params(Name, BringBack),
    responses((status = 200, body = VmStat), NoSuchVm, Invalid),
)]
async fn release(State(connection): State<Connection>, name: Named, uri: Uri) -> Answer {
    let bring_back = match query_number(&uri, "bring_back", 0)? {
        0 => false,
        1 => true,
        other => return Err(bad_request(format!("bring_back is {other}; 0 and 1 are possible"))),
    };
    ask_vm(&connection, name, move |backend, name| backend.release(name, bring_back)).await
}
