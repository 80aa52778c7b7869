#!/bin/sh
# Get the real programs of `ballast bench real` in target/real/: bin/, lib/ with the libraries that they need, and
# python/ with DuckDB, NumPy, SciPy and scikit-learn (bin/python3 is a link to the Python that they are for).
#
# Before: scripts/setup.sh. After: lab/realmem starts them. Packages are downloaded and unpacked, never installed: no
# service starts, nothing changes outside target/real. Does nothing when they are there and this script is unchanged.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${BALLAST_REAL_DIR:-$here/../target/real}
mkdir -p "$out"
out=$(cd "$out" && pwd)
say() { printf 'real-programs: %s\n' "$*"; }
die() { printf 'real-programs: %s\n' "$*" >&2; exit 1; }

exec 9>"$out/.lock"
flock 9

want=$(sha256sum <"$0" | cut -d' ' -f1)
if [ "$(cat "$out/stamp" 2>/dev/null)" = "$want" ]; then
    say "up to date"
    exit 0
fi
for tool in apt-get apt-cache dpkg awk python3; do
    command -v $tool >/dev/null || die "needs $tool: the programs come from Debian packages (Debian 12 or newer)"
done
work=$out/work
rm -rf "$work" "$out/bin" "$out/lib" "$out/python"
mkdir -p "$work" "$out/bin" "$out/lib"

# Libraries only: packages that are no library belong to scripts of their maintainers, which never run here.
packages=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
    --no-enhances redis-server memcached 2>/dev/null | awk '
    /^[^ ]/ { package = $1; skip = 0 }
    /Depends:/ { if (!skip) need[package] = need[package] " " $2; skip = ($1 ~ /^\|/) }
    END {
        last = split("redis-server redis-tools memcached", queue)
        for (i = 1; i <= last; i++) {
            print queue[i]
            count = split(need[queue[i]], more)
            for (j = 1; j <= count; j++)
                if (more[j] ~ /^(lib|lua-)/ && more[j] !~ /^libc6$/ && !seen[more[j]]++) queue[++last] = more[j]
        }
    }')
# shellcheck disable=SC2086
say "downloading" $packages
cd "$work"
# shellcheck disable=SC2086
apt-get -o APT::Sandbox::User=root -qq download $packages || die "apt-get could not download: $packages"
for deb in *.deb; do
    dpkg -x "$deb" tree
done
# redis-server is a link to redis-check-rdb.
cp -L tree/usr/bin/redis-server tree/usr/bin/memcached "$out/bin/"
find tree \( -name '*.so' -o -name '*.so.*' \) -not -type d -exec cp -aL -t "$out/lib" {} + 2>/dev/null || true
for program in redis-server memcached; do
    /lib64/ld-linux-x86-64.so.2 --library-path "$out/lib" --list "$out/bin/$program" >"$work/list"
    ! grep 'not found' "$work/list" || die "$program lacks libraries"
done
cd "$out"
rm -rf "$work"
say "downloading packages of Python"
ln -s "$(python3 -c 'import os, sys; print(os.path.realpath(sys.executable))')" bin/python3
bin/python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --only-binary :all: \
    --target python duckdb==1.5.5 duckdb-extension-tpch==1.5.5 numpy==2.3.5 scipy==1.16.3 scikit-learn==1.7.2 ||
    die "pip could not install the packages of Python"
printf '%s\n' "$want" >"$out/stamp"
say "ready: redis-server, memcached, DuckDB, NumPy, SciPy, scikit-learn"
