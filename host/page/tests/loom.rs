//! Model check of a page's life: the functions of `fault` and `evict`, on loom's atomics, over a modelled kernel.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p ballast-page --test loom --release`. Each test explores every
//! interleaving of its threads up to three forced pre-emptions (where published concurrency bugs live). Each claims
//! that the guest reads only its last write, or zeros if it discarded the page since.
#![cfg(loom)]

#[path = "loom/units.rs"]
mod units;

use std::collections::HashMap;
use std::io;

use ballast_base::fill::{FaultKind, FillOutcome};
use ballast_base::store::{
    DurableStore, FILE_STORE, GetOutcome, Handle, IoContext, NearStore, PageBytes, PageKey, PutOutcome, RAM_STORE,
    Recovered, RegionKey, Store, StoreUsage,
};
use ballast_base::wire::VmId;
use ballast_base::{PageIdx, PageRange};
use ballast_page::ahead::{map_ahead, zero_ahead};
use ballast_page::copies::{Source, StoreOf, store_number};
use ballast_page::discard::discard;
use ballast_page::evict::{LockedFrom, To, evict, quarantine};
use ballast_page::fault::{restore_run, serve};
use ballast_page::granule::Granule;
use ballast_page::memory::{Backing, Holds, Mapped, Punched, ReadOutcome};
use ballast_page::outcome::Served;
use ballast_page::page_state::{Cell, State, Ticket, Word};
use ballast_page::shift::commit;
use ballast_page::sync::AtomicU64;
use loom::sync::{Arc, Mutex};
use loom::thread;

const REGION: RegionKey = RegionKey { vm: VmId([7; 16]), number: 0 };
const KEY: PageKey = REGION.page(PageIdx(0));

fn page_of(value: u64) -> PageBytes {
    let mut bytes = [0; _];
    bytes[..8].copy_from_slice(&value.to_le_bytes());
    bytes
}

fn value_of(bytes: &PageBytes) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"))
}

/// The kernel's state of one granule: the file's content (the guest writes all its pages alike), and whether the
/// guest's page table maps it.
#[derive(Default)]
struct Kernel {
    file: Option<u64>,
    mapped: bool,
    failed: bool,
    /// A touch is a memory error.
    poisoned: bool,
    pins: u32,
    /// Number of punches: a device that holds an older page writes to memory that is no longer the guest's.
    frame: u32,
}

/// One granule, of one page or of several.
struct World {
    words: Vec<AtomicU64>,
    kernel: Mutex<Kernel>,
    /// The page is part of a huge page in use: a punch leaves zeros.
    stuck: bool,
    ram: Shelf,
    file: Shelf,
}

/// A store whose operations are atomic steps, because the interesting interleavings are around them. A freed handle is
/// reused at once, so that a word can recur with other bytes.
#[derive(Debug, Default)]
struct Shelf(std::sync::Mutex<HashMap<u64, u64>>);

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("World")
    }
}

impl Backing for World {
    fn held(&self, granules: &[PageIdx]) -> Vec<PageIdx> {
        if self.kernel.lock().unwrap().pins > 0 { granules.to_vec() } else { Vec::new() }
    }
    fn read(&self, _: PageIdx, out: &mut [PageBytes]) -> io::Result<ReadOutcome> {
        assert_eq!(out.len(), 1, "page by page, so that a guest can write between them");
        let kernel = self.kernel.lock().unwrap();
        if kernel.failed {
            return Ok(ReadOutcome::Failed);
        }
        out[0] = page_of(kernel.file.unwrap_or(0));
        Ok(ReadOutcome::Done)
    }
    fn holds(&self, _: PageRange) -> io::Result<Holds> {
        let kernel = self.kernel.lock().unwrap();
        Ok(match kernel.file {
            None => Holds::Nothing,
            Some(_) if kernel.failed => Holds::Failed,
            Some(0) => Holds::Zeros,
            Some(_) => Holds::Bytes,
        })
    }
    fn punch(&self, _: PageRange) -> io::Result<Punched> {
        let mut kernel = self.kernel.lock().unwrap();
        let frame = kernel.frame + u32::from(!self.stuck);
        *kernel = Kernel { file: self.stuck.then_some(0), pins: kernel.pins, frame, ..Kernel::default() };
        Ok(if self.stuck { Punched::Stuck } else { Punched::Gone })
    }
    fn write(&self, _: PageIdx, bytes: &PageBytes) -> io::Result<()> {
        assert_eq!(self.words.len(), 1, "the kernel cannot write to a file of huge pages");
        self.kernel.lock().unwrap().file = Some(value_of(bytes));
        Ok(())
    }
}

impl Mapped for World {
    fn install(&self, _: PageIdx, bytes: &[PageBytes]) -> io::Result<FillOutcome> {
        assert_eq!(bytes.len(), self.words.len());
        let mut kernel = self.kernel.lock().unwrap();
        if kernel.file.is_some() {
            return Ok(FillOutcome::AlreadyThere);
        }
        assert!(bytes.iter().all(|page| page == &bytes[0]), "pages of one granule come from different times");
        let (pins, frame) = (kernel.pins, kernel.frame);
        *kernel = Kernel { file: Some(value_of(&bytes[0])), mapped: true, pins, frame, ..Kernel::default() };
        Ok(FillOutcome::Done)
    }
    fn install_zero(&self, page: PageIdx) -> io::Result<FillOutcome> {
        self.install(page, &vec![[0; _]; self.words.len()])
    }
    fn map(&self, _: PageIdx) -> io::Result<FillOutcome> {
        let mut kernel = self.kernel.lock().unwrap();
        Ok(match (kernel.file, kernel.mapped) {
            (None, _) => FillOutcome::NotInFile,
            (_, true) => FillOutcome::AlreadyThere,
            _ if kernel.failed => FillOutcome::Failed,
            _ => {
                kernel.mapped = true;
                FillOutcome::Done
            }
        })
    }
    fn poison(&self, _: PageIdx) -> io::Result<FillOutcome> {
        let mut kernel = self.kernel.lock().unwrap();
        assert!(kernel.failed, "a page was lost");
        kernel.poisoned = true;
        Ok(FillOutcome::Done)
    }
    fn wake(&self, _: PageIdx) -> io::Result<()> {
        Ok(())
    }
}

impl Store for Shelf {
    fn put(&self, _: PageKey, bytes: &PageBytes) -> PutOutcome {
        let mut objects = self.0.lock().unwrap();
        let number = (1..).find(|number| !objects.contains_key(number)).expect("a free number");
        objects.insert(number, value_of(bytes));
        PutOutcome::Stored(Handle::new(number).expect("small"))
    }
    fn get(&self, _: PageKey, handle: Handle, out: &mut PageBytes, _: IoContext<'_>) -> GetOutcome {
        match self.0.lock().unwrap().get(&handle.bits()) {
            Some(value) => {
                *out = page_of(*value);
                GetOutcome::Found
            }
            None => GetOutcome::Absent,
        }
    }
    fn free(&self, _: PageKey, handle: Handle) {
        assert!(self.0.lock().unwrap().remove(&handle.bits()).is_some(), "freed twice");
    }
    fn usage(&self) -> StoreUsage {
        StoreUsage::default()
    }
}

impl DurableStore for Shelf {
    fn recover(&self, _: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        Ok(Recovered::default())
    }
}

impl NearStore for Shelf {
    fn takes_room(&self, _: Handle) -> bool {
        true
    }
    fn is_short(&self) -> bool {
        false
    }
}

impl StoreOf for World {
    fn store_of(&self, word: Word) -> Option<Source<'_>> {
        let store = match word.store() {
            RAM_STORE => &self.ram,
            FILE_STORE => &self.file,
            _ => return None,
        };
        Some(Source { store, context: IoContext::GUEST, watch: None })
    }
}

impl World {
    /// A page the guest wrote `value` to, mapped.
    fn resident(value: u64) -> Arc<Self> {
        Self::granule(1, value)
    }

    fn granule(pages: u64, value: u64) -> Arc<Self> {
        Arc::new(Self {
            words: (0..pages).map(|_| AtomicU64::new(0)).collect(),
            kernel: Mutex::new(Kernel { file: Some(value), mapped: true, ..Kernel::default() }),
            stuck: false,
            ram: Shelf::default(),
            file: Shelf::default(),
        })
    }

    fn stuck(value: u64) -> Arc<Self> {
        let mut world = Self::granule(1, value);
        Arc::get_mut(&mut world).expect("nobody else has it").stuck = true;
        world
    }

    fn far(value: u64) -> Arc<Self> {
        Self::far_granule(1, value)
    }

    fn far_granule(pages: u64, value: u64) -> Arc<Self> {
        let world = Self::granule(pages, value);
        world.reclaim(Ticket::new(0, 0));
        assert_eq!(world.cell().load().state(), State::Far);
        world
    }

    fn far_zero() -> Arc<Self> {
        let world = Self::granule(1, 0);
        world.reclaim(Ticket::new(0, 0));
        assert_eq!(world.cell().load().state(), State::Zero);
        world
    }

    fn whole(&self) -> Granule<'_> {
        Granule::new(&self.words)
    }

    fn run(&self) -> PageRange {
        PageRange::of(PageIdx(0), self.words.len() as u64)
    }

    fn cell(&self) -> Cell<'_> {
        self.whole().cell()
    }

    fn serve(&self, kind: FaultKind) {
        let served = serve(self.whole(), KEY, kind, self, self, self, |age| age).served;
        let served = served.expect("the modelled kernel never refuses");
        if served == Served::Later {
            thread::yield_now();
        }
    }

    /// A guest access: runs if the page is mapped, otherwise faults and retries.
    fn touch<T>(&self, access: impl Fn(&mut u64) -> T) -> T {
        self.try_touch(access).expect("no memory failed")
    }

    /// Like [`World::touch`]; `None` is a memory error.
    fn try_touch<T>(&self, access: impl Fn(&mut u64) -> T) -> Option<T> {
        loop {
            let kind = {
                let mut kernel = self.kernel.lock().unwrap();
                match &mut *kernel {
                    Kernel { poisoned: true, .. } => return None,
                    Kernel { file: Some(value), mapped: true, .. } => return Some(access(value)),
                    Kernel { file: Some(_), .. } => FaultKind::Minor,
                    Kernel { file: None, .. } => FaultKind::Missing,
                }
            };
            self.serve(kind);
        }
    }

    fn write(&self, new: u64) {
        self.touch(|value| *value = new);
    }

    fn read(&self) -> u64 {
        self.touch(|value| *value)
    }

    /// Gives the page to a device, by the page table as for the guest's own accesses.
    fn pin(&self) -> u32 {
        loop {
            self.read();
            let mut kernel = self.kernel.lock().unwrap();
            if kernel.mapped {
                kernel.pins += 1;
                return kernel.frame;
            }
        }
    }

    /// The device writes to it, whatever the page table says, and releases it.
    fn write_and_unpin(&self, frame: u32, new: u64) {
        {
            let mut kernel = self.kernel.lock().unwrap();
            if kernel.frame == frame {
                kernel.file = Some(new);
            }
        }
        self.kernel.lock().unwrap().pins -= 1;
    }

    fn reclaim(&self, ticket: Ticket) {
        self.reclaim_and(ticket, LockedFrom::Punch);
    }

    fn reclaim_and(&self, ticket: Ticket, from: LockedFrom) {
        if quarantine(self.cell(), ticket) {
            self.kernel.lock().unwrap().mapped = false;
        }
        self.evict_and(ticket, from);
    }

    fn evict(&self, ticket: Ticket) {
        self.evict_and(ticket, LockedFrom::Punch);
    }

    fn evict_and(&self, ticket: Ticket, from: LockedFrom) {
        let mut buffer = [[0; _]];
        let to = To { number: RAM_STORE, store: &self.ram, since: 7 };
        let evicted = evict(REGION, self.run(), |_| self.whole(), ticket, self, to, &mut buffer, from);
        assert!(evicted.failed.is_none(), "what the modelled kernel refuses is to read memory that failed");
    }

    fn discard(&self) {
        discard(
            REGION,
            self.run(),
            |_| self.whole(),
            |run| self.punch(run).map(drop),
            self,
            || Ok(thread::yield_now()),
            |_| Ok(()),
        )
        .expect("punch");
    }

    /// The memory of the page fails, if it is in DRAM: the kernel unmaps it.
    fn fail(&self) {
        let mut kernel = self.kernel.lock().unwrap();
        if kernel.file.is_some() {
            *kernel = Kernel { mapped: false, failed: true, ..*kernel };
        }
    }

    /// A spill worker meets the page: marks it, and moves its copy to the file as if it were old.
    fn spill(&self) {
        let seen = self.cell().load();
        if seen.state() != State::Far || seen.is_locked() || seen.store() != RAM_STORE {
            return;
        }
        if !self.cell().swap(seen, seen.marked()) {
            return;
        }
        for index in 0..self.words.len() {
            let from = self.whole().word_of(index);
            let is_copy = from.state() == State::Far && !from.is_locked() && from.store() == RAM_STORE;
            let mut bytes = [0; _];
            if !is_copy || self.ram.get(KEY, from.handle(), &mut bytes, IoContext::GUEST) != GetOutcome::Found {
                return;
            }
            thread::yield_now();
            let PutOutcome::Stored(handle) = self.file.put(KEY, &bytes) else { panic!("there is room") };
            let to = Word::far(FILE_STORE, handle, from.age());
            commit((self.whole(), index), KEY, (from, &self.ram), (to, &self.file), (&bytes, &[]));
        }
    }

    /// A foreign mapper reads the page: a hole is filled with zeros.
    fn read_by_a_foreign_mapper(&self) {
        self.kernel.lock().unwrap().file.get_or_insert(0);
    }

    /// A worker restores the page before a touch.
    fn prefetch(&self) {
        restore_run(KEY, std::iter::once(self.cell()), self, self, &mut [[0; _]]).expect("the modelled kernel fills");
    }

    /// A fault worker maps the page before a touch: from quarantine, or by filling its hole.
    fn ahead(&self) {
        map_ahead(PageIdx(0), std::iter::once(self.cell()), self, |age| age);
        zero_ahead(PageIdx(0), std::iter::once(self.cell()), self);
    }

    /// Checks that no lock is left, and that there is a copy exactly if the page is far.
    fn check_settled(&self) {
        let word = self.cell().load();
        assert!(!word.is_locked());
        let words: Vec<Word> = (0..self.words.len()).map(|index| self.whole().word_of(index)).collect();
        let far = words.iter().filter(|word| word.state() == State::Far).count();
        assert!(far == 0 || far == words.len(), "the pages of a granule are far together: {words:?}");
        let in_file = words.iter().filter(|word| store_number(**word) == Some(FILE_STORE)).count();
        let objects = [&self.ram, &self.file].map(|shelf| shelf.0.lock().unwrap().len());
        assert_eq!(objects, [far - in_file, in_file], "objects left over in {word:?}");
        assert_eq!(self.kernel.lock().unwrap().file.is_none() && far == 0, word.state() == State::Zero);
    }
}

fn explore(test: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(test);
}

fn spawn<W: 'static, T: 'static>(world: &Arc<W>, body: impl FnOnce(&W) -> T + 'static) -> thread::JoinHandle<T> {
    let world = world.clone();
    thread::spawn(move || body(&world))
}

#[test]
fn a_device_write_to_a_page_that_it_got_survives_an_eviction() {
    for from in [LockedFrom::Punch, LockedFrom::Copy] {
        explore(move || {
            let world = World::resident(1);
            let reclaim = spawn(&world, move |world| world.reclaim_and(Ticket::new(1, 0), from));
            let frame = world.pin();
            world.write_and_unpin(frame, 2);
            reclaim.join().unwrap();
            assert_eq!(world.read(), 2);
            world.check_settled();
        });
    }
}

#[test]
fn a_guest_that_writes_while_its_page_is_evicted_reads_its_last_write() {
    explore(|| {
        let world = World::resident(1);
        let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
        world.write(2);
        assert_eq!(world.read(), 2);
        world.write(3);
        reclaim.join().unwrap();
        assert_eq!(world.read(), 3);
        world.check_settled();
    });
}

#[test]
fn memory_that_fails_while_its_page_is_evicted_is_a_memory_error_or_costs_nothing() {
    for from in [LockedFrom::Punch, LockedFrom::Copy] {
        explore(move || {
            let world = World::resident(1);
            world.write(2);
            let reclaim = spawn(&world, move |world| world.reclaim_and(Ticket::new(1, 0), from));
            world.fail();
            let seen = world.try_touch(|value| *value);
            assert!(matches!(seen, None | Some(2)), "{seen:?}");
            reclaim.join().unwrap();
            assert_eq!(world.try_touch(|value| *value).is_none(), world.cell().load().state() == State::Poisoned);
            if seen.is_none() {
                assert_eq!(world.cell().load().state(), State::Poisoned);
            }
            world.check_settled();
        });
    }
}

#[test]
fn a_guest_that_writes_while_reclaim_is_forced_waits_and_reads_its_last_write() {
    for pages in [1, 2] {
        explore(move || {
            let world = World::granule(pages, 1);
            let reclaim = spawn(&world, |world| world.reclaim_and(Ticket::new(1, 0), LockedFrom::Copy));
            world.write(2);
            assert_eq!(world.read(), 2);
            reclaim.join().unwrap();
            assert_eq!(world.read(), 2);
            world.check_settled();
        });
    }
}

#[test]
fn a_discard_and_a_forced_reclaim_leave_zeros_or_a_later_write() {
    explore(|| {
        let world = World::resident(1);
        let reclaim = spawn(&world, |world| world.reclaim_and(Ticket::new(1, 0), LockedFrom::Copy));
        world.discard();
        assert_eq!(world.read(), 0);
        world.write(3);
        reclaim.join().unwrap();
        assert_eq!(world.read(), 3);
        world.check_settled();
    });
}

#[test]
fn a_page_that_cannot_be_punched_out_of_a_huge_page_keeps_its_bytes() {
    explore(|| {
        let world = World::stuck(1);
        let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
        assert_eq!(world.read(), 1);
        world.write(2);
        reclaim.join().unwrap();
        assert_eq!(world.read(), 2);
        world.check_settled();
    });
}

#[test]
fn an_engine_that_slept_through_its_replacement_cannot_commit_an_old_copy() {
    explore(|| {
        let world = World::resident(1);
        assert!(quarantine(world.cell(), Ticket::new(1, 0)));
        world.kernel.lock().unwrap().mapped = false;
        let old = spawn(&world, |world| world.evict(Ticket::new(1, 0)));
        world.write(2);
        world.reclaim(Ticket::new(2, 0));
        old.join().unwrap();
        assert_eq!(world.read(), 2);
        world.check_settled();
    });
}

#[test]
fn two_workers_serving_one_far_page_give_the_same_bytes_and_free_the_copy_once() {
    explore(|| {
        let world = World::far(7);
        let other = spawn(&world, |world| assert_eq!(world.read(), 7));
        assert_eq!(world.read(), 7);
        other.join().unwrap();
        world.check_settled();
    });
}

#[test]
fn a_stale_fault_of_a_second_worker_changes_nothing() {
    explore(|| {
        let world = World::far(7);
        let stale = spawn(&world, move |world| {
            world.serve(FaultKind::Missing);
            world.serve(FaultKind::Minor);
        });
        world.write(8);
        world.reclaim(Ticket::new(1, 0));
        stale.join().unwrap();
        assert_eq!(world.read(), 8);
        world.check_settled();
    });
}

#[test]
fn a_page_restored_and_written_while_reclaim_picks_it_again_keeps_the_write() {
    explore(|| {
        let world = World::far(7);
        let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
        world.write(8);
        reclaim.join().unwrap();
        assert_eq!(world.read(), 8);
        world.check_settled();
    });
}

#[test]
fn a_discarded_page_reads_zeros_even_when_it_was_being_evicted() {
    explore(|| {
        let world = World::resident(1);
        let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
        world.discard();
        assert_eq!(world.read(), 0);
        reclaim.join().unwrap();
        assert_eq!(world.read(), 0);
    });
}

#[test]
fn a_write_after_a_discard_is_kept() {
    explore(|| {
        let world = World::far(1);
        let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
        world.discard();
        world.write(2);
        reclaim.join().unwrap();
        assert_eq!(world.read(), 2);
        world.check_settled();
    });
}

#[test]
fn a_guest_that_touches_a_page_while_it_is_spilled_reads_its_last_write() {
    explore(|| {
        let world = World::far(1);
        let spill = spawn(&world, World::spill);
        assert_eq!(world.read(), 1);
        world.write(2);
        spill.join().unwrap();
        assert_eq!(world.read(), 2);
        world.check_settled();
    });
}

#[test]
fn a_page_evicted_again_under_its_old_handle_is_not_spilled_with_old_bytes() {
    explore(|| {
        let world = World::far(1);
        // The state of a spill worker that read the copy and then slept.
        let from = world.cell().load();
        let mut bytes = [0; _];
        assert_eq!(world.ram.get(KEY, from.handle(), &mut bytes, IoContext::GUEST), GetOutcome::Found);
        let PutOutcome::Stored(handle) = world.file.put(KEY, &bytes) else { panic!("there is room") };
        let spill = spawn(&world, move |world| {
            let to = Word::far(FILE_STORE, handle, from.age());
            commit((world.whole(), 0), KEY, (from, &world.ram), (to, &world.file), (&bytes, &[]));
        });
        world.write(2);
        world.reclaim(Ticket::new(1, 0));
        if world.cell().load().store() == RAM_STORE {
            assert_eq!(world.cell().load().unlocked(), from, "the word must come again, or this shows nothing");
        }
        spill.join().unwrap();
        assert_eq!(world.read(), 2);
        world.check_settled();
    });
}

#[test]
fn a_discard_of_a_page_that_is_being_spilled_leaves_no_copy() {
    explore(|| {
        let world = World::far(1);
        let spill = spawn(&world, World::spill);
        world.discard();
        assert_eq!(world.read(), 0);
        spill.join().unwrap();
        assert_eq!(world.read(), 0);
        let objects = [&world.ram, &world.file].map(|shelf| shelf.0.lock().unwrap().len());
        assert_eq!(objects, [0, 0]);
    });
}

#[test]
fn a_spilled_page_is_restored_with_its_bytes_during_reclaim_and_spill() {
    explore(|| {
        let world = World::far(1);
        world.spill();
        assert_eq!(world.cell().load().store(), FILE_STORE);
        let reclaim = spawn(&world, move |world| {
            world.reclaim(Ticket::new(1, 0));
            world.spill();
        });
        assert_eq!(world.read(), 1);
        world.write(2);
        reclaim.join().unwrap();
        assert_eq!(world.read(), 2);
        world.check_settled();
    });
}

#[test]
fn a_huge_page_that_is_written_during_its_eviction_has_its_last_write_as_a_whole() {
    explore(|| {
        let world = World::granule(2, 1);
        let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
        world.write(2);
        assert_eq!(world.read(), 2);
        reclaim.join().unwrap();
        assert_eq!(world.read(), 2);
        world.check_settled();
    });
}

#[test]
fn threads_that_touch_a_far_huge_page_see_it_whole_and_free_its_copies_once() {
    explore(|| {
        let world = World::far_granule(2, 7);
        let reader = spawn(&world, World::read);
        world.write(8);
        assert!([7, 8].contains(&reader.join().unwrap()));
        assert_eq!(world.read(), 8);
        world.check_settled();
    });
}

#[test]
fn a_huge_page_discarded_while_it_is_evicted_reads_zeros_and_leaves_no_copy() {
    explore(|| {
        let world = World::granule(2, 1);
        let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
        world.discard();
        assert_eq!(world.read(), 0);
        reclaim.join().unwrap();
        assert_eq!(world.read(), 0);
        world.check_settled();
    });
}

#[test]
fn a_huge_page_touched_while_its_pages_move_to_a_file_one_by_one_is_restored_whole() {
    explore(|| {
        let world = World::far_granule(2, 5);
        let spill = spawn(&world, World::spill);
        world.write(6);
        spill.join().unwrap();
        assert_eq!(world.read(), 6);
        world.check_settled();
    });
}

#[test]
fn a_page_restored_before_a_touch_while_it_is_written_and_evicted_keeps_the_write() {
    explore(|| {
        let world = World::far(3);
        let prefetch = spawn(&world, World::prefetch);
        let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
        world.write(4);
        assert_eq!(world.read(), 4);
        prefetch.join().unwrap();
        reclaim.join().unwrap();
        assert_eq!(world.read(), 4);
        world.check_settled();
    });
}

#[test]
fn a_page_mapped_ahead_while_it_is_evicted_and_written_keeps_the_write() {
    // A page of zeros is evicted without a copy.
    for before in [0, 1] {
        explore(move || {
            let world = World::resident(before);
            let ahead = spawn(&world, World::ahead);
            let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
            world.write(2);
            assert_eq!(world.read(), 2);
            ahead.join().unwrap();
            reclaim.join().unwrap();
            assert_eq!(world.read(), 2);
            world.check_settled();
        });
    }
}

#[test]
fn a_hole_filled_ahead_reads_zeros_or_a_write_since_its_discard() {
    explore(|| {
        let world = World::far(1);
        let ahead = spawn(&world, World::ahead);
        world.discard();
        assert_eq!(world.read(), 0);
        world.write(3);
        ahead.join().unwrap();
        assert_eq!(world.read(), 3);
        world.check_settled();
    });
}

#[test]
fn a_page_of_zeros_filled_ahead_by_two_workers_while_it_is_written_keeps_the_write() {
    explore(|| {
        let world = World::far_zero();
        let ahead = spawn(&world, World::ahead);
        let other = spawn(&world, World::ahead);
        world.write(4);
        ahead.join().unwrap();
        other.join().unwrap();
        assert_eq!(world.read(), 4);
        world.check_settled();
    });
}

#[test]
fn a_foreign_mapper_that_reads_a_far_page_while_the_guest_touches_it_costs_no_byte() {
    for pages in [1, 2] {
        explore(move || {
            let world = World::far_granule(pages, 7);
            let foreign = spawn(&world, World::read_by_a_foreign_mapper);
            assert_eq!(world.read(), 7);
            world.write(8);
            assert_eq!(world.read(), 8);
            foreign.join().unwrap();
            assert_eq!(world.read(), 8);
            world.check_settled();
        });
    }
}

#[test]
fn a_foreign_mapper_that_reads_a_page_during_eviction_and_restore_costs_no_byte() {
    for pages in [1, 2] {
        explore(move || {
            let world = World::granule(pages, 1);
            let foreign = spawn(&world, move |world| {
                world.read_by_a_foreign_mapper();
                world.read_by_a_foreign_mapper();
            });
            let reclaim = spawn(&world, |world| world.reclaim(Ticket::new(1, 0)));
            world.write(2);
            assert_eq!(world.read(), 2);
            reclaim.join().unwrap();
            foreign.join().unwrap();
            assert_eq!(world.read(), 2);
            world.check_settled();
        });
    }
}

#[test]
fn workers_that_find_a_foreign_mappers_zeros_give_the_bytes_and_free_the_copy_once() {
    explore(|| {
        let world = World::far(7);
        world.read_by_a_foreign_mapper();
        let prefetch = spawn(&world, World::prefetch);
        let stale = spawn(&world, |world| world.serve(FaultKind::Missing));
        assert_eq!(world.read(), 7);
        world.write(8);
        prefetch.join().unwrap();
        stale.join().unwrap();
        assert_eq!(world.read(), 8);
        world.check_settled();
    });
}

#[test]
fn a_page_that_is_filled_by_a_foreign_mapper_and_discarded_reads_zeros() {
    explore(|| {
        let world = World::far(7);
        let foreign = spawn(&world, World::read_by_a_foreign_mapper);
        world.discard();
        assert_eq!(world.read(), 0);
        world.write(9);
        foreign.join().unwrap();
        assert_eq!(world.read(), 9);
        world.check_settled();
    });
}
