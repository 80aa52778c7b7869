#!/bin/bash
# A ballastd of another build: its state files have the next version and one more word, as the next release's may. Tests
# upgrade to it and back (`BALLAST_NEXT=$(scripts/next-build.sh) cargo test --workspace --test upgrade`).
#
# Prints its path. All of the workspace is built with the same profile and features otherwise, so little is compiled.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}
cargo build --quiet --workspace --bin ballastd --features ballast-handover/next-layout
mkdir -p "$target/next"
install "$target/debug/ballastd" "$target/next/ballastd"
cargo build --quiet --workspace --bin ballastd
echo "$target/next/ballastd"
