#!/bin/bash
# Sourced by the suites of libvirt-suite.sh, in its machine: steps with deadlines, guests that check themselves, and
# what is asked of `ballast` and of the kernel.
#
# A step is a function, whose lines that begin with `=` are shown; `steps` runs each as a process of
# its own and goes on after one that failed.
set -euo pipefail
export HOME=/root LC_ALL=C TERM=dumb COLUMNS=160

fail() { echo "  $*"; exit 1; }

# steps NAME=SECONDS...: run these functions of the calling script, in this order.
steps() {
    local worst=0 step name seconds start
    for step in "$@"; do
        name=${step%=*} seconds=${step#*=} start=$SECONDS
        if timeout --kill-after=5 "$seconds" bash "$0" "$name" >/tmp/step 2>&1; then
            echo "libvirt: ok ${name//_/ } ($((SECONDS - start)) s)"
            sed -n 's/^=/  =/p' /tmp/step || true
        else
            worst=1
            echo "libvirt: FAILED ${name//_/ } ($((SECONDS - start)) s)"
            tail -n 25 /tmp/step | cut -c1-300
            evidence 2>&1 | sed 's/^/  | /' | cut -c1-300 || true
        fi
    done
    exit $worst
}

# What is left to look at after a step that failed.
evidence() {
    local name
    timeout 20 ballast vm list || true
    for name in $(virsh -q list --name); do
        tail -n 3 "/var/log/$name.log"
    done
    journalctl -q --no-pager -b -u ballastd -n 10 -o cat
}

# begin [STEP | STEP=SECONDS...] -- STEP=SECONDS...: runs one step as it is, or those that are named, or all.
begin() {
    local named=()
    while [ "$1" != -- ]; do named+=("$1"); shift; done
    shift
    case ${named[0]:-} in
        '') steps "$@" ;;
        *=*) steps "${named[@]}" ;;
        *) "${named[0]}" ;;
    esac
}

# until_is SECONDS COMMAND...: wait until it succeeds.
until_is() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/tmp/until 2>&1; do
        [ $SECONDS -lt $end ] || fail "not within its time: $* ($(tail -n 1 /tmp/until))"
        sleep 0.3
    done
}

# The guest's command line: it copies its programs and, round by round, compares each byte of the copy with them.
guest_words() {
    local files='/bin/redis-server /bin/busybox /lib/x86_64-linux-gnu/*'
    echo "console=ttyS0 quiet -- ballast.run=cat $files >/tmp/d; n=0; while true; do" \
        "echo ROUND \$n wrong \$(cat $files | cmp -l - /tmp/d 2>&1 | wc -l); n=\$((n+1)); sleep 3; done"
}

# xml_escaped TEXT
xml_escaped() { sed 's/&/\&amp;/g; s/</\&lt;/g; s/>/\&gt;/g' <<<"$1"; }

# domain NAME MIB EMULATOR [dimms]: define a stock domain of libvirt's, or one that DIMMs may be plugged into.
domain() {
    local dimms='' numa=''
    if [ "${4:-}" = dimms ]; then
        dimms="<maxMemory slots='4' unit='MiB'>$(($2 + 512))</maxMemory>"
        numa="<numa><cell id='0' cpus='0' memory='$2' unit='MiB'/></numa>"
    fi
    cat >"/suite/$1.xml" <<XML
<domain type='kvm'>
  <name>$1</name>
  $dimms
  <memory unit='MiB'>$2</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>/suite/vmlinuz</kernel>
    <initrd>/suite/initrd.img</initrd>
    <cmdline>$(xml_escaped "$(guest_words)")</cmdline>
  </os>
  <features><acpi/></features>
  <cpu mode='host-passthrough'>$numa</cpu>
  <devices>
    <emulator>$3</emulator>
    <serial type='file'><source path='/var/log/$1.log' append='on'/><target port='0'/></serial>
  </devices>
</domain>
XML
    virsh -q define "/suite/$1.xml"
}

# plug_dimm NAME: 128 MiB, while the domain runs.
plug_dimm() {
    echo "<memory model='dimm'><target><size unit='MiB'>128</size><node>0</node></target></memory>" >/suite/dimm.xml
    virsh -q attach-device "$1" /suite/dimm.xml --live
}

# rounds NAME: rounds that the guest has done.
rounds() { grep -c '^ROUND' "/var/log/$1.log" 2>/dev/null || true; }

# wrong_bytes NAME...: bytes that were wrong, of all rounds.
wrong_bytes() {
    for name in "$@"; do cat "/var/log/$name.log"; done | awk '/^ROUND/ { sum += $4 } END { print sum + 0 }'
}

# boots NAME: how often the guest has begun to count its rounds.
boots() { grep -c '^ROUND 0 ' "/var/log/$1.log" 2>/dev/null || true; }

more_boots_than() { [ "$(boots "$1")" -gt "$2" ]; }

more_rounds_than() { [ "$(rounds "$1")" -gt "$2" ]; }

# right NAME...: each guest reads all of its data twice more, and no byte was wrong in any round.
right() {
    local name before
    for name in "$@"; do
        before=$(rounds "$name")
        until_is 240 more_rounds_than "$name" $((before + 1))
    done
    [ "$(wrong_bytes "$@")" = 0 ] || fail "$(wrong_bytes "$@") bytes of $* are wrong"
}

# of NAME FILTER: what the daemon says of a VM, by a filter of jq's.
of() { ballast --json vm stat "$1" | jq -r "$2"; }

# is NAME FILTER: is that true?
is() { ballast --json vm stat "$1" | jq -e "$2"; }

engine_pid() { pgrep -f 'ballastd engine' | head -n 1; }
another_engine_than() { [ -n "$(engine_pid)" ] && [ "$(engine_pid)" != "$1" ] && ballast vm list; }
keeper_pid() { systemctl show -P MainPID ballastd; }
another_keeper_than() { [ "$(keeper_pid)" != "$1" ] && systemctl is-active -q ballastd && ballast vm list; }

at_limit() { is "$1" '.resident_bytes <= .limit_bytes'; }
