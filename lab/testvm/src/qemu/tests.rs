//! Tests of the promises of a guest, with QEMU.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ballast_base::{Bytes, MIB};
use ballast_testkit::missing;

use super::load::{Dataset, Mix, load, throughput, verify};
use super::*;

/// Limit for a boot under TCG during a busy test run. On an idle machine a boot takes 9 s.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Returns the allocated bytes of QEMU's RAM file.
fn host_bytes(guest: &QemuGuest) -> u64 {
    let fds = format!("/proc/{}/fd", guest.qemu_pid().expect("QEMU runs"));
    let is_ram = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("memfd:memory-backend-memfd"))
    };
    let files = std::fs::read_dir(fds).expect("QEMU runs").flatten().map(|entry| entry.path()).filter(is_ram);
    files.map(|path| rustix::fs::stat(&path).expect("an open file").st_blocks as u64 * 512).sum()
}

/// Wait until the condition is true. Fails the test with `what` after `TIMEOUT`.
fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !so() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn an_unmodified_debian_guest_boots_and_serves_redis() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    let mut guest = QemuGuest::builder().name("serves").memory(Bytes(384 * MIB)).spawn().expect("QEMU starts");
    guest.wait_ready(TIMEOUT).expect("the guest boots");
    let mut data = Dataset::new(1000, 8192, 42);
    load(guest.redis_addr(), &data).expect("Redis takes the data");
    assert!(host_bytes(&guest) > data.bytes(), "guest RAM is a shared memfd that holds the data");
    let mix = Mix { max_ops: 400, duration: TIMEOUT, writes: 0.3, ..Mix::default() };
    let used = throughput(guest.redis_addr(), &mut data, &mix).expect("Redis works");
    assert!(used.writes > 0 && used.reads.verified > 0 && used.reads.bytes_lost == 0, "{used:?}");
    let read = verify(guest.redis_addr(), &data).expect("Redis gives the data back");
    assert_eq!((read.verified, read.wrong, read.missing, read.bytes_lost), (1000, 0, 0, 0), "{read:?}");
    // With one key more than loaded, and another seed, `verify` finds wrong and missing keys.
    let read = verify(guest.redis_addr(), &Dataset::new(1001, 8192, 43)).expect("Redis answers");
    assert_eq!((read.verified, read.wrong, read.missing), (0, 1000, 1));
    assert_eq!(guest.qmp().and_then(|mut qmp| Ok(qmp.status()?)).expect("the monitor answers"), "running");
    guest.kill();
    assert!(guest.exited().is_some());
}

#[test]
fn a_running_guest_takes_a_dimm_and_gives_memory_to_the_balloon() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    // The command prints "grown" when the guest has more than its 320 MiB at boot.
    let mut guest = QemuGuest::builder()
        .name("grows")
        .memory(Bytes(320 * MIB))
        .hotplug_room(Bytes(256 * MIB))
        .balloon(Balloon::Plain)
        .run(
            "until [ $(awk '/MemTotal/{print $2}' /proc/meminfo) -gt 330000 ]; do usleep 100000; done; echo grown; \
              while :; do sleep 1; done",
        )
        .spawn()
        .expect("QEMU starts");
    guest.wait_ready(TIMEOUT).expect("the guest boots");
    let mut qmp = guest.qmp().expect("the monitor answers");
    qmp.plug_dimm("dimm0", Bytes(128 * MIB)).expect("QEMU takes the DIMM");
    assert_eq!(qmp.dimms().expect("the monitor answers"), ["dimm0"]);
    until("the guest uses the DIMM", || guest.serial_log().contains("grown"));
    let before = host_bytes(&guest);
    let target = Bytes((320 + 128 - 128) * MIB);
    qmp.set_balloon(target).expect("the balloon moves");
    until("the balloon is full", || qmp.balloon().expect("the monitor answers") == target);
    // The balloon returned the touched pages to the host. Many of its pages were never touched.
    assert!(host_bytes(&guest) <= before);
    assert!(qmp.plug_dimm("dimm0", Bytes(128 * MIB)).is_err_and(|error| error.to_string().contains("dimm0")));
}

#[test]
fn a_command_runs_in_the_guest_and_its_exit_status_comes_back() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    let command = "echo hello from $(uname -s); exit 3";
    let mut guest = QemuGuest::builder().name("runs").run(command).shared_memory(false).spawn().expect("QEMU starts");
    assert_eq!(guest.wait_run(TIMEOUT).expect("the guest runs it"), 3);
    assert!(guest.serial_log().contains("hello from Linux"), "{}", guest.serial_log());
}

#[test]
fn a_guest_that_ends_early_is_an_error_with_its_last_output() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    let mut guest = QemuGuest::builder().extra_args(["-no-such-option"]).spawn().expect("the process starts");
    let error = guest.wait_ready(TIMEOUT).expect_err("QEMU refuses its command line");
    assert!(matches!(&error, Error::Ended { tail, .. } if tail.contains("no-such-option")), "{error}");
}

#[test]
fn kill_ends_qemu_behind_a_prefix_that_does_not_exec() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    // `; true` prevents the shell from replacing itself with its last command.
    let prefix = ["sh", "-c", "\"$@\"; true", "sh"];
    let mut guest = QemuGuest::builder().prefix(prefix).extra_args(["-S"]).spawn().expect("the shell starts");
    drop(guest.qmp().expect("the monitor answers"));
    let qemu = guest.qemu_pid().expect("QEMU listens");
    assert_ne!(qemu, guest.pid());
    guest.kill();
    until("QEMU is gone", || !Path::new(&format!("/proc/{qemu}/exe")).exists());
}
