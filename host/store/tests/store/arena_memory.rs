//! Memory errors in an arena: the store keeps working, returns the undamaged pages, and reports the rest.
//!
//! Before: a store of pages, and a userfaultfd poison mark that makes the touch of a page of its arena a `SIGBUS`, like
//! bad memory (Linux 6.6). After: no page has other bytes, in this process or its successor, and the store takes pages
//! again.
//! Threads: one. Units: bytes, pages, slabs of 64 KiB.
//! Promise: nothing is cleaned up that a real memory error would leave.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ballast_base::{Bytes, Hva, PAGE_SIZE};
use ballast_store::{Budget, GetOutcome, Handle, IoContext, RamOptions, RamStore, SLAB_BYTES, Store};
use ballast_sys::uffd::{FillOutcome, REQUIRED_FEATURES, Uffd, feature};
use ballast_sys::{memfd, memory_error};
use ballast_testkit::pages;
use ballast_testkit::skip;

use crate::common::{self, key};

const PAGES: u64 = 3000;
/// One page of the table has the entries of 32 slabs.
const SLABS_A_PAGE: u64 = 32;

fn options(budget: &Arc<Budget>) -> RamOptions {
    RamOptions { max_slabs: 1024, ..RamOptions::new(budget.clone()) }
}

struct Rig {
    store: RamStore,
    arena: OwnedFd,
    budget: Arc<Budget>,
    handles: Vec<Handle>,
    uffd: Uffd,
}

/// A store of pages that each take a slot; `None`, with a message, where no error can be simulated.
fn rig() -> Option<Rig> {
    let features = REQUIRED_FEATURES | feature::POISON;
    let Some((uffd, _)) = Uffd::create(features).ok().filter(|(_, granted)| *granted == features) else {
        skip("uffd", "no userfaultfd that can poison pages for this user");
        return None;
    };
    memory_error::install().expect("install");
    let budget = Budget::new(Bytes(64 << 20));
    let (store, arena) = RamStore::create(options(&budget)).expect("create");
    let handles = (0..PAGES).map(|page| put(&store, page)).collect();
    Some(Rig { store, arena, budget, handles, uffd })
}

fn put(store: &RamStore, page: u64) -> Handle {
    common::put(store, page, &pages::incompressible(page))
}

/// The address at which this process maps this offset of the file, which it maps as one piece.
fn addr_of(file: &OwnedFd, offset: u64) -> u64 {
    let (ino, size) = (memfd::file_id(file).expect("stat").ino, memfd::size(file).expect("stat").0);
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let start = maps.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (start, end) = fields[0].split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        (fields[4] == ino.to_string() && end - start >= size).then_some(start)
    });
    start.expect("mapped") + offset
}

impl Rig {
    fn lose(&self, offset: u64) {
        let at = Hva(addr_of(&self.arena, offset));
        // SAFETY: a page of a shared mapping of the arena, whose contents stay in the file.
        assert!(unsafe { ballast_sys::zap::zap(&[(at.0 as usize, PAGE_SIZE)]) }.is_empty());
        self.uffd.register(at, PAGE_SIZE as u64).expect("register");
        assert_eq!(self.uffd.poison(at, PAGE_SIZE as u64).expect("poison"), FillOutcome::Done);
    }

    /// The number of pages that are found, and of those lost; checks the bytes.
    fn read(&self, store: &RamStore) -> (u64, u64) {
        let (mut found, mut lost) = (0, 0);
        for (page, handle) in (0..).zip(&self.handles) {
            let mut bytes = [0; PAGE_SIZE];
            match store.get(key(page), *handle, &mut bytes, IoContext::GUEST) {
                GetOutcome::Found => {
                    assert_eq!(bytes, pages::incompressible(page), "page {page} was restored with other bytes");
                    found += 1;
                }
                GetOutcome::Absent | GetOutcome::Corrupt => lost += 1,
                GetOutcome::Busy => panic!("page {page} is busy"),
            }
        }
        (found, lost)
    }

    /// The store in the next process, after a sweep with all handles that are still named.
    fn successor(&self) -> RamStore {
        let store = RamStore::open(self.arena.try_clone().expect("dup"), options(&self.budget)).expect("open");
        store.sweep(self.handles.iter().copied());
        store.validate().expect("sound");
        store
    }
}

#[test]
fn a_lost_page_of_blobs_costs_the_pages_in_it() {
    let Some(rig) = rig() else { return };
    let slabs_start = memfd::size(&rig.arena).expect("stat").0 - 1024 * SLAB_BYTES as u64;
    rig.lose(slabs_start + 5 * SLAB_BYTES as u64 + 4096);
    let (found, lost) = rig.read(&rig.store);
    assert!((1..=2).contains(&lost), "a page of memory is in two pages of the guest at most: {lost}");
    assert_eq!(found + lost, PAGES);
    let (said, is_damaged) = rig.store.losses();
    assert!(said.len() == 1 && said[0].contains("a part of slab 5") && !is_damaged, "{said:?}");
    let more: Vec<u64> = (PAGES..PAGES + 100).collect();
    let handles: Vec<Handle> = more.iter().map(|page| put(&rig.store, *page)).collect();
    for (page, handle) in more.iter().zip(handles) {
        assert_eq!(rig.store.get(key(*page), handle, &mut [0; _], IoContext::GUEST), GetOutcome::Found);
    }
    assert_eq!(rig.read(&rig.store), (found, lost));
}

#[test]
fn a_lost_page_of_the_table_costs_its_slabs_which_stay_unused_until_a_sweep() {
    let Some(mut rig) = rig() else { return };
    rig.lose(4096);
    let (found, lost) = rig.read(&rig.store);
    // An incompressible page takes a slot of 4112 bytes.
    assert_eq!((found, lost), (PAGES - lost, SLABS_A_PAGE * (SLAB_BYTES as u64 / 4112)));
    let (said, is_damaged) = rig.store.losses();
    assert!(said[0].contains("the table entries of slabs 0 to 31") && is_damaged, "{said:?}");
    // New pages go to other slabs, and frees of lost pages do no harm.
    for page in 0..PAGES {
        if rig.store.get(key(page), rig.handles[page as usize], &mut [0; _], IoContext::GUEST) != GetOutcome::Found {
            rig.store.free(key(page), rig.handles[page as usize]);
            rig.handles[page as usize] = put(&rig.store, page);
        }
    }
    assert_eq!(rig.read(&rig.store), (PAGES, 0));
    rig.store.sweep(rig.handles.iter().copied());
    rig.store.validate().expect("sound after the sweep");
    assert_eq!(rig.read(&rig.store), (PAGES, 0));
    let successor = rig.successor();
    assert_eq!(rig.read(&successor), (PAGES, 0));
}

#[test]
fn an_arena_whose_header_is_gone_is_opened_by_its_size() {
    let Some(rig) = rig() else { return };
    let held = rig.store.usage().bytes;
    memfd::punch(&rig.arena, 0, PAGE_SIZE as u64).expect("punch");
    let successor = rig.successor();
    assert!(successor.losses().0[0].contains("the header, which was written again"));
    assert_eq!((rig.read(&successor), successor.usage().bytes), ((PAGES, 0), held));
}
