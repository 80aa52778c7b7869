//! Compiles `realmem.c` to a shared library, which `src/server.rs` embeds, twice.
//!
//! Before: cargo runs it. After: `librealmem.so` is in the output directory, and `librealmem-malloc.so`, which also
//! takes the large requests of the C library's malloc().

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    let header = "../../vmm/client/include";
    for input in ["build.rs", "realmem.c", "../../vmm/client/include/ballast.h"] {
        println!("cargo::rerun-if-changed={input}");
    }
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    for (name, more) in [("librealmem.so", "-UREALMEM_MALLOC"), ("librealmem-malloc.so", "-DREALMEM_MALLOC")] {
        let mut cc = Command::new(env::var("CC").unwrap_or("cc".into()));
        cc.args(["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", more, "-I", header, "-o"]);
        let status = cc.arg(out.join(name)).args(["realmem.c", "-ldl", "-lpthread"]).status();
        let status = status.expect("start the C compiler");
        assert!(status.success(), "compiling realmem.c failed: {status}");
    }
}
