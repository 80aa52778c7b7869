//! The keeper without VMMs; the program in place of its engine takes no orders.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ballast_base::wire::{Attach, ClientToKeeper, KeeperToClient, Span, VmId, decode, encode};
use ballast_base::{Bytes, Extents, Hva};
use ballast_handover::orders::Order;
use ballast_handover::state_file::StateFile;
use ballast_handover::table::Lost;
use ballast_sys::memfd::{self, FileId};
use ballast_sys::process::Process;
use ballast_testkit::program::install_script;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::admit::{Escrow, Ram};
use crate::client::{Answer, ClientView, Peer};
use crate::engine::{PING_EVERY, Who};
use crate::engine_child::add_view;
use crate::engines::Engines;
use crate::fence;
use crate::keeper::Keeper;
use crate::options::Options;
use crate::place::Place;
use crate::program::Program;
use crate::regions::Held;
use crate::run::listen;
use crate::store_files::Files;
use crate::vms::{Closing, Vm};
use ballast_sys::slow_fd::SlowFd;

pub(crate) const LOST: Lost = Lost { flags: 0, word: 0 };

pub(crate) fn keeper_of(program: PathBuf) -> Keeper {
    let (api, _) = ballast_sys::scm::pair().expect("socket pair");
    let engines = Engines::new(Program::at(program).expect("a program"), Vec::new(), api);
    Keeper::new(Options::default(), engines)
}

/// A keeper whose engine sleeps, and the directory of the engine's program.
fn keeper() -> (Keeper, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let program = dir.path().join("engine");
    install_script(&program, "exec sleep 1000");
    (keeper_of(program), dir)
}

pub(crate) fn attach_as(name: &str, resume: Option<VmId>) -> Attach {
    let vmm = "test".into();
    let name = name.into();
    Attach {
        name,
        uuid: None,
        limit: None,
        vmm,
        uffd_features: 0,
        shards: 1,
        files: 1,
        pinned: None,
        may_pin: false,
        regions: Vec::new(),
        resume,
        stores: Vec::new(),
    }
}

/// A process that connected: its key, and the other end of its socket.
fn process(keeper: &mut Keeper, pid: u32) -> (u64, OwnedFd) {
    let (ours, theirs) = ballast_sys::scm::pair().expect("socket pair");
    (keeper.clients.add(ours, Peer { pid, uid: 0 }), theirs)
}

/// A process that maps region 0 of this VM at 0: its key, and the other ends of its two sockets.
fn process_of(keeper: &mut Keeper, vm: VmId, pid: u32) -> (u64, [OwnedFd; 2]) {
    let (key, socket) = process(keeper, pid);
    let (ours, control) = ballast_sys::scm::pair().expect("socket pair");
    let spans = vec![(Span { hva: Hva(0), len: Bytes(1 << 20) }, 0)];
    let ours = Arc::new(SlowFd::from(ours));
    keeper.clients.attach(key, ClientView { vm, uffds: Vec::new(), uffd_features: 0, control: ours, spans });
    (key, [socket, control])
}

/// 1 MiB of RAM in a file whose identity is not checked.
fn ram(file: FileId, offset: u64) -> Ram {
    let fd = memfd::create("ballast-test", Bytes(0)).expect("memfd");
    Ram {
        span: Span { hva: Hva(0), len: Bytes(1 << 20) },
        guest_address: None,
        extents: Extents::one(Bytes(offset), Bytes(1 << 20)).expect("good"),
        files: vec![(Arc::new(SlowFd::from(fd)), file)],
    }
}

fn new_vm(keeper: &mut Keeper, name: &str) -> VmId {
    add_vm(keeper, name, 0)
}

fn add_vm(keeper: &mut Keeper, name: &str, uid: u32) -> VmId {
    let held = Held::create(&attach_as(name, None), uid).expect("state and arena");
    let vm = Vm { held, place: Place::with(Who::Engine) };
    let id = vm.id();
    keeper.vms.add(vm);
    id
}

fn first_vm(keeper: &mut Keeper) -> &mut Vm {
    keeper.vms.iter_mut().next().expect("a VM")
}

fn first_closing(keeper: &mut Keeper) -> &mut Closing {
    keeper.vms.closing_mut().next().expect("a VM that is being closed")
}

/// The files that a client brings back to this keeper, as admitted.
fn sent_back(escrow: &[std::os::fd::OwnedFd]) -> Escrow {
    let back = |at: usize| memfd::reopen(escrow[at].as_fd(), true).expect("reopen").into();
    Escrow { state: back(0), stores: vec![Files::ram(back(1))] }
}

fn engine_of(keeper: &Keeper) -> Process {
    keeper.engines.process(Who::Engine).expect("an engine")
}

/// Ends the engine and has the keeper notice it.
fn end_engine(keeper: &mut Keeper) {
    let pidfd = fence::kill(engine_of(keeper)).expect("end the engine").expect("it was there");
    poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], None).expect("poll");
    keeper.reap_engine();
}

#[test]
fn a_state_file_names_its_engine_before_the_engine_has_heard_of_the_vm() {
    let (mut keeper, _dir) = keeper();
    let before = new_vm(&mut keeper, "before");
    assert_eq!(first_vm(&mut keeper).held.state().engine(), None);
    keeper.keep_engines();
    let after = new_vm(&mut keeper, "after");
    keeper.hand_over(after, None);
    // The engine sleeps and takes no order, so the keeper wrote everything that is in the state files.
    for _ in 0..2 {
        let Process { pid, start } = engine_of(&keeper);
        for id in [before, after] {
            assert_eq!(keeper.vms.get(id).expect("known").held.state().engine(), Some((pid, start)));
        }
        end_engine(&mut keeper);
        while keeper.engines.process(Who::Engine).is_none() {
            keeper.keep_engines();
            std::thread::yield_now();
        }
    }
    end_engine(&mut keeper);
}

#[test]
fn a_later_keeper_ends_an_engine_that_was_only_about_to_open_the_vm() {
    let (mut first, _dir) = keeper();
    let id = new_vm(&mut first, "web");
    first.keep_engines();
    let late = engine_of(&first);
    let escrow = first_vm(&mut first).held.escrow().expect("escrow");

    let (mut second, _dir) = keeper();
    let sent = sent_back(&escrow);
    let resumed = second.resume(&attach_as("web", Some(id)), sent, 0).expect("resumed");
    assert_eq!(resumed.id(), id);
    let engine = first.engines.get(Who::Engine).expect("the keeper does not know yet");
    second.vms.add(resumed);
    second.keep_engines();
    while first_vm(&mut second).place.fenced().is_some() {
        second.tend_fences();
        std::thread::yield_now();
    }
    assert_ne!(first_vm(&mut second).held.state().engine(), Some((late.pid, late.start)), "it has another engine");
    // It was killed, though no thread of it worked for the VM yet.
    poll(&mut [PollFd::from_borrowed_fd(engine.pidfd(), PollFlags::IN)], None).expect("poll");
    first.reap_engine();
    end_engine(&mut second);
}

#[test]
fn a_vm_whose_last_engine_lives_returns_when_ours_serves_and_one_whose_engine_is_dead_at_once() {
    let (mut first, _dir) = keeper();
    let id = new_vm(&mut first, "web");
    let escrow = first_vm(&mut first).held.escrow().expect("escrow");
    let (mut second, _dir) = keeper();
    let sent = sent_back(&escrow);
    assert_eq!(second.must_wait_for_engine(&sent), None, "it has no engine");
    first.keep_engines();
    first.hand_over(id, None);
    second.must_wait_for_engine(&sent).expect("there is no engine of ours");
    second.keep_engines();
    second.must_wait_for_engine(&sent).expect("it does not serve yet");
    second.engines.has_started(Who::Engine);
    assert_eq!(second.must_wait_for_engine(&sent), None);
    end_engine(&mut second);
    second.must_wait_for_engine(&sent).expect("there is no engine of ours any more");
    end_engine(&mut first);
    assert_eq!(second.must_wait_for_engine(&sent), None, "nobody serves it");
}

#[test]
fn a_vm_that_the_engine_could_not_open_to_close_it_is_given_to_it_again() {
    let (mut keeper, _dir) = keeper();
    keeper.keep_engines();
    let vm = new_vm(&mut keeper, "web");
    keeper.hand_over(vm, None);
    keeper.close_vm(vm);
    let seq = first_closing(&mut keeper).number();
    assert!(!keeper.tend_closing(), "the engine closes it");
    first_closing(&mut keeper).vm.held.state().take_over(1, 1, LOST).expect("it was open once");
    keeper.closed(seq, Err("no memory".into()));
    assert!(keeper.tend_closing(), "it waits");
    first_closing(&mut keeper).try_now();
    assert!(!keeper.tend_closing(), "the engine was given it again");
    keeper.closed(seq, Ok(()));
    assert_eq!(keeper.vms.closing().count(), 0);
    end_engine(&mut keeper);
}

#[test]
fn a_vm_whose_processes_go_while_it_waits_for_missing_regions_is_closed_by_an_engine_after_the_search() {
    let (mut keeper, _dir) = keeper();
    keeper.keep_engines();
    let vm = new_vm(&mut keeper, "web");
    let (ours, theirs) = (memfd::create("ballast-test", Bytes(1 << 20)), memfd::create("ballast-test", Bytes(1 << 20)));
    let [ours, theirs] = [ours, theirs].map(|file| file.expect("memfd"));
    for file in [&ours, &theirs] {
        let region = ram(memfd::file_id(file).expect("stat"), 0);
        first_vm(&mut keeper).held.append(&region).expect("a region");
    }
    first_vm(&mut keeper).held.state().take_over(1, 1, LOST).expect("it was open once");
    // A process of this test maps one of them.
    let mapped = ballast_sys::Mapping::shared(&theirs, 0, 1 << 20).expect("map");
    keeper.search_or_hand_over(vm);
    assert!(first_vm(&mut keeper).place.is_searched(), "it waits for its regions");
    keeper.close_vm(vm);
    assert!(keeper.tend_closing() && !first_closing(&mut keeper).is_given(), "it is not forgotten");
    drop(mapped);
    let begun = Instant::now();
    while keeper.tend_closing() {
        assert!(begun.elapsed() < Duration::from_secs(60), "no engine gets it");
        std::thread::yield_now();
    }
    let closing = first_closing(&mut keeper);
    assert!(closing.is_given() && !closing.vm.place.is_searched());
    let fd = closing.vm.held.state().fd().try_clone_to_owned().expect("duplicate");
    let state = StateFile::open(fd).expect("its state file");
    let held = Held::new(state, Vec::new(), "test".into(), 0).expect("a VM");
    keeper.vms.add(Vm { held, place: Place::with(Who::Engine) });
    assert_eq!(keeper.vms.closing().count(), 0, "a process that returns has it again");
    end_engine(&mut keeper);
}

#[test]
fn what_an_engine_lacked_for_a_vm_is_remembered_if_it_has_the_vm_and_as_long_as_it_is_not_the_keepers() {
    let (mut keeper, _dir) = keeper();
    let vm = new_vm(&mut keeper, "web");
    let is_lost = |keeper: &Keeper| keeper.vms.get(vm).is_some_and(|vm| vm.place.is_lost());
    keeper.lost(Who::Next, vm);
    assert!(!is_lost(&keeper), "that engine has it not");
    first_vm(&mut keeper).place = Place::with(Who::Next);
    keeper.lost(Who::Engine, vm);
    assert!(!is_lost(&keeper), "it has moved");
    keeper.lost(Who::Next, vm);
    assert!(is_lost(&keeper));
    first_vm(&mut keeper).place.try_now();
    assert!(keeper.tend_lost().is_some() && is_lost(&keeper), "orders of it go to the next engine");
    first_vm(&mut keeper).place.go_back();
    assert!(keeper.tend_lost().is_none() && !is_lost(&keeper));
    // The keeper will become another program: a VM is tried at once if it was lost before, and after a pause if it is
    // lost later.
    keeper.lost(Who::Engine, vm);
    keeper.try_lost_now();
    assert!(keeper.tend_lost().is_none() && !is_lost(&keeper));
    keeper.lost(Who::Engine, vm);
    assert!(keeper.tend_lost().is_some() && is_lost(&keeper));
}

#[test]
fn a_vm_whose_arena_or_state_no_engine_of_ours_can_open_stays_with_the_one_that_can() {
    use ballast_base::format::Stamp;
    use ballast_handover::{arena, state_file};
    use std::os::unix::fs::FileExt;
    const STAMP: u64 = 8;
    let (mut first, _dir) = keeper();
    let id = new_vm(&mut first, "web");
    first.keep_engines();
    let arena = first_vm(&mut first).held.stores()[0].iter().next().expect("an arena");
    arena::format(&arena::RAM, &**arena, 4).expect("laid out");
    let escrow = first_vm(&mut first).held.escrow().expect("escrow");
    let (mut second, _dir) = keeper();
    for (at, ours, name) in [(0, state_file::FORMAT, "state file"), (1, arena::RAM.format, "arena")] {
        let file = std::fs::File::from(memfd::reopen(escrow[at].as_fd(), true).expect("reopen"));
        let newer = Stamp { version: 99, least_reader: 98 };
        file.write_all_at(&newer.to_word().to_le_bytes(), STAMP).expect("write");
        let sent = sent_back(&escrow);
        let refused = second.resume(&attach_as("web", Some(id)), sent, 0).map(|_| ()).expect_err("too new");
        let refused = format!("{refused:#}");
        let said = format!("{name}: it has version 99 and needs a reader of at least 98");
        assert!(refused.contains(&said), "{refused}");
        file.write_all_at(&ours.stamp().to_word().to_le_bytes(), STAMP).expect("write");
    }
    let engine = first.engines.get(Who::Engine).expect("an engine");
    let lives =
        poll(&mut [PollFd::from_borrowed_fd(engine.pidfd(), PollFlags::IN)], Some(&Timespec::default())).expect("poll");
    assert_eq!(lives, 0, "the engine that serves it was ended");
    end_engine(&mut first);
}

#[test]
fn a_resumed_vm_whose_name_is_taken_is_called_something_else_and_it_is_said() {
    let (mut first, _dir) = keeper();
    let id = new_vm(&mut first, "web");
    let escrow = first_vm(&mut first).held.escrow().expect("escrow");
    let (mut second, _dir) = keeper();
    new_vm(&mut second, "web");
    let sent = sent_back(&escrow);
    let resumed = second.resume(&attach_as("web", Some(id)), sent, 0).expect("resumed");
    assert_eq!((resumed.id(), resumed.name().as_str()), (id, "web-2"));
    let unsaid = second.engines.unsaid();
    assert!(matches!(unsaid, [Order::Note { kind, .. }] if kind == "renamed"), "{unsaid:?}");
    let refused = second.create(&attach_as("web", None), Peer { pid: std::process::id(), uid: 0 }).map(|_| ());
    refused.expect_err("a new VM must have a name of its own");
}

#[test]
fn who_looks_for_a_socket_finds_one_while_the_next_keeper_takes_its_place() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join("api.sock");
    let listen = || listen(&path, rustix::net::SocketType::STREAM, None).expect("listen");
    let (first, is_over) = (listen(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let looks = scope.spawn(|| {
            let mut there = true;
            while !is_over.load(Ordering::Relaxed) {
                there &= path.exists();
            }
            there
        });
        (0..1000).for_each(|_| drop(listen()));
        is_over.store(true, Ordering::Relaxed);
        assert!(looks.join().expect("it looks"), "there was no socket");
    });
    drop(first);
}

#[test]
fn connections_that_never_attach_do_not_last() {
    let (mut keeper, dir) = keeper();
    let path = dir.path().join("attach.sock");
    let listener = listen(&path, rustix::net::SocketType::SEQPACKET, None).expect("listen");
    let connect = || {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let socket = socket.expect("socket");
        rustix::net::connect(&socket, &SocketAddrUnix::new(&path).expect("address")).expect("connect");
        socket
    };
    let connections: Vec<OwnedFd> = (0..100).map(|_| connect()).collect();
    let now = Instant::now();
    for _ in 0..connections.len() {
        keeper.clients.accept(listener.as_fd());
    }
    assert_eq!(keeper.clients.count(), 100);
    keeper.tend_clients(now);
    assert_eq!(keeper.clients.count(), 100, "they have some time");
    keeper.tend_clients(Instant::now() + Duration::from_secs(11));
    assert_eq!(keeper.clients.count(), 0);
}

#[test]
fn a_client_that_returns_as_one_vm_waits_for_the_ram_of_another_vm_that_is_closing() {
    let (mut keeper, _dir) = keeper();
    let file = |ino| FileId { dev: 1, ino };
    let ids: Vec<VmId> = [1, 2]
        .map(|number| {
            let id = new_vm(&mut keeper, &format!("vm-{number}"));
            let region = ram(file(number), 0);
            first_vm(&mut keeper).held.append(&region).expect("a region");
            keeper.close_vm(id);
            id
        })
        .into();
    let of =
        |files: &[(u64, u64)]| -> Vec<Ram> { files.iter().map(|(ino, offset)| ram(file(*ino), *offset)).collect() };
    assert_eq!(keeper.vms.must_wait(Some(ids[0]), &of(&[(1, 0)])), None);
    for (vm, files) in [(None, [(3, 0), (1, 0)]), (Some(ids[0]), [(1, 0), (2, 4096)])] {
        keeper.vms.must_wait(vm, &of(&files)).expect("another VM's");
    }
    assert_eq!(keeper.vms.must_wait(None, &of(&[(1, 1 << 20), (2, 8 << 20)])), None, "another part of the files");
}

/// This process waits to unplug its region. Returns the number of the order.
fn unplug(keeper: &mut Keeper, key: u64) -> u64 {
    let seq = keeper.engines.number();
    let order = |seq, vm, pid| Order::RemoveRegion { seq, vm, pid, hva: Hva(0), region: Some(0) };
    keeper.clients.wait(key, Answer::Ok, seq, order).expect("it is attached");
    seq
}

#[test]
fn a_region_that_no_engine_has_removed_keeps_its_files_and_a_removed_one_does_not() {
    let (mut keeper, _dir) = keeper();
    let vm = new_vm(&mut keeper, "web");
    let region = ram(FileId { dev: 1, ino: 2 }, 0);
    first_vm(&mut keeper).held.append(&region).expect("a region");
    first_vm(&mut keeper).held.bring(0, region.files);
    for is_removed in [false, true] {
        let (key, _sockets) = process_of(&mut keeper, vm, 7);
        let seq = unplug(&mut keeper, key);
        if is_removed {
            first_vm(&mut keeper).held.state().remove_region(0);
        }
        keeper.answered(seq, Ok(()));
        assert!(keeper.clients.view(key).expect("a view").spans.is_empty());
        let held = &first_vm(&mut keeper).held;
        let (Order::CheckVm { files, .. }, _) = held.check(0) else { panic!("another order") };
        assert_eq!((held.add_region(7, None, 0).is_none(), files), (is_removed, u8::from(!is_removed)));
    }
}

#[test]
fn a_region_that_was_removed_after_its_last_process_was_gone_keeps_no_files() {
    let (mut keeper, _dir) = keeper();
    let vm = new_vm(&mut keeper, "web");
    let region = ram(FileId { dev: 1, ino: 2 }, 0);
    first_vm(&mut keeper).held.append(&region).expect("a region");
    first_vm(&mut keeper).held.bring(0, region.files);
    let [(unplugs, _a), (stays, _b)] = [7, 8].map(|pid| process_of(&mut keeper, vm, pid));
    // It hangs up before the engine reports that the region is removed; the other process has the region, too.
    keeper.drop_client(unplugs, "is gone");
    first_vm(&mut keeper).held.state().remove_region(0);
    keeper.tend_vms(Instant::now());
    assert!(first_vm(&mut keeper).held.add_region(7, None, 0).is_some(), "the other has it");
    keeper.clients.unmap(stays, Hva(0));
    keeper.tend_vms(Instant::now() + PING_EVERY);
    assert!(first_vm(&mut keeper).held.add_region(7, None, 0).is_none());
}

#[test]
fn ram_that_is_not_managed_is_a_figure_of_its_vm_and_a_whole_vm_needs_no_attach_to_report_it() {
    let (mut keeper, _dir) = keeper();
    let vm = new_vm(&mut keeper, "web");
    let (key, [socket, _control]) = process_of(&mut keeper, vm, 7);
    let mut tell = |len, why: &str| {
        let message = ClientToKeeper::Unmanaged { name: "other".into(), len: Bytes(len), why: why.into() };
        ballast_sys::scm::send(&socket, &encode(&message), &[]).expect("send");
        keeper.hear_client(key);
        first_vm(&mut keeper).held.state().unmanaged()
    };
    assert_eq!(tell(1 << 20, "private"), Bytes(1 << 20));
    assert_eq!(tell(0, "unplugged"), Bytes(0));
    assert_eq!(tell(1 << 20, &"x".repeat(257)), Bytes(0), "refused");

    let (key, socket) = process(&mut keeper, 8);
    let report = |name: &str| ClientToKeeper::Unmanaged { name: name.into(), len: Bytes(0), why: "private".into() };
    for (name, refused) in [("web", 0), ("a\u{1b}b", 1)] {
        ballast_sys::scm::send(&socket, &encode(&report(name)), &[]).expect("send");
        keeper.hear_client(key);
        assert_eq!(keeper.clients.faults(key), refused, "{name:?}");
    }
}

#[test]
fn no_reply_to_a_client_overtakes_the_one_to_an_earlier_request() {
    let (mut keeper, _dir) = keeper();
    let vm = new_vm(&mut keeper, "web");
    let (key, [socket, _control]) = process_of(&mut keeper, vm, 7);
    rustix::io::ioctl_fionbio(&socket, true).expect("FIONBIO");
    let heard = || {
        let next = || ballast_sys::scm::receive(&socket).ok().flatten();
        std::iter::from_fn(next).map(|message| decode(&message.bytes).expect("a reply")).collect::<Vec<_>>()
    };
    let ranges = |hva| ClientToKeeper::GuestRanges { hva: Hva(hva), ranges: Vec::new() };
    // An engine must carry out the first and the third. The second and the fourth are refused at once.
    let requests = [ClientToKeeper::Pin("test".into()), ranges(8), ClientToKeeper::MayPin, ranges(9)];
    for request in requests {
        ballast_sys::scm::send(&socket, &encode(&request), &[]).expect("send");
        keeper.hear_client(key);
    }
    let [pin, may_pin] = keeper.clients.numbers()[..] else { panic!("two wait") };
    keeper.answered(may_pin, Ok(()));
    assert_eq!(heard(), [], "the reply to the pin is the first");
    keeper.answered(pin, Ok(()));
    let told = heard();
    let refused =
        |reply: &KeeperToClient, hva: &str| matches!(reply, KeeperToClient::Refused(why) if why.ends_with(hva));
    let [KeeperToClient::Ok, second, KeeperToClient::Ok, fourth] = &told[..] else { panic!("{told:?}") };
    assert!(refused(second, "0x8") && refused(fourth, "0x9"), "{told:?}");
}

#[test]
fn the_next_engine_is_not_told_of_memory_that_a_process_waits_to_unplug() {
    let (mut keeper, _dir) = keeper();
    let vm = new_vm(&mut keeper, "web");
    let (key, _sockets) = process_of(&mut keeper, vm, 7);
    unplug(&mut keeper, key);
    let unplugged = keeper.unplugs_of(vm);
    assert_eq!(unplugged, [(7, Hva(0), 0)]);
    let view = keeper.clients.view(key).expect("a view");
    let spans = |pid| match add_view(pid, view, &unplugged, None).0 {
        Order::AddView { spans, .. } => spans.len(),
        order => panic!("{order:?}"),
    };
    assert_eq!((spans(7), spans(8)), (0, 1), "another process has not unplugged it");
}

#[test]
fn only_a_process_of_its_user_or_of_root_joins_a_vm() {
    let (mut keeper, _dir) = keeper();
    let own = || ram(FileId { dev: 1, ino: 2 }, 0);
    let vm = add_vm(&mut keeper, "web", 7);
    first_vm(&mut keeper).held.number(vec![own()], true, &mut Vec::new()).expect("its RAM");
    let known = |uid| keeper.known(&attach_as("x", None), uid, &[own()]);
    assert_eq!([7, 0].map(|uid| known(uid).expect("not refused")), [Some(vm), Some(vm)]);
    let refused = known(8).expect_err("another user's").to_string();
    assert!(refused.contains("of user 7"), "{refused}");
    let escrow = first_vm(&mut keeper).held.escrow().expect("escrow");
    let (mut second, _dir) = self::keeper();
    let resumed = second.resume(&attach_as("web", Some(vm)), sent_back(&escrow), 7).expect("resumed");
    second.vms.add(resumed);
    assert_eq!(second.vms.must_wait(Some(vm), &[own()]), None, "it returns itself");
}
