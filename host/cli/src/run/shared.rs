//! The shared form of a RAM backend, because the one that management programs always write (`memory-backend-ram`) is
//! private memory.
//!
//! Before: `command_line` has found a backend of guest RAM. After: a word that replaces it, which the guest cannot
//! notice. Promise: pure, except for a check whether a path is a directory. Size, nodes of the host and all other
//! properties stay, and so does the name of the RAM in a migration stream: a VM migrates and restores between the two
//! forms.

use std::path::Path;

use ballast_base::{Bytes, Invalid};

use super::options::Opt;

const MEMFD: &str = "memory-backend-memfd";
/// Machine types from before QEMU 4.0 set this property for memfds and not for private memory.
const STREAM_NAME: &str = "x-use-canonical-path-for-ramblock-id";

/// Whether this backend is shared memory. Two kinds are shared by default, the others private.
pub(super) fn is_shared(object: &Opt) -> bool {
    match object.get("share") {
        None => matches!(object.head.as_str(), MEMFD | "memory-backend-shm"),
        Some(_) => object.is_on("share"),
    }
}

/// The shared form of this backend, the index of its word, and a note for the operator; `None` if it is shared, or of a
/// kind without a shared form. With `huge` it is a memfd of huge pages of this size.
pub(super) fn form(object: &Opt, huge: Option<Bytes>) -> Result<Option<(Opt, usize, String)>, Invalid> {
    // A private mapping leaves the operator's own file unchanged; a shared one would write to it.
    let is_own_file = object.get("mem-path").is_some_and(|path| !Path::new(path).is_dir());
    let is_private = match object.head.as_str() {
        "memory-backend-ram" => true,
        "memory-backend-file" => !is_own_file && !is_shared(object),
        MEMFD | "memory-backend-shm" => !is_shared(object),
        _ => false,
    };
    if !is_private {
        return Ok(None);
    }
    let id = object.get("id").unwrap_or_default();
    let Some(index) = object.index else {
        return Err(format!(
            "RAM backend {id} ({}) of -readconfig is private memory; write {MEMFD} and share=on there",
            object.head
        )
        .into());
    };
    let text = written(object, huge);
    let note = format!("RAM backend {id} is shared memory now: `-object {text}`");
    Ok(Some((Opt::of("object", index, text), index, note)))
}

fn written(object: &Opt, huge: Option<Bytes>) -> String {
    let becomes_memfd = object.head == "memory-backend-ram";
    let names_stream = becomes_memfd && object.get(STREAM_NAME).is_none();
    if let Ok(serde_json::Value::Object(mut items)) = serde_json::from_str(&object.text) {
        items.insert("share".into(), true.into());
        if becomes_memfd {
            items.insert("qom-type".into(), MEMFD.into());
        }
        if names_stream {
            items.insert(STREAM_NAME.into(), false.into());
        }
        if let Some(size) = huge {
            items.insert("hugetlb".into(), true.into());
            items.insert("hugetlbsize".into(), size.0.into());
        }
        return serde_json::Value::Object(items).to_string();
    }
    // A comma inside a value is written twice.
    const COMMA: &str = "\u{0}";
    let items = object.text.replace(",,", COMMA);
    let items = items.split(',').filter(|item| *item != "share" && !item.starts_with("share="));
    let renamed = items.map(|item| match item {
        "memory-backend-ram" | "qom-type=memory-backend-ram" => item.replace("memory-backend-ram", MEMFD),
        item => item.to_owned(),
    });
    let mut text = renamed.collect::<Vec<_>>().join(",").replace(COMMA, ",,") + ",share=on";
    if names_stream {
        text += &format!(",{STREAM_NAME}=off");
    }
    if let Some(size) = huge {
        text += &format!(",hugetlb=on,hugetlbsize={}", size.0);
    }
    text
}
