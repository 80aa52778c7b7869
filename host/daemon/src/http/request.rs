//! Common parts of all routes: the connection, a request's body as data, responses and refusals.
//!
//! Before: a connection was accepted. After: the routes read, ask the backend and respond with these functions.
//! Threads: any of the runtime; the backend is called on blocking threads.
//! Promise: each refusal is a problem document that says what was wrong. A body has a bounded length and time.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use ballast_api::{MAX_BODY_BYTES, Problem};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;

use super::backend::{Backend, ChangeError};
use super::peer::Access;

/// The answer to a connection for which there is no place.
pub(super) const BUSY_ANSWER: &str = concat!(
    "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/problem+json\r\nconnection: close\r\n",
    "retry-after: 1\r\ncontent-length: 125\r\n\r\n",
    r#"{"type":"urn:ballast:problem:busy","title":"Busy","status":503,"#,
    r#""detail":"Too many connections are open; ask again later"}"#,
    "    "
);

#[derive(Clone)]
pub(super) struct Connection {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) access: Access,
    pub(super) body_time: Duration,
    /// One permit: readers' requests are answered one at a time.
    pub(super) readers: Arc<Semaphore>,
}

pub(super) struct Refusal(pub(super) Problem);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&self.0).expect("a problem serialises");
        (status, [(header::CONTENT_TYPE, Problem::MEDIA_TYPE)], body).into_response()
    }
}

pub(super) type Answer = Result<Response, Refusal>;

/// Calls the backend on a thread that may block. A panic there becomes a 500.
pub(super) async fn ask<T: Send + 'static>(
    connection: &Connection,
    call: impl FnOnce(&dyn Backend) -> T + Send + 'static,
) -> Result<T, Refusal> {
    let backend = Arc::clone(&connection.backend);
    let _permit = match connection.access {
        Access::Write => None,
        // The semaphore is never closed.
        _ => connection.readers.acquire().await.ok(),
    };
    tokio::task::spawn_blocking(move || call(&*backend)).await.map_err(|error| {
        tracing::error!(%error, "answering an API request");
        Refusal(Problem::new(500, Problem::INTERNAL, "Internal error", "The engine failed to answer; see its log"))
    })
}

/// Calls the backend for the VM with the name in the path.
pub(super) async fn ask_vm<T: Serialize + Send + 'static>(
    connection: &Connection,
    Named(name): Named,
    call: impl FnOnce(&dyn Backend, &str) -> Result<T, ChangeError> + Send + 'static,
) -> Answer {
    let asked = name.clone();
    match ask(connection, move |backend| call(backend, &asked)).await? {
        Ok(found) => json(&found),
        Err(ChangeError::NotFound) => Err(no_such_vm(&name)),
        Err(ChangeError::Invalid(why)) => Err(invalid(why)),
    }
}

pub(super) struct Named(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let name = Path::from_request_parts(parts, state).await;
        name.map(|Path(name)| Self(name)).map_err(|error| bad_request(error.body_text()))
    }
}

pub(super) fn json<T: Serialize>(value: &T) -> Answer {
    // Serialising the API's plain data cannot fail (a number that is not finite becomes null).
    let body = serde_json::to_vec(value).expect("API types serialise");
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

pub(super) fn no_such_vm(name: &str) -> Refusal {
    Refusal(Problem::new(404, Problem::NO_SUCH_VM, "No such VM", format!("No VM is named {name:?}")))
}

pub(super) fn bad_request(detail: impl Into<String>) -> Refusal {
    Refusal(Problem::new(400, Problem::BAD_REQUEST, "Bad request", detail))
}

pub(super) fn invalid(why: impl std::fmt::Display) -> Refusal {
    Refusal(Problem::new(422, Problem::INVALID, "Invalid value", format!("{why:#}")))
}

/// The body of a request, a JSON object, as plain data.
pub(super) async fn read<T: DeserializeOwned>(
    connection: &Connection,
    request: Request,
    what: &str,
) -> Result<T, Refusal> {
    let body = read_body(request.into_body(), connection.body_time).await?;
    // serde would also accept an array as an object, with the fields in order.
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(bad_request(format!("The body is not {what}: a JSON object is needed")));
    }
    serde_json::from_slice(&body).map_err(|error| bad_request(format!("The body is not {what}: {error}")))
}

async fn read_body(body: Body, time: Duration) -> Result<Vec<u8>, Refusal> {
    let whole = Limited::new(body, MAX_BODY_BYTES).collect();
    match tokio::time::timeout(time, whole).await {
        Ok(Ok(body)) => Ok(body.to_bytes().into()),
        Ok(Err(error)) if is_too_long(&*error) => {
            let detail = format!("A request body may have at most {MAX_BODY_BYTES} bytes");
            Err(Refusal(Problem::new(413, Problem::TOO_LARGE, "Body too large", detail)))
        }
        Ok(Err(error)) => Err(bad_request(format!("The body could not be read: {error}"))),
        Err(_) => {
            let detail = format!("The body did not arrive within {} s", time.as_secs_f32());
            Err(Refusal(Problem::new(408, Problem::TIMEOUT, "Timeout", detail)))
        }
    }
}

fn is_too_long(error: &(dyn Error + 'static)) -> bool {
    error.is::<LengthLimitError>() || error.source().is_some_and(is_too_long)
}

pub(super) fn query_number(uri: &Uri, key: &str, default: u64) -> Result<u64, Refusal> {
    query_numbers(uri, [key]).map(|[number]| number.unwrap_or(default))
}

pub(super) fn query_numbers<const N: usize>(uri: &Uri, keys: [&str; N]) -> Result<[Option<u64>; N], Refusal> {
    let mut numbers = [None; N];
    for pair in uri.query().unwrap_or("").split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let Some(at) = keys.iter().position(|key| *key == name) else {
            let known = keys.map(|key| format!("{key:?}")).join(" or ");
            return Err(bad_request(format!("The query has {pair:?}; only {known} with a number is known")));
        };
        let number = value.parse().map_err(|_| bad_request(format!("{pair:?} is not a whole number")))?;
        numbers[at] = Some(number);
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busy_answer_is_a_problem_with_the_right_length() {
        let (head, body) = BUSY_ANSWER.split_once("\r\n\r\n").expect("head and body");
        let problem: Problem = serde_json::from_str(body).expect("a problem");
        assert_eq!((problem.status, problem.kind.as_str()), (503, Problem::BUSY));
        assert!(head.contains(&format!("content-length: {}", body.len())), "the body has {} bytes", body.len());
    }
}
