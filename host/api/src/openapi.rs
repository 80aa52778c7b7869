//! The OpenAPI document, generated from the types; `docs/openapi.json` is a checked copy.
//!
//! Before: `types` and `problem` derive their schemas. After: the daemon serves the document, clients are made from it.
//! Promise: a test fails when the checked copy differs. `UPDATE=1 cargo test -p ballast-api` writes it.

use utoipa::openapi::path::{HttpMethod, Operation, OperationBuilder, ParameterBuilder, ParameterIn};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::response::ResponseBuilder;
use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, Ref, Schema, Type};
use utoipa::openapi::{Content, Info, InfoBuilder, License, OpenApi as Document, PathItem, RefOr, Required};
use utoipa::{OpenApi, ToSchema};

use ballast_policy::{Plan, Snapshot};

use crate::{
    AdoptRequest, AdoptResult, DecisionRecord, Event, HeatPatch, History, HostStat, KeptVm, LendRequest, LimitsPatch,
    PlanRequest, PolicyPatch, PolicyStat, PoolNode, PoolPages, PoolRequest, PoolStat, PoolVm, Problem, UpgradeRequest,
    UpgradeStage, UpgradeStat, VmChange, VmHeat, VmHistory, VmPatch, VmStat,
};

#[derive(OpenApi)]
#[openapi(components(schemas(
    VmStat,
    AdoptRequest,
    AdoptResult,
    VmHeat,
    HeatPatch,
    HostStat,
    Event,
    History,
    VmHistory,
    VmPatch,
    LimitsPatch,
    VmChange,
    KeptVm,
    Snapshot,
    Plan,
    PlanRequest,
    PolicyStat,
    PolicyPatch,
    DecisionRecord,
    UpgradeRequest,
    UpgradeStage,
    UpgradeStat,
    PoolPages,
    PoolStat,
    PoolNode,
    PoolVm,
    PoolRequest,
    LendRequest,
    Problem
)))]
struct Schemas;

const DESCRIPTION: &str = "HTTP/1.1 over a Unix socket, by default /run/ballast/api.sock. Sizes are bytes. Errors are \
application/problem+json (RFC 9457). Root and the daemon's own user may read and change; members of the configured \
group may read.";

/// Content of a successful response.
enum Answer {
    One(&'static str),
    Many(&'static str),
    Text,
    Json,
    Bytes,
    Stream,
}

impl Answer {
    fn content(&self) -> (&'static str, RefOr<Schema>) {
        let named = |name: &str| RefOr::Ref(Ref::from_schema_name(name));
        let typed = |kind| RefOr::T(Schema::from(ObjectBuilder::new().schema_type(kind)));
        match self {
            Self::One(name) => ("application/json", named(name)),
            Self::Many(name) => ("application/json", RefOr::T(ArrayBuilder::new().items(named(name)).into())),
            Self::Text => ("text/plain; version=0.0.4; charset=utf-8", typed(Type::String)),
            Self::Json => ("application/json", typed(Type::Object)),
            Self::Stream => ("text/event-stream", typed(Type::String)),
            Self::Bytes => ("application/octet-stream", typed(Type::String)),
        }
    }
}

fn operation(id: &str, summary: &str, answer: Answer, problems: &[(&str, &str)]) -> OperationBuilder {
    let (media, schema) = answer.content();
    let fine = ResponseBuilder::new().description("The answer").content(media, Content::new(Some(schema)));
    let start = OperationBuilder::new().operation_id(Some(id)).summary(Some(summary)).response("200", fine.build());
    let common = [("403", "The peer may not do this"), ("503", "Too many connections; ask again")];
    common.iter().chain(problems).fold(start, |operation, (status, description)| {
        let schema: RefOr<Schema> = RefOr::Ref(Ref::from_schema_name(Problem::name()));
        let response =
            ResponseBuilder::new().description(*description).content(Problem::MEDIA_TYPE, Content::new(Some(schema)));
        operation.response(*status, response.build())
    })
}

fn with_name(operation: OperationBuilder) -> OperationBuilder {
    operation.parameter(
        ParameterBuilder::new()
            .name("name")
            .parameter_in(ParameterIn::Path)
            .required(Required::True)
            .description(Some("The VM's name"))
            .schema(Some(RefOr::T(Schema::from(ObjectBuilder::new().schema_type(Type::String))))),
    )
}

fn with_number(operation: OperationBuilder, name: &str, description: &str) -> OperationBuilder {
    operation.parameter(
        ParameterBuilder::new()
            .name(name)
            .parameter_in(ParameterIn::Query)
            .required(Required::False)
            .description(Some(description))
            .schema(Some(RefOr::T(Schema::from(ObjectBuilder::new().schema_type(Type::Integer))))),
    )
}

fn operations() -> Vec<(&'static str, HttpMethod, Operation)> {
    use HttpMethod::{Delete, Get, Patch, Put};
    let missing = ("404", "No VM has that name");
    let bad_query = ("400", "The query has an unknown key or a value out of range");
    let body = |schema: &str| {
        let schema: RefOr<Schema> = RefOr::Ref(Ref::from_schema_name(schema));
        let content = Content::new(Some(schema));
        let body = RequestBodyBuilder::new().description(Some("At most 64 KiB")).required(Some(Required::True));
        Some(body.content("application/json", content).build())
    };
    let policy = ParameterBuilder::new()
        .name("policy")
        .parameter_in(ParameterIn::Query)
        .description(Some("A policy's word, for another one than is set"))
        .schema(Some(RefOr::T(Schema::from(ObjectBuilder::new().schema_type(Type::String)))));
    let refused = [
        ("400", "The body is not JSON, or has an unknown key or a wrong type"),
        missing,
        ("413", "The body is too large"),
        ("422", "The value is refused, for example on a pinned VM"),
    ];
    vec![
        ("/v1/vms", Get, operation("listVms", "Every VM", Answer::Many("VmStat"), &[]).build()),
        (
            "/v1/vms",
            Patch,
            operation(
                "limitVms",
                "Set or remove the limit of several VMs, or of all; returns the result for each",
                Answer::Many("VmChange"),
                &[refused[0], refused[2]],
            )
            .request_body(body("LimitsPatch"))
            .build(),
        ),
        ("/v1/vms/{name}", Get, with_name(operation("getVm", "One VM", Answer::One("VmStat"), &[missing])).build()),
        (
            "/v1/vms/{name}",
            Patch,
            with_name(operation("patchVm", "Change one VM; returns its new state", Answer::One("VmStat"), &refused))
                .request_body(body("VmPatch"))
                .build(),
        ),
        (
            "/v1/vms/{name}/restore",
            Put,
            with_name(operation(
                "restoreVm",
                "Restore all of one VM and keep it in memory, whatever its limit; returns its state now",
                Answer::One("VmStat"),
                &[missing],
            ))
            .build(),
        ),
        (
            "/v1/vms/{name}/restore",
            Delete,
            with_name(operation("endRestore", "End that; its limit counts again", Answer::One("VmStat"), &[missing]))
                .build(),
        ),
        (
            "/v1/vms/{name}/decisions",
            Get,
            with_name(operation(
                "listDecisions",
                "The last decisions about one VM, oldest first",
                Answer::Many("DecisionRecord"),
                &[missing],
            ))
            .build(),
        ),
        (
            "/v1/kept",
            Get,
            operation(
                "listKept",
                "What is kept of VMs for the next time that they attach",
                Answer::Many("KeptVm"),
                &[("422", "The file cannot be read")],
            )
            .build(),
        ),
        (
            "/v1/kept/{name}",
            Delete,
            with_name(operation(
                "forgetVm",
                "Forget what is kept of VMs of this name or UUID; returns it",
                Answer::Many("KeptVm"),
                &[("404", "Nothing is kept of such a VM"), ("422", "The file cannot be read or written")],
            ))
            .build(),
        ),
        (
            "/v1/adopted",
            Put,
            operation(
                "adoptVms",
                "Adopt a VM that runs already, or all; returns those that were not adopted before",
                Answer::One("AdoptResult"),
                &[refused[0], refused[2], ("422", "Refused, for example because the process is no VMM")],
            )
            .request_body(body("AdoptRequest"))
            .build(),
        ),
        ("/v1/adopted/{name}", Delete, {
            let summary = "Release an adopted VM; returns its state now";
            let release = operation("releaseVm", summary, Answer::One("VmStat"), &[bad_query, missing, refused[3]]);
            with_number(with_name(release), "bring_back", "1: when all of its memory has come back").build()
        }),
        (
            "/v1/snapshot",
            Get,
            operation("getSnapshot", "The snapshot that policies read", Answer::One("Snapshot"), &[]).build(),
        ),
        (
            "/v1/plan",
            Get,
            operation(
                "getPlan",
                "The plan that would be made now; changes nothing",
                Answer::One("Plan"),
                &refused[3..],
            )
            .parameter(policy)
            .build(),
        ),
        (
            "/v1/plan",
            Put,
            operation("putPlan", "Decide, for the length of a lease", Answer::One("Plan"), &refused)
                .request_body(body("PlanRequest"))
                .build(),
        ),
        ("/v1/policy", Get, operation("getPolicy", "The governor", Answer::One("PolicyStat"), &[]).build()),
        (
            "/v1/policy",
            Patch,
            operation("patchPolicy", "Change the governor; returns its new state", Answer::One("PolicyStat"), &refused)
                .request_body(body("PolicyPatch"))
                .build(),
        ),
        ("/v1/vms/{name}/heat", Get, {
            let heat = operation("getVmHeat", "How hot its memory is", Answer::One("VmHeat"), &[bad_query, missing]);
            with_number(with_name(heat), "cells", "Pieces of the strip: 1 to 4096, by default 64").build()
        }),
        ("/v1/vms/{name}/heat", Patch, {
            let summary = "Change how a VM is tracked; returns its heat";
            let heat = operation("patchVmHeat", summary, Answer::One("VmHeat"), &refused);
            with_name(heat).request_body(body("HeatPatch")).build()
        }),
        ("/v1/vms/{name}/heat/cycles", Get, {
            let summary = "The last access cycles as a recording; they are kept while a client asks";
            let cycles = operation("getVmHeatCycles", summary, Answer::Bytes, &[bad_query, missing]);
            with_number(with_name(cycles), "after", "Only cycles after this number").build()
        }),
        (
            "/v1/upgrade",
            Get,
            operation("getUpgrade", "The state of the last upgrade", Answer::One("UpgradeStat"), &[]).build(),
        ),
        (
            "/v1/upgrade",
            Put,
            operation(
                "beginUpgrade",
                "Start an upgrade to another program; returns its state",
                Answer::One("UpgradeStat"),
                &[refused[0], refused[2], ("422", "Refused, for example while another one is under way")],
            )
            .request_body(body("UpgradeRequest"))
            .build(),
        ),
        ("/v1/pool", Get, operation("getPool", "The pool of VM memory", Answer::One("PoolStat"), &[]).build()),
        (
            "/v1/pool",
            Put,
            operation(
                "reservePool",
                "Reserve memory of the host for VMs, up to this total; notes say why it is less",
                Answer::One("PoolStat"),
                &[refused[0], refused[2], ("422", "Refused, for example because there is no such node")],
            )
            .request_body(body("PoolRequest"))
            .build(),
        ),
        (
            "/v1/pool/lent",
            Put,
            operation(
                "lendPool",
                "Set how much of the pool is lent to the host",
                Answer::One("PoolStat"),
                &[refused[0], refused[2], ("422", "Refused, for example because there is no pool")],
            )
            .request_body(body("LendRequest"))
            .build(),
        ),
        ("/v1/host", Get, operation("getHost", "The host and Ballast", Answer::One("HostStat"), &[]).build()),
        ("/v1/events", Get, {
            let list = operation("listEvents", "Recent events, oldest first", Answer::Many("Event"), &[bad_query]);
            let list = with_number(list, "after", "Only events with a higher id");
            with_number(list, "decisions", "1: the policy's decisions that differ from the ones before, too").build()
        }),
        ("/v1/events/stream", Get, {
            let summary = "Events as they come, as server-sent events; ends after 50 s, and `Last-Event-ID` goes on";
            let stream = operation("followEvents", summary, Answer::Stream, &[bad_query]);
            let stream = with_number(stream, "after", "Begins after the event with this id");
            with_number(stream, "decisions", "1: the policy's decisions, too").build()
        }),
        ("/v1/history", Get, {
            let host = operation("getHostHistory", "The past of the host", Answer::One("History"), &[bad_query]);
            with_number(host, "minutes", "1 to 1440, 60 unless given").build()
        }),
        ("/v1/history/vms", Get, {
            let all = operation("listVmHistories", "The past of all VMs", Answer::Many("VmHistory"), &[bad_query]);
            with_number(all, "minutes", "1 to 60, 10 unless given").build()
        }),
        ("/v1/vms/{name}/history", Get, {
            let vm = operation("getVmHistory", "The past of one VM", Answer::One("History"), &[bad_query, missing]);
            with_number(with_name(vm), "minutes", "1 to 1440, 60 unless given").build()
        }),
        ("/v1/openapi.json", Get, operation("getOpenapi", "This document", Answer::Json, &[]).build()),
        ("/metrics", Get, operation("getMetrics", "Prometheus metrics", Answer::Text, &[]).build()),
    ]
}

fn info() -> Info {
    InfoBuilder::new()
        .title("Ballast")
        .version("1")
        .description(Some(DESCRIPTION))
        .license(Some(License::new("Apache-2.0")))
        .build()
}

/// The document of API version 1.
pub fn document() -> Document {
    let mut document = Schemas::openapi();
    document.info = info();
    for (path, method, operation) in operations() {
        let item = document.paths.paths.entry(path.into()).or_default();
        item.merge_operations(PathItem::new(method, operation));
    }
    document
}

/// The document as indented JSON, with a newline at the end.
pub fn document_json() -> String {
    // Serialising plain data we made ourselves into a string cannot fail.
    document().to_pretty_json().expect("the document serialises") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checked_document_is_the_generated_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
        let generated = document_json();
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(path, &generated).expect("write docs/openapi.json");
        }
        let checked = std::fs::read_to_string(path).unwrap_or_default();
        assert!(checked == generated, "docs/openapi.json is stale: run UPDATE=1 cargo test -p ballast-api");
    }

    #[test]
    fn every_reference_in_the_document_leads_somewhere() {
        let document: serde_json::Value = serde_json::from_str(&document_json()).expect("JSON");
        fn visit<'a>(value: &'a serde_json::Value, found: &mut Vec<&'a str>) {
            match value {
                serde_json::Value::Object(map) => map.iter().for_each(|(key, value)| match value.as_str() {
                    Some(target) if key == "$ref" => found.push(target),
                    _ => visit(value, found),
                }),
                serde_json::Value::Array(items) => items.iter().for_each(|item| visit(item, found)),
                _ => {}
            }
        }
        let mut found = Vec::new();
        visit(&document, &mut found);
        assert!(found.len() > 10, "the document has only {} references", found.len());
        for target in found {
            assert!(document.pointer(target.trim_start_matches('#')).is_some(), "{target} leads nowhere");
        }
    }
}
