//! The OpenAPI document of the routes; `docs/openapi.json` is a checked copy.
//!
//! Before: each handler states its parameters, its body and its answers (`utoipa::path`). After: the daemon serves the
//! document, and clients are made from it.
//! Promise: the document has each route, and each status that an operation can answer. Tests walk all routes, and
//! compare the copy. `UPDATE=1 cargo test -p ballast-daemon --lib document` writes the copy.

use std::collections::BTreeMap;

use ballast_api::Problem;
use utoipa::openapi::content::Content;
use utoipa::openapi::path::{Operation, Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::response::{Response, ResponseBuilder};
use utoipa::openapi::schema::{ObjectBuilder, Ref, Schema, Type};
use utoipa::openapi::{InfoBuilder, License, OpenApi as Document, RefOr, Required};
use utoipa::{IntoParams, IntoResponses, OpenApi, ToSchema};

const DESCRIPTION: &str = "HTTP/1.1 over a Unix socket, by default /run/ballast/api.sock. Sizes are bytes. Errors are \
application/problem+json (RFC 9457). Root and the daemon's own user may read and change; members of the configured \
group may read.";

#[derive(OpenApi)]
#[openapi(components(schemas(Problem)))]
struct Problems;

pub(super) fn empty() -> Document {
    let mut document = Problems::openapi();
    let info = InfoBuilder::new().title("Ballast").version("1").description(Some(DESCRIPTION));
    document.info = info.license(Some(License::new("Apache-2.0"))).build();
    document
}

/// The document of routes as indented JSON, with a newline at the end.
pub(super) fn to_json(mut document: Document) -> String {
    for item in document.paths.paths.values_mut() {
        let methods = [&mut item.get, &mut item.put, &mut item.patch, &mut item.delete];
        methods.into_iter().flatten().for_each(complete);
    }
    document.to_pretty_json().expect("the document serialises") + "\n"
}

/// Adds the answers that do not come from the operation's handler: those given before the handler is called, and those
/// for its parameters and its body.
fn complete(operation: &mut Operation) {
    let responses = &mut operation.responses.responses;
    let mut add = |status: &str, text: &str| {
        responses.entry(status.into()).or_insert_with(|| problem(text));
    };
    add("403", "The peer may not do this");
    add("500", "The engine failed to answer; its log says why");
    add("503", "Too many connections; ask again");
    if operation.parameters.is_some() {
        add("400", "The path is not UTF-8, or the query has an unknown key or a value out of range");
    }
    if let Some(RefOr::T(body)) = &mut operation.request_body {
        body.description = Some(format!("A JSON object of at most {} bytes", ballast_api::MAX_BODY_BYTES));
        add("400", "The body is not a JSON object, or has an unknown key or a wrong type");
        add("408", "The body did not arrive in time");
        add("413", "The body is too large");
    }
    if let Some(RefOr::T(answer)) = responses.get_mut("200") {
        answer.description = "The answer".into();
    }
}

fn problem(text: &str) -> RefOr<Response> {
    let schema: RefOr<Schema> = RefOr::Ref(Ref::from_schema_name(Problem::name()));
    let content = Content::new(Some(schema));
    RefOr::T(ResponseBuilder::new().description(text).content(Problem::MEDIA_TYPE, content).build())
}

/// Common refusals of handlers, as types for `responses(...)`.
macro_rules! refusals {
    ($($name:ident = $status:literal $text:literal;)*) => {$(
        pub(super) enum $name {}

        impl IntoResponses for $name {
            fn responses() -> BTreeMap<String, RefOr<Response>> {
                [($status.into(), problem($text))].into()
            }
        }
    )*};
}

refusals! {
    NoSuchVm = "404" "No VM has that name";
    NothingKept = "404" "Nothing is kept of a VM with that name or UUID";
    Invalid = "422" "Understood and refused, for example on a pinned VM; `detail` says why and what is possible";
}

/// Parameters, as types for `params(...)`.
macro_rules! parameters {
    ($($name:ident = $place:ident $kind:ident $key:literal $text:literal;)*) => {$(
        pub(super) enum $name {}

        impl IntoParams for $name {
            fn into_params(_place: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
                vec![parameter(ParameterIn::$place, Type::$kind, $key, $text)]
            }
        }
    )*};
}

parameters! {
    Name = Path String "name" "The VM's name";
    Cells = Query Integer "cells" "Pieces of the strip: 1 to 4096, by default 64";
    BringBack = Query Integer "bring_back" "1: when all of its memory has come back";
    PolicyName = Query String "policy" "A policy's word, for another one than is set";
    AfterEvent = Query Integer "after" "Only events with a higher id";
    Decisions = Query Integer "decisions" "1: the policy's decisions that differ from the ones before, too";
    Minutes = Query Integer "minutes" "1 to 1440, 60 unless given";
    FewMinutes = Query Integer "minutes" "1 to 60, 10 unless given";
}

fn parameter(place: ParameterIn, kind: Type, key: &str, text: &str) -> Parameter {
    let required = if matches!(place, ParameterIn::Path) { Required::True } else { Required::False };
    let schema: RefOr<Schema> = RefOr::T(ObjectBuilder::new().schema_type(kind).into());
    let named = ParameterBuilder::new().name(key).parameter_in(place).required(required);
    named.description(Some(text)).schema(Some(schema)).build()
}
