//! The pool's part of the API: the reserved memory, and changes of it.
//!
//! Before: `routes` mounts it. After: the engine's pool reserves or lends. Promise: a request may be repeated, because
//! it names the total that there should be, not an increase.

use axum::extract::{Request, State};
use ballast_api::{LendRequest, PoolRequest, PoolStat};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::openapi::Invalid;
use super::request::{Answer, Connection, ask, invalid, json, read};

pub(super) fn routes() -> OpenApiRouter<Connection> {
    OpenApiRouter::new().routes(routes!(show, reserve)).routes(routes!(lend))
}

/// The pool of VM memory.
#[utoipa::path(get, path = "/v1/pool", operation_id = "getPool", responses((status = 200, body = PoolStat)))]
async fn show(State(connection): State<Connection>) -> Answer {
    json(&ask(&connection, |backend| backend.pool()).await?)
}

/// Reserve memory of the host for VMs, up to this total; notes say why it is less.
#[utoipa::path(
    put, path = "/v1/pool", operation_id = "reservePool",
    request_body = PoolRequest,
    responses((status = 200, body = PoolStat), Invalid),
)]
async fn reserve(State(connection): State<Connection>, request: Request) -> Answer {
    let wanted: PoolRequest = read(&connection, request, "a size of the pool").await?;
    json(&ask(&connection, move |backend| backend.reserve_pool(&wanted)).await?.map_err(invalid)?)
}

/// Set how much of the pool is lent to the host.
#[utoipa::path(
    put, path = "/v1/pool/lent", operation_id = "lendPool",
    request_body = LendRequest,
    responses((status = 200, body = PoolStat), Invalid),
)]
async fn lend(State(connection): State<Connection>, request: Request) -> Answer {
    let wanted: LendRequest = read(&connection, request, "how much to lend").await?;
    json(&ask(&connection, move |backend| backend.lend_pool(&wanted)).await?.map_err(invalid)?)
}
