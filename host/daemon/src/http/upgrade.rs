//! The upgrade's part of the API: begin one, and read its state.
//!
//! Before: `routes` mounts it. After: the engine passes it on to its keeper.
//! Promise: a request that is sent again while that upgrade is under way begins no second one.

use axum::Router;
use axum::extract::{Request, State};
use axum::routing::get;
use ballast_api::UpgradeRequest;

use super::request::{Answer, Connection, ask, invalid, json, parse, read_body};

pub(super) fn routes() -> Router<Connection> {
    Router::new().route("/v1/upgrade", get(show).put(begin))
}

async fn show(State(connection): State<Connection>) -> Answer {
    json(&ask(&connection, |backend| backend.upgrade()).await?)
}

async fn begin(State(connection): State<Connection>, request: Request) -> Answer {
    let body = read_body(request.into_body(), connection.body_time).await?;
    let UpgradeRequest { program } = parse(&body, "an upgrade")?;
    json(&ask(&connection, move |backend| backend.begin_upgrade(program)).await?.map_err(invalid)?)
}
