//! The pool's part of the API: what is reserved, and changes to that.
//!
//! Before: `routes` mounts it. After: the engine's pool does it.
//! Promise: a request may be sent again: it says how much there is to be, not how much more.

use axum::Router;
use axum::extract::{Request, State};
use axum::routing::{get, put};
use ballast_api::{LendRequest, PoolRequest};

use super::request::{Answer, Connection, ask, invalid, json, parse, read_body};

pub(super) fn routes() -> Router<Connection> {
    Router::new().route("/v1/pool", get(show).put(reserve)).route("/v1/pool/lent", put(lend))
}

async fn show(State(connection): State<Connection>) -> Answer {
    json(&ask(&connection, |backend| backend.pool()).await?)
}

async fn reserve(State(connection): State<Connection>, request: Request) -> Answer {
    let body = read_body(request.into_body(), connection.body_time).await?;
    let wanted: PoolRequest = parse(&body, "a size of the pool")?;
    json(&ask(&connection, move |backend| backend.reserve_pool(&wanted)).await?.map_err(invalid)?)
}

async fn lend(State(connection): State<Connection>, request: Request) -> Answer {
    let body = read_body(request.into_body(), connection.body_time).await?;
    let wanted: LendRequest = parse(&body, "how much to lend")?;
    json(&ask(&connection, move |backend| backend.lend_pool(&wanted)).await?.map_err(invalid)?)
}
