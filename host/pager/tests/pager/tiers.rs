//! Stores as a set: a third store beside RAM and file, against the real kernel. Needs root (userfaultfd).

use crate::common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ballast_base::store::{FILE_STORE, RAM_STORE, RegionKey};
use ballast_base::units::MIB;
use ballast_base::wire::VmId;
use ballast_base::{Bytes, PageIdx};
use ballast_pager::vm::Hold;
use ballast_pager::vm::far::stores::SlowTier;
use ballast_pager::vm::stats::Counter;
use ballast_store::{PutOutcome, SlowStore};
use ballast_testkit::{NullStore, pages};
use common::third::{THIRD, ThirdStore};
use common::{AMPLE, LIMIT, QUICK, RAM, Rig, SOON, restore_for, until};

/// The one line that a new store needs here.
fn third() -> SlowTier {
    SlowTier::new(THIRD, "third store", Arc::new(ThirdStore::new(AMPLE)))
}

#[test]
fn pages_move_to_a_third_store_and_are_restored_with_every_byte() {
    let rig = Rig::tiered(RAM, AMPLE, QUICK, vec![third()], SOON).filled();
    rig.squeeze_into(THIRD, LIMIT);
    rig.check_bytes();
    assert!(rig.vm.stats().get(Counter::FaultFile) > 0, "some came from there");
    rig.squeeze_into(THIRD, LIMIT);
    restore_for(&rig.vm, Hold::Pinned).expect("pin");
    assert_eq!((rig.resident(), rig.vm.stats().get(Counter::Far)), (RAM, 0));
    rig.check_bytes();
    until("no copy is left", || rig.copies() == 0);
}

#[test]
fn a_slow_store_is_read_by_runs_for_sequential_faults_only() {
    let store = Arc::new(ThirdStore::new(AMPLE));
    let rig = Rig::tiered(RAM, AMPLE, QUICK, vec![SlowTier::new(THIRD, "third store", store.clone())], SOON).filled();
    let is_in_third = |page: &u64| rig.is_in(THIRD, *page);
    // Returns the numbers of requests and of far pages for these touches.
    let asked = |touches: &mut dyn Iterator<Item = u64>| {
        rig.squeeze_into(THIRD, LIMIT);
        rig.hold_still();
        rig.set_limit(None);
        let touches: Vec<u64> = touches.collect();
        let far: Vec<u64> = touches.iter().copied().filter(is_in_third).collect();
        let before = store.requests.load(Ordering::Acquire);
        assert!(touches.iter().all(|page| rig.holds(*page, 1)), "a byte was lost");
        // The guest continues before the words change.
        until("all are back", || !far.iter().any(is_in_third));
        rig.check_census();
        rig.vm.hold(Hold::Shared, None);
        (store.requests.load(Ordering::Acquire) - before, far.len() as u64)
    };
    let (requests, far) = asked(&mut (0..rig.pages));
    // Busy pages are requested again.
    assert!(requests < far / 3, "{requests} requests for {far} pages");
    let longest = store.longest.load(Ordering::Acquire);
    assert!((10..=65).contains(&longest), "{longest} pages at once");
    // One page of each 64 KiB is touched.
    let windows = rig.pages / 16;
    let (requests, far) = asked(&mut (0..windows).map(|at| at * 2531 % windows * 16));
    assert!(requests >= 2 * far, "{requests} requests for {far} pages, each of which is busy at first");
}

#[test]
fn a_silent_store_is_reported_and_the_wait_goes_on_until_it_replies() {
    let store = Arc::new(ThirdStore::new(AMPLE));
    let tier = SlowTier::within(Duration::from_millis(1), THIRD, "third store", store.clone());
    let rig = Rig::tiered(RAM, AMPLE, QUICK, vec![tier], SOON).filled();
    rig.squeeze_into(THIRD, LIMIT);
    rig.hold_still();
    store.set_silent(true);
    let is_in_third = |page: &u64| rig.is_in(THIRD, *page);
    let far = (0..rig.pages).find(is_in_third).expect("a page in the third store");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| rig.holds(far, 1));
        until("the silence is told of", || rig.reported("store-late"));
        let deferred = rig.vm.stats().get(Counter::FaultDeferred);
        until("it is asked again and again", || rig.vm.stats().get(Counter::FaultDeferred) > deferred + 10);
        assert!(!waiting.is_finished() && !rig.reported("store-back"), "the wait goes on");
        assert_eq!(rig.census().poisoned.0, 0, "silence is not loss");
        assert!((0..rig.pages).filter(|page| !is_in_third(page)).all(|page| rig.holds(page, 1)), "others are served");
        store.set_silent(false);
        assert!(waiting.join().expect("guest"), "it was there all the time");
    });
    until("the end of it is told of", || rig.reported("store-back"));
    rig.check_bytes();
}

#[test]
fn pages_that_a_full_file_store_does_not_take_move_to_the_third_one() {
    let file = SlowTier::new(FILE_STORE, "file store", Arc::new(NullStore::new(Bytes(MIB))));
    let rig = Rig::tiered(RAM, AMPLE, QUICK, vec![file, third()], SOON).squeezed(LIMIT);
    until("both have pages", || rig.count_in(FILE_STORE) > 0 && rig.count_in(THIRD) > 512);
    until("it is said", || rig.reported("spill-rests"));
    let reports = rig.reports.lock().expect("reports").clone();
    let said = reports.iter().find(|(kind, _)| kind == "spill-rests").map(|(_, text)| text.clone());
    assert!(said.as_ref().is_some_and(|text| text.contains("the file store has no room")), "{said:?}");
    rig.check_bytes();
}

#[test]
fn a_successor_finds_the_pages_of_three_stores_and_sweeps_each() {
    let file: Arc<dyn SlowStore> = Arc::new(NullStore::new(Bytes(MIB)));
    let slow = vec![SlowTier::new(FILE_STORE, "file store", file), third()];
    let mut rig = Rig::tiered(RAM, AMPLE, QUICK, slow, SOON).squeezed(LIMIT);
    until("both have pages", || rig.count_in(FILE_STORE) > 0 && rig.count_in(THIRD) > 512);
    rig.vm.stop();
    // The copy of an engine that died between a put and the change of the word.
    let nobodys = RegionKey { vm: VmId([3; 16]), number: 0 }.page(PageIdx(rig.pages - 1));
    for tier in rig.vm.stores.tiers().filter(|tier| tier.number != FILE_STORE) {
        let put = tier.store.put(nobodys, &pages::incompressible(1));
        assert!(matches!(put, PutOutcome::Stored(_)), "{put:?} by the {}", tier.name);
    }
    let far = rig.census().far.0;
    assert_eq!(rig.copies(), far + 2);
    let stores = rig.vm.stores.clone();
    let recovered = rig.succeed(stores);
    let live = [RAM_STORE, FILE_STORE, THIRD].map(|number| recovered.live_in(number).count());
    assert!(live.iter().sum::<u64>() == far && live[1] > 0 && live[2] > 0, "{live:?} of {far} far pages");
    rig.check_bytes();
    rig.count_exactly();
}
