//! Heat end to end: a real daemon tracks a guest that fills its RAM and then touches nothing.

mod common;

use common::guest::Guest;
use common::{Daemon, until};

#[test]
fn the_memory_of_an_idle_guest_ages_and_goes_without_refaults() {
    let daemon = Daemon::start("quarantine_ms = 100\n[heat]\ncost_percent = 50.0\n");
    let guest = Guest::start(&daemon, "still", "--workload idle --ram 64M");
    until("the guest has filled its RAM", || daemon.vm("still").resident_bytes >= 64 << 20);
    let heat = || daemon.api.heat("still", 8).expect("heat");
    assert_eq!((heat().cycles, heat().is_tracked), (0, false));

    assert!(daemon.api.set_track("still", true).expect("track").track);
    until("none of it was touched lately", || {
        let heat = heat();
        heat.cycles > 3 && heat.present_bytes >= 64 << 20 && heat.wss_bytes == 0
    });
    let now = heat();
    assert!(now.is_tracked);
    assert_eq!(now.ages.iter().map(|bucket| bucket.bytes).sum::<u64>(), now.present_bytes);
    assert!(now.strip.iter().all(|cell| cell.present == 1.0 && cell.hot == 0.0), "{:?}", now.strip);

    let before = daemon.vm("still").faults.restore;
    daemon.api.set_limit("still", Some(32 << 20)).expect("limit");
    until("it is within its limit", || daemon.vm("still").resident_bytes <= 32 << 20);
    assert_eq!(daemon.vm("still").faults.restore, before, "cold memory went, so nothing was restored");
    daemon.api.set_track("still", false).expect("track");
    until("nobody tracks it", || !heat().is_tracked);
    guest.finish();
}
