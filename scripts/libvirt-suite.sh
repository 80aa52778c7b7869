#!/bin/bash
# VMs as operators have them: QEMU under libvirt and in a scope of systemd's, with cgroup 2 and zram, adopted by our
# programs. All of it is in a machine inside QEMU: Debian with systemd, libvirt and the guest of guest-image.sh.
#
#   libvirt-suite.sh [adopt | deb [STEP=SECONDS...]]
#
# adopt   VMs that run already (docs/adopt.md); the default; programs are this workspace's, unoptimised
# deb     the package of the release programs, and domains with its emulator (docs/libvirt.md)
# STEP    runs these steps alone: functions of scripts/libvirt/adopt.sh or deb.sh, each with its deadline
#
# Each step prints a line and has a deadline. The machine's image is made once, of Debian's packages, in
# target/guest/libvirt; nothing of it is installed here.
#
# Environment: DEBIAN (trixie; or bookworm), PROGRAMS (none: the folder of other programs), QEMU_SECONDS (3600: the
#              machine is ended after this long), QEMU_ARGS and KERNEL_ARGS (none: more words of QEMU's, and of the
#              kernel's: systemd.debug_shell=ttyS2, say), CPUS (1 for deb, else 2: with two emulated CPUs the kernel of
#              deb's machine crashed in three of three runs, once at a breakpoint of a patch of its own scheduler).
# Exit code: 0 all steps succeeded, or SKIP; 1 one failed, 2 usage, 4 no answer in time.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=${1:-adopt}
[ $# = 0 ] || shift
case $suite in
    adopt | deb) ;;
    *) sed -n '5,19s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
cpus=$([ "$suite" = deb ] && echo 1 || echo 2)
debian=${DEBIAN:-trixie}
guest=${BALLAST_GUEST_DIR:-target/guest}
out=$guest/libvirt/$debian
skip() {
    echo "SKIP needs=libvirt: $*"
    case ,${REQUIRE:-}, in *,libvirt,*) exit 1 ;; esac
    exit 0
}
for tool in qemu-system-x86_64 busybox cpio strip; do
    command -v $tool >/dev/null || skip "$tool is not installed (apt-get install mmdebstrap e2fsprogs)"
done
[ "$(id -u)" = 0 ] || skip "the image is made as root"
[ -s "$guest/initrd.img" ] || skip "there is no guest; run scripts/guest-image.sh"
scripts/libvirt/image.sh "$debian" "$out" || skip "the machine's image cannot be made"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 4' INT TERM
payload=$work/payload
built=${PROGRAMS:-${CARGO_TARGET_DIR:-target}/debug}
mkdir -p "$payload/etc/systemd/system/multi-user.target.wants" "$payload/suite"
case $suite,${PROGRAMS:-} in
    adopt,) cargo build -q -p ballast-cli -p ballast-daemon -p ballast-preload ;;
    deb,)
        built=$work/release
        scripts/release.sh --product "$built"
        ;;
esac
for program in ballast ballastd libballast_preload.so; do
    strip --strip-debug -o "$work/$program" "$built/$program"
done
if [ "$suite" = deb ]; then
    # Two builds, of which the later one differs by its version alone.
    for build in first=0.1.0 later=0.1.1; do
        mkdir -p "$payload/suite/debs/${build%=*}"
        scripts/deb.sh --programs "$work" --version "${build#*=}"
        mv target/dist/ballast_"${build#*=}"_*.deb "$payload/suite/debs/${build%=*}"
    done
    cp docs/libvirt.md "$payload/suite"
else
    install -D -t "$payload/usr/local/bin" "$work/ballast" "$work/ballastd"
    cp configs/ballastd.service "$payload/etc/systemd/system"
fi
units=$payload/etc/systemd/system
cp scripts/libvirt/suite.service "$units"
ln -s ../suite.service "$units/multi-user.target.wants"
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer logrotate.timer \
    getty@tty1.service serial-getty@ttyS0.service getty-static.service systemd-importd.socket; do
    ln -s /dev/null "$units/$unit"
done
# Little swap, so that a step that fills it is quick; two guests of 192 MiB can be held to 16 MiB each.
printf '[zram0]\nzram-size = 480\n' >"$payload/etc/systemd/zram-generator.conf"
# A person who types "apt install" says yes to it.
mkdir -p "$payload/etc/apt/apt.conf.d"
echo 'APT::Get::Assume-Yes "true";' >"$payload/etc/apt/apt.conf.d/90yes"
cp "$guest/vmlinuz" "$guest/initrd.img" scripts/libvirt/*.{sh,py} "$payload/suite"
echo "$suite" >"$payload/suite/name"
echo "$*" >"$payload/suite/steps"
tar -C "$payload" --owner=0 --group=0 -cf "$work/payload.tar" .

start=$SECONDS
# shellcheck disable=SC2086
timeout "${QEMU_SECONDS:-3600}" qemu-system-x86_64 -accel tcg,thread=multi -machine q35 -cpu max -smp "${CPUS:-$cpus}" \
    -m 4G -nodefaults -display none -no-reboot -serial "file:$out/console" -serial stdio \
    -drive "file=$out/root.ext4,format=raw,if=virtio,snapshot=on" \
    -drive "file=$work/payload.tar,format=raw,if=virtio,readonly=on" -device virtio-rng-pci \
    -kernel "$out/vmlinuz" -initrd "$out/initrd" ${QEMU_ARGS:-} \
    -append "console=ttyS0 quiet panic=-1 no_timer_check ${KERNEL_ARGS:-}" \
    </dev/null 2>&1 | sed -u 's/\r//' | tee "$out/answers" || true
echo "libvirt: $((SECONDS - start)) s"
answer=$(sed -n 's/^libvirt: answer \([01]\)$/\1/p' "$out/answers" | tail -n 1)
[ -n "$answer" ] || { echo "libvirt: the machine ended without an answer; see $out/console" >&2; exit 4; }
exit "$answer"
