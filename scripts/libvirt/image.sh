#!/bin/bash
# Make the machine of libvirt-suite.sh: a root file system of Debian's packages, its kernel, and an initrd that mounts
# it.
#
#   image.sh DEBIAN FOLDER
#
# DEBIAN  a suite of Debian's: bookworm, trixie
# FOLDER  gets root.ext4, vmlinuz and initrd; nothing is made if they are of this file
#
# Exit code: 0 there, 3 it cannot be made (the reason is printed).
set -euo pipefail
[ $# = 2 ] || { sed -n '5,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
debian=$1 out=$2
stamp=$(sha256sum "$0" | cut -d' ' -f1)
is_there() { [ "$(cat "$out/stamp" 2>/dev/null)" = "$stamp" ]; }
missing() { echo "libvirt image: $*" >&2; exit 3; }
for tool in apt-get mmdebstrap mke2fs busybox cpio; do
    command -v $tool >/dev/null || missing "$tool is not installed"
done
mkdir -p "$out"
exec 9>"$out/.lock"
flock 9
is_there && exit 0

packages=systemd-sysv,dbus,udev,kmod,iproute2,procps,jq,apparmor,systemd-zram-generator,linux-image-cloud-amd64
packages=$packages,libvirt-daemon-system,libvirt-daemon-driver-qemu,libvirt-clients,virtinst,qemu-system-x86
place=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' |
    grep -v security | head -n 1 || true)
[ -n "$place" ] || missing "apt knows no place of Debian's packages"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
echo "libvirt image: downloading and configuring $debian (minutes)"
mmdebstrap --quiet --mode=root --variant=minbase --include="$packages" --aptopt='Acquire::Languages "none"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' "$debian" "$root" \
    "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $place $debian main" >"$out/log" 2>&1 ||
    missing "mmdebstrap failed: $(tail -n 1 "$out/log")"

# AppArmor compiles all profiles at boot: half a minute here. libvirt's stay.
find "$root/etc/apparmor.d" -maxdepth 1 -type f ! -name '*libvirt*' ! -name '*virt-aa-helper*' -delete

# An initrd that loads what the root file system is on.
early=$work/early
mkdir -p "$early/bin" "$early/proc" "$early/sys" "$early/dev" "$early/root"
cp "$(command -v busybox)" "$early/bin/busybox"
release=$(basename "$(ls "$root"/boot/vmlinuz-* | sort -V | tail -n 1)" | sed 's/^vmlinuz-//')
"$(dirname "$0")/../guest-drivers.sh" "$root/usr/lib/modules/$release" "$early"
cat >"$early/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for driver in $(cat /virtio_pci.list /virtio_blk.list); do insmod "/$driver"; done
until [ -b /dev/vda ]; do usleep 50000; done
mount -t ext4 /dev/vda /root
# What this run has beside the image.
tar -x -C /root -f /dev/vdb
umount /proc /sys
mount --move /dev /root/dev
exec switch_root /root /lib/systemd/systemd
INIT
chmod 755 "$early/init"
(cd "$early" && find . | cpio --quiet -o -H newc) >"$out/initrd"
cp "$root/boot/vmlinuz-$release" "$out/vmlinuz"
# A machine may run on the image that is replaced.
rm -rf "$root"/boot/initrd.img-* "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*.bin
mke2fs -q -F -t ext4 -L root -O ^has_journal -d "$root" "$out/root.new" 3G || missing "no file system"
mv "$out/root.new" "$out/root.ext4"
echo "$stamp" >"$out/stamp"
echo "libvirt image: $debian, Linux $release"
