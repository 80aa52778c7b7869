//! Deaths of any process at any time: a guest that writes and verifies all the time must not see a wrong byte. Real
//! processes, real SIGKILLs. Needs root (userfaultfd); `BALLAST_KILLS` sets the number of kills (default 40).

mod common;

use std::path::Path;

use ballast_api::{VmClass, VmStatus};
use ballast_base::HUGE_SIZE;
use ballast_testkit::PoolLoan;
use rustix::process::Signal;

use common::guest::{Guest, moves};
use common::raw::Ram;
use common::{BUSY, Daemon, QUICK, is_running, missing, moment, no_disk, signal_process, spilling, until};

fn kills() -> u32 {
    std::env::var("BALLAST_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(40)
}

#[test]
fn an_engine_killed_again_and_again_loses_no_byte() {
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    daemon.evicts("victim");
    let before = daemon.vm("victim");
    for round in 0..kills() {
        std::thread::sleep(moment(round));
        daemon.replace_engine();
    }
    until("pages came back", || daemon.vm("victim").faults.restore > before.faults.restore);
    assert_eq!(daemon.host().engine_restarts, u64::from(kills()));
    guest.finish();
}

#[test]
fn a_vm_of_three_fault_workers_loses_no_byte_when_any_process_is_killed() {
    let mut daemon = Daemon::start(QUICK);
    let args = "--workload uniform --ram 112M --limit 24M --threads 4 --zero-fraction 0.1";
    let guest = Guest::start_with(&daemon, "victim", args, &[("BALLAST_FAULT_WORKERS", "3")]);
    for round in 0..kills() / 3 {
        daemon.evicts("victim");
        let engine = daemon.engine_pid().expect("an engine");
        until("it has all userfaultfds", || userfaultfds(engine) == 3);
        std::thread::sleep(moment(round));
        daemon.kill_any(round);
        until("the guest is attached", || daemon.api.vm("victim").is_ok());
    }
    guest.finish();
}

fn userfaultfds(pid: u32) -> usize {
    let Ok(fds) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return 0 };
    let is_one = |fd: &std::fs::DirEntry| {
        std::fs::read_link(fd.path()).is_ok_and(|to| to.to_string_lossy().contains("[userfaultfd]"))
    };
    fds.flatten().filter(is_one).count()
}

#[test]
fn signals_that_end_the_terminal_or_the_unit_of_an_engine_do_not_end_the_engine() {
    let mut daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    daemon.evicts("victim");
    let engine = daemon.engine_pid().expect("an engine");
    for signal in [Signal::HUP, Signal::INT, Signal::TERM] {
        signal_process(engine, signal);
    }
    moves(&daemon.api, "victim");
    assert_eq!(daemon.engine_pid(), Some(engine), "{}", daemon.log());
    // At the end of a unit or a host, all of its processes get SIGTERM, and the keeper ends.
    daemon.signal_keeper(Signal::TERM);
    daemon.wait_for_keeper_to_die();
    signal_process(engine, Signal::TERM);
    assert_eq!(daemon.host().engine_pid, engine);
    guest.finish();
    until("the engine ends after its last VM", || !is_running(engine));
}

#[test]
fn a_vmm_that_unmaps_ram_unannounced_loses_the_limit_but_no_byte_of_the_rest() {
    const PAGES: u64 = 2048;
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let (kept, gone) = (Ram::new(PAGES), Ram::new(PAGES));
    [&kept, &gone].into_iter().for_each(Ram::mark);
    let _client = gone.join(kept.vm(&daemon, "careless").limit(1 << 20)).attach().expect("attach");
    until("most pages are far", || daemon.api.vm("careless").is_ok_and(|vm| vm.far_bytes > (2 * PAGES - 512) * 4096));
    gone.unmap();
    daemon.replace_engine();
    for page in 0..PAGES {
        assert!(kept.is_marked(page), "page {page}\n{}", daemon.log());
    }
    // Faults are served before it is known that the kernel refuses a part.
    until("it is said", || !daemon.events("view-incomplete").is_empty());
    until("it is held", || daemon.vm("careless").status == VmStatus::Blocked);
    until("its other pages stay", || daemon.vm("careless").resident_bytes >= PAGES * 4096);
}

#[test]
fn all_pinned_memory_is_resident_when_the_answer_comes() {
    const PAGES: u64 = 4096;
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let ram = Ram::new(PAGES);
    ram.mark();
    let client = ram.vm(&daemon, "pinned").limit(1 << 20).attach().expect("attach");
    until("most pages are far", || daemon.api.vm("pinned").is_ok_and(|vm| vm.far_bytes > (PAGES - 512) * 4096));
    client.pin("a device").expect("pinned");
    let vm = daemon.vm("pinned");
    assert_eq!((vm.far_bytes, vm.resident_bytes), (0, PAGES * 4096), "{vm:?}");
    // The successor holds the VM, too, and restores nothing, because nothing is far.
    daemon.replace_engine();
    until("the VM runs", || daemon.api.vm("pinned").is_ok_and(|vm| vm.status == VmStatus::Running));
    assert_eq!(daemon.vm("pinned").class, VmClass::Pinned);
}

fn spilled(daemon: &Daemon, name: &str) {
    daemon.goes_to_file_and_back(name);
    until("many pages are in the file", || daemon.api.vm(name).is_ok_and(|vm| vm.far_file_bytes >= 4 << 20));
}

#[test]
fn an_engine_killed_while_pages_go_to_a_file_and_come_back_loses_no_byte() {
    if no_disk() {
        return;
    }
    let daemon = Daemon::start(&spilling("8M", &std::env::temp_dir()));
    let guest = Guest::start(&daemon, "victim", BUSY);
    for round in 0..kills() {
        if round % 10 == 0 {
            spilled(&daemon, "victim");
        }
        std::thread::sleep(moment(round));
        daemon.replace_engine();
    }
    spilled(&daemon, "victim");
    let events = daemon.api.events().expect("events");
    assert!(events.iter().all(|event| !event.kind.starts_with("spill-un")), "{events:?}");
    guest.finish();
    until("the VM is gone", || daemon.api.vm("victim").is_err());
    until("the disk space is given back", || daemon.host().file_bytes == 0);
}

fn huge_pages(ram: u64) -> Option<PoolLoan> {
    let loan = PoolLoan::new(ram / HUGE_SIZE as u64);
    let why = loan.as_ref().err().map(|error| error.to_string());
    if missing("hugetlb", why) { None } else { loan.ok() }
}

#[test]
fn an_engine_killed_while_huge_pages_go_out_and_come_back_whole_loses_no_byte() {
    let Some(_loan) = huge_pages(48 << 20) else { return };
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", &format!("{BUSY} --huge-pages"));
    daemon.evicts("victim");
    for round in 0..kills() / 2 {
        std::thread::sleep(moment(round));
        daemon.replace_engine();
    }
    daemon.evicts("victim");
    let vm = daemon.vm("victim");
    assert!([vm.far_bytes, vm.zero_bytes].iter().all(|bytes| bytes.is_multiple_of(HUGE_SIZE as u64)), "{vm:?}");
    guest.finish();
}

#[test]
fn an_engine_killed_while_huge_pages_go_to_a_file_loses_no_byte() {
    let Some(_loan) = huge_pages(48 << 20).filter(|_| !no_disk()) else { return };
    // The guest touches its huge pages all the time, so few of them are far at any time: the RAM store has space for
    // two or three.
    let mut daemon = Daemon::start(&spilling("3M", &std::env::temp_dir()));
    let guest = Guest::start(&daemon, "victim", &format!("{BUSY} --huge-pages"));
    daemon.goes_to_file_and_back("victim");
    for round in 0..kills() / 10 {
        std::thread::sleep(moment(round));
        if round % 5 == 0 {
            daemon.kill_and_restart_keeper(false);
        } else {
            daemon.replace_engine();
        }
        until("the guest is attached", || daemon.api.vm("victim").is_ok());
    }
    daemon.goes_to_file_and_back("victim");
    guest.finish();
    until("the VM is gone", || daemon.api.vm("victim").is_err());
    until("the disk space is given back", || daemon.host().file_bytes == 0);
}

#[test]
fn a_keeper_killed_and_started_again_finds_the_pages_in_the_file() {
    if no_disk() {
        return;
    }
    let mut daemon = Daemon::start(&spilling("8M", &std::env::temp_dir()));
    let guest = Guest::start(&daemon, "victim", BUSY);
    for round in 0..kills() / 10 {
        spilled(&daemon, "victim");
        std::thread::sleep(moment(round));
        // In every other round the engine dies, too, so that only the guest's process has the file.
        daemon.kill_and_restart_keeper(round % 2 == 0);
        until("the guest is attached again", || daemon.api.vm("victim").is_ok());
    }
    spilled(&daemon, "victim");
    guest.finish();
}

#[test]
fn a_keeper_whose_settings_no_longer_spill_still_restores_pages_from_the_file() {
    if no_disk() {
        return;
    }
    let mut daemon = Daemon::start(&spilling("8M", &std::env::temp_dir()));
    let guest = Guest::start(&daemon, "victim", BUSY);
    spilled(&daemon, "victim");
    daemon.restart_with(QUICK);
    until("the guest is attached again", || daemon.api.vm("victim").is_ok());
    assert_eq!(daemon.host().file_budget_bytes, 0);
    until("all of the file is back", || daemon.vm("victim").far_file_bytes == 0);
    guest.finish();
}

#[test]
fn a_vm_attaches_without_a_file_store_where_there_can_be_none() {
    let daemon = Daemon::start(&spilling("8M", Path::new("/no/such/directory")));
    let guest = Guest::start(&daemon, "victim", BUSY);
    until("it is said", || !daemon.events("spill-unavailable").is_empty());
    assert!(daemon.events("spill-unavailable")[0].message.contains("/no/such/directory"));
    assert_eq!(daemon.vm("victim").file_bytes, 0);
    guest.finish();
}

#[test]
fn size_is_the_sum_of_its_parts_to_the_page_at_any_moment() {
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    for _ in 0..200 {
        let vm = daemon.vm("victim");
        let parts = vm.resident_bytes + vm.far_bytes + vm.zero_bytes + vm.untouched_bytes + vm.poisoned_bytes;
        assert_eq!(vm.size_bytes, parts, "{vm:?}");
        assert!(vm.quarantine_bytes <= vm.resident_bytes);
    }
    guest.finish();
}

#[test]
fn after_a_limit_is_raised_or_removed_the_vm_gets_its_memory_back_by_touches() {
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    daemon.evicts("victim");
    daemon.api.set_limit("victim", None).expect("remove the limit");
    until("everything is resident", || {
        let vm = daemon.vm("victim");
        vm.resident_bytes + vm.zero_bytes + vm.untouched_bytes == vm.size_bytes
    });
    until("nothing is registered any more", || daemon.vm("victim").registered_bytes == 0);
    daemon.api.set_limit("victim", Some(20 << 20)).expect("set a limit");
    until("resident is at the limit", || daemon.vm("victim").resident_bytes <= 20 << 20);
    guest.finish();
}
