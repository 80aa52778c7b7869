//! Each thread that waits for a fault continues, even if the kernel or another program interferes before it is
//! resolved. Against the real kernel, with a guest that is threads of this test. Needs root (userfaultfd).

use crate::common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ballast_base::units::MIB;
use ballast_base::{Bytes, PAGE_SIZE, PageIdx};
use ballast_heat::{AccessSource, Watch};
use ballast_pager::scan::source::Scans;
use ballast_pager::vm::stats::Counter;
use ballast_testvm::Finally;
use common::{Rig, coarse, unit, until};
use rustix::mm::{MapFlags, ProtFlags};

const RAM: Bytes = Bytes(2 * 2 * MIB);
const AMPLE: Bytes = Bytes(64 * MIB);
const QUICK: Duration = Duration::from_millis(5);

/// Ends every wait, so that a failed test ends.
fn release(rig: &Rig) {
    let _ = rig.view.uffds()[0].wake(rig.addr(0), rig.guest.len() as u64);
}

#[test]
fn a_thread_whose_memory_is_replaced_while_it_waits_continues_on_the_new_memory() {
    const PAGE: u64 = 77;
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    let mut source = Scans::new(rig.vm.clone());
    source.start(&coarse(2)).expect("start");
    // Tracking without zaps leaves the pages mapped.
    rig.guest.zap(0, rig.guest.len()).expect("zap");
    let region = rig.vm.region(0).expect("region");
    let cell = region.granule(PageIdx(PAGE)).cell();
    std::thread::scope(|scope| {
        // While the page is locked, the fault worker keeps the fault pending.
        let lock = cell.lock(cell.load(), cell.load()).expect("nobody has it");
        let thread = scope.spawn(|| rig.word(PAGE).load(Ordering::Relaxed));
        let _end = Finally(|| release(&rig));
        until("the worker has the fault", || rig.vm.stats().get(Counter::FaultDeferred) > 0);
        let at = (rig.guest.addr() + PAGE as usize * PAGE_SIZE) as *mut _;
        // A VMM may map something over a part of its RAM without notice.
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the page is inside of the rig's mapping, which nothing but atomics and raw copies refer to.
        unsafe { rustix::mm::mmap_anonymous(at, PAGE_SIZE, ProtFlags::READ | ProtFlags::WRITE, flags) }.expect("map");
        drop(lock);
        until("the thread goes on", || thread.is_finished());
        assert_eq!(thread.join().expect("the thread"), 0, "what is there now");
    });
    assert!(!rig.reported("fault-forgotten"), "the worker itself woke it");
}

#[test]
fn a_thread_whose_fault_another_program_read_continues_and_operators_are_told() {
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    let mut source = Scans::new(rig.vm.clone());
    // Page by page, so that no page is mapped with others.
    source.start(&Watch { fine: vec![unit(0)], ..Watch::default() }).expect("start");
    let stolen = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // Faults until the thief is the first to read one.
            while !stolen.load(Ordering::Acquire) {
                rig.guest.zap(0, PAGE_SIZE).expect("zap");
                assert!(rig.holds(0, 1));
            }
        });
        let _end = Finally(|| {
            stolen.store(true, Ordering::Release);
            release(&rig);
        });
        let mut faults = Vec::with_capacity(1);
        while faults.is_empty() {
            rig.view.uffds()[0].read_faults(&mut faults).expect("read");
        }
        stolen.store(true, Ordering::Release);
        until("the thread goes on", || thread.is_finished());
    });
    until("operators are told", || rig.reported("fault-forgotten"));
    drop(source);
    rig.check_bytes();
}

#[test]
fn a_guest_runs_while_its_memory_is_registered_and_unregistered_in_turn() {
    const TURNS: u64 = 30;
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    let done = AtomicBool::new(false);
    let touched = [AtomicU64::new(0), AtomicU64::new(0)];
    std::thread::scope(|scope| {
        for (first, touched) in (0..).zip(&touched) {
            let (rig, done) = (&rig, &done);
            scope.spawn(move || {
                for page in (first..rig.pages).step_by(2).cycle().take_while(|_| !done.load(Ordering::Relaxed)) {
                    assert!(rig.holds(page, 1), "a byte was lost");
                    touched.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let _end = Finally(|| {
            done.store(true, Ordering::Relaxed);
            release(&rig);
        });
        for _ in 0..TURNS {
            let mut source = Scans::new(rig.vm.clone());
            source.start(&coarse(2)).expect("start");
            rig.guest.zap(0, rig.guest.len()).expect("zap");
            drop(source);
            rig.vm.notify_reclaim();
            until("it is given back", || rig.vm.stats().get(Counter::RegisteredBytes) == 0);
            for touched in &touched {
                let before = touched.load(Ordering::Relaxed);
                until("each thread goes on", || touched.load(Ordering::Relaxed) > before);
            }
        }
    });
    assert!(!rig.reported("fault-forgotten"));
}
