#!/bin/sh
# Every bench with every guest it has, one after another: what the tables of lab/notebook are made of.
#
#   scripts/bench.sh [DIR]     into DIR (target/bench): GUEST-WHAT.jsonl, one row a line; tables and plots of them
#   BENCH_ARGS=--quick         fewer pages and rounds: whether all of it runs
#
# Root, on a machine that does nothing else: some three hours, native guests the first two of them. A guest that cannot
# run here is named and left out.
# Exit code: 0, or 1 if a bench failed (the others are measured all the same).
set -u
cd "$(dirname "$0")/.."
out=${1:-target/bench}
export BALLAST_GUEST_DIR="${BALLAST_GUEST_DIR:-$PWD/target/guest}" RUST_BACKTRACE=0
export ZSTD_SYS_USE_PKG_CONFIG="${ZSTD_SYS_USE_PKG_CONFIG:-1}"
cargo build --release -p ballast-cli -p ballast-daemon -p ballast-preload -p ballast-bench || exit 1
ballast=${CARGO_TARGET_DIR:-target}/release/ballast
mkdir -p "$out" || exit 1
failed=0

# table FILE: a Markdown table of every figure of every row, with its spread and its noise; then what has no spread.
table() {
    awk '
    function value(key) { return key in values ? values[key] : "" }
    {
        split("", values); split("", order); count = 0; missing = ""; facts = ""
        # The machine comes once, above all tables. Texts are the only lists.
        if (match($0, /,"host":{[^}]*}/)) $0 = substr($0, 1, RSTART - 1) substr($0, RSTART + RLENGTH)
        if (match($0, /,"not_measured":\[[^]]*\]/)) {
            missing = substr($0, RSTART + 17, RLENGTH - 18)
            $0 = substr($0, 1, RSTART - 1) substr($0, RSTART + RLENGTH)
        }
        fields = split(substr($0, 3, length($0) - 3), parts, /,"/)
        for (i = 1; i <= fields; i++) {
            at = index(parts[i], "\":")
            order[++count] = substr(parts[i], 1, at - 1)
            values[order[count]] = substr(parts[i], at + 2)
            gsub(/"/, "", values[order[count]])
        }
        title = value("bench") ", " value("guest") " guest"
        if (value("data") != "") title = title ", " value("data")
        if (value("workload") != "") title = title ", " value("workload")
        if (value("measures") != "") title = title ", " value("measures")
        if (value("measures") != "" && value("ram_bytes") != "") title = title ", " value("ram_bytes") / 1048576 " MiB"
        if (value("vms") != "") title = title ", " value("vms") " VMs"
        if (value("level_pct") != "") title = title ", " value("level_pct") " % of their memory"
        printf "\n**%s**\n\n", title
        printf "| Figure | median | lowest | highest | A/A %% or 95 %% range |\n|---|---|---|---|---|\n"
        for (i = 1; i <= count; i++) {
            key = order[i]
            if ((key "_min") in values) {
                noise = value(key "_aa_pct")
                if ((key "_ci95_low") in values) noise = value(key "_ci95_low") " to " value(key "_ci95_high")
                print "| `" key "` | " value(key) " | " value(key "_min") " | " value(key "_max") " | " noise " |"
                continue
            }
            base = key
            sub(/_(min|max|aa_pct|ci95_low|ci95_high)$/, "", base)
            if ((base "_min") in values) continue
            if (value(key) == "null") print "| `" key "` | not measured | | | |"
            else if (key !~ /^(bench|guest|data|workload)$/) facts = facts ", " key " " value(key)
        }
        if (facts != "") print "\n" substr(facts, 3)
        if (missing != "") print "\nNot measured: " missing
    }' "$1"
}

measure() {
    guest=$1 what=$2 file=$out/$1-$2.jsonl
    shift 2
    echo "== $what, $guest guest"
    # shellcheck disable=SC2086
    if "$ballast" --json bench "$what" --guest "$guest" "$@" ${BENCH_ARGS:-} >"$file"; then
        table "$file" >>"$out/tables.md"
    else
        rm -f "$file"
        failed=1
    fi
}

{
    echo "Measured by scripts/bench.sh at $(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)," \
        "Linux $(uname -r), $(nproc) CPUs, load before $(cut -d' ' -f1 /proc/loadavg)."
} >"$out/tables.md"
for guest in native kvm; do
    # One that cannot run here says why at once.
    "$ballast" bench limit --guest "$guest" --quick >/dev/null || { echo "== no $guest guest here"; continue; }
    # What another guest would not change, or cannot have: their rows would only say so.
    case $guest in
    native) rows="restore reclaim scale idle storm balance pool upgrade real" ;;
    kvm) rows="restore reclaim idle balance" ;;
    esac
    for what in $rows; do
        measure $guest "$what" "$@"
    done
done
"$ballast" --json bench limit >"$out/native-limit.jsonl" || failed=1
"$ballast" --json bench tiers >"$out/simulated-tiers.jsonl" || failed=1
"${ballast}-bench" plot "$out"/native-*.jsonl --out "$out" >/dev/null || failed=1
echo "tables and plots: $out/tables.md, $out/*.svg"
exit $failed
