#!/bin/bash
# The programs as they are installed: stripped, the debug information of each in a file beside it.
#
#   scripts/release.sh [--product] [DIR]
#
#   DIR         (target/dist) gets ballastd, ballast, libballast_preload.so, ballast-bench, and of each NAME.debug,
#               which gdb, perf and backtraces find beside the program or in /usr/lib/debug
#   --product   without ballast-bench
#
# Exit code: 0, or 1 if something cannot be built or a program of the product is larger than it may be.
set -euo pipefail
cd "$(dirname "$0")/.."
programs=(ballastd ballast libballast_preload.so)
packages=(-p ballast-daemon -p ballast-cli -p ballast-preload)
if [ "${1:-}" = --product ]; then
    shift
else
    programs+=(ballast-bench)
    packages+=(-p ballast-bench)
fi
out=${1:-target/dist}
most=$((10 << 20))
export ZSTD_SYS_USE_PKG_CONFIG="${ZSTD_SYS_USE_PKG_CONFIG:-1}"
cargo build --release "${packages[@]}"
built=$(cd "${CARGO_TARGET_DIR:-target}/release" && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)
worst=0
for name in "${programs[@]}"; do
    objcopy --only-keep-debug "$built/$name" "$out/$name.debug"
    chmod 644 "$out/$name.debug"
    # The link names the file without a directory, and has its checksum.
    (cd "$out" && objcopy --strip-all --add-gnu-debuglink="$name.debug" "$built/$name" "$name.new" &&
        mv "$name.new" "$name")
    size=$(stat -c %s "$out/$name")
    echo "$name: $((size >> 10)) KiB, and $(($(stat -c %s "$out/$name.debug") >> 10)) KiB of debug information"
    case $name in ballastd | ballast)
        [ "$size" -lt "$most" ] || { echo "$name has $size bytes; at most $most are allowed" >&2; worst=1; }
        ;;
    esac
done
echo "release: $out"
exit $worst
