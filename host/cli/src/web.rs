//! `ballast web`: the page in a browser on this machine.
//!
//! Before: `ballastd` listens on its API socket. After: a browser that was given the address has the files of `web/`,
//! and reads the API through this process: only GET is passed on, so nothing can be changed here.
//! Threads: one runtime on the calling thread. Promise: it listens on the loopback interface only. A client without the
//! token in the address gets nothing. A request under another host name is refused, so a page on the internet whose
//! name leads to this machine (DNS rebinding) reads nothing.

use std::io::Read;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, UnixStream};

use crate::args::WebArgs;
use crate::show;

/// The files, by name: their media type and content.
const FILES: [(&str, &str, &[u8]); 6] = [
    ("", "text/html; charset=utf-8", include_bytes!("../../../web/index.html")),
    ("app.js", "text/javascript; charset=utf-8", include_bytes!("../../../web/app.js")),
    ("charts.js", "text/javascript; charset=utf-8", include_bytes!("../../../web/charts.js")),
    ("style.css", "text/css; charset=utf-8", include_bytes!("../../../web/style.css")),
    ("uPlot.min.js", "text/javascript; charset=utf-8", include_bytes!("../../../web/uPlot.min.js")),
    ("uPlot.min.css", "text/css; charset=utf-8", include_bytes!("../../../web/uPlot.min.css")),
];
/// A script of Cockpit, which the page loads if it is shown there.
const COCKPIT: &str = "/base1/cockpit.js";
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// Time within which the daemon's answer begins.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

struct Page {
    socket: PathBuf,
    /// The first part of every path.
    token: String,
    /// Hosts that a request may name.
    hosts: [String; 2],
}

pub fn run(socket: &Path, args: &WebArgs) -> Result<()> {
    let mut random = [0; 16];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut random));
    read.context("Making a token from /dev/urandom")?;
    let token: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("Starting a runtime")?;
    runtime.block_on(async {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).await;
        let listener = listener.with_context(|| format!("Listening on port {} of 127.0.0.1", args.port))?;
        let port = listener.local_addr().context("Asking for the port")?.port();
        let hosts = [format!("127.0.0.1:{port}"), format!("localhost:{port}")];
        let page = Page { socket: socket.to_owned(), token, hosts };
        show::print(&format!("http://127.0.0.1:{port}/{}/\n", page.token))?;
        show::say("open this address in a browser on this machine; who has it may look. Ctrl-C ends it.");
        let router = Router::new().fallback(answer).with_state(Arc::new(page));
        axum::serve(listener, router).await.context("Serving the page")
    })
}

async fn answer(State(page): State<Arc<Page>>, request: Request) -> Response {
    let (head, _) = request.into_parts();
    let mut response = match refuse(&page, &head) {
        Some(status) => status.into_response(),
        None => found(&page, &head).await,
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Why a request gets nothing; `None` if it is allowed.
fn refuse(page: &Page, request: &Parts) -> Option<StatusCode> {
    let host = request.headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("");
    if !page.hosts.iter().any(|known| known == host) {
        return Some(StatusCode::MISDIRECTED_REQUEST);
    }
    (request.method != Method::GET).then_some(StatusCode::METHOD_NOT_ALLOWED)
}

async fn found(page: &Page, request: &Parts) -> Response {
    let path = request.uri.path();
    if path == COCKPIT {
        return file("text/javascript; charset=utf-8", b"");
    }
    let Some(rest) = path.strip_prefix('/').and_then(|path| path.strip_prefix(page.token.as_str())) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let Some(name) = rest.strip_prefix('/') else { return StatusCode::NOT_FOUND.into_response() };
    if let Some(path) = name.strip_prefix("api/") {
        let query = request.uri.query().map_or(String::new(), |query| format!("?{query}"));
        let path = format!("/{path}{query}");
        let asked = forward(page, &path, &request.headers);
        let answer = tokio::time::timeout(ANSWERS_WITHIN, asked).await;
        return match answer {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => (StatusCode::BAD_GATEWAY, format!("{error:#}")).into_response(),
            Err(_) => (StatusCode::GATEWAY_TIMEOUT, "ballastd does not answer").into_response(),
        };
    }
    match FILES.iter().find(|(known, ..)| *known == name) {
        Some((_, media, content)) => file(media, content),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

fn file(media: &'static str, content: &'static [u8]) -> Response {
    ([(header::CONTENT_TYPE, media)], content).into_response()
}

/// Passes a request to the daemon, and its answer back, which may be a stream.
async fn forward(page: &Page, path: &str, headers: &HeaderMap) -> Result<Response> {
    let socket = page.socket.display();
    let stream = UnixStream::connect(&page.socket).await.with_context(|| format!("Connecting to {socket}"))?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.context("Talking to ballastd")?;
    // The task ends with the answer.
    tokio::spawn(connection);
    let mut asked = Request::builder().method(Method::GET).uri(path).header(header::HOST, "ballast");
    const LAST_EVENT: HeaderName = HeaderName::from_static("last-event-id");
    if let Some(last) = headers.get(&LAST_EVENT) {
        asked = asked.header(LAST_EVENT, last);
    }
    let asked = asked.body(Body::empty()).context("Asking ballastd")?;
    let (head, body) = sender.send_request(asked).await.context("Asking ballastd")?.into_parts();
    let mut answer = Response::new(Body::new(body));
    *answer.status_mut() = head.status;
    if let Some(media) = head.headers.get(header::CONTENT_TYPE) {
        answer.headers_mut().insert(header::CONTENT_TYPE, media.clone());
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_takes_less_than_300_kib_and_its_libraries_are_those_of_the_hashes() {
        let sum: usize = FILES.iter().map(|(.., content)| content.len()).sum();
        assert!(sum < 300 << 10, "{sum} bytes");
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../web");
        let mut check = std::process::Command::new("sha256sum");
        let checked = check.args(["--check", "--quiet", "vendored.sha256"]).current_dir(folder).status();
        assert!(checked.expect("coreutils").success(), "a vendored file was changed");
    }
}
