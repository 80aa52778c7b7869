#!/bin/bash
# The package under libvirt: from a Debian without Ballast to a squeezed domain and back, as docs/libvirt.md says it. In
# the machine of libvirt-suite.sh; the packages are in /suite/debs: the one to install, and a later build.
. /suite/lib.sh

EMULATOR=/usr/lib/ballast/qemu-system-x86_64
LIMIT=72M
SAVED=/var/tmp/db.save
DUMP=/var/tmp/db.dump
held() { is db ".limit_bytes == $((72 << 20)) and .kind == \"paged\" and .resident_bytes <= .limit_bytes"; }
version() { dpkg-query -W -f '${Version}' ballast; }

a_stock_domain_is_defined() {
    until_is 120 systemctl is-active -q libvirtd.socket
    domain db 192 /usr/bin/qemu-system-x86_64
}

# The commands of the page as they stand there, but for the size of the limit: this guest is small.
five_commands_lead_to_a_squeezed_domain() {
    local commands
    commands=$(awk '
        /^## Five commands/ { here = 1 } here && /^```$/ { exit } take { print } here && /^```sh/ { take = 1 }' \
        /suite/libvirt.md)
    echo "= libvirt_commands_to_squeezed $(wc -l <<<"$commands")"
    cd /suite/debs/first || exit
    bash -exc "${commands//512M/$LIMIT}"
    until_is 300 more_rounds_than db 0
    until_is 120 held
    local uuid
    uuid=$(virsh domuuid db)
    ballast vm stat db | grep -q "$uuid" || fail "no $uuid: $(ballast vm stat db | head -n 3)"
    right db
}

status_of() { ballast libvirt status | awk -v name="$1" '$1 == name { $1 = ""; print }'; }

what_a_domain_lacks_is_said_as_a_command_to_type() {
    local says
    domain plain 192 /usr/bin/qemu-system-x86_64
    says=$(status_of plain)
    [ "$says" = " off virt-xml plain --edit --boot emulator=$EMULATOR" ] || fail "plain: $says"
    ${says# off }
    [ "$(status_of plain)" = ' off -' ] || fail "plain: $(status_of plain)"
    [ "$(status_of db)" = ' paged -' ] || fail "db: $(status_of db)"
    virsh -q undefine plain
}

limits_and_bytes_outlive_save_and_restore() {
    local over=0 now loading
    virsh -q save db $SAVED
    virsh -q restore $SAVED &
    loading=$!
    # A VM that has no limit is above it with all that it has.
    while kill -0 $loading 2>/dev/null; do
        now=$(of db '[.resident_bytes - (.limit_bytes // 0), 0] | max' 2>/dev/null || true)
        [ "${now:-0}" -le $over ] || over=$now
    done
    wait $loading
    echo "= restore_resident_over_limit_mib $((over >> 20))"
    until_is 60 held
    right db
}

limits_and_bytes_outlive_a_managed_save() {
    virsh -q managedsave db
    virsh -q start db
    until_is 60 held
    right db
}

# At a reset the vCPU waits for a far page, as often as not; it must run again (vmm/preload/src/asleep.rs).
limits_outlive_resets() {
    local before
    for _ in {1..6}; do
        before=$(boots db)
        virsh -q reset db
        until_is 300 more_boots_than db "$before"
    done
    until_is 60 held
    right db
}

# Every page of the guest's files, half of which are far, is somewhere in the dump.
dump_is_whole() {
    python3 /suite/dump.py $DUMP /suite/initrd.img bin/redis-server bin/busybox
    rm $DUMP
}

a_dump_has_all_memory() {
    virsh -q dump --memory-only db $DUMP
    dump_is_whole
    until_is 60 held
    right db
}

works_on() { virsh domjobinfo db | grep -q "^Operation: *$1"; }

# dies_during engine|keeper OPERATION COMMAND...: the engine stands still until the command has begun, so that the
# command cannot end before the death.
dies_during() {
    local who=$1 operation=$2 old command
    shift 2
    old=$("${who}_pid")
    kill -STOP "$(engine_pid)"
    "$@" &
    command=$!
    until_is 60 works_on "$operation"
    # A keeper that has waited for long enough has killed the engine already.
    kill -KILL "$old" || [ "$who" = engine ]
    wait $command
    until_is 60 "another_${who}_than" "$old"
}

a_save_a_restore_and_a_dump_outlive_the() {
    local who=$1 old
    dies_during "$who" Save virsh -q save db $SAVED
    virsh -q restore $SAVED &
    until_is 120 is db .
    old=$("${who}_pid")
    kill -KILL "$old"
    wait $!
    until_is 60 "another_${who}_than" "$old"
    until_is 60 held
    right db
    dies_during "$who" Dump virsh -q dump --memory-only db $DUMP
    dump_is_whole
    until_is 60 held
    right db
}
a_save_a_restore_and_a_dump_outlive_the_engine() { a_save_a_restore_and_a_dump_outlive_the engine; }
a_save_a_restore_and_a_dump_outlive_the_keeper() { a_save_a_restore_and_a_dump_outlive_the keeper; }

both_die() {
    local keeper
    keeper=$(keeper_pid)
    kill -KILL "$(engine_pid)" "$keeper"
    until_is 60 another_keeper_than "$keeper"
}

a_reset_outlives_engine_and_keeper() {
    local before
    before=$(boots db)
    virsh -q reset db
    both_die
    until_is 400 more_boots_than db "$before"
    until_is 60 held
    right db
}

a_later_package_follows_under_the_domain() {
    local engine before
    engine=$(engine_pid) before=$(version)
    apt-get install -q /suite/debs/later/ballast_*.deb
    [ "$(version)" != "$before" ] || fail "the version is $before still"
    until_is 60 another_engine_than "$engine"
    until_is 60 held
    right db
    echo "= deb_upgrade_wrong_bytes $(wrong_bytes db)"
}

# AppArmor lets QEMU have the descriptors that the client keeps for the next keeper.
memory_on_a_disk_outlives_engine_and_keeper() {
    printf '[spill]\ndir = "/var/lib/ballast"\nbudget = "1G"\nafter_s = 1\n' >>/etc/ballast/ballastd.toml
    systemctl restart ballastd
    domain nodes 192 "$EMULATOR" dimms
    virsh -q start nodes
    until_is 300 more_rounds_than nodes 0
    ballast vm limit nodes 64M
    until_is 120 is nodes '.far_file_bytes > 0'
    both_die
    until_is 60 is nodes '.far_file_bytes > 0 and .resident_bytes <= .limit_bytes'
    right nodes
}

a_plugged_in_dimm_works_and_is_said_to_be_unmanaged() {
    both_die
    plug_dimm nodes
    until_is 60 is nodes ".unmanaged_bytes == $((128 << 20)) or .size_bytes == $((320 << 20))"
    echo "= $(of nodes '"\(.size_bytes) managed, \(.unmanaged_bytes) not"')"
    right nodes
    virsh -q destroy nodes
}

pool_has() { ballast --json pool show | jq -e ".vms == [] and $1 == 0 or .vms[0].bytes == $1"; }

# The unit has no mount namespace of its own.
memory_of_the_pool_outlives_engine_and_keeper() {
    echo '--pool 2M' >>/etc/ballast/emulator
    ballast pool reserve 192M
    domain pooled 160 "$EMULATOR"
    virsh -q start pooled
    until_is 300 more_rounds_than pooled 0
    pool_has $((160 << 20))
    both_die
    systemctl restart ballastd
    until_is 60 pool_has $((160 << 20))
    right pooled
    virsh -q destroy pooled
    until_is 60 pool_has 0
    ballast pool lend 192M
    sed -i '$d' /etc/ballast/emulator
}

the_package_stays_while_a_vm_needs_it() {
    ! apt-get remove -q ballast || fail "it was removed under a VM"
    right db
    virsh -q destroy db
    unknown() { ! is db .; }
    until_is 60 unknown
    echo "= libvirt_wrong_bytes $(wrong_bytes db) in $(rounds db) rounds"
}

nothing_is_left_after_a_purge() {
    apt-get remove -q ballast
    ! systemctl is-active -q ballastd || fail "ballastd runs still"
    ! pgrep ballastd || fail "a process is left"
    virt-xml db --edit --boot emulator=/usr/bin/qemu-system-x86_64
    virsh -q start db
    virsh -q destroy db
    apt-get purge -q ballast
    local left
    left=$(find /etc /usr /var/lib /run /lib -xdev -iname '*ballast*' ! -path '/var/lib/dpkg/*' \
        ! -path '/run/systemd/*' 2>/dev/null || true)
    [ -z "$left" ] || fail "left: $left"
}

begin "$@" -- a_stock_domain_is_defined=150 five_commands_lead_to_a_squeezed_domain=600 \
    what_a_domain_lacks_is_said_as_a_command_to_type=120 \
    limits_and_bytes_outlive_save_and_restore=300 limits_and_bytes_outlive_a_managed_save=300 \
    limits_outlive_resets=900 a_dump_has_all_memory=300 a_save_a_restore_and_a_dump_outlive_the_engine=600 \
    a_save_a_restore_and_a_dump_outlive_the_keeper=600 a_reset_outlives_engine_and_keeper=600 \
    a_later_package_follows_under_the_domain=400 memory_on_a_disk_outlives_engine_and_keeper=600 \
    a_plugged_in_dimm_works_and_is_said_to_be_unmanaged=600 memory_of_the_pool_outlives_engine_and_keeper=600 \
    the_package_stays_while_a_vm_needs_it=200 nothing_is_left_after_a_purge=300
