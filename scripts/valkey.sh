#!/bin/sh
# Get a Valkey server (or, where Debian has none for this release, Redis) for the tests of the remote store, in
# target/valkey/: bin/server, its libraries beside it, and which server it is in `name`.
#
# Before: scripts/setup.sh. After: `testvm::valkey` starts clusters of it on loopback. Packages are downloaded and
# unpacked, never installed: no service starts, nothing changes outside target/valkey. Does nothing when it is there and
# this script is unchanged; `--refresh` gets it again.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${BALLAST_VALKEY_DIR:-$here/../target/valkey}
mkdir -p "$out"
out=$(cd "$out" && pwd)
say() { printf 'valkey: %s\n' "$*"; }
die() { printf 'valkey: %s\n' "$*" >&2; exit 1; }

exec 9>"$out/.lock"
flock 9

want=$(sha256sum <"$here/valkey.sh" | cut -d' ' -f1)
if [ "${1:-}" != --refresh ] && [ -x "$out/bin/server" ] && [ "$(cat "$out/stamp" 2>/dev/null)" = "$want" ]; then
    say "up to date ($(cat "$out/name"))"
    exit 0
fi
for tool in apt-get apt-cache dpkg awk; do
    command -v $tool >/dev/null || die "needs $tool: the server comes from Debian packages (Debian 12 or newer)"
done
work=$out/work
rm -rf "$work"
mkdir -p "$work/debs" "$work/lists/partial" "$work/cache/archives/partial"

# --- which server, and from where ---------------------------------------------------------------------------------
# apt's own options, if its own lists know the package; else lists of this script's own, with backports.
set --
server=valkey-server
if ! apt-cache show $server >/dev/null 2>&1; then
    place=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' |
        awk '!/security/ { print; exit }')
    codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    if [ -n "$place" ] && [ -n "$codename" ] && [ -s $keys ]; then
        for suite in "$codename" "$codename-backports"; do
            echo "deb [signed-by=$keys] $place $suite main"
        done >"$work/sources.list"
        # No package counts as installed: these lists need not have its version (a security update).
        : >"$work/status"
        set -- -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=- \
            -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o Dir::State::Status="$work/status"
        say "looking for Valkey in $codename-backports"
        apt-get "$@" -o APT::Sandbox::User=root -o APT::Update::Error-Mode=any -qq update 2>/dev/null || set --
    fi
    apt-cache "$@" show $server >/dev/null 2>&1 || { set --; server=redis-server; }
fi
# Libraries only: what else a server depends on belongs to scripts of its maintainers, which we never run.
packages=$(apt-cache "$@" depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
    --no-enhances $server 2>/dev/null | awk -v first="$server" '
    /^[^ ]/ { package = $1; skip = 0 }
    /Depends:/ { if (!skip) need[package] = need[package] " " $2; skip = ($1 ~ /^\|/) }
    END {
        sub("-server", "-tools", first)
        last = split(first, queue)
        for (i = 1; i <= last; i++) {
            print queue[i]
            count = split(need[queue[i]], found)
            for (j = 1; j <= count; j++) if (found[j] ~ /^z?lib/ && !seen[found[j]]++) queue[++last] = found[j]
        }
    }')
[ -n "$packages" ] || die "apt knows neither valkey-server nor redis-server; run scripts/setup.sh first"
cd "$work/debs"
say "downloading $(echo "$packages" | wc -l) packages for $server"
# The server's program is in the package of its tools: a server is a name of the same program.
# shellcheck disable=SC2086
apt-get "$@" -o APT::Sandbox::User=root -qq download $packages $server || die "apt-get download failed"

# --- unpack -----------------------------------------------------------------------------------------------------
for package in "$work"/debs/*.deb; do dpkg -x "$package" "$work/tree"; done
program=$(find "$work/tree" -name "$server" -path '*/bin/*' -o -name "${server%-server}-check-rdb" -path '*/bin/*' |
    sort -r | head -n 1)
[ -n "$program" ] || die "the packages hold no program $server"
loader=$(find "$work/tree" -name 'ld-linux-x86-64.so.2' | head -n 1)
libraries=$(find "$work/tree" -type d -path '*/lib/x86_64-linux-gnu' | tr '\n' ':')
rm -rf "$out/bin" "$out/lib"
mkdir -p "$out/bin" "$out/lib"
cp -L "$program" "$out/bin/program"
# The package's own loader says which of the packages' own libraries it takes.
"$loader" --library-path "$libraries" --list "$out/bin/program" | awk '$2 == "=>" { print $3 }' |
    while read -r library; do cp -L "$library" "$out/lib/"; done
cp -L "$loader" "$out/lib/loader"
cat >"$out/bin/server" <<END
#!/bin/sh
exec "$out/lib/loader" --library-path "$out/lib" --argv0 $server "$out/bin/program" "\$@"
END
chmod 755 "$out/bin/server"
"$out/bin/server" --version | awk '{ print $1, $2, $3 }' >"$out/name"
echo "$want" >"$out/stamp"
rm -rf "$work"
say "ready: $(cat "$out/name")"
