#!/bin/bash
# In the machine of libvirt-suite.sh: runs the suite, says whether all of it succeeded, ends the machine.
set -u
cd /suite || exit 1
export HOME=/root LC_ALL=C TERM=dumb COLUMNS=160
worst=0
modprobe kvm_amd || true
echo "libvirt: $(. /etc/os-release && echo "$PRETTY_NAME"), Linux $(uname -r), $(virsh --version) of libvirt," \
    "booted in $(cut -d. -f1 /proc/uptime) s"
# shellcheck disable=SC2046
bash "./$(cat name).sh" $(cat steps) || worst=1
echo "libvirt: answer $worst"
sync
systemctl poweroff --force --force
