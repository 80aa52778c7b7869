//! Adopted VMs in the API: VMs that run already are adopted, and released.
//!
//! Before: `routes` mounts it. After: the engine does it.
//! Promise: a request to adopt may be sent again: what is adopted already stays as it is.

use axum::Router;
use axum::extract::{Path, Request, State, rejection::PathRejection};
use axum::http::Uri;
use axum::routing::{delete, put};
use ballast_api::AdoptRequest;

use super::backend::ChangeError;
use super::request::{Answer, Connection, ask, bad_request, invalid, json, no_such_vm, parse, query_number, read_body};

pub(super) fn routes() -> Router<Connection> {
    Router::new().route("/v1/adopted", put(adopt)).route("/v1/adopted/{name}", delete(release))
}

async fn adopt(State(connection): State<Connection>, request: Request) -> Answer {
    let body = read_body(request.into_body(), connection.body_time).await?;
    let wanted: AdoptRequest = parse(&body, "VMs to adopt")?;
    json(&ask(&connection, move |backend| backend.adopt(&wanted)).await?.map_err(invalid)?)
}

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
