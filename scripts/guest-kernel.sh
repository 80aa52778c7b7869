#!/bin/bash
# Fetch a newer kernel of Debian's than the test guest's, for suites that run inside QEMU.
#
#   guest-kernel.sh SUITE FOLDER [--refresh]
#
# SUITE   a suite of Debian's: trixie, trixie-backports
# FOLDER  gets vmlinuz, kernel-release and, where the image has them, drivers/ (see guest-drivers.sh); nothing is
#         fetched if kernel-release is there
#
# The newest cloud kernel of that suite comes from the same place as this machine's packages, by package lists of its
# own. It is unpacked and never installed. Exit code: 0 there, 3 it cannot be fetched (the reason is printed).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 2 ] || { sed -n '4,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
suite=$1 out=$2
# Written last.
is_there() { [ "${1:-}" != --refresh ] && [ -s "$out/kernel-release" ]; }
is_there "${3:-}" && exit 0
missing() { echo "guest-kernel: $*" >&2; exit 3; }
for tool in apt-get apt-cache dpkg busybox; do command -v $tool >/dev/null || missing "$tool is not installed"; done
mkdir -p "$out"
exec 9>"$out/.lock"
flock 9
is_there "${3:-}" && exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
place=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' |
    grep -v security | head -n 1 || true)
[ -n "$place" ] || missing "apt knows no place of Debian's packages"
mkdir -p "$work/lists/partial" "$work/debs"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $place $suite main" >"$work/sources.list"
apt=(-qq -o APT::Sandbox::User=root -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=-
    -o Dir::State::Lists="$work/lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=)
apt-get "${apt[@]}" -o APT::Update::Error-Mode=any update || missing "no package lists of $suite"
release=$(apt-cache "${apt[@]}" depends linux-image-cloud-amd64 |
    sed -n 's/.*Depends: linux-image-\([0-9].*\)/\1/p' | head -n 1 || true)
[ -n "$release" ] || missing "no linux-image-cloud-amd64 in $suite"
# The image itself, or since 7.3 a package of its own that it depends on.
(cd "$work/debs" && apt-get "${apt[@]}" download "linux-image-$release" &&
    { apt-get "${apt[@]}" download "linux-binary-$release" 2>/dev/null || true; }) ||
    missing "linux-image-$release cannot be fetched"
for package in "$work"/debs/*.deb; do dpkg -x "$package" "$work/tree"; done
kernel=$(find "$work/tree" -name 'vmlinuz*' -type f | head -n 1)
[ -n "$kernel" ] || missing "linux-image-$release holds no kernel"
modules=$(find "$work/tree" -type d -path '*/lib/modules/*' -name "$release" | head -n 1)
rm -rf "$out/drivers"
# Newer kernels have theirs in a package of their own.
[ -z "$modules" ] || "$here/guest-drivers.sh" "$modules" "$out/drivers"
cp "$kernel" "$out/vmlinuz"
echo "$release" >"$out/kernel-release"
