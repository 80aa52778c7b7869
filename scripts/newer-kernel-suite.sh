#!/bin/bash
# What depends on the kernel, on a newer one than this machine's: the tests of sys and of pager that need only memory,
# and those of memory that fails, statically linked, inside QEMU. Above all those of userfaultfd's read-write protection
# (Linux 7.3).
#
# The kernel is the newest that Debian had for its stable release when this ran first. It is unpacked into
# target/guest/newer and never installed; `--refresh` fetches it again.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${BALLAST_GUEST_DIR:-target/guest}/newer
skip() {
    echo "SKIP needs=newer-kernel: $*"
    case ,${REQUIRE:-}, in *,newer-kernel,*) exit 1 ;; esac
    exit 0
}

# The kernel of this suite of Debian's, from the same place as this machine's packages, by package lists of its own.
suite=trixie-backports
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
    # The image itself, or since 7.3 a package of its own that it depends on.
    (cd "$work/debs" && apt-get "${apt[@]}" download "linux-image-$release" &&
        { apt-get "${apt[@]}" download "linux-binary-$release" 2>/dev/null || true; }) ||
        skip "linux-image-$release cannot be fetched"
    for package in "$work"/debs/*.deb; do dpkg -x "$package" "$work/tree"; done
    mkdir -p "$out"
    local kernel
    kernel=$(find "$work/tree" -name 'vmlinuz*' -type f | head -n 1)
    [ -n "$kernel" ] || skip "linux-image-$release holds no kernel"
    cp "$kernel" "$out/vmlinuz"
    echo "$release" >"$out/kernel-release"
    rm -rf "$work"
    trap - EXIT
}
for tool in qemu-system-x86_64 busybox cpio apt-get dpkg; do
    command -v $tool >/dev/null || skip "$tool is not installed; run scripts/setup.sh"
done
[ "${1:-}" != --refresh ] && [ -s "$out/kernel-release" ] || fetch
echo "newer kernel: Linux $(cat "$out/kernel-release")"

target=target/static
build() {
    RUSTFLAGS='-C target-feature=+crt-static' CARGO_TARGET_DIR=$target \
        cargo build --target x86_64-unknown-linux-gnu "$@"
}
build -p ballast-sys -p ballast-pager --tests
build -p ballast-store -p ballast-daemon --test arena_memory --test engine_memory --bin ballastd
# The newest program of this name is the one just built.
program() { ls -t "$target/x86_64-unknown-linux-gnu/debug/deps/$1"-* | grep -v '\.d$' | head -n 1; }
export FILES=$target/x86_64-unknown-linux-gnu/debug/ballastd
QEMU_MEMORY=4G QEMU_SECONDS=1200 REQUIRE=rwp,uffd,collapse,hwpoison exec scripts/in-qemu.sh "$out/vmlinuz" \
    "$(program ballast_sys) remote" "$(program unregister)" "$(program answered)" "$(program rwp)" \
    "$(program track)" "$(program coalesce)" "$(program shard)" "$(program native)" "$(program memory_error)" \
    "$(program ballast_sys) memory_error" "$(program arena_memory)" "$(program engine_memory)"
