#!/bin/bash
# A ballastd of another build, and a test VM with the client of that build: state files have the next version and one
# more word, messages the next version and one more field, as the next release's may. Tests upgrade to it and back, and
# mix clients (`BALLAST_NEXT=$(scripts/next-build.sh) cargo test --workspace --test upgrade`).
#
# Prints the path of the ballastd; the test VM is beside it. All of the workspace is built with the same profile and
# features otherwise, so little is compiled.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}
programs=(--bin ballastd --bin ballast-testvm)
cargo build --quiet --workspace "${programs[@]}" --features ballast-handover/next-layout
mkdir -p "$target/next"
install "$target/debug/ballastd" "$target/debug/ballast-testvm" "$target/next/"
cargo build --quiet --workspace "${programs[@]}"
echo "$target/next/ballastd"
