//! Tests of every workload in both kinds of guest, and of the detection of wrong bytes.
//!
//! Needs: `/dev/kvm` for KVM guests (`kvm-in-qemu.sh` provides it under emulation); native guests need nothing.
//! Threads: those of the VMs. Promise: the tests are small enough for emulation, and no result depends on time.

use std::collections::HashMap;
use std::fs::File;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use ballast_base::{Bytes, Hva, MIB, PAGE_SIZE, PageIdx};
use ballast_sys::uffd::{Fault, FillOutcome, REQUIRED_FEATURES};
use ballast_sys::{Uffd, memfd};
use ballast_testkit::missing;
use ballast_testvm::{GuestKind, GuestRam, Moment, Outcome, Spec, Vm, Workload, kvm_missing};
use rustix::event::{PollFd, PollFlags};

const ALL: [Workload; 8] = [
    Workload::Sequential,
    Workload::Uniform,
    Workload::Hotset,
    Workload::Zipf,
    Workload::Store,
    Workload::Graph,
    Workload::Matrix,
    Workload::Scan,
];
const PROGRAMS: [Workload; 3] = [Workload::Graph, Workload::Matrix, Workload::Scan];

/// Returns the kinds of guest that this machine can run. Prints a skip if KVM is missing.
fn kinds() -> Vec<GuestKind> {
    if missing("kvm", kvm_missing()) {
        return vec![GuestKind::Native];
    }
    vec![GuestKind::Native, GuestKind::Kvm]
}

fn spec(workload: Workload, threads: usize) -> Spec {
    let mut spec = Spec::new(workload, Bytes(4 * MIB));
    spec.ops = 20_000;
    spec.threads = threads;
    spec.zero_fraction = 0.2;
    spec
}

fn run(spec: &Spec, kind: GuestKind) -> Outcome {
    Vm::new(spec, kind).expect("vm").run(&|_, _| ()).expect("run")
}

#[test]
fn every_workload_reads_what_it_wrote_in_every_kind_of_guest() {
    for (workload, kind) in ALL.into_iter().flat_map(|workload| kinds().into_iter().map(move |kind| (workload, kind))) {
        let outcome = run(&spec(workload, 2), kind);
        assert!(outcome.is_right(), "{outcome:?}");
        assert_eq!((outcome.ops, outcome.wrong_bytes), (20_000, 0), "{outcome:?}");
    }
}

/// Corrupt one byte of a word between two phases. The outcome must report exactly this byte.
fn spoil(kind: GuestKind, when: Moment, workload: Workload, ops: u64) {
    let mut spec = spec(workload, 1);
    spec.ops = ops;
    spec.zero_fraction = 0.0;
    let page = PageIdx(77);
    // Every operation checks the last word of a page.
    let offset = page.offset() as usize + PAGE_SIZE - 8;
    let was = Mutex::new(0);
    let vm = Vm::new(&spec, kind).expect("vm");
    let flip = |moment, ram: &GuestRam| {
        if moment == when {
            *was.lock().expect("lock") = ram.word(offset).fetch_xor(0x5A << 24, Relaxed);
        }
    };
    let outcome = vm.run(&flip).expect("run");
    assert!(!outcome.is_right());
    assert!(outcome.wrong_bytes >= 1, "{outcome:?}");
    let wrong = &outcome.wrong[0];
    let was = *was.lock().expect("lock");
    assert_eq!((wrong.page, wrong.offset), (page.0, PAGE_SIZE as u64 - 8));
    assert_eq!((wrong.expected, wrong.found), (was, was ^ 0x5A << 24));
    assert_eq!(wrong.phase, if when == Moment::Run && ops > 0 { "run" } else { "verify" });
}

#[test]
fn one_flipped_byte_is_reported_with_its_place_and_both_values() {
    for kind in kinds() {
        // The operation that reaches page 77 finds the byte, before it replaces the word.
        spoil(kind, Moment::Run, Workload::Sequential, 1024);
        // Without operations, the final check finds the byte.
        spoil(kind, Moment::Run, Workload::Sequential, 0);
        spoil(kind, Moment::Verify, Workload::Hotset, 5_000);
    }
}

#[test]
fn a_page_that_lost_its_contents_is_wrong_in_every_word() {
    for kind in kinds() {
        let vm = Vm::new(&Spec { zero_fraction: 0.0, ..spec(Workload::Uniform, 1) }, kind).expect("vm");
        let lose = |moment, ram: &GuestRam| {
            if moment == Moment::Verify {
                memfd::punch(ram.memfd(), 5 * PAGE_SIZE as u64, PAGE_SIZE as u64).expect("punch");
            }
        };
        let outcome = vm.run(&lose).expect("run");
        assert_eq!(outcome.wrong_words, PAGE_SIZE as u64 / 8, "{outcome:?}");
        assert!(outcome.wrong.iter().all(|wrong| wrong.page == 5 && wrong.found == 0), "{outcome:?}");
    }
}

#[test]
fn a_changed_byte_in_any_page_of_a_program_is_found() {
    for (kind, workload) in kinds().into_iter().flat_map(|kind| PROGRAMS.map(|workload| (kind, workload))) {
        let spec = Spec { zero_fraction: 0.0, ..spec(workload, 1) };
        // Pages that all programs use.
        for (when, page) in [(Moment::Run, PageIdx(3)), (Moment::Verify, PageIdx(520))] {
            let vm = Vm::new(&spec, kind).expect("vm");
            let flip = |moment, ram: &GuestRam| {
                if moment == when {
                    ram.word(page.offset() as usize + 8).fetch_xor(1 << 60, Relaxed);
                }
            };
            let outcome = vm.run(&flip).expect("run");
            assert!(outcome.wrong_bytes >= 1 && !outcome.is_right(), "{page:?} {outcome:?}");
            assert!(outcome.wrong.iter().all(|wrong| wrong.page == page.0), "{outcome:?}");
        }
    }
}

/// Run a VM, and before the final check restore a page to its contents after the fill.
fn run_and_put_back(vm: &Vm, page: usize) -> Outcome {
    let words = || (page * PAGE_SIZE..(page + 1) * PAGE_SIZE).step_by(8);
    let saved = Mutex::new(Vec::new());
    vm.run(&|moment, ram| match moment {
        Moment::Run => *saved.lock().expect("lock") = words().map(|at| ram.word(at).load(Relaxed)).collect(),
        Moment::Verify => {
            let saved = saved.lock().expect("lock");
            words().zip(saved.iter()).for_each(|(at, old)| ram.word(at).store(*old, Relaxed));
        }
        _ => {}
    })
    .expect("run")
}

#[test]
fn old_contents_of_a_page_of_a_program_are_wrong_contents() {
    for (kind, workload) in kinds().into_iter().flat_map(|kind| PROGRAMS.map(|workload| (kind, workload))) {
        // Programs write these words most: a vertex's state, the first piece of C, a slot of the hash table.
        let spec = Spec { zero_fraction: 0.0, ..spec(workload, 1) };
        let n = 384;
        let first = if workload == Workload::Matrix { 2 * n * n * 8 / PAGE_SIZE } else { 2 };
        let vm = Vm::new(&spec, kind).expect("vm");
        let outcome = run_and_put_back(&vm, first);
        assert!(outcome.wrong_words >= 8 && outcome.wrong[0].page == first as u64, "{workload:?}: {outcome:?}");
    }
}

#[test]
fn old_contents_of_a_single_page_are_wrong_contents() {
    for kind in kinds() {
        // Every page is written at least once. Page 8 is restored to its contents after the fill.
        let spec = Spec { write_fraction: 1.0, ops: 1024, zero_fraction: 0.0, ..spec(Workload::Sequential, 1) };
        let vm = Vm::new(&spec, kind).expect("vm");
        let outcome = run_and_put_back(&vm, 8);
        // The one operation rewrote eight sampled words. The other words are still those of the fill.
        assert_eq!((outcome.wrong_words, outcome.wrong[0].page), (8, 8), "{outcome:?}");
    }
}

/// A minimal pager: it serves a VM's faults, and takes pages out between them, until `done`. Returns the restored
/// pages.
fn page_under(ram: &GuestRam, uffd: &Uffd, done: &AtomicBool) -> std::io::Result<u64> {
    let file = File::from(ram.memfd().try_clone_to_owned()?);
    let pages = (ram.len() / PAGE_SIZE) as u64;
    let mut store: HashMap<u64, Box<[u8; PAGE_SIZE]>> = HashMap::new();
    let (mut faults, mut restored, mut next) = (Vec::new(), 0, 0);
    while !done.load(Relaxed) {
        let wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
        rustix::event::poll(&mut [PollFd::new(uffd, PollFlags::IN)], Some(&wait))?;
        uffd.read_faults(&mut faults)?;
        for Fault { addr, .. } in &faults {
            let page = (addr.0 - ram.addr() as u64) / PAGE_SIZE as u64;
            let fill = || match store.get(&page) {
                Some(bytes) => uffd.copy(*addr, &bytes[..]),
                None => match uffd.map_existing(*addr, PAGE_SIZE as u64)? {
                    FillOutcome::NotInFile => uffd.zero_page(*addr),
                    outcome => Ok(outcome),
                },
            };
            let outcome = loop {
                match fill()? {
                    FillOutcome::Retry => continue,
                    outcome => break outcome,
                }
            };
            if outcome == FillOutcome::AlreadyThere {
                uffd.wake(*addr, PAGE_SIZE as u64)?;
            }
            restored += u64::from(store.remove(&page).is_some());
        }
        for _ in 0..8 {
            next = (next + 7) % pages;
            let offset = next * PAGE_SIZE as u64;
            if memfd::is_present(ram.memfd(), offset)? {
                // After the zap, every touch of the page is a fault, which only this thread serves.
                ram.zap(offset as usize, PAGE_SIZE)?;
                let mut bytes = Box::new([0; PAGE_SIZE]);
                memfd::read_exact_at(&file, offset, &mut bytes[..])?;
                memfd::punch(ram.memfd(), offset, PAGE_SIZE as u64)?;
                store.insert(next, bytes);
            }
        }
    }
    Ok(restored)
}

#[test]
fn guest_ram_can_be_paged_out_through_userfaultfd_and_nothing_is_lost() {
    // The first operations of a program touch few pages, so programs do more.
    let long = PROGRAMS.map(|workload| (workload, if workload == Workload::Graph { 400_000 } else { 4_000 }));
    for (kind, (workload, ops)) in kinds()
        .into_iter()
        .flat_map(|kind| [(kind, (Workload::Uniform, 2_000))].into_iter().chain(long.map(|of| (kind, of))))
    {
        let spec = Spec { ops, ..spec(workload, 2) };
        let vm = Vm::new(&spec, kind).expect("vm");
        let (uffd, granted) = Uffd::create(REQUIRED_FEATURES).expect("userfaultfd (needs root or /dev/userfaultfd)");
        assert_eq!(granted, REQUIRED_FEATURES, "this kernel lacks a required userfaultfd feature");
        let done = AtomicBool::new(false);
        let (outcome, restored) = std::thread::scope(|scope| {
            let pager = scope.spawn(|| {
                let result = page_under(vm.ram(), &uffd, &done);
                // Even after an error, no worker may wait for a pager that has ended.
                uffd.unregister(Hva(vm.ram().addr() as u64), vm.ram().len() as u64)?;
                result
            });
            let outcome = vm.run(&|moment, ram| {
                if moment == Moment::Fill {
                    uffd.register(Hva(ram.addr() as u64), ram.len() as u64).expect("register");
                }
            });
            done.store(true, Relaxed);
            (outcome.expect("run"), pager.join().expect("pager").expect("paging"))
        });
        assert!(outcome.is_right(), "{outcome:?}");
        assert!(restored > 500, "{workload:?}: only {restored} pages were restored");
        println!("{kind:?}, {workload:?}: {restored} pages were taken out and restored");
    }
}

#[test]
fn idle_waits_until_it_is_stopped_and_then_verifies() {
    for kind in kinds() {
        let vm = Vm::new(&spec(Workload::Idle, 2), kind).expect("vm");
        let outcome = std::thread::scope(|scope| {
            let running = scope.spawn(|| vm.run(&|_, _| ()));
            vm.stop();
            running.join().expect("runner").expect("run")
        });
        assert!(outcome.is_right(), "{outcome:?}");
        assert_eq!(outcome.ops, 0);
    }
}

#[test]
fn an_invalid_spec_is_refused_with_the_name_of_the_field() {
    let good = spec(Workload::Hotset, 1);
    let refused = [
        ("ram", Spec { ram: Bytes(5000), ..good.clone() }),
        ("threads", Spec { threads: 0, ..good.clone() }),
        ("threads", Spec { threads: 40, ..spec(Workload::Matrix, 1) }),
    ];
    for (field, spec) in refused {
        let problem = Vm::new(&spec, GuestKind::Native).expect_err("refused").to_string();
        assert!(problem.starts_with(field), "{problem}");
    }
    let vm = Vm::new(&good, GuestKind::Native).expect("vm");
    vm.run(&|_, _| ()).expect("first run");
    vm.run(&|_, _| ()).expect_err("its memory is no longer zero");
}
