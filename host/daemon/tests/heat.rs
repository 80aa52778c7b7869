//! Heat end to end: a real daemon tracks a guest that fills its RAM and then touches nothing.

mod common;

use ballast_api::Track;
use ballast_heat::Settings;
use ballast_heat::record::Recording;
use common::guest::Guest;
use common::{Daemon, until};

#[test]
fn the_memory_of_an_idle_guest_grows_old_is_recorded_and_goes_without_being_wanted_back() {
    let daemon = Daemon::start("quarantine_ms = 100\n[heat]\ntrack = \"off\"\ncost_percent = 50.0\n");
    let guest = Guest::start(&daemon, "still", "--workload idle --ram 64M");
    until("the guest has filled its RAM", || daemon.vm("still").resident_bytes >= 64 << 20);
    let heat = || daemon.api.heat("still", 8).expect("heat");
    assert_eq!((heat().cycles, heat().source), (0, None));

    assert_eq!(daemon.api.set_track("still", Track::On).expect("track").track, Track::On);
    let cycles = || Recording::decode(&daemon.api.heat_cycles("still", 0).expect("cycles")).expect("a recording");
    cycles();
    until("all of it is in the oldest generation", || {
        let heat = heat();
        let oldest = heat.generations_bytes.last().copied().unwrap_or(0);
        heat.present_bytes >= 64 << 20 && oldest == heat.present_bytes && heat.wss_bytes == 0
    });
    let now = heat();
    let source = now.source.as_ref().map(|source| source.name.as_str());
    assert_eq!(source, Some("zap-scan"));
    assert_eq!(now.ages.iter().map(|bucket| bucket.bytes).sum::<u64>(), now.present_bytes);
    assert!(now.strip.iter().all(|cell| cell.present == 1.0 && cell.hot == 0.0), "{:?}", now.strip);
    let recording = cycles();
    let replayed = recording.replay(Settings::default(), |_, _| ());
    assert_eq!(replayed.cycles().0, recording.cycles().count() as u64);
    assert!(replayed.units().present().all(|unit| replayed.generation(unit) == Some(3)));

    let before = daemon.vm("still").faults.restore;
    daemon.api.set_limit("still", Some(32 << 20)).expect("limit");
    until("it is within its limit", || daemon.vm("still").resident_bytes <= 32 << 20);
    assert_eq!(daemon.vm("still").faults.restore, before, "cold memory went, so nothing was restored");
    daemon.api.set_track("still", Track::Off).expect("track");
    until("nobody tracks it", || heat().source.is_none());
    guest.finish();
}
