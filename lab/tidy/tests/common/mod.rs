//! Where the tree is, and how a test says which places of it break a rule.

use std::path::{Path, PathBuf};

/// The repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("lab/tidy is two down").to_owned()
}

/// Fails with these places.
pub fn none_is_left(places: &[String]) {
    assert!(places.is_empty(), "{} places:\n{}", places.len(), places.join("\n"));
}
