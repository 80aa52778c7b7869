#!/bin/sh
# Run statically linked programs where there is a /dev/kvm: inside QEMU's emulated AMD CPU, which has nested SVM.
#
#   kvm-in-qemu.sh KERNEL MODULES_DIR COMMAND...
#
# KERNEL       a kernel image (Debian's cloud kernel: /boot/vmlinuz-*)
# MODULES_DIR  its modules (/lib/modules/VERSION); irqbypass, kvm and kvm-amd are taken from it
# COMMAND      one word per command: "path/to/static-binary argument ..."; run in order with REQUIRE=kvm
#
# Environment: QEMU_MEMORY (2G), QEMU_CPUS (2), QEMU_SECONDS (600: the machine is ended after this long).
# Exit code: 0 all commands succeeded, 1 one failed, 2 usage, 3 something needed is missing, 4 the machine gave no answer.
set -eu

if [ $# -lt 3 ]; then
    sed -n '4,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
kernel=$1 modules=$2
shift 2
for tool in qemu-system-x86_64 busybox cpio timeout; do
    command -v "$tool" >/dev/null || { echo "kvm-in-qemu: $tool is not installed" >&2; exit 3; }
done
[ -r "$kernel" ] || { echo "kvm-in-qemu: no kernel at $kernel" >&2; exit 3; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 4' INT TERM
root=$work/root
mkdir -p "$root/bin" "$root/proc" "$root/sys" "$root/dev" "$root/tmp"
cp "$(command -v busybox)" "$root/bin/busybox"
for module in irqbypass kvm kvm-amd; do
    file=$(find "$modules" -name "$module.ko" -o -name "$module.ko.xz" | head -n 1)
    [ -n "$file" ] || { echo "kvm-in-qemu: no module $module in $modules" >&2; exit 3; }
    case $file in
        *.xz) xz -dc "$file" >"$root/$module.ko" ;;
        *) cp "$file" "$root/$module.ko" ;;
    esac
done

# /init is process 1: devices, modules, the commands one by one, then power off. The last line it prints is the answer.
{
    cat <<'INIT'
#!/bin/busybox sh
export PATH=/bin HOME=/tmp REQUIRE=kvm RUST_BACKTRACE=0
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
for module in irqbypass kvm kvm-amd; do insmod /$module.ko || echo "kvm-in-qemu: insmod $module failed"; done
worst=0
run() {
    number=$1
    shift
    echo "kvm-in-qemu: start $number: $*"
    "$@" </dev/null
    code=$?
    echo "kvm-in-qemu: end $number: exit $code"
    [ "$code" = 0 ] || worst=1
}
INIT
    number=0
    for command in "$@"; do
        number=$((number + 1))
        binary=${command%% *}
        [ -x "$binary" ] || { echo "kvm-in-qemu: no program $binary" >&2; exit 3; }
        name=$number-$(basename "$binary")
        cp "$binary" "$root/bin/$name"
        case $command in *" "*) arguments=${command#* } ;; *) arguments= ;; esac
        echo "run $number $name $arguments"
    done
    echo 'echo "kvm-in-qemu: answer $worst"'
    echo 'poweroff -f'
} >"$root/init"
chmod +x "$root/init"
(cd "$root" && find . | cpio --quiet -o -H newc) >"$work/initrd"

# The answer is read from the console, since an emulated machine has no exit code.
timeout "${QEMU_SECONDS:-600}" qemu-system-x86_64 -accel tcg,thread=multi -machine q35 -cpu max \
    -smp "${QEMU_CPUS:-2}" -m "${QEMU_MEMORY:-2G}" -nodefaults -display none -no-reboot -serial stdio \
    -kernel "$kernel" -initrd "$work/initrd" -append "console=ttyS0 quiet panic=-1" </dev/null 2>&1 |
    tr -d '\r' | tee "$work/console"
answer=$(sed -n 's/^kvm-in-qemu: answer \([01]\)$/\1/p' "$work/console" | tail -n 1)
[ -n "$answer" ] || { echo "kvm-in-qemu: the machine ended without an answer" >&2; exit 4; }
exit "$answer"
