//! The keeper without VMMs, and with a program in place of its engine that takes no orders.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ballast_base::wire::{Attach, ClientToKeeper, KeeperToClient, Span, VmId, decode, encode};
use ballast_base::{Bytes, Extents, Hva};
use ballast_handover::orders::Order;
use ballast_handover::table::Lost;
use ballast_sys::memfd::{self, FileId};
use ballast_sys::process::Process;
use ballast_testkit::program::install_script;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::admit::{Escrow, Ram};
use crate::client::{Client, ClientView};
use crate::clients::FORGET_EVERY;
use crate::closer::SentFd;
use crate::engine::Who;
use crate::engine_child::{add_view, open_order};
use crate::fence;
use crate::keeper::Keeper;
use crate::options::Options;
use crate::program::Program;
use crate::regions::{At, Kin, VmEntry};
use crate::run::listen;
use crate::store_files::Files;
use crate::waiting::{Answer, Asked};

pub(crate) const LOST: Lost = Lost { flags: 0, word: 0 };

/// A keeper whose engine sleeps, and the directory of that program.
fn keeper() -> (Keeper, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let program = dir.path().join("engine");
    install_script(&program, "exec sleep 1000");
    let (api, _) = ballast_sys::scm::pair().expect("socket pair");
    let starter = ballast_sys::spawn::Starter::new().expect("a starter");
    let program = Program::at(program).expect("a program");
    (Keeper::new(Options::default(), program, starter, api), dir)
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

/// A process with a view of this VM, which maps region 0 at 0; and the other end of its socket.
fn process_of(keeper: &mut Keeper, vm: VmId, pid: u32) -> (u64, OwnedFd) {
    let (ours, theirs) = ballast_sys::scm::pair().expect("socket pair");
    let sent = |fd| SentFd::new(fd, 0, keeper.closer.clone());
    let (control, _) = ballast_sys::scm::pair().expect("socket pair");
    let spans = vec![(Span { hva: Hva(0), len: Bytes(1 << 20) }, 0)];
    let view = ClientView { vm, uffds: Vec::new(), uffd_features: 0, control: Arc::new(sent(control)), spans };
    let (socket, since, key) = (sent(ours), Instant::now(), u64::from(pid));
    keeper.clients.insert(key, Client { socket, pid, uid: 0, view: Some(view), since, faults: 0, owed: [None].into() });
    (key, theirs)
}

/// 1 MiB of RAM in a file whose identity is not checked.
fn ram(keeper: &Keeper, file: FileId, offset: u64) -> Ram {
    let fd = memfd::create("ballast-test", Bytes(0)).expect("memfd");
    Ram {
        span: Span { hva: Hva(0), len: Bytes(1 << 20) },
        guest_address: None,
        extents: Extents::one(Bytes(offset), Bytes(1 << 20)).expect("good"),
        files: vec![(Arc::new(SentFd::new(fd, 0, keeper.closer.clone())), file)],
    }
}

fn new_vm(keeper: &mut Keeper, name: &str) -> VmId {
    let entry = VmEntry::create(&attach_as(name, None), 0, &keeper.closer).expect("state and arena");
    let id = entry.state.id();
    keeper.vms.push(entry);
    id
}

/// The files that a client brings back to this keeper, as admitted.
fn sent_back(keeper: &Keeper, escrow: &[std::os::fd::OwnedFd]) -> Escrow {
    let back = |at: usize| {
        let fd = memfd::reopen(escrow[at].as_fd(), true).expect("reopen");
        SentFd::new(fd, 0, keeper.closer.clone())
    };
    Escrow { state: back(0), stores: vec![Files::ram(back(1))] }
}

fn engine_of(keeper: &Keeper) -> Process {
    keeper.engine.as_ref().expect("an engine").process
}

/// End the engine and have the keeper see it.
fn end_engine(keeper: &mut Keeper) {
    let pidfd = fence::kill(engine_of(keeper)).expect("end the engine").expect("it was there");
    poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], None).expect("poll");
    keeper.reap_engine();
}

#[test]
fn a_state_file_names_its_engine_before_the_engine_has_heard_of_the_vm() {
    let (mut keeper, _dir) = keeper();
    let before = new_vm(&mut keeper, "before");
    assert_eq!(keeper.vms[0].state.engine(), None);
    keeper.keep_engine();
    let after = new_vm(&mut keeper, "after");
    keeper.hand_over(after, None);
    // It sleeps and takes no order, so whatever is in the state files the keeper wrote.
    for _ in 0..2 {
        let Process { pid, start } = engine_of(&keeper);
        for id in [before, after] {
            assert_eq!(keeper.vm(id).expect("known").state.engine(), Some((pid, start)));
        }
        end_engine(&mut keeper);
        while keeper.engine.is_none() {
            keeper.keep_engine();
            std::thread::yield_now();
        }
    }
    end_engine(&mut keeper);
}

#[test]
fn a_later_keeper_ends_an_engine_that_was_only_about_to_open_the_vm() {
    let (mut first, _dir) = keeper();
    let id = new_vm(&mut first, "web");
    first.keep_engine();
    let late = engine_of(&first);
    let escrow = first.vms[0].escrow().expect("escrow");

    let (mut second, _dir) = keeper();
    let sent = sent_back(&second, &escrow);
    let resumed = second.resume(&attach_as("web", Some(id)), sent, 0).expect("resumed");
    assert_eq!(resumed.state.id(), id);
    let engine = first.engine.as_ref().expect("the keeper does not know yet");
    second.vms.push(resumed);
    second.keep_engine();
    while second.vms[0].fenced.is_some() {
        second.tend_fences();
        std::thread::yield_now();
    }
    assert_ne!(second.vms[0].state.engine(), Some((late.pid, late.start)), "it has another engine");
    // It was killed, though no thread of it worked for the VM yet.
    poll(&mut [PollFd::from_borrowed_fd(engine.child.pidfd(), PollFlags::IN)], None).expect("poll");
    first.reap_engine();
    end_engine(&mut second);
}

#[test]
fn a_vm_whose_last_engine_lives_returns_when_ours_serves_and_one_whose_engine_is_dead_at_once() {
    let (mut first, _dir) = keeper();
    let id = new_vm(&mut first, "web");
    let escrow = first.vms[0].escrow().expect("escrow");
    let (mut second, _dir) = keeper();
    let sent = sent_back(&second, &escrow);
    let ram = [ram(&second, FileId { dev: 1, ino: 2 }, 0)];
    let ranges = Ram::ranges(&ram);
    assert_eq!(second.must_wait_for_engine(&sent, &ranges), None, "it has no engine");
    first.keep_engine();
    first.hand_over(id, None);
    second.must_wait_for_engine(&sent, &ranges).expect("there is no engine of ours");
    second.must_wait(None, &ram).expect("its RAM becomes no other VM's meanwhile");
    assert_eq!(second.must_wait(Some(id), &ram), None);
    second.keep_engine();
    second.must_wait_for_engine(&sent, &ranges).expect("it does not serve yet");
    let engine = second.engine.as_mut().expect("an engine");
    (engine.pulse.starting, engine.told_to_serve) = (None, true);
    assert_eq!(second.must_wait_for_engine(&sent, &ranges), None);
    second.engine.as_mut().expect("an engine").told_to_serve = false;
    end_engine(&mut first);
    assert_eq!(second.must_wait_for_engine(&sent, &ranges), None, "nobody serves it");
    end_engine(&mut second);
}

#[test]
fn a_vm_that_the_engine_could_not_open_to_close_it_is_given_to_it_again() {
    let (mut keeper, _dir) = keeper();
    keeper.keep_engine();
    let vm = new_vm(&mut keeper, "web");
    keeper.hand_over(vm, None);
    keeper.close_vm(vm);
    let seq = keeper.closing[0].seq;
    assert!(!keeper.tend_closing(), "the engine closes it");
    keeper.closing[0].entry.state.take_over(1, 1, LOST).expect("it was open once");
    keeper.closed(seq, Err("no memory".into()));
    assert!(keeper.tend_closing(), "it waits");
    keeper.closing[0].again_at = Some(Instant::now());
    assert!(!keeper.tend_closing(), "the engine was given it again");
    keeper.closed(seq, Ok(()));
    assert!(keeper.closing.is_empty());
    end_engine(&mut keeper);
}

#[test]
fn a_control_socket_is_closed_by_the_keeper_and_only_when_the_engine_has_closed_the_vm() {
    let (mut keeper, _dir) = keeper();
    keeper.keep_engine();
    let vm = new_vm(&mut keeper, "web");
    keeper.hand_over(vm, None);
    let (client, _theirs) = process_of(&mut keeper, vm, 1);
    let (ours, theirs) = ballast_sys::scm::pair().expect("socket pair");
    let control = Arc::new(SentFd::new(ours, 0, keeper.closer.clone()));
    keeper.clients.get_mut(&client).and_then(|client| client.view.as_mut()).expect("a view").control = control;
    keeper.drop_client(client, "is gone");
    let mut ends = [PollFd::new(&theirs, PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(poll(&mut ends, Some(&now)), Ok(0), "the engine may have it");
    keeper.closed(keeper.closing[0].seq, Ok(()));
    poll(&mut ends, None).expect("poll");
    assert!(ends[0].revents().contains(PollFlags::HUP));
    end_engine(&mut keeper);
}

#[test]
fn a_vm_whose_processes_go_while_it_waits_for_missing_regions_is_closed_by_an_engine_after_the_search() {
    let (mut keeper, _dir) = keeper();
    keeper.keep_engine();
    let vm = new_vm(&mut keeper, "web");
    let (ours, theirs) = (memfd::create("ballast-test", Bytes(1 << 20)), memfd::create("ballast-test", Bytes(1 << 20)));
    let [ours, theirs] = [ours, theirs].map(|file| file.expect("memfd"));
    let entry = &mut keeper.vms[0];
    for file in [&ours, &theirs] {
        let id = memfd::file_id(file).expect("stat");
        entry.state.add_region(&[id], &Extents::one(Bytes(0), Bytes(1 << 20)).expect("good"), None).expect("a region");
        entry.ram.push(None);
    }
    entry.state.take_over(1, 1, LOST).expect("it was open once");
    // A process of this test maps one of them.
    let mapped = ballast_sys::Mapping::shared(&theirs, 0, 1 << 20).expect("map");
    keeper.search_or_hand_over(vm);
    assert!(keeper.vms[0].search.is_some(), "it waits for its regions");
    keeper.close_vm(vm);
    assert!(keeper.tend_closing() && !keeper.closing[0].given, "it is not forgotten");
    drop(mapped);
    let begun = Instant::now();
    while keeper.tend_closing() {
        assert!(begun.elapsed() < Duration::from_secs(60), "no engine gets it");
        std::thread::yield_now();
    }
    assert!(keeper.closing[0].given && keeper.closing[0].entry.search.is_none());
    keeper.reopened(vm);
    assert!(keeper.closing.is_empty(), "a process that returns has it again");
    end_engine(&mut keeper);
}

#[test]
fn what_an_engine_lacked_for_a_vm_is_remembered_if_it_has_the_vm_and_as_long_as_it_is_not_the_keepers() {
    let (mut keeper, _dir) = keeper();
    let vm = new_vm(&mut keeper, "web");
    let is_lost = |keeper: &Keeper| keeper.vms[0].lost.is_some();
    keeper.lost(Who::Next, vm);
    assert!(!is_lost(&keeper), "that engine has it not");
    keeper.vms[0].at = At::Next;
    keeper.lost(Who::Engine, vm);
    assert!(!is_lost(&keeper), "it has moved");
    keeper.lost(Who::Next, vm);
    keeper.vms[0].lost.as_mut().expect("it is to be tried again").again_at = Instant::now();
    assert!(keeper.tend_lost().is_some() && is_lost(&keeper), "orders of it go to the next engine");
    keeper.vms[0].at = At::Engine;
    assert!(keeper.tend_lost().is_none() && !is_lost(&keeper));
    // The keeper is to become another program: what is lost now is tried at once, and what is lost then after a pause.
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
    first.keep_engine();
    // As its engine would.
    let arena = first.vms[0].stores[0].iter().next().expect("an arena");
    arena::format(&arena::RAM, &**arena, 4).expect("laid out");
    let escrow = first.vms[0].escrow().expect("escrow");
    let (mut second, _dir) = keeper();
    for (at, ours, name) in [(0, state_file::FORMAT, "state file"), (1, arena::RAM.format, "arena")] {
        let file = std::fs::File::from(memfd::reopen(escrow[at].as_fd(), true).expect("reopen"));
        let newer = Stamp { version: 99, least_reader: 98 };
        file.write_all_at(&newer.to_word().to_le_bytes(), STAMP).expect("write");
        let sent = sent_back(&second, &escrow);
        let refused = second.resume(&attach_as("web", Some(id)), sent, 0).map(|_| ()).expect_err("too new");
        let said = format!("{name}: it has version 99 and needs a reader of at least 98");
        assert!(refused.contains(&said), "{refused}");
        file.write_all_at(&ours.stamp().to_word().to_le_bytes(), STAMP).expect("write");
    }
    let engine = first.engine.as_ref().expect("an engine");
    let lives = poll(&mut [PollFd::from_borrowed_fd(engine.child.pidfd(), PollFlags::IN)], Some(&Timespec::default()))
        .expect("poll");
    assert_eq!(lives, 0, "the engine that serves it was ended");
    end_engine(&mut first);
}

#[test]
fn a_resumed_vm_whose_name_is_taken_is_called_something_else_and_it_is_said() {
    let (mut first, _dir) = keeper();
    let id = new_vm(&mut first, "web");
    let escrow = first.vms[0].escrow().expect("escrow");
    let (mut second, _dir) = keeper();
    new_vm(&mut second, "web");
    let sent = sent_back(&second, &escrow);
    let resumed = second.resume(&attach_as("web", Some(id)), sent, 0).expect("resumed");
    assert_eq!((resumed.state.id(), resumed.state.name().as_str()), (id, "web-2"));
    assert!(matches!(&second.unsaid[..], [Order::Note { kind, .. }] if kind == "renamed"), "{:?}", second.unsaid);
    let refused = second.create(&attach_as("web", None), 0, std::process::id()).map(|_| ());
    refused.expect_err("a new VM must have a name of its own");
}

#[test]
fn an_engine_that_takes_no_orders_does_not_hold_up_its_keeper_and_gets_them_all_in_the_end() {
    let (mut keeper, _dir) = keeper();
    keeper.keep_engine();
    let note = |number: u32| Order::Note { vm: None, kind: "test".into(), message: number.to_string() };
    // The kernel's queue holds a few hundred at most.
    for number in 0..5000 {
        keeper.order(&note(number), &[]);
    }
    let engine = keeper.engine.as_mut().expect("an engine");
    let waiting = engine.orders.len();
    assert!(waiting > 0 && engine.interest().contains(PollFlags::OUT));
    engine.flush();
    assert_eq!(engine.orders.len(), waiting);
    let last = ballast_base::wire::decode::<Order>(&engine.orders[waiting - 1].0).expect("an order");
    assert_eq!(last, note(4999));
    end_engine(&mut keeper);
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
fn connections_that_never_attach_are_few_and_do_not_last() {
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
        keeper.accept(listener.as_fd());
    }
    assert_eq!(keeper.clients.len(), 64);
    keeper.tend_clients(now);
    assert_eq!(keeper.clients.len(), 64, "they have some time");
    keeper.tend_clients(Instant::now() + Duration::from_secs(11));
    assert_eq!(keeper.clients.len(), 0);
    drop(connections);
    let _late = connect();
    keeper.accept(listener.as_fd());
    assert_eq!(keeper.clients.len(), 1, "there is room again");
}

#[test]
fn a_user_with_many_vms_that_cannot_be_closed_waits_and_nobody_else_does() {
    let (mut keeper, _dir) = keeper();
    let close = |keeper: &mut Keeper, uid: u32, number: u32| {
        let attach = attach_as(&format!("vm-{uid}-{number}"), None);
        let mut entry = VmEntry::create(&attach, uid, &keeper.closer).expect("state and arena");
        let file = FileId { dev: u64::from(uid), ino: u64::from(number) };
        entry.append(&ram(keeper, file, 0)).expect("a region");
        let id = entry.state.id();
        keeper.vms.push(entry);
        keeper.close_vm(id);
        id
    };
    let waits = |keeper: &Keeper, uid, resume| keeper.must_wait_for_others(uid, resume).is_some();
    let first = close(&mut keeper, 7, 0);
    let many = |keeper: &mut Keeper, uid, numbers: std::ops::Range<u32>| {
        for number in numbers {
            close(keeper, uid, number);
        }
    };
    many(&mut keeper, 7, 1..63);
    assert!(!waits(&keeper, 7, None));
    many(&mut keeper, 7, 63..300);
    assert_eq!(keeper.closing.len(), 300, "none is forgotten: somebody may bring its RAM");
    assert_eq!(keeper.closing_ram(7), Bytes(300 << 20));
    assert!(waits(&keeper, 7, None) && waits(&keeper, 7, Some(VmId([9; 16]))));
    assert!(!waits(&keeper, 7, Some(first)), "it comes back as one of them");
    assert!(!waits(&keeper, 8, None) && keeper.closing_ram(8) == Bytes(0));
    many(&mut keeper, 0, 0..300);
    assert!(!waits(&keeper, 0, None), "root's VMs are everybody's");
}

#[test]
fn a_client_that_returns_as_one_vm_waits_for_the_ram_of_another_vm_that_is_closing() {
    let (mut keeper, _dir) = keeper();
    let file = |ino| FileId { dev: 1, ino };
    let ids: Vec<VmId> = [1, 2]
        .map(|number| {
            let id = new_vm(&mut keeper, &format!("vm-{number}"));
            let region = ram(&keeper, file(number), 0);
            let entry = keeper.vms.iter_mut().find(|vm| vm.state.id() == id).expect("just made");
            entry.append(&region).expect("a region");
            keeper.close_vm(id);
            id
        })
        .into();
    let of = |files: &[(u64, u64)]| -> Vec<Ram> {
        files.iter().map(|(ino, offset)| ram(&keeper, file(*ino), *offset)).collect()
    };
    assert_eq!(keeper.must_wait(Some(ids[0]), &of(&[(1, 0)])), None);
    for (vm, files) in [(None, [(3, 0), (1, 0)]), (Some(ids[0]), [(1, 0), (2, 4096)])] {
        keeper.must_wait(vm, &of(&files)).expect("another VM's");
    }
    assert_eq!(keeper.must_wait(None, &of(&[(1, 1 << 20), (2, 8 << 20)])), None, "another part of the files");
}

#[test]
fn a_region_that_no_engine_has_removed_keeps_its_files_and_a_removed_one_does_not() {
    let (mut keeper, _dir) = keeper();
    let vm = new_vm(&mut keeper, "web");
    let region = ram(&keeper, FileId { dev: 1, ino: 2 }, 0);
    keeper.vms[0].append(&region).expect("a region");
    keeper.vms[0].bring(0, region.files);
    for is_removed in [false, true] {
        let (key, _socket) = process_of(&mut keeper, vm, 7);
        let order = Order::RemoveRegion { seq: 1, vm, pid: 7, hva: Hva(0), region: Some(0) };
        let asked = Asked { client: key, order, answer: Answer::Ok };
        if is_removed {
            keeper.vms[0].state.remove_region(0);
        }
        keeper.answered(1, &asked, Ok(()));
        assert!(keeper.clients[&key].view.as_ref().expect("a view").spans.is_empty());
        let engine = Process { pid: 1, start: 1 };
        let (Order::OpenVm { files, .. }, _) = open_order(&mut keeper.vms[0], engine) else { panic!("another order") };
        assert_eq!((keeper.vms[0].ram[0].is_none(), files), (is_removed, u8::from(!is_removed)));
    }
}

#[test]
fn a_region_that_was_removed_after_its_last_process_was_gone_keeps_no_files() {
    let (mut keeper, _dir) = keeper();
    let vm = new_vm(&mut keeper, "web");
    let region = ram(&keeper, FileId { dev: 1, ino: 2 }, 0);
    keeper.vms[0].append(&region).expect("a region");
    keeper.vms[0].bring(0, region.files);
    let [(unplugs, _a), (stays, _b)] = [7, 8].map(|pid| process_of(&mut keeper, vm, pid));
    // It hangs up before the engine says that the region is removed; the other one has it, too.
    keeper.drop_client(unplugs, "is gone");
    keeper.vms[0].state.remove_region(0);
    keeper.tend_clients(Instant::now() + FORGET_EVERY);
    assert!(keeper.vms[0].ram[0].is_some(), "the other has it");
    keeper.clients.get_mut(&stays).expect("there").view.as_mut().expect("a view").spans.clear();
    keeper.tend_clients(Instant::now() + FORGET_EVERY * 2);
    assert!(keeper.vms[0].ram[0].is_none());
}

#[test]
fn ram_that_is_not_managed_is_a_figure_of_its_vm_and_a_whole_vm_needs_no_attach_to_report_it() {
    let (mut keeper, _dir) = keeper();
    let vm = new_vm(&mut keeper, "web");
    let (key, socket) = process_of(&mut keeper, vm, 7);
    let mut tell = |len, why: &str| {
        let message = ClientToKeeper::Unmanaged { name: "other".into(), len: Bytes(len), why: why.into() };
        ballast_sys::scm::send(&socket, &encode(&message), &[]).expect("send");
        keeper.hear_client(key);
        keeper.vms[0].state.unmanaged()
    };
    assert_eq!(tell(1 << 20, "private"), Bytes(1 << 20));
    assert_eq!(tell(0, "unplugged"), Bytes(0));
    assert_eq!(tell(1 << 20, &"x".repeat(257)), Bytes(0), "refused");

    keeper.clients.get_mut(&key).expect("it is there").view = None;
    let report = |name: &str| ClientToKeeper::Unmanaged { name: name.into(), len: Bytes(0), why: "private".into() };
    let faults = |keeper: &Keeper| keeper.clients[&key].faults;
    let before = faults(&keeper);
    for (name, refused) in [("web", 0), ("a\u{1b}b", 1)] {
        ballast_sys::scm::send(&socket, &encode(&report(name)), &[]).expect("send");
        keeper.hear_client(key);
        assert_eq!(faults(&keeper) - before, refused, "{name:?}");
    }
}

#[test]
fn no_reply_to_a_client_overtakes_the_one_to_an_earlier_request() {
    let (mut keeper, _dir) = keeper();
    let vm = new_vm(&mut keeper, "web");
    let (key, socket) = process_of(&mut keeper, vm, 7);
    keeper.clients.get_mut(&key).expect("it is there").owed.clear();
    rustix::io::ioctl_fionbio(&socket, true).expect("FIONBIO");
    let heard = || {
        let next = || ballast_sys::scm::receive(&socket).ok().flatten();
        std::iter::from_fn(next).map(|message| decode(&message.bytes).expect("a reply")).collect::<Vec<_>>()
    };
    let ranges = |hva| ClientToKeeper::GuestRanges { hva: Hva(hva), ranges: Vec::new() };
    // An engine has to carry out the first and the third. The second and the fourth are refused at once.
    let requests = [ClientToKeeper::Pin("test".into()), ranges(8), ClientToKeeper::MayPin, ranges(9)];
    for request in requests {
        ballast_sys::scm::send(&socket, &encode(&request), &[]).expect("send");
        keeper.hear_client(key);
    }
    let [pin, may_pin] = keeper.pending.keys().copied().collect::<Vec<_>>()[..] else { panic!("two wait") };
    let done = |keeper: &mut Keeper, seq| {
        let asked = keeper.pending.remove(&seq).expect("it waits");
        keeper.answered(seq, &asked, Ok(()));
    };
    done(&mut keeper, may_pin);
    assert_eq!(heard(), [], "the reply to the pin is the first");
    done(&mut keeper, pin);
    let told = heard();
    let refused =
        |reply: &KeeperToClient, hva: &str| matches!(reply, KeeperToClient::Refused(why) if why.ends_with(hva));
    let [KeeperToClient::Ok, second, KeeperToClient::Ok, fourth] = &told[..] else { panic!("{told:?}") };
    assert!(refused(second, "0x8") && refused(fourth, "0x9"), "{told:?}");
    assert!(keeper.clients[&key].owed.is_empty());
}

#[test]
fn the_next_engine_is_not_told_of_memory_that_a_process_waits_to_unplug() {
    let (mut keeper, _dir) = keeper();
    let vm = new_vm(&mut keeper, "web");
    let (key, _socket) = process_of(&mut keeper, vm, 7);
    let order = Order::RemoveRegion { seq: 1, vm, pid: 7, hva: Hva(0), region: Some(0) };
    keeper.pending.insert(1, Asked { client: key, order, answer: Answer::Ok });
    let unplugged = keeper.unplugs_of(vm);
    assert_eq!(unplugged, [(7, Hva(0), 0)]);
    let view = keeper.clients[&key].view.as_ref().expect("a view");
    let spans = |pid| match add_view(pid, view, &unplugged, None).0 {
        Order::AddView { spans, .. } => spans.len(),
        order => panic!("{order:?}"),
    };
    assert_eq!((spans(7), spans(8)), (0, 1), "another process has not unplugged it");
}

/// The same RAM as another descriptor says, under the numbers of `file`.
fn ram_in(keeper: &Keeper, file: FileId, fd: &OwnedFd) -> Ram {
    let fd = SentFd::new(fd.try_clone().expect("duplicate"), 0, keeper.closer.clone());
    Ram { files: vec![(Arc::new(fd), file)], ..ram(keeper, file, 0) }
}

#[test]
fn another_file_with_the_numbers_of_a_vms_ram_joins_no_vm_and_keeps_none_away() {
    let (mut keeper, _dir) = keeper();
    let [own, forged] = [(); 2].map(|()| memfd::create("ballast-test", Bytes(1 << 20)).expect("memfd"));
    let file = memfd::file_id(&own).expect("stat");
    // Another file, of which the keeper reads these numbers: no test can turn the counter of inodes.
    let [own, forged] = [&own, &forged].map(|fd| ram_in(&keeper, file, fd));
    let mut entry = VmEntry::create(&attach_as("web", None), 7, &keeper.closer).expect("state and arena");
    let again = |ram: &Ram| Ram { files: ram.files.clone(), extents: ram.extents.clone(), ..*ram };
    entry.number(vec![again(&own)], true, &mut Vec::new()).expect("its RAM");
    keeper.vms.push(entry);
    let known = |keeper: &Keeper, uid, ram: &Ram| keeper.known(&attach_as("x", None), uid, &[again(ram)]);
    assert_eq!([7, 0].map(|uid| known(&keeper, uid, &own)), [Ok(Some(0)), Ok(Some(0))]);
    let refused = known(&keeper, 8, &own).expect_err("another user's");
    assert!(refused.contains("of user 7"), "{refused}");
    known(&keeper, 7, &forged).expect_err("another file");
    keeper.vms[0].number(vec![again(&forged)], true, &mut Vec::new()).expect_err("not even as a part of that VM");
    assert_eq!(keeper.vms[0].kin(&[again(&forged)]), Kin::Other);
    // The other way round: the other file is there first, and the VM with the file returns.
    assert_eq!(keeper.must_wait(Some(VmId([9; 16])), &[again(&forged)]), None);
    let vm = keeper.vms[0].state.id();
    keeper.vms[0].ram[0] = None;
    keeper.must_wait(None, &[again(&own)]).expect("its process has not returned, so nothing is proven");
    assert_eq!(keeper.must_wait(Some(vm), &[again(&own)]), None, "it returns itself");
}
