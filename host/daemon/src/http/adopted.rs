//! Adopted VMs in the API: VMs that run already are adopted, and released.
//!
//! Before: `routes` mounts it. After: the engine does it.
//! Promise: a request to adopt may be sent again: what is adopted already stays as it is.

use axum::extract::{Path, Request, State, rejection::PathRejection};
use axum::http::Uri;
use ballast_api::{AdoptRequest, AdoptResult, VmStat};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::backend::ChangeError;
use super::openapi::{BringBack, Invalid, Name, NoSuchVm};
use super::request::{Answer, Connection, ask, bad_request, invalid, json, no_such_vm, parse, query_number, read_body};

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
    let body = read_body(request.into_body(), connection.body_time).await?;
    let wanted: AdoptRequest = parse(&body, "VMs to adopt")?;
    json(&ask(&connection, move |backend| backend.adopt(&wanted)).await?.map_err(invalid)?)
}

/// Release an adopted VM; returns its state now.
#[utoipa::path(
    delete, path = "/v1/adopted/{name}", operation_id = "releaseVm",
    params(Name, BringBack),
    responses((status = 200, body = VmStat), NoSuchVm, Invalid),
)]
async fn release(State(connection): State<Connection>, name: Result<Path<String>, PathRejection>, uri: Uri) -> Answer {
    let Path(name) = name.map_err(|error| bad_request(error.body_text()))?;
    let bring_back = match query_number(&uri, "bring_back", 0)? {
        0 => false,
        1 => true,
        other => return Err(bad_request(format!("bring_back is {other}; 0 and 1 are possible"))),
    };
    let asked = name.clone();
    match ask(&connection, move |backend| backend.release(&asked, bring_back)).await? {
        Ok(vm) => json(&vm),
        Err(ChangeError::NotFound) => Err(no_such_vm(&name)),
        Err(ChangeError::Invalid(why)) => Err(invalid(why)),
    }
}
