#!/bin/bash
# Everything there is to check, in the order of how soon it fails. `make test` calls it; so does .ci/run.
#
#   scripts/test.sh            all of it
#   REQUIRE=qemu,kvm           a suite that cannot run here is then a failure, not a SKIP
#   BALLAST_KILLS=200          kills in the crash suite
#   STEP_SECONDS=1200          a step that takes longer is ended and has failed
set -euo pipefail
cd "$(dirname "$0")/.."
export RUST_BACKTRACE=0 BALLAST_GUEST_DIR="$PWD/target/guest"
log=target/test-log
mkdir -p target
: >"$log"

step() {
    local start=$SECONDS
    echo "== $1"
    shift
    # Everything goes to the log as well, where skips are counted at the end.
    # A step that hangs fails: the longest takes twelve minutes on two CPUs that do nothing else.
    timeout --kill-after=10 "${STEP_SECONDS:-1800}" "$@" 2>&1 | tee -a "$log"
    echo "   ($((SECONDS - start)) s)"
}

step "format" cargo fmt --all --check
step "build" cargo build --workspace --all-targets
step "lints" cargo clippy --workspace --all-targets -- -D warnings
# Tests of upgrades go to it and back.
step "programs of another build" scripts/next-build.sh
export BALLAST_NEXT=${CARGO_TARGET_DIR:-$PWD/target}/next/ballastd
step "unit, property, native, qemu and crash suites" cargo test --workspace --no-fail-fast -- --nocapture
step "loom: the page-state model" env RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom \
    cargo test -p ballast-page --test loom
if [ -e /dev/kvm ]; then
    echo "== kvm suite: ran above, on this machine's /dev/kvm"
else
    step "kvm suite, in QEMU's emulated CPU" scripts/kvm-suite.sh
fi
step "newer kernel suite, in QEMU" scripts/newer-kernel-suite.sh
step "release programs, stripped, and how large they are" scripts/release.sh --product

passed=$(awk '
    /^test result: / { for (i = 1; i < NF; i++) if ($(i + 1) ~ /^passed/) sum += $i }
    END { print sum + 0 }' "$log")
skipped=$(grep -c 'SKIP needs=' "$log" || true)
grep 'SKIP needs=' "$log" | sort | uniq -c || true
echo "$passed passed, 0 failed, $skipped skipped"
