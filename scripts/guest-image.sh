#!/bin/sh
# Make the test guest: an unmodified Debian cloud kernel and an initrd with busybox and Redis, in target/guest/.
#
# Before: scripts/setup.sh. After: `testvm::qemu` boots vmlinuz and initrd.img. Packages are downloaded and unpacked,
# never installed: nothing on the host changes outside target/guest. Does nothing when the image is there and this
# script, guest-drivers.sh and guest/init are unchanged; `--refresh` makes it again with the newest packages.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${BALLAST_GUEST_DIR:-$here/../target/guest}
mkdir -p "$out"
out=$(cd "$out" && pwd)
say() { printf 'guest: %s\n' "$*"; }
die() { printf 'guest: %s\n' "$*" >&2; exit 1; }

exec 9>"$out/.lock"
flock 9

want=$(cat "$here/guest-image.sh" "$here/guest-drivers.sh" "$here/guest/init" | sha256sum | cut -d' ' -f1)
if [ "${1:-}" != --refresh ] && [ -s "$out/vmlinuz" ] && [ -s "$out/initrd.img" ] &&
    [ "$(cat "$out/stamp" 2>/dev/null)" = "$want" ]; then
    say "up to date ($(cat "$out/kernel-release"))"
    exit 0
fi
[ "$(uname -m)" = x86_64 ] || die "the guest image is for x86_64; this machine is $(uname -m)"
for tool in apt-get apt-cache dpkg; do
    command -v $tool >/dev/null || die "needs $tool: the guest is made of Debian packages (Debian 12 or newer)"
done

# --- packages ---------------------------------------------------------------------------------------------------
# One look at the package graph: lines "PACKAGE NEED"; of alternatives the first.
graph=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
    --no-enhances linux-image-cloud-amd64 redis-server 2>/dev/null | awk '
    /^[^ ]/ { package = $1; skip = 0 }
    /Depends:/ { if (!skip) print package, $2; skip = ($1 ~ /^\|/) }')
kernel=$(echo "$graph" | awk '$1 == "linux-image-cloud-amd64" && $2 ~ /^linux-image-/ { print $2; exit }')
[ -n "$kernel" ] || die "apt knows no linux-image-cloud-amd64; run scripts/setup.sh first (or apt-get update)"
# Redis and its libraries: follow only lib* packages and zlib. Perl belongs to maintainer scripts, which we never run.
packages=$(echo "$graph" | awk '
    { need[$1] = need[$1] " " $2 }
    END {
        last = split("busybox-static redis-server redis-tools", queue)
        for (i = 1; i <= last; i++) {
            print queue[i]
            count = split(need[queue[i]], found)
            for (j = 1; j <= count; j++) if (found[j] ~ /^z?lib/ && !seen[found[j]]++) queue[++last] = found[j]
        }
    }')
rm -rf "$out/debs"
mkdir -p "$out/debs"
cd "$out/debs"
say "downloading $kernel and $(echo "$packages" | wc -l) packages for Redis and busybox"
# shellcheck disable=SC2086
apt-get -o APT::Sandbox::User=root -qq download "$kernel" $packages || die "apt-get download failed"

# --- unpack -----------------------------------------------------------------------------------------------------
tree=$out/tree image=$out/image
rm -rf "$tree" "$image"
mkdir -p "$tree" "$image/lib/modules"
say "unpacking"
for package in "$out"/debs/*.deb; do dpkg -x "$package" "$tree"; done

# --- kernel and drivers -----------------------------------------------------------------------------------------
release=${kernel#linux-image-}
# Newer Debian's image package is a signed wrapper of the same name; the files' own name decides.
release=$(basename "$(ls "$tree"/boot/vmlinuz-* | head -n 1)" | sed 's/^vmlinuz-//')
busybox=$(find "$tree" -path '*/bin/busybox' | head -n 1)
[ -x "$busybox" ] || die "busybox-static holds no busybox"
modules=$(find "$tree" -type d -path "*/lib/modules/$release")

BUSYBOX=$busybox "$here/guest-drivers.sh" "$modules" "$image/lib/modules"
# For scripts/kvm-suite.sh, which has a machine of its own.
rm -rf "$out/modules"
mkdir -p "$out/modules"
for driver in irqbypass kvm kvm-amd; do
    find "$modules" \( -name "$driver.ko" -o -name "$driver.ko.xz" \) -exec cp {} "$out/modules/" \;
done
[ -s "$image/lib/modules/virtio_net.list" ] || die "no virtio_net in $kernel"

# --- programs ---------------------------------------------------------------------------------------------------
mkdir -p "$image/bin" "$image/lib64" "$image/lib/x86_64-linux-gnu" "$image/proc" "$image/sys" "$image/dev" "$image/etc"
cp "$busybox" "$image/bin/busybox"
for applet in $("$busybox" --list); do ln -s busybox "$image/bin/$applet" 2>/dev/null || true; done
cp -L "$tree/usr/bin/redis-server" "$image/bin/redis-server"
loader=$(find "$tree" -name 'ld-linux-x86-64.so.2' | head -n 1)
libraries=$(find "$tree" -type d -path '*/lib/x86_64-linux-gnu' | tr '\n' ':')
# The package's own loader says which of the package's own libraries Redis takes.
"$loader" --library-path "$libraries" --list "$image/bin/redis-server" >"$out/libraries"
# What the packages lack the loader takes from the host, and the guest would miss it.
awk -v tree="$tree/" '$2 == "=>" && index($3, tree) != 1' "$out/libraries" >"$out/strays"
[ ! -s "$out/strays" ] || die "redis-server needs libraries of packages that were not downloaded: $(cat "$out/strays")"
awk '$2 == "=>" { print $3 }' "$out/libraries" | while read -r library; do
    cp -L "$library" "$image/lib/x86_64-linux-gnu/"
done
cp -L "$loader" "$image/lib64/ld-linux-x86-64.so.2"
cp "$here/guest/init" "$image/init"
chmod 755 "$image/init"

# --- initrd -----------------------------------------------------------------------------------------------------
(cd "$image" && find . | "$busybox" cpio -o -H newc 2>/dev/null) >"$out/initrd.new"
cp "$tree/boot/vmlinuz-$release" "$out/vmlinuz.new"
echo "$release" >"$out/kernel-release"
mv "$out/vmlinuz.new" "$out/vmlinuz"
mv "$out/initrd.new" "$out/initrd.img"
echo "$want" >"$out/stamp"
rm -rf "$tree" "$image" "$out/debs" "$out/strays"
say "ready: Linux $release, initrd $(du -h "$out/initrd.img" | cut -f1)"
