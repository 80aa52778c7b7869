//! Where the tree is, and how a test says which places of it break a rule.

use std::path::{Path, PathBuf};

/// The repository. Cargo says at run time where it is: a copied build directory holds the path of another tree.
pub fn root() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs this test");
    Path::new(&here).ancestors().nth(2).expect("lab/tidy is two down").to_owned()
}

/// Fails with these places.
#[allow(dead_code, reason = "each test program takes what it needs")]
pub fn none_is_left(places: &[String]) {
    assert!(places.is_empty(), "{} places:\n{}", places.len(), places.join("\n"));
}
