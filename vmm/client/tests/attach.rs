//! The client against a scripted keeper and engine: its messages, its reactions, and the failures that it survives.

mod double;

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use ballast_base::wire::{ClientToKeeper, EngineToClient, KeeperToClient, VmId};
use ballast_base::{Bytes, Hva};
use ballast_client::{AttachError, Builder, Client, DiscardError, RequestError, Timing, ffi};
use ballast_sys::uffd::{FaultKind, FillOutcome};
use ballast_sys::{Mapping, memfd, scm};
use double::{Keeper, Session, VM, hva, pages, unread};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

const PAGES: u64 = 16;

/// A keeper and RAM; `None`, with a printed skip, if this machine cannot run the test.
fn machine() -> Option<(Keeper, OwnedFd, Mapping)> {
    let keeper = Keeper::start()?;
    let (fd, map) = ram();
    Some((keeper, fd, map))
}

/// Guest RAM whose page `n` begins with the word `n + 1`.
fn ram() -> (OwnedFd, Mapping) {
    let fd = memfd::create("guest-ram", Bytes(pages(PAGES))).expect("memfd");
    let map = Mapping::shared(&fd, 0, pages(PAGES) as usize).expect("map");
    for page in 0..PAGES {
        map.words(pages(page) as usize, 1)[0].store(page + 1, Ordering::Relaxed);
    }
    (fd, map)
}

fn word(map: &Mapping, page: u64) -> u64 {
    map.words(pages(page) as usize, 1)[0].load(Ordering::Relaxed)
}

fn builder(keeper: &Keeper, fd: &OwnedFd, map: &Mapping) -> Builder {
    let timing =
        Timing { answer: Duration::from_secs(60), refused_pause: Duration::from_millis(20), ..Timing::default() };
    Client::builder()
        .name("web-1")
        .socket(&keeper.path)
        .region(fd.try_clone().expect("dup"), hva(map.addr()), Bytes(pages(PAGES)), Bytes(0))
        .timing(timing)
}

/// A client with short timeouts, for tests without a reply.
fn impatient(builder: Builder) -> Builder {
    builder.timing(Timing { answer: Duration::from_millis(700), ..Timing::default() })
}

/// A client with a short timeout for replies about RAM, for tests without one.
fn hasty(builder: Builder) -> Builder {
    builder.timing(Timing { handshake: Duration::from_secs(5), ..Timing::default() })
}

fn attach_with<T: Send>(
    builder: Builder,
    keeper: &Keeper,
    script: impl FnOnce(&Keeper) -> T + Send,
) -> (Result<Client, AttachError>, T) {
    std::thread::scope(|scope| {
        let script = scope.spawn(|| script(keeper));
        let client = builder.attach();
        (client, script.join().expect("the script"))
    })
}

fn attached(keeper: &Keeper, fd: &OwnedFd, map: &Mapping) -> (Client, Session) {
    attached_as(builder(keeper, fd, map), keeper)
}

fn attached_as(builder: Builder, keeper: &Keeper) -> (Client, Session) {
    let (client, session) = attach_with(builder, keeper, |keeper| {
        let session = keeper.client();
        session.accept();
        session.ping(0);
        session
    });
    (client.expect("attach"), session)
}

#[test]
fn a_zapped_page_faults_to_the_userfaultfd_handed_over_and_keeps_its_bytes() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached(&keeper, &fd, &map);
    assert_eq!(client.vm(), VM);
    assert_eq!((session.attach.name.as_str(), session.attach.resume), ("web-1", None));
    assert_eq!(memfd::file_id(&session.ram[0]).expect("stat"), memfd::file_id(&fd).expect("stat"));
    session.register_all();
    let page = hva(map.addr()) + pages(3);
    assert_eq!(session.zap(7, vec![(page, pages(1))]), None);
    assert_eq!(word(&map, 2), 3, "the neighbour was not zapped, so this must not fault");
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| word(&map, 3));
        let fault = session.next_fault();
        assert_eq!((fault.addr, fault.kind), (page, FaultKind::Minor));
        assert_eq!(session.uffd.map_existing(page, pages(1)).expect("continue"), FillOutcome::Done);
        assert_eq!(guest.join().expect("guest"), 4);
    });
}

#[test]
fn a_zap_outside_announced_ram_is_einval_and_touches_nothing() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (_client, session) = attached(&keeper, &fd, &map);
    // Private memory of the VMM: a zap would turn it into zeros.
    let private = vec![0xA5u8; 1 << 20];
    let inside = (private.as_ptr() as u64).next_multiple_of(pages(1));
    let base = map.addr() as u64;
    let wrong = [
        (inside, pages(4)),
        (base - pages(1), pages(2)),
        (base, pages(PAGES + 1)),
        (base + 1, pages(1)),
        (base, 100),
        (base, 0),
        (u64::MAX - 4095, pages(1)),
        (0, u64::MAX),
    ];
    for (seq, (start, len)) in wrong.into_iter().enumerate() {
        assert_eq!(session.zap(seq as u64, vec![(Hva(start), len)]), Some(libc::EINVAL), "{start:#x}+{len:#x}");
    }
    assert_eq!(session.zap(99, vec![(Hva(base), pages(1)); 1025]), Some(libc::EINVAL), "too many ranges");
    // A valid range beside an invalid one is still zapped.
    session.register_all();
    assert_eq!(session.zap(100, vec![(Hva(inside), pages(1)), (Hva(base), pages(1))]), Some(libc::EINVAL));
    assert_eq!(session.uffd.map_existing(Hva(base), pages(1)).expect("continue"), FillOutcome::Done);
    assert!(private.iter().all(|byte| *byte == 0xA5), "private memory was zapped");
}

#[test]
fn garbage_on_either_socket_is_survived() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached(&keeper, &fd, &map);
    let mut long = vec![0xFF; 60_000];
    long[..6].copy_from_slice(b"BLST\x01\x00");
    for bytes in [&b"x"[..], b"BLST", b"BLST\x09\x00\x00", b"BLST\x01\x00\xff\xff\xff\xff", &long] {
        scm::send(&session.control, bytes, &[]).expect("send");
        scm::send(&session.socket, bytes, &[]).expect("send");
    }
    session.answer(&KeeperToClient::Attached { vm: VmId([9; 16]), stores: Vec::new(), is_first: false });
    session.answer(&KeeperToClient::Refused("nobody asked".into()));
    session.tell(&EngineToClient::DiscardDone { seq: 12345, error: None });
    // The client's thread reads both sockets in turn: when this socket has no unread message, a reply on the other one
    // means that the client has handled them all.
    while unread(&session.socket) > 0 {
        std::thread::yield_now();
    }
    session.ping(5);
    std::thread::scope(|scope| {
        let pin = scope.spawn(|| client.pin("test"));
        assert_eq!(session.request().0, ClientToKeeper::Pin("test".into()));
        session.answer(&KeeperToClient::Ok);
        pin.join().expect("thread").expect("answers to nobody were not taken for this one");
    });
}

#[test]
fn a_discard_returns_after_the_engine_has_replied() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached(&keeper, &fd, &map);
    let ranges = [(hva(map.addr()), pages(2)), (hva(map.addr()) + pages(5), pages(1))];
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| client.discard(&ranges));
        assert_eq!(session.acknowledge_discards(|| waiting.is_finished()), ranges);
        waiting.join().expect("thread").expect("acknowledged");
    });
    let outside = client.discard(&[(hva(map.addr()) + pages(PAGES), pages(1))]);
    assert!(matches!(outside, Err(DiscardError::Invalid(_))), "{outside:?}");
}

#[test]
fn a_discard_that_the_engine_cannot_do_fails_with_its_reason() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached(&keeper, &fd, &map);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| client.discard(&[(hva(map.addr()), pages(1))]));
        session.answer_discards(|| waiting.is_finished(), Some("punching: disk on fire"));
        let result = waiting.join().expect("thread");
        assert!(matches!(&result, Err(DiscardError::Failed(reason)) if reason.contains("on fire")), "{result:?}");
    });
}

#[test]
fn after_a_keepers_death_the_client_resumes_with_its_files_and_a_new_socket() {
    // The client does not know the third store.
    for stores in [&[(1, 1)][..], &[(1, 1), (2, 2)], &[(1, 1), (2, 2), (9, 3)]] {
        resumes_with(stores);
    }
}

fn resumes_with(stores: &[(u8, u8)]) {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, escrow) = attach_with(impatient(builder(&keeper, &fd, &map)), &keeper, |keeper| {
        let session = keeper.client();
        session.accept_with(stores)
        // The session's sockets close here: the keeper is dead.
    });
    let client = client.expect("attach");
    let away = keeper.die();

    // RAM that is plugged without a keeper is announced with the resume.
    let (extra, extra_map) = ram();
    while client.ram() == Bytes(pages(PAGES)) {
        let dup = extra.try_clone().expect("dup");
        // Until the client has noticed the death, this may fail without a reply; the RAM is then in the table.
        let _ = client.add_region(dup, hva(extra_map.addr()), Bytes(pages(PAGES)), Bytes(0));
    }
    let keeper = Keeper::restart(away);
    let session = keeper.client();
    assert_eq!(session.attach.resume, Some(VM));
    assert_eq!(session.attach.regions.len(), 2);
    let ids = |fds: &[OwnedFd]| fds.iter().map(|fd| memfd::file_id(fd).expect("stat")).collect::<Vec<_>>();
    let said: Vec<_> = session.attach.stores.iter().map(|files| (files.store, files.count)).collect();
    assert_eq!(said, stores);
    assert_eq!(ids(&session.escrow), escrow, "the state file is handed back, and those of the stores");
    assert_eq!(ids(&session.ram), ids(&[fd, extra]));
    session.accept();
    session.ping(1 << 32);
    session.register_all();
    let whole = session.whole(1);
    assert_eq!(session.zap(2, vec![whole]), None);
    assert_eq!(session.uffd.map_existing(whole.0, whole.1).expect("continue"), FillOutcome::Done);
    assert_eq!(word(&extra_map, 5), 6);
}

#[test]
fn several_userfaultfds_come_back_in_order_and_differ() {
    let Some((keeper, fd, map)) = machine() else { return };
    let ids = |session: &Session| {
        let all = std::iter::once(&session.uffd).chain(&session.more_uffds);
        all.map(|uffd| memfd::file_id(uffd).expect("stat").ino).collect::<Vec<_>>()
    };
    let three = impatient(builder(&keeper, &fd, &map)).fault_workers(3);
    let (client, (before, whole)) = attach_with(three, &keeper, |keeper| {
        let session = keeper.client();
        session.accept();
        assert_eq!(session.attach.shards, 3);
        // A part of the RAM for each userfaultfd.
        let whole = session.whole(0);
        session.more_uffds[1].register(whole.0, pages(4)).expect("register");
        (ids(&session), whole)
    });
    let _client = client.expect("attach");
    assert_eq!(before.iter().collect::<std::collections::HashSet<_>>().len(), 3, "{before:?}");
    let keeper = Keeper::restart(keeper.die());
    let session = keeper.client();
    session.accept();
    assert_eq!(ids(&session), before);
    session.more_uffds[1].register(whole.0, pages(4)).expect("what it registered before is still its own");
    session.more_uffds[0].register(whole.0, pages(4)).expect_err("another one's");

    for workers in [0, 9] {
        let refused = builder(&keeper, &fd, &map).fault_workers(workers).attach();
        assert!(
            matches!(&refused, Err(AttachError::Config(why)) if why.to_string().contains("fault workers")),
            "{refused:?}"
        );
    }
}

#[test]
fn a_refused_resume_is_repeated_until_it_is_accepted() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached(&keeper, &fd, &map);
    drop(session);
    keeper.client().answer(&KeeperToClient::Refused("still thinking".into()));
    keeper.client().answer(&KeeperToClient::Attached { vm: VmId([3; 16]), stores: Vec::new(), is_first: false });
    drop(keeper.client());
    scm::send(&keeper.client().socket, b"nonsense", &[]).expect("send");
    let session = keeper.client();
    assert_eq!(session.attach.resume, Some(VM));
    session.accept();
    session.ping(1);
    assert_eq!(client.vm(), VM);
}

#[test]
fn a_first_attach_that_fails_says_why() {
    let Some((keeper, fd, map)) = machine() else { return };
    let attempt = |script: fn(Session)| {
        attach_with(builder(&keeper, &fd, &map), &keeper, |keeper| script(keeper.client())).0.expect_err("not attached")
    };
    let refused = attempt(|session| session.answer(&KeeperToClient::Refused("the name is taken".into())));
    assert!(matches!(&refused, AttachError::Refused(reason) if reason == "the name is taken"), "{refused}");
    let hung_up = attempt(drop);
    assert!(matches!(hung_up, AttachError::NoAnswer(_)), "{hung_up}");
    let garbage = attempt(|session| scm::send(&session.socket, b"HTTP/1.1", &[]).expect("send"));
    assert!(matches!(garbage, AttachError::Protocol(_)), "{garbage}");
    let bare =
        attempt(|session| session.answer(&KeeperToClient::Attached { vm: VM, stores: Vec::new(), is_first: false }));
    assert!(matches!(bare, AttachError::NoAnswer(_)), "{bare}");
    let named = builder(&keeper, &fd, &map).name("").attach().expect_err("bad name");
    assert!(matches!(named, AttachError::Config(_)), "{named}");
    let (_, path) = keeper.die();
    let nobody = Client::builder()
        .socket(&path)
        .region(fd, hva(map.addr()), Bytes(pages(PAGES)), Bytes(0))
        .attach()
        .expect_err("nobody listens");
    assert!(matches!(&nobody, AttachError::Connect { path: named, .. } if *named == path), "{nobody}");
}

#[test]
fn while_the_first_attach_may_still_fail_nothing_is_zapped() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (refused, control) = attach_with(builder(&keeper, &fd, &map), &keeper, |keeper| {
        let session = keeper.client();
        session.tell(&EngineToClient::Zap { seq: 1, ranges: vec![session.whole(0)] });
        // The keeper dies before it says that the VM is attached.
        session.control
    });
    assert!(matches!(refused, Err(AttachError::NoAnswer(_))), "{refused:?}");
    double::wait_readable(&control, "the end of the client's socket");
    let heard = scm::receive(&control).map(|message| message.map(|message| message.bytes));
    assert!(!matches!(heard, Ok(Some(_))), "{heard:?}");
}

#[test]
fn a_keeper_at_a_relative_path_is_found_again_from_another_directory() {
    let Some((keeper, fd, map)) = machine() else { return };
    let before = std::env::current_dir().expect("a directory");
    // All other paths of these tests are absolute.
    std::env::set_current_dir(keeper.path.parent().expect("a directory")).expect("chdir");
    let (client, session) = attached_as(builder(&keeper, &fd, &map).socket("attach.sock"), &keeper);
    std::env::set_current_dir(before).expect("chdir");
    let away = keeper.die();
    drop(session);
    assert_eq!(Keeper::restart(away).client().attach.resume, Some(client.vm()));
}

/// Whether a thread of this process waits in this system call.
fn someone_waits_in(call: i64) -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").expect("tasks").flatten();
    let calls = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("syscall")).ok());
    calls.filter_map(|text| text.split(' ').next()?.trim().parse::<i64>().ok()).any(|now| now == call)
}

#[test]
fn a_first_attach_waits_for_room_where_many_connect_at_once() {
    let Some((keeper, fd, map)) = machine() else { return };
    let address = SocketAddrUnix::new(&keeper.path).expect("address");
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let others: Vec<OwnedFd> = std::iter::from_fn(|| {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("socket");
        rustix::net::connect(&socket, &address).is_ok().then_some(socket)
    })
    .collect();
    let builder = builder(&keeper, &fd, &map);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| builder.attach());
        while !client.is_finished() && !someone_waits_in(libc::SYS_connect) {
            std::thread::yield_now();
        }
        if !client.is_finished() {
            others.iter().for_each(|_| drop(keeper.connection()));
            keeper.client().accept();
        }
        client.join().expect("the attach").expect("attached");
    });
}

#[test]
fn a_region_for_which_the_keeper_asks_to_wait_is_repeated_until_it_is_taken() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached(&keeper, &fd, &map);
    let (extra, extra_map) = ram();
    let range = (hva(extra_map.addr()), pages(1));
    std::thread::scope(|scope| {
        let adding = scope.spawn(|| client.add_region(extra, range.0, Bytes(pages(PAGES)), Bytes(0)));
        for _ in 0..2 {
            let (message, fds) = session.request();
            assert!(
                matches!(message, ClientToKeeper::AddRegion { region: info, .. } if info.span.hva == range.0)
                    && fds.len() == 1
            );
            session.answer(&KeeperToClient::Later("it is being written back".into()));
        }
        session.request();
        session.answer(&KeeperToClient::Ok);
        adding.join().expect("thread").expect("added");
        assert_eq!(session.zap(1, vec![range]), None);
        assert_eq!(client.ram(), Bytes(2 * pages(PAGES)), "once");
    });
}

#[test]
fn a_region_for_which_the_keeper_asks_to_wait_too_long_is_given_up() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached_as(impatient(builder(&keeper, &fd, &map)), &keeper);
    let (extra, extra_map) = ram();
    let range = (hva(extra_map.addr()), pages(1));
    let add = || client.add_region(extra.try_clone().expect("dup"), range.0, Bytes(pages(PAGES)), Bytes(0));
    let later = |session: &Session| {
        assert!(matches!(session.request().0, ClientToKeeper::AddRegion { .. }));
        session.answer(&KeeperToClient::Later("it is being written back".into()));
    };
    let given_up = |added| matches!(added, Err(RequestError::Later(why)) if why == "it is being written back");
    std::thread::scope(|scope| {
        let adding = scope.spawn(add);
        while !adding.is_finished() {
            let mut fds = [PollFd::new(&session.socket, PollFlags::IN)];
            let short = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
            if rustix::event::poll(&mut fds, Some(&short)).is_ok_and(|ready| ready > 0) {
                later(&session);
            }
        }
        assert!(given_up(adding.join().expect("thread")));
        assert_eq!(client.ram(), Bytes(pages(PAGES)));
        assert_eq!(session.zap(1, vec![range]), Some(libc::EINVAL));
        // The keeper may also die while the client waits.
        let adding = scope.spawn(add);
        later(&session);
        let away = keeper.die();
        drop(session);
        assert!(given_up(adding.join().expect("thread")));
        assert_eq!(Keeper::restart(away).client().attach.regions.len(), 1);
    });
}

#[test]
fn a_late_answer_confirms_no_other_region() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached_as(hasty(builder(&keeper, &fd, &map)), &keeper);
    let (first, first_map) = ram();
    let (second, second_map) = ram();
    let [first_range, range] = [&first_map, &second_map].map(|map| (hva(map.addr()), pages(PAGES)));
    let added = client.add_region(first, first_range.0, Bytes(pages(PAGES)), Bytes(0));
    assert!(matches!(added, Err(RequestError::NoAnswer)), "{added:?}");
    std::thread::scope(|scope| {
        let adding = scope.spawn(|| client.add_region(second, range.0, Bytes(pages(PAGES)), Bytes(0)));
        for _ in 0..2 {
            assert!(matches!(session.request().0, ClientToKeeper::AddRegion { .. }));
        }
        session.answer(&KeeperToClient::Ok);
        assert_eq!(session.zap_parts(1, vec![range]), (None, vec![range]), "nobody has taken it");
        session.answer(&KeeperToClient::Ok);
        adding.join().expect("thread").expect("added");
        assert_eq!(session.zap(2, vec![range]), None);
        assert_eq!(session.zap_parts(3, vec![first_range]), (None, vec![first_range]), "not managed");
    });
}

#[test]
fn a_region_that_the_vmm_knows_to_be_unmanaged_is_never_zapped() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached_as(hasty(builder(&keeper, &fd, &map)), &keeper);
    let (extra, extra_map) = ram();
    let range = (hva(extra_map.addr()), pages(PAGES));
    let added = client.add_region(extra, range.0, Bytes(range.1), Bytes(0));
    assert!(matches!(added, Err(RequestError::NoAnswer)), "{added:?}");
    // This keeper, or the engine, may still know of the region, and the next keeper does.
    assert_eq!(session.zap_parts(1, vec![range]), (None, vec![range]));
    drop(session);
    let session = keeper.client();
    assert_eq!(session.attach.regions.len(), 2);
    session.accept();
    assert_eq!(session.zap_parts(2, vec![range]), (None, vec![range]));
    assert_eq!(session.zap(3, vec![session.whole(0)]), None);
}

#[test]
fn a_keeper_that_refuses_a_vm_is_also_offered_it_without_unconfirmed_ram() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached(&keeper, &fd, &map);
    let away = keeper.die();
    drop(session);
    let (extra, extra_map) = ram();
    let range = (hva(extra_map.addr()), pages(PAGES));
    // Waits until the client has noticed the death.
    client.add_region(extra, range.0, Bytes(range.1), Bytes(0)).expect("announced by the next attach message");
    let keeper = Keeper::restart(away);
    // The reason may pass, so all of the RAM is offered a few times.
    for regions in [2, 2, 2, 1, 2] {
        let session = keeper.client();
        assert_eq!((session.attach.regions.len(), session.attach.resume), (regions, Some(VM)));
        assert_eq!(session.zap_parts(1, vec![range]), (None, vec![range]), "it is left out before long");
        session.answer(&KeeperToClient::Refused("more RAM than this user may have".into()));
    }
    let session = keeper.client();
    assert_eq!(session.attach.regions.len(), 1);
    session.accept();
    session.ping(2);
    assert_eq!(client.ram(), Bytes(pages(PAGES)), "the other RAM is not managed");
    assert_eq!(session.zap_parts(3, vec![range]), (None, vec![range]));
    assert_eq!(session.zap(4, vec![session.whole(0)]), None);
}

#[test]
fn a_pin_waits_while_pages_return() {
    const LIMIT: Duration = Duration::from_secs(2);
    let Some(keeper) = Keeper::start() else { return };
    let fd = memfd::create("guest-ram", Bytes(pages(4096))).expect("memfd");
    let map = Mapping::shared(&fd, 0, pages(4096) as usize).expect("map");
    let ram = fd.try_clone().expect("dup");
    let builder = Client::builder().name("web-1").socket(&keeper.path);
    let builder = builder.region(ram, hva(map.addr()), Bytes(pages(4096)), Bytes(0));
    let timing = Timing { answer: LIMIT, ..Timing::default() };
    let (client, session) = attached_as(builder.timing(timing), &keeper);
    std::thread::scope(|scope| {
        let pin = scope.spawn(|| client.pin("test"));
        assert_eq!(session.request().0, ClientToKeeper::Pin("test".into()));
        let begun = std::time::Instant::now();
        for page in 0..4096 {
            if begun.elapsed() > 2 * LIMIT {
                break;
            }
            map.words(pages(page) as usize, 1)[0].store(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(2));
        }
        session.answer(&KeeperToClient::Ok);
        pin.join().expect("thread").expect("pages returned all the time");
    });
}

#[test]
fn a_removed_region_is_never_zapped_again_and_a_refused_one_is_never_zapped() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached(&keeper, &fd, &map);
    let (extra, extra_map) = ram();
    let range = (hva(extra_map.addr()), pages(1));
    let add = || client.add_region(extra.try_clone().expect("dup"), range.0, Bytes(pages(PAGES)), Bytes(0));
    std::thread::scope(|scope| {
        let adding = scope.spawn(add);
        let (message, fds) = session.request();
        assert!(
            matches!(message, ClientToKeeper::AddRegion { region: info, .. } if info.span.hva == range.0)
                && fds.len() == 1
        );
        session.answer(&KeeperToClient::Refused("full".into()));
        assert!(matches!(adding.join().expect("thread"), Err(RequestError::Refused(_))));
        assert_eq!(session.zap(1, vec![range]), Some(libc::EINVAL));

        let adding = scope.spawn(add);
        session.request();
        session.answer(&KeeperToClient::Ok);
        adding.join().expect("thread").expect("added");
        assert_eq!(session.zap(2, vec![range]), None);

        let removing = scope.spawn(|| client.remove_region(range.0));
        assert_eq!(session.request().0, ClientToKeeper::RemoveRegion(range.0));
        session.answer(&KeeperToClient::Ok);
        removing.join().expect("thread").expect("removed");
        assert_eq!(session.zap(3, vec![range]), Some(libc::EINVAL));
    });
}

#[test]
fn a_late_answer_does_not_count_for_the_next_request_and_a_pin_needs_its_answer() {
    let Some((keeper, fd, map)) = machine() else { return };
    let timing = Timing { answer: Duration::from_secs(5), ..Timing::default() };
    let (client, session) = attached_as(builder(&keeper, &fd, &map).timing(timing), &keeper);
    assert!(matches!(client.pin("first"), Err(RequestError::NoAnswer)), "nobody answered");
    std::thread::scope(|scope| {
        let second = scope.spawn(|| client.pin("second"));
        assert_eq!(session.request().0, ClientToKeeper::Pin("first".into()));
        assert_eq!(session.request().0, ClientToKeeper::Pin("second".into()));
        session.answer(&KeeperToClient::Ok);
        session.answer(&KeeperToClient::Refused("no".into()));
        assert!(matches!(second.join().expect("thread"), Err(RequestError::Refused(_))));
    });
}

#[test]
fn a_client_may_pin_unless_it_declined_and_reports_the_change_once() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached(&keeper, &fd, &map);
    assert!(session.attach.may_pin);
    client.may_pin().expect("nothing to ask");

    let keeper = Keeper::start().expect("as before");
    let timing = Timing { answer: Duration::from_secs(5), ..Timing::default() };
    let (client, session) = attached_as(builder(&keeper, &fd, &map).may_pin(false).timing(timing), &keeper);
    assert!(!session.attach.may_pin);
    // A request that no keeper has confirmed does not count.
    assert!(matches!(client.may_pin(), Err(RequestError::NoAnswer)), "nobody answered");
    assert_eq!(session.request().0, ClientToKeeper::MayPin);
    session.answer(&KeeperToClient::Refused("late, and no".into()));
    std::thread::scope(|scope| {
        let again = scope.spawn(|| client.may_pin());
        assert_eq!(session.request().0, ClientToKeeper::MayPin);
        session.answer(&KeeperToClient::Ok);
        again.join().expect("thread").expect("confirmed");
    });
    client.may_pin().expect("nothing to ask");
    drop(session);
    assert!(keeper.client().attach.may_pin, "the next keeper hears it at once");
}

#[test]
fn if_a_keeper_dies_before_it_confirms_may_pin_its_successor_knows() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached_as(builder(&keeper, &fd, &map).may_pin(false), &keeper);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| client.may_pin());
        assert_eq!(session.request().0, ClientToKeeper::MayPin);
        drop(session);
        let session = keeper.client();
        assert!(session.attach.may_pin);
        assert!(!asking.is_finished(), "it is not attached yet");
        session.accept();
        asking.join().expect("thread").expect("known");
    });
}

#[test]
fn from_c_a_zeroed_config_may_pin_and_never_pins_lasts_until_may_pin() {
    for never_pins in [0, 1] {
        let Some((keeper, fd, map)) = machine() else { return };
        let socket = std::ffi::CString::new(keeper.path.to_str().expect("text")).expect("no NUL");
        let attach = || {
            let null = std::ptr::null();
            let size = size_of::<ffi::BallastConfig>();
            let config =
                ffi::BallastConfig { size, name: null, socket: socket.as_ptr(), limit: 0, pinned: null, never_pins };
            let address = map.addr() as *mut std::ffi::c_void;
            let region = ffi::BallastRegion { address, length: pages(PAGES), fd: fd.as_raw_fd(), file_offset: 0 };
            // SAFETY: the config has its size and NUL-terminated texts; one region is there.
            let client = unsafe { ffi::ballast_attach(&config, &region, 1) };
            // SAFETY: the result of `ballast_attach`; NULL would be an error, not a fault.
            unsafe { ffi::ballast_may_pin(client) }
        };
        std::thread::scope(|scope| {
            let c_program = scope.spawn(attach);
            let session = keeper.client();
            assert_eq!(session.attach.may_pin, never_pins == 0);
            session.accept();
            if never_pins != 0 {
                assert_eq!(session.request().0, ClientToKeeper::MayPin);
                session.answer(&KeeperToClient::Ok);
            }
            assert_eq!(c_program.join().expect("thread"), 0);
        });
    }
}

#[test]
fn fail_stop_reaches_the_handler_with_its_reason() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (said, heard) = std::sync::mpsc::channel();
    let said = std::sync::Mutex::new(said);
    let handler = move |reason: &str| said.lock().expect("lock").send(reason.to_owned()).expect("send");
    let (client, session) = attach_with(builder(&keeper, &fd, &map).on_fail_stop(handler), &keeper, |keeper| {
        let session = keeper.client();
        session.accept();
        session
    });
    client.expect("attach");
    session.tell(&EngineToClient::FailStop { reason: "state file lost".into() });
    assert_eq!(heard.recv_timeout(Duration::from_secs(60)).expect("told"), "state file lost");
}

#[test]
fn a_region_removed_while_keepers_change_is_unknown_to_the_next_one_too() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (extra, extra_map) = ram();
    let both = builder(&keeper, &fd, &map).region(
        extra.try_clone().expect("dup"),
        hva(extra_map.addr()),
        Bytes(pages(PAGES)),
        Bytes(0),
    );
    let (client, session) = attached_as(both, &keeper);
    std::thread::scope(|scope| {
        let gone = hva(extra_map.addr());
        let removing = scope.spawn(move || client.remove_region(gone).map(|()| client.ram()));
        assert_eq!(session.request().0, ClientToKeeper::RemoveRegion(gone));
        // The keeper dies before it replies. The next keeper is not told of the region, or is asked again.
        drop(session);
        let session = keeper.client();
        session.accept();
        if session.attach.regions.len() == 2 {
            assert_eq!(session.request().0, ClientToKeeper::RemoveRegion(gone));
            session.answer(&KeeperToClient::Ok);
        }
        assert_eq!(removing.join().expect("thread").expect("removed"), Bytes(pages(PAGES)));
        assert_eq!(session.zap(1, vec![(gone, pages(1))]), Some(libc::EINVAL));
    });
}

#[test]
fn a_zap_reports_parts_mapped_over_whose_far_pages_were_restored_before() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached(&keeper, &fd, &map);
    session.register_all();
    let at = |page| hva(map.addr()) + pages(page);
    assert_eq!(session.zap(1, vec![session.whole(0)]), None);
    // The VMM is about to map over two pages, the first of which is far.
    memfd::punch(&fd, pages(3), pages(1)).expect("punch");
    std::thread::scope(|scope| {
        let mapping = scope.spawn(|| client.unmapping(at(3), pages(2)));
        let mut bytes = [0; ballast_base::PAGE_SIZE];
        bytes[..8].copy_from_slice(&4u64.to_le_bytes());
        let fault = session.next_fault();
        assert_eq!((fault.addr, fault.kind), (at(3), FaultKind::Missing), "the bytes are asked for before it goes on");
        assert_eq!(session.uffd.copy(at(3), &bytes).expect("fill"), FillOutcome::Done);
        let fault = session.next_fault();
        assert_eq!((fault.addr, fault.kind), (at(4), FaultKind::Minor));
        // The hole is already in the table.
        assert_eq!(session.zap_parts(2, vec![(at(3), pages(1))]), (None, vec![(at(3), pages(1))]));
        assert_eq!(session.uffd.map_existing(at(4), pages(1)).expect("continue"), FillOutcome::Done);
        mapping.join().expect("thread").expect("told");
    });
    assert_eq!((word(&map, 3), word(&map, 4)), (4, 5));
    for page in (0..PAGES).filter(|page| ![3, 4].contains(page)) {
        assert_ne!(session.uffd.map_existing(at(page), pages(1)).expect("continue"), FillOutcome::Gone);
    }
    let whole = session.whole(0);
    assert_eq!(session.zap_parts(3, vec![whole]), (None, vec![(at(3), pages(2))]));
    // All pages but these two were zapped.
    assert_eq!(session.uffd.map_existing(at(2), pages(1)).expect("continue"), FillOutcome::Done);
    assert_eq!(session.uffd.map_existing(at(5), pages(1)).expect("continue"), FillOutcome::Done);
    assert_eq!((word(&map, 3), word(&map, 4)), (4, 5), "these are still mapped");
}

#[test]
fn restore_all_brings_far_pages_back_through_faults() {
    let Some((keeper, fd, map)) = machine() else { return };
    let (client, session) = attached(&keeper, &fd, &map);
    session.register_all();
    // Two pages are far: zapped, and punched out of the file.
    assert_eq!(session.zap(1, vec![session.whole(0)]), None);
    for page in [2, 9] {
        memfd::punch(&fd, pages(page), pages(1)).expect("punch");
    }
    std::thread::scope(|scope| {
        let restoring = scope.spawn(|| client.restore_all());
        for _ in 0..PAGES {
            let fault = session.next_fault();
            let outcome = match fault.kind {
                FaultKind::Missing => session.uffd.copy(fault.addr, &[0x42; 4096]),
                FaultKind::Minor => session.uffd.map_existing(fault.addr, pages(1)),
            };
            assert_eq!(outcome.expect("fill"), FillOutcome::Done);
        }
        restoring.join().expect("thread").expect("all back");
    });
    assert_eq!((word(&map, 2), word(&map, 9), word(&map, 3)), (0x4242_4242_4242_4242, 0x4242_4242_4242_4242, 4));
}
