//! Compiles `realmem.c` to a shared library, which `src/server.rs` embeds.
//!
//! Before: cargo runs it. After: `librealmem.so` is in the output directory.

use std::path::PathBuf;
use std::process::Command;
use std::env;

fn main() {
    let header = "../../crates/client/include";
    for input in ["build.rs", "realmem.c", "../../crates/client/include/ballast.h"] {
        println!("cargo::rerun-if-changed={input}");
    }
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("librealmem.so");
    let mut cc = Command::new(env::var("CC").unwrap_or("cc".into()));
    cc.args(["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", header, "-o"]).arg(&out);
    let status = cc.args(["realmem.c", "-ldl", "-lpthread"]).status().expect("start the C compiler");
    assert!(status.success(), "compiling realmem.c failed: {status}");
}
