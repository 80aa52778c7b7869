#!/bin/bash
# Everything there is to check, in the order of how soon it fails. `make test` calls it; so does .ci/run.
#
#   scripts/test.sh            all of it
#   REQUIRE=qemu,kvm           a suite that cannot run here is then a failure, not a SKIP
#   BALLAST_KILLS=200          kills in the crash suite, instead of 40
#   STEP_SECONDS=1200          a step that takes longer is ended and has failed
set -euo pipefail
cd "$(dirname "$0")/.."
export RUST_BACKTRACE=0 BALLAST_GUEST_DIR="$PWD/target/guest"
log=target/test-log
mkdir -p target
: >"$log"

# Tests make their files here. Short: a socket's path has at most 107 characters.
TMPDIR=$(mktemp -d "${TMPDIR:-/tmp}/b.XXXX")
export TMPDIR
# Some of them are other users.
chmod 711 "$TMPDIR"
trap '[ -z "${beside:-}" ] || kill -- -"$beside" 2>/dev/null || true; rm -rf "$TMPDIR"' EXIT

# Which tests failed and what they said, once more at the end: the log is long.
what_failed() {
    echo "== failed: $1"
    awk '/^failures:$/ { list = 1; next } /^test result: / { list = 0 } list && NF == 1 { print $1 }' "$log" |
        while read -r test; do
            echo "-- $test"
            grep -F -A 12 -e "thread '$test'" "$log" | head -n 40 || true
        done
    # A step that was ended: tests that failed before it, which wait for others, and the program it was in.
    if grep -q '^running [0-9]* tests*$' "$log" && ! grep -q '^failures:$' "$log"; then
        grep -A 12 -E "^thread '.*panicked at " "$log" | tail -n 60 || true
        grep -E '^ +Running ' "$log" | tail -n 1 || true
    fi
    # Whatever has no test of its own: a compiler, a script, a program that died.
    grep -E '^(error|warning|SKIP|.*: line [0-9]+: )|signal: ' "$log" | tail -n 15 || true
}

step() {
    local start=$SECONDS name=$1
    echo "== $name"
    shift
    # Everything goes to the log as well, where skips are counted at the end.
    # A step that hangs fails: the longest takes 25 minutes on two CPUs that do nothing else.
    if ! timeout --kill-after=10 "${STEP_SECONDS:-2400}" "$@" 2>&1 | tee -a "$log"; then
        what_failed "$name"
        exit 1
    fi
    echo "   ($((SECONDS - start)) s)"
}

# What only computes, beside the next step: it takes the CPU time that that one leaves. A process group of its own.
begin_beside() {
    setsid timeout --kill-after=10 5400 chrt --idle 0 bash -ec '
        RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p ballast-page --test loom
        scripts/release.sh --product
        command -v dpkg-shlibdeps >/dev/null || { echo "SKIP needs=dpkg-dev: dpkg-shlibdeps is not installed"; exit 0; }
        scripts/deb.sh
    ' >target/test-beside 2>&1 &
    beside=$!
}

end_beside() {
    local worst=0 start=$SECONDS name="loom: the page-state model; release programs, stripped; package"
    echo "== $name"
    wait "$beside" || worst=$?
    beside=
    tee -a "$log" <target/test-beside
    [ "$worst" = 0 ] || { what_failed "$name"; exit 1; }
    echo "   ($((SECONDS - start)) s more)"
}

step "format" cargo fmt --all --check
# Tests of upgrades go to it and back. First: it builds the same programs with another layout in between, and tests that
# were built before would be built again.
step "programs of another build" scripts/next-build.sh
export BALLAST_NEXT=${CARGO_TARGET_DIR:-$PWD/target}/next/ballastd
step "build" cargo build --workspace --all-targets
step "lints" cargo clippy --workspace --all-targets -- -D warnings
# Tests of the agent boot it.
step "guest with an agent" scripts/agent-image.sh
step "unit, property, native, qemu and crash suites" cargo test --workspace --no-fail-fast -- --nocapture
if [ -e /dev/kvm ]; then
    echo "== kvm suite: ran above, on this machine's /dev/kvm"
else
    step "kvm suite, in QEMU's emulated CPU" scripts/kvm-suite.sh
fi
# Not beside the suites that use this machine's kernel: what is preempted with a lock of its memory is in their way.
begin_beside
step "newer kernel suite, in QEMU" scripts/newer-kernel-suite.sh
end_beside

left=$(ls -A "$TMPDIR")
[ -z "$left" ] || { echo "== failed: tests left files in the temporary directory: $left"; exit 1; }

passed=$(awk '
    /^test result: / { for (i = 1; i < NF; i++) if ($(i + 1) ~ /^passed/) sum += $i }
    END { print sum + 0 }' "$log")
skipped=$(grep -c 'SKIP needs=' "$log" || true)
grep 'SKIP needs=' "$log" | sort | uniq -c || true
echo "$passed passed, 0 failed, $skipped skipped"
