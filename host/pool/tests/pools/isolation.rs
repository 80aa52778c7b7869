//! Attacks of a hostile VMM with its part of the pool, as programs: it reaches for memory of others, now or later.

use crate::common;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use ballast_base::pool::Nodes;
use ballast_base::{Bytes, HUGE_SIZE, MIB, PAGE_SIZE};
use ballast_pool::map::Mode;
use ballast_pool::{Grant, Lacks};
use ballast_sys::Mapping;
use ballast_testkit::program::Ends;

use common::{Place, SECRET, grant, hold_in_pipe, map, sum, zero_all};

const SLICE: usize = HUGE_SIZE;

fn found(map: &Mapping) -> usize {
    (0..map.len()).step_by(PAGE_SIZE).filter(|at| map.words(*at, 1)[0].load(Ordering::Relaxed) != 0).count()
}

fn mark(map: &Mapping) {
    (0..map.len()).step_by(PAGE_SIZE).for_each(|at| map.words(at, 1)[0].store(SECRET, Ordering::Relaxed));
}

/// Map a file at its start, this long, as a C program would.
fn raw_map(file: &OwnedFd, len: usize) -> *mut libc::c_void {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE);
    // SAFETY: no address is asked for, so no mapping is replaced.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, file.as_raw_fd(), 0) };
    assert_ne!(at, libc::MAP_FAILED, "{}", io::Error::last_os_error());
    at
}

#[test]
fn a_mapping_of_a_part_of_a_brick_grows_by_no_call_into_what_is_another_vms() {
    let Some(place) = Place::new() else { return };
    let Some(mut reserve) = place.pool(32, 16) else { return };
    let victim = grant(&mut reserve, "victim", 16);
    let ram = map(&victim);
    mark(&ram);
    let spy = grant(&mut reserve, "spy", 4);
    let file = &spy.files[0];
    let at = raw_map(file, SLICE);
    // SAFETY: each call is about the mapping that was just made, and grows, remaps or duplicates it at no given place.
    unsafe {
        let grown = libc::mremap(at, SLICE, 16 * SLICE, libc::MREMAP_MAYMOVE);
        assert_eq!(grown, libc::MAP_FAILED, "a mapping of huge pages grew");
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
        // A second mapping of the same pages: `mremap` with an old length of 0.
        let copy = libc::mremap(at, 0, 16 * SLICE, libc::MREMAP_MAYMOVE);
        assert_eq!(copy, libc::MAP_FAILED, "a mapping was made of nothing");
        // The one call that replaces a page of a mapping by another page of its file: here of the spy's own brick.
        for slice in [4usize, 7] {
            if libc::syscall(libc::SYS_remap_file_pages, at, SLICE, 0, slice * SLICE / PAGE_SIZE, 0) == 0 {
                assert_eq!(at.cast::<u64>().read_volatile(), 0, "slice {slice} of the brick is somebody's");
            }
        }
        libc::munmap(at, SLICE);
    }
    // By its descriptor the spy has the whole file, which is its own. If it grows the file, the new bytes are holes.
    let whole = map(&Grant {
        vm: 0,
        extents: vec![part(16)],
        files: vec![file.try_clone().expect("dup")],
        lacked: Lacks::new(),
    });
    assert_eq!(found(&whole), 0);
    rustix::fs::ftruncate(file, 64 * MIB).expect("its file");
    let longer = raw_map(file, 64 * MIB as usize);
    for slice in [8usize, 31] {
        // There are no pages of the pool: the kernel uses a free huge page of its own, or has none.
        // SAFETY: the mapping is that long.
        let touched = unsafe { libc::madvise(longer.byte_add(slice * SLICE), SLICE, libc::MADV_POPULATE_READ) };
        // SAFETY: it was just made readable, and is this test's alone.
        let word = (touched == 0).then(|| unsafe { longer.byte_add(slice * SLICE).cast::<u64>().read_volatile() });
        assert!(word.is_none_or(|word| word == 0), "{word:?}");
    }
    // SAFETY: the mapping that was made above.
    unsafe { libc::munmap(longer, 64 * MIB as usize) };
    assert_eq!(found(&ram), 16 * MIB as usize / PAGE_SIZE, "the victim's memory is as it was");
    drop((whole, spy));
    assert_eq!(reserve.tend().expect("tend"), 1);
    zero_all(&mut reserve);
    assert_eq!((place.pages(), sum(&reserve, |node| node.ready)), (16, 16 * MIB));
    reserve.validate().expect("valid");
}

fn part(mib: u64) -> ballast_base::Extent {
    ballast_base::Extent { file: 0, offset: Bytes(0), len: Bytes(mib * MIB) }
}

/// The way in which a process keeps a file of the pool.
#[derive(Debug, Clone, Copy)]
enum Keep {
    Descriptor,
    NameOnly,
    OnItsWay,
    Mapping,
    Child,
}

#[test]
fn whatever_is_kept_of_a_brick_keeps_it_from_every_other_vm() {
    use rustix::fs::{Mode as Rights, OFlags, open};
    let Some(place) = Place::new() else { return };
    let Some(mut reserve) = place.pool(32, 32) else { return };
    for keep in [Keep::Descriptor, Keep::NameOnly, Keep::OnItsWay, Keep::Mapping, Keep::Child] {
        let spy = grant(&mut reserve, "spy", 2);
        let file = spy.files[0].try_clone().expect("dup");
        drop(spy);
        let kept: Box<dyn std::any::Any> = match keep {
            Keep::Descriptor => Box::new(file),
            Keep::NameOnly => {
                let path = format!("/proc/self/fd/{}", file.as_raw_fd());
                let name = open(path, OFlags::PATH | OFlags::CLOEXEC, Rights::empty()).expect("its place");
                drop(file);
                Box::new(name)
            }
            Keep::OnItsWay => {
                let (one, two) = ballast_sys::scm::pair().expect("pair");
                ballast_sys::scm::send(&one, b"x", &[file.as_fd()]).expect("send");
                drop(file);
                Box::new((one, two))
            }
            Keep::Mapping => {
                let map = Mapping::shared(&file, 0, SLICE).expect("map");
                drop(file);
                Box::new(map)
            }
            Keep::Child => {
                let child = std::process::Command::new("sleep").arg("1000").stdin(file).spawn().expect("sleep");
                Box::new(Ends(child))
            }
        };
        assert_eq!(reserve.tend().expect("tend"), 0, "{keep:?}");
        let said = reserve.grant("victim", Bytes(2 * MIB), Mode::Slices, &Nodes::Any).map(|_| ());
        let said = said.expect_err("its brick is the spy's").to_string();
        assert!(said.contains("15 are in files of other trust domains"), "{keep:?}: {said}");
        drop(kept);
        assert_eq!(reserve.tend().expect("tend"), 1, "{keep:?}");
        zero_all(&mut reserve);
        assert_eq!(sum(&reserve, |node| node.ready), 32 * MIB, "{keep:?}");
    }
    reserve.validate().expect("valid");
}

#[test]
fn what_a_process_holds_pages_of_is_promised_to_no_vm_on_demand_before_they_are_free() {
    let Some(place) = Place::new() else { return };
    let Some(mut reserve) = place.pool(32, 16) else { return };
    let spy = grant(&mut reserve, "spy", 32);
    let ram = map(&spy);
    let pipe = hold_in_pipe(&ram, 0);
    drop((ram, spy));
    assert_eq!(reserve.tend().expect("tend"), 1);
    let here = Nodes::One(place.node());
    let untried = reserve.grant_on_demand("next", Bytes(2 * MIB), &here).map(drop).map_err(|error| error.to_string());
    let said = untried.expect_err("nobody knows yet whether there is a page for it");
    assert!(said.contains("and 0 MiB are left") || said.contains("and 0 B are left"), "{said}");
    zero_all(&mut reserve);
    if reserve.overview().waiting == Bytes(0) {
        return ballast_testkit::skip("hugetlb", "the kernel had a page that was nobody's");
    }
    let mut promise = |mib: u64| {
        let given = reserve.grant_on_demand("next", Bytes(mib * MIB), &here);
        let said = given.map(drop).map_err(|error| error.to_string());
        assert_eq!(reserve.tend().expect("tend"), usize::from(said.is_ok()));
        zero_all(&mut reserve);
        said
    };
    let said = promise(32).expect_err("a page of it may never come");
    assert!(said.contains("and 30 MiB are left"), "{said}");
    promise(30).expect("these are there");
    drop(pipe);
    for job in reserve.jobs_again() {
        let done = job.run();
        assert!(reserve.finish(done), "the page is free now");
    }
    // VMs had the file meanwhile, so the slice is zeroed once more.
    zero_all(&mut reserve);
    let none = reserve.grant_on_demand("next", Bytes(2 * MIB), &Nodes::Balanced(Vec::new())).expect_err("of no node");
    assert!(none.to_string().contains("no node is named"), "{none}");
    reserve.grant_on_demand("next", Bytes(32 * MIB), &here).expect("all of it is there");
    reserve.validate().expect("valid");
}
