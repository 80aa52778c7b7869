//! Two engines that serve the faults of one VM at the same time, while it moves from one to the other: two `Vm`s of the
//! same state file, userfaultfd and store. The guest is threads of this test. Needs root (userfaultfd).

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ballast_base::units::MIB;
use ballast_base::{Bytes, Hva, PageCount};
use ballast_handover::state_file::StateFile;
use ballast_pager::vm::Vm;
use ballast_pager::vm::client_peer::ClientPeer;
use ballast_pager::vm::shard::Shards;
use ballast_pager::vm::stats::Counter;
use ballast_pager::vm::view::View;
use ballast_sys::scm;
use common::{Rig, churn, mapped_at, serve_zaps, until};

const RAM: Bytes = Bytes(16 * MIB);
const LIMIT: Bytes = Bytes(4 * MIB);

/// Open a VM of this rig beside the engine that has it, and serve the same userfaultfds.
fn beside(rig: &Rig, last: &Vm, number: u64) -> Arc<Vm> {
    let state = StateFile::open(last.state.fd().try_clone_to_owned().expect("dup")).expect("open");
    state.name_beside(std::process::id(), number);
    let epoch = state.open_beside(std::process::id(), number);
    let vm = Vm::new(state, epoch, last.stores.clone(), last.tuning, last.reporter());
    for region in last.regions() {
        vm.open_region(region.files()).expect("region");
    }
    let vm = Arc::new(vm);
    vm.start_discards().expect("start");
    let (ours, theirs) = scm::pair().expect("socket pair");
    let guest = rig.guest.clone();
    std::thread::spawn(move || serve_zaps(&ours, &guest));
    let shards = rig.view.shards();
    let again = (0..shards.count()).map(|number| shards.get(number).try_clone().expect("dup"));
    let shards = Shards::new(again.collect()).expect("some");
    let peer = Arc::new(ClientPeer::new(theirs, epoch));
    let view = Arc::new(View::new(std::process::id(), shards, rig.uffd_features, peer));
    let len = PageCount(rig.pages).bytes();
    vm.add_view(view, &mapped_at(Hva(rig.guest.addr() as u64), len)).expect("view");
    vm
}

#[test]
fn while_a_vm_moves_two_engines_serve_its_faults_and_no_byte_is_lost_and_nothing_is_left_to_mend() {
    let rig = Rig::new(RAM, Bytes(64 * MIB), Duration::from_millis(2));
    rig.set_limit(Some(LIMIT));
    let (stop, touched) = (AtomicBool::new(false), AtomicU64::new(0));
    let more = |what: &str| {
        let from = touched.load(Ordering::Relaxed);
        until(what, || touched.load(Ordering::Relaxed) >= from + 500);
    };
    let last = std::thread::scope(|scope| {
        for thread in 0..2 {
            let (rig, stop, touched) = (&rig, &stop, &touched);
            scope.spawn(move || {
                churn(rig, thread, 2, || {
                    touched.fetch_add(1, Ordering::Relaxed);
                    stop.load(Ordering::Relaxed)
                });
            });
        }
        let mut vm = rig.vm.clone();
        for number in 2..22 {
            until("pages go", || vm.stats().get(Counter::Far) > 0);
            more("the guest goes on with one engine");
            vm.serve_faults_only();
            more("the guest goes on with one that serves faults only");
            let next = beside(&rig, &vm, number);
            more("the guest goes on with two");
            vm.stop();
            more("the guest goes on with one that follows");
            next.state.has_left();
            next.start().expect("start");
            vm = next;
        }
        stop.store(true, Ordering::Relaxed);
        vm
    });
    last.serve_faults_only();
    last.stop();
    let gauges = || [Counter::Far, Counter::Zero, Counter::Poisoned].map(|gauge| last.stats().get(gauge));
    let before = gauges();
    assert!(before[0] + before[1] > 0, "nothing is far");
    let recovered = last.recover().expect("recover");
    assert_eq!((gauges(), recovered.lost, recovered.mended), (before, 0, 0));
}
