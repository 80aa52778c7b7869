//! Moves of far pages to a file and back, against the real kernel: real userfaultfd, real memfds, a real file store
//! where the disk allows one; the guest is threads of this test. Needs root (userfaultfd).

use crate::common;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use ballast_base::store::{Ending, FILE_STORE, IoContext, RAM_STORE, Reader, RegionKey};
use ballast_base::units::MIB;
use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE, PageIdx};
use ballast_page::page_state::{State, Word};
use ballast_pager::run::pool::Pool;
use ballast_pager::run::queue::Next;
use ballast_pager::vm::Hold;
use ballast_pager::vm::far::slow_queue::WORKERS;
use ballast_pager::vm::far::stores::LateStore;
use ballast_pager::vm::recover::recover;
use ballast_pager::vm::stats::Counter;
use ballast_store::{DiskFault, GetOutcome, Handle, PageBytes, PageKey, PutOutcome, SlowStore, Store};
use ballast_testkit::{Faults, FaultyStore, NullStore, PutFault};
use ballast_testvm::Finally;
use common::{AMPLE, LIMIT, QUICK, RAM, Rig, SOON, churn_by, disk, faulty_disk, random, restore_for, until};

const NEVER: Duration = Duration::from_secs(100_000);

fn faulty() -> (Arc<dyn SlowStore>, Arc<Faults>) {
    let (store, faults) = FaultyStore::new(NullStore::new(AMPLE));
    (Arc::new(store), faults)
}

/// A full VM with most far pages in this slow store.
fn spilled(file: Arc<dyn SlowStore>) -> Rig {
    let rig = Rig::spilling(RAM, AMPLE, QUICK, file, SOON).filled();
    rig.squeeze_into(FILE_STORE, LIMIT);
    rig
}

fn spilled_to_faulty() -> (Rig, Arc<Faults>) {
    let (file, faults) = faulty();
    (spilled(file), faults)
}

#[test]
fn pages_that_are_far_for_long_move_to_the_file_and_are_restored_with_every_byte() {
    let rig = spilled(disk());
    rig.count_exactly();
    rig.vm.hold(Hold::Shared, None);
    rig.check_bytes();
    assert!(rig.vm.stats().get(Counter::FaultFile) > 0);
    rig.squeeze_into(FILE_STORE, LIMIT);
    assert!((0..rig.pages).rev().all(|page| rig.holds(page, 1)), "a byte was lost on the second way");
}

#[test]
fn a_guest_that_writes_and_discards_while_pages_are_spilled_reads_its_writes() {
    const SPILLED: u64 = 10_000;
    let rig = &Rig::spilling(RAM, AMPLE, Duration::from_millis(1), disk(), Duration::from_millis(1));
    rig.set_limit(Some(Bytes(4 * MIB)));
    let done = || rig.vm.stats().get(Counter::Spilled) >= SPILLED;
    std::thread::scope(|scope| {
        (0..3).for_each(|thread| drop(scope.spawn(move || churn_by(1, Some(16), rig, thread, 3, done))));
    });
    rig.count_exactly();
}

#[test]
fn discarded_pages_of_the_file_read_zeros_and_free_their_copies() {
    let rig = spilled(disk());
    rig.discard(0..rig.pages);
    rig.set_limit(None);
    until("nothing is stored any more", || rig.copies() == 0);
    assert!((0..rig.pages).all(|page| rig.word(page).load(Ordering::Relaxed) == 0));
    assert_eq!(rig.vm.stats().get(Counter::Far), 0);
}

#[test]
fn a_file_store_that_does_not_answer_delays_its_pages_and_no_others() {
    let (rig, faults) = spilled_to_faulty();
    let _release = Finally(|| faults.release());
    rig.hold_still();
    // Pages that are far in RAM must not move to the file during the test.
    faults.fail_puts(Some(PutFault::Busy));
    rig.count_exactly();
    let away: Vec<u64> = (0..rig.pages).filter(|page| rig.is_in(FILE_STORE, *page)).take(2).collect();
    faults.stall_gets();
    std::thread::scope(|scope| {
        let waiting: Vec<_> = away.iter().map(|page| scope.spawn(|| rig.holds(*page, 1))).collect();
        faults.wait_until_stalled(2);
        // Minor faults, fresh pages and pages in RAM are still served.
        let near: Vec<u64> =
            (0..rig.pages).filter(|page| !rig.is_in(FILE_STORE, *page) && !away.contains(page)).collect();
        assert!(!near.is_empty() && near.iter().all(|page| rig.holds(*page, 1)));
        let some = rig.vm.stats().get(Counter::StallSomeNs);
        faults.release();
        assert!(waiting.into_iter().all(|guest| guest.join().expect("guest")), "wrong bytes");
        // The guest continues before the worker has booked the fault.
        until("the wait for the disk is stall", || rig.vm.stats().get(Counter::StallSomeNs) > some);
    });
}

#[test]
fn a_file_store_that_refuses_leaves_pages_in_ram_and_is_reported_once() {
    for fault in [PutFault::Full, PutFault::Busy] {
        let (file, faults) = faulty();
        faults.fail_puts(Some(fault));
        let rig = Rig::spilling(RAM, AMPLE, QUICK, file.clone(), SOON).filled();
        rig.set_limit(Some(LIMIT));
        until("the refusal is reported", || rig.reported("spill-rests"));
        until("resident is at the limit", || rig.resident() <= LIMIT);
        assert_eq!(rig.count_in(FILE_STORE), 0);
        faults.fail_puts(None);
        until("pages are spilled", || rig.count_in(FILE_STORE) > 0);
        let said = rig.reports.lock().expect("reports").iter().filter(|(kind, _)| kind == "spill-rests").count();
        assert_eq!(said, 1, "{fault:?}");
        rig.check_bytes();
    }
}

/// A store that takes at most 64 pages in time. A late run has ended after two calls of `must_recover`.
#[derive(Debug)]
struct Slow {
    pages: NullStore,
    late: AtomicU64,
    /// Runs that were sent while one was late.
    behind: AtomicU64,
}

store_over! { pages, Slow,
    fn put_run(&self, first: PageKey, pages: &[PageBytes], outcomes: &mut Vec<PutOutcome>) {
        if self.late.load(Ordering::Relaxed) > 0 {
            self.behind.fetch_add(1, Ordering::Relaxed);
        }
        if pages.len() > 64 {
            self.late.store(2, Ordering::Relaxed);
            return outcomes.resize(outcomes.len() + pages.len(), PutOutcome::Busy);
        }
        self.pages.put_run(first, pages, outcomes);
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, context: IoContext<'_>) -> GetOutcome {
        self.pages.get(key, handle, out, context)
    }
}

impl SlowStore for Slow {
    fn must_recover(&self) -> bool {
        let less = |late: u64| late.checked_sub(1);
        self.late.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

#[test]
fn a_store_that_takes_no_full_run_in_time_gets_shorter_ones_and_none_while_late() {
    let (late, behind) = Default::default();
    let slow = Arc::new(Slow { pages: NullStore::new(AMPLE), late, behind });
    let rig = spilled(slow.clone());
    assert_eq!(slow.behind.load(Ordering::Relaxed), 0);
    rig.check_bytes();
}

/// A store that counts the runs under way.
#[derive(Debug)]
struct Remote {
    pages: NullStore,
    under_way: AtomicU64,
    most: AtomicU64,
}

store_over! { pages, Remote,
    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, context: IoContext<'_>) -> GetOutcome {
        self.pages.get(key, handle, out, context)
    }
}

impl SlowStore for Remote {
    fn begin_put(self: Arc<Self>, first: PageKey, pages: &[PageBytes], _: &[Vec<u8>]) -> Ending {
        let now = self.under_way.fetch_add(1, Ordering::AcqRel) + 1;
        self.most.fetch_max(now, Ordering::AcqRel);
        let pages = pages.to_vec();
        Box::new(move |outcomes| {
            self.pages.put_run(first, &pages, outcomes);
            self.under_way.fetch_sub(1, Ordering::AcqRel);
        })
    }
}

#[test]
fn a_store_gets_two_runs_at_once_and_spill_waits_for_each() {
    let store = Remote { pages: NullStore::new(AMPLE), under_way: AtomicU64::new(0), most: AtomicU64::new(0) };
    let store = Arc::new(store);
    let rig = Rig::spilling(RAM, AMPLE, QUICK, store.clone(), SOON);
    // A pass that finds few old pages sends only one run.
    until("two runs were under way", || {
        rig.fill_all();
        rig.squeeze_into(FILE_STORE, LIMIT);
        store.most.load(Ordering::Acquire) >= 2
    });
    assert_eq!(store.most.load(Ordering::Acquire), 2);
    rig.check_bytes();
    rig.count_exactly();
    assert_eq!(store.under_way.load(Ordering::Acquire), 0);
}

/// A store with late pages: their first read takes a moment, and each later one lasts until they are released.
#[derive(Debug, Default)]
struct Withholds {
    pages: Mutex<HashSet<u64>>,
    asked: Mutex<HashSet<u64>>,
    waiting: AtomicU64,
    come: Condvar,
}

impl Withholds {
    fn pages(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.pages.lock().expect("no panic")
    }

    fn release(&self) {
        self.pages().clear();
        self.come.notify_all();
    }
}

#[derive(Debug)]
struct Partly(NullStore, Arc<Withholds>);

store_over! { 0, Partly,
    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, context: IoContext<'_>) -> GetOutcome {
        let Partly(pages, withholds) = self;
        if !withholds.pages().contains(&key.page.0) {
            return pages.get(key, handle, out, context);
        }
        if withholds.asked.lock().expect("no panic").insert(key.page.0) {
            std::thread::sleep(Duration::from_millis(10));
        } else {
            withholds.waiting.fetch_add(1, Ordering::AcqRel);
            let mut pages = withholds.pages();
            // The read of a real store is given up, too.
            while !pages.is_empty() && !context.is_wanted() {
                pages = withholds.come.wait_timeout(pages, Duration::from_millis(1)).expect("no panic").0;
            }
        }
        GetOutcome::Busy
    }
}

impl SlowStore for Partly {}

#[test]
fn any_number_of_late_pages_leaves_a_worker_for_the_others() {
    let withholds = Arc::<Withholds>::default();
    let rig = spilled(Arc::new(Partly(NullStore::new(AMPLE), withholds.clone())));
    rig.hold_still();
    let away: Vec<u64> = (0..rig.pages).step_by(7).filter(|page| rig.is_in(FILE_STORE, *page)).collect();
    let (late, others) = away.split_at(2 * WORKERS);
    withholds.pages().extend(late);
    let _release = Finally(|| withholds.release());
    std::thread::scope(|scope| {
        let _release = Finally(|| withholds.release());
        let waiting: Vec<_> = late.iter().map(|page| scope.spawn(|| rig.holds(*page, 1))).collect();
        until("all others wait", || withholds.waiting.load(Ordering::Acquire) >= WORKERS as u64 - 1);
        let come = scope.spawn(|| others.iter().take(100).all(|page| rig.holds(*page, 1)));
        until("pages that come are there", || come.is_finished());
        assert!(come.join().expect("guest"), "wrong bytes");
        assert!(waiting.iter().all(|guest| !guest.is_finished()));
        withholds.release();
        assert!(waiting.into_iter().all(|guest| guest.join().expect("guest")), "wrong bytes");
    });
}

#[test]
fn a_vm_that_is_stopped_waits_for_no_late_page_and_the_next_engine_serves_them() {
    let withholds = Arc::<Withholds>::default();
    let mut rig = spilled(Arc::new(Partly(NullStore::new(AMPLE), withholds.clone())));
    rig.hold_still();
    let late: Vec<u64> =
        (0..rig.pages).step_by(7).filter(|page| rig.is_in(FILE_STORE, *page)).take(2 * WORKERS).collect();
    withholds.pages().extend(&late);
    let _release = Finally(|| withholds.release());
    let touch = |page: u64| {
        let guest = rig.guest.clone();
        std::thread::spawn(move || guest.words(page as usize * PAGE_SIZE, 1)[0].load(Ordering::Relaxed))
    };
    let guests: Vec<_> = late.iter().map(|page| touch(*page)).collect();
    until("workers wait", || withholds.waiting.load(Ordering::Acquire) >= WORKERS as u64 - 1);
    std::thread::scope(|scope| {
        let _release = Finally(|| withholds.release());
        let stops = scope.spawn(|| rig.vm.stop());
        until("it is stopped", || stops.is_finished());
    });
    rig.succeed(rig.vm.stores.clone());
    assert!(late.iter().all(|page| rig.holds(*page, 1)), "wrong bytes");
    assert!(guests.into_iter().all(|guest| guest.join().is_ok()), "each thread goes on");
}

#[test]
fn a_full_ram_store_does_not_stop_reclaim_while_the_file_has_room() {
    let rig = Rig::spilling(RAM, Bytes(4 * MIB), QUICK, disk(), NEVER).squeezed(LIMIT);
    assert!(rig.count_in(FILE_STORE) > 0);
    rig.check_bytes();
    rig.count_exactly();
}

#[test]
fn when_both_stores_are_full_reclaim_stops_with_an_event_and_loses_nothing() {
    let file = NullStore::new(Bytes(2 * MIB));
    let rig = Rig::spilling(RAM, Bytes(2 * MIB), QUICK, Arc::new(file), NEVER).filled();
    rig.set_limit(Some(LIMIT));
    until("both are full", || rig.reported("store-full") && rig.reported("spill-rests"));
    rig.check_bytes();
}

#[test]
fn a_page_that_the_file_lost_is_a_memory_error_and_an_event() {
    let (rig, faults) = spilled_to_faulty();
    rig.vm.hold(Hold::Shared, Some("test".into()));
    let lost = (0..rig.pages).find(|page| rig.is_in(FILE_STORE, *page)).expect("a page in the file");
    faults.lose(1);
    let sink = ballast_sys::memfd::create("sink", Bytes(0)).expect("memfd");
    let error = rig.guest.send_to(&sink, lost as usize * PAGE_SIZE, 8).expect_err("a lost page was read");
    assert_eq!(error.raw_os_error(), Some(14), "{error}");
    until("the loss is reported", || rig.reported("page-lost"));
    assert_eq!(rig.state_of(lost), State::Poisoned);
}

#[test]
fn one_request_restores_many_pages_of_a_slow_store() {
    let (rig, faults) = spilled_to_faulty();
    let (before, pages) = (faults.calls(), rig.count_in(FILE_STORE));
    restore_for(&rig.vm, Hold::Kept).expect("all are back");
    let (calls, far) = (faults.calls(), rig.vm.stats().get(Counter::Far));
    let (gets, runs) = (calls.gets - before.gets, calls.runs - before.runs);
    // Some pages moved there later.
    let is_once = (pages..=rig.pages).contains(&gets);
    assert!(far == 0 && is_once && runs * 8 < gets, "{pages} pages: {gets} in {runs} runs, {far} far");
    rig.check_bytes();
}

#[test]
fn pages_of_one_repeated_word_stay_in_ram_where_they_take_no_space() {
    let rig = Rig::spilling(RAM, AMPLE, QUICK, disk(), SOON);
    for page in 0..rig.pages {
        if page % 2 == 0 {
            rig.fill(page, 1);
            continue;
        }
        let words = rig.guest.words(page as usize * PAGE_SIZE, PAGE_SIZE / 8);
        words.iter().for_each(|word| word.store(0x0101_0101_0101_0101, Ordering::Relaxed));
    }
    rig.squeeze(Bytes(2 * MIB));
    let other_far = || (0..rig.pages).step_by(2).filter(|page| rig.state_of(*page) == State::Far).count() as u64;
    until("the others are in the file", || rig.count_in(FILE_STORE) * 10 > other_far() * 9);
    assert!((0..rig.pages).skip(1).step_by(2).all(|page| !rig.is_in(FILE_STORE, page)));
    assert!((0..rig.pages).skip(1).step_by(2).any(|page| rig.state_of(page) == State::Far));
}

#[test]
fn a_successor_finds_the_copies_of_both_stores_and_sweeps_stale_ones() {
    let rig = spilled(disk());
    rig.vm.stop();
    let region = rig.vm.region(0).expect("region");
    let recovered = recover(&rig.vm.state, [&*region]).expect("recover");
    assert_eq!(recovered.live_in(RAM_STORE).count(), rig.ram_store().usage().pages);
    let in_file = recovered.live_in(FILE_STORE).count();
    assert_eq!(in_file, rig.file_store().usage().pages);
    assert!(in_file == rig.count_in(FILE_STORE) && in_file > 0);
    rig.check_census();
}

#[test]
fn faults_are_served_while_the_stop_of_a_vm_waits_for_a_spill_to_a_hanging_disk() {
    let (file, faults) = faulty();
    let rig = Rig::spilling(RAM, AMPLE, QUICK, file, SOON).filled();
    faults.stall_puts();
    std::thread::scope(|scope| {
        let _end = Finally(|| faults.release());
        rig.squeeze(LIMIT);
        faults.wait_until_stalled(1);
        let stops = scope.spawn(|| rig.vm.stop());
        until("it is told to", || rig.vm.is_stopping());
        rig.check_bytes();
        assert!(!stops.is_finished(), "it waits for the disk");
        faults.release();
        stops.join().expect("stopped");
    });
}

#[test]
fn pages_of_a_file_that_cannot_be_opened_wait_and_the_others_are_served() {
    let rig = Rig::spilling(RAM, AMPLE, QUICK, Arc::new(LateStore::new()), NEVER).squeezed(LIMIT);
    rig.hold_still();
    let region = rig.vm.region(0).expect("region");
    let far = (0..rig.pages).find(|page| rig.state_of(*page) == State::Far).expect("a far page");
    let cell = region.granule(PageIdx(far)).cell();
    let word = cell.load();
    let away = Word::far(FILE_STORE, word.handle(), word.age());
    assert!(cell.swap(word, away));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| rig.holds(far, 1));
        until("it waits", || rig.vm.stats().get(Counter::FaultDeferred) > 2);
        assert!((0..rig.pages).filter(|page| *page != far).all(|page| rig.holds(page, 1)), "a byte was lost");
        until("it is there", || cell.swap(away, word));
        assert!(waiting.join().expect("guest"), "it was there all the time");
    });
}

#[test]
fn a_store_that_stays_busy_during_a_restore_does_not_block_changes_of_the_layout() {
    let (rig, faults) = spilled_to_faulty();
    let before = faults.calls().gets;
    faults.busy_gets(u64::MAX);
    let vm = rig.vm.clone();
    let restores = std::thread::spawn(move || restore_for(&vm, Hold::Kept));
    until("it asks the store", || faults.calls().gets > before + 2);
    // Each of these waits until no page moves.
    rig.vm.set_may_pin();
    let near = (0..rig.pages).find(|page| !rig.is_in(FILE_STORE, *page)).expect("one that is not in the file");
    rig.discard(near..near + 1);
    assert!(!restores.is_finished(), "the store is busy");
    faults.busy_gets(0);
    restores.join().expect("no panic").expect("all are back");
    assert!((0..rig.pages).all(|page| page == near || rig.holds(page, 1)), "a byte was lost");
}

#[test]
fn a_restore_that_was_ended_reports_that_even_if_the_vm_is_held_again_at_once() {
    let (rig, faults) = spilled_to_faulty();
    let before = faults.calls().gets;
    faults.busy_gets(u64::MAX);
    let restores = || {
        let vm = rig.vm.clone();
        std::thread::spawn(move || restore_for(&vm, Hold::Kept))
    };
    let first = restores();
    until("it asks the store", || faults.calls().gets > before + 2);
    rig.vm.hold(Hold::Kept, None);
    let second = restores();
    let ended = first.join().expect("no panic").expect_err("it was ended");
    assert_eq!(ended.kind(), std::io::ErrorKind::Interrupted, "{ended}");
    assert!(!second.is_finished(), "the store is busy");
    faults.busy_gets(0);
    second.join().expect("no panic").expect("all are back");
    rig.check_bytes();
}

/// A store in memory that records the context of reads.
#[derive(Debug)]
struct Asked {
    inner: NullStore,
    /// Reads of one page, for which a thread waits; reads of several pages, ahead of a thread.
    alone: AtomicU64,
    together: AtomicU64,
    /// Reads of either kind with the wrong context.
    wrong: AtomicU64,
}

store_over! { inner, Asked,
    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, context: IoContext<'_>) -> GetOutcome {
        self.alone.fetch_add(1, Ordering::Relaxed);
        self.wrong.fetch_add((context.reader == Reader::Background).into(), Ordering::Relaxed);
        self.inner.get(key, handle, out, context)
    }

    fn get_run(&self, pages: &[(PageKey, Handle)], out: &mut [PageBytes], context: IoContext<'_>) -> Vec<GetOutcome> {
        self.together.fetch_add(1, Ordering::Relaxed);
        self.wrong.fetch_add((context.reader == Reader::Guest).into(), Ordering::Relaxed);
        self.inner.get_run(pages, out, context)
    }
}

impl SlowStore for Asked {}

#[test]
fn readahead_has_the_background_context_and_a_fault_has_not() {
    let (alone, together, wrong) = Default::default();
    let store = Arc::new(Asked { inner: NullStore::new(AMPLE), alone, together, wrong });
    let rig = spilled(store.clone());
    rig.set_limit(None);
    rig.check_bytes();
    let [alone, together, wrong] = [&store.alone, &store.together, &store.wrong].map(|of| of.load(Ordering::Relaxed));
    assert!(alone > 0 && together > 0, "{alone} alone, {together} together");
    assert_eq!(wrong, 0, "of {alone} alone and {together} together");
}

#[test]
fn pages_that_their_store_does_not_return_block_no_other_restores() {
    let (rig, faults) = spilled_to_faulty();
    // Pages evicted from now on stay in the RAM store.
    faults.fail_puts(Some(PutFault::Busy));
    let last = rig.pages / 2..rig.pages;
    assert!(last.clone().all(|page| rig.holds(page, 1)), "a byte was lost");
    rig.squeeze(LIMIT);
    let is_in_ram = |page: &u64| rig.state_of(*page) == State::Far && !rig.is_in(FILE_STORE, *page);
    until("some are far and in RAM", || last.clone().filter(is_in_ram).count() > 100);
    assert!((0..last.start).any(|page| rig.is_in(FILE_STORE, page)), "the first to come back");
    faults.busy_gets(u64::MAX);
    let vm = rig.vm.clone();
    let restores = std::thread::spawn(move || restore_for(&vm, Hold::Kept));
    until("all that is not in the file is back", || rig.vm.stats().get(Counter::Far) == rig.count_in(FILE_STORE));
    assert!(!restores.is_finished(), "the store is busy");
    faults.busy_gets(0);
    restores.join().expect("no panic").expect("all are back");
    rig.check_bytes();
}

#[test]
fn a_discard_of_a_page_whose_store_is_silent_unlocks_the_others_and_can_be_retried() {
    let (rig, faults) = spilled_to_faulty();
    let _release = Finally(|| faults.release());
    rig.hold_still();
    // The page is not the first one of a run that is locked together.
    let far = (1..rig.pages).find(|page| page % 512 > 64 && rig.is_in(FILE_STORE, *page)).expect("one in the file");
    let first = far & !511;
    faults.stall_gets();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| rig.guest.words(far as usize * PAGE_SIZE, 1)[0].load(Ordering::Relaxed));
        faults.wait_until_stalled(1);
        let range = (rig.addr(first), 512 * PAGE_SIZE as u64);
        let region = rig.vm.region(0).expect("region");
        let word = region.word(PageIdx(far));
        // Not Restoring: recovery takes the file's bytes for a Restoring page, and they may be a foreign mapper's.
        assert!(word.is_locked() && word.state() == State::Far, "{word:?}");
        let error = rig.vm.discard(&rig.view, &[range]).expect_err("a page is locked");
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        assert!(!region.word(PageIdx(first)).is_locked(), "it holds a lock");
        faults.release();
        waiting.join().expect("guest");
        rig.discard(first..first + 512);
        assert!(
            (first..first + 512)
                .all(|page| rig.guest.words(page as usize * PAGE_SIZE, 1)[0].load(Ordering::Relaxed) == 0)
        );
    });
}

#[test]
fn the_end_of_a_write_that_was_given_up_is_noticed_without_another_write() {
    let Some((store, faults)) = faulty_disk() else { return };
    faults.fail_writes(1, DiskFault::Late);
    let (put, outcome) = std::sync::mpsc::channel();
    let (writes, seed) = (store.clone(), AtomicU64::new(7));
    let task = move |_: std::time::Instant| {
        let page: [u8; PAGE_SIZE] = std::array::from_fn(|_| random(&seed) as u8);
        put.send(writes.put(RegionKey { vm: VmId([1; 16]), number: 0 }.page(PageIdx(0)), &page))
            .expect("the test waits");
        Next::Idle
    };
    let pool = Pool::new(1);
    let handle = pool.add(pool.add_group(), "put", task).expect("a thread");
    handle.notify();
    assert_eq!(outcome.recv().expect("it was put"), PutOutcome::Busy);
    // An upgrade moves a VM with a gap while a write is under way.
    until("the write is over", || !store.must_recover());
    store.validate().expect("its block is free again");
}
