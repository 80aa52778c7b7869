#!/bin/bash
# The real programs beside the kernel: all rows of `ballast bench real`, and the pictures of the docs that they make.
#
#   scripts/evidence.sh [DIR]   rows in DIR/real.jsonl (default: target/evidence), pictures in docs/pictures
#
# Takes two to four hours on a machine that does nothing else. Needs root, and what `make setup` gets.
set -euo pipefail
cd "$(dirname "$0")/.."
export ZSTD_SYS_USE_PKG_CONFIG=1 BALLAST_BENCH_COURSE=1
out=${1:-target/evidence}
mkdir -p "$out"
rows=$out/real.jsonl
: >"$rows"
command -v java >/dev/null || apt-get install -y default-jdk-headless
cargo build --release -p ballast-cli -p ballast-daemon -p ballast-preload -p ballast-client -p ballast-bench
bench() {
    echo "== bench real $*"
    target/release/ballast bench real "$@" --json >>"$rows"
}
bench --part day
bench --part eight
bench --part eight --side adopted
bench --part bloat
for program in redis memcached tpch graph triangles dgemm kmeans gups lookups liblinear jvm; do
    bench --part five --program $program
done
bench --program redis --rounds 3
bench --program redis --order moving --levels 80
bench --program redis --order scan-beside --levels 80
bench --program redis --order tenth --levels 50,30
bench --program memcached --order random --levels 80
target/release/ballast-bench plot "$rows" --out docs/pictures
