//! End to end: unmodified QEMU with `-m` only, a Debian kernel and Redis, started before ballastd and adopted.
//!
//! Needs root, zram, QEMU and the guest image of `scripts/guest-image.sh`.
//! Promise: "verified" means that each byte of each key was read back through the guest and compared.

mod common;

use std::time::Duration;

use ballast_api::policy::Kind;
use ballast_api::{AdoptRequest, PolicyPatch, VmKind, VmStat};
use ballast_base::{Bytes, MIB};
use ballast_testkit::skip;
use ballast_testkit::swap::Swap;
use ballast_testvm::qemu::load::{Dataset, Mix, load, throughput, verify};
use ballast_testvm::qemu::{QemuGuest, qemu_missing};

use common::{Daemon, missing, until};

const TIMEOUT: Duration = Duration::from_secs(240);
const VALUE: usize = 16 << 10;
const KEYS: usize = 3072;
const NAMES: [&str; 3] = ["plain-a", "plain-b", "plain-c"];

/// The daemon's figures of a VM, after a check that they add up.
fn stat(daemon: &Daemon, name: &str) -> VmStat {
    let vm = daemon.vm(name);
    let parts = vm.resident_bytes + vm.far_bytes + vm.zero_bytes + vm.untouched_bytes;
    assert_eq!((vm.size_bytes, vm.kind), (parts, VmKind::Adopted), "{vm:?}");
    vm
}

fn target(daemon: &Daemon, name: &str) -> u64 {
    daemon.vm(name).target_bytes.unwrap_or(0)
}

#[test]
fn three_plain_qemu_guests_are_adopted_and_a_policy_moves_memory_to_the_busy_one() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    let _swap = match Swap::new("2G") {
        Ok(swap) => swap,
        Err(why) => return skip("zram", why),
    };
    let boot = |name: &&str| {
        let guest = QemuGuest::builder().name(*name).memory(Bytes(256 * MIB)).shared_memory(false);
        guest.spawn().expect("QEMU starts")
    };
    let mut guests: Vec<QemuGuest> = NAMES.iter().map(boot).collect();
    let mut data: Vec<Dataset> = (1..=3).map(|seed| Dataset::new(KEYS, VALUE, seed)).collect();
    for (guest, data) in guests.iter_mut().zip(&data) {
        guest.wait_ready(TIMEOUT).expect("the guest boots");
        load(guest.redis_addr(), data).expect("Redis takes the data");
    }

    let daemon = Daemon::start("");
    for (name, guest) in NAMES.iter().zip(&guests) {
        // By pid, because other tests may have guests.
        let request = AdoptRequest { pid: Some(guest.pid()), ..AdoptRequest::default() };
        let result = daemon.api.adopt(&request).expect("adopted");
        assert_eq!((result.adopted[0].name.as_str(), result.adopted[0].size_bytes), (*name, 256 * MIB));
    }
    let mut held = Vec::new();
    for name in NAMES {
        let limit = stat(&daemon, name).resident_bytes * 3 / 5;
        daemon.api.set_limit(name, Some(limit)).expect("a limit");
        held.push(limit);
    }
    for (name, limit) in NAMES.iter().zip(&held) {
        until("it is at its limit", || stat(&daemon, name).resident_bytes <= *limit);
    }
    // Under load the kernel restores pages at once; later steps bring the VM to its limit again.
    let mix = Mix { duration: Duration::from_secs(3), ..Mix::default() };
    std::thread::scope(|scope| {
        let load = scope.spawn(|| throughput(guests[0].redis_addr(), &mut data[0], &mix).expect("it serves"));
        let mut most = 0;
        while !load.is_finished() {
            most = most.max(stat(&daemon, NAMES[0]).resident_bytes);
            std::thread::sleep(Duration::from_millis(20));
        }
        let (limit, most) = (held[0] as f64, most as f64);
        println!("at most {:.1} % above its limit under load", (most / limit - 1.0) * 100.0);
        assert!(most <= limit * 1.05, "{most} bytes with a limit of {limit}");
    });

    for name in NAMES {
        daemon.api.set_limit(name, None).expect("no limit");
    }
    let all: u64 = NAMES.iter().map(|name| stat(&daemon, name)).map(|vm| vm.resident_bytes + vm.far_bytes).sum();
    let budget_bytes = Some(Some(all * 3 / 5));
    let patch = PolicyPatch { policy: Some(Kind::Gain), tick_ms: Some(500), budget_bytes, ..PolicyPatch::default() };
    daemon.api.patch_policy(&patch).expect("a policy");
    until("the budget is kept", || {
        NAMES.iter().map(|name| stat(&daemon, name).resident_bytes).sum::<u64>() <= all * 5 / 8
    });
    for busy in [0, 1] {
        let others: Vec<&str> = NAMES.iter().enumerate().filter(|(at, _)| *at != busy).map(|(_, name)| *name).collect();
        let before = target(&daemon, NAMES[busy]);
        let gets = |others: &[&str]| {
            let now = target(&daemon, NAMES[busy]);
            now > before && others.iter().all(|other| now > target(&daemon, other))
        };
        until("the guest that works gets memory of the others", || {
            throughput(guests[busy].redis_addr(), &mut data[busy], &mix).expect("it serves");
            gets(&others)
        });
        assert!(!daemon.api.decisions(NAMES[busy]).expect("decisions").is_empty());
    }
    daemon.api.patch_policy(&PolicyPatch { policy: Some(Kind::None), ..PolicyPatch::default() }).expect("none");
    for (guest, data) in guests.iter().zip(&data) {
        let read = verify(guest.redis_addr(), data).expect("every key is read");
        assert_eq!((read.verified, read.wrong, read.missing), (KEYS, 0, 0), "{read:?}");
    }
    for name in NAMES {
        assert_eq!(daemon.api.release(name, true).expect("released").limit_bytes, None);
        until("it is released", || daemon.api.vm(name).is_err());
    }
}
