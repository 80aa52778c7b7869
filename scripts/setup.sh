#!/bin/sh
# Install what `make demo` and `make test` need on a Debian machine. Run again, it finds everything there and ends.
#
# Only QEMU and a C linker are installed. Redis and the guest's kernel are not: guest-image.sh unpacks their packages
# under target/guest, so no service starts and nothing of the host's boot changes.
set -eu
say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Floor of the Rust toolchain; Cargo.toml holds the same as rust-version.
rust_floor=1.95

[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || die "needs Linux on x86_64; this is $(uname -s) on $(uname -m)"

missing=
want() { [ -e "$1" ] || command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
want qemu-system-x86_64 qemu-system-x86
want gcc gcc
want make make
want flock util-linux
want jq jq
want awk mawk
want busybox busybox-static
want cpio cpio
want python3 python3
python3 -m pip --version >/dev/null 2>&1 || missing="$missing python3-pip"
want pkg-config pkg-config
want /usr/include/zstd.h libzstd-dev
want /usr/include/stdio.h libc6-dev
want /etc/ssl/certs/ca-certificates.crt ca-certificates # cargo fetches crates over TLS

index_is_there() { apt-cache show linux-image-cloud-amd64 >/dev/null 2>&1; }

if [ -n "$missing" ] || ! [ -s "$(dirname "$0")/../target/guest/stamp" ]; then
    command -v apt-get >/dev/null || die "needs Debian's apt-get; elsewhere, install by hand:$missing"
    if ! index_is_there; then
        [ "$(id -u)" = 0 ] || die "apt has no package lists; as root: apt-get update"
        say "fetching package lists"
        apt-get -qq update
        index_is_there || die "apt knows no linux-image-cloud-amd64; is this Debian 12 or newer?"
    fi
fi

if [ -n "$missing" ]; then
    [ "$(id -u)" = 0 ] || die "as root: apt-get install --no-install-recommends$missing"
    say "installing$missing"
    # shellcheck disable=SC2086
    install() { DEBIAN_FRONTEND=noninteractive apt-get -qq -y install --no-install-recommends $missing >/dev/null; }
    # Lists may be older than the mirror's packages: look again once.
    install || { say "trying again with fresh package lists"; apt-get -qq update && install; } ||
        die "apt-get could not install:$missing"
fi

# Rust comes from rustup: Debian's own is too old.
[ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ] && PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
command -v cargo >/dev/null ||
    die "no cargo found. Install Rust $rust_floor or newer with rustup (Debian's rustc is too old), then run this again"
cd "$(dirname "$0")/.." # so that rust-toolchain.toml speaks
version=$(rustc --version | awk '{ print $2 }')
[ "$(printf '%s\n%s\n' "$rust_floor" "$version" | sort -V | head -n 1)" = "$rust_floor" ] ||
    die "rustc is $version, but $rust_floor or newer is needed: rustup update stable"

# A full disk ends a build with a linker error that does not name it. What target/ holds already counts as free.
need_gib=8
free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
built_kib=$( { [ -d target ] && du -sk target; } | awk '{ print $1 }')
[ $((free_kib + ${built_kib:-0})) -ge $((need_gib * 1024 * 1024)) ] ||
    die "needs $need_gib GiB for target/ on the file system of $PWD; $((free_kib / 1024)) MiB are free"

say "ready: $(qemu-system-x86_64 --version | awk 'NR == 1 { print $1, $2, $4 }'), rustc $version"
