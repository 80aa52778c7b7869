#!/bin/bash
# What depends on the kernel, on a newer one than this machine's: the tests of sys and of pager that need only memory,
# those of tiers and of the pool, also in pages of 1 GiB, and those of memory that fails, inside QEMU.
#
# The kernel is the newest that Debian had for its stable release when this ran first. It is unpacked into
# target/guest/newer and never installed; `--refresh` fetches it again.
#
#   ALL=1    also those of `native` and `shard` on stores, limits and threads, which no kernel changes: 3 minutes more
set -euo pipefail
cd "$(dirname "$0")/.."
out=${BALLAST_GUEST_DIR:-target/guest}/newer
skip() {
    echo "SKIP needs=newer-kernel: $*"
    case ,${REQUIRE:-}, in *,newer-kernel,*) exit 1 ;; esac
    exit 0
}

for tool in qemu-system-x86_64 busybox cpio; do
    command -v $tool >/dev/null || skip "$tool is not installed; run scripts/setup.sh"
done
scripts/guest-kernel.sh trixie-backports "$out" "${1:-}" || skip "the kernel cannot be fetched"
echo "newer kernel: Linux $(cat "$out/kernel-release")"

# The programs that the other suites run, too: nothing is compiled for this one alone.
programs=$(cargo test --workspace --no-run 2>&1 | sed -n 's/^ *Executable .*(\(.*\))$/\1/p')
program() { echo "$programs" | grep "/$1-[0-9a-f]*$" | head -n 1; }
export FILES=${CARGO_TARGET_DIR:-target}/debug/ballastd
native='--skip _store_ --skip eviction_and_restore --skip limit --skip panics'
shard='shard::each_stripe shard::huge_pages shard::units'
[ -z "${ALL:-}" ] || native='' shard=shard::
QEMU_MEMORY=4G QEMU_SECONDS=1200 REQUIRE=uffd,collapse,hwpoison scripts/in-qemu.sh "$out/vmlinuz" \
    "$(program ballast_sys) remote" "$(program unregister)" "$(program pager) answered:: track:: coalesce:: $shard" \
    "$(program pager) native:: $native" "$(program pager) memory_error::" "$(program ballast_sys) memory_error" \
    "$(program store) arena_memory::" "$(program engine_memory)"
# Pages of 1 GiB, which a machine that has run for a while has none of.
QEMU_MEMORY=8G QEMU_SECONDS=2400 REQUIRE=uffd,hugetlb,memory,hwpoison scripts/in-qemu.sh "$out/vmlinuz" \
    "$(program pools) gib:: --test-threads=1" "$(program pool) a_vm_on_pages_of_a_gib" \
    "$(program pools) failed::a_page_of_a_gib"
# Two NUMA nodes of different sizes: tiers of the host, and the pool. Memory that fails comes last: it stays the
# kernel's for ever.
nodes='-object memory-backend-ram,id=m0,size=1536M -numa node,nodeid=0,cpus=0,memdev=m0'
nodes="$nodes -object memory-backend-ram,id=m1,size=2560M -numa node,nodeid=1,cpus=1,memdev=m1"
export QEMU_MEMORY=4G QEMU_SECONDS=1200 QEMU_ARGS=$nodes REQUIRE=uffd,collapse,hwpoison,numa,cgroup
exec scripts/in-qemu.sh "$out/vmlinuz" \
    "$(program pager) placed:: --test-threads=1" "$(program host_tiers)" \
    "$(program pools) numa::a_vms_pages" "$(program pool_on_demand) pages_on_demand_are a_node_that_promised" \
    "$(program pools) isolation:: --test-threads=1" "$(program pools) failed:: --test-threads=1"
