//! A unit is mapped as a whole without its pages' locks, while its pages are evicted, touched and discarded, by the
//! functions of `unit`, `fault` and `evict`. The unit has two pages here, and the kernel maps one after the other.

use std::collections::HashMap;
use std::io;

use ballast_base::fill::{FaultKind, FillOutcome};
use ballast_base::store::{
    GetOutcome, Handle, IoContext, PageBytes, PageKey, PutOutcome, RAM_STORE, Store, StoreUsage,
};
use ballast_base::{PageIdx, PageRange};
use ballast_page::copies::{Source, StoreOf};
use ballast_page::discard::discard;
use ballast_page::evict::{LockedFrom, To, evict, quarantine, release};
use ballast_page::fault::serve;
use ballast_page::granule::Granule;
use ballast_page::memory::{Backing, Holds, Mapped, Punched, ReadOutcome};
use ballast_page::outcome::Served;
use ballast_page::page_state::{Cell, State, Ticket, Word};
use ballast_page::sync::{AtomicU8, AtomicU64};
use ballast_page::unit::Unit;
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::{REGION, explore, page_of, spawn, value_of};

const PAGES: u64 = 2;

/// The kernel's state of the unit's pages: the file's contents, and which of them the guest's page table maps.
#[derive(Default)]
struct Kernel {
    file: [Option<u64>; PAGES as usize],
    mapped: [bool; PAGES as usize],
    /// A zap for quarantine was acknowledged.
    zapped: bool,
}

struct World {
    words: [AtomicU64; PAGES as usize],
    unit: AtomicU8,
    kernel: Mutex<Kernel>,
    store: Shelf,
}

/// Copies by page and handle; a freed handle is reused at once.
#[derive(Debug, Default)]
struct Shelf(std::sync::Mutex<HashMap<(u64, u64), u64>>);

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("World")
    }
}

impl Store for Shelf {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        assert!(self.0.lock().unwrap().insert((key.page.0, 1), value_of(bytes)).is_none(), "one copy at a time");
        PutOutcome::Stored(Handle::new(1).expect("small"))
    }
    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, _: IoContext<'_>) -> GetOutcome {
        let objects = self.0.lock().unwrap();
        let Some(value) = objects.get(&(key.page.0, handle.bits())) else { return GetOutcome::Absent };
        *out = page_of(*value);
        GetOutcome::Found
    }
    fn free(&self, key: PageKey, handle: Handle) {
        assert!(self.0.lock().unwrap().remove(&(key.page.0, handle.bits())).is_some(), "freed twice");
    }
    fn usage(&self) -> StoreUsage {
        StoreUsage::default()
    }
}

impl StoreOf for Shelf {
    fn store_of(&self, _: Word) -> Option<Source<'_>> {
        Some(Source { store: self, context: IoContext::GUEST, watch: None })
    }
}

impl Backing for World {
    fn read(&self, first: PageIdx, out: &mut [PageBytes]) -> io::Result<ReadOutcome> {
        assert_eq!(out.len(), 1);
        out[0] = page_of(self.kernel.lock().unwrap().file[first.0 as usize].unwrap_or(0));
        Ok(ReadOutcome::Done)
    }
    fn holds(&self, pages: PageRange) -> io::Result<Holds> {
        let page = pages.start();
        Ok(match self.kernel.lock().unwrap().file[page.0 as usize] {
            None => Holds::Nothing,
            Some(0) => Holds::Zeros,
            Some(_) => Holds::Bytes,
        })
    }
    fn punch(&self, pages: PageRange) -> io::Result<Punched> {
        let (first, count) = (pages.start(), pages.count());
        let mut kernel = self.kernel.lock().unwrap();
        for page in first.0 as usize..(first.0 + count) as usize {
            (kernel.file[page], kernel.mapped[page]) = (None, false);
        }
        Ok(Punched::Gone)
    }
    fn write(&self, _: PageIdx, _: &PageBytes) -> io::Result<()> {
        unreachable!("nothing is stuck")
    }
}

impl Mapped for World {
    fn install(&self, page: PageIdx, bytes: &[PageBytes]) -> io::Result<FillOutcome> {
        let mut kernel = self.kernel.lock().unwrap();
        if kernel.file[page.0 as usize].is_some() {
            return Ok(FillOutcome::AlreadyThere);
        }
        kernel.file[page.0 as usize] = Some(value_of(&bytes[0]));
        kernel.mapped[page.0 as usize] = true;
        Ok(FillOutcome::Done)
    }
    fn install_zero(&self, page: PageIdx) -> io::Result<FillOutcome> {
        self.install(page, &[[0; _]])
    }
    fn map(&self, page: PageIdx) -> io::Result<FillOutcome> {
        let mut kernel = self.kernel.lock().unwrap();
        if kernel.file[page.0 as usize].is_none() {
            return Ok(FillOutcome::NotInFile);
        }
        let was = std::mem::replace(&mut kernel.mapped[page.0 as usize], true);
        Ok(if was { FillOutcome::AlreadyThere } else { FillOutcome::Done })
    }
    fn poison(&self, _: PageIdx) -> io::Result<FillOutcome> {
        panic!("a page was lost");
    }
    fn wake(&self, _: PageIdx) -> io::Result<()> {
        Ok(())
    }
}

impl World {
    /// A unit whose pages the guest has written, mapped.
    fn new() -> Arc<Self> {
        Arc::new(Self {
            words: [AtomicU64::new(0), AtomicU64::new(0)],
            unit: AtomicU8::new(0),
            kernel: Mutex::new(Kernel { file: [Some(1); _], mapped: [true; _], zapped: false }),
            store: Shelf::default(),
        })
    }

    fn granule(&self, page: PageIdx) -> Granule<'_> {
        Granule::new(std::slice::from_ref(&self.words[page.0 as usize]))
    }

    fn cell(&self, page: u64) -> Cell<'_> {
        self.granule(PageIdx(page)).cell()
    }

    fn unit(&self) -> Unit<'_> {
        Unit::new(&self.unit)
    }

    /// A guest access: runs if the page is mapped, otherwise faults and retries.
    fn touch<T>(&self, page: u64, access: impl Fn(&mut u64) -> T) -> T {
        let key = REGION.page(PageIdx(page));
        loop {
            let kind = {
                let mut kernel = self.kernel.lock().unwrap();
                let mapped = kernel.mapped[page as usize];
                match &mut kernel.file[page as usize] {
                    Some(value) if mapped => return access(value),
                    Some(_) => FaultKind::Minor,
                    None => FaultKind::Missing,
                }
            };
            // A fault worker does this (`touch::touched`), and, to save time, puts the fault aside during the mapping.
            if kind == FaultKind::Minor
                && let Some(_mapping) = self.unit().enter()
            {
                self.map_all();
                continue;
            }
            let served = serve(self.granule(key.page), key, kind, self, self, &self.store, |age| age).served;
            if served.expect("the modelled kernel never refuses") == Served::Later {
                thread::yield_now();
            }
        }
    }

    fn write(&self, page: u64, new: u64) {
        self.touch(page, |value| *value = new);
    }

    fn read(&self, page: u64) -> u64 {
        self.touch(page, |value| *value)
    }

    /// One round of a reclaim worker with the unit's first page.
    fn reclaim(&self, ticket: Ticket) {
        if quarantine(self.cell(0), ticket) {
            self.unit().disturb(thread::yield_now);
            // A zap of one page drops the unit's PMD, if it has one, and thus unmaps the other pages, too.
            self.kernel.lock().unwrap().mapped = [false; _];
        }
        let run = PageRange::of(PageIdx(0), 1);
        let mut buffer = [[0; _]];
        let granule_of = |page| self.granule(page);
        let to = To { number: RAM_STORE, store: &self.store, since: 7 };
        let evicted = evict(REGION, run, granule_of, ticket, self, to, &mut buffer, LockedFrom::Punch);
        assert!(evicted.failed.is_none(), "the modelled kernel never refuses");
        release(run, ticket, granule_of);
    }

    fn is_resident(&self) -> bool {
        (0..PAGES).all(|page| self.cell(page).load().state() == State::Resident)
    }

    /// The kernel maps a unit as a whole; it even fills holes.
    fn map_all(&self) {
        for page in 0..PAGES as usize {
            let mut kernel = self.kernel.lock().unwrap();
            kernel.file[page].get_or_insert(0);
            kernel.mapped[page] = true;
        }
    }

    fn coalesce(&self) {
        if let Some(_mapping) = self.unit().map(|| self.is_resident()) {
            self.map_all();
        }
    }

    /// A cycle of the tracker: watches the unit, zaps it, and maps it again if it was not touched.
    fn track(&self) {
        if self.unit().watch(|| self.is_resident()) {
            self.kernel.lock().unwrap().mapped = [false; _];
        }
        thread::yield_now();
        if let Some(_mapping) = self.unit().enter() {
            self.map_all();
        }
    }

    fn check_settled(&self) {
        assert!((0..PAGES).all(|page| !self.cell(page).load().is_locked()));
        let far = (0..PAGES).filter(|page| self.cell(*page).load().state() == State::Far).count();
        assert_eq!(self.store.0.lock().unwrap().len(), far);
    }
}

#[test]
fn a_write_is_kept_while_one_worker_maps_its_unit_and_another_evicts_the_page() {
    explore(|| {
        let world = World::new();
        let coalesce = spawn(&world, World::coalesce);
        let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
        world.write(0, 2);
        assert_eq!(world.read(0), 2);
        coalesce.join().unwrap();
        reclaim.join().unwrap();
        assert_eq!(world.read(0), 2);
        assert_eq!(world.read(1), 1);
        world.check_settled();
    });
}

#[test]
fn a_page_restored_while_its_unit_is_mapped_has_its_bytes() {
    explore(|| {
        let world = World::new();
        world.reclaim(Ticket::new(1, 0));
        let coalesce = spawn(&world, |world| {
            world.coalesce();
            world.coalesce();
        });
        world.write(0, 2);
        world.reclaim(Ticket::new(1, 1));
        assert_eq!(world.read(0), 2);
        coalesce.join().unwrap();
        assert_eq!(world.read(0), 2);
        world.check_settled();
    });
}

#[test]
fn a_page_discarded_while_its_unit_is_mapped_reads_zeros_and_keeps_the_next_write() {
    explore(|| {
        let world = World::new();
        let coalesce = spawn(&world, World::coalesce);
        let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
        let granule_of = |page| world.granule(page);
        let pause = || Ok(thread::yield_now());
        let punch = |run| world.punch(run).map(drop);
        discard(REGION, PageRange::one(PageIdx(0)), granule_of, punch, &world.store, pause, |_| Ok(())).expect("punch");
        assert_eq!(world.read(0), 0);
        world.write(0, 3);
        coalesce.join().unwrap();
        reclaim.join().unwrap();
        assert_eq!(world.read(0), 3);
    });
}

#[test]
fn a_write_is_kept_while_its_unit_is_watched_and_reclaim_evicts_the_page() {
    explore(|| {
        let world = World::new();
        let track = spawn(&world, World::track);
        let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
        world.write(0, 2);
        assert_eq!(world.read(0), 2);
        track.join().unwrap();
        reclaim.join().unwrap();
        assert_eq!(world.read(0), 2);
        assert_eq!(world.read(1), 1);
        world.check_settled();
    });
}

#[test]
fn a_touch_of_a_watched_unit_does_not_map_another_page_that_is_being_evicted() {
    explore(|| {
        let world = World::new();
        assert!(world.unit().watch(|| world.is_resident()));
        world.kernel.lock().unwrap().mapped = [false; _];
        let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
        let neighbour = spawn(&world, |world| world.write(1, 5));
        world.write(0, 2);
        reclaim.join().unwrap();
        neighbour.join().unwrap();
        assert_eq!((world.read(0), world.read(1)), (2, 5));
        world.check_settled();
    });
}

#[test]
fn a_unit_is_not_mapped_by_a_worker_that_read_its_words_before_a_quarantine() {
    explore(|| {
        let world = World::new();
        let coalesce = spawn(&world, |world| {
            if let Some(_mapping) = world.unit().map(|| world.is_resident()) {
                let zapped = world.kernel.lock().unwrap().zapped;
                let taken = world.cell(0).load().state() == State::Quarantine;
                assert!(!(zapped && taken), "a page in quarantine is mapped after its zap");
            }
        });
        let track = spawn(&world, |world| {
            world.unit().watch(|| world.is_resident());
        });
        assert!(quarantine(world.cell(0), Ticket::new(1, 0)));
        world.unit().disturb(thread::yield_now);
        world.kernel.lock().unwrap().zapped = true;
        coalesce.join().unwrap();
        track.join().unwrap();
    });
}
