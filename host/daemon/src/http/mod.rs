//! The HTTP/JSON API and the metrics page, on a Unix socket.
//!
//! Before: the engine implements [`Backend`] over its counters. After: `ballast-api`'s client, curl, Prometheus.
//! Threads: connections are tasks of the caller's runtime; each backend call runs on a blocking thread, so a call that
//! waits for a lock delays only its own request. Fault workers never come here.
//! Promise: no peer, slow or silent, keeps the server from serving the next.

mod adopted;
mod backend;
mod gate;
mod governor;
mod metrics;
mod openapi;
mod past;
mod peer;
mod pool;
mod request;
mod routes;
mod upgrade;

use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use gate::Inside;
use request::Connection;

pub use backend::{Backend, ChangeError, Histogram};
pub use gate::Gate;
pub use peer::{Access, PeerPolicy};

/// Timeouts and limits. Owners, readers and users without access have separate places, so that readers, or users
/// without access, cannot keep the operator out.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// For a complete request head, and between requests.
    head: Duration,
    /// For a complete request body.
    body: Duration,
    /// For a connection, which ends with the response after that time.
    connection: Duration,
    /// For the peer to read that last response.
    last_answer: Duration,
    /// Most connections of owners, of readers and of users without access.
    places: [usize; 3],
}

const BOUNDS: Bounds = Bounds {
    head: Duration::from_secs(10),
    body: Duration::from_secs(10),
    connection: Duration::from_secs(60),
    last_answer: Duration::from_secs(10),
    places: [64, 32, 4],
};

/// How long a connection may take for its last response once the gate is closed. A peer that is cut repeats its
/// request.
pub const GATE_CLOSES_WITHIN: Duration = Duration::from_millis(500);
/// Time within which a new connection must send its first request.
const REQUEST_COMES_WITHIN: Duration = Duration::from_millis(20);
/// Longest request head: request line and headers.
const MAX_HEAD_BYTES: usize = 16 * 1024;
const MAX_HEADERS: usize = 64;
/// Pause after an accept that failed for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

/// Serves the API to peers that connect to `listener`, while the future is polled. A dropped future accepts no more
/// peers; tasks of their own complete the responses. While the gate is closed, no peer is let in.
pub async fn serve(listener: UnixListener, backend: Arc<dyn Backend>, allowed: PeerPolicy, gate: Gate) {
    serve_within(listener, backend, allowed, gate, BOUNDS).await;
}

async fn serve_within(
    listener: UnixListener,
    backend: Arc<dyn Backend>,
    allowed: PeerPolicy,
    gate: Gate,
    bounds: Bounds,
) {
    let readers = Arc::new(Semaphore::new(1));
    let router = routes::router();
    let places = bounds.places.map(|count| Arc::new(Semaphore::new(count)));
    loop {
        gate.opened().await;
        // The thread that closes the gate must not miss a connection between the listener and its task.
        let _inside = gate.enter();
        loop {
            let accepted = tokio::select! {
                biased;
                () = gate.closed() => break,
                accepted = listener.accept() => accepted,
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "accepting an API connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let access = allowed.access_of(&stream);
            match Arc::clone(&places[access as usize]).try_acquire_owned() {
                Ok(place) => {
                    let (backend, readers) = (Arc::clone(&backend), Arc::clone(&readers));
                    let state = Connection { backend, access, body_time: bounds.body, readers };
                    let service = TowerToHyperService::new(routes::of_connection(router.clone(), state));
                    tokio::spawn(connection(stream, service, bounds, (place, gate.enter())));
                }
                Err(_) => drop(stream.try_write(request::BUSY_ANSWER.as_bytes())),
            }
        }
    }
}

async fn connection(
    stream: UnixStream,
    service: TowerToHyperService<axum::Router>,
    bounds: Bounds,
    (_place, mut inside): (OwnedSemaphorePermit, Inside),
) {
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.head)
        .max_headers(MAX_HEADERS)
        .max_header_size(MAX_HEAD_BYTES)
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(served);
    let last_answer = async {
        tokio::select! {
            () = tokio::time::sleep(bounds.connection) => bounds.last_answer,
            () = inside.closed() => {
                tokio::time::sleep(REQUEST_COMES_WITHIN).await;
                GATE_CLOSES_WITHIN
            }
        }
    };
    let ended = tokio::select! {
        ended = &mut served => ended,
        time = last_answer => {
            served.as_mut().graceful_shutdown();
            tokio::time::timeout(time, served).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an API connection ended");
    }
}

#[cfg(test)]
mod tests;
