//! One VM's life against the real kernel and a real store; the guest is threads of this test. Needs root (userfaultfd).

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ballast_base::store::RAM_STORE;
use ballast_base::units::MIB;
use ballast_base::{Bytes, Hva, PAGE_SIZE, PageIdx};
use ballast_page::page_state::State;
use ballast_pager::vm::Hold;
use ballast_pager::vm::client_peer::ClientPeer;
use ballast_pager::vm::stats::Counter;
use ballast_pager::vm::view::View;
use common::{AMPLE, LIMIT, QUICK, RAM, Rig, churn, hammer, mapped_at, random, restore_for, until, vacate};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

#[test]
fn a_view_that_is_added_twice_is_served_and_loses_no_byte() {
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    rig.add_view();
    rig.squeeze(Bytes(RAM.0 / 2));
    rig.check_bytes();
}

#[test]
fn cold_memory_is_evicted_and_restored_with_every_byte() {
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    assert_eq!(rig.resident(), RAM);
    let began = Instant::now();
    rig.squeeze(LIMIT);
    rig.check_bytes();
    let of = |counter| rig.vm.stats().get(counter);
    rig.wait_until_booked();
    let back = of(Counter::FaultRestore) + of(Counter::Prefetched);
    assert!(back >= (RAM.0 - LIMIT.0) / PAGE_SIZE as u64);
    // Each refault is within 10 s of the eviction, unless this machine is slow.
    until("it is booked as restored soon", || of(Counter::RestoredSoon) >= back || began.elapsed().as_millis() > 9_000);
    until("resident is at the limit again", || rig.resident() <= LIMIT);
    assert!((0..rig.pages).rev().all(|page| rig.holds(page, 1)), "a byte was lost on the second way");
}

#[test]
fn every_page_is_in_exactly_one_place_and_the_gauges_agree() {
    let rig = Rig::new(RAM, AMPLE, QUICK);
    // A third is filled, a third has written zeros, a third was never touched.
    let third = rig.pages / 3;
    (0..third).for_each(|page| rig.fill(page, 1));
    (third..2 * third).for_each(|page| rig.word(page).store(0, Ordering::Relaxed));
    rig.check_census();
    rig.squeeze(Bytes(2 * MIB));
    rig.count_exactly();
    let census = rig.census();
    assert!(census.zero.0 > 0 && census.far.0 > 0, "{census:?}");
    assert_eq!(census.untouched.0, rig.pages - 2 * third);
    assert_eq!(rig.ram_store().usage().pages, census.far.0, "zero pages are stored as nothing");
}

#[test]
fn a_guest_that_keeps_writing_reads_its_writes() {
    // Long enough to meet each state many times; the quarantine is short so that pages move quickly.
    const EVICTIONS: u64 = 20_000;
    let rig = Rig::new(RAM, AMPLE, Duration::from_millis(1));
    rig.set_limit(Some(LIMIT));
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let rig = &rig;
            scope.spawn(move || churn(rig, thread, 3, || rig.vm.stats().get(Counter::Evicted) >= EVICTIONS));
        }
    });
}

#[test]
fn the_engines_work_for_a_vm_is_charged_to_it() {
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    let faults = rig.vm.stats().get(Counter::FaultWorkNs);
    assert!(faults > 0, "its pages were touched");
    rig.squeeze(LIMIT);
    // A task charges its time at the end of a run.
    until("reclaim is booked", || rig.vm.stats().get(Counter::TaskCpuNs) > 0);
    rig.check_bytes();
    until("restores are booked", || rig.vm.stats().get(Counter::FaultWorkNs) > faults);
}

#[test]
fn a_full_store_stops_reclaim_with_an_event_and_loses_nothing() {
    let rig = Rig::new(RAM, Bytes(2 * MIB), QUICK).filled();
    rig.set_limit(Some(LIMIT));
    until("the store is full", || rig.reported("store-full"));
    assert!(rig.resident() > LIMIT, "with a full store the limit cannot be reached");
    rig.check_bytes();
    assert!(rig.vm.stats().get(Counter::StoreFull) > 0);
}

#[test]
fn a_store_that_does_not_answer_delays_its_pages_and_no_others() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    rig.vm.hold(Hold::Shared, Some("test".into()));
    let far = (0..rig.pages).find(|page| rig.state_of(*page) == State::Far).expect("something is far");
    rig.faults.busy_gets(2000);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| rig.holds(far, 1));
        until("the fault was put aside", || rig.vm.stats().get(Counter::FaultDeferred) > 10);
        // Minor faults and fresh pages are still served.
        let resident: Vec<u64> = (0..rig.pages).filter(|page| rig.state_of(*page) == State::Resident).collect();
        assert!(!resident.is_empty() && resident.iter().all(|page| rig.holds(*page, 1)));
        assert!(waiting.join().expect("guest"), "wrong bytes after the store answered again");
    });
}

#[test]
fn a_store_that_refuses_pages_keeps_them_resident_until_it_takes_them() {
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    rig.faults.busy_puts(1);
    rig.set_limit(Some(LIMIT));
    until("the refusal was reported", || rig.reported("store-busy"));
    until("reclaim went on", || rig.resident() <= LIMIT);
    rig.check_bytes();
}

#[test]
fn a_page_the_store_lost_is_a_memory_error_and_an_event_and_a_discard_heals_it() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    rig.hold_still();
    // Two pages that are no neighbours, so that readahead restores neither before the store fails them.
    let far: Vec<u64> = (0..rig.pages).filter(|page| rig.state_of(*page) == State::Far).step_by(200).take(2).collect();
    // A system call that reads the page returns EFAULT instead of a SIGBUS.
    let read_by_kernel = |page: u64| {
        let sink = ballast_sys::memfd::create("sink", Bytes(0)).expect("memfd");
        rig.guest.send_to(&sink, page as usize * PAGE_SIZE, 8)
    };
    rig.faults.lose(1);
    let error = read_by_kernel(far[0]).expect_err("a lost page was read");
    assert_eq!(error.raw_os_error(), Some(14), "{error}");
    until("the loss is reported", || rig.reported("page-lost"));
    assert_eq!(rig.state_of(far[0]), State::Poisoned);
    assert!(read_by_kernel(far[0]).is_err(), "a poisoned page stays poisoned");
    rig.faults.corrupt(1);
    assert!(read_by_kernel(far[1]).is_err(), "a page with a wrong checksum was read");
    until("both losses are counted", || rig.vm.stats().get(Counter::Poisoned) == 2);
    rig.check_census();
    rig.discard(far[0]..far[0] + 1);
    assert_eq!(rig.word(far[0]).load(Ordering::Relaxed), 0, "a discarded page reads zeros");
    rig.check_census();
}

#[test]
fn discarded_pages_of_every_state_read_zeros_and_free_their_copies() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    let half = RAM.0 / 2;
    rig.vm.discard(&rig.view, &[(rig.addr(0), half)]).expect("discard");
    // Rounded inward: a range that begins inside a page does not touch that page.
    let odd = Hva(rig.guest.addr() as u64 + half + 100);
    rig.vm.discard(&rig.view, &[(odd, PAGE_SIZE as u64)]).expect("discard");
    let half_pages = rig.pages / 2;
    assert!((0..half_pages).all(|page| rig.word(page).load(Ordering::Relaxed) == 0));
    assert!((half_pages..rig.pages).all(|page| rig.holds(page, 1)), "a page outside the range was touched");
    rig.fill(5, 2);
    assert!(rig.holds(5, 2), "a write after a discard is kept");
    // The VM is held: without a limit, the worker would turn zero pages back during the count.
    rig.count_exactly();
}

#[test]
fn a_large_discard_writes_no_words_of_pages_that_never_moved_and_frees_all_copies() {
    let rig = Rig::new(Bytes(96 * MIB), AMPLE, QUICK);
    let words = || {
        let written = rig.vm.state.written_words(&rig.vm.state.regions()[0]).expect("ask");
        written.iter().map(|pages| pages.count()).sum::<u64>()
    };
    rig.fill_all();
    let before = words();
    rig.discard(0..rig.pages);
    assert_eq!((rig.resident(), words()), (Bytes(0), before));
    assert!(before < rig.pages, "most of it never moved");
    assert_eq!(rig.vm.stats().get(Counter::Discarded), rig.pages);
    // Now parts of it have moved.
    rig.fill_all();
    rig.squeeze(Bytes(80 * MIB));
    rig.hold_still();
    rig.discard(1..rig.pages - 1);
    assert!((1..rig.pages - 1).all(|page| rig.word(page).load(Ordering::Relaxed) == 0));
    assert!([0, rig.pages - 1].into_iter().all(|page| rig.holds(page, 1)), "a page outside the range was touched");
    assert!(rig.vm.stats().get(Counter::Far) <= 2, "copies are freed");
    rig.check_census();
}

#[test]
fn large_discards_race_with_eviction_and_lose_no_later_write() {
    let rig = Rig::new(Bytes(64 * MIB), AMPLE, Duration::from_millis(2));
    rig.set_limit(Some(Bytes(16 * MIB)));
    let state = AtomicU64::new(78);
    for round in 1..=200u64 {
        let kept = (0..50).map(|_| rig.pages / 2 + random(&state) % (rig.pages / 2)).collect::<Vec<_>>();
        kept.iter().for_each(|page| rig.word(*page).store(round, Ordering::Relaxed));
        let gone = (0..200).map(|_| random(&state) % (rig.pages / 2)).collect::<Vec<_>>();
        gone.iter().for_each(|page| rig.word(*page).store(round, Ordering::Relaxed));
        rig.discard(0..rig.pages / 2);
        let now = |page: &u64| rig.word(*page).load(Ordering::Relaxed);
        assert!(gone.iter().all(|page| now(page) == 0), "round {round}");
        assert!(kept.iter().all(|page| now(page) == round), "round {round}");
    }
}

#[test]
fn discards_race_with_eviction_and_restore_without_losing_a_later_write() {
    let rig = Rig::new(Bytes(8 * MIB), AMPLE, Duration::from_millis(2));
    rig.set_limit(Some(Bytes(2 * MIB)));
    let state = AtomicU64::new(77);
    for round in 1..=4000u64 {
        let page = random(&state) % rig.pages;
        rig.word(page).store(round, Ordering::Relaxed);
        let other = random(&state) % rig.pages;
        rig.discard(other..other + 1);
        let expected = if other == page { 0 } else { round };
        assert_eq!(rig.word(page).load(Ordering::Relaxed), expected, "round {round}");
        assert_eq!(rig.word(other).load(Ordering::Relaxed), 0, "round {round}");
    }
}

#[test]
fn a_vm_without_pressure_has_nothing_registered() {
    let rig = Rig::new(Bytes(96 * MIB), AMPLE, QUICK);
    (0..rig.pages / 2).for_each(|page| rig.fill(page, 1));
    assert_eq!(rig.vm.stats().get(Counter::RegisteredBytes), 0);
    rig.squeeze(Bytes(44 * MIB));
    let registered = rig.vm.stats().get(Counter::RegisteredBytes);
    assert!(registered > 0 && registered < 96 * MIB, "{registered} bytes: memory never touched must stay unregistered");
    rig.set_limit(None);
    assert!((0..rig.pages / 2).all(|page| rig.holds(page, 1)), "a byte was lost");
    until("all is given back to the kernel", || rig.vm.stats().get(Counter::RegisteredBytes) == 0);
    assert!((0..rig.pages / 2).all(|page| rig.holds(page, 1)), "a byte was lost at unregistering");
}

#[test]
fn raising_the_limit_stops_reclaim_and_restores_nothing() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    rig.set_limit(Some(Bytes(24 * MIB)));
    rig.wait_for_quarantine();
    let counted = |counter| rig.vm.stats().get(counter);
    until("the last run is booked", || counted(Counter::Far) == counted(Counter::Evicted));
    assert_eq!(counted(Counter::FaultRestore), 0, "raising the limit brought pages back");
}

/// Number of voluntary sleeps of a thread of this process, without yields.
fn sleeps_of(thread: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).expect("the thread runs");
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.and_then(|count| count.trim().parse().ok()).expect("a count")
}

#[test]
fn a_restore_sleeps_while_a_page_is_not_available_and_ends_when_the_vm_is_closed() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    rig.faults.busy_gets(u64::MAX);
    let (vm, (say, hear)) = (rig.vm.clone(), std::sync::mpsc::channel());
    let restoring = std::thread::spawn(move || {
        say.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).expect("heard");
        restore_for(&vm, Hold::Pinned)
    });
    let thread = hear.recv().expect("a thread id");
    let before = sleeps_of(thread);
    until("it sleeps", || sleeps_of(thread) > before + 100);
    rig.vm.stop();
    let error = restoring.join().expect("no panic").expect_err("not all are back");
    assert_eq!(error.to_string(), "the VM is being closed");
}

/// A store gives a page up as lost only after many reads.
#[test]
fn unavailable_pages_are_retried_before_all_other_pages_were_tried() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    rig.faults.busy_gets(u64::MAX);
    let vm = rig.vm.clone();
    let restoring = std::thread::spawn(move || restore_for(&vm, Hold::Pinned));
    let far = rig.vm.stats().get(Counter::Far) as usize;
    until("a page was asked for twice", || rig.faults.refused().1 > 1);
    let (asked, _) = rig.faults.refused();
    rig.faults.busy_gets(0);
    restoring.join().expect("no panic").expect("restored");
    assert!(asked < far, "{asked} of {far} had their turn before");
    rig.check_bytes();
}

#[test]
fn available_pages_are_restored_although_most_others_are_not_available() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    let vm = rig.vm.clone();
    rig.vm.hold(Hold::Pinned, Some("the test says so".into()));
    rig.wait_for_quarantine();
    let far: Vec<u64> = (0..rig.pages).filter(|page| rig.state_of(*page) == State::Far).collect();
    let there = &far[far.len() - 256..];
    rig.faults.busy_below(PageIdx(there[0]));
    let restoring = std::thread::spawn(move || vm.restore());
    until("all that are available are back", || there.iter().all(|page| rig.state_of(*page) == State::Resident));
    until("no other is", || rig.vm.stats().get(Counter::Far) as usize == far.len() - there.len());
    rig.faults.busy_below(PageIdx(0));
    restoring.join().expect("no panic").expect("restored");
    rig.check_bytes();
}

#[test]
fn pinning_restores_every_page_and_keeps_it() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    restore_for(&rig.vm, Hold::Pinned).expect("pin");
    assert_eq!(rig.resident(), RAM);
    assert_eq!(rig.vm.stats().get(Counter::Far), 0);
    rig.vm.hold(Hold::Shared, None);
    assert_eq!(rig.vm.held().as_deref(), Some("the test says so"), "another kind of reason lifted the pin");
    rig.check_bytes();
}

/// Another view of this process, with the rig's userfaultfd; no thread answers its zaps.
fn another_view(rig: &Rig, pid: u32) -> (Arc<View>, std::os::fd::OwnedFd) {
    let (control, theirs) = ballast_sys::scm::pair().expect("socketpair");
    let uffd = rig.view.uffds()[0].try_clone().expect("dup");
    let uffds = vec![uffd];
    (Arc::new(View::new(pid, uffds, rig.uffd_features, Arc::new(ClientPeer::new(control, 1)))), theirs)
}

#[test]
fn a_restore_allocates_no_memory_for_words_that_were_never_written() {
    let rig = Rig::new(Bytes(1 << 30), AMPLE, QUICK);
    let before = ballast_sys::memfd::resident(rig.vm.state.fd()).expect("stat");
    restore_for(&rig.vm, Hold::Pinned).expect("pin");
    let after = ballast_sys::memfd::resident(rig.vm.state.fd()).expect("stat");
    assert!(after.0 <= before.0 + 2, "{before:?} before, {after:?} after, for a VM that has touched nothing");
}

#[test]
fn a_loaded_vm_loses_no_byte_when_another_process_attaches_without_a_limit() {
    let rig = Rig::without_view(RAM, AMPLE, QUICK);
    rig.vm.set_loads();
    rig.set_limit(Some(LIMIT));
    rig.add_view();
    assert_eq!(rig.vm.stats().get(Counter::RegisteredBytes), RAM.0, "it may be loaded now");
    rig.set_limit(None);
    until("all is given back to the kernel", || rig.vm.stats().get(Counter::RegisteredBytes) == 0);
    rig.fill_all();
    let (other, _other) = another_view(&rig, 1);
    let copy = rig.second_mapping();
    rig.vm.add_view(other, &mapped_at(Hva(copy as u64), RAM)).expect("view");
    rig.vm.remove_view(1);
    vacate(copy, RAM.0 as usize);
    rig.squeeze(LIMIT);
    rig.check_bytes();
}

#[test]
fn a_page_that_no_process_maps_any_more_is_restored_into_its_file() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    rig.hold_still();
    let gone = (0..rig.pages).find(|page| rig.state_of(*page) == State::Far).expect("something is far");
    let at = rig.guest.addr() + gone as usize * PAGE_SIZE;
    vacate(at, PAGE_SIZE);
    restore_for(&rig.vm, Hold::Pinned).expect("all come back");
    let left = (0..rig.pages).filter(|page| rig.state_of(*page) == State::Far).count();
    assert_eq!(left, 0, "pages that are far still");
    assert_eq!(rig.resident(), RAM);
    assert!((0..rig.pages).all(|page| page == gone || rig.holds(page, 1)), "a byte was lost");
}

#[test]
fn each_page_is_restored_through_whichever_process_maps_it() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    rig.hold_still();
    let far: Vec<u64> = (0..rig.pages).filter(|page| rig.state_of(*page) == State::Far).take(400).collect();
    let (other, _other) = another_view(&rig, 1);
    let copy = rig.second_mapping();
    rig.vm.add_view(other, &mapped_at(Hva(copy as u64), RAM)).expect("view");
    // Of two neighbours, the first process does not map one, and the second does not map the other.
    for page in &far {
        let base = if page % 2 == 0 { rig.guest.addr() } else { copy };
        vacate(base + *page as usize * PAGE_SIZE, PAGE_SIZE);
    }
    restore_for(&rig.vm, Hold::Pinned).expect("every page is mapped somewhere");
    assert_eq!(rig.vm.stats().get(Counter::Far), 0);
    assert!((0..rig.pages).all(|page| page % 2 == 0 && far.contains(&page) || rig.holds(page, 1)), "a byte was lost");
    rig.vm.remove_view(1);
    vacate(copy, RAM.0 as usize);
}

#[test]
fn a_fault_that_the_worker_of_a_removed_view_had_read_is_raised_again() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    rig.vm.hold(Hold::Shared, Some("test".into()));
    let far = (0..rig.pages).find(|page| rig.state_of(*page) == State::Far).expect("something is far");
    rig.faults.busy_gets(u64::MAX);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| rig.holds(far, 1));
        until("the fault was put aside", || rig.vm.stats().get(Counter::FaultDeferred) > 10);
        rig.vm.remove_view(std::process::id());
        let uffd = &rig.view.uffds()[0];
        until("somebody else could read it", || {
            let mut fds = [PollFd::new(uffd, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
        });
        rig.faults.busy_gets(0);
        let (view, _theirs) = another_view(&rig, std::process::id());
        rig.vm.add_view(view, &mapped_at(rig.addr(0), RAM)).expect("view");
        assert!(waiting.join().expect("guest"), "wrong bytes");
    });
}

#[test]
fn a_successor_finds_every_byte_and_repairs_the_words_after_an_abrupt_end() {
    use ballast_pager::vm::recover::recover;
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    rig.vm.stop();
    let region = rig.vm.region(0).expect("region");
    // The store has exactly the copies that words name.
    let recovered = recover(&rig.vm.state, [&*region]).expect("recover");
    assert_eq!(recovered.live_in(RAM_STORE).count(), rig.ram_store().usage().pages);
    assert!((0..rig.pages).map(PageIdx).all(|page| {
        let word = region.word(page);
        !word.is_locked() && matches!(word.state(), State::Resident | State::Far | State::Zero)
    }));
    rig.check_census();
}

#[test]
fn nothing_is_reclaimed_before_a_view_is_there() {
    // An engine that takes over opens a VM before it gets its views; until then it cannot zap.
    let rig = Rig::without_view(RAM, AMPLE, Duration::from_millis(1)).filled();
    rig.set_limit(Some(LIMIT));
    let rounds = AtomicU64::new(0);
    until("the worker had time for many rounds", || {
        rig.vm.notify_reclaim();
        rounds.fetch_add(1, Ordering::Relaxed) > 100
    });
    assert_eq!(rig.vm.stats().get(Counter::Zapped), 0, "pages count as zapped that nobody zapped");
    rig.add_view();
    until("resident is at the limit", || rig.resident() <= LIMIT);
    rig.check_bytes();
}

#[test]
fn pages_quarantined_before_a_view_was_added_begin_their_quarantine_again() {
    let rig = Rig::unasked(RAM, AMPLE, Duration::from_secs(3600));
    rig.vm.set_may_pin();
    rig.fill_all();
    rig.set_limit(Some(LIMIT));
    until("pages are in quarantine", || rig.vm.stats().get(Counter::Quarantined) > 0);
    let zapped = rig.vm.stats().get(Counter::Zapped);
    rig.vm.remove_view(std::process::id());
    rig.add_view();
    until("they were zapped again", || rig.vm.stats().get(Counter::Zapped) > zapped);
    assert_eq!(rig.vm.stats().get(Counter::Evicted), 0);
}

#[test]
fn readahead_restores_pages_with_every_byte_and_within_the_limit() {
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    let stats = rig.vm.stats();
    for limit in [None, Some(LIMIT)] {
        rig.squeeze(Bytes(2 * MIB));
        rig.set_limit(limit);
        let before = (stats.get(Counter::FaultRestore), stats.get(Counter::Prefetched));
        rig.check_bytes();
        let faults = stats.get(Counter::FaultRestore) - before.0;
        let ahead = stats.get(Counter::Prefetched) - before.1;
        assert!(
            ahead > 2 * faults,
            "{faults} faults, and {ahead} pages that came before them, with a limit of {limit:?}"
        );
    }
    rig.count_exactly();
}

#[test]
fn a_page_that_readahead_could_not_restore_comes_with_its_own_fault() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(Bytes(2 * MIB));
    rig.hold_still();
    let far = (0..rig.pages).find(|page| rig.state_of(*page) == State::Far).expect("some page is far");
    let rest = far + 3;
    assert!((0..rest).all(|page| rig.holds(page, 1)), "a byte was lost");
    // Readahead has begun, and asks for its first page before the page of the fault.
    rig.faults.corrupt(1);
    assert!((rest..rig.pages).all(|page| rig.holds(page, 1)), "a byte was lost");
    assert_eq!(rig.vm.stats().get(Counter::Poisoned), 0, "its own fault asked again");
    rig.check_census();
}

#[test]
fn a_worker_that_panics_starts_again_without_losing_a_byte() {
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    rig.panics.store(2, Ordering::Relaxed);
    rig.squeeze(LIMIT);
    assert!(rig.reported("worker-panic"), "a put panicked");
    rig.hold_still();
    rig.panics.store(2, Ordering::Relaxed);
    rig.check_bytes();
    assert_eq!(rig.panics.load(Ordering::Relaxed), 0, "gets panicked, too");
    rig.check_census();
}

#[test]
fn a_region_that_one_process_unmaps_stays_for_the_others() {
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    let (other, _theirs) = another_view(&rig, 1);
    // The other process never touches it, so any address will do.
    let elsewhere = Hva(0x10_0000_0000);
    rig.vm.add_view(other.clone(), &mapped_at(elsewhere, RAM)).expect("view");
    assert_eq!(rig.vm.remove_region(&other, elsewhere, None).expect("unmap"), None, "the region is still mapped");
    assert!((0..rig.pages).all(|page| rig.holds(page, 1)), "the other process's unmap destroyed the guest's memory");
    assert_eq!(rig.vm.remove_region(&rig.view, rig.addr(0), None).expect("unplug"), Some(0));
}

#[test]
fn a_region_that_one_process_unplugs_is_removed_when_the_last_other_one_ends() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    let (other, _theirs) = another_view(&rig, 1);
    let elsewhere = Hva(0x10_0000_0000);
    rig.vm.add_view(other.clone(), &mapped_at(elsewhere, RAM)).expect("view");
    let address = rig.addr(0);
    assert_eq!(rig.vm.remove_region(&rig.view, address, None).expect("unplug"), None);
    assert!(rig.vm.left_unplugged().is_empty(), "the other has it");
    rig.vm.remove_view(other.pid);
    let left: Vec<u32> = rig.vm.left_unplugged().iter().map(|region| region.number).collect();
    assert_eq!(left, [0]);
    rig.vm.remove_left(0).expect("removed");
    assert!(rig.vm.region(0).expect("its number stays").is_removed() && rig.vm.state.regions()[0].removed);
    assert_eq!(rig.ram_store().usage().pages, 0, "its far pages are gone");
    assert!(rig.vm.left_unplugged().is_empty());
}

#[test]
fn a_region_that_was_unplugged_and_is_mapped_again_stays_when_that_process_ends() {
    let rig = Rig::new(RAM, AMPLE, QUICK);
    let (other, _theirs) = another_view(&rig, 1);
    let elsewhere = Hva(0x10_0000_0000);
    rig.vm.add_view(other.clone(), &mapped_at(elsewhere, RAM)).expect("view");
    let address = rig.addr(0);
    rig.vm.remove_region(&rig.view, address, None).expect("unplug");
    rig.vm.add_span(&rig.view, ballast_base::wire::Span { hva: address, len: RAM }, 0).expect("plugged again");
    rig.vm.remove_view(other.pid);
    assert!(rig.vm.left_unplugged().is_empty());
    rig.view.remove_span(address);
    assert!(rig.vm.left_unplugged().is_empty(), "nobody unplugged it since");
}

#[test]
fn a_region_is_unplugged_by_its_number_if_the_view_has_no_span_of_it() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    let address = rig.addr(0);
    rig.view.remove_span(address);
    assert_eq!(rig.vm.remove_region(&rig.view, address, Some(0)).expect("unplug"), Some(0));
    assert!(rig.vm.region(0).expect("its number stays").is_removed() && rig.vm.state.regions()[0].removed);
    let words = rig.vm.state.written_words(&rig.vm.state.regions()[0]).expect("ask");
    assert!(words.is_empty(), "its words have given their memory back: {words:?}");
}

#[test]
fn a_region_unplugged_with_pages_in_quarantine_frees_the_memory_of_its_words() {
    let rig = Rig::unasked(RAM, AMPLE, Duration::from_secs(3600));
    rig.vm.set_may_pin();
    rig.fill_all();
    rig.set_limit(Some(LIMIT));
    until("pages are in quarantine", || rig.vm.stats().get(Counter::Quarantined) > 0);
    assert_eq!(rig.vm.remove_region(&rig.view, rig.addr(0), None).expect("unplug"), Some(0));
    // The reclaim worker releases its pages from quarantine.
    rig.vm.stop();
    let words = rig.vm.state.written_words(&rig.vm.state.regions()[0]).expect("ask");
    assert!(words.is_empty(), "its words have given their memory back: {words:?}");
    assert_eq!(rig.vm.stats().get(Counter::Quarantined), 0);
}

#[test]
fn pages_of_a_region_without_a_known_process_are_restored_into_its_file() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    let address = rig.addr(0);
    rig.view.remove_span(address);
    restore_for(&rig.vm, Hold::Kept).expect("they come back");
    assert_eq!(rig.vm.far_in(&rig.vm.regions()).expect("known").0, 0);
    rig.vm.add_span(&rig.view, ballast_base::wire::Span { hva: address, len: RAM }, 0).expect("mapped again");
    rig.check_bytes();
}

#[test]
fn a_lost_page_of_a_region_without_a_known_process_costs_only_that_page() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    let address = rig.addr(0);
    rig.view.remove_span(address);
    rig.faults.corrupt(1);
    restore_for(&rig.vm, Hold::Kept).expect("all others come back");
    let census = rig.census();
    assert_eq!((census.far.0, census.poisoned.0), (0, 1));
}

#[test]
fn the_files_of_an_unplugged_region_are_closed() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    let worked_with = rig.vm.region(0).expect("region");
    rig.vm.remove_region(&rig.view, rig.addr(0), None).expect("unplug");
    let now = rig.vm.region(0).expect("its number stays");
    assert!(now.is_removed() && now.files().is_empty(), "{:?}", now.files());
    assert!(worked_with.is_removed() && worked_with.pages().0 == 0);
    until("those that worked with it have finished", || std::sync::Arc::strong_count(&worked_with) == 1);
    assert_eq!((rig.vm.size().0, rig.vm.lost(), rig.vm.stats().get(Counter::RegisteredBytes)), (0, 0, 0));
    assert_eq!(rig.vm.remove_region(&rig.view, rig.addr(0), None).expect("once"), None);
}

#[test]
fn a_vm_whose_working_set_is_larger_than_its_limit_is_held_to_it() {
    let rig = Rig::new(RAM, AMPLE, Duration::from_secs(1));
    (0..rig.pages).for_each(|page| rig.word(page).store(page, Ordering::Relaxed));
    rig.set_limit(Some(LIMIT));
    hammer(&rig, || rig.resident() <= LIMIT);
    assert!((0..rig.pages).all(|page| rig.word(page).load(Ordering::Relaxed) & 0xFFFF_FFFF == page));
}

#[test]
fn a_vm_at_rest_that_grows_by_memory_it_never_touched_is_held_to_its_limit() {
    let rig = Rig::new(RAM, AMPLE, QUICK);
    let limit = Bytes(RAM.0 / 4 * 3);
    rig.set_limit(Some(limit));
    (0..rig.pages / 2).for_each(|page| rig.fill(page, 1));
    until("reclaim rests", || rig.vm.rests());
    // None of it is registered, so the engine sees no fault.
    (rig.pages / 2..rig.pages).for_each(|page| rig.fill(page, 1));
    until("it rests at its limit", || rig.vm.rests() && rig.resident() <= limit);
    rig.check_bytes();
    until("what was restored goes", || rig.vm.rests() && rig.resident() <= limit);
    rig.check_census();
}

#[test]
fn where_memory_may_be_pinned_no_page_is_evicted_before_the_full_quarantine() {
    let rig = Rig::unasked(RAM, AMPLE, Duration::from_secs(3600));
    rig.vm.set_may_pin();
    (0..rig.pages).for_each(|page| rig.word(page).store(page, Ordering::Relaxed));
    rig.set_limit(Some(LIMIT));
    hammer(&rig, || rig.vm.stats().get(Counter::Zapped) > 4 * rig.pages);
    assert_eq!(rig.vm.stats().get(Counter::Evicted) + rig.vm.stats().get(Counter::EvictedZero), 0);
}
