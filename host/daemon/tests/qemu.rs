//! End to end: unmodified QEMU under `ballast run`, a Debian kernel and Redis, and a ballastd.
//!
//! Needs root (userfaultfd), QEMU and the guest image of `scripts/guest-image.sh`. Under TCG a boot takes ten seconds
//! or more, so a boot serves several claims and guests run one at a time. Tests about RAM only start QEMU stopped
//! (`-S`).
//! Promise: "verified" means that each byte of each key was read back through the guest and compared.

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ballast_api::{VmStat, VmStatus};
use ballast_base::{Bytes, GIB, HUGE_SIZE, MIB};
use ballast_sys::Mapping;
use ballast_sys::lock::Lock;
use ballast_testkit::PoolLoan;
use ballast_testvm::qemu::load::{Dataset, Mix, load, throughput, verify};
use ballast_testvm::qemu::{Builder, QEMU, QemuGuest, Qmp, qemu_missing};

use common::{Daemon, built, missing, until};

const TIMEOUT: Duration = Duration::from_secs(180);
const VALUE: usize = 16 << 10;
const KEYS: usize = 3072;
/// Half a second of quarantine, so that reclaim takes less of the test's time.
const CONFIG: &str = "quarantine_ms = 500\n";

/// One QEMU at a time: the machine may have two CPUs, and TCG needs one.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static GUEST: Mutex<()> = Mutex::new(());
    GUEST.locked()
}

/// `ballast run` with this name, as words before a QEMU command line.
fn under_ballast(daemon: &Daemon, name: &str, more: &[&str]) -> Vec<String> {
    let (program, socket) = (built("ballast"), daemon.attach_socket());
    let mut words = vec![program.to_string_lossy().into_owned(), "run".into(), "--name".into(), name.into()];
    words.extend(["--attach-socket".into(), socket.to_string_lossy().into_owned()]);
    words.extend(more.iter().map(|word| (*word).to_owned()));
    words.push("--".into());
    words
}

fn boot(daemon: &Daemon, name: &str, guest: Builder) -> QemuGuest {
    let mut guest = guest.name(name).prefix(under_ballast(daemon, name, &[])).spawn().expect("QEMU starts");
    guest.wait_ready(TIMEOUT).expect("the guest boots");
    assert_eq!(daemon.vm(name).pid, guest.pid(), "`ballast run` becomes QEMU");
    guest
}

fn stopped(daemon: &Daemon, name: &str, memory: u64, run_options: &[&str], guest: Builder) -> QemuGuest {
    let guest = guest.name(name).memory(Bytes(memory)).extra_arg("-S");
    let mut guest = guest.prefix(under_ballast(daemon, name, run_options)).spawn().expect("QEMU starts");
    until_attached(daemon, name, &mut guest);
    guest
}

fn until_attached(daemon: &Daemon, name: &str, guest: &mut QemuGuest) {
    let deadline = Instant::now() + TIMEOUT;
    while daemon.api.vm(name).is_err() {
        assert!(guest.exited().is_none(), "QEMU ended: {}", guest.stderr_log());
        assert!(Instant::now() < deadline, "never attached: {}\n{}", guest.stderr_log(), daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The daemon's figures of the VM, after a check that they add up to the page, and that nothing is lost.
fn stat(daemon: &Daemon, name: &str) -> VmStat {
    let vm = daemon.vm(name);
    let parts = vm.resident_bytes + vm.far_bytes + vm.zero_bytes + vm.untouched_bytes + vm.poisoned_bytes;
    assert_eq!(vm.size_bytes, parts, "{vm:?}");
    assert_eq!(vm.poisoned_bytes, 0, "{vm:?}\n{}", daemon.log());
    vm
}

fn squeeze(daemon: &Daemon, name: &str, limit: u64) -> VmStat {
    daemon.api.set_limit(name, Some(limit)).expect("set a limit");
    until("resident is at the limit", || daemon.vm(name).resident_bytes <= limit);
    stat(daemon, name)
}

/// Reads back each key; `missing` of them were deleted.
#[track_caller]
fn verify_all(daemon: &Daemon, guest: &QemuGuest, data: &Dataset, missing: usize) {
    let read = verify(guest.redis_addr(), data)
        .unwrap_or_else(|error| panic!("{error:?}\n{}\n{}\n{}", guest.stderr_log(), guest.serial_log(), daemon.log()));
    let found = (read.verified, read.wrong, read.missing);
    assert_eq!(found, (data.keys() - missing, 0, missing), "{read:?}\n{}", daemon.log());
}

#[test]
fn a_debian_guest_with_redis_keeps_every_byte_through_reclaim_and_deaths() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    let _one = one_at_a_time();
    let mut daemon = Daemon::start(CONFIG);
    let guest = boot(&daemon, "redis", QemuGuest::builder().memory(Bytes(256 * MIB)));
    let mut data = Dataset::new(KEYS, VALUE, 1);
    load(guest.redis_addr(), &data).expect("Redis takes the data");

    let before = stat(&daemon, "redis");
    assert_eq!((before.size_bytes, before.far_bytes), (256 * MIB, 0), "{before:?}");
    assert!(before.resident_bytes > data.bytes(), "{before:?}");
    let limit = before.resident_bytes / 2 / MIB * MIB;
    let squeezed = squeeze(&daemon, "redis", limit);
    assert!(squeezed.far_bytes + squeezed.zero_bytes >= before.resident_bytes - limit - MIB, "{squeezed:?}");
    let output = vm_stat(&daemon, "redis");
    let screen = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && screen.contains("size = resident + far + zero + untouched"), "{screen}");
    assert!(!screen.contains("DOES NOT ADD UP"), "{screen}");

    daemon.replace_engine();
    assert_eq!(stat(&daemon, "redis").limit_bytes, Some(limit));
    verify_all(&daemon, &guest, &data, 0);
    let after = stat(&daemon, "redis");
    assert!(after.faults.restore > squeezed.faults.restore, "nothing was restored: {after:?}");

    let orphan = daemon.engine_pid().expect("an engine");
    daemon.kill_keeper();
    // Nobody reclaims now, but faults are served: each key can be read and written.
    let mix = Mix { max_ops: 300, duration: TIMEOUT, hot_keys: 1.0, writes: 0.3, ..Mix::default() };
    let used = throughput(guest.redis_addr(), &mut data, &mix).expect("Redis works without a keeper");
    assert!(used.writes > 0 && used.reads.bytes_lost == 0, "{used:?}");
    daemon.restart_keeper();
    daemon.wait_for_engine_after(orphan);
    until("the guest is attached again", || daemon.api.vm("redis").is_ok_and(|vm| vm.status == VmStatus::Running));
    assert_eq!(stat(&daemon, "redis").limit_bytes, Some(limit));
    verify_all(&daemon, &guest, &data, 0);
    until("the limit holds again", || daemon.vm("redis").resident_bytes <= limit);
    stat(&daemon, "redis");
}

#[test]
fn a_debian_guest_is_reclaimed_in_whole_huge_pages_and_keeps_every_byte() {
    const MEMORY: u64 = 256 * MIB;
    if missing("qemu", qemu_missing()) {
        return;
    }
    let loan = PoolLoan::new(MEMORY / HUGE_SIZE as u64);
    if missing("hugetlb", loan.as_ref().err().map(|error| error.to_string())) {
        return;
    }
    let _one = one_at_a_time();
    let daemon = Daemon::start(CONFIG);
    let guest = boot(&daemon, "huge", QemuGuest::builder().memory(Bytes(MEMORY)).huge_pages());
    let data = Dataset::new(KEYS, VALUE, 3);
    load(guest.redis_addr(), &data).expect("Redis takes the data");
    let before = stat(&daemon, "huge");
    let squeezed = squeeze(&daemon, "huge", before.resident_bytes / 2 / MIB * MIB);
    assert!(squeezed.far_bytes > 0 && squeezed.far_bytes.is_multiple_of(HUGE_SIZE as u64), "{squeezed:?}");
    assert!(squeezed.resident_bytes.is_multiple_of(HUGE_SIZE as u64), "{squeezed:?}");
    daemon.replace_engine();
    verify_all(&daemon, &guest, &data, 0);
    assert!(stat(&daemon, "huge").faults.restore > squeezed.faults.restore, "nothing was restored");
}

fn vm_stat(daemon: &Daemon, name: &str) -> Output {
    daemon.ballast().args(["vm", "stat", name]).output().expect("run ballast")
}

/// Sends Redis these commands in its inline form, and checks that none fails.
fn redis(guest: &QemuGuest, commands: impl Iterator<Item = String>) {
    let stream = TcpStream::connect(guest.redis_addr()).expect("connect to Redis");
    stream.set_read_timeout(Some(TIMEOUT)).expect("set a timeout");
    let mut answers = BufReader::new(stream.try_clone().expect("duplicate a socket")).lines();
    let commands: Vec<String> = commands.collect();
    for batch in commands.chunks(64) {
        (&stream).write_all((batch.join("\r\n") + "\r\n").as_bytes()).expect("send");
        for command in batch {
            let answer = answers.next().expect("an answer").expect("an answer");
            assert!(!answer.starts_with('-'), "{command}: {answer}");
        }
    }
}

#[test]
fn free_pages_the_guest_reports_and_balloon_pages_are_discarded_not_stored() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    const MEMORY: u64 = 384 * MIB;
    /// Least part of the balloon that is memory in DRAM.
    const IN_DRAM: u64 = 8 * MIB;
    const FAR: u64 = 4 * MIB;
    /// Small, so that the balloon cannot find all of its pages in DRAM.
    const LIMIT: u64 = 24 * MIB;
    /// One key in this many stays.
    const STAYS: usize = 16;
    let _one = one_at_a_time();
    let daemon = Daemon::start(CONFIG);
    let builder = QemuGuest::builder().memory(Bytes(MEMORY)).balloon();
    let mut guest = boot(&daemon, "free", builder);

    // 135 MiB are free in pieces too small to be reported: between two keys that stay there is never a free huge page.
    // The guest needs that much after the second balloon.
    let data = Dataset::new(3 * KEYS, VALUE, 2);
    load(guest.redis_addr(), &data).expect("Redis takes the data");
    let deleted = (0..data.keys()).filter(|key| key % STAYS != 0).map(|key| format!("DEL key:{key:08}"));
    redis(&guest, deleted.chain(["MEMORY PURGE".to_owned()]));
    let mut qmp = guest.qmp().expect("the monitor answers");

    // The guest chooses the balloon's pages, but it cannot take a page twice. So a balloon larger than all untouched
    // memory also takes other memory.
    let before = stat(&daemon, "free");
    let taken = (before.untouched_bytes + IN_DRAM).next_multiple_of(MIB);
    balloon(&mut qmp, MEMORY - taken);
    let after = stat(&daemon, "free");
    assert!(after.untouched_bytes >= taken, "{taken}: {before:?}\n{after:?}");
    assert!(after.resident_bytes <= before.resident_bytes - IN_DRAM, "{before:?}\n{after:?}");
    assert_eq!((after.far_bytes, after.store_bytes, after.reclaim.evicted_pages), (0, 0, 0), "{after:?}");

    // A balloon larger than all memory that is not far also takes far memory.
    squeeze(&daemon, "free", LIMIT);
    let before = stat(&daemon, "free");
    let taken = (MEMORY - before.far_bytes + FAR).next_multiple_of(MIB);
    balloon(&mut qmp, MEMORY - taken);
    let after = stat(&daemon, "free");
    assert!(after.untouched_bytes >= taken, "{taken}: {before:?}\n{after:?}");
    assert!(after.far_bytes <= before.far_bytes - FAR, "{before:?}\n{after:?}");
    assert!(after.reclaim.discarded_pages > 0, "the engine was asked: {after:?}");

    balloon(&mut qmp, MEMORY);
    verify_all(&daemon, &guest, &data, data.keys() - data.keys() / STAYS);
}

fn balloon(qmp: &mut Qmp, memory: u64) {
    qmp.set_balloon(Bytes(memory)).expect("the balloon moves");
    let deadline = Instant::now() + TIMEOUT;
    while qmp.balloon().expect("the monitor answers") != Bytes(memory) {
        assert!(Instant::now() < deadline, "the balloon never left the guest {}", Bytes(memory));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_hot_plugged_dimm_is_managed_and_an_unplugged_one_is_forgotten() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    const MEMORY: u64 = 256 * MIB;
    const DIMM: u64 = 128 * MIB;
    /// How long the guest may take to release a DIMM; it need not agree at all.
    const GOODWILL: Duration = Duration::from_secs(20);
    let _one = one_at_a_time();
    let daemon = Daemon::start(CONFIG);
    // Movable, so that the DIMM can be emptied again; new data goes there first. The kernel takes at most 32 words. The
    // sum of 64 MiB of random bytes is printed again and again.
    let command = "echo online_movable >/sys/devices/system/memory/auto_online_blocks; \
        until [ $(awk '/MemTotal/{print $2}' /proc/meminfo) -gt 270000 ];do usleep 9999;done; \
        dd if=/dev/urandom of=/tmp/random bs=1M count=64; while md5sum /tmp/random;do sleep 2;done";
    let builder = QemuGuest::builder().memory(Bytes(MEMORY)).hotplug_room(Bytes(DIMM)).run(command);
    let mut guest = boot(&daemon, "grows", builder);
    assert_eq!(stat(&daemon, "grows").regions.len(), 1);

    let mut qmp = guest.qmp().expect("the monitor answers");
    qmp.plug_dimm("dimm0", Bytes(DIMM)).expect("QEMU takes the DIMM");
    // The keeper replies before the engine has the DIMM.
    until("the DIMM is part of the VM", || daemon.vm("grows").size_bytes == MEMORY + DIMM);
    let vm = stat(&daemon, "grows");
    assert_eq!(vm.regions.len(), 2, "{vm:?}");
    until("the guest uses the DIMM", || !sums(&guest).is_empty());
    let used = stat(&daemon, "grows");
    assert!(used.regions[1].resident_bytes > 56 * MIB, "{used:?}");
    let squeezed = squeeze(&daemon, "grows", used.resident_bytes / 2);
    assert!(squeezed.far_bytes > 0, "{squeezed:?}");
    daemon.replace_engine();
    assert_eq!(stat(&daemon, "grows").regions.len(), 2, "a successor knows the DIMM");

    qmp.unplug_dimm("dimm0").expect("QEMU asks the guest");
    let deadline = Instant::now() + GOODWILL;
    while !qmp.dimms().expect("the monitor answers").is_empty() {
        if Instant::now() > deadline {
            println!("the guest did not let the DIMM go within {GOODWILL:?}; only plugging was tested");
            same_sums(&daemon, &guest);
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    qmp.drop_dimm("dimm0").expect("QEMU gives up the memory");
    until("the DIMM is forgotten", || daemon.vm("grows").size_bytes == MEMORY);
    let vm = stat(&daemon, "grows");
    assert_eq!(vm.regions.len(), 1, "{vm:?}");
    daemon.replace_engine();
    assert_eq!(stat(&daemon, "grows").size_bytes, MEMORY, "a successor has forgotten it, too");
    same_sums(&daemon, &guest);
}

fn sums(guest: &QemuGuest) -> Vec<String> {
    guest.serial_log().lines().filter(|line| line.contains("  /tmp/random")).map(str::to_owned).collect()
}

/// Waits until the guest has read all of its file once more, and checks that each checksum is the first one.
fn same_sums(daemon: &Daemon, guest: &QemuGuest) {
    // The next line may come from a read that began before this call.
    let enough = sums(guest).len() + 2;
    until("the guest reads its file again", || sums(guest).len() >= enough);
    let sums = sums(guest);
    assert!(sums.iter().all(|sum| *sum == sums[0]), "{sums:?}\n{}", daemon.log());
}

fn ram_file(pid: u32) -> File {
    let is_ram = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("memory-backend-memfd"))
    };
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("QEMU runs");
    let path = fds.flatten().map(|entry| entry.path()).find(is_ram).expect("its RAM is a memfd");
    File::options().read(true).write(true).open(path).expect("open QEMU's RAM")
}

#[test]
fn no_page_leaves_ram_that_another_process_maps_until_that_process_is_gone() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    const MEMORY: u64 = 256 * MIB;
    const LIMIT: u64 = 32 * MIB;
    /// The test writes from here, where no firmware is.
    const FROM: usize = 128 << 20;
    const LEN: usize = 64 << 20;
    let _one = one_at_a_time();
    let daemon = Daemon::start(CONFIG);
    let guest = stopped(&daemon, "shared", MEMORY, &[], QemuGuest::builder());
    let me = std::process::id();
    let page = |number: usize| (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes().repeat(512);

    let ram = ram_file(guest.pid());
    let mapping = Mapping::shared(&ram, 0, MEMORY as usize).expect("map QEMU's RAM");
    for number in 0..LEN / 4096 {
        mapping.copy_in(FROM + number * 4096, &page(number));
    }
    daemon.api.set_limit("shared", Some(LIMIT)).expect("it counts when this process is gone, which would read zeros");
    let is_named =
        |vm: &VmStat| vm.status_reason.as_ref().is_some_and(|reason| reason.contains(&format!("process {me} ")));
    until("somebody has looked", || is_named(&daemon.vm("shared")));
    let vm = stat(&daemon, "shared");
    assert_eq!((vm.limit_bytes, vm.far_bytes, vm.status), (Some(LIMIT), 0, VmStatus::Blocked), "{vm:?}");
    daemon.api.set_limit("shared", Some(MEMORY)).expect("a limit that takes nothing is no danger");

    drop(mapping);
    let squeezed = squeeze(&daemon, "shared", LIMIT);
    assert!(squeezed.far_bytes > 0, "{squeezed:?}");

    // A process that maps the RAM later is noticed, and all pages are restored for it.
    let mapping = Mapping::shared(&ram, 0, MEMORY as usize).expect("map QEMU's RAM");
    until("the foreign mapper is noticed", || daemon.vm("shared").status == VmStatus::Blocked);
    until("all pages are back", || daemon.vm("shared").far_bytes == 0);
    let vm = stat(&daemon, "shared");
    assert!(vm.status_reason.as_deref().is_some_and(|reason| reason.contains(&format!("process {me} "))), "{vm:?}");
    let mut found = vec![0; 4096];
    for number in 0..LEN / 4096 {
        mapping.copy_out(FROM + number * 4096, &mut found);
        assert!(found == page(number), "page {number} is wrong\n{}", daemon.log());
    }
    drop(mapping);
    until("the limit holds again", || daemon.vm("shared").resident_bytes <= LIMIT);
}

#[test]
fn run_without_a_shared_backend_prints_the_missing_flags_or_adds_them() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    let _one = one_at_a_time();
    let daemon = Daemon::start(CONFIG);
    let plain = ["-nodefaults", "-display", "none", "-accel", "tcg", "-m", "96M", "-S"];
    let run = under_ballast(&daemon, "plain", &[]);
    let output = Command::new(&run[0]).args(&run[1..]).arg(QEMU).args(plain).output().expect("run ballast");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let flags = "-object memory-backend-memfd,id=ballast-ram0,size=96M,share=on -machine memory-backend=ballast-ram0";
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.lines().any(|line| line.trim() == flags), "{said}");
    assert!(said.contains("--add-memory-backend"), "{said}");
    assert!(daemon.api.vms().expect("ask the daemon").is_empty(), "it was not started");

    // Only the flags that were printed are missing.
    let qemu = Command::new(&run[0]).args(&run[1..]).arg(QEMU).args(plain).args(flags.split(' ')).spawn();
    let mut qemu = qemu.expect("run ballast");
    until("the VM is attached", || {
        daemon.api.vm("plain").is_ok() || !Path::new(&format!("/proc/{}/exe", qemu.id())).exists()
    });
    let vm = daemon.api.vm("plain");
    qemu.kill().and_then(|()| qemu.wait()).expect("end QEMU");
    assert_eq!(vm.expect("attached").size_bytes, 96 * MIB);

    // `ballast run` writes them itself; this command line has a `-machine` already.
    let private = QemuGuest::builder().shared_memory(false);
    let mut guest = stopped(&daemon, "added", 96 * MIB, &["--add-memory-backend"], private);
    assert_eq!(stat(&daemon, "added").size_bytes, 96 * MIB);
    assert!(guest.stderr_log().contains("added to the command line: -object"), "{}", guest.stderr_log());
    guest.kill();
    until("the VM is forgotten", || daemon.api.vms().is_ok_and(|vms| vms.is_empty()));
}

/// `System RAM` in the guest's list of its addresses: first and last byte.
fn system_ram(iomem: &str) -> Vec<(u64, u64)> {
    let range = |line: &str| {
        let (place, what) = line.trim_end().split_once(" : ")?;
        let (first, last) = place.split_once('-')?;
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        // Not its indented parts.
        (what == "System RAM").then_some((number(first)?, number(last)?))
    };
    iomem.lines().filter_map(range).collect()
}

/// Whether all memory of the guest is where we report it, and the guest uses all of the memory above 4 GiB, where
/// nothing is reserved for the firmware.
fn agrees(said: &[(u64, u64)], ranges: &[(u64, u64, u32, u64)]) -> bool {
    let inside = |(first, last): &(u64, u64)| {
        ranges.iter().any(|(address, size, ..)| address <= first && last < &(address + size))
    };
    let used = |(address, size, ..): &(u64, u64, u32, u64)| said.contains(&(*address, address + size - 1));
    !said.is_empty() && said.iter().all(inside) && ranges.iter().filter(|range| range.0 >= 4 * GIB).all(used)
}

#[test]
fn guest_ranges_agree_with_the_guest_around_the_pci_hole_and_for_a_plugged_dimm() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    const MEMORY: u64 = 5 * GIB;
    const DIMM: u64 = 128 * MIB;
    let _one = one_at_a_time();
    let mut daemon = Daemon::start(CONFIG);
    let command = "while :; do cat /proc/iomem; echo shown; sleep 1; done";
    let guest = QemuGuest::builder().memory(Bytes(MEMORY)).hotplug_room(Bytes(GIB)).run(command);
    let mut guest = boot(&daemon, "pc", guest);
    let seen = |daemon: &Daemon| -> Vec<(u64, u64, u32, u64)> {
        let regions = daemon.vm("pc").regions;
        let all = regions.iter().flat_map(|region| region.guest_ranges.iter().map(|range| (region.index, *range)));
        all.map(|(index, range)| (range.guest_address, range.size_bytes, index, range.offset_bytes)).collect()
    };
    // QEMU's PC has 3 GiB below the hole if not all memory fits there.
    let mut expected = vec![(0, 3 * GIB, 0, 0), (4 * GIB, MEMORY - 3 * GIB, 0, 3 * GIB)];
    until("QEMU has said where", || seen(&daemon) == expected);
    let said = |guest: &QemuGuest| guest.serial_log().rsplit("shown").nth(1).map_or_else(Vec::new, system_ram);
    // Lines of the kernel's log may cut an answer in two: a complete one agrees.
    until("the guest says the same", || agrees(&said(&guest), &expected));
    guest.qmp().expect("the monitor").plug_dimm("dimm0", Bytes(DIMM)).expect("QEMU takes the DIMM");
    until("QEMU has said where", || seen(&daemon).len() == 3);
    expected = seen(&daemon);
    let dimm = expected[2];
    assert_eq!((dimm.1, dimm.2, dimm.3), (DIMM, 1, 0));
    until("the guest has it where we say", || agrees(&said(&guest), &expected));
    let output = vm_stat(&daemon, "pc");
    let screen = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(screen.contains("0x100000000-0x17fffffff"), "{screen}");

    // The layout outlives the engine that learned it.
    daemon.replace_engine();
    until("it is served again", || seen(&daemon) == expected);
    daemon.kill_keeper();
    daemon.restart_keeper();
    until("it is attached again", || daemon.api.vm("pc").is_ok());
    until("it is known as before", || seen(&daemon) == expected);
}

#[test]
fn a_qemu_without_a_monitor_for_ballast_reports_no_guest_addresses() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    let _one = one_at_a_time();
    let daemon = Daemon::start(CONFIG);
    let library = built("libballast_preload.so");
    let guest = QemuGuest::builder()
        .name("plain")
        .memory(Bytes(256 * MIB))
        .env("LD_PRELOAD", library.to_string_lossy())
        .env("BALLAST_SOCKET", daemon.attach_socket().to_string_lossy())
        .env("BALLAST_VM_NAME", "plain")
        // Descriptors that are not there must not mislead, either.
        .env("BALLAST_MONITOR", "871,872")
        .extra_arg("-S");
    let mut guest = guest.spawn().expect("QEMU starts");
    until_attached(&daemon, "plain", &mut guest);
    assert!(daemon.vm("plain").regions.iter().all(|region| region.guest_ranges.is_empty()));
    let screen = String::from_utf8_lossy(&vm_stat(&daemon, "plain").stdout).into_owned();
    assert!(screen.contains("the guest-physical addresses of its memory are not known"), "{screen}");
}
