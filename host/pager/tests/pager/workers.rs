//! The faults of many VMs, served by a few workers: a failure in one VM affects no other. Against the real kernel;
//! guests are threads of this test. Needs root (userfaultfd).

use crate::common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use ballast_base::Bytes;
use ballast_base::units::MIB;
use ballast_page::page_state::State;
use ballast_pager::vm::stats::Counter;
use ballast_testvm::Finally;
use common::{Rig, until};

const RAM: Bytes = Bytes(4 * MIB);
const AMPLE: Bytes = Bytes(64 * MIB);
const QUICK: Duration = Duration::from_millis(5);

/// A VM with far pages, from which nothing is reclaimed any more.
fn squeezed() -> Rig {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(Bytes(MIB));
    rig.hold_still();
    rig
}

fn many() -> Vec<Rig> {
    let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get());
    (0..cpus + 2).map(|_| squeezed()).collect()
}

fn far_page(rig: &Rig) -> u64 {
    (0..rig.pages).find(|page| rig.state_of(*page) == State::Far).expect("something is far")
}

/// Makes a fault on a far page of each VM wait for a store that does not return.
fn hang<'scope, 'env>(
    rigs: &'env [Rig],
    scope: &'scope std::thread::Scope<'scope, 'env>,
) -> Vec<ScopedJoinHandle<'scope, bool>> {
    let hangs = |rig: &'env Rig| {
        rig.faults.stall_gets();
        let page = far_page(rig);
        let guest = scope.spawn(move || rig.holds(page, 1));
        rig.faults.wait_until_stalled(1);
        guest
    };
    rigs.iter().map(hangs).collect()
}

#[test]
fn stores_that_hang_in_more_vms_than_there_are_cpus_delay_no_other_vm_and_list_no_thread_for_it() {
    let (hung, other) = (many(), squeezed());
    std::thread::scope(|scope| {
        let _end = Finally(|| hung.iter().for_each(|rig| rig.faults.release()));
        let guests = hang(&hung, scope);
        other.check_bytes();
        assert!(guests.iter().all(|guest| !guest.is_finished()));
        let listed: Vec<Vec<u32>> = hung.iter().map(|rig| rig.vm.state.threads()).collect();
        assert!(listed.iter().all(|threads| !threads.is_empty()), "{listed:?}");
        let is_of_a_hung_one = |thread: &u32| listed.iter().any(|threads| threads.contains(thread));
        until("no thread that hangs is listed for the other", || {
            !other.vm.state.threads().iter().any(is_of_a_hung_one)
        });
        hung.iter().for_each(|rig| rig.faults.release());
        assert!(guests.into_iter().all(|guest| guest.join().expect("guest")), "wrong bytes");
    });
    for rig in hung.iter().chain([&other]) {
        rig.check_bytes();
        assert!(!rig.reported("fault-forgotten") && !rig.reported("worker-panic"));
    }
}

#[test]
fn a_stop_of_a_vm_waits_for_the_fault_that_hangs_in_it_and_for_no_other_vms() {
    let (hung, other) = ([squeezed()], squeezed());
    let stopped = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _end = Finally(|| hung[0].faults.release());
        let guests = hang(&hung, scope);
        let stopping = scope.spawn(|| {
            hung[0].vm.stop();
            assert!(stopped.load(Ordering::Acquire), "a thread was at work for the VM");
        });
        until("it is being stopped", || hung[0].vm.is_stopping());
        other.check_bytes();
        other.vm.stop();
        stopped.store(true, Ordering::Release);
        hung[0].faults.release();
        stopping.join().expect("stopped");
        assert!(guests.into_iter().all(|guest| guest.join().expect("guest")), "wrong bytes");
    });
}

#[test]
fn the_end_of_a_process_does_not_wait_for_its_hanging_fault() {
    let hung = [squeezed()];
    std::thread::scope(|scope| {
        let _end = Finally(|| hung[0].faults.release());
        let guests = hang(&hung, scope);
        hung[0].vm.remove_view(std::process::id());
        hung[0].faults.release();
        assert!(guests.into_iter().all(|guest| guest.join().expect("guest")), "it was served after all");
    });
}

#[test]
fn a_worker_that_panics_over_one_vm_serves_the_others_and_in_the_end_stops_that_vm() {
    let (bad, other) = (squeezed(), squeezed());
    bad.panics.store(2, Ordering::Relaxed);
    bad.check_bytes();
    assert!(bad.reported("worker-panic") && bad.vm.halted().is_none());
    let bad = squeezed();
    bad.panics.store(u64::MAX, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| bad.holds(far_page(&bad), 1));
        until("the VM is stopped", || bad.vm.halted().is_some());
        other.check_bytes();
        assert!(!other.reported("worker-panic") && other.vm.halted().is_none());
        bad.panics.store(0, Ordering::Relaxed);
        // No worker serves it: the next engine of the memory would wake the waiting thread.
        bad.vm.stop();
        let uffd = &bad.view.uffds()[0];
        let start = ballast_base::Hva(bad.guest.addr() as u64);
        uffd.unregister(start, bad.guest.len() as u64).expect("unregister");
        guest.join().expect("guest");
    });
}

#[test]
fn a_vm_that_keeps_faulting_starves_no_other() {
    let flood = Rig::new(RAM, AMPLE, QUICK);
    flood.fill_all();
    flood.squeeze(Bytes(MIB));
    let others: Vec<Rig> = (0..4).map(|_| squeezed()).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (flood, done) = (&flood, &done);
            scope.spawn(move || {
                for page in (thread..flood.pages).step_by(4).cycle().take_while(|_| !done.load(Ordering::Relaxed)) {
                    assert!(flood.holds(page, 1), "a byte was lost");
                }
            });
        }
        let _end = Finally(|| done.store(true, Ordering::Relaxed));
        until("it faults", || flood.vm.stats().get(Counter::FaultRestore) > 100);
        others.iter().for_each(Rig::check_bytes);
    });
    others.iter().for_each(Rig::check_census);
}
