#!/bin/bash
# Make the guest of the agent's tests: Debian 13's unmodified cloud kernel (6.12) and an initrd with `ballast-agent`, in
# target/guest/agent/.
#
# Before: scripts/guest-image.sh. After: tests boot vmlinuz and initrd.img. The initrd is the test guest's, with a
# second archive behind it: this kernel's drivers and the agent, linked statically.
# Packages are downloaded and unpacked, never installed. The kernel is kept once it is there; `--refresh` fetches it
# anew.
set -euo pipefail
cd "$(dirname "$0")/.."
guest=${BALLAST_GUEST_DIR:-target/guest}
out=$guest/agent
suite=trixie
skip() {
    echo "SKIP needs=agent-image: $*"
    case ,${REQUIRE:-}, in *,agent-image,*) exit 1 ;; esac
    exit 0
}
mkdir -p "$out"
exec 9>"$out/.lock"
flock 9

# The kernel of this suite of Debian's, from the same place as this machine's packages, by package lists of its own.
fetch() {
    local work place release
    work=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$work'" EXIT
    place=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' |
        grep -v security | head -n 1 || true)
    [ -n "$place" ] || skip "apt knows no place of Debian's packages"
    mkdir -p "$work/lists/partial" "$work/debs"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $place $suite main" >"$work/sources.list"
    local apt=(-qq -o APT::Sandbox::User=root -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=-
        -o Dir::State::Lists="$work/lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=)
    apt-get "${apt[@]}" -o APT::Update::Error-Mode=any update || skip "no package lists of $suite"
    release=$(apt-cache "${apt[@]}" depends linux-image-cloud-amd64 |
        sed -n 's/.*Depends: linux-image-\([0-9].*\)/\1/p' | head -n 1 || true)
    [ -n "$release" ] || skip "no linux-image-cloud-amd64 in $suite"
    (cd "$work/debs" && apt-get "${apt[@]}" download "linux-image-$release") ||
        skip "linux-image-$release cannot be fetched"
    for package in "$work"/debs/*.deb; do dpkg -x "$package" "$work/tree"; done
    local kernel modules
    kernel=$(find "$work/tree" -name 'vmlinuz*' -type f | head -n 1)
    modules=$(find "$work/tree" -type d -path "*/lib/modules/$release" | head -n 1)
    [ -n "$kernel" ] && [ -n "$modules" ] || skip "linux-image-$release holds no kernel"
    rm -rf "$out/modules"
    mkdir -p "$out/modules"
    # The lists of the test guest's /init, of this kernel's drivers: each after what it depends on.
    put() {
        local file need
        file=$(find "$modules" -name "$1.ko" -o -name "$1.ko.xz" | head -n 1)
        [ -n "$file" ] || return 0 # built in
        case $file in
        *.xz) busybox xzcat "$file" >"$out/modules/$1.ko" ;;
        *) cp "$file" "$out/modules/$1.ko" ;;
        esac
        for need in $(tr '\0' '\n' <"$out/modules/$1.ko" | sed -n 's/^depends=//p' | tr ',' ' '); do
            put "$need" "$2"
            put "$(echo "$need" | tr _ -)" "$2"
        done
        grep -qx "$1.ko" "$2" 2>/dev/null || echo "$1.ko" >>"$2"
    }
    local driver
    for driver in virtio_pci virtio_net virtio_blk virtio_console virtio-rng virtio_balloon virtio_mem; do
        : >"$out/modules/$driver.list"
        put "$driver" "$out/modules/$driver.list"
    done
    cp "$kernel" "$out/vmlinuz"
    echo "$release" >"$out/kernel-release"
    rm -rf "$work"
    trap - EXIT
}
for tool in busybox cpio apt-get dpkg; do
    command -v $tool >/dev/null || skip "$tool is not installed; run scripts/setup.sh"
done
[ -s "$guest/initrd.img" ] || skip "no test guest; run scripts/guest-image.sh"
[ "${1:-}" != --refresh ] && [ -s "$out/kernel-release" ] || fetch

RUSTFLAGS='-C target-feature=+crt-static' CARGO_TARGET_DIR=target/static \
    cargo build --quiet --release --target x86_64-unknown-linux-gnu -p ballast-agent
program=target/static/x86_64-unknown-linux-gnu/release/ballast-agent
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/bin" "$root/lib/modules"
cp "$program" "$root/bin/ballast-agent"
cp "$out"/modules/* "$root/lib/modules/"
{
    cat "$guest/initrd.img"
    # An archive begins at a multiple of four bytes.
    head -c $((-$(stat -c %s "$guest/initrd.img") & 3)) /dev/zero
    (cd "$root" && find . | cpio --quiet -o -H newc)
} >"$out/initrd.new"
mv "$out/initrd.new" "$out/initrd.img"
echo "guest with agent: Linux $(cat "$out/kernel-release"), agent $(stat -c %s "$program") bytes"
