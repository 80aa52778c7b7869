#!/bin/sh
# Run programs on another kernel than this machine's: inside QEMU's emulated AMD CPU, which has nested SVM. Programs and
# FILES are copied without debug information, and with the shared libraries they load.
#
#   in-qemu.sh KERNEL COMMAND...
#
# KERNEL   a kernel image (Debian's cloud kernel: /boot/vmlinuz-*)
# COMMAND  one word per command: "path/to/program argument ..."; run in order, with REQUIRE as it is here
#
# Environment: MODULES (none: files to load, in this order, .ko or .ko.xz), FILES (none: files that the machine has
#              under the same path), QEMU_MEMORY (2G), QEMU_CPUS (2), QEMU_MACHINE (q35), QEMU_ARGS (none: more words
#              of QEMU's), QEMU_SECONDS (600: the machine is ended after this long).
# Exit code: 0 all commands succeeded, 1 one failed, 2 usage, 3 something needed is missing, 4 no answer in time.
set -eu

if [ $# -lt 2 ]; then
    sed -n '5,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
kernel=$1
shift
for tool in qemu-system-x86_64 busybox cpio timeout; do
    command -v "$tool" >/dev/null || { echo "in-qemu: $tool is not installed" >&2; exit 3; }
done
[ -r "$kernel" ] || { echo "in-qemu: no kernel at $kernel" >&2; exit 3; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 4' INT TERM
root=$work/root
mkdir -p "$root/bin" "$root/proc" "$root/sys" "$root/dev" "$root/tmp"
cp "$(command -v busybox)" "$root/bin/busybox"
names=
for file in ${MODULES:-}; do
    [ -r "$file" ] || { echo "in-qemu: no module at $file" >&2; exit 3; }
    name=$(basename "$file" .xz)
    names="$names $name"
    case $file in
        *.xz) xz -dc "$file" >"$root/$name" ;;
        *) cp "$file" "$root/$name" ;;
    esac
done

# copy PROGRAM TO: the program, and what it loads if it is not statically linked.
copy() {
    strip --strip-debug -o "$2" "$1"
    loaded=$(ldd "$1" 2>/dev/null | sed -n 's/.*[[:space:]]\(\/[^ ]*\) (0x[0-9a-f]*)$/\1/p')
    for library in $loaded; do
        [ ! -e "$root$library" ] || continue
        mkdir -p "$root$(dirname "$library")"
        cp -L "$library" "$root$library"
    done
}

for file in ${FILES:-}; do
    file=$(realpath "$file")
    mkdir -p "$root/files$(dirname "$file")"
    copy "$file" "$root/files$file"
done

# /init is process 1: devices, modules, the commands one by one, then power off. The last line it prints is the answer.
{
    echo '#!/bin/busybox sh'
    echo "export PATH=/bin HOME=/tmp REQUIRE='${REQUIRE:-}' RUST_BACKTRACE=0 MODULES='$names'"
    cat <<'INIT'
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
mkdir /dev/shm
mount -t tmpfs tmpfs /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup
# Only now, because they may belong below /tmp.
[ ! -d /files ] || { cp -a /files/. / && rm -rf /files; }
ip link set lo up
for module in $MODULES; do insmod /$module || echo "in-qemu: insmod $module failed"; done
worst=0
run() {
    number=$1
    shift
    echo "in-qemu: start $number: $*"
    "$@" </dev/null
    code=$?
    echo "in-qemu: end $number: exit $code"
    [ "$code" = 0 ] || worst=1
}
INIT
    number=0
    for command in "$@"; do
        number=$((number + 1))
        binary=${command%% *}
        [ -x "$binary" ] || { echo "in-qemu: no program $binary" >&2; exit 3; }
        name=$number-$(basename "$binary")
        copy "$binary" "$root/bin/$name"
        case $command in *" "*) arguments=${command#* } ;; *) arguments= ;; esac
        echo "run $number $name $arguments"
    done
    echo 'echo "in-qemu: answer $worst"'
    echo 'poweroff -f'
} >"$root/init"
chmod +x "$root/init"
(cd "$root" && find . | cpio --quiet -o -H newc) >"$work/initrd"

# The answer is read from the console, since an emulated machine has no exit code. A kernel that patches its own code at
# boot now and then meets a half-written instruction on the other emulated CPU: a machine that did not come to the first
# command is started again, twice at most.
for attempt in 1 2 3; do
    # shellcheck disable=SC2086
    timeout "${QEMU_SECONDS:-600}" qemu-system-x86_64 -accel tcg,thread=multi -machine "${QEMU_MACHINE:-q35}" -cpu max \
        -smp "${QEMU_CPUS:-2}" -m "${QEMU_MEMORY:-2G}" -nodefaults -display none -no-reboot -serial stdio \
        ${QEMU_ARGS:-} -kernel "$kernel" -initrd "$work/initrd" \
        -append "console=ttyS0 quiet panic=-1 no_timer_check" </dev/null 2>&1 | tr -d '\r' | tee "$work/console"
    ! grep -q '^in-qemu: start 1' "$work/console" || break
    echo "in-qemu: attempt $attempt did not come to the first command"
done
answer=$(sed -n 's/^in-qemu: answer \([01]\)$/\1/p' "$work/console" | tail -n 1)
[ -n "$answer" ] || { echo "in-qemu: the machine ended without an answer" >&2; exit 4; }
exit "$answer"
