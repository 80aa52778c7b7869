//! Memory of the host that fails under a guest's page: against a kernel that can inject the failure (root, and
//! `CONFIG_MEMORY_FAILURE`), with a guest that is threads of this test. `scripts/newer-kernel-suite.sh` runs it on a
//! kernel that can.

use crate::common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::time::Duration;

use ballast_base::units::MIB;
use ballast_base::{Bytes, HUGE_SIZE, PAGE_SIZE, PAGES_PER_UNIT, PageIdx};
use ballast_page::page_state::State;
use ballast_pager::vm::stats::Counter;
use ballast_sys::lock::Lock;
use ballast_sys::{Mapping, memfd};
use ballast_testkit::PoolLoan;
use ballast_testkit::skip;
use common::{Rig, until};

const RAM: Bytes = Bytes(32 * MIB);
const LIMIT: Bytes = Bytes(16 * MIB);
const AMPLE: Bytes = Bytes(64 * MIB);
const QUICK: Duration = Duration::from_millis(5);

/// Returns whether failures can be injected here; prints a skip if not.
fn can_fail() -> bool {
    let file = memfd::create("ballast-test", Bytes(PAGE_SIZE as u64)).expect("memfd");
    let map = Mapping::shared(&file, 0, PAGE_SIZE).expect("map");
    map.bytes(0, 1)[0].store(1, Ordering::Relaxed);
    fail(&map, 0).inspect_err(|why| skip("hwpoison", format_args!("MADV_HWPOISON: {why}"))).is_ok()
}

/// Injects a failure of a page. The kernel also signals this thread, which the tests do not need.
fn fail(map: &Mapping, at: usize) -> std::io::Result<()> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.locked();
    catch_bus_errors();
    IS_ASKED_FOR.store(true, Ordering::Release);
    let failed = map.fail_memory(at);
    IS_ASKED_FOR.store(false, Ordering::Release);
    failed
}

static IS_ASKED_FOR: AtomicBool = AtomicBool::new(false);
static BUS_CODE: AtomicI32 = AtomicI32::new(0);
static BUS_ADDR: AtomicUsize = AtomicUsize::new(0);

/// Records the memory error, and maps other memory there, so that the thread continues.
extern "C" fn on_bus_error(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if IS_ASKED_FOR.load(Ordering::Acquire) {
        return;
    }
    // SAFETY: the kernel hands the handler a whole siginfo; that of SIGBUS has an address. The page is one of the
    // guest's, which this test alone uses, and only by atomics.
    unsafe {
        let addr = (*info).si_addr() as usize;
        BUS_CODE.store((*info).si_code, Ordering::Release);
        BUS_ADDR.store(addr, Ordering::Release);
        let page = (addr & !(PAGE_SIZE - 1)) as *mut libc::c_void;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        if libc::mmap(page, PAGE_SIZE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) == libc::MAP_FAILED {
            libc::abort();
        }
    }
}

fn catch_bus_errors() {
    // SAFETY: the action is made of zeros, which is an empty one, and a handler that calls only what a handler may.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_bus_error as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        assert_eq!(libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()), 0);
    }
}

/// The result of a system call that reads the page on the guest's behalf.
fn read_by_kernel(rig: &Rig, page: u64) -> Result<(), Option<i32>> {
    let sink = memfd::create("sink", Bytes(0)).expect("memfd");
    rig.guest.send_to(&sink, page as usize * PAGE_SIZE, 8).map_err(|error| error.raw_os_error())
}

fn failed_page(rig: &Rig, page: u64, len: usize) {
    let at = page as usize * PAGE_SIZE;
    fail(&rig.guest, at).expect("MADV_HWPOISON");
    // Tracking or reclaim would zap the page, too; the zap also drops the kernel's poison marker in the page table.
    rig.guest.zap(at, len).expect("zap");
}

#[test]
fn memory_that_fails_under_an_unmapped_page_is_a_memory_error_of_that_page_alone() {
    if !can_fail() {
        return;
    }
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    rig.hold_still();
    let resident: Vec<u64> = (0..rig.pages).filter(|page| rig.state_of(*page) == State::Resident).take(2).collect();
    for (number, page) in resident.iter().enumerate() {
        failed_page(&rig, *page, PAGE_SIZE);
        assert_eq!(read_by_kernel(&rig, *page), Err(Some(libc::EFAULT)));
        until("it is counted", || rig.vm.stats().get(Counter::Poisoned) == number as u64 + 1);
        rig.wait_until_booked();
        assert_eq!(rig.state_of(*page), State::Poisoned);
        assert!(rig.reported("memory-error") && !rig.reported("fault-failed"), "{:?}", rig.reports.lock());
    }
    assert_eq!(rig.vm.halted(), None);
    let intact = (0..rig.pages).filter(|page| !resident.contains(page));
    assert!(intact.into_iter().all(|page| rig.holds(page, 1)), "a byte was lost");

    // The guest discards one of them: it can be used again, with a new page in the file.
    rig.discard(resident[0]..resident[0] + 1);
    assert_eq!(rig.word(resident[0]).load(Ordering::Relaxed), 0, "a discarded page reads zeros");
    rig.fill(resident[0], 1);
    assert!(rig.holds(resident[0], 1));
    assert_eq!(rig.vm.stats().get(Counter::Poisoned), 1);

    rig.word(resident[1]).load(Ordering::Relaxed);
    assert_eq!(BUS_CODE.load(Ordering::Acquire), libc::BUS_MCEERR_AR);
    assert_eq!(BUS_ADDR.load(Ordering::Acquire) as u64, rig.addr(resident[1]).0);
}

#[test]
fn a_page_whose_memory_fails_during_its_eviction_stays_and_reclaim_goes_on() {
    if !can_fail() {
        return;
    }
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    let pages: Vec<u64> = (0..rig.pages).step_by(1000).collect();
    pages.iter().for_each(|page| failed_page(&rig, *page, PAGE_SIZE));
    let all_else = Bytes((pages.len() * PAGE_SIZE) as u64 + 2 * MIB);
    rig.squeeze(all_else);
    let said = rig.reports.lock().expect("reports").clone();
    assert!(said.iter().all(|(kind, _)| kind == "memory-error"), "{said:?}");
    assert!((1..=pages.len()).contains(&said.len()), "once for each page at most: {said:?}");
    rig.set_limit(None);
    rig.wait_for_quarantine();
    assert!(pages.iter().all(|page| rig.state_of(*page) == State::Resident), "they stay where they are");
    assert!((0..rig.pages).filter(|page| !pages.contains(page)).all(|page| rig.holds(page, 1)), "a byte was lost");
    assert!(pages.iter().all(|page| read_by_kernel(&rig, *page).is_err()));
    assert_eq!(rig.vm.halted(), None);
}

/// The kernel reports failed memory of a huge page itself, without a fault for the engine.
#[test]
fn failed_memory_of_an_unmapped_huge_page_is_a_memory_error_until_a_discard() {
    if !can_fail() {
        return;
    }
    let Some(rig) = Rig::huge(RAM, AMPLE, QUICK, None) else { return };
    // The failed huge page is lost to the pool.
    let _spare = PoolLoan::new(1).expect("a huge page");
    rig.fill_all();
    let region = rig.vm.region(0).expect("region");
    let page = PageIdx(3 * PAGES_PER_UNIT);
    failed_page(&rig, page.0, HUGE_SIZE);
    assert!(region.is_present(page).expect("ask"), "it is in its file, whatever happened to its memory");
    rig.set_limit(Some(LIMIT));
    until("all that can go has gone", || rig.resident() <= LIMIT && rig.reported("memory-error"));
    rig.hold_still();
    assert_eq!(rig.state_of(page.0), State::Resident, "it stays where it is");
    assert_eq!(read_by_kernel(&rig, page.0 + 9), Err(Some(libc::EFAULT)));
    assert!(!rig.reported("reclaim-failed") && !rig.reported("fault-failed"), "{:?}", rig.reports.lock());
    assert_eq!(rig.vm.halted(), None);
    let intact = (0..rig.pages).filter(|other| region.first_of(PageIdx(*other)) != page);
    assert!(intact.into_iter().all(|page| rig.holds(page, 1)), "a byte was lost");
    rig.discard(page.0..page.0 + PAGES_PER_UNIT);
    assert_eq!(rig.word(page.0 + 9).load(Ordering::Relaxed), 0, "a discarded page reads zeros");
    rig.check_census();
}
