//! A VM whose process has several userfaultfds, against the real kernel: each stripe of RAM is served through one of
//! them; the guest is threads of this test. Needs root (userfaultfd).

use crate::common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ballast_base::units::MIB;
use ballast_base::{Bytes, HUGE_SIZE, Hva, PAGE_SIZE, PAGES_PER_UNIT};
use ballast_heat::{AccessSource, UnitId, Watch};
use ballast_page::page_state::State;
use ballast_pager::scan::source::Scans;
use ballast_pager::vm::Hold;
use ballast_pager::vm::stats::Counter;
use common::{Rig, random, until};

const QUICK: Duration = Duration::from_millis(5);
const SHARDS: usize = 3;
const STRIPE: Bytes = Bytes(32 * MIB);
/// Four stripes and a part: the first userfaultfd has two of them, the second has one and the part.
const RAM: Bytes = Bytes(4 * STRIPE.0 + MIB);
const AMPLE: Bytes = Bytes(256 * MIB);

fn addr(rig: &Rig, offset: u64) -> Hva {
    Hva(rig.guest.addr() as u64 + offset)
}

#[test]
fn each_stripe_is_registered_with_one_userfaultfd_and_the_kernel_allows_no_other() {
    let rig = Rig::sharded(RAM, AMPLE, QUICK, SHARDS).filled();
    // The limit is less than the last part, so all stripes must be evicted.
    rig.set_limit(Some(Bytes(MIB / 2)));
    until("all of RAM is registered", || rig.vm.stats().get(Counter::RegisteredBytes) == RAM.0);
    for (stripe, owner) in [0, 1, 2, 0, 1].into_iter().enumerate() {
        let start = addr(&rig, stripe as u64 * STRIPE.0);
        for (shard, uffd) in rig.view.uffds().iter().enumerate() {
            let again = uffd.register(start, PAGE_SIZE as u64);
            let busy = again.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::ResourceBusy);
            assert!(busy != (shard == owner), "stripe {stripe} with userfaultfd {shard}: {again:?}");
        }
    }
    // And all chunks can be unregistered.
    rig.set_limit(None);
    rig.check_bytes();
    until("all is given back to the kernel", || rig.vm.stats().get(Counter::RegisteredBytes) == 0);
    assert!((0..rig.pages).all(|page| rig.holds(page, 1)), "a byte was lost at unregistering");
    rig.check_census();
}

#[test]
fn threads_that_write_all_over_ram_read_their_writes_whichever_worker_serves_them() {
    const EVICTIONS: u64 = 20_000;
    let rig = Rig::sharded(RAM, AMPLE, Duration::from_millis(1), SHARDS).filled();
    rig.set_limit(Some(Bytes(24 * MIB)));
    let discarded = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (rig, discarded) = (&rig, &discarded);
            scope.spawn(move || {
                // Each thread owns every fourth page.
                let mut seeds = vec![1; rig.pages as usize];
                let state = AtomicU64::new(0x9E37_79B9_7F4A_7C15 ^ thread);
                while rig.vm.stats().get(Counter::Evicted) < EVICTIONS {
                    let page = random(&state) % (rig.pages / 4) * 4 + thread;
                    let seed = &mut seeds[page as usize];
                    assert!(rig.holds(page, *seed), "page {page} in version {seed}");
                    *seed += 1;
                    if seed.is_multiple_of(3) {
                        rig.discard(page..page + 1);
                        assert_eq!(rig.word(page).load(Ordering::Relaxed), 0, "page {page} was discarded");
                        discarded.fetch_add(1, Ordering::Relaxed);
                    }
                    rig.fill(page, *seed);
                }
                for (page, seed) in seeds.iter().enumerate().skip(thread as usize).step_by(4) {
                    assert!(rig.holds(page as u64, *seed), "page {page} at the end");
                }
            });
        }
    });
    assert!(discarded.load(Ordering::Relaxed) > 0);
    rig.count_exactly();
}

#[test]
fn two_workers_serve_at_the_same_time_and_the_stall_of_both_counts_once() {
    let rig = Rig::sharded(RAM, AMPLE, QUICK, SHARDS).squeezed(Bytes(8 * MIB));
    rig.vm.hold(Hold::Shared, Some("test".into()));
    let stripe = STRIPE.0 / PAGE_SIZE as u64;
    let far = [0, stripe].map(|first| {
        let mut pages = first..first + stripe;
        pages.find(|page| rig.state_of(*page) == State::Far).expect("something is far")
    });
    let stall = || [Counter::StallSomeNs, Counter::StallFullNs].map(|counter| rig.vm.stats().get(counter));
    let (before, begin) = (stall(), Instant::now());
    let both = Duration::from_millis(100);
    rig.faults.stall_gets();
    std::thread::scope(|scope| {
        let threads = far.map(|page| {
            scope.spawn({
                let rig = &rig;
                move || rig.holds(page, 1)
            })
        });
        // A single worker could not request a second page before it has the first.
        rig.faults.wait_until_stalled(2);
        std::thread::sleep(both);
        rig.faults.release();
        assert!(threads.into_iter().all(|thread| thread.join().expect("guest")), "wrong bytes");
    });
    let waited = || stall().iter().zip(before).all(|(now, before)| u128::from(now - before) >= both.as_nanos());
    until("both kinds of stall have been counted", waited);
    rig.wait_until_booked();
    let [some, full] = [0, 1].map(|kind| Duration::from_nanos(stall()[kind] - before[kind]));
    let elapsed = begin.elapsed();
    assert!(full <= some && some <= elapsed, "full {full:?}, some {some:?} in {elapsed:?}");
}

#[test]
fn units_on_both_sides_of_a_stripes_end_are_tracked_and_mapped_huge_again() {
    let ram = Bytes(2 * STRIPE.0);
    let Some(rig) = Rig::sharded(ram, AMPLE, QUICK, 2).made_huge() else { return };
    let units = ram.0 / HUGE_SIZE as u64;
    let unit = |unit: u64| UnitId { region: 0, unit: unit as u32 };
    let mut source = Scans::new(rig.vm.clone());
    for touched in [vec![], vec![15, 16], vec![0, 14, 17, 31]] {
        source.start(&Watch { coarse: (0..units).map(unit).collect(), fine: Vec::new() }).expect("start");
        assert_eq!(rig.mapped_huge(), Bytes(0), "all of it is zapped");
        assert!(touched.iter().all(|unit| rig.holds(unit * PAGES_PER_UNIT + 7, 1)));
        let report = source.end().expect("end");
        let seen = report.units.iter().filter(|(_, seen)| seen.touched()).map(|(unit, _)| u64::from(unit.unit));
        assert_eq!(seen.collect::<Vec<_>>(), touched);
        // The kernel maps a unit by base pages if it has one of its pages isolated.
        let huge = rig.mapped_huge();
        assert!(huge.0 + HUGE_SIZE as u64 >= ram.0, "{huge}");
    }
    rig.check_bytes();
}

#[test]
fn huge_pages_of_all_stripes_are_evicted_and_restored_by_several_threads() {
    let ram = Bytes(2 * STRIPE.0 + 2 * MIB);
    let Some(rig) = Rig::huge_sharded(ram, AMPLE, QUICK, None, 2) else { return };
    rig.fill_all();
    rig.squeeze(Bytes(8 * MIB));
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let rig = &rig;
            scope.spawn(move || {
                // Each thread begins in another stripe.
                let half = rig.pages / 2;
                assert!((0..rig.pages).all(|page| rig.holds((thread * half + page) % rig.pages, 1)), "a byte was lost");
            });
        }
    });
    rig.count_exactly();
}
