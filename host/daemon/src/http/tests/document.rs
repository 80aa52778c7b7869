//! The OpenAPI document: its copy in `docs/`, and the parts that each operation needs.

use std::collections::BTreeSet;

use serde_json::Value;

use super::*;
use crate::http::routes::document_json;

#[test]
fn the_checked_document_is_the_one_of_the_routes() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    let made = document_json();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(path, &made).expect("write docs/openapi.json");
    }
    let checked = std::fs::read_to_string(path).unwrap_or_default();
    assert!(checked == made, "docs/openapi.json is stale: UPDATE=1 cargo test -p ballast-daemon --lib document");
}

fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get("$ref").and_then(Value::as_str));
            map.values().for_each(|value| references(value, found));
        }
        Value::Array(items) => items.iter().for_each(|item| references(item, found)),
        _ => {}
    }
}

#[test]
fn every_reference_has_a_target_and_every_schema_is_used() {
    let document: Value = serde_json::from_str(&document_json()).expect("JSON");
    let mut found = BTreeSet::new();
    references(&document, &mut found);
    for target in &found {
        assert!(document.pointer(target.trim_start_matches('#')).is_some(), "{target} leads nowhere");
    }
    for name in document["components"]["schemas"].as_object().expect("schemas").keys() {
        assert!(found.contains(format!("#/components/schemas/{name}").as_str()), "nothing refers to {name}");
    }
}

#[test]
fn every_operation_has_a_summary_its_parameters_and_its_answers() {
    let document: Value = serde_json::from_str(&document_json()).expect("JSON");
    let (mut ids, mut count) = (BTreeSet::new(), 0);
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("methods") {
            count += 1;
            let said = |value: &Value, key: &str| {
                assert!(value[key].as_str().is_some_and(|text| text.len() > 2), "{method} {path}: no {key}: {value}");
            };
            said(operation, "summary");
            said(operation, "operationId");
            ids.insert(operation["operationId"].as_str());
            let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
            parameters.iter().for_each(|parameter| said(parameter, "description"));
            let named = |one: &Value| one["in"] == "path" && one["name"] == "name" && one["required"] == true;
            assert_eq!(path.contains("{name}"), parameters.iter().any(named), "{method} {path}");
            assert!(method != "patch" || operation["requestBody"].is_object(), "{path} takes a change without a body");
            for (status, answer) in operation["responses"].as_object().expect("responses") {
                said(answer, "description");
                let content = answer["content"].as_object().into_iter().flatten().next();
                let (media, content) = content.unwrap_or_else(|| panic!("{method} {path} {status}: no content"));
                assert!(content["schema"].is_object(), "{method} {path} {status}: no schema");
                assert_eq!(status != "200", media == Problem::MEDIA_TYPE, "{method} {path} {status}: {media}");
            }
        }
    }
    assert!(count > 30 && ids.len() == count, "{count} operations have {} ids", ids.len());
}
