//! Memory that is freed without a message to an engine, against a scripted keeper and engine.

mod double;

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use ballast_base::wire::{ClientToEngine, EngineToClient};
use ballast_base::{Bytes, HUGE_SIZE, Hva};
use ballast_client::{Client, DiscardError, Timing};
use ballast_sys::{Mapping, memfd};
use double::{Keeper, Session, hva, pages};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const UNIT: u64 = HUGE_SIZE as u64;

struct Stage {
    keeper: Keeper,
    client: Client,
    session: Session,
    base: Hva,
    file: OwnedFd,
    _map: Mapping,
}

/// A client with RAM of four units, all of it in DRAM. `is_first`: it is the first process of its VM.
fn stage(is_first: bool) -> Option<Stage> {
    let keeper = Keeper::start()?;
    let file = memfd::create("guest-ram", Bytes(4 * UNIT)).expect("memfd");
    let map = Mapping::shared(&file, 0, 4 * HUGE_SIZE).expect("map");
    map.words(0, 4 * HUGE_SIZE / 8).iter().for_each(|word| word.store(7, std::sync::atomic::Ordering::Relaxed));
    let base = hva(map.addr());
    let builder = Client::builder()
        .name("web-1")
        .socket(&keeper.path)
        .region(file.try_clone().expect("dup"), base, Bytes(4 * UNIT), Bytes(0))
        .timing(Timing { answer: Duration::from_secs(60), ..Timing::default() });
    let (client, session) = std::thread::scope(|scope| {
        let client = scope.spawn(|| builder.attach().expect("attach"));
        let session = keeper.client();
        accept(&session, is_first);
        (client.join().expect("thread"), session)
    });
    session.ping(0);
    Some(Stage { keeper, client, session, base, file, _map: map })
}

fn accept(session: &Session, is_first: bool) {
    if is_first {
        session.accept_first();
    } else {
        session.accept();
    }
}

impl Stage {
    /// Frees this page of this unit. Returns whether an engine was asked.
    fn asks(&self, unit: u64, page: u64) -> bool {
        let range = (self.base + unit * UNIT + pages(page), pages(1));
        let asked = std::thread::scope(|scope| {
            let freed = scope.spawn(|| drop(self.client.freeing(&[range]).expect("it may be freed")));
            let asked = self.session.acknowledge_discards(|| freed.is_finished());
            freed.join().expect("thread");
            asked
        });
        // A message that came last would be taken for the reply.
        self.session.ping(1);
        assert!(asked.is_empty() || asked == [range], "{asked:?}");
        !asked.is_empty()
    }

    fn another_keeper(self, is_first: bool) -> Self {
        let away = self.keeper.die();
        drop(self.session);
        let keeper = Keeper::restart(away);
        let session = keeper.client();
        accept(&session, is_first);
        session.ping(2);
        Self { keeper, session, ..self }
    }

    fn zap(&self, unit: u64) {
        assert_eq!(self.session.zap(9, vec![(self.base + unit * UNIT + pages(3), pages(1))]), None);
    }
}

#[test]
fn memory_that_was_never_zapped_is_freed_without_a_message_and_the_rest_is_not() {
    let Some(stage) = stage(true) else { return };
    assert!(!stage.asks(0, 0) && !stage.asks(1, 511));
    stage.zap(1);
    assert!(stage.asks(1, 0) && stage.asks(1, 511), "all of the unit");
    assert!(!stage.asks(0, 511) && !stage.asks(2, 0), "its neighbours");
    let outside = stage.client.freeing(&[(stage.base + 4 * UNIT, pages(1))]);
    assert!(matches!(outside, Err(DiscardError::Invalid(_))), "{outside:?}");
    drop(stage.client.freeing(&[]).expect("nothing"));
}

#[test]
fn a_unit_that_an_engine_restored_is_freed_without_a_message_until_its_next_zap() {
    let Some(stage) = stage(true) else { return };
    let settled = |from: u64, len: u64| {
        stage.session.tell(&EngineToClient::Settled { range: (stage.base + from, len) });
        stage.session.ping(3);
    };
    (0..4).for_each(|unit| stage.zap(unit));
    settled(UNIT, UNIT);
    assert!(!stage.asks(1, 0) && !stage.asks(1, 511));
    assert!(stage.asks(0, 511) && stage.asks(2, 0), "its neighbours");
    settled(2 * UNIT + pages(1), 2 * UNIT);
    assert!(stage.asks(2, 511) && !stage.asks(3, 0), "a part of a unit does not count");
    stage.zap(1);
    assert!(stage.asks(1, 0));
}

#[test]
fn a_process_that_joins_a_vm_asks_for_all_that_it_frees() {
    let Some(stage) = stage(false) else { return };
    assert!(stage.asks(0, 0) && stage.asks(3, 0));
    let stage = stage.another_keeper(true);
    assert!(stage.asks(0, 0), "it is the first one now, but pages may be far");
}

#[test]
fn records_survive_the_keeper_and_end_if_another_process_was_there_first() {
    let Some(stage) = stage(true) else { return };
    stage.zap(1);
    let stage = stage.another_keeper(true);
    assert!(!stage.asks(0, 0) && stage.asks(1, 0));
    let stage = stage.another_keeper(false);
    assert!(stage.asks(0, 0) && stage.asks(2, 0));
}

#[test]
fn ram_that_was_plugged_is_asked_for() {
    let Some(stage) = stage(true) else { return };
    let file = memfd::create("plugged", Bytes(UNIT)).expect("memfd");
    let map = Mapping::shared(&file, 0, HUGE_SIZE).expect("map");
    let plugged = hva(map.addr());
    std::thread::scope(|scope| {
        let added = scope.spawn(|| stage.client.add_region(file, plugged, Bytes(UNIT), Bytes(0)));
        stage.session.request();
        stage.session.answer(&ballast_base::wire::KeeperToClient::Ok);
        added.join().expect("thread").expect("added");
        let freed = scope.spawn(|| drop(stage.client.freeing(&[(plugged, pages(1))]).expect("it may be freed")));
        let asked = stage.session.acknowledge_discards(|| freed.is_finished());
        assert_eq!(asked, [(plugged, pages(1))]);
        freed.join().expect("thread");
    });
}

fn service_waits() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").expect("tasks").flatten().map(|task| task.path());
    let is_it = |path: &std::path::PathBuf| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim() == "ballast-client")
    };
    let calls = tasks.filter(is_it).filter_map(|path| std::fs::read_to_string(path.join("syscall")).ok());
    calls.filter_map(|text| text.split(' ').next()?.trim().parse::<i64>().ok()).any(|call| call == libc::SYS_futex)
}

#[test]
fn a_zap_waits_until_the_vmm_has_freed_its_memory() {
    let Some(stage) = stage(true) else { return };
    let range = (stage.base, pages(2));
    let readable = || {
        let mut fds = [PollFd::new(&stage.session.control, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).expect("poll") > 0
    };
    let held = stage.client.freeing(&[range]).expect("it may be freed");
    stage.session.tell(&EngineToClient::Zap { seq: 5, ranges: vec![range] });
    while !service_waits() {
        assert!(!readable(), "it was zapped while the VMM frees it");
        std::thread::yield_now();
    }
    assert!(!readable());
    memfd::punch(stage.file.as_fd(), 0, pages(2)).expect("punch");
    drop(held);
    assert_eq!(stage.session.hear(), ClientToEngine::Zapped { seq: 5, error: None, kept: vec![] });
    assert!(stage.asks(0, 7), "it was noted");
}
