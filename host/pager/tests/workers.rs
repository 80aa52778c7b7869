//! The faults of many VMs, served by the same few workers: what goes wrong in one VM is no other's trouble. Against the
//! real kernel; guests are threads of this test. Needs root (userfaultfd).

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use ballast_base::Bytes;
use ballast_base::units::MIB;
use ballast_page::page_state::State;
use ballast_pager::vm::Hold;
use ballast_pager::vm::stats::Counter;
use ballast_testvm::Finally;
use common::{Rig, until};

const RAM: Bytes = Bytes(4 * MIB);
const AMPLE: Bytes = Bytes(64 * MIB);
const QUICK: Duration = Duration::from_millis(5);

/// A VM with far pages that nothing is reclaimed from any more.
fn squeezed() -> Rig {
    let rig = Rig::new(RAM, AMPLE, QUICK);
    rig.fill_all();
    rig.squeeze(Bytes(MIB));
    rig.vm.hold(Hold::Shared, Some("test".into()));
    rig.wait_for_quarantine();
    rig
}

/// More VMs than there are CPUs.
fn many() -> Vec<Rig> {
    let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get());
    (0..cpus + 2).map(|_| squeezed()).collect()
}

fn far_page(rig: &Rig) -> u64 {
    (0..rig.pages).find(|page| rig.state_of(*page) == State::Far).expect("something is far")
}

/// A fault on a far page of each waits for a store that does not return.
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
fn stores_that_hang_in_more_vms_than_there_are_cpus_delay_no_other_vm() {
    let (hung, other) = (many(), squeezed());
    std::thread::scope(|scope| {
        let _end = Finally(|| hung.iter().for_each(|rig| rig.faults.release()));
        let guests = hang(&hung, scope);
        other.check_bytes();
        assert!(guests.iter().all(|guest| !guest.is_finished()));
        hung.iter().for_each(|rig| rig.faults.release());
        assert!(guests.into_iter().all(|guest| guest.join().expect("guest")), "wrong bytes");
    });
    for rig in hung.iter().chain([&other]) {
        rig.check_bytes();
        assert!(!rig.reported("fault-forgotten") && !rig.reported("worker-panic"));
    }
}

#[test]
fn a_thread_is_listed_for_the_vm_whose_fault_it_serves_and_for_no_other() {
    let (hung, other) = (many(), squeezed());
    std::thread::scope(|scope| {
        let _end = Finally(|| hung.iter().for_each(|rig| rig.faults.release()));
        let guests = hang(&hung, scope);
        other.check_bytes();
        let listed: Vec<Vec<u32>> = hung.iter().map(|rig| rig.vm.state.threads()).collect();
        assert!(listed.iter().all(|threads| !threads.is_empty()), "{listed:?}");
        let is_of_a_hung_one = |thread: &u32| listed.iter().any(|threads| threads.contains(thread));
        until("no thread that hangs is listed for the other", || {
            !other.vm.state.threads().iter().any(is_of_a_hung_one)
        });
        hung.iter().for_each(|rig| rig.faults.release());
        assert!(guests.into_iter().all(|guest| guest.join().expect("guest")), "wrong bytes");
    });
}

#[test]
fn who_stops_a_vm_waits_for_the_fault_that_hangs_in_it_and_for_no_other_vms() {
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
fn a_process_that_goes_while_its_fault_hangs_is_not_waited_for() {
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
fn a_worker_that_panics_over_one_vm_goes_on_with_the_others_and_stops_that_one_when_it_does_not_help() {
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
        // Nobody serves it: the thread that waits is woken by the next engine of the memory.
        bad.vm.stop();
        let uffd = bad.view.shards().get(0);
        let start = ballast_base::Hva(bad.guest.addr() as u64);
        uffd.unregister(start, bad.guest.len() as u64).expect("unregister");
        guest.join().expect("guest");
    });
}

#[test]
fn a_vm_that_faults_all_the_time_keeps_no_other_from_being_served() {
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
