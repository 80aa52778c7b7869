//! A VMM that holds its own `mmap_lock` in the kernel, because a file server does not respond. Each other VM is served,
//! whichever of engine and keeper dies; the VM itself is served again when the lock is free, with each byte right. Real
//! processes, a real FUSE server. Needs root.

mod common;

use std::os::fd::OwnedFd;
use std::thread::JoinHandle;

use ballast_api::VmStatus;
use ballast_base::Hva;
use ballast_sys::Uffd;
use ballast_testvm::fuse::{Fuse, Held};

use common::guest::Guest;
use common::parking::{self, fuse, park, sleeps_in};
use common::raw::{Ram, userfaultfd};
use common::{BUSY, Daemon, QUICK, until};

fn parkable(daemon: &Daemon, fuse: &Fuse, name: &str) -> Guest {
    parking::parkable(daemon, fuse, name, BUSY)
}

fn restored(daemon: &Daemon, name: &str) -> u64 {
    daemon.api.vm(name).map_or(0, |vm| vm.faults.restore)
}

fn everything_works(daemon: &Daemon, bystander: &str) {
    let before = restored(daemon, bystander);
    until("pages of the bystander come back", || restored(daemon, bystander) > before);
    for limit in [20 << 20, 16 << 20] {
        let changed = daemon.api.set_limit(bystander, Some(limit)).expect("a limit");
        assert_eq!(changed.limit_bytes, Some(limit));
    }
    assert!(daemon.api.metrics().expect("metrics").contains(bystander));
    Guest::start(daemon, "newcomer", BUSY).finish();
    until("the newcomer is forgotten", || daemon.api.vm("newcomer").is_err());
}

fn is_said(daemon: &Daemon, vm: &str, pid: u32) -> bool {
    let about = format!("process {pid},");
    let is_it = |event: &ballast_api::Event| event.vm.as_deref() == Some(vm) && event.message.contains(&about);
    daemon.events("vm-stuck").iter().any(is_it)
}

fn is_served(daemon: &Daemon, name: &str) -> bool {
    daemon.api.vm(name).is_ok_and(|vm| vm.status == VmStatus::Running)
}

/// A bystander; a VM with far pages that is parked; and the guard that parks it.
fn one_parked<'a>(daemon: &Daemon, fuse: &'a Fuse) -> (Guest, Guest, Held<'a>) {
    let bystander = Guest::start(daemon, "bystander", BUSY);
    let mut parked = parkable(daemon, fuse, "parked");
    daemon.evicts("parked");
    let held = park(fuse, &mut parked, 1);
    (bystander, parked, held)
}

/// Checks that a VM that is no longer parked is served, and ends with each byte right.
fn is_served_in_the_end(daemon: &Daemon, name: &str, guest: Guest) {
    until("the parked VM is served", || is_served(daemon, name));
    daemon.evicts(name);
    guest.finish();
}

#[test]
fn an_engine_dies_with_a_thread_in_a_parked_vmm_and_the_next_serves_all_others() {
    let Some(fuse) = fuse() else { return };
    let daemon = Daemon::start(QUICK);
    let (bystander, parked, held) = one_parked(&daemon, &fuse);
    let old = daemon.kill_engine();
    // Its successor must register the parked VM's memory: that needs the lock, and cannot be interrupted.
    let is_new = |pid: &u32| *pid != old;
    until("the engine sleeps in the parked VMM", || {
        daemon.engine_pid().filter(is_new).is_some_and(|pid| sleeps_in(pid, "orders", "userfaultfd_register"))
    });
    for _ in 0..3 {
        daemon.replace_engine();
        everything_works(&daemon, "bystander");
    }
    until("it is said who does not let go of its lock", || is_said(&daemon, "parked", parked.pid()));
    assert!(!is_served(&daemon, "parked"), "an engine that is not done with it may still register its memory");
    drop(held);
    is_served_in_the_end(&daemon, "parked", parked);
    bystander.finish();
}

#[test]
fn more_parked_vmms_than_cpus_keep_nobody_from_being_served() {
    let Some(fuse) = fuse() else { return };
    let daemon = Daemon::start(QUICK);
    let bystander = Guest::start(&daemon, "bystander", BUSY);
    let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get());
    let names: Vec<String> = (0..cpus + 2).map(|number| format!("parked-{number}")).collect();
    let mut parked: Vec<Guest> = names.iter().map(|name| parkable(&daemon, &fuse, name)).collect();
    names.iter().for_each(|name| daemon.evicts(name));
    let held: Vec<Held<'_>> = parked.iter_mut().enumerate().map(|(at, guest)| park(&fuse, guest, at + 1)).collect();
    for _ in 0..3 {
        everything_works(&daemon, "bystander");
    }
    // Again, when its successor's threads wait for locks as well.
    daemon.replace_engine();
    everything_works(&daemon, "bystander");
    drop(held);
    for (name, guest) in names.iter().zip(parked) {
        is_served_in_the_end(&daemon, name, guest);
    }
    bystander.finish();
}

#[test]
fn keeper_and_engine_die_while_a_vmm_is_parked() {
    let Some(fuse) = fuse() else { return };
    let mut daemon = Daemon::start(QUICK);
    let (bystander, parked, held) = one_parked(&daemon, &fuse);
    // First the engine only, so that the next one has a thread in the parked VM.
    daemon.replace_engine();
    for both in [true, false] {
        daemon.kill_and_restart_keeper(both);
        until("the bystander is attached again", || is_served(&daemon, "bystander"));
        everything_works(&daemon, "bystander");
    }
    drop(held);
    is_served_in_the_end(&daemon, "parked", parked);
    bystander.finish();
}

#[test]
fn a_parked_vmm_is_killed_and_forgotten_when_it_can_die() {
    let Some(fuse) = fuse() else { return };
    let daemon = Daemon::start(QUICK);
    let (bystander, parked, held) = one_parked(&daemon, &fuse);
    for _ in 0..2 {
        daemon.replace_engine();
    }
    common::kill(parked.pid());
    everything_works(&daemon, "bystander");
    drop(held);
    drop(parked);
    let is_gone = || daemon.api.vms().is_ok_and(|vms| vms.iter().all(|vm| vm.name != "parked"));
    until("the parked VM is forgotten", is_gone);
    // Its name is free again: nothing of it is left in keeper or engine.
    Guest::start(&daemon, "parked", BUSY).finish();
    bystander.finish();
}

/// A thread of this process that holds the lock of a file's inode: it writes to the file from memory that nobody fills.
struct Writing {
    uffd: Option<Uffd>,
    thread: Option<JoinHandle<()>>,
}

impl Writing {
    const NAME: &str = "writes-slowly";

    fn to(file: OwnedFd) -> Self {
        let (from, uffd) = (Ram::new(1), userfaultfd());
        uffd.register(Hva(from.map.addr() as u64), 4096).expect("register");
        let write = move || {
            // SAFETY: a mapping that lives as long as this closure, and that nobody writes to.
            let bytes = unsafe { std::slice::from_raw_parts(from.map.ptr(0, 4096).cast_const(), 4096) };
            rustix::io::pwrite(&file, bytes, 0).expect("write");
        };
        let thread = std::thread::Builder::new().name(Self::NAME.into()).spawn(write).expect("a thread");
        until("it waits with the lock", || sleeps_in(std::process::id(), Self::NAME, "userfault"));
        Self { uffd: Some(uffd), thread: Some(thread) }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        // The fault continues when the userfaultfd is closed.
        drop(self.uffd.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

#[test]
fn a_vmm_that_holds_the_lock_of_its_ram_file_blocks_neither_api_nor_policy() {
    let Some(daemon) = Daemon::with_uffd("quarantine_ms = 5\n[policy]\nname = \"maestro\"\nbudget = \"64M\"\n") else {
        return;
    };
    let ram = Ram::new(4096);
    ram.mark();
    let _client = ram.vm(&daemon, "holder").attach().expect("attach");
    let bystander = Guest::start(&daemon, "bystander", BUSY);
    daemon.api.set_track("holder", true).expect("track");
    until("it is tracked", || daemon.api.heat("holder", 8).is_ok_and(|heat| heat.cycles > 0));
    let written = Writing::to(ram.fd.try_clone().expect("dup"));
    daemon.api.set_limit("holder", Some(4 << 20)).expect("a limit");
    let engine = daemon.engine_pid().expect("an engine");
    let stuck = || ["reclaim/holder", "track/holder"].iter().any(|name| sleeps_in(engine, name, "shmem"));
    until("a worker of it waits for that lock", stuck);
    for _ in 0..3 {
        assert!(daemon.api.metrics().expect("metrics").contains("bystander"));
        assert!(daemon.api.heat("holder", 8).is_ok());
    }
    let decided = || daemon.api.policy().expect("policy").ticks;
    let before = decided();
    until("the policy goes on", || decided() > before + 3);
    drop(written);
    until("its limit is held", || daemon.vm("holder").resident_bytes <= 4 << 20);
    assert!((1..4096).all(|page| ram.is_marked(page)));
    bystander.finish();
}
