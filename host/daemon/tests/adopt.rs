//! Adopted VMs in a real daemon: limits, refusals, states, and deaths of the engine.
//!
//! The VMM is `host/adopt/tests/vmm.c` under a VMM's name: guest RAM that verifies itself. Needs `cc`; limits need root
//! and zram. Other VMMs of the host may be adopted during the tests, but never limited.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use ballast_api::{AdoptRequest, AdoptedBy, VmClass, VmKind, VmStat, VmStatus};
use ballast_base::MIB;
use ballast_testkit::skip;
use ballast_testkit::swap::Swap;

use common::guest::Guest;
use common::{Daemon, kill, until};

/// Made once for all tests of this program, in cargo's directory, because a static is never dropped.
fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let make = || {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("adopt-daemon");
        std::fs::create_dir_all(&dir).expect("a directory");
        let (program, source) = (dir.join("qemu-system-x86_64"), "../adopt/tests/vmm.c");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
        let made = Command::new("cc").args(["-O2", "-o"]).args([&program, &source]).status();
        made.is_ok_and(|status| status.success()).then_some(program)
    };
    let made = PROGRAM.get_or_init(make).as_deref();
    if made.is_none() {
        skip("cc", "there is no C compiler");
    }
    made
}

struct Vmm {
    child: Child,
    says: BufReader<ChildStdout>,
}

impl Vmm {
    fn start(name: &str) -> Option<Self> {
        let mut command = Command::new(program()?);
        let command = command.args(["-name", name, "-m", "64"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut says = BufReader::new(child.stdout.take().expect("piped"));
        says.read_line(&mut String::new()).expect("ready");
        Some(Self { child, says })
    }

    /// Sends a command. Returns the number of wrong words.
    fn tell(&mut self, what: &str) -> u64 {
        writeln!(self.child.stdin.as_mut().expect("piped"), "{what}").expect("it listens");
        let mut line = String::new();
        self.says.read_line(&mut line).expect("it replies");
        line.trim().parse().expect("a number")
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn swap(size: &str) -> Option<Swap> {
    Swap::new(size).map_err(|why| skip("zram", why)).ok()
}

fn by_pid(vmm: &Vmm) -> AdoptRequest {
    AdoptRequest { pid: Some(vmm.child.id()), ..AdoptRequest::default() }
}

/// The daemon's figures of a VM, after a check that they add up.
fn stat(daemon: &Daemon, name: &str) -> VmStat {
    let vm = daemon.vm(name);
    let parts = vm.resident_bytes + vm.far_bytes + vm.zero_bytes + vm.untouched_bytes;
    assert_eq!((vm.size_bytes, vm.kind), (parts, VmKind::Adopted), "{vm:?}");
    vm
}

fn is_held(daemon: &Daemon, name: &str, limit: u64) {
    until("it is at its limit", || stat(daemon, name).resident_bytes <= limit);
}

/// Sets a limit, and waits until the VM is at it.
fn hold(daemon: &Daemon, name: &str, limit: u64) {
    daemon.api.set_limit(name, Some(limit)).expect("a limit");
    is_held(daemon, name, limit);
}

fn adopted(daemon: &Daemon, name: &str) -> Option<Vmm> {
    let mut vmm = Vmm::start(name)?;
    vmm.tell("fill 64");
    let result = daemon.api.adopt(&by_pid(&vmm)).expect("adopted");
    assert_eq!((result.adopted.len(), result.refused.len()), (1, 0), "{result:?}");
    assert_eq!(result.adopted[0].name, name);
    Some(vmm)
}

fn events(daemon: &Daemon, kind: &str) -> Vec<String> {
    let events = daemon.api.events().expect("events").into_iter();
    events.filter(|event| event.kind == kind).map(|event| event.message).collect()
}

#[test]
fn an_adopted_vm_is_held_to_its_limit_through_deaths_of_engine_and_keeper() {
    let Some(_swap) = swap("1G") else { return };
    let mut daemon = Daemon::start("");
    let Some(mut vmm) = adopted(&daemon, "held") else { return };
    let before = stat(&daemon, "held");
    assert_eq!((before.size_bytes, before.resident_bytes, before.limit_bytes), (64 * MIB, 64 * MIB, None));
    assert_eq!(before.adopted.as_ref().map(|adopted| adopted.by), Some(AdoptedBy::Pageout));
    hold(&daemon, "held", 24 * MIB);
    assert_eq!(vmm.tell("check 64"), 0);
    assert!(stat(&daemon, "held").faults.restored_pages >= 40 * 256 - 512);
    is_held(&daemon, "held", 24 * MIB);

    daemon.replace_engine();
    assert_eq!((stat(&daemon, "held").id, stat(&daemon, "held").limit_bytes), (before.id.clone(), Some(24 * MIB)));
    assert_eq!(vmm.tell("check 64"), 0);
    is_held(&daemon, "held", 24 * MIB);

    daemon.kill_and_restart_keeper(true);
    assert_eq!((stat(&daemon, "held").id, stat(&daemon, "held").limit_bytes), (before.id, Some(24 * MIB)));
    is_held(&daemon, "held", 24 * MIB);

    daemon.api.set_limit("held", None).expect("no limit");
    assert_eq!(vmm.tell("check 64"), 0);
    until("all of it is back", || stat(&daemon, "held").resident_bytes == 64 * MIB);
    drop(vmm);
    until("it is gone", || daemon.api.vm("held").is_err());
    until("that is an event", || events(&daemon, "gone").iter().any(|text| text.contains("held")));
}

#[test]
fn a_limit_of_16_mib_under_load_and_a_full_swap_kill_no_vm() {
    let Some(_swap) = swap("110M") else { return };
    if std::fs::read_to_string("/proc/swaps").expect("swaps").lines().count() != 2 {
        return skip("zram", "there is other swap");
    }
    let daemon = Daemon::start("");
    let (Some(mut one), Some(mut other)) = (adopted(&daemon, "one"), adopted(&daemon, "other")) else { return };
    daemon.api.set_limit("one", Some(16 * MIB)).expect("a limit");
    for _ in 0..5 {
        assert_eq!((one.tell("check 64"), one.tell("touch 0 64")), (0, 0));
    }
    is_held(&daemon, "one", 16 * MIB);
    hold(&daemon, "other", 16 * MIB);
    // The limit of a third VM could need more swap than there is.
    let Some(third) = adopted(&daemon, "third") else { return };
    let refused = daemon.api.set_limit("third", Some(MIB)).expect_err("no room").to_string();
    assert!(refused.contains("159 MiB of swap"), "{refused}");
    daemon.api.set_limit("third", Some(60 * MIB)).expect("that fits");
    let mut filler = Vmm::start("filler").expect("a program");
    filler.tell("fill 64");
    let found = ballast_adopt::Adopted::new(ballast_adopt::look(filler.child.id()).expect("found")).expect("adopted");
    daemon.api.set_limit("one", None).expect("no limit");
    assert_eq!(one.tell("check 64"), 0);
    until("swap is full", || {
        let _ = found.step(8 * MIB);
        ballast_adopt::swap::Swap::now().full().is_some()
    });
    daemon.api.set_limit("other", Some(8 * MIB)).expect_err("no room for more");
    until("it says so", || {
        // Restored memory makes room in swap, which the other VM takes.
        let _ = found.step(8 * MIB);
        other.tell("touch 0 64");
        // The guest's touches and the filler's steps alternate, so each state is short.
        let vm = stat(&daemon, "other");
        vm.status == VmStatus::Blocked && vm.status_reason.is_some_and(|why| why.contains("swap is full"))
    });
    assert!(events(&daemon, "adopted-blocked").iter().any(|text| text.contains("swap is full")));
    assert_eq!([one.tell("check 64"), other.tell("check 64"), filler.tell("check 64")], [0; 3]);
    drop((filler, found));
    is_held(&daemon, "other", 16 * MIB);
    until("it says so", || stat(&daemon, "other").status == VmStatus::Running);
    drop(third);
}

#[test]
fn a_process_that_cannot_be_adopted_is_refused_and_an_adopted_vm_stays_as_it_was() {
    let daemon = Daemon::start("");
    let adopt = |request: &AdoptRequest| daemon.api.adopt(request).map(|result| result.adopted.len());
    let refused = |request: &AdoptRequest| adopt(request).expect_err("refused").to_string();
    let of_pid = |pid| AdoptRequest { pid: Some(pid), ..AdoptRequest::default() };
    assert!(refused(&of_pid(std::process::id())).contains("no VMM that Ballast knows"));
    assert!(refused(&of_pid(u32::MAX)).contains("no process"));
    let named = |vm: &str| AdoptRequest { vm: Some(vm.into()), ..AdoptRequest::default() };
    assert!(refused(&named("nobody-has-this-name")).contains("no VMM of this host"));
    let guest = Guest::start(&daemon, "paged", "--workload uniform --ram 16M --threads 1");
    assert!(refused(&of_pid(guest.pid())).contains("paged, not adopted"));
    assert!(daemon.api.release("paged", false).expect_err("paged").to_string().contains("paged, not adopted"));
    let Some(mut vmm) = Vmm::start("twice") else { return };
    vmm.tell("fill 8");
    assert_eq!(adopt(&named("twice")).expect("by its name"), 1);
    assert!(refused(&by_pid(&vmm)).contains("adopted already, as twice"));
    let other = Vmm::start("twice").expect("a program");
    assert!(refused(&named("twice")).contains("several VMMs"));
    let taken = AdoptRequest { name: Some("paged".into()), ..by_pid(&other) };
    assert!(refused(&taken).contains("another VM is named"));
    assert_eq!(adopt(&by_pid(&other)).expect("under another name"), 1);
    assert_eq!(stat(&daemon, &format!("vm-{}", other.child.id())).size_bytes, 64 * MIB);
    assert!(daemon.api.restore("twice").expect_err("adopted").to_string().contains("is adopted"));
    assert!(!daemon.api.heat("twice", 4).expect("no heat").is_tracked);
    assert!(daemon.api.metrics().expect("metrics").contains("domain=\"twice\""));

    let last = daemon.api.release("twice", false).expect("released");
    assert_eq!((last.resident_bytes, last.kind), (8 * MIB, VmKind::Adopted));
    assert!(daemon.api.vm("twice").is_err());
    assert_eq!(vmm.tell("check 8"), 0);
    guest.finish();
}

#[test]
fn a_host_without_swap_refuses_limits_and_pinned_memory_is_reported() {
    let daemon = Daemon::start("");
    let Some(mut vmm) = adopted(&daemon, "lock") else { return };
    if ballast_adopt::swap::Swap::now().total == 0 {
        let refused = daemon.api.set_limit("lock", Some(16 * MIB)).expect_err("no swap").to_string();
        assert!(refused.contains("no swap") && refused.contains("ballast doctor"), "{refused}");
    } else {
        skip("noswap", "this host has swap");
    }
    daemon.api.set_limit("lock", Some(64 * MIB)).expect("its size needs no swap");
    let _ = vmm.tell("lock");
    daemon.api.release("lock", false).expect("released");
    daemon.api.adopt(&by_pid(&vmm)).expect("adopted again");
    let vm = stat(&daemon, "lock");
    if vm.class != VmClass::Pinned {
        return skip("mlock", "memory may not be locked here");
    }
    assert!(vm.status_reason.is_some_and(|why| why.contains("locked")));
    let refused = daemon.api.set_limit("lock", Some(16 * MIB)).expect_err("pinned").to_string();
    assert!(refused.contains("pinned"), "{refused}");
}

#[test]
fn with_adopt_all_vms_are_adopted_as_they_start_except_those_that_were_released() {
    let Some(_swap) = swap("1G") else { return };
    let mut daemon = Daemon::start("[adopt]\nall = true\n");
    let Some(mut vmm) = Vmm::start("comes") else { return };
    vmm.tell("fill 32");
    until("it is adopted", || daemon.api.vm("comes").is_ok());
    hold(&daemon, "comes", 8 * MIB);
    daemon.api.release("comes", true).expect("released");
    until("it is released", || daemon.api.vm("comes").is_err());
    assert!(vmm.tell("check 32") == 0);
    let later = Vmm::start("later").expect("a program");
    until("a later one is adopted", || daemon.api.vm("later").is_ok());
    assert!(daemon.api.vm("comes").is_err(), "an operator released it");
    daemon.kill_and_restart_keeper(true);
    until("a later one is adopted", || daemon.api.vm("later").is_ok());
    assert!(daemon.api.vm("comes").is_err(), "and it stays released");
    kill(later.child.id());
    until("it is forgotten", || daemon.api.vm("later").is_err());
}

#[test]
fn a_vm_whose_memory_cannot_come_back_stays_adopted() {
    let Some(_swap) = swap("1G") else { return };
    let daemon = Daemon::start("");
    let Some(mut vmm) = adopted(&daemon, "hidden") else { return };
    hold(&daemon, "hidden", 24 * MIB);
    assert_eq!(vmm.tell("hide"), 0);
    daemon.api.release("hidden", true).expect("it begins");
    until("that is an event", || events(&daemon, "restore-failed").iter().any(|text| text.contains("stays adopted")));
    assert_eq!(stat(&daemon, "hidden").limit_bytes, None);
    assert_eq!(vmm.tell("show"), 0);
    daemon.api.release("hidden", true).expect("it begins");
    until("it is released", || daemon.api.vm("hidden").is_err());
    assert_eq!(vmm.tell("check 64"), 0);
}

#[test]
fn a_vm_that_is_being_released_has_no_limit_in_the_next_engine() {
    let Some(_swap) = swap("1G") else { return };
    let daemon = Daemon::start("");
    let Some(mut vmm) = adopted(&daemon, "leaves") else { return };
    hold(&daemon, "leaves", 8 * MIB);
    daemon.api.release("leaves", true).expect("it begins");
    daemon.replace_engine();
    // The engine may have been faster than its end.
    let limit = daemon.api.vm("leaves").map(|vm| vm.limit_bytes);
    assert!(limit.as_ref().is_ok_and(Option::is_none) || limit.is_err(), "{limit:?}");
    assert_eq!(vmm.tell("check 64"), 0);
}

#[test]
fn a_vmm_that_executes_itself_keeps_its_limit() {
    let Some(_swap) = swap("1G") else { return };
    let daemon = Daemon::start("");
    let Some(mut vmm) = adopted(&daemon, "again") else { return };
    daemon.api.set_limit("again", Some(24 * MIB)).expect("a limit");
    assert_eq!((vmm.tell("exec"), vmm.tell("fill 48")), (0, 0));
    until("it is found again", || stat(&daemon, "again").untouched_bytes == 16 * MIB);
    is_held(&daemon, "again", 24 * MIB);
    assert_eq!(vmm.tell("check 48"), 0);
}

#[test]
fn vms_that_are_adopted_at_once_are_all_known_to_the_next_engine() {
    let daemon = Daemon::start("");
    let names: Vec<String> = (0..8).map(|number| format!("at-once-{number}")).collect();
    let Some(vmms) = names.iter().map(|name| Vmm::start(name)).collect::<Option<Vec<_>>>() else { return };
    std::thread::scope(|scope| {
        for request in vmms.iter().map(by_pid) {
            let api = &daemon.api;
            scope.spawn(move || api.adopt(&request).expect("adopted"));
        }
    });
    daemon.replace_engine();
    names.iter().for_each(|name| drop(stat(&daemon, name)));
}

#[test]
fn an_engine_without_its_keeper_holds_adopted_vms_while_it_serves_a_paged_one() {
    let Some(_swap) = swap("1G") else { return };
    let mut daemon = Daemon::start("");
    let guest = Guest::start(&daemon, "paged", "--workload uniform --ram 16M --threads 1");
    let Some(mut vmm) = adopted(&daemon, "held") else { return };
    daemon.kill_keeper();
    until("the engine knows", || !events(&daemon, "keeper-gone").is_empty());
    hold(&daemon, "held", 24 * MIB);
    assert_eq!(vmm.tell("check 64"), 0);
    is_held(&daemon, "held", 24 * MIB);
    daemon.restart_keeper();
    until("the next engine goes on", || daemon.api.vm("held").is_ok_and(|vm| vm.limit_bytes == Some(24 * MIB)));
    hold(&daemon, "held", 16 * MIB);
    assert_eq!(vmm.tell("check 64"), 0);
    drop(guest);
}
