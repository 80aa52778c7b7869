//! The upgrade's part of the API: begin one, and read its state.
//!
//! Before: `routes` mounts it. After: the engine passes the request on to its keeper. Promise: a request that is
//! repeated during the upgrade begins no second one.

use axum::extract::{Request, State};
use ballast_api::{UpgradeRequest, UpgradeStat};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::openapi::Invalid;
use super::request::{Answer, Connection, ask, invalid, json, read};

pub(super) fn routes() -> OpenApiRouter<Connection> {
    OpenApiRouter::new().routes(routes!(show, begin))
}

/// The state of the last upgrade.
#[utoipa::path(get, path = "/v1/upgrade", operation_id = "getUpgrade", responses((status = 200, body = UpgradeStat)))]
async fn show(State(connection): State<Connection>) -> Answer {
    json(&ask(&connection, |backend| backend.upgrade()).await?)
}

/// Start an upgrade to another program; returns its state.
#[utoipa::path(
    put, path = "/v1/upgrade", operation_id = "beginUpgrade",
    request_body = UpgradeRequest,
    responses((status = 200, body = UpgradeStat), Invalid),
)]
async fn begin(State(connection): State<Connection>, request: Request) -> Answer {
    let UpgradeRequest { program } = read(&connection, request, "an upgrade").await?;
    json(&ask(&connection, move |backend| backend.begin_upgrade(program)).await?.map_err(invalid)?)
}
