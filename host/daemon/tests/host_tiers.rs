//! Fast and slow memory of the host: a real keeper, a real engine, and a VM of this process. The second test needs two
//! NUMA nodes: `scripts/newer-kernel-suite.sh` has them.

mod common;

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ballast_api::{HostTierStat, VmPatch};
use ballast_testkit::skip;
use ballast_testvm::Finally;
use common::raw::Ram;
use common::{Daemon, until};

const PAGES: u64 = 8192;
const BYTES: u64 = PAGES * 4096;
const NODES: &str = "/sys/devices/system/node/has_memory";

#[test]
fn a_node_that_the_host_does_not_have_is_named_at_the_start() {
    if !std::fs::exists(NODES).unwrap_or(false) {
        return skip("numa", "the kernel knows no nodes");
    }
    let dir = tempfile::tempdir().expect("directory");
    let file = dir.path().join("ballastd.toml");
    std::fs::write(&file, "[tier]\nslow_node = 999\nfast_percent = 50\n").expect("write");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ballastd"));
    let ended = command.arg("--config").arg(&file).arg("--runtime-dir").arg(dir.path()).output().expect("run");
    let text = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && text.contains("tier.slow_node = 999: the host has no such node"), "{text}");
}

#[test]
fn cold_memory_is_on_the_slow_node_and_the_next_engine_finds_it_there() {
    if !std::fs::read_to_string(NODES).is_ok_and(|nodes| nodes.trim() == "0-1") {
        return skip("numa", "the machine has no two nodes");
    }
    let Some(daemon) = Daemon::with_uffd("quarantine_ms = 5\n[tier]\nslow_node = 1\nfast_percent = 50\n") else {
        return;
    };
    let ram = Ram::new(PAGES);
    ram.mark();
    let _client = ram.vm(&daemon, "vm").attach().expect("attach");
    let tiers = || daemon.api.vm("vm").ok().and_then(|vm| vm.host_tiers).unwrap_or_default();
    let is_divided = |tiers: &HostTierStat| tiers.slow_bytes >= BYTES / 2 && tiers.slow_bytes <= BYTES / 8 * 7;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                assert!((0..PAGES / 4).all(|page| ram.is_marked(page)), "a byte was lost");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let _end = Finally(|| done.store(true, Ordering::Relaxed));
        until("half of the memory is slow", || is_divided(&tiers()));
        let before = tiers();
        assert_eq!((before.fast_node, before.slow_node, before.fast_limit_bytes), (0, 1, BYTES / 2));
        daemon.replace_engine();
        until("the next engine has found it", || is_divided(&tiers()));
        // Moves continue while pages are evicted and restored.
        let limit = VmPatch { limit_bytes: Some(Some(BYTES / 2)), ..VmPatch::default() };
        daemon.api.patch_vm("vm", &limit).expect("limit");
        until("pages are far", || daemon.api.vm("vm").is_ok_and(|vm| vm.far_bytes > BYTES / 4));
    });
    assert!((0..PAGES).all(|page| ram.is_marked(page)), "a byte was lost");
}
