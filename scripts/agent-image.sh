#!/bin/bash
# Make the guest of the agent's tests: Debian 13's unmodified cloud kernel (6.12) and an initrd with `ballast-agent`, in
# target/guest/agent/.
#
# Before: scripts/guest-image.sh. After: tests boot vmlinuz and initrd.img. The initrd is the test guest's, with a
# second archive behind it: this kernel's drivers, the agent and `tier-guest`, linked statically, and what tests run.
# Packages are downloaded and unpacked, never installed. The kernel is kept once it is there; `--refresh` fetches it
# again. `--with memcached` or `--with cc1` (GCC's compiler, 38 MB) fetches that program for `ballast bench guest`,
# which is in the guest from then on, instead of the other one.
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
[ "${1:-}" = --with ] || scripts/guest-kernel.sh trixie "$out" "${1:-}" || skip "the kernel cannot be fetched"
[ -d "$out/drivers" ] || skip "no drivers of this kernel; run scripts/agent-image.sh --refresh"

# Of this machine's Debian, as the test guest's Redis is; libraries that it has are left out.
if [ "${1:-}" = --with ]; then
    program=$2
    case $program in
        memcached) package=memcached ;;
        cc1) package=cpp ;;
        *) echo "agent-image: no program $program" >&2 && exit 2 ;;
    esac
    debs=$(mktemp -d)
    needs=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
        --no-enhances $package | awk '/^(lib|zlib|cpp-)/ { print $1 }' | sort -u)
    # shellcheck disable=SC2086
    (cd "$debs" && apt-get -o APT::Sandbox::User=root -qq download $package $needs) || skip "no $program"
    for package in "$debs"/*.deb; do dpkg -x "$package" "$debs/tree"; done
    rm -rf "$out/program"
    mkdir -p "$out/program/bin" "$out/program/lib/x86_64-linux-gnu"
    find "$debs/tree/usr" -type f -name "$program" -exec cp {} "$out/program/bin/" \;
    loader=$(find "$debs/tree" -name 'ld-linux-x86-64.so.2' | head -n 1)
    libraries=$(find "$debs/tree" -type d -path '*/lib/x86_64-linux-gnu' | tr '\n' ':')
    "$loader" --library-path "$libraries" --list "$out/program/bin/$program" | awk '$2 == "=>" { print $3 }' |
        while read -r library; do
            grep -qF "/${library##*/} " "$guest/libraries" || cp -L "$library" "$out/program/lib/x86_64-linux-gnu/"
        done
    rm -rf "$debs"
fi

RUSTFLAGS='-C target-feature=+crt-static' CARGO_TARGET_DIR=target/static \
    cargo build --quiet --release --target x86_64-unknown-linux-gnu -p ballast-agent -p ballast-tierguest
programs=target/static/x86_64-unknown-linux-gnu/release
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/bin" "$root/lib/modules"
for program in ballast-agent tier-guest; do strip -o "$root/bin/$program" "$programs/$program"; done
cp scripts/guest/*-test scripts/guest/*-load "$root/bin/"
cp "$out"/drivers/* "$root/lib/modules/"
[ ! -d "$out/program" ] || cp -r "$out/program/." "$root/"
{
    cat "$guest/initrd.img"
    # An archive begins at a multiple of four bytes.
    head -c $((-$(stat -L -c %s "$guest/initrd.img") & 3)) /dev/zero
    (cd "$root" && find . | cpio --quiet -o -H newc)
} >"$out/initrd.new"
mv "$out/initrd.new" "$out/initrd.img"
echo "guest with agent: Linux $(cat "$out/kernel-release"), agent $(stat -c %s "$root/bin/ballast-agent") bytes"
