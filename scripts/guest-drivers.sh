#!/bin/sh
# Copy a guest's drivers out of an unpacked Debian kernel package, each with a list of what to load for it.
#
#   guest-drivers.sh MODULES FOLDER
#
# MODULES  the package's lib/modules/RELEASE
# FOLDER   gets DRIVER.ko and, for each driver that scripts/guest/init loads, DRIVER.list: the files to load, in order.
#          The list of a driver that is built in, or not in that package, is empty.
# Environment: BUSYBOX (busybox), whose xzcat unpacks drivers.
set -eu
[ $# = 2 ] || { sed -n '4,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
modules=$1 out=$2

# put NAME LIST: copy driver NAME and, before it, what it says it depends on; write the load order to LIST.
put() {
    file=$(find "$modules" -name "$1.ko" -o -name "$1.ko.xz" | head -n 1)
    [ -n "$file" ] || return 0 # built in, or not in this kernel
    case $file in
    *.xz) "${BUSYBOX:-busybox}" xzcat "$file" >"$out/$1.ko" ;;
    *) cp "$file" "$out/$1.ko" ;;
    esac
    # File names may use `-` where a dependency says `_`; both are looked for.
    for need in $(tr '\0' '\n' <"$out/$1.ko" | sed -n 's/^depends=//p' | tr ',' ' '); do
        (put "$need" "$2"; put "$(echo "$need" | tr _ -)" "$2")
    done
    grep -qx "$1.ko" "$2" 2>/dev/null || echo "$1.ko" >>"$2"
}
mkdir -p "$out"
for driver in virtio_pci virtio_net virtio_blk virtio_console virtio-rng virtio_balloon virtio_mem; do
    : >"$out/$driver.list"
    put "$driver" "$out/$driver.list"
done
