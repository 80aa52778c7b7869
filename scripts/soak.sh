#!/bin/bash
# The kill suites and every test with a real kernel path, again and again for a given time. Ends in one line of JSON:
#
#   ops              operations of guests, each of them checked
#   kills            engines and keepers killed
#   wrong_bytes      bytes that a guest found wrong
#   hangs            tests that waited for something that never came, or ran out of time
#   longest_wait_ms  longest operation of a guest, kills included, but not of one whose own VMM is made to hang
#   longest_wait_guest  the test it was in, and its name
#   failed, passed   tests; rounds, seconds
#
#   scripts/soak.sh [SECONDS]     default 3600; BALLAST_KILLS (default 200 a test), SOAK_TEST_SECONDS (2400);
#                                 BALLAST_UPGRADES (100 a test; 1,000 need SOAK_TEST_SECONDS=7200),
#                                 BALLAST_REMOTE_EVENTS (100: what happens to a cluster, 2 to 5 s each),
#                                 BALLAST_NEXT (what scripts/next-build.sh prints)
#
# It leaves nothing behind: temporary files are in a directory of its own, and processes end with their test. The output
# of each run that failed is kept in target/soak/.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-3600}
export BALLAST_UPGRADES=${BALLAST_UPGRADES:-100}
export BALLAST_REMOTE_EVENTS=${BALLAST_REMOTE_EVENTS:-100}
export BALLAST_KILLS=${BALLAST_KILLS:-200} BALLAST_POOL_KILLS=${BALLAST_POOL_KILLS:-100}
export PROPTEST_CASES=${PROPTEST_CASES:-4000} RUST_BACKTRACE=0
export BALLAST_GUEST_DIR=${BALLAST_GUEST_DIR:-$PWD/target/guest}
[ "$(id -u)" = 0 ] || { echo "soak: needs root" >&2; exit 2; }
mkdir -p target/soak
work=$(mktemp -d "${TMPDIR:-/tmp}/ballast-soak-XXXXXX")
child=
cleanup() {
    [ -z "$child" ] || kill -- "-$child" 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
export TMPDIR=$work/tmp BALLAST_SOAK_LOG=$work/counts
mkdir "$TMPDIR"
: >"$BALLAST_SOAK_LOG"

echo "soak: building" >&2
cargo build --quiet --workspace
# The test programs of the crates with a real kernel path, one a line. All of the workspace is built, as `make test`
# does: with fewer packages cargo would choose other features and build most of it again.
cargo test --quiet --no-run --workspace --message-format=json |
    jq -r 'select(.reason == "compiler-artifact" and .profile.test and .executable != null)
        | "\(.manifest_path | rtrimstr("/Cargo.toml")) \(.executable)"' |
    grep -E '/(host|vmm)/(client|daemon|page|pager|remote|store|sys) ' | sort -u >"$work/programs"

start=$SECONDS rounds=0 failed=0 hangs=0 passed=0
while [ $((SECONDS - start)) -lt "$seconds" ]; do
    rounds=$((rounds + 1))
    while read -r package program; do
        [ $((SECONDS - start)) -lt "$seconds" ] || break
        name=$(basename "$program")
        [ -t 2 ] && printf '\rsoak: round %d, %d of %d s, %s\033[K' \
            "$rounds" $((SECONDS - start)) "$seconds" "${name%-*}" >&2
        # A session of its own, so that whatever a failed test leaves running ends with it.
        (cd "$package" &&
            exec setsid timeout --kill-after=10 "${SOAK_TEST_SECONDS:-2400}" "$program" </dev/null >"$work/out" 2>&1) &
        child=$!
        status=0
        wait "$child" || status=$?
        kill -- "-$child" 2>/dev/null || true
        child=
        passed=$((passed + $(awk '
            /^test result: / { for (i = 1; i < NF; i++) if ($(i + 1) ~ /^passed/) sum += $i }
            END { print sum + 0 }' "$work/out")))
        if [ "$status" != 0 ]; then
            failed=$((failed + 1))
            { [ "$status" = 124 ] || [ "$status" = 137 ] || grep -q 'never: ' "$work/out"; } && hangs=$((hangs + 1))
            cp "$work/out" "target/soak/${name%-*}.$rounds"
        fi
        rm -rf "${TMPDIR:?}"/*
    done < <(shuf "$work/programs")
done
[ -t 2 ] && printf '\r\033[K' >&2
jq -cs --argjson rounds "$rounds" --argjson seconds $((SECONDS - start)) --argjson failed "$failed" \
    --argjson hangs "$hangs" --argjson passed "$passed" '{
        ops: (map(.ops // 0) | add // 0), kills: (map(.kills // 0) | add // 0),
        wrong_bytes: (map(.wrong_bytes // 0) | add // 0), hangs: $hangs,
        longest_wait_ms: (map(.longest_wait_ms // 0) | max // 0),
        longest_wait_guest: (max_by(.longest_wait_ms // 0).guest // ""),
        failed: $failed, passed: $passed, rounds: $rounds, seconds: $seconds }' "$BALLAST_SOAK_LOG"
[ "$failed" = 0 ] && [ "$hangs" = 0 ]
