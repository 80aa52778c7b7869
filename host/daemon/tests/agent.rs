//! A hostile agent of a guest: a program at the other end of the socket sends arbitrary bytes.
//!
//! The tests check that no byte is lost, that neighbours are served, and that the API shows the agent's state.

mod common;

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ballast_api::{AgentState, NodeBalloon, VmPatch};
use ballast_base::{MIB, PAGE_SIZE};
use ballast_client::AgentPort;
use ballast_messages::frame::MAGIC;
use ballast_messages::message::{MAX_RUNS, Node, Tick};
use ballast_messages::run::{COLD, HOTTEST, PAGES_END};
use ballast_messages::{Run, ToGuest, ToHost, frame};
use ballast_sys::memfd;
use ballast_testvm::Finally;
use common::agent::{
    Fake, HIGH, PAGES, Port, agent_of, all_is_there, attach, no_worker_panicked, one_at_a_time, proved, run, seen,
};
use common::guest::Guest;
use common::raw::Ram;
use common::{BUSY, Daemon, QUICK, until};

#[test]
fn memory_that_the_guest_reports_cold_goes_first() {
    let _one = one_at_a_time();
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let port = Port::new();
    let ram = Ram::new(PAGES);
    let (_client, mut fake) = proved(&daemon, &port, &ram, "told");
    // 24 MiB in both halves are cold; the rest is hot, except pages that are not reported.
    let cold = [1024..4096, 9216..12288];
    let told = |level| cold.iter().map(move |pages| run(seen(pages.start), pages.clone().count() as u32, level));
    let warm = [run(0, 1024, HOTTEST), run(HIGH + 4096, 2048, 9)];
    fake.report(told(COLD).chain(warm).collect());
    until("its reports are hints", || {
        fake.stay_alive();
        agent_of(&daemon, "told").state == AgentState::Reporting
    });
    let shown = agent_of(&daemon, "told");
    assert_eq!((shown.version.as_str(), shown.reports, shown.cold_bytes), ("9.9", 1, 24 * MIB), "{shown:?}");
    assert_eq!((shown.rejected_pages, shown.rejected_messages), (0, 0), "{shown:?}");

    daemon.api.set_limit("told", Some(48 * MIB)).expect("limit");
    until("it is within its limit", || {
        fake.stay_alive();
        daemon.vm("told").resident_bytes <= 47 * MIB
    });
    let is_cold = |page: u64| cold.iter().any(|pages| pages.contains(&page));
    for page in 0..PAGES {
        let is_there = memfd::is_present(&ram.fd, page * PAGE_SIZE as u64).expect("seek");
        assert!(is_there || is_cold(page), "page {page} was not called cold and went");
    }
    assert_eq!(agent_of(&daemon, "told").state, AgentState::Reporting);

    (1024..4096).for_each(|page| assert!(ram.is_marked(page)));
    loop {
        fake.stay_alive();
        if let Some(ToGuest::Restored(runs)) = fake.hear() {
            assert!(runs.iter().all(|run| (1024..4096).contains(&run.page) && run.end() <= 4096), "{runs:?}");
            break;
        }
    }
    drop(fake);
    until("it is silent", || agent_of(&daemon, "told").state == AgentState::Silent);
    all_is_there(&ram);
}

#[test]
fn a_guest_that_sends_anything_and_dies_at_any_point_harms_nobody() {
    let _one = one_at_a_time();
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let neighbour = Guest::start(&daemon, "neighbour", BUSY);
    let port = Port::new();
    let ram = Ram::new(PAGES);
    let _client = attach(&daemon, &port, &ram, "hostile");
    daemon.api.set_limit("hostile", Some(32 * MIB)).expect("limit");

    // Without proof, no report counts.
    let mut fake = Fake::accept(&port);
    fake.tick();
    fake.report(vec![run(0, 4096, COLD)]);
    until("its report was heard", || agent_of(&daemon, "hostile").rejected_pages >= 4096);
    assert_eq!(agent_of(&daemon, "hostile").state, AgentState::Idle);
    // A proof without the nonce, or of pages outside the guest's memory.
    fake.say(&ToHost::Proof(vec![Run::of(7, 1), Run::of(PAGES_END - 1, 1), Run::of(HIGH, 1)]));
    until("it was refused", || agent_of(&daemon, "hostile").rejected_messages > 0);
    assert_eq!(agent_of(&daemon, "hostile").pieces_proved, 0);
    drop(fake);

    let whole = ToHost::Report { number: 1, last: true, runs: vec![run(5, 9, COLD)] };
    let garbage: Vec<u8> = (0..200_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let foreign = vec![
        run(0, u32::MAX, COLD),
        run(100, 500, COLD),
        run(100, 500, HOTTEST),
        run(PAGES_END - 1, 1, COLD),
        run(HIGH - 10, 20, COLD),
        run(HIGH + PAGES / 2 - 1, 1000, COLD),
    ];
    let mut claims = frame(1, 3, &[0; 64]);
    claims[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    for round in 0..6 {
        let mut fake = Fake::accept(&port);
        if round > 0 {
            fake.begin(&ram);
        }
        let session = fake.session;
        match round {
            0 => {}
            1 => fake.stream.write_all(&whole.frame(session)[..20]).expect("written"),
            2 => {
                for bytes in [&garbage[..], &MAGIC, &claims, &frame(session, 3, &[1; 70]), &frame(session, 999, &[])] {
                    fake.stream.write_all(bytes).expect("written");
                }
                // Sent only now: the engine still reads, after all that garbage.
                fake.tick();
                until("the garbage was counted", || agent_of(&daemon, "hostile").garbage_bytes > 100_000);
            }
            3 => {
                fake.report(foreign.clone());
                until("it was clipped", || agent_of(&daemon, "hostile").rejected_pages > u64::from(u32::MAX) / 2);
            }
            // A frame of another session, and a report without an end.
            4 => {
                fake.stream.write_all(&whole.frame(session + 1)).expect("written");
                let before = agent_of(&daemon, "hostile").rejected_messages;
                while agent_of(&daemon, "hostile").rejected_messages == before {
                    fake.say(&ToHost::Report { number: 9, last: false, runs: vec![run(1, 1, COLD); MAX_RUNS] });
                }
            }
            _ => {
                daemon.replace_engine();
                while fake.hear_frame().is_some() {}
            }
        }
    }

    // As many reports as possible, from several threads, none of which waits for an answer.
    let (ends, mut fake) = (AtomicBool::new(false), Fake::accept(&port));
    fake.begin(&ram);
    std::thread::scope(|scope| {
        for number in 0..2 {
            let (mut stream, session) = (fake.stream.try_clone().expect("dup"), fake.session);
            let ends = &ends;
            stream.set_write_timeout(Some(Duration::from_millis(100))).expect("set");
            scope.spawn(move || {
                let bytes: Vec<u8> = (0..64)
                    .flat_map(|at| {
                        let runs = vec![run(at, 3000, COLD), run(HIGH + at, 9000, COLD)];
                        ToHost::Report { number: at as u32 + number, last: true, runs }.frame(session)
                    })
                    .collect();
                while !ends.load(Ordering::Relaxed) {
                    // It times out, because the engine reads only as much as it wants.
                    let _ = stream.write(&bytes);
                }
            });
        }
        let _end = Finally(|| ends.store(true, Ordering::Relaxed));
        let before = daemon.vm("neighbour").faults.total();
        until("hundreds of its messages were refused", || agent_of(&daemon, "hostile").rejected_messages > 300);
        until("the neighbour is served meanwhile", || daemon.vm("neighbour").faults.total() > before);
    });
    no_worker_panicked(&daemon);
    drop(fake);
    all_is_there(&ram);
    neighbour.finish();
}

#[test]
fn reports_of_hot_memory_as_cold_are_ignored() {
    let _one = one_at_a_time();
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let port = Port::new();
    let ram = Ram::new(PAGES);
    let (_client, mut fake) = proved(&daemon, &port, &ram, "liar");
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Hot: 1/32 of the memory, each page touched again within milliseconds. Slowly all the rest is touched, so
            // that some memory must be evicted all the time.
            for slow in (PAGES / 32..PAGES).cycle().step_by(16) {
                if ends.load(Ordering::Relaxed) {
                    break;
                }
                (0..PAGES / 32).for_each(|page| assert!(ram.is_marked(page)));
                // Two pages hold the nonce, and no mark.
                let _ = (slow..PAGES.min(slow + 16)).filter(|page| ram.is_marked(*page)).count();
            }
        });
        let _end = Finally(|| ends.store(true, Ordering::Relaxed));
        daemon.api.set_limit("liar", Some(48 * MIB)).expect("limit");
        until("it is ignored", || {
            if fake.stay_alive() {
                fake.report(vec![run(0, PAGES as u32 / 32, COLD)]);
            }
            agent_of(&daemon, "liar").state == AgentState::Ignored
        });
    });
    let shown = agent_of(&daemon, "liar");
    assert!(shown.times_ignored == 1 && shown.ignored_s.is_some(), "{shown:?}");
    assert!(shown.by_agent.wrong_pages * 2 > shown.by_agent.judged_pages, "{shown:?}");
    assert!(!daemon.events("agent-ignored").is_empty());
    all_is_there(&ram);
}

#[test]
fn a_port_where_other_users_may_be_first_is_not_used_and_the_log_has_the_reason() {
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let (port, ram) = (Port::new(), Ram::new(16));
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(port.dir.path(), open).expect("chmod");
    let _client = ram.vm(&daemon, "open").agent_port(port.for_client()).attach().expect("attach");
    until("the log says why", || daemon.log().contains("give it mode 0700"));
    assert_eq!(daemon.vm("open").agent, None);
    let private = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(port.dir.path(), private).expect("chmod");
    Fake::accept(&port);
}

#[test]
fn a_port_without_a_name_is_given_to_each_engine_in_turn() {
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let (ours, guest) = UnixStream::pair().expect("a pair");
    let ram = Ram::new(16);
    let _client = ram.vm(&daemon, "pair").agent_port(AgentPort::Connected(ours.into())).attach().expect("attach");
    let mut agent = Fake::of(guest);
    for _ in 0..2 {
        let old = agent.session;
        agent.tick();
        until("the agent is heard", || agent_of(&daemon, "pair").state != AgentState::Silent);
        daemon.kill_engine();
        agent.next_session();
        assert_ne!(agent.session, old);
    }
}

#[test]
fn an_agent_is_told_how_much_to_hold_and_so_it_is_by_the_next_engine() {
    let _one = one_at_a_time();
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let port = Port::new();
    let ram = Ram::new(PAGES);
    let client = attach(&daemon, &port, &ram, "guest");
    let held = |ballooned| Tick { nodes: vec![Node { node: 1, pages: PAGES, free: 9, ballooned }], ..Tick::default() };
    let mut agent = Fake::accept(&port);
    agent.say(&ToHost::Tick(held(0)));
    let patch = |bytes| VmPatch { balloon: Some(NodeBalloon { node: 1, bytes }), ..VmPatch::default() };
    until("the port is found", || daemon.vm("guest").agent.is_some());
    daemon.api.patch_vm("guest", &patch(40 * MIB)).expect("it has a port");
    let told = |agent: &mut Fake| loop {
        if let Some(ToGuest::Balloon { node, pages }) = agent.hear() {
            break (node, pages);
        }
    };
    assert_eq!(told(&mut agent), (1, 10 << 10));
    agent.say(&ToHost::Tick(held(5 << 10)));
    let of_node = || daemon.vm("guest").agent.and_then(|agent| agent.nodes.first().copied()).unwrap_or_default();
    until("it is shown", || of_node().balloon_bytes == 20 * MIB);
    assert_eq!(of_node().balloon_wanted_bytes, 40 * MIB);

    daemon.kill_engine();
    let mut agent = Fake::accept(&port);
    agent.say(&ToHost::Tick(held(5 << 10)));
    assert_eq!(told(&mut agent), (1, 5 << 10), "what it holds");
    daemon.api.patch_vm("guest", &patch(0)).expect("it has a port");
    assert_eq!(told(&mut agent), (1, 0));
    drop(client);
}

#[test]
fn an_agent_tunes_its_kernel_while_restores_for_its_services_matter() {
    let _one = one_at_a_time();
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let port = Port::new();
    let ram = Ram::new(PAGES);
    let (_client, mut fake) = proved(&daemon, &port, &ram, "tuned");
    daemon.api.set_limit("tuned", Some(48 * MIB)).expect("limit");
    until("something is far", || {
        fake.stay_alive();
        daemon.vm("tuned").far_bytes > 8 * MIB
    });
    let mut service_restores = 0;
    let mut until_asked = |services: bool, tuned: bool| {
        loop {
            service_restores += 100;
            let restores = 2 * service_restores;
            let of_services = Tick { service_restores, tuned, ..Tick::default() };
            fake.say(&ToHost::Tick(Tick { total: PAGES, restores, ..of_services }));
            // The engine sends a hello from time to time in any case.
            if let Some(ToGuest::Hello(wanted)) = fake.hear_soon()
                && wanted.services == services
            {
                return assert!(wanted.reports);
            }
        }
    };
    until_asked(true, false);
    daemon.api.set_limit("tuned", None).expect("limit");
    all_is_there(&ram);
    until_asked(false, true);
    let shown = agent_of(&daemon, "tuned");
    assert!(shown.services_tuned && shown.service_restored_pages >= 200, "{shown:?}");
}
