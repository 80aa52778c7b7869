//! Sends valid and invalid requests for each operation of the document, to a backend that obeys and to one that
//! refuses: each status must be in the document, and each status of the document must occur.

use std::collections::BTreeSet;

use serde_json::Value;

use super::*;

/// Bodies: for each operation that takes one, one of these is valid; the last one is always too long.
fn bodies() -> Vec<String> {
    let right = ["{}", r#"{"limit_bytes":null}"#, r#"{"track":true}"#, r#"{"policy":"x","lease_ms":1,"limits":[]}"#];
    let long = " ".repeat(ballast_api::MAX_BODY_BYTES) + "{}";
    right.into_iter().chain([r#"{"bytes":1}"#, "[]"]).map(str::to_owned).chain([long]).collect()
}

fn request(method: &str, path: &str, body: &str) -> Vec<u8> {
    let method = method.to_uppercase();
    format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into()
}

/// The status of an answer. The rest is not read, because a stream continues.
fn status_of(mut stream: Stream, request: &[u8]) -> String {
    let _ = stream.write_all(request);
    let mut start = [0; 12];
    stream.read_exact(&mut start).expect("an answer");
    String::from_utf8_lossy(&start[9..]).into_owned()
}

fn walk(servers: &[Server], impatient: &Server, method: &str, path: &str, operation: &Value) -> BTreeSet<String> {
    let names: &[&str] = if path.contains("{name}") { &["web", "nobody", "%ff"] } else { &[""] };
    let queries: &[&str] = if operation["parameters"].is_array() { &["", "?unknown=1"] } else { &[""] };
    let has_body = operation["requestBody"].is_object();
    let bodies = if has_body { bodies() } else { vec![String::new()] };
    let mut seen = BTreeSet::new();
    for server in servers {
        for name in names {
            let place = path.replace("{name}", name);
            let asked = queries.iter().map(|query| request(method, &format!("{place}{query}"), &bodies[0]));
            let asked = asked.chain(bodies[1..].iter().map(|body| request(method, &place, body)));
            seen.extend(asked.map(|bytes| status_of(Stream::connect(&server.socket).expect("connect"), &bytes)));
        }
    }
    if has_body {
        let whole = request(method, &path.replace("{name}", "web"), "{}");
        let stream = Stream::connect(&impatient.socket).expect("connect");
        seen.insert(status_of(stream, &whole[..whole.len() - 1]));
    }
    seen
}

#[test]
fn a_walk_of_all_routes_sees_exactly_the_statuses_of_the_document() {
    let servers = [false, true].map(|refuses| start(Canned::new(refuses), BOUNDS));
    let impatient = start(Canned::new(false), Bounds { body: Duration::from_millis(1), ..BOUNDS });
    let document: Value = serde_json::from_str(&routes::document_json()).expect("JSON");
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("methods") {
            let mut seen = walk(&servers, &impatient, method, path, operation);
            let place = path.replace("{name}", "web");
            seen.insert(status_for(Access::Denied, request(method, &place, "")).to_string());
            // These are sent before any handler is called, and have their own tests: a failure without a backend, and
            // no place.
            seen.extend(["500", "503"].map(str::to_owned));
            let has: BTreeSet<String> =
                operation["responses"].as_object().expect("responses").keys().cloned().collect();
            assert_eq!(seen, has, "{method} {path}: on the left those that came, on the right the document's");
        }
    }
}
