//! The API of a real daemon beside its OpenAPI document: each answer has a status of the document, and the fields that
//! the document gives it, and no others.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::Value;

use common::Daemon;
use common::guest::Guest;

fn ask(daemon: &Daemon, method: &str, path: &str, body: &str) -> (String, String) {
    let mut stream = UnixStream::connect(daemon.dir().join("api.sock")).expect("connect");
    let head = format!("{method} {path} HTTP/1.1\r\nHost: b\r\nConnection: close\r\n");
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).expect("sent");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    let text = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
    (head[9..12].to_owned(), body.to_owned())
}

fn is_of(kind: &Value, value: &Value) -> bool {
    match kind {
        Value::Array(kinds) => kinds.iter().any(|kind| is_of(kind, value)),
        Value::String(kind) => match kind.as_str() {
            "null" => value.is_null(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_u64() || value.is_i64(),
            "number" => value.is_number(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            other => panic!("the document has the type {other:?}"),
        },
        _ => true,
    }
}

fn fits(document: &Value, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    if let Some(target) = schema["$ref"].as_str() {
        return fits(document, document.pointer(&target[1..]).ok_or(target)?, value, at);
    }
    if let Some(choices) = schema["oneOf"].as_array() {
        let tried: Vec<_> = choices.iter().map(|choice| fits(document, choice, value, at)).collect();
        return if tried.iter().any(Result::is_ok) { Ok(()) } else { Err(format!("{at}: none of {tried:?}")) };
    }
    if !is_of(&schema["type"], value) || schema["enum"].as_array().is_some_and(|known| !known.contains(value)) {
        return Err(format!("{at} is {value}, not {schema}"));
    }
    if let (Some(items), Some(list)) = (schema.get("items"), value.as_array()) {
        list.iter().enumerate().try_for_each(|(nr, one)| fits(document, items, one, &format!("{at}[{nr}]")))?;
    }
    let (Some(known), Some(object)) = (schema["properties"].as_object(), value.as_object()) else { return Ok(()) };
    let needed = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    if let Some(missing) = needed.into_iter().find(|key| !object.contains_key(*key)) {
        return Err(format!("{at} has no {missing}"));
    }
    object.iter().try_for_each(|(key, value)| {
        let schema = known.get(key).ok_or_else(|| format!("{at} has {key}, which the document has not"))?;
        fits(document, schema, value, &format!("{at}.{key}"))
    })
}

/// A body that changes nothing or is refused.
fn body_of(id: &str) -> &'static str {
    match id {
        "limitVms" => r#"{"vms":["web","nobody"],"limit_bytes":8388608}"#,
        "patchVm" => r#"{"shares":1000}"#,
        "patchVmHeat" => r#"{"track":"on"}"#,
        "putPlan" => r#"{"policy":"a test","lease_ms":60000,"limits":[{"name":"web","limit_bytes":8388608}]}"#,
        "adoptVms" => r#"{"pid":1}"#,
        "beginUpgrade" => r#"{"program":"/nonexistent/ballastd"}"#,
        "reservePool" => r#"{"percent":101}"#,
        "lendPool" => r#"{"bytes":1073741824}"#,
        _ => "{}",
    }
}

#[test]
fn a_real_daemon_answers_each_operation_as_its_document_says() {
    let policy = "[policy]\nname = \"maestro\"\nbudget = \"80M\"\n";
    let Some(daemon) = Daemon::with_uffd(&format!("quarantine_ms = 5\nheat.track = true\n{policy}")) else { return };
    let guest = Guest::start(&daemon, "web", "--workload hotset --ram 32M --limit 16M");
    common::until("it is decided about and has a past", || {
        let decided = daemon.api.decisions("web").is_ok_and(|list| !list.is_empty());
        decided && daemon.api.vm_history("web", 60).is_ok_and(|past| !past.at_unix_s.is_empty())
    });
    let document: Value = serde_json::from_str(&ask(&daemon, "GET", "/v1/openapi.json", "").1).expect("JSON");
    let mut fine = 0;
    for (path, item) in document["paths"].as_object().expect("paths") {
        // A stream ends after a minute; other tests follow it.
        for (method, operation) in item.as_object().expect("methods").iter().filter(|_| !path.ends_with("/stream")) {
            for name in ["web", "nobody"] {
                let id = operation["operationId"].as_str().expect("an id");
                let body = if operation["requestBody"].is_object() { body_of(id) } else { "" };
                let place = path.replace("{name}", name);
                let (status, text) = ask(&daemon, &method.to_uppercase(), &place, body);
                let answer = &operation["responses"][&status];
                assert!(answer.is_object(), "{id} of {place} answered {status}, which the document has not: {text}");
                let (media, content) = answer["content"].as_object().expect("content").iter().next().expect("one");
                if media.ends_with("json") {
                    let value = serde_json::from_str(&text).expect("JSON");
                    fits(&document, &content["schema"], &value, id).unwrap_or_else(|wrong| panic!("{place}: {wrong}"));
                    fine += usize::from(status == "200");
                }
            }
        }
    }
    assert!(fine > 30, "only {fine} answers were not refusals");
    drop(guest.finish());
}
