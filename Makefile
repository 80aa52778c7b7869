# `demo` and `test` do their own set-up on a fresh Debian machine, as root.

# Debian's libzstd instead of compiling one: a minute less.
export ZSTD_SYS_USE_PKG_CONFIG = 1
export RUST_BACKTRACE ?= 0

.PHONY: demo demo-cluster test evidence setup guest build release deb

# Two real VMs, and a third that is adopted as it runs, are squeezed to half of their memory while the engine is killed;
# ends in a small table.
demo: guest build
	target/debug/ballast demo $(DEMO_ARGS)

# A VM's cold memory on a cluster of six servers on this machine, one of which is killed; ends in a small table.
demo-cluster: guest build
	scripts/valkey.sh
	target/debug/ballast demo --cluster $(DEMO_ARGS)

# Everything: lints, unit, property, loom, native, kvm, qemu and crash suites.
test: setup
	scripts/test.sh

# Real programs beside the kernel's swap: two to four hours on a machine that does nothing else.
evidence: setup
	scripts/evidence.sh

build:
	cargo build -p ballast-cli -p ballast-daemon -p ballast-preload -p ballast-bench

# The programs as they are installed, in target/dist: stripped, with debug files beside them.
release:
	scripts/release.sh

# A Debian package and a tarball, in target/dist.
deb:
	scripts/release.sh --product
	scripts/deb.sh

# Packages, the guest's kernel and image (under target/): all that a demo needs. Quick when nothing is missing.
guest:
	scripts/setup.sh
	scripts/guest-image.sh

# The same, a Valkey server, the real programs of `ballast bench real`, with packages of Python, and a browser: for the
# tests.
setup: guest
	scripts/valkey.sh
	scripts/real-programs.sh
	scripts/web-tools.sh
