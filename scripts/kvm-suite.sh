#!/bin/bash
# The KVM test guest where there is no /dev/kvm: statically linked, inside QEMU's emulated AMD CPU with nested SVM.
set -euo pipefail
cd "$(dirname "$0")/.."
guest=${BALLAST_GUEST_DIR:-target/guest}
[ -d "$guest/modules" ] || { echo "SKIP needs=kvm: no modules in $guest; run scripts/guest-image.sh"; exit 0; }
target=target/static
RUSTFLAGS='-C target-feature=+crt-static' CARGO_TARGET_DIR=$target \
    cargo build --target x86_64-unknown-linux-gnu -p ballast-testvm --bin ballast-testvm --tests
tests=$(ls -t $target/x86_64-unknown-linux-gnu/debug/deps/workloads-* | grep -v '\.d$' | head -n 1)
modules=
for module in irqbypass kvm kvm-amd; do modules="$modules $(ls "$guest/modules/$module".ko*)"; done
MODULES=$modules REQUIRE=kvm exec scripts/in-qemu.sh "$guest/vmlinuz" "$tests --test-threads 1"
