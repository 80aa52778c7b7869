//! Which parts of the tree keep the rules already, and where the tree is.

use std::path::{Path, PathBuf};

/// What does not pass `circles.rs` yet, as the beginnings of paths. Everything else is checked by each run of the tests;
/// these places are listed by `cargo test -p ballast-tidy -- --ignored`. Take an entry out when its list is empty.
pub const LATER_CIRCLES: [&str; 1] = ["crates/daemon/src/keeper/"];

/// The repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("lab/tidy is two down").to_owned()
}

/// Is this file, named from the root, in one of these parts of the tree?
pub fn is_in(name: &str, parts: &[&str]) -> bool {
    parts.iter().any(|start| name.starts_with(start))
}

/// Fails with the places that are not in the parts which do not pass yet; if `is_later`, with those that are.
pub fn none_is_left(places: &[String], later: &[&str], is_later: bool) {
    let left: Vec<&str> = places.iter().map(String::as_str).filter(|place| is_in(place, later) == is_later).collect();
    assert!(left.is_empty(), "{} places:\n{}", left.len(), left.join("\n"));
}
