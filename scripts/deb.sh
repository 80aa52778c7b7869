#!/bin/bash
# A Debian package and a tarball of the product, from the programs of scripts/release.sh.
#
#   scripts/deb.sh [--programs DIR] [--version VERSION] [--sbom]
#
#   --programs DIR      (target/dist) has ballastd, ballast and libballast_preload.so
#   --version VERSION   of the package; by default the workspace's
#   --sbom              also makes target/dist/NAME.cdx.json for each program: what it is built from, in CycloneDX 1.4
#                       (installs cargo-sbom in target/tools)
#
# Environment: DEBFULLNAME and DEBEMAIL of the maintainer, SOURCE_DATE_EPOCH (the last commit's time).
#
# Makes target/dist/ballast_VERSION_ARCH.deb, target/dist/ballast-VERSION-ARCH.tar.gz, and SHA256SUMS of both. The
# package runs on the Debian that it was built on, and on newer ones: build it on the oldest that it is for.
# Needs dpkg-dev (dpkg-shlibdeps) and gzip. Exit code: 0, or 1 if something is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
programs=target/dist
sbom=
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
while [ $# -gt 0 ]; do
    case $1 in
    --programs) programs=$2; shift ;;
    --version) version=$2; shift ;;
    --sbom) sbom=yes ;;
    *) echo "unknown option $1" >&2; exit 1 ;;
    esac
    shift
done
maintainer="${DEBFULLNAME:-Ballast} <${DEBEMAIL:-root@localhost.localdomain}>"
arch=$(dpkg --print-architecture)
machine=$(uname -m)
out=target/dist
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/ballast
put() { install -D -m "$1" "$2" "$root/$3"; }

put 755 "$programs/ballastd" usr/bin/ballastd
put 755 "$programs/ballast" usr/bin/ballast
put 644 "$programs/libballast_preload.so" usr/lib/ballast/libballast_preload.so
# The emulators: libvirt and its neighbours take one of these names for QEMU's.
for name in qemu "qemu-system-$machine"; do
    ln -s ../../bin/ballast "$root/usr/lib/ballast/$name"
done

unit() { install -d "$root/usr/lib/systemd/system"; sed "$2" "configs/$1" >"$root/usr/lib/systemd/system/$1"; }
settings='s|^ExecStart=/usr/local/bin/ballastd$|ExecStart=/usr/bin/ballastd --config /etc/ballast/ballastd.toml|'
paths='s|/usr/local/bin|/usr/bin|g; 1s|Install as .*||'
unit ballastd.service "$settings; /^# With settings:/d; /^# ExecStart=/d; $paths"
unit ballast-metrics.socket ""
unit ballast-metrics.service ""
put 644 configs/debian/sysusers.conf usr/lib/sysusers.d/ballast.conf

install -d "$root/etc/ballast"
sed 's|^# key: reader_group = .*|reader_group = "ballast"|; s|^# key: attach_group = .*|attach_group = "kvm"|' \
    configs/ballastd.toml >"$root/etc/ballast/ballastd.toml"
put 644 configs/debian/emulator etc/ballast/emulator
put 644 configs/debian/apparmor etc/apparmor.d/abstractions/ballast
# Debian 13's libvirt includes this directory. Debian 12's reads a file of local rules, to which `postinst` adds a line.
install -d "$root/etc/apparmor.d/abstractions/libvirt-qemu.d"
echo 'include <abstractions/ballast>' >"$root/etc/apparmor.d/abstractions/libvirt-qemu.d/ballast"

install -d "$root/usr/share/man/man1" "$root/usr/share/man/man8"
"$programs/ballast" man "$root/usr/share/man/man1"
install -m 644 configs/debian/ballastd.8 "$root/usr/share/man/man8/"
gzip -9n "$root"/usr/share/man/man?/*
complete() { install -d "$root/$2"; "$programs/ballast" completions "$1" >"$root/$2/$3"; }
complete bash usr/share/bash-completion/completions ballast
complete zsh usr/share/zsh/vendor-completions _ballast
complete fish usr/share/fish/vendor_completions.d ballast.fish

# The page of docs/web.md in Cockpit; rules and a dashboard for Prometheus and Grafana.
for file in web/*; do
    put 644 "$file" "usr/share/cockpit/ballast/${file#web/}"
done
put 644 configs/prometheus/ballast.rules.yml usr/share/ballast/prometheus/ballast.rules.yml
put 644 configs/grafana/ballast.json usr/share/ballast/grafana/ballast.json

doc=usr/share/doc/ballast
for page in README.md ARCHITECTURE.md CHANGELOG.md docs/*.md docs/openapi.json examples/*.py; do
    put 644 "$page" "$doc/$page"
done
{
    echo "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/"
    echo "Upstream-Name: ballast"
    echo
    echo "Files: *"
    echo "Copyright: the authors of Ballast"
    echo "License: Apache-2.0"
    echo " On Debian systems, the text of the licence is in /usr/share/common-licenses/Apache-2.0."
} >"$root/$doc/copyright"
when=$(date -R -u -d "@${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}")
printf 'ballast (%s) unstable; urgency=medium\n\n  * See README.md.\n\n -- %s  %s\n' \
    "$version" "$maintainer" "$when" | gzip -9n >"$root/$doc/changelog.gz"

# The tarball has the same files; its unpacking at / is an installation without maintainer scripts.
tar -C "$root" --owner=0 --group=0 --sort=name -czf "$out/ballast-$version-$machine.tar.gz" .

install -d "$root/DEBIAN" "$work/debian"
for script in postinst prerm postrm; do
    install -m 755 "configs/debian/$script" "$root/DEBIAN/$script"
done
install -m 644 configs/debian/triggers "$root/DEBIAN/triggers"
(cd "$root" && find etc -type f | sort | sed 's|^|/|') >"$root/DEBIAN/conffiles"
: >"$work/debian/control"
libraries=$(cd "$work" && dpkg-shlibdeps -O --ignore-missing-info "$root/usr/bin/ballastd" "$root/usr/bin/ballast" \
    "$root/usr/lib/ballast/libballast_preload.so" 2>"$work/shlibdeps.log" | sed -n 's/^shlibs:Depends=//p') ||
    { cat "$work/shlibdeps.log" >&2; exit 1; }
cat >"$root/DEBIAN/control" <<CONTROL
Package: ballast
Version: $version
Architecture: $arch
Maintainer: $maintainer
Installed-Size: $(du -sk --exclude=DEBIAN "$root" | cut -f1)
Depends: $libraries
Recommends: qemu-system-x86
Enhances: libvirt-daemon-system
Section: admin
Priority: optional
Description: elastic memory for virtual machines
 Takes memory that a VM does not use and returns it on the first touch, with
 the exact bytes, in user space and under an unmodified QEMU. Has the daemon,
 the command for operators, and an emulator for libvirt.
CONTROL
(cd "$root" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum) \
    >"$root/DEBIAN/md5sums"
chmod 644 "$root/DEBIAN/"{md5sums,conffiles,control}
dpkg-deb --root-owner-group --build "$root" "$out/ballast_${version}_$arch.deb" >/dev/null
if [ -n "$sbom" ]; then
    [ -x target/tools/bin/cargo-sbom ] || cargo install --quiet --locked --root target/tools cargo-sbom
    for name in daemon cli preload; do
        target/tools/bin/cargo-sbom sbom --cargo-package "ballast-$name" --output-format cyclone_dx_json_1_4 \
            >"$out/ballast-$name.cdx.json"
    done
fi
(cd "$out" && sha256sum "ballast_${version}_$arch.deb" "ballast-$version-$machine.tar.gz" >SHA256SUMS)
echo "deb: $out/ballast_${version}_$arch.deb"
