//! Finds the repository, and fails a test with the places that break a rule.

use std::path::{Path, PathBuf};

/// Returns the root of the repository. Cargo sets it at run time: a copied build directory has another tree's path.
pub fn root() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs this test");
    Path::new(&here).ancestors().nth(2).expect("lab/tidy is two down").to_owned()
}

/// Fails the test if the list of places is not empty, and prints the list.
#[allow(dead_code, reason = "each test program takes what it needs")]
pub fn none_is_left(places: &[String]) {
    assert!(places.is_empty(), "{} places:\n{}", places.len(), places.join("\n"));
}
