//! A VM without a VMM: guest RAM, a userfaultfd and a client thread in this process, everything real but the guest.

#![allow(dead_code, reason = "each test program uses a part of it")]

pub mod third;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use ballast_base::store::{DurableStore, FILE_STORE, IoContext, NearStore, RAM_STORE, SlowStore};
use ballast_base::units::MIB;
use ballast_base::wire::{self, ClientToEngine, EngineToClient, Span, VmId};
use ballast_base::{Bytes, Extents, HUGE_SIZE, Hva, PAGE_SIZE, PAGES_PER_UNIT, PageCount, PageIdx};
use ballast_handover::state_file::StateFile;
use ballast_heat::{PageMap, UnitId, Watch};
use ballast_page::copies::store_number;
use ballast_page::page_state::State;
use ballast_pager::vm::client_peer::ClientPeer;
use ballast_pager::vm::far::stores::{NearTier, SlowTier, Stores};
use ballast_pager::vm::pinned::Pins;
use ballast_pager::vm::ram::RamFile;
use ballast_pager::vm::region_table::LOST;
use ballast_pager::vm::stats::Counter;
use ballast_pager::vm::tuning::HostTiers;
use ballast_pager::vm::view::View;
use ballast_pager::vm::{Hold, Tuning, Vm};
use ballast_store::{
    Budget, DiskFaults, FileOptions, FileStore, GetOutcome, Handle, PageBytes, PageKey, PutOutcome, RamOptions,
    RamStore, Recovered, Store, StoreUsage,
};
use ballast_sys::remote::Collapsed;
use ballast_sys::{Mapping, Remote, Uffd, memfd, scm, uffd};
use ballast_testkit::PoolLoan;
use ballast_testkit::{Faults, FaultyStore, NullStore};
use ballast_testkit::{missing, skip};
use ballast_testvm::Finally;

/// A VM and its guest side.
pub struct Rig {
    /// Features that the kernel granted.
    pub uffd_features: u64,
    pub vm: Arc<Vm>,
    pub guest: Arc<Mapping>,
    pub faults: Arc<Faults>,
    /// Number of calls of the store that will panic.
    pub panics: Arc<AtomicU64>,
    pub reports: Arc<Mutex<Vec<(String, String)>>>,
    pub view: Arc<View>,
    pub pages: u64,
    /// Kept open as a client would: the last close would turn missing pages into zeros.
    _uffds: Vec<Uffd>,
    client: Option<JoinHandle<()>>,
    hang_up: OwnedFd,
    _loan: Option<PoolLoan>,
}

pub fn restore_for(vm: &Vm, kind: Hold) -> std::io::Result<()> {
    vm.hold(kind, Some("the test says so".into()));
    vm.restore()
}

/// The place of each page of a VM: each is in exactly one part.
#[derive(Clone, Copy, Debug, Default)]
pub struct Census {
    pub size: PageCount,
    /// In their file.
    pub resident: PageCount,
    pub far: PageCount,
    pub zero: PageCount,
    /// Never touched, or discarded.
    pub untouched: PageCount,
    pub poisoned: PageCount,
}

struct Setup {
    ram: Bytes,
    store_budget: Bytes,
    quarantine: Duration,
    spill: Option<(Vec<SlowTier>, Duration)>,
    huge: bool,
    shards: usize,
    /// Requested userfaultfd features, beside the required ones.
    features: u64,
    /// The pin check of this machine, or none.
    pins: Arc<Pins>,
    /// Extents of RAM; `None`: one file.
    extents: Option<Extents>,
    /// NUMA nodes to place its pages on.
    tiers: Option<HostTiers>,
}

/// Content of the RAM files outside of the extents.
pub const NOT_RAM: [u8; PAGE_SIZE] = [0xA5; PAGE_SIZE];

pub const RAM: Bytes = Bytes(32 * MIB);
pub const LIMIT: Bytes = Bytes(8 * MIB);
pub const AMPLE: Bytes = Bytes(64 * MIB);
pub const QUICK: Duration = Duration::from_millis(20);
pub const SOON: Duration = Duration::from_millis(10);

/// A file store on a disk with injected faults; `None` and a printed skip if there is none.
pub fn faulty_disk() -> Option<(Arc<FileStore>, Arc<DiskFaults>)> {
    let faults = Arc::new(DiskFaults::default());
    let options = FileOptions { faults: Some(faults.clone()), ..FileOptions::new(Budget::new(AMPLE)) };
    let (store, ..) =
        FileStore::create(&std::env::temp_dir(), options).inspect_err(|error| skip("disk", error)).ok()?;
    Some((Arc::new(store), faults))
}

/// A file store on a disk; if there is none, a store in memory.
pub fn disk() -> Arc<dyn SlowStore> {
    match faulty_disk() {
        Some((store, _)) => store,
        None => Arc::new(NullStore::new(AMPLE)),
    }
}

fn file_tier(file: Arc<dyn SlowStore>) -> SlowTier {
    SlowTier::new(FILE_STORE, "file store", file)
}

fn pins() -> Arc<Pins> {
    static PINS: LazyLock<Arc<Pins>> = LazyLock::new(|| {
        let pins = Arc::new(Pins::default());
        let _ = pins.find_out().inspect_err(|why| skip("pin-check", why));
        pins
    });
    PINS.clone()
}

impl Setup {
    /// In base pages, with one userfaultfd and no file store.
    fn new(ram: Bytes, store_budget: Bytes, quarantine: Duration) -> Self {
        let features = uffd::HUGETLB_FEATURES | uffd::feature::POISON;
        Self {
            ram,
            store_budget,
            quarantine,
            spill: None,
            huge: false,
            shards: 1,
            features,
            pins: pins(),
            extents: None,
            tiers: None,
        }
    }
}

impl Rig {
    pub fn new(ram: Bytes, store_budget: Bytes, quarantine: Duration) -> Self {
        Self::viewed(Setup::new(ram, store_budget, quarantine))
    }

    pub fn sharded(ram: Bytes, store_budget: Bytes, quarantine: Duration, shards: usize) -> Self {
        Self::viewed(Setup { shards, ..Setup::new(ram, store_budget, quarantine) })
    }

    /// Like `new`, of these extents, in files with another page before and after each.
    pub fn of_extents(extents: Extents, store_budget: Bytes, quarantine: Duration) -> Self {
        let setup = Setup::new(extents.pages().bytes(), store_budget, quarantine);
        Self::viewed(Setup { extents: Some(extents), ..setup })
    }

    /// Like `of_extents`, of huge pages; `None` and a printed skip if there are none.
    pub fn huge_of_extents(extents: Extents, store_budget: Bytes, quarantine: Duration) -> Option<Self> {
        let setup = Setup::new(extents.pages().bytes(), store_budget, quarantine);
        Self::of_huge(Setup { extents: Some(extents), ..setup })
    }

    /// Like `new`, without the pin check.
    pub fn unasked(ram: Bytes, store_budget: Bytes, quarantine: Duration) -> Self {
        Self::viewed(Setup { pins: Arc::default(), ..Setup::new(ram, store_budget, quarantine) })
    }

    /// Like `new`, with pages placed on two nodes while it is tracked.
    pub fn on_nodes(ram: Bytes, store_budget: Bytes, tiers: HostTiers) -> Self {
        let setup = Setup::new(ram, store_budget, Duration::from_millis(5));
        Self::viewed(Setup { tiers: Some(tiers), ..setup })
    }

    /// Returns whether there is a pin check; prints a skip if not.
    pub fn is_asked(&self) -> bool {
        !missing("pin-check", pins().missing())
    }

    /// Adds the view, as an engine does after it has opened the VM.
    pub fn add_view(&self) {
        let len = ballast_base::PageCount(self.pages).bytes();
        self.vm.add_view(self.view.clone(), &mapped_at(Hva(self.guest.addr() as u64), len)).expect("view");
    }

    pub fn without_view(ram: Bytes, store_budget: Bytes, quarantine: Duration) -> Self {
        Self::open(Setup::new(ram, store_budget, quarantine))
    }

    /// A VM on huge pages, spilling or not; `None` and a printed skip if there are none.
    pub fn huge(
        ram: Bytes,
        store_budget: Bytes,
        quarantine: Duration,
        spill: Option<(Arc<dyn SlowStore>, Duration)>,
    ) -> Option<Self> {
        Self::huge_sharded(ram, store_budget, quarantine, spill, 1)
    }

    pub fn huge_sharded(
        ram: Bytes,
        store_budget: Bytes,
        quarantine: Duration,
        spill: Option<(Arc<dyn SlowStore>, Duration)>,
        shards: usize,
    ) -> Option<Self> {
        let spill = spill.map(|(file, after)| (vec![file_tier(file)], after));
        Self::of_huge(Setup { spill, shards, ..Setup::new(ram, store_budget, quarantine) })
    }

    pub fn huge_unasked(ram: Bytes, store_budget: Bytes, quarantine: Duration) -> Option<Self> {
        Self::of_huge(Setup { pins: Arc::default(), ..Setup::new(ram, store_budget, quarantine) })
    }

    fn of_huge(setup: Setup) -> Option<Self> {
        let Err(why) = memfd::create_huge("ballast-test", Bytes(HUGE_SIZE as u64)) else {
            return Some(Self::viewed(Setup { huge: true, ..setup }));
        };
        skip("hugetlb", why);
        None
    }

    /// A VM whose RAM is filled and mapped huge (THP); `None` and a printed skip where that is impossible.
    pub fn coalesced(ram: Bytes, store_budget: Bytes, quarantine: Duration) -> Option<Self> {
        Self::new(ram, store_budget, quarantine).made_huge()
    }

    pub fn made_huge(self) -> Option<Self> {
        self.fill_all();
        let ram = Bytes(self.guest.len() as u64);
        let remote = Remote::open(std::process::id()).expect("own process");
        // The kernel may have pages isolated for a moment.
        let mut tries = (0..100).map(|_| remote.collapse(Hva(self.guest.addr() as u64), ram.0));
        let outcome = tries.find(|outcome| !matches!(outcome, Ok(Collapsed::Busy))).unwrap_or(Ok(Collapsed::Busy));
        if !matches!(outcome, Ok(Collapsed::Done)) || remote.huge(Hva(0), 0).is_err() {
            skip("collapse", format_args!("{outcome:?}"));
            return None;
        }
        assert_eq!(self.mapped_huge(), ram);
        Some(self)
    }

    pub fn mapped_huge(&self) -> Bytes {
        let remote = Remote::open(std::process::id()).expect("own process");
        let found = remote.huge(Hva(self.guest.addr() as u64), self.guest.len() as u64).expect("scan");
        Bytes(found.iter().map(|(start, end)| end.0 - start.0).sum())
    }

    /// With a file store, to which pages move after this time.
    pub fn spilling(
        ram: Bytes,
        store_budget: Bytes,
        quarantine: Duration,
        file: Arc<dyn SlowStore>,
        after: Duration,
    ) -> Self {
        Self::tiered(ram, store_budget, quarantine, vec![file_tier(file)], after)
    }

    /// With these slow stores, to which pages move after this time.
    pub fn tiered(ram: Bytes, store_budget: Bytes, quarantine: Duration, slow: Vec<SlowTier>, after: Duration) -> Self {
        Self::viewed(Setup { spill: Some((slow, after)), ..Setup::new(ram, store_budget, quarantine) })
    }

    pub fn ram_store(&self) -> &dyn Store {
        &*self.vm.stores.first().store
    }

    pub fn file_store(&self) -> &dyn Store {
        self.vm.stores.get(FILE_STORE).expect("a file store").store
    }

    /// Ends the workers as if killed, and has a successor with these stores serve the VM. Returns its recovery.
    pub fn succeed(&mut self, stores: Stores) -> ballast_pager::vm::recover::Recovered {
        let last = self.vm.clone();
        last.stop();
        let state = StateFile::open(last.state.fd().try_clone_to_owned().expect("dup")).expect("open");
        let epoch = state.take_over(std::process::id(), 2, LOST).expect("no journal");
        let vm = Vm::new(state, epoch, stores, last.tuning, last.reporter()).with_pins(pins());
        for region in last.regions() {
            vm.open_region(region.files()).expect("region");
        }
        let recovered = vm.recover().expect("recover");
        self.vm = Arc::new(vm);
        self.vm.start().expect("start");
        for view in last.views() {
            self.vm.add_view(view, &[]).expect("view");
        }
        recovered
    }

    fn viewed(setup: Setup) -> Self {
        let rig = Self::open(setup);
        rig.add_view();
        rig
    }

    fn open(setup: Setup) -> Self {
        let Setup { ram, store_budget, quarantine, spill, huge, shards, features, pins, extents, tiers } = setup;
        let whole = extents.is_none();
        let extents = extents.unwrap_or_else(|| Extents::one(Bytes(0), ram).expect("good"));
        let loan = huge.then(|| PoolLoan::new(ram.0 / HUGE_SIZE as u64).expect("huge pages"));
        let create = if huge { memfd::create_huge } else { memfd::create };
        let page = if huge { HUGE_SIZE } else { PAGE_SIZE } as u64;
        let files: Vec<RamFile> = (0..extents.files() as u16)
            .map(|number| {
                let ends = extents.list().iter().filter(|extent| extent.file == number).map(|extent| extent.end());
                let size = ends.max().expect("it has extents") + if whole { 0 } else { page };
                let file = create("ballast-test-ram", Bytes(size)).expect("memfd");
                for at in (0..size).step_by(PAGE_SIZE) {
                    if !huge && extents.bytes_at(number, at, 1).next().is_none() {
                        rustix::io::pwrite(&file, &NOT_RAM, at).expect("write");
                    }
                }
                RamFile::new(file).expect("stat")
            })
            .collect();
        let pieces = extents.list().iter().map(|e| (&files[usize::from(e.file)], e.offset.0, e.len.0 as usize));
        let guest = Arc::new(Mapping::shared_pieces(&pieces.collect::<Vec<_>>()).expect("map"));
        let features = uffd::REQUIRED_FEATURES | features;
        let made: Vec<_> = (0..shards).map(|_| Uffd::create(features).expect("userfaultfd")).collect();
        let (uffds, granted): (Vec<Uffd>, Vec<u64>) = made.into_iter().unzip();
        let state = StateFile::create(VmId([3; 16]), "test").expect("state");
        let ids: Vec<_> = files.iter().map(|file| file.id).collect();
        state.add_region(&ids, &extents, None).expect("region");
        let epoch = state.take_over(std::process::id(), 1, LOST).expect("no journal");
        let (ram_store, _arena) = RamStore::create(RamOptions::new(Budget::new(store_budget))).expect("store");
        let (store, faults) = FaultyStore::new(ram_store);
        let panics = Arc::new(AtomicU64::new(0));
        let store = PanickyStore { inner: store, panics: panics.clone() };
        let reports = Arc::new(Mutex::new(Vec::new()));
        let report = {
            let reports = reports.clone();
            Arc::new(move |kind: &str, text| reports.lock().expect("report").push((kind.to_owned(), text)))
        };
        let (slow, spill_after) = spill.map_or((Vec::new(), None), |(slow, after)| (slow, Some(after)));
        let near = vec![NearTier { number: RAM_STORE, name: "RAM store", store: Arc::new(store) }];
        let stores = Stores::new(near, slow);
        let coalesce_every = Duration::from_millis(5);
        // Tracked only where a test says so, and then without a budget.
        let period = if tiers.is_some() { Duration::from_secs(1) } else { Duration::from_millis(40) };
        // On an emulated machine a fault takes a millisecond.
        let heat = ballast_heat::Settings { period, budget: 1.0, is_placed: tiers.is_some(), ..Default::default() };
        let tuning = Tuning { quarantine, spill_after, coalesce_every, heat, tiers, ..Tuning::default() };
        let vm = Arc::new(Vm::new(state, epoch, stores, tuning, report).with_pins(pins));
        vm.open_region(&files).expect("region");
        vm.start().expect("start");
        let (ours, theirs) = scm::pair().expect("socketpair");
        let hang_up = ours.try_clone().expect("dup");
        let mapping = guest.clone();
        let client = std::thread::spawn(move || serve_zaps(&ours, &mapping));
        let shards = uffds.iter().map(|uffd| uffd.try_clone().expect("dup")).collect();
        let peer = Arc::new(ClientPeer::new(theirs, epoch));
        let view = Arc::new(View::new(std::process::id(), shards, granted[0], peer));
        let pages = ram.pages_floor().0;
        Self {
            vm,
            guest,
            faults,
            panics,
            reports,
            view,
            uffd_features: granted[0],
            pages,
            _uffds: uffds,
            client: Some(client),
            hang_up,
            _loan: loan,
        }
    }

    pub fn word(&self, page: u64) -> &AtomicU64 {
        &self.guest.words(page as usize * PAGE_SIZE, 1)[0]
    }

    /// Writes `seed`-dependent, half-compressible bytes to a page.
    pub fn fill(&self, page: u64, seed: u64) {
        self.guest.copy_in(page as usize * PAGE_SIZE, &ballast_testkit::pages::half_compressible(seed << 32 | page));
    }

    /// Fills every page, with seed 1.
    pub fn fill_all(&self) {
        (0..self.pages).for_each(|page| self.fill(page, 1));
    }

    /// Returns whether the page holds the bytes of [`Rig::fill`].
    pub fn holds(&self, page: u64, seed: u64) -> bool {
        let mut bytes = [0; PAGE_SIZE];
        self.guest.copy_out(page as usize * PAGE_SIZE, &mut bytes);
        bytes == ballast_testkit::pages::half_compressible(seed << 32 | page)
    }

    pub fn check_bytes(&self) {
        assert!((0..self.pages).all(|page| self.holds(page, 1)), "a byte was lost");
    }

    pub fn minor_faults(&self) -> u64 {
        self.vm.stats().get(Counter::FaultMinor)
    }

    pub fn set_limit(&self, limit: Option<Bytes>) {
        self.vm.state.set_limit(limit);
        self.vm.notify_reclaim();
    }

    /// Sets a limit, and waits until no more than that is resident.
    pub fn squeeze(&self, limit: Bytes) {
        self.set_limit(Some(limit));
        until("resident is at the limit", || self.resident() <= limit);
    }

    pub fn filled(self) -> Self {
        self.fill_all();
        self
    }

    pub fn squeezed(self, limit: Bytes) -> Self {
        self.fill_all();
        self.squeeze(limit);
        self
    }

    pub fn is_in(&self, store: u8, page: u64) -> bool {
        store_number(self.vm.region(0).expect("region").word(PageIdx(page))) == Some(store)
    }

    pub fn count_in(&self, store: u8) -> u64 {
        (0..self.pages).filter(|page| self.is_in(store, *page)).count() as u64
    }

    /// Waits until most pages over this limit are in this slow store.
    pub fn squeeze_into(&self, store: u8, limit: Bytes) {
        self.squeeze(limit);
        let over = self.pages - limit.pages_floor().0;
        until("what is far is in the store", || {
            let far = self.vm.stats().get(Counter::Far);
            far > over / 2 && self.count_in(store) * 10 > far * 9
        });
    }

    pub fn copies(&self) -> u64 {
        self.vm.stores.tiers().map(|tier| tier.store.usage().pages).sum()
    }

    /// Ends reclaim, and waits until no page is in quarantine.
    pub fn hold_still(&self) {
        self.vm.hold(Hold::Shared, Some("test".into()));
        self.wait_for_quarantine();
    }

    /// Waits until no page moves, and checks that each far page has one copy, and the census.
    pub fn count_exactly(&self) {
        self.hold_still();
        // When the copies add up, a run that was under way at the hold has ended.
        until("each far page has one copy", || self.copies() == self.census().far.0);
        self.check_census();
    }

    pub fn addr(&self, page: u64) -> Hva {
        Hva((self.guest.addr() + page as usize * PAGE_SIZE) as u64)
    }

    pub fn discard(&self, pages: std::ops::Range<u64>) {
        let len = (pages.end - pages.start) * PAGE_SIZE as u64;
        self.vm.discard(&self.view, &[(self.addr(pages.start), len)]).expect("discard");
    }

    /// Waits until the ledger has no far page: a guest continues before its move is booked.
    pub fn wait_until_none_is_far(&self) {
        until("no page is far", || self.vm.stats().get(Counter::Far) == 0);
    }

    /// Waits until no worker works for the VM: earlier touches are booked then.
    pub fn wait_until_booked(&self) {
        until("no worker is at work", || self.vm.state.threads().is_empty());
    }

    pub fn wait_for_quarantine(&self) {
        until("quarantine is empty", || self.vm.stats().get(Counter::Quarantined) == 0);
    }

    /// A second mapping of guest RAM: that of another process, as far as the VM knows.
    pub fn second_mapping(&self) -> usize {
        let flags = rustix::mm::MremapFlags::MAYMOVE;
        // SAFETY: of a shared mapping, a length of 0 makes a second one and leaves the first; nothing else uses the
        // addresses.
        unsafe { rustix::mm::mremap(self.guest.addr() as *mut _, 0, self.guest.len(), flags).expect("map") as usize }
    }

    pub fn check_not_ram(&self) {
        let region = self.vm.region(0).expect("region");
        for (number, file) in (0..).zip(region.files()) {
            let size = memfd::size(file).expect("stat").0;
            for at in
                (0..size).step_by(PAGE_SIZE).filter(|at| region.extents().bytes_at(number, *at, 1).next().is_none())
            {
                let mut bytes = [0; PAGE_SIZE];
                rustix::io::pread(file, &mut bytes, at).expect("read");
                assert!(bytes == NOT_RAM, "offset {at:#x} of file {number} was touched");
            }
        }
    }

    pub fn resident(&self) -> Bytes {
        self.vm.resident().expect("stat").bytes()
    }

    /// Counts each page by its word and its file: exact only while no page moves.
    pub fn census(&self) -> Census {
        let mut census = Census::default();
        for region in self.vm.regions() {
            for page in region.range().iter() {
                census.size += PageCount(1);
                let bin = match region.word(page).state() {
                    _ if region.is_present(page).expect("stat") => &mut census.resident,
                    State::Far | State::Restoring => &mut census.far,
                    State::Zero => &mut census.zero,
                    State::Poisoned => &mut census.poisoned,
                    State::Resident | State::Quarantine | State::Evicting => &mut census.untouched,
                };
                *bin += PageCount(1);
            }
        }
        census
    }

    /// Waits until no page moves, and checks that each page is in exactly one place and that the gauges agree. In a VM
    /// that is held, zero pages are turned back, and a guest continues before its move is booked.
    pub fn check_census(&self) {
        let gauges = || [Counter::Far, Counter::Zero, Counter::Poisoned].map(|counter| self.vm.stats().get(counter));
        until("the gauges are those of the census", || {
            let census = self.census();
            gauges() == [census.far.0, census.zero.0, census.poisoned.0]
        });
        let census = self.census();
        let sum = census.resident.0 + census.far.0 + census.zero.0 + census.untouched.0 + census.poisoned.0;
        assert_eq!(sum, census.size.0, "{census:?}");
        assert_eq!(gauges(), [census.far.0, census.zero.0, census.poisoned.0], "gauges against {census:?}");
        // For a part of a file, this is an estimate until the next count.
        until("the pages counted are those of the census", || self.vm.resident().expect("stat") == census.resident);
    }

    pub fn break_client(&self) {
        let _ = rustix::net::shutdown(&self.hang_up, rustix::net::Shutdown::Both);
    }

    /// Returns whether heat knows the first `hot` units to be much hotter. A guest without CPU time looks cold.
    pub fn knows_hot_units(&self, hot: usize) -> bool {
        let heat = self.vm.heat.heat((self.pages / PAGES_PER_UNIT) as usize);
        let ages: Vec<Duration> = heat.strip.iter().map(|cell| cell.age.unwrap_or_default()).collect();
        let [hot, cold] = [&ages[..hot.min(ages.len())], &ages[hot.min(ages.len())..]];
        heat.cycles >= 5 && hot.iter().max().zip(cold.iter().min()).is_some_and(|(hot, cold)| *hot * 4 < *cold)
    }

    pub fn reported(&self, kind: &str) -> bool {
        self.reports.lock().expect("report").iter().any(|(reported, _)| reported == kind)
    }

    pub fn state_of(&self, page: u64) -> State {
        self.vm.region(0).expect("region").word(PageIdx(page)).state()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.faults.release();
        self.vm.stop();
        let _ = rustix::net::shutdown(&self.hang_up, rustix::net::Shutdown::Both);
        if let Some(client) = self.client.take() {
            client.join().expect("client");
        }
    }
}

#[derive(Debug)]
struct PanickyStore<S> {
    inner: S,
    panics: Arc<AtomicU64>,
}

impl<S> PanickyStore<S> {
    fn inner(&self) -> &S {
        let left = self.panics.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        assert!(left.is_err(), "asked to panic");
        &self.inner
    }
}

impl<S: Store> Store for PanickyStore<S> {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        self.inner().put(key, bytes)
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, context: IoContext<'_>) -> GetOutcome {
        self.inner().get(key, handle, out, context)
    }

    fn free(&self, key: PageKey, handle: Handle) {
        self.inner().free(key, handle)
    }

    fn tidy(&self) {
        self.inner.tidy();
    }

    fn usage(&self) -> StoreUsage {
        self.inner.usage()
    }
}

impl<S: DurableStore> DurableStore for PanickyStore<S> {
    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> std::io::Result<Recovered> {
        self.inner.recover(live)
    }
}

impl<S: NearStore> NearStore for PanickyStore<S> {
    fn takes_room(&self, handle: Handle) -> bool {
        self.inner.takes_room(handle)
    }

    fn is_short(&self) -> bool {
        self.inner.is_short()
    }
}

/// A pipe that holds some pages of the guest.
pub struct Pipe {
    _ends: (OwnedFd, OwnedFd),
}

impl Pipe {
    pub fn with(rig: &Rig, pages: std::ops::Range<u64>) -> Self {
        let (reader, writer) = rustix::pipe::pipe().expect("pipe");
        let len = (pages.end - pages.start) as usize * PAGE_SIZE;
        let range = libc::iovec { iov_base: rig.guest.ptr(pages.start as usize * PAGE_SIZE, len).cast(), iov_len: len };
        // SAFETY: one range, inside the guest's RAM, which lives as long as the rig; the pipe is only ever dropped.
        let taken = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const range, 1, 0) };
        assert_eq!(taken, len as isize, "{}", std::io::Error::last_os_error());
        Self { _ends: (reader, writer) }
    }
}

/// The RAM file of a rig, under a name that any process of root can open.
pub fn file_of(rig: &Rig) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let start = format!("{:x}-", rig.guest.addr());
    let line = maps.lines().find(|line| line.starts_with(&start)).expect("guest RAM begins a mapping");
    let range = line.split_ascii_whitespace().next().expect("a range");
    format!("/proc/{}/map_files/{range}", std::process::id())
}

pub fn mapped_by_a_foreign_mapper(rig: &Rig) -> Mapping {
    let file = std::fs::File::options().read(true).write(true).open(file_of(rig)).expect("open");
    Mapping::shared(&file, 0, rig.guest.len()).expect("map")
}

pub fn mapped_at(hva: Hva, len: Bytes) -> [(Span, u32); 1] {
    [(Span { hva, len }, 0)]
}

pub fn serve_zaps(socket: &OwnedFd, guest: &Mapping) {
    while let Ok(Some(received)) = scm::receive(socket.as_fd()) {
        let Ok(EngineToClient::Zap { seq, ranges }) = wire::decode(&received.bytes) else { continue };
        for (start, len) in ranges {
            guest.zap(start.0 as usize - guest.addr(), len as usize).expect("zap");
        }
        let answer = wire::encode(&ClientToEngine::Zapped { seq, error: None, kept: Vec::new() });
        if scm::send(socket.as_fd(), &answer, &[]).is_err() {
            return;
        }
    }
}

/// Two guest threads add to each page in turn until `until_done`; the lower half of the first word stays the page
/// number.
pub fn hammer(rig: &Rig, until_done: impl Fn() -> bool + Sync) {
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let done = &done;
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    for page in (thread..rig.pages).step_by(2) {
                        let seen = rig.word(page).fetch_add(1 << 32, Ordering::Relaxed);
                        assert_eq!(seen & 0xFFFF_FFFF, page, "page {page}");
                    }
                }
            });
        }
        // Runs also if the wait panics: the scope joins the guest's threads either way.
        let _end = Finally(|| done.store(true, Ordering::Relaxed));
        until("what the test waits for", &until_done);
    });
}

/// One of `threads` threads of the guest: it owns every page whose number is its own, writes them at random until
/// `done`, and checks each read.
pub fn churn(rig: &Rig, thread: u64, threads: u64, done: impl Fn() -> bool) {
    churn_by(1, None, rig, thread, threads, done);
}

/// Like [`churn`], with pages that are owned `granule` by `granule`. After each `discards` steps it discards one.
pub fn churn_by(granule: u64, discards: Option<u64>, rig: &Rig, thread: u64, threads: u64, done: impl Fn() -> bool) {
    let mut versions = vec![0u64; rig.pages as usize];
    let state = AtomicU64::new(0x9E37_79B9_7F4A_7C15 ^ thread);
    let mut step = 0u64;
    while !done() {
        step += 1;
        let first = (random(&state) % (rig.pages / granule / threads) * threads + thread) * granule;
        let page = first + random(&state) % granule;
        let expected = versions[page as usize];
        assert_eq!(rig.word(page).load(Ordering::Relaxed), expected, "page {page} at step {step}");
        versions[page as usize] = step << 16 | page;
        rig.word(page).store(versions[page as usize], Ordering::Relaxed);
        if discards.is_some_and(|discards| step.is_multiple_of(discards)) {
            rig.discard(first..first + granule);
            versions[first as usize..][..granule as usize].fill(0);
        }
    }
    for (page, version) in (0..).zip(versions).filter(|(page, _)| page / granule % threads == thread) {
        assert_eq!(rig.word(page).load(Ordering::Relaxed), version, "page {page} at the end");
    }
}

/// Unmaps guest RAM permanently, and keeps its addresses reserved. Otherwise another test could map memory there;
/// `UFFDIO_COPY`, which takes any registered mapping, would fill its page, and the end of this guest would unmap it.
pub fn vacate(addr: usize, len: usize) {
    use rustix::mm::{MapFlags, ProtFlags};
    // SAFETY: the callers give up their own mapping, and nothing touches it afterwards.
    unsafe {
        rustix::mm::mmap_anonymous(addr as *mut _, len, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::FIXED)
            .expect("unmap")
    };
}

/// Waits until `condition` returns true; panics after five minutes, which suffice even on an emulated CPU.
pub fn until(what: &str, condition: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(300), "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A small deterministic random generator (xorshift), so that a failure repeats.
pub fn random(state: &AtomicU64) -> u64 {
    let mut x = state.load(Ordering::Relaxed);
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    state.store(x, Ordering::Relaxed);
    x
}

pub fn unit(unit: u64) -> UnitId {
    UnitId { region: 0, unit: unit as u32 }
}

pub fn coarse(units: u64) -> Watch {
    Watch { coarse: (0..units).map(unit).collect(), fine: Vec::new() }
}

pub fn pages(pages: impl IntoIterator<Item = u64>) -> PageMap {
    let mut map = PageMap::NONE;
    pages.into_iter().for_each(|page| map.set(page));
    map
}
