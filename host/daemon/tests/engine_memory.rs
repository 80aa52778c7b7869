//! Memory errors of the host in a VM's own files: a real keeper and a real engine, and two VMs of this process.
//!
//! A page is really lost where the kernel can inject memory errors (root, `CONFIG_MEMORY_FAILURE`; see
//! `scripts/newer-kernel-suite.sh`). Elsewhere the last page of words is cut off its file, which also raises SIGBUS in
//! the engine.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::Ordering;

use ballast_base::PAGE_SIZE;
use ballast_sys::Mapping;
use ballast_testkit::skip;
use common::raw::{Ram, files, open};
use common::{Daemon, until};
use rustix::process::Signal;

const PAGES: u64 = 4096;
/// Pages whose words are in one page of memory.
const WORDS: u64 = 512;
const LIMIT: u64 = 2 << 20;
const HEADER: u64 = 32 * 1024;
const INJECT: &str = "BALLAST_TEST_FAIL";

/// Makes the page at this offset of a file fail; false if that is impossible here. Another process does it, because the
/// kernel's signal may end that process. The page is not checked afterwards: the engine may have replaced it already.
fn fail(path: &str, offset: u64) -> bool {
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "injects_a_memory_error_when_asked_to", "--nocapture"])
        .env(INJECT, format!("{path} {offset}"))
        .output()
        .expect("run");
    output.status.success() || output.status.signal() == Some(Signal::BUS.as_raw())
}

#[test]
fn injects_a_memory_error_when_asked_to() {
    let Ok(what) = std::env::var(INJECT) else { return };
    let (path, offset) = what.split_once(' ').expect("path and offset");
    let map = Mapping::shared(open(path), offset.parse().expect("a number"), PAGE_SIZE).expect("map");
    map.bytes(0, 1)[0].load(Ordering::Relaxed);
    map.fail_memory(0).expect("MADV_HWPOISON");
}

/// Two VMs; most pages of the first are far. Also the paths of its state file and its arena.
struct Rig {
    daemon: Daemon,
    ram: Ram,
    calm: Ram,
    state: String,
    arena: String,
    engine: u32,
    _clients: Vec<ballast_client::Client>,
}

fn rig() -> Option<Rig> {
    let daemon = Daemon::with_uffd("quarantine_ms = 5\n")?;
    let (ram, calm) = (Ram::new(PAGES), Ram::new(PAGES));
    ram.mark();
    calm.mark();
    let first = ram.vm(&daemon, "hit").limit(LIMIT).attach().expect("attach");
    until("most pages are far", || daemon.api.vm("hit").is_ok_and(|vm| vm.far_bytes > (PAGES - 600) * 4096));
    let engine = daemon.engine_pid().expect("an engine");
    let [state, arena] = ["ballast-state", "ballast-store"].map(|name| files(engine, name)[0].clone());
    let second = calm.vm(&daemon, "calm").limit(LIMIT).attach().expect("attach");
    until("most pages are far", || daemon.api.vm("calm").is_ok_and(|vm| vm.far_bytes > (PAGES - 600) * 4096));
    Some(Rig { daemon, ram, calm, state, arena, engine, _clients: vec![first, second] })
}

impl Rig {
    /// Checks that one engine served both VMs all the time, and that the other VM has all its bytes, also with the next
    /// engine, which finds the first VM in the state in which it was left.
    fn check_the_rest(&self, lost_before: u64) {
        assert_eq!(self.daemon.engine_pid(), Some(self.engine), "{}", self.daemon.log());
        assert_eq!(self.calm.lost(0..PAGES), 0);
        self.daemon.replace_engine();
        assert_eq!((self.calm.lost(0..PAGES), self.ram.lost(0..PAGES)), (0, lost_before), "{}", self.daemon.log());
        assert!(!self.daemon.log().contains("panicked"), "{}", self.daemon.log());
    }
}

#[test]
fn a_memory_error_in_a_vms_words_costs_what_only_they_knew_and_no_other_vm() {
    let Some(rig) = rig() else { return };
    let state = open(&rig.state);
    let size = state.metadata().expect("stat").len();
    if !fail(&rig.state, size - PAGE_SIZE as u64) {
        skip("hwpoison", "the page of words is cut off its file instead");
        state.set_len(size - PAGE_SIZE as u64).expect("cut");
    }
    let known = 0..PAGES - WORDS;
    let unknown = rig.ram.lost(known.end..PAGES);
    assert!((1..=WORDS).contains(&unknown), "what was far of these is lost: {unknown}");
    assert_eq!(rig.ram.lost(known), 0, "{}", rig.daemon.log());
    // The engine serves the VM's faults before it reports the recovery.
    until("it is said that it was recovered", || !rig.daemon.events("memory-mended").is_empty());
    assert_eq!(rig.daemon.events("memory-mended").len(), 1, "{}", rig.daemon.log());
    let said = rig.daemon.events("memory-error");
    assert!(said.iter().any(|said| said.message.contains("the state of pages 3584 to 4095 of region 0")), "{said:?}");
    assert_eq!(rig.daemon.vm("hit").limit_bytes, Some(LIMIT));
    until("it is held to its limit again", || {
        rig.daemon.api.vm("hit").is_ok_and(|vm| vm.resident_bytes <= LIMIT + (1 << 20))
    });
    let lost_now = rig.ram.lost(0..PAGES);
    assert!(lost_now <= WORDS && lost_now >= unknown);
    rig.check_the_rest(lost_now);
}

#[test]
fn a_memory_error_in_an_arena_or_a_header_costs_its_content_and_no_other_vm() {
    let slabs_start = |path: &str| {
        // A table entry of 128 bytes and 64 KiB for each slab.
        let size = open(path).metadata().expect("stat").len();
        4096 + (size - 4096) / (64 * 1024 + 128) * 128
    };
    // The part that fails, and the most pages that its loss can cost.
    for (what, most) in [("blobs", 300), ("table", 32 * 960), ("arena header", 0), ("state header", 0), ("counters", 0)]
    {
        let Some(rig) = rig() else { return };
        let (path, offset) = match what {
            "blobs" => (&rig.arena, slabs_start(&rig.arena).next_multiple_of(64 * 1024)),
            "table" => (&rig.arena, 4096),
            "arena header" => (&rig.arena, 0),
            "state header" => (&rig.state, 0),
            _ => (&rig.state, HEADER / 8),
        };
        if !fail(path, offset) {
            return skip("hwpoison", "memory cannot fail here");
        }
        // Whatever the engine does now, it touches the page.
        rig.daemon.api.set_limit("hit", Some(LIMIT - (64 << 10))).expect("limit");
        let lost_now = rig.ram.lost(0..PAGES);
        assert!(lost_now <= most, "{what}: {lost_now} pages are lost\n{}", rig.daemon.log());
        until(&format!("{what}: it was said"), || {
            assert_eq!(rig.daemon.engine_pid(), Some(rig.engine), "{what}: {}", rig.daemon.log());
            // There may be more events of lost pages than an engine remembers. The keeper also has the state file, and
            // may touch the page first.
            let log = rig.daemon.log();
            log.contains("memory of the host failed, and with it was lost")
                || path == &rig.state && log.contains("memory of the host failed under the state file of VM hit")
        });
        rig.check_the_rest(rig.ram.lost(0..PAGES));
    }
}
