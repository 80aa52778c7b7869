#!/bin/bash
# Make the guest of the agent's tests: Debian 13's unmodified cloud kernel (6.12) and an initrd with `ballast-agent`, in
# target/guest/agent/.
#
# Before: scripts/guest-image.sh. After: tests boot vmlinuz and initrd.img. The initrd is the test guest's, with a
# second archive behind it: this kernel's drivers, the agent and `tier-guest`, linked statically, and what tests run.
# Packages are downloaded and unpacked, never installed. The kernel is kept once it is there; `--refresh` fetches it
# again.
set -euo pipefail
cd "$(dirname "$0")/.."
guest=${BALLAST_GUEST_DIR:-target/guest}
out=$guest/agent
skip() {
    echo "SKIP needs=agent-image: $*"
    case ,${REQUIRE:-}, in *,agent-image,*) exit 1 ;; esac
    exit 0
}
for tool in busybox cpio; do
    command -v $tool >/dev/null || skip "$tool is not installed; run scripts/setup.sh"
done
[ -s "$guest/initrd.img" ] || skip "no test guest; run scripts/guest-image.sh"
scripts/guest-kernel.sh trixie "$out" "${1:-}" || skip "the kernel cannot be fetched"
[ -d "$out/drivers" ] || skip "no drivers of this kernel; run scripts/agent-image.sh --refresh"

RUSTFLAGS='-C target-feature=+crt-static' CARGO_TARGET_DIR=target/static \
    cargo build --quiet --release --target x86_64-unknown-linux-gnu -p ballast-agent -p ballast-tierguest
programs=target/static/x86_64-unknown-linux-gnu/release
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/bin" "$root/lib/modules"
for program in ballast-agent tier-guest; do strip -o "$root/bin/$program" "$programs/$program"; done
cp scripts/guest/*-test scripts/guest/*-load "$root/bin/"
cp "$out"/drivers/* "$root/lib/modules/"
{
    cat "$guest/initrd.img"
    # An archive begins at a multiple of four bytes.
    head -c $((-$(stat -L -c %s "$guest/initrd.img") & 3)) /dev/zero
    (cd "$root" && find . | cpio --quiet -o -H newc)
} >"$out/initrd.new"
mv "$out/initrd.new" "$out/initrd.img"
echo "guest with agent: Linux $(cat "$out/kernel-release"), agent $(stat -c %s "$root/bin/ballast-agent") bytes"
