//! Which parts of the tree keep the rules already, and where the tree is.

use std::path::{Path, PathBuf};

/// What does not pass every check yet, as the beginnings of paths. Everything else is checked by each run of the tests;
/// these places are listed by `cargo test -p ballast-tidy -- --ignored`. Take an entry out when its list is empty.
pub const LATER: [&str; 4] = ["ARCHITECTURE.md", "crates/daemon/", "crates/store/", "crates/sys/src/pins"];

/// The repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("lab/tidy is two down").to_owned()
}

/// Is this file, named from the root, not clean yet?
pub fn is_later(name: &str) -> bool {
    LATER.iter().any(|start| name.starts_with(start))
}

/// Fails with the places that are in the part of the tree that is asked for: the clean one, or the other.
pub fn none_is_left(places: &[String], later: bool) {
    let left: Vec<&str> = places.iter().map(String::as_str).filter(|place| is_later(place) == later).collect();
    assert!(left.is_empty(), "{} places:\n{}", left.len(), left.join("\n"));
}
