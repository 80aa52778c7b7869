//! Guest RAM that was mapped huge is mapped huge again, against the real kernel. The guest is threads of this test.
//! Needs root (userfaultfd) and `MADV_COLLAPSE`.

use crate::common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ballast_base::units::MIB;
use ballast_base::{Bytes, HUGE_SIZE, Hva, PAGE_SIZE, PAGES_PER_UNIT};
use ballast_pager::vm::Hold;
use ballast_pager::vm::client_peer::ClientPeer;
use ballast_pager::vm::stats::Counter;
use ballast_pager::vm::view::View;
use ballast_testvm::Finally;
use common::{Pipe, Rig, churn, mapped_at, until};

const RAM: Bytes = Bytes(8 * MIB);
const AMPLE: Bytes = Bytes(64 * MIB);
const QUICK: Duration = Duration::from_millis(5);

#[test]
fn memory_that_was_mapped_huge_before_eviction_is_mapped_huge_after_restore() {
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK) else { return };
    rig.squeeze(Bytes(2 * MIB));
    assert!(rig.mapped_huge() <= Bytes(2 * MIB));
    rig.set_limit(None);
    rig.check_bytes();
    until("all of it is mapped huge", || rig.mapped_huge() == RAM);
    assert!((0..rig.pages).all(|page| rig.holds(page, 1)), "a byte was lost when it was mapped huge");
    until("each unit is counted", || rig.vm.stats().get(Counter::Coalesced) >= 3);
    // And again: a unit that coalesce mapped huge is known to have been huge.
    rig.squeeze(Bytes(4 * MIB));
    rig.set_limit(None);
    assert!((0..rig.pages).all(|page| rig.holds(page, 1)), "a byte was lost on the second way");
    until("all of it is mapped huge", || rig.mapped_huge() == RAM);
    rig.check_census();
}

#[test]
fn while_each_broken_unit_lacks_a_page_coalesce_rests_until_a_page_is_resident() {
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK) else { return };
    until("no unit is broken", || rig.vm.coalesce_rests());
    rig.squeeze(Bytes(2 * MIB));
    rig.set_limit(None);
    until("broken units lack pages", || rig.vm.coalesce_rests());
    let coalesced = rig.vm.stats().get(Counter::Coalesced);
    rig.check_bytes();
    until("all of it is mapped huge", || rig.mapped_huge() == RAM);
    until("no unit is broken", || rig.vm.coalesce_rests());
    assert!(rig.vm.stats().get(Counter::Coalesced) > coalesced);
}

#[test]
fn memory_that_was_only_in_quarantine_is_mapped_huge_again_without_a_touch() {
    // Pages are zapped, the limit is raised before T has passed, and they leave quarantine.
    let Some(rig) = Rig::unasked(RAM, AMPLE, Duration::from_secs(3600)).made_huge() else { return };
    rig.vm.set_may_pin();
    rig.set_limit(Some(Bytes(2 * MIB)));
    until("pages are in quarantine", || rig.vm.stats().get(Counter::Quarantined) > PAGES_PER_UNIT);
    // They are counted before the zap.
    until("they are zapped", || rig.mapped_huge() < RAM);
    rig.set_limit(None);
    until("all of it is mapped huge", || rig.mapped_huge() == RAM);
    assert_eq!(rig.vm.stats().get(Counter::FaultMinor), 0);
}

#[test]
fn a_unit_with_a_hole_or_that_was_never_huge_is_left_alone() {
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK) else { return };
    // The guest discards a page of the first unit; the second unit becomes base pages before the engine looks.
    rig.discard(0..1);
    rig.discard(PAGES_PER_UNIT..PAGES_PER_UNIT + 1);
    rig.fill(PAGES_PER_UNIT, 2);
    let half = Bytes(RAM.0 / 2);
    assert_eq!(rig.mapped_huge(), half);
    rig.squeeze(Bytes(2 * MIB));
    rig.set_limit(None);
    assert!((1..rig.pages).filter(|page| *page != PAGES_PER_UNIT).all(|page| rig.holds(page, 1)), "a byte was lost");
    assert!(rig.holds(PAGES_PER_UNIT, 2));
    until("what was huge is huge", || rig.mapped_huge() == half);
    let resident = rig.resident();
    assert_eq!(resident, Bytes(RAM.0 - PAGE_SIZE as u64), "the hole was filled");
    assert_eq!(rig.word(0).load(Ordering::Relaxed), 0, "the hole reads zeros");
}

#[test]
fn pages_of_a_pinned_huge_page_keep_their_bytes_and_are_evicted_later() {
    // With the pin check, no page of the unit would be tried.
    let Some(rig) = Rig::unasked(RAM, AMPLE, QUICK).made_huge() else { return };
    let pipe = Pipe::with(&rig, 5..6);
    rig.set_limit(Some(Bytes(MIB)));
    until("only the pinned unit is left", || rig.resident().0 <= HUGE_SIZE as u64 + MIB);
    until("its pages would not go", || rig.vm.stats().get(Counter::Failed) > PAGES_PER_UNIT);
    assert!((0..PAGES_PER_UNIT).all(|page| rig.holds(page, 1)), "the kernel's zeros were shown to the guest");
    drop(pipe);
    until("all of it is at the limit", || rig.resident() <= Bytes(MIB));
    rig.check_bytes();
    assert!(!rig.reported("reclaim-failed") && !rig.reported("page-lost"));
}

#[test]
fn a_unit_that_cannot_be_mapped_huge_in_a_process_does_not_block_other_units() {
    let two = Bytes(2 * HUGE_SIZE as u64);
    let Some(rig) = Rig::coalesced(two, AMPLE, QUICK) else { return };
    rig.squeeze(Bytes(MIB));
    assert_eq!(rig.mapped_huge(), Bytes(0));
    rig.set_limit(None);
    rig.wait_for_quarantine();
    // Another process, which does not map the RAM: the kernel returns ENOMEM for each unit there.
    let mut process = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
    let pid = process.id();
    let _end = Finally(move || drop(process.kill().and_then(|()| process.wait())));
    let (control, _theirs) = ballast_sys::scm::pair().expect("socketpair");
    let uffd = rig.view.uffds()[0].try_clone().expect("dup");
    let uffds = vec![uffd];
    let peer = Arc::new(ClientPeer::new(control, 1));
    let other = Arc::new(View::new(pid, uffds, rig.uffd_features, peer));
    rig.vm.add_view(other, &mapped_at(Hva(0x10_0000_0000), two)).expect("view");
    rig.check_bytes();
    until("both units were tried, and are huge where they can be", || rig.mapped_huge() == two);
}

#[test]
fn nothing_is_mapped_huge_while_the_vm_is_held() {
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK) else { return };
    rig.squeeze(Bytes(2 * MIB));
    rig.hold_still();
    let before = rig.vm.stats().get(Counter::Coalesced);
    rig.check_bytes();
    assert_eq!(rig.vm.stats().get(Counter::Coalesced), before);
    rig.vm.hold(Hold::Shared, None);
    rig.set_limit(None);
    until("all of it is mapped huge", || rig.mapped_huge() == RAM);
}

#[test]
fn a_guest_that_writes_while_huge_pages_are_split_and_collapsed_reads_its_writes() {
    const COALESCED: u64 = 20;
    const EVICTED: u64 = 10_000;
    let Some(rig) = Rig::coalesced(RAM, AMPLE, Duration::from_millis(1)) else { return };
    (0..rig.pages).for_each(|page| rig.word(page).store(0, Ordering::Relaxed));
    let stats = rig.vm.stats();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (rig, done) = (&rig, &done);
            scope.spawn(move || churn(rig, thread, 2, || done.load(Ordering::Relaxed)));
        }
        // Runs also if a wait panics, because the scope joins the guest's threads.
        let _end = Finally(|| done.store(true, Ordering::Relaxed));
        while stats.get(Counter::Coalesced) < COALESCED || stats.get(Counter::Evicted) < EVICTED {
            let coalesced = stats.get(Counter::Coalesced);
            rig.squeeze(Bytes(6 * MIB));
            rig.set_limit(None);
            until("some of it is mapped huge", || {
                stats.get(Counter::Coalesced) > coalesced || rig.mapped_huge() == RAM
            });
        }
    });
}
