#!/bin/bash
# VMs that run already: a stock domain of libvirt's (web) and a plain QEMU in a scope of systemd's (plain), both with
# private memory, started before ballastd. In the machine of libvirt-suite.sh.
. /suite/lib.sh

VMS=(plain web)
web_pid() { cat /run/libvirt/qemu/web.pid; }
plain_pid() { pgrep -f 'guest=plain'; }
cgroup_of() { echo "/sys/fs/cgroup$(sed 's/^0:://; s,/emulator$,,' "/proc/$1/cgroup")"; }

# All that is set of the cgroups of both VMs, and who is in them.
settings() {
    local name cgroup file
    for name in "${VMS[@]}"; do
        cgroup=$(cgroup_of "$("${name}_pid")")
        # libvirt's scope has a cgroup for the emulator and its threads.
        for file in {"$cgroup","${cgroup%/libvirt}"}/{cgroup.procs,cgroup.subtree_control,cpu.max,cpu.weight} \
            {"$cgroup","${cgroup%/libvirt}"}/memory.{min,low,high,max,oom.group,swap.high,swap.max}; do
            [ ! -e "$file" ] || echo "$file: $(tr '\n' ' ' <"$file" 2>&1 || true)"
        done
    done
}

guests_boot() {
    until_is 120 systemctl is-active -q dev-zram0.swap libvirtd.socket
    domain web 192 /usr/bin/qemu-system-x86_64 dimms
    virsh -q start web &
    systemd-run -q --scope --unit=plain -p MemoryHigh=1G \
        qemu-system-x86_64 -name guest=plain,debug-threads=on -accel kvm -cpu host -m 192 -nodefaults -display none \
        -kernel /suite/vmlinuz -initrd /suite/initrd.img -append "$(guest_words)" -serial file:/var/log/plain.log \
        </dev/null >/tmp/plain 2>&1 &
    wait %1
    until_is 200 more_rounds_than web 0
    until_is 200 more_rounds_than plain 0
    settings >/suite/settings
}

ballastd_starts() { systemctl start ballastd; }

all_are_adopted_under_their_names() {
    ballast adopt --all >/tmp/adopted
    local expected
    expected="adopted plain (pid $(plain_pid), qemu), web (pid $(web_pid), qemu)"
    for name in "${VMS[@]}"; do
        grep -q "$name (pid $("${name}_pid"), qemu)" /tmp/adopted || fail "$(cat /tmp/adopted), not $expected"
    done
}

memory_goes_by_memory_reclaim() {
    local cgroup
    for name in "${VMS[@]}"; do
        # libvirt's scope has a backslash in its name.
        cgroup=$(cgroup_of "$("${name}_pid")" | sed 's/\\/\\\\/g')
        is "$name" ".adopted.by == \"reclaim\" and .adopted.cgroup == \"$cgroup\"
            and .adopted.stall_source == \"cgroup\"" || fail "$(of "$name" .adopted)"
    done
}

limits_are_held_within_5_percent() {
    local name most end resident limit rss
    for name in "${VMS[@]}"; do
        limit=$(($(of "$name" .resident_bytes) * 3 / 5))
        ballast vm limit "$name" ${limit}B
    done
    for name in "${VMS[@]}"; do until_is 60 at_limit "$name"; done
    for name in "${VMS[@]}"; do
        most=0 end=$((SECONDS + 12)) limit=$(of "$name" .limit_bytes)
        while [ $SECONDS -lt $end ]; do
            resident=$(of "$name" .resident_bytes)
            [ "$resident" -le $most ] || most=$resident
        done
        # The kernel's own figure has QEMU's memory in it, some of which is in swap.
        rss=$(awk '/^RssAnon/ { print $2 * 1024 }' "/proc/$("${name}_pid")/status")
        echo "= $name: limit $limit, at most $most resident, RssAnon $rss"
        [ $((most * 100)) -le $((limit * 105)) ] || fail "$name: $most bytes with a limit of $limit"
        [ "$rss" -le $((limit + (32 << 20))) ] || fail "$name: the kernel counts $rss bytes with a limit of $limit"
    done
    right "${VMS[@]}"
}

the_next_engine_goes_on_after_one_that_was_killed() {
    local limit engine
    limit=$(of web .limit_bytes) engine=$(engine_pid)
    kill -KILL "$engine"
    until_is 60 another_engine_than "$engine"
    until_is 30 is web ".limit_bytes == $limit and .adopted.by == \"reclaim\""
    ballast vm limit web $((limit - (8 << 20)))B
    until_is 60 at_limit web
    right "${VMS[@]}"
}

the_next_keeper_goes_on_after_one_that_was_killed() {
    local limit keeper
    limit=$(of web .limit_bytes) keeper=$(keeper_pid)
    kill -KILL "$keeper"
    until_is 60 another_keeper_than "$keeper"
    until_is 60 is web ".limit_bytes == $limit and .adopted.by == \"reclaim\""
    ballast vm limit web $((limit + (8 << 20)))B
    until_is 60 at_limit web
    right "${VMS[@]}"
}

a_cgroup_without_swap_is_refused_with_what_to_type() {
    local cgroup max
    cgroup=$(cgroup_of "$(plain_pid)")
    max=$(cat "$cgroup/memory.swap.max")
    ballast vm limit plain none
    echo 0 >"$cgroup/memory.swap.max"
    ! ballast vm limit plain 32M >/tmp/said 2>&1 || fail "$(cat /tmp/said)"
    grep -q "echo max > $cgroup/memory.swap.max" /tmp/said || fail "$(cat /tmp/said)"
    echo "$max" >"$cgroup/memory.swap.max"
    ballast vm limit plain 80M
    until_is 60 at_limit plain
}

swappiness_0_of_the_host_stops_no_limit() {
    sysctl -qw vm.swappiness=0
    ballast vm limit plain 72M
    until_is 60 at_limit plain
    echo "= by $(of plain '.adopted.by'), $(of plain .adopted.cgroup_reason)"
    sysctl -qw vm.swappiness=60
    right plain
}

by_address_because() { is plain ".adopted.by == \"pageout\" and (.adopted.cgroup_reason | contains(\"$1\"))"; }

a_vmm_that_shares_its_cgroup_is_paged_out_by_address() {
    local cgroup
    cgroup=$(cgroup_of "$(plain_pid)")
    sleep 1000 &
    # It ends also if this step fails.
    sleeper=$!
    trap 'kill "$sleeper"' EXIT
    echo "$sleeper" >"$cgroup/cgroup.procs"
    until_is 20 by_address_because 'shares the cgroup'
    ballast vm limit plain 64M
    until_is 60 at_limit plain
    kill "$sleeper"
    trap - EXIT
    until_is 20 is plain '.adopted.by == "reclaim"'
    right plain
}

a_read_only_cgroup_tree_is_no_obstacle() {
    mkdir -p /run/systemd/system/ballastd.service.d
    printf '[Service]\nProtectControlGroups=yes\n' >/run/systemd/system/ballastd.service.d/read-only.conf
    systemctl daemon-reload
    systemctl restart ballastd
    until_is 60 by_address_because 'cannot be written'
    ballast vm limit plain 56M
    until_is 60 at_limit plain
    rm -r /run/systemd/system/ballastd.service.d
    systemctl daemon-reload
    systemctl restart ballastd
    until_is 60 is plain '.adopted.by == "reclaim"'
    right plain
}

no_vm_is_killed_at_a_limit_of_16_mib() {
    local name
    for name in "${VMS[@]}"; do ballast vm limit "$name" 16M; done
    sleep 10
    for name in "${VMS[@]}"; do
        echo "= $name: $(of "$name" '"\(.resident_bytes) resident, \(.status), stall \(.stall.some.avg10) %"')"
        ballast vm limit "$name" 72M
        grep -q '^oom_kill 0$' "$(cgroup_of "$("${name}_pid")")/memory.events" || fail "$name was killed"
    done
    right "${VMS[@]}"
}

blocked_for_swap() { is plain '.status == "blocked" and (.status_reason | contains("swap is full"))'; }

free_swap_mib() { awk 'NR > 1 { sum += $3 - $4 } END { print int(sum / 1024) }' /proc/swaps; }

swap_that_others_fill_is_a_state_and_an_event() {
    # Less than the guest reads in a round, so that memory comes back all the time.
    ballast vm limit plain 40M
    until_is 120 is plain '.reclaim.evicted_pages > 0 and .far_bytes > 0'
    # A process in a cgroup of its own that has more than fits into swap; most of it goes there at once.
    local hog=/sys/fs/cgroup/hog room
    mkdir $hog
    echo 32M >$hog/memory.high
    room=$(($(free_swap_mib) + 64))
    mkfifo /tmp/hog
    exec 9<>/tmp/hog
    (echo $BASHPID >$hog/cgroup.procs && head -c ${room}M /dev/zero | tail -c ${room}M >/tmp/hog) &
    until_is 200 blocked_for_swap
    ! ballast vm limit plain 24M >/tmp/said 2>&1 || fail "$(cat /tmp/said)"
    grep -q 'swap is full' /tmp/said || fail "$(cat /tmp/said)"
    right "${VMS[@]}"
    echo 1 >$hog/cgroup.kill
    until_is 60 is plain '.status == "running"'
    ballast events | grep -q adopted-unblocked
    right "${VMS[@]}"
    ballast vm limit plain 72M
}

a_dimm_that_is_plugged_in_is_counted() {
    plug_dimm web
    until_is 60 is web ".size_bytes == $((320 << 20))"
    at_limit web
    right web
}

all_is_as_it_was_after_a_release() {
    ballast release web
    ballast release plain --bring-back
    gone() { ! ballast --json vm list | jq -e '.[] | select(.name == "plain")'; }
    until_is 120 gone
    settings >/suite/settings-after
    diff /suite/settings /suite/settings-after || fail "settings of the cgroups have changed"
    # Of guest RAM: what QEMU itself has in swap comes back as QEMU touches it.
    local swapped
    swapped=$(awk '/^Size:/ { size = $2 } /^Swap:/ && size >= 131072 { sum += $2 } END { print sum + 0 }' \
        "/proc/$(plain_pid)/smaps")
    [ "$swapped" -lt 1024 ] || fail "$swapped KiB of guest RAM are in swap still"
    right "${VMS[@]}"
}

a_domain_that_ends_is_forgotten() {
    ballast adopt web
    virsh -q destroy web
    ended() { ballast events | grep -q 'web ended'; }
    until_is 30 ended
    echo "= adopted_wrong_bytes $(wrong_bytes "${VMS[@]}") in $(($(rounds plain) + $(rounds web))) rounds"
}

begin "$@" -- guests_boot=400 ballastd_starts=60 all_are_adopted_under_their_names=60 memory_goes_by_memory_reclaim=60 \
    limits_are_held_within_5_percent=300 the_next_engine_goes_on_after_one_that_was_killed=300 \
    the_next_keeper_goes_on_after_one_that_was_killed=300 a_cgroup_without_swap_is_refused_with_what_to_type=120 \
    swappiness_0_of_the_host_stops_no_limit=200 a_vmm_that_shares_its_cgroup_is_paged_out_by_address=200 \
    a_read_only_cgroup_tree_is_no_obstacle=300 no_vm_is_killed_at_a_limit_of_16_mib=300 \
    swap_that_others_fill_is_a_state_and_an_event=400 a_dimm_that_is_plugged_in_is_counted=200 \
    all_is_as_it_was_after_a_release=300 a_domain_that_ends_is_forgotten=60
