//! Actions of a VMM while its memory is far: a child in its own memory, an `exec`, an end that its RAM file outlives. A
//! real keeper and engine, the preload library, and a small real VMM (`vmm.c`).

mod common;

use std::os::fd::AsFd;
use std::os::fd::AsRawFd;

use ballast_api::{VmClass, VmStatus};
use ballast_base::wire::{ClientToKeeper, KeeperToClient};
use common::raw::{Ram, RawClient};
use common::vmm::{Program, Vmm};
use common::{Daemon, is_running, missing, until};
use rustix::process::Signal;

const QUICK: &str = "quarantine_ms = 20\n";
const PAGES: u64 = 8192;
const LIMIT: u64 = 4 << 20;

fn squeeze(daemon: &Daemon, name: &str) {
    daemon.api.set_limit(name, Some(LIMIT)).expect("set a limit");
    until("most pages are far", || daemon.vm(name).far_bytes > PAGES * 4096 * 3 / 4);
}

#[test]
fn a_child_in_the_vmms_own_memory_is_no_foreign_mapper() {
    let Some(program) = Program::compile() else { return };
    let none = (!ballast_sys::kcmp::is_available()).then_some("the kernel has no kcmp");
    if missing("kcmp", none) {
        return;
    }
    let daemon = Daemon::start(QUICK);
    let mut vmm: Vmm = program.start(&daemon, "teardown", "memfd", PAGES);
    assert_eq!(vmm.ask("clone"), "ok");
    squeeze(&daemon, "teardown");
    // The engine scans every few seconds, and when the limit is set.
    for _ in 0..3 {
        daemon.api.set_limit("teardown", Some(LIMIT)).expect("nobody else maps it");
    }
    let vm = daemon.vm("teardown");
    assert_eq!((vm.status, vm.status_reason), (VmStatus::Running, None));
    assert_eq!(vmm.ask("verify"), "wrong 0");
    assert_eq!(vmm.ask("unclone"), "ok");
}

fn has_event(daemon: &Daemon, kind: &str) -> bool {
    !daemon.events(kind).is_empty()
}

/// A file in a tmpfs, removed at the end; `None`, with a message, if there can be none.
fn file_in_tmpfs() -> Option<tempfile::TempPath> {
    let made = tempfile::Builder::new().prefix("ballast-test-").tempfile_in("/dev/shm");
    let is_shmem = made.as_ref().is_ok_and(|file| ballast_sys::memfd::is_shmem(file.as_file()).unwrap_or(false));
    if missing("tmpfs", (!is_shmem).then_some("/dev/shm is no tmpfs")) {
        return None;
    }
    Some(made.expect("made above").into_temp_path())
}

/// Number of pages of this file without the content that `vmm.c` writes.
fn wrong_pages(path: &std::path::Path) -> usize {
    let bytes = std::fs::read(path).expect("read the RAM");
    assert_eq!(bytes.len() as u64, PAGES * 4096);
    let word = |page: &[u8]| u64::from_le_bytes(page[..8].try_into().expect("8 bytes"));
    bytes.chunks_exact(4096).zip(0..).filter(|(page, number)| word(page) != number * 7919 + 1).count()
}

#[test]
fn a_vmm_that_executes_itself_and_keeps_its_ram_finds_every_page_there() {
    let Some(program) = Program::compile() else { return };
    let daemon = Daemon::start(QUICK);
    for how in ["execv", "execve", "execvp", "execvpe", "fexecve", "execveat"] {
        let mut vmm = program.start(&daemon, how, "memfd", PAGES);
        squeeze(&daemon, how);
        assert_eq!(vmm.ask(how), "next");
        assert_eq!(vmm.ask("verify"), "wrong 0", "{how}\n{}", daemon.log());
        until("the VM is forgotten", || daemon.api.vms().is_ok_and(|vms| vms.is_empty()));
        assert!(!has_event(&daemon, "writing-back"), "nothing was far any more");
    }
}

#[test]
fn a_child_of_the_vmm_executes_any_program_and_costs_the_vm_nothing() {
    let Some(program) = Program::compile() else { return };
    let daemon = Daemon::start(QUICK);
    let mut vmm = program.start(&daemon, "parent", "memfd", PAGES);
    squeeze(&daemon, "parent");
    for deed in ["vfork", "vfork-execv"] {
        assert_eq!(vmm.ask(deed), "ok", "{deed}");
    }
    let vm = daemon.vm("parent");
    assert!(vm.status != VmStatus::Blocked && vm.far_bytes > 0, "{vm:?}");
    // A failed `exec` costs the VM its limit, but no byte.
    assert_eq!(vmm.ask("execv-nowhere"), "ENOENT");
    assert_eq!(daemon.vm("parent").far_bytes, 0);
    assert_eq!(vmm.ask("verify"), "wrong 0");
    assert!(vmm.kill().contains("stays pinned"));
}

#[test]
fn a_vmm_may_not_execute_itself_if_its_pages_cannot_be_restored() {
    let Some(program) = Program::compile() else { return };
    let mut daemon = Daemon::start(QUICK);
    let mut vmm = program.start(&daemon, "alone", "memfd", PAGES);
    squeeze(&daemon, "alone");
    let engine = daemon.engine_pid().expect("an engine");
    daemon.kill_keeper();
    common::kill(engine);
    assert_eq!(vmm.ask("execv"), "EAGAIN");
    daemon.restart_keeper();
    until("it is attached again", || daemon.api.vm("alone").is_ok());
    assert_eq!(vmm.ask("execv"), "next");
    assert_eq!(vmm.ask("verify"), "wrong 0", "{}", daemon.log());
}

#[test]
fn far_pages_of_a_vmm_that_executes_itself_unseen_are_written_back() {
    let Some(program) = Program::compile() else { return };
    let daemon = Daemon::start(QUICK);
    let mut vmm = program.start(&daemon, "unseen", "memfd", PAGES);
    squeeze(&daemon, "unseen");
    assert_eq!(vmm.ask("raw"), "next");
    // A check before the event may be too early.
    until("its pages are back", || has_event(&daemon, "written-back"));
    assert!(has_event(&daemon, "sight-lost"), "{}", daemon.log());
    assert_eq!(vmm.ask("verify"), "wrong 0", "{}", daemon.log());
}

#[test]
fn a_second_mapping_of_any_kind_has_every_page_and_its_writes_reach_the_guest() {
    let Some(program) = Program::compile() else { return };
    let daemon = Daemon::start(QUICK);
    for how in ["again-read", "again-private", "again-small", "again-later", "again-whole"] {
        let mut vmm = program.start(&daemon, how, "memfd", PAGES);
        squeeze(&daemon, how);
        assert_eq!(vmm.ask(how), "wrong 0", "{how}\n{}", daemon.log());
        assert_eq!(vmm.ask("verify"), "wrong 0", "{how}\n{}", daemon.log());
        let vm = daemon.vm(how);
        assert_eq!((vm.class, vm.far_bytes), (VmClass::Pinned, 0), "{how}");
        vmm.kill();
    }
}

#[test]
fn a_second_mapping_past_every_hook_is_found_and_holds_the_vm_while_it_exists() {
    let Some(program) = Program::compile() else { return };
    let daemon = Daemon::start(QUICK);
    let mut vmm = program.start(&daemon, "unseen", "memfd", PAGES);
    squeeze(&daemon, "unseen");
    assert_eq!(vmm.ask("again-unseen"), "ok");
    until("it is found, and every page is back", || {
        let vm = daemon.vm("unseen");
        vm.status == VmStatus::Blocked && vm.far_bytes == 0
    });
    let reason = daemon.vm("unseen").status_reason.unwrap_or_default();
    assert!(reason.contains("at other addresses than it has announced"), "{reason}");
    assert_eq!(vmm.ask("again-verify"), "wrong 0", "{}", daemon.log());
    assert_eq!(vmm.ask("again-unmap"), "ok");
    until("its limit is held again", || daemon.vm("unseen").resident_bytes <= LIMIT);
    assert_eq!(vmm.ask("verify"), "wrong 0");
}

#[test]
fn a_ram_file_that_outlives_its_vmm_has_every_page_and_the_next_vmm_waits_for_them() {
    let Some(program) = Program::compile() else { return };
    let Some(file) = file_in_tmpfs() else { return };
    let name = file.to_str().expect("text");
    let daemon = Daemon::start(QUICK);
    let vmm = program.start(&daemon, "first", name, PAGES);
    squeeze(&daemon, "first");
    vmm.kill();
    // At once: the keeper may not even have noticed the end of the first.
    let mut next = program.launch(Some((&daemon, "second")), ["next", name, &PAGES.to_string()]);
    assert_eq!(next.ask("verify"), "wrong 0", "{}", daemon.log());
    squeeze(&daemon, "second");
    next.kill();
    until("its pages are back, too", || daemon.events("written-back").len() == 2);
    assert_eq!(wrong_pages(&file), 0, "{}", daemon.log());
}

#[test]
fn ram_that_another_vmm_plugs_while_it_is_written_back_waits_for_every_page() {
    let Some(program) = Program::compile() else { return };
    let Some(file) = file_in_tmpfs() else { return };
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let vmm = program.start(&daemon, "first", file.to_str().expect("text"), PAGES);
    squeeze(&daemon, "first");
    let own = Ram::new(16);
    let mut second = RawClient::new(&daemon.attach_socket(), "second");
    assert!(matches!(second.attach(&[&own]), Some(KeeperToClient::Attached { .. })));
    // Nothing is written back while the engine is stopped.
    let engine = daemon.engine_pid().expect("an engine");
    common::stop_process(engine);
    vmm.kill();
    until("the keeper sees its end", || daemon.log().contains("forgetting the VM"));
    let plugged = Ram::of(std::fs::File::options().read(true).write(true).open(&file).expect("open the RAM").into());
    let plug = || second.ask(&ClientToKeeper::AddRegion { region: plugged.info(), files: 1 }, &[plugged.fd.as_fd()]);
    let answer = plug();
    let zeros = wrong_pages(&file);
    assert!(matches!(answer, Some(KeeperToClient::Later(_))), "{answer:?} while {zeros} pages of it are zeros");
    common::signal_process(engine, Signal::CONT);
    until("it may be plugged", || plug() == Some(KeeperToClient::Ok));
    assert_eq!(wrong_pages(&file), 0, "{}", daemon.log());
}

#[test]
fn an_engine_that_dies_while_it_writes_back_has_a_successor_that_continues() {
    let Some(program) = Program::compile() else { return };
    let Some(file) = file_in_tmpfs() else { return };
    let daemon = Daemon::start(QUICK);
    let vmm = program.start(&daemon, "linked", file.to_str().expect("text"), PAGES);
    squeeze(&daemon, "linked");
    // The engine notices the end of the VMM only just before the engine is killed.
    common::stop_process(daemon.engine_pid().expect("an engine"));
    vmm.kill();
    daemon.replace_engine();
    until("its pages are back", || has_event(&daemon, "written-back"));
    assert_eq!(wrong_pages(&file), 0, "{}", daemon.log());
}

#[test]
fn an_engine_without_a_keeper_writes_back_before_it_ends() {
    let Some(program) = Program::compile() else { return };
    let Some(file) = file_in_tmpfs() else { return };
    let mut daemon = Daemon::start(QUICK);
    let vmm = program.start(&daemon, "orphan", file.to_str().expect("text"), PAGES);
    squeeze(&daemon, "orphan");
    let engine = daemon.engine_pid().expect("an engine");
    daemon.kill_keeper();
    vmm.kill();
    until("the engine ends", || !is_running(engine));
    assert_eq!(wrong_pages(&file), 0, "{}", daemon.log());
}

#[test]
fn pages_that_no_process_can_reach_are_not_written_back() {
    let Some(program) = Program::compile() else { return };
    let Some(file) = file_in_tmpfs() else { return };
    let daemon = Daemon::start(QUICK);
    let vmm = program.start(&daemon, "unlinked", file.to_str().expect("text"), PAGES);
    squeeze(&daemon, "unlinked");
    drop(file);
    vmm.kill();
    until("the VM is gone", || has_event(&daemon, "gone") && daemon.host().store_bytes == 0);
    for kind in ["writing-back", "sight-lost"] {
        assert!(!has_event(&daemon, kind), "{kind}\n{}", daemon.log());
    }
}

/// Pages of the VMM's RAM that are missing in a dump of its memory, by the file that debuggers read.
fn pages_missing_in_a_dump(vmm: &Vmm) -> u64 {
    use std::os::unix::fs::FileExt;
    let pid = vmm.child.id();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("the VMM runs");
    // The mapping may be cut into several where parts of it are registered.
    let ranges = maps.lines().filter(|line| line.contains("guest-ram")).map(|line| {
        let (range, _) = line.split_once(' ').expect("a range");
        let (start, end) = range.split_once('-').expect("two ends");
        [start, end].map(|text| u64::from_str_radix(text, 16).expect("hexadecimal"))
    });
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).expect("open its memory");
    let mut word = [0; 8];
    let addresses = ranges.flat_map(|[start, end]| (start..end).step_by(4096));
    let found = addresses.zip(0u64..).filter(|(address, page)| {
        let read = memory.read_exact_at(&mut word, *address);
        read.is_ok() && u64::from_le_bytes(word) == page * 7919 + 1
    });
    PAGES - found.count() as u64
}

#[test]
fn a_dump_of_a_vmm_is_complete_after_an_operators_restore_and_the_limit_stays() {
    let Some(program) = Program::compile() else { return };
    let daemon = Daemon::start(QUICK);
    let mut vmm = program.start(&daemon, "core", "memfd", PAGES);
    squeeze(&daemon, "core");
    assert!(pages_missing_in_a_dump(&vmm) > PAGES / 2, "what is far is not in it");
    let restore = |words: &[&str]| {
        let output = daemon.ballast().args(["vm", "restore", "core"]).args(words).output().expect("run ballast");
        assert!(output.status.success(), "{output:?}\n{}", daemon.log());
    };
    restore(&[]);
    assert_eq!(pages_missing_in_a_dump(&vmm), 0);
    daemon.replace_engine();
    until("it has the process, too", || daemon.vm("core").status != VmStatus::Recovering);
    let vm = daemon.vm("core");
    assert_eq!((vm.limit_bytes, vm.far_bytes, vm.status), (Some(LIMIT), 0, VmStatus::Blocked), "{vm:?}");
    let reason = || daemon.vm("core").status_reason.unwrap_or_default();
    until("it says why", || reason().contains("--end"));
    restore(&["--end"]);
    until("its limit is held again", || daemon.vm("core").resident_bytes <= LIMIT);
    assert_eq!(vmm.ask("verify"), "wrong 0");
}

#[test]
fn unmapped_ram_is_in_its_file_if_that_has_a_name_or_another_process_has_it() {
    let Some(program) = Program::compile() else { return };
    let Some(file) = file_in_tmpfs() else { return };
    let daemon = Daemon::start(QUICK);
    // The file is found by its name.
    let mut vmm = program.start(&daemon, "named", file.to_str().expect("text"), PAGES);
    squeeze(&daemon, "named");
    assert_eq!(vmm.ask("munmap"), "unmapped");
    assert_eq!(wrong_pages(&file), 0, "{}", daemon.log());
    vmm.kill();
    // The file has no name any more, but another process, this one, holds it.
    let mut vmm = program.start(&daemon, "held", file.to_str().expect("text"), PAGES);
    let held = std::fs::File::open(&file).expect("open the RAM");
    std::fs::remove_file(&file).expect("remove its name");
    squeeze(&daemon, "held");
    assert_eq!(vmm.ask("munmap"), "unmapped");
    let path = std::path::PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
    assert_eq!(wrong_pages(&path), 0, "{}", daemon.log());
    vmm.kill();
}
