#!/bin/sh
# What the tests of page and metrics need: Chromium, installed from Debian; in target/web/ the rules of accessibility
# (axe-core, from a Python package) and promtool (from Debian's package, not installed). Does nothing when they are
# there. Without them these tests SKIP, aloud.
set -eu
out=$(cd "$(dirname "$0")/.." && pwd)/target/web
say() { printf 'web-tools: %s\n' "$*"; }
mkdir -p "$out"
if ! command -v chromium >/dev/null; then
    say "installing chromium"
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y install --no-install-recommends chromium >/dev/null ||
        say "chromium could not be installed: the tests of the page will SKIP"
fi
if [ ! -s "$out/axe.min.js" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    if python3 -m pip -q download --no-deps -d "$work" axe-core-python==0.1.0 >/dev/null; then
        python3 -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))' \
            "$work"/*.whl axe_core_python/axe.min.js >"$work/axe" && mv "$work/axe" "$out/axe.min.js"
    else
        say "axe-core could not be fetched: accessibility will not be checked"
    fi
fi
if [ ! -x "$out/promtool" ]; then
    unpacked=$(mktemp -d)
    if (cd "$unpacked" && apt-get -o APT::Sandbox::User=root -qq download prometheus &&
        dpkg -x prometheus_*.deb tree); then
        mv "$unpacked/tree/usr/bin/promtool" "$out/promtool"
    else
        say "promtool could not be fetched: rules and metrics will not be checked by it"
    fi
    rm -rf "$unpacked"
fi
say "ready"
