//! Compiles the guest program: `guest/entry.rs` to a flat image linked at its guest address.
//!
//! Before: cargo runs it. After: `src/kvm.rs` embeds the image.
//! Promise: the image is self-contained; a reference to anything outside it (a library call, a panic) fails the build.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    for input in ["build.rs", "guest/entry.rs", "guest/link.ld", "src/guest.rs", "src/law.rs", "src/programs.rs"] {
        println!("cargo::rerun-if-changed={input}");
    }
    let image = PathBuf::from(var("OUT_DIR")).join("guest.bin");
    if var("CARGO_CFG_TARGET_ARCH") != "x86_64" {
        // Native guests run on any architecture. An empty image refuses the other guests at run time.
        fs::write(image, []).expect("write an empty guest image");
        return;
    }
    let script = PathBuf::from(var("CARGO_MANIFEST_DIR")).join("guest/link.ld");
    compile("guest/entry.rs", &image, &["-Wl,--oformat=binary".into(), format!("-Wl,-T,{}", script.display())]);
}

fn compile(source: &str, to: &Path, more: &[String]) {
    let mut rustc = Command::new(var("RUSTC"));
    rustc.args(["--edition=2024", "--crate-name=guest", "--crate-type=bin", "--target", &var("TARGET")]);
    rustc.args(["-Copt-level=2", "-Cpanic=abort", "-Crelocation-model=static", "-Ccodegen-units=1"]);
    rustc.args(["-Coverflow-checks=off", "-Cdebuginfo=0", "-Cdefault-linker-libraries=no"]);
    let fixed = ["-nostdlib", "-nostartfiles", "-static", "-no-pie", "-Wl,--build-id=none"].map(str::to_owned);
    for argument in fixed.iter().chain(more) {
        rustc.arg(format!("-Clink-arg={argument}"));
    }
    rustc.arg("-o").arg(to).arg(source);
    let status = rustc.status().expect("start rustc for the guest program");
    assert!(status.success(), "compiling {source} failed: {status}");
}

fn var(name: &str) -> String {
    env::var(name).unwrap_or_else(|error| panic!("{name}: {error}"))
}
