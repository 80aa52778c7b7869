//! Events and history in the API: events, as a list or a stream, and samples for charts.
//!
//! Before: `routes` mounts it. After: JSON, or server-sent events.
//! Threads: a stream is a task; it asks the backend on a blocking thread when there is a new event. Units: in the
//! names.
//! Promise: a stream ends by itself before its connection must, and a peer that returns with the number of the last
//! event that it read (`Last-Event-ID`, or `after`) misses none of the last 1,000.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, Uri};
use axum::response::sse::{self, Sse};
use axum::response::{IntoResponse, Response};
use ballast_api::{Event, History, VmHistory};
use futures_util::stream;
use tokio::sync::watch;
use tokio::time::Instant;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::backend::{Backend, ChangeError};
use super::openapi::{AfterEvent, Decisions, FewMinutes, Minutes, Name, NoSuchVm};
use super::request::{Answer, Connection, Named, Refusal, ask, ask_vm, bad_request, json, query_number, query_numbers};

/// Duration of a stream. A connection has at most a minute.
const STREAM: Duration = Duration::from_secs(50);
/// Time between lines without content, which show whether the peer still exists.
const ALIVE: Duration = Duration::from_secs(10);
/// Time after which a peer reconnects.
const AGAIN: Duration = Duration::from_millis(500);
/// Most minutes of a history, and the default.
const MINUTES: (u64, u64) = (24 * 60, 60);
/// Most minutes of a list of VMs' histories, and the default.
const LIST_MINUTES: (u64, u64) = (60, 10);

pub(super) fn routes() -> OpenApiRouter<Connection> {
    OpenApiRouter::new()
        .routes(routes!(events))
        .routes(routes!(follow))
        .routes(routes!(of_host))
        .routes(routes!(of_vms))
        .routes(routes!(of_vm))
}

/// Recent events, oldest first.
#[utoipa::path(
    get, path = "/v1/events", operation_id = "listEvents",
    params(AfterEvent, Decisions),
    responses((status = 200, body = Vec<Event>)),
)]
async fn events(State(connection): State<Connection>, uri: Uri) -> Answer {
    let [after, decisions] = query_numbers(&uri, ["after", "decisions"])?;
    let answer = move |backend: &dyn Backend| backend.events(after.unwrap_or(0), decisions == Some(1));
    json(&ask(&connection, answer).await?)
}

struct Follower {
    connection: Connection,
    watch: watch::Receiver<u64>,
    after: u64,
    decisions: bool,
    read: VecDeque<Event>,
    until: Instant,
}

/// Events as they come, as server-sent events; ends after 50 s, and `Last-Event-ID` goes on.
#[utoipa::path(
    get, path = "/v1/events/stream", operation_id = "followEvents",
    params(AfterEvent, Decisions),
    responses((status = 200, content_type = "text/event-stream", body = String)),
)]
async fn follow(State(connection): State<Connection>, uri: Uri, headers: HeaderMap) -> Result<Response, Refusal> {
    let [asked, decisions] = query_numbers(&uri, ["after", "decisions"])?;
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok()?.parse().ok());
    let follower = Follower {
        watch: connection.backend.event_watch(),
        connection,
        after: last.or(asked).unwrap_or(0),
        decisions: decisions == Some(1),
        read: VecDeque::new(),
        until: Instant::now() + STREAM,
    };
    let stream = stream::unfold(follower, next);
    Ok(Sse::new(stream).keep_alive(sse::KeepAlive::new().interval(ALIVE)).into_response())
}

/// The next event, when there is one; `None` at the end of the stream.
async fn next(mut follower: Follower) -> Option<(Result<sse::Event, Infallible>, Follower)> {
    loop {
        if let Some(event) = follower.read.pop_front() {
            follower.after = event.id;
            let text = serde_json::to_string(&event).expect("an event serialises");
            let said = sse::Event::default().id(event.id.to_string()).retry(AGAIN).data(text);
            return Some((Ok(said), follower));
        }
        let (after, decisions) = (follower.after, follower.decisions);
        let _ = follower.watch.borrow_and_update();
        follower.read = ask(&follower.connection, move |backend| backend.events(after, decisions)).await.ok()?.into();
        if follower.read.is_empty() {
            tokio::time::timeout_at(follower.until, follower.watch.changed()).await.ok()?.ok()?;
        }
    }
}

fn minutes(uri: &Uri, (most, default): (u64, u64)) -> Result<u64, Refusal> {
    match query_number(uri, "minutes", default)? {
        minutes if (1..=most).contains(&minutes) => Ok(minutes),
        minutes => Err(bad_request(format!("{minutes} minutes are asked for; 1 to {most} are possible"))),
    }
}

/// The past of the host.
#[utoipa::path(
    get, path = "/v1/history", operation_id = "getHostHistory",
    params(Minutes),
    responses((status = 200, body = History)),
)]
async fn of_host(State(connection): State<Connection>, uri: Uri) -> Answer {
    let minutes = minutes(&uri, MINUTES)?;
    json(&ask(&connection, move |backend| backend.host_history(minutes)).await?)
}

/// The past of all VMs.
#[utoipa::path(
    get, path = "/v1/history/vms", operation_id = "listVmHistories",
    params(FewMinutes),
    responses((status = 200, body = Vec<VmHistory>)),
)]
async fn of_vms(State(connection): State<Connection>, uri: Uri) -> Answer {
    let minutes = minutes(&uri, LIST_MINUTES)?;
    let all = ask(&connection, move |backend| {
        let of = |name: String| Some(VmHistory { history: backend.vm_history(&name, minutes)?, name });
        backend.vms().into_iter().filter_map(|vm| of(vm.name)).collect::<Vec<_>>()
    });
    json(&all.await?)
}

/// The past of one VM.
#[utoipa::path(
    get, path = "/v1/vms/{name}/history", operation_id = "getVmHistory",
    params(Name, Minutes),
    responses((status = 200, body = History), NoSuchVm),
)]
async fn of_vm(State(connection): State<Connection>, name: Named, uri: Uri) -> Answer {
    let minutes = minutes(&uri, MINUTES)?;
    ask_vm(&connection, name, move |backend, name| backend.vm_history(name, minutes).ok_or(ChangeError::NotFound)).await
}
