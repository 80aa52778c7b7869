//! Two engines that serve the faults of one VM at the same time, during a hand-over: two `Vm`s of the
//! same state file, userfaultfd and store. The guest is threads of this test. Needs root (userfaultfd).

use crate::common;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ballast_base::store::FILE_STORE;
use ballast_base::units::MIB;
use ballast_base::wire::{self, ClientToEngine, EngineToClient};
use ballast_base::{Bytes, PAGE_SIZE, PageCount, PageIdx};
use ballast_handover::state_file::StateFile;
use ballast_page::page_state::Word;
use ballast_pager::vm::Vm;
use ballast_pager::vm::client_peer::ClientPeer;
use ballast_pager::vm::far::stores::{SlowTier, Stores};
use ballast_pager::vm::stats::Counter;
use ballast_pager::vm::view::View;
use ballast_store::{Budget, FileOptions, FileStore};
use ballast_sys::scm;
use ballast_testkit::skip;
use ballast_testkit::{FaultyStore, NullStore};
use ballast_testvm::Finally;
use common::{Rig, churn, mapped_at, serve_zaps, until};

const RAM: Bytes = Bytes(16 * MIB);
const LIMIT: Bytes = Bytes(4 * MIB);

/// Opens the VM of this rig a second time, with these stores, and serves its userfaultfds, too.
fn beside(rig: &Rig, last: &Vm, stores: Stores, number: u64) -> Arc<Vm> {
    let (vm, client) = beside_with_client(rig, last, stores, number);
    let guest = rig.guest.clone();
    std::thread::spawn(move || serve_zaps(&client, &guest));
    vm
}

/// Like [`beside`]; also returns the client's end of the control socket.
fn beside_with_client(rig: &Rig, last: &Vm, stores: Stores, number: u64) -> (Arc<Vm>, OwnedFd) {
    let state = StateFile::open(last.state.fd().try_clone_to_owned().expect("dup")).expect("open");
    state.name_beside(std::process::id(), number);
    let epoch = state.open_beside(std::process::id(), number);
    let vm = Vm::new(state, epoch, stores, last.tuning, last.reporter());
    for region in last.regions() {
        vm.open_region(region.files()).expect("region");
    }
    let vm = Arc::new(vm);
    vm.follow_stores().expect("read");
    vm.start_beside().expect("start");
    let (ours, theirs) = scm::pair().expect("socket pair");
    let uffds = rig.view.uffds().iter().map(|uffd| uffd.try_clone().expect("dup")).collect();
    let peer = Arc::new(ClientPeer::new(theirs, epoch));
    let view = Arc::new(View::new(std::process::id(), uffds, rig.uffd_features, peer));
    let len = PageCount(rig.pages).bytes();
    vm.add_view(view, &mapped_at(rig.addr(0), len)).expect("view");
    (vm, ours)
}

/// Moves the VM of this rig from engine to engine while its guest touches all of it. `stores` makes each engine's
/// stores from those of the last one.
fn moves(rig: &Rig, stores: impl Fn(&Stores) -> Stores) {
    rig.set_limit(Some(LIMIT));
    let is_filed = |vm: &Vm| vm.stores.slow().iter().all(|tier| tier.store.usage().pages > 0);
    let (stop, touched) = (AtomicBool::new(false), AtomicU64::new(0));
    let more = |what: &str| {
        let from = touched.load(Ordering::Relaxed);
        until(what, || touched.load(Ordering::Relaxed) >= from + 500);
    };
    let last = std::thread::scope(|scope| {
        for thread in 0..2 {
            let (stop, touched) = (&stop, &touched);
            scope.spawn(move || {
                churn(rig, thread, 2, || {
                    touched.fetch_add(1, Ordering::Relaxed);
                    stop.load(Ordering::Relaxed)
                });
            });
        }
        let _end = Finally(|| stop.store(true, Ordering::Relaxed));
        let mut vm = rig.vm.clone();
        for number in 2..22 {
            until("pages go", || vm.stats().get(Counter::Far) > 0 && is_filed(&vm));
            more("the guest goes on with one engine");
            vm.serve_faults_only();
            more("the guest goes on with one that serves faults only");
            let next = beside(rig, &vm, stores(&vm.stores), number);
            more("the guest goes on with two");
            vm.stop();
            more("the guest goes on with one that follows");
            next.state.has_left();
            next.own_stores().expect("read");
            next.start().expect("start");
            vm = next;
        }
        until("pages go", || vm.stats().get(Counter::Far) > 0);
        vm
    });
    last.serve_faults_only();
    last.stop();
    let gauges = || [Counter::Far, Counter::Zero, Counter::Poisoned].map(|gauge| last.stats().get(gauge));
    let before = gauges();
    assert!(before[0] + before[1] > 0, "nothing is far");
    let copies: u64 = last.stores.tiers().map(|tier| tier.store.usage().pages).sum();
    assert_eq!(copies, before[0], "a copy is nobody's");
    let recovered = last.recover().expect("recover");
    assert_eq!((gauges(), recovered.lost, recovered.mended), (before, 0, 0));
}

#[test]
fn while_a_vm_moves_two_engines_serve_its_faults_and_no_byte_is_lost() {
    moves(&Rig::new(RAM, Bytes(64 * MIB), Duration::from_millis(2)), Stores::clone);
}

#[test]
fn while_a_vm_moves_both_engines_serve_faults_from_one_file_store() {
    let budget = || FileOptions::new(Budget::new(Bytes(64 * MIB)));
    let made = FileStore::create(&std::env::temp_dir(), budget());
    let Ok((first, place, index)) = made.inspect_err(|error| skip("disk", error)) else { return };
    let dup = |fd: &OwnedFd| fd.try_clone().expect("dup");
    let soon = Duration::from_millis(10);
    let rig = Rig::spilling(RAM, Bytes(64 * MIB), Duration::from_millis(2), Arc::new(first), soon);
    moves(&rig, |last| {
        let file = FileStore::open(dup(&place), dup(&index), budget()).expect("open");
        last.clone().with(SlowTier::new(FILE_STORE, "file store", Arc::new(file)))
    });
}

#[test]
fn faults_that_wait_for_a_store_are_served_by_the_other_engine_after_a_close() {
    // Either engine may read a fault: several tries, so that the leaving one has some.
    (0..4).for_each(|_| closes_while_faults_wait());
}

fn closes_while_faults_wait() {
    /// More than two engines read from a slow store at once.
    const THREADS: u64 = 64;
    let (store, faults) = FaultyStore::new(NullStore::new(Bytes(64 * MIB)));
    let soon = Duration::from_millis(10);
    let rig = Rig::spilling(RAM, Bytes(64 * MIB), Duration::from_millis(2), Arc::new(store), soon).squeezed(LIMIT);
    let is_filed = |page: &u64| rig.is_in(FILE_STORE, *page);
    // These pages are distant from each other, so that none is read ahead.
    let filed = || (0..rig.pages).step_by(4).filter(is_filed).take(THREADS as usize).collect::<Vec<_>>();
    until("pages go to the slow store", || filed().len() as u64 == THREADS);
    rig.vm.serve_faults_only();
    let next = beside(&rig, &rig.vm, rig.vm.stores.clone(), 2);
    faults.stall_gets();
    let touched = Arc::new(AtomicU64::new(0));
    for page in filed() {
        let (guest, touched) = (rig.guest.clone(), touched.clone());
        std::thread::spawn(move || {
            guest.words(page as usize * PAGE_SIZE, 1)[0].load(Ordering::Relaxed);
            touched.fetch_add(1, Ordering::Relaxed);
        });
    }
    let shard = &rig.view.uffds()[0];
    until("all faults are read", || shard.unanswered().expect("fdinfo") == THREADS);
    std::thread::scope(|scope| {
        let closes = scope.spawn(|| rig.vm.stop());
        until("it is told to", || rig.vm.is_stopping());
        faults.release();
        closes.join().expect("it closes the VM");
    });
    until("every thread goes on", || touched.load(Ordering::Relaxed) == THREADS);
    next.stop();
}

/// A killed engine has left a page locked. The other engine is asked to discard that page and those before it. Returns
/// the rig, the other engine's VM and the client's end, once the discard has locked the first page.
fn discard_of_a_page_that_a_dead_engine_locked() -> (Rig, Arc<Vm>, OwnedFd) {
    let rig = Rig::new(RAM, Bytes(64 * MIB), Duration::from_millis(2)).filled();
    rig.vm.serve_faults_only();
    let (next, client) = beside_with_client(&rig, &rig.vm, rig.vm.stores.clone(), 2);
    let region = rig.vm.region(0).expect("region");
    let cell = region.granule(PageIdx(5)).cell();
    cell.reset(cell.load().locked());
    let ranges = vec![(rig.addr(0), 64 * PAGE_SIZE as u64)];
    scm::send(&client, &wire::encode(&ClientToEngine::Discard { seq: 7, ranges }), &[]).expect("send");
    until("it locks what comes before", || region.word(PageIdx(0)).is_locked());
    drop(region);
    (rig, next, client)
}

#[test]
fn a_discard_that_meets_a_dead_engines_lock_blocks_nothing_and_completes_later() {
    let (rig, next, client) = discard_of_a_page_that_a_dead_engine_locked();
    // Waits until no page moves, as other requests of a client do.
    next.set_may_pin();
    let region = rig.vm.region(0).expect("region");
    assert!(region.word(PageIdx(5)).is_locked(), "it is nobody else's");
    // Unlocks the page, as recovery does.
    let cell = region.granule(PageIdx(5)).cell();
    cell.reset(cell.load().unlocked());
    let reply = scm::receive(&client).expect("receive").expect("open");
    assert_eq!(wire::decode(&reply.bytes), Ok(EngineToClient::DiscardDone { seq: 7, error: None }));
    assert!((0..64).all(|page| rig.guest.words(page * PAGE_SIZE, 1)[0].load(Ordering::Relaxed) == 0));
    next.stop();
}

#[test]
fn an_engine_closes_a_vm_whose_discard_meets_the_lock_of_a_dead_engine() {
    let (rig, next, _client) = discard_of_a_page_that_a_dead_engine_locked();
    next.stop();
    let region = rig.vm.region(0).expect("region");
    assert!((0..5).all(|page| !region.word(PageIdx(page)).is_locked()), "it leaves no lock");
}

#[test]
fn a_word_that_was_lost_in_the_mapping_of_another_engine_is_found() {
    let rig = Rig::new(RAM, Bytes(64 * MIB), Duration::from_millis(2));
    rig.vm.stop();
    assert!(!rig.vm.has_lost_words().expect("read"));
    let (state, region) = (rig.vm.state.fd(), &rig.vm.state.regions()[0]);
    let lost = Word::LOST.bits().to_le_bytes();
    rustix::io::pwrite(state, &lost, region.words_at() + 700 * lost.len() as u64).expect("written");
    assert!(rig.vm.has_lost_words().expect("read") && rig.vm.lost() == 0);
}
