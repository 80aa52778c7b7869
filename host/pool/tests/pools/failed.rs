//! Memory of the pool that fails, on a kernel that can let it fail on command (root, `CONFIG_MEMORY_FAILURE`).
//! `scripts/newer-kernel-suite.sh` runs this where the host's kernel cannot.

use crate::common;

use std::path::Path;
use std::sync::Once;
use std::sync::atomic::Ordering;

use ballast_base::pool::Nodes;
use ballast_base::{Bytes, GIB, HUGE_SIZE, MIB, PAGE_SIZE};
use ballast_pool::map::Mode;
use ballast_pool::{Grant, Page, Reserve};
use ballast_sys::{Mapping, memfd};
use ballast_testkit::skip;

use common::{Place, map, settle, sum, zero_all};

const SLICE: u64 = HUGE_SIZE as u64;
const PAGES: u64 = 16;

extern "C" fn on_bus_error(_: i32) {}

/// Lets memory fail. The kernel may send a signal to this thread, which has not touched it.
fn fail(map: &Mapping, at: usize) -> std::io::Result<()> {
    static CATCH: Once = Once::new();
    CATCH.call_once(|| {
        // SAFETY: the action is made of zeros, which is an empty one, and a handler that does nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_bus_error as *const () as usize;
            assert_eq!(libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()), 0);
        }
    });
    map.fail_memory(at)
}

/// Can memory fail here? Prints a skip if not.
fn can_fail() -> bool {
    let file = memfd::create("ballast-test", Bytes(PAGE_SIZE as u64)).expect("memfd");
    let map = Mapping::shared(&file, 0, PAGE_SIZE).expect("map");
    map.bytes(0, 1)[0].store(1, Ordering::Relaxed);
    fail(&map, 0).inspect_err(|why| skip("hwpoison", format_args!("MADV_HWPOISON: {why}"))).is_ok()
}

fn pool(place: &Place) -> Option<Reserve> {
    can_fail().then(|| place.pool(32, 16))?
}

fn grant(reserve: &mut Reserve, name: &str, mib: u64) -> Result<Grant, String> {
    reserve.grant(name, Bytes(mib * MIB), Mode::Slices, &Nodes::One(0)).map_err(|error| error.to_string())
}

/// Checks that every slice is zero, and marks it.
fn is_zero(map: &Mapping) -> bool {
    let words = (0..map.len()).step_by(PAGE_SIZE).map(|page| &map.words(page, 1)[0]);
    words.fold(true, |zero, word| zero & (word.swap(7, Ordering::Relaxed) == 0))
}

fn failed(reserve: &Reserve) -> u64 {
    sum(reserve, |node| node.failed)
}

fn brick(dir: &Path, number: u32) -> std::fs::File {
    let path = dir.join(format!("2M/brick-{number}"));
    std::fs::File::options().read(true).write(true).open(path).expect("its file")
}

#[test]
fn memory_that_fails_while_nobody_has_it_is_handed_to_nobody_by_this_owner_and_the_next() {
    let Some(place) = Place::new() else { return };
    let Some(mut reserve) = pool(&place) else { return };
    let ram = Mapping::shared(brick(&place.dir(), 0), 0, 16 * MIB as usize).expect("map");
    fail(&ram, 2 * HUGE_SIZE + 5 * PAGE_SIZE).expect("MADV_HWPOISON");
    drop(ram);
    // A request for all of the memory finds the failure.
    let said = grant(&mut reserve, "all", 32).expect_err("one is missing");
    assert!(said.contains("it wants 16 slices, and 15 are ready"), "{said}");
    assert_eq!((failed(&reserve), sum(&reserve, |node| node.ready)), (SLICE, 30 * MIB));
    let told = reserve.take_failures();
    assert_eq!((told.len(), told[0].slice, &told[0].owner), (1, Some(2), &None), "{told:?}");
    assert!(told[0].to_string().contains("no VM has"));
    assert!(reserve.overview().nodes[0].map.starts_with('F'), "{}", reserve.overview().nodes[0].map);
    for round in 0..2 {
        let rest = grant(&mut reserve, "rest", 30).expect("the rest is whole");
        assert!(is_zero(&map(&rest)), "{round}");
        drop(rest);
        assert_eq!(reserve.tend().expect("tend"), 1);
        settle(&mut reserve);
        reserve.validate().expect("valid");
        drop(reserve);
        reserve = place.open();
        settle(&mut reserve);
        reserve.find_failures().expect("read");
        assert_eq!((failed(&reserve), sum(&reserve, |node| node.ready)), (SLICE, 30 * MIB), "{round}");
        assert!(reserve.take_failures().is_empty(), "it is known");
    }
    // The host may borrow the rest, and the failed slice stays.
    reserve.lend(Bytes(32 * MIB), Some(place.node())).expect("lend");
    assert_eq!((failed(&reserve), place.pages()), (SLICE, 1));
    reserve.lend(Bytes(0), Some(place.node())).expect("take back");
    settle(&mut reserve);
    assert_eq!((sum(&reserve, |node| node.ready), place.pages()), (30 * MIB, PAGES));
}

#[test]
fn a_vm_keeps_its_failed_page_and_is_named_and_the_next_one_does_not_get_it() {
    let Some(place) = Place::new() else { return };
    let Some(mut reserve) = pool(&place) else { return };
    let held = grant(&mut reserve, "unlucky", 24).expect("granted");
    let ram = map(&held);
    assert!(is_zero(&ram));
    fail(&ram, 4 * HUGE_SIZE).expect("MADV_HWPOISON");
    assert_eq!(reserve.tend().expect("tend"), 0, "it lives");
    let told = reserve.take_failures();
    assert_eq!((told.len(), told[0].owner.clone()), (1, Some(("unlucky".into(), Bytes(4 * SLICE)))), "{told:?}");
    assert_eq!((failed(&reserve), sum(&reserve, |node| node.used)), (SLICE, 24 * MIB));
    // The rest of the VM's memory is as it was.
    assert_eq!(ram.words(5 * HUGE_SIZE, 1)[0].load(Ordering::Relaxed), 7);
    // Another page fails, and its VM dies of it before the next check.
    fail(&ram, 9 * HUGE_SIZE).expect("MADV_HWPOISON");
    drop((ram, held));
    assert_eq!(reserve.tend().expect("tend"), 1);
    let told = reserve.take_failures();
    assert_eq!(told[0].owner, Some(("unlucky".into(), Bytes(9 * SLICE))), "{told:?}");
    settle(&mut reserve);
    reserve.validate().expect("valid");
    assert_eq!((failed(&reserve), sum(&reserve, |node| node.ready)), (2 * SLICE, 28 * MIB));
    assert_eq!(reserve.overview().waiting, Bytes(0), "every other slice has its page");
    let next = grant(&mut reserve, "next", 28).expect("the rest is whole");
    assert!(is_zero(&map(&next)));
}

#[test]
fn a_page_that_fails_of_a_vm_on_demand_is_reported_once_with_the_vms_name_and_its_place() {
    let Some(place) = Place::new() else { return };
    let Some(mut reserve) = pool(&place) else { return };
    let held = reserve.grant_on_demand("unlucky", Bytes(16 * MIB), &Nodes::One(place.node())).expect("promised");
    reserve.set_aside().expect("pages are free");
    // Allocated as by an engine that fills pages.
    memfd::allocate(&held.files[0], 2 * SLICE, 4 * SLICE).expect("allocate");
    let ram = map(&held);
    ram.words(3 * HUGE_SIZE, 1)[0].store(7, Ordering::Relaxed);
    assert!(reserve.take_failures().is_empty());
    fail(&ram, 3 * HUGE_SIZE + PAGE_SIZE).expect("MADV_HWPOISON");
    assert_eq!(reserve.tend().expect("tend"), 0, "it lives");
    let told = reserve.take_failures();
    assert_eq!((told.len(), told[0].owner.clone()), (1, Some(("unlucky".into(), Bytes(3 * SLICE)))), "{told:?}");
    assert!(told[0].to_string().contains("a page (2 MiB) of node"), "{}", told[0]);
    // The next check reports the other page alone.
    fail(&ram, 5 * HUGE_SIZE).expect("MADV_HWPOISON");
    assert_eq!(reserve.tend().expect("tend"), 0);
    let told = reserve.take_failures();
    assert_eq!((told.len(), told[0].owner.clone()), (1, Some(("unlucky".into(), Bytes(5 * SLICE)))), "{told:?}");
    drop((ram, held));
    assert_eq!(reserve.tend().expect("tend"), 1);
    settle(&mut reserve);
    assert_eq!((failed(&reserve), reserve.overview().waiting), (0, Bytes(0)), "others take their place");
    reserve.validate().expect("valid");
    assert!(is_zero(&map(&grant(&mut reserve, "next", 32).expect("all"))));
}

#[test]
fn another_page_takes_the_place_of_a_failed_one_that_left_its_file_unseen() {
    let Some(place) = Place::new() else { return };
    let Some(mut reserve) = pool(&place) else { return };
    let held = grant(&mut reserve, "balloon", 32).expect("granted");
    let ram = map(&held);
    assert!(is_zero(&ram));
    fail(&ram, 3 * HUGE_SIZE).expect("MADV_HWPOISON");
    // The guest frees the page, or the VM moves it away, before the check.
    let extent = held.extents[0];
    memfd::punch(&held.files[usize::from(extent.file)], extent.offset.0 + 3 * SLICE, SLICE).expect("punch");
    drop((ram, held));
    assert_eq!(reserve.tend().expect("tend"), 1);
    zero_all(&mut reserve);
    assert_eq!(
        (failed(&reserve), reserve.overview().waiting),
        (0, Bytes(SLICE)),
        "the kernel gives its page to nobody"
    );
    settle(&mut reserve);
    assert_eq!((sum(&reserve, |node| node.ready), reserve.overview().waiting), (32 * MIB, Bytes(0)));
    assert_eq!(place.pages(), PAGES, "and no page is owed");
    reserve.validate().expect("valid");
    let next = grant(&mut reserve, "next", 32).expect("the rest is whole");
    assert!(is_zero(&map(&next)));
}

#[test]
fn a_page_of_a_gib_of_which_a_part_failed_is_its_vms_who_is_named_and_the_next_one_does_not_get_it() {
    let Some(place) = Place::of(Page::Gib) else { return };
    let Some(mut reserve) = can_fail().then(|| place.pool(2 << 10, 1 << 10)).flatten() else { return };
    let held = grant(&mut reserve, "unlucky", 1 << 10).expect("granted");
    let ram = map(&held);
    ram.words(0, 1)[0].store(7, Ordering::Relaxed);
    fail(&ram, 300 * MIB as usize + PAGE_SIZE).expect("MADV_HWPOISON");
    assert_eq!(reserve.tend().expect("tend"), 0, "it lives");
    let told = reserve.take_failures();
    assert_eq!((told.len(), told[0].owner.clone()), (1, Some(("unlucky".into(), Bytes(0)))), "{told:?}");
    assert!(told[0].to_string().contains("(1 GiB) of node 0"), "{}", told[0]);
    assert_eq!((failed(&reserve), sum(&reserve, |node| node.used)), (GIB, GIB));
    drop((ram, held));
    assert_eq!(reserve.tend().expect("tend"), 1);
    settle(&mut reserve);
    reserve.validate().expect("valid");
    assert_eq!((failed(&reserve), sum(&reserve, |node| node.ready)), (GIB, GIB));
    let said = grant(&mut reserve, "next", 2 << 10).expect_err("one is missing");
    assert!(said.contains("it wants 2 slices, and 1 are ready"), "{said}");
    assert!(is_zero(&map(&grant(&mut reserve, "next", 1 << 10).expect("the other one is whole"))));
}
