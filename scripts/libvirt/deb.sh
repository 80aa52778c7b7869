#!/bin/bash
# The package under libvirt: from a Debian without Ballast to a squeezed domain and back, as docs/libvirt.md says it. In
# the machine of libvirt-suite.sh; the packages are in /suite/debs: the one to install, and a later build.
. /suite/lib.sh

EMULATOR=/usr/lib/ballast/qemu-system-x86_64
LIMIT=72M
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

limits_and_bytes_outlive_save_and_restore() {
    virsh -q save db /var/tmp/db.save
    virsh -q restore /var/tmp/db.save
    until_is 60 held
    echo "= resident after a restore: $(of db .resident_bytes), limit $(of db .limit_bytes)"
    right db
}

limits_and_bytes_outlive_a_managed_save() {
    virsh -q managedsave db
    virsh -q start db
    until_is 60 held
    right db
}

limits_outlive_a_reset() {
    local before
    before=$(rounds db)
    virsh -q reset db
    until_is 300 more_rounds_than db "$before"
    until_is 60 held
    right db
}

a_dump_has_all_memory() {
    virsh -q dump --memory-only db /var/tmp/db.dump
    [ "$(stat -c %s /var/tmp/db.dump)" -ge $((192 << 20)) ] || fail "$(ls -l /var/tmp/db.dump)"
    # A key that only the guest's memory has, in pages that were far.
    grep -qa 'BALLAST-READY run' /var/tmp/db.dump || fail "the guest's console is not in the dump"
    rm /var/tmp/db.dump
    until_is 60 held
    right db
}

the_domain_lives_on_when_the_engine_is_killed() {
    local engine
    engine=$(engine_pid)
    kill -KILL "$engine"
    until_is 60 another_engine_than "$engine"
    right db
    until_is 60 held
}

the_domain_lives_on_when_the_keeper_is_killed() {
    local keeper
    keeper=$(keeper_pid)
    kill -KILL "$keeper"
    until_is 60 another_keeper_than "$keeper"
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

a_plugged_in_dimm_works_and_is_said_to_be_unmanaged() {
    domain nodes 160 "$EMULATOR" dimms
    virsh -q start nodes
    until_is 300 more_rounds_than nodes 0
    plug_dimm nodes
    until_is 60 is nodes ".unmanaged_bytes == $((128 << 20)) or .size_bytes == $((288 << 20))"
    echo "= $(of nodes '"\(.size_bytes) managed, \(.unmanaged_bytes) not"')"
    right nodes
    virsh -q destroy nodes
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
    virt-xml db --edit --emulator /usr/bin/qemu-system-x86_64
    virsh -q start db
    virsh -q destroy db
    apt-get purge -q ballast
    local left
    left=$(find /etc /usr /var/lib /run /lib -xdev -iname '*ballast*' ! -path '/var/lib/dpkg/*' \
        ! -path '/etc/systemd/*' ! -path '/run/systemd/*' 2>/dev/null || true)
    [ -z "$left" ] || fail "left: $left"
}

begin "$@" -- a_stock_domain_is_defined=150 five_commands_lead_to_a_squeezed_domain=600 \
    limits_and_bytes_outlive_save_and_restore=300 limits_and_bytes_outlive_a_managed_save=300 \
    limits_outlive_a_reset=500 a_dump_has_all_memory=300 the_domain_lives_on_when_the_engine_is_killed=300 \
    the_domain_lives_on_when_the_keeper_is_killed=300 a_later_package_follows_under_the_domain=400 \
    a_plugged_in_dimm_works_and_is_said_to_be_unmanaged=500 the_package_stays_while_a_vm_needs_it=200 \
    nothing_is_left_after_a_purge=300
