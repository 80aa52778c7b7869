#!/bin/bash
# Tiering inside a guest, for real: Debian's 6.12 in QEMU, with a fast and a slow NUMA node that HMAT tells apart.
#
# It runs the tests of ballast-tier on two nodes, then `tier-guest check`.
# Environment: KERNEL (another kernel image), FAST and SLOW (256M, 512M), QEMU_CPUS (2).
# The kernel is fetched once, into target/guest/trixie. Under emulation: times mean little, placement is real.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${BALLAST_GUEST_DIR:-target/guest}/trixie
skip() {
    echo "SKIP needs=tiers: $*"
    case ,${REQUIRE:-}, in *,tiers,*) exit 1 ;; esac
    exit 0
}
for tool in qemu-system-x86_64 busybox cpio; do
    command -v $tool >/dev/null || skip "$tool is not installed; run scripts/setup.sh"
done
kernel=${KERNEL:-$out/vmlinuz}
[ -n "${KERNEL:-}" ] || scripts/guest-kernel.sh trixie "$out" || skip "the kernel cannot be fetched"

target=target/static
build() {
    RUSTFLAGS='-C target-feature=+crt-static' CARGO_TARGET_DIR=$target \
        cargo build --target x86_64-unknown-linux-gnu "$@"
}
build -p ballast-tierguest
build -p ballast-tier --tests
built=$target/x86_64-unknown-linux-gnu/debug
program() { ls -t "$built/deps/$1"-* | grep -v '\.d$' | head -n 1; }
commands=("$(program ballast_tier)" "$(program two_nodes)" "$built/tier-guest check 256")
fast=${FAST:-256M} slow=${SLOW:-512M} last_cpu=$((${QEMU_CPUS:-2} - 1))
mib() { numfmt --from=iec "$1" | awk '{ print $1 / 1048576 }'; }
# Two nodes; latencies and bandwidths for HMAT, by which the kernel makes tiers.
QEMU_MEMORY=$(($(mib "$fast") + $(mib "$slow")))M
QEMU_MACHINE=q35,hmat=on
QEMU_ARGS="-object memory-backend-ram,id=fast,size=$fast -object memory-backend-ram,id=slow,size=$slow"
QEMU_ARGS+=" -numa node,nodeid=0,cpus=0-$last_cpu,memdev=fast -numa node,nodeid=1,initiator=0,memdev=slow"
QEMU_ARGS+=" -numa dist,src=0,dst=1,val=20"
for line in "0 70 80G" "1 180 20G"; do
    read -r node latency bandwidth <<<"$line"
    place=initiator=0,target=$node,hierarchy=memory
    QEMU_ARGS+=" -numa hmat-lb,$place,data-type=access-latency,latency=$latency"
    QEMU_ARGS+=" -numa hmat-lb,$place,data-type=access-bandwidth,bandwidth=$bandwidth"
done
export QEMU_MEMORY QEMU_MACHINE QEMU_ARGS
# The guest's own needs are not those of the whole test run.
REQUIRE=two-nodes,numa,cgroup QEMU_SECONDS=${QEMU_SECONDS:-900} exec scripts/in-qemu.sh "$kernel" "${commands[@]}"
