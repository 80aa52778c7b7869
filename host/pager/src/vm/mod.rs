//! One VM: its regions, its views, its stores, and what the workers that serve it share.
//!
//! Before: the engine opens it from the keeper's descriptors. After: workers run until the VM or the engine goes.
//! Threads: the public methods may be called from any thread; [`Vm::start`] and [`Vm::add_view`] start the workers.
//! Promise: no page is served before [`Vm::start`], and by then `recover` has repaired the words that the last engine
//! left.
//!
//! A VM is its memory (`memory`: regions, address spaces, registration), its mailboxes (`mailboxes`), and its settings.
//! Its work is in `views` (who maps it, and which chunks are registered), `discard`, `restore` (all pages back),
//! `write_back` (into files that outlive the VM), `ledger` and `account` (the counters).
//!
//! # Lock order
//!
//! A thread that holds one of these takes only those below it. They are a part of the order of the whole engine, which
//! ARCHITECTURE.md has: the governor's lock and that of a visit come before them, those of stores and notifiers after.
//!
//! | | Lock | Held for |
//! |---|---|---|
//! | 1 | `Memory::layout` | moving pages (shared), adding a view, unplugging (exclusive) |
//! | 2 | `Memory::registering` | registering a chunk, giving chunks back, beginning a cycle of tracking |
//! | 3 | `View::serving`, `View::serving_from_disk` | serving a fault (shared), forgetting a mapping (exclusive) |
//! | 4 | stage of a unit: Mapping | mapping 2 MiB at once; disturbing waits for it, without page locks |
//! | 5 | page locks: the lock bits of words | a move of a granule; ascending where several are held |
//! | 6 | the tracker of heat (`VmHeat`), an agent's hints | planning and absorbing a cycle, picking |
//! | 7 | `Memory::{regions, views}`, `Kept`, `Pinned`, what cannot be read, spans of a view | looking up |
//!
//! A fault worker holds 3 and only *tries* 1. Only a discard waits for a page lock while it holds one, and takes them
//! in ascending order; all others leave a page that they find locked, and try again later. No lock is held while a
//! worker waits for a client's reply (`Peer::zap`) or for another worker. While a page is read from a disk, 1 is held
//! shared if all pages are being brought back; slow workers hold `View::serving_from_disk`, for which no other fault
//! waits.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use ballast_base::{Bytes, PageCount};
use ballast_handover::state_file::{RegionRecord, StateError, StateFile};
use ballast_heat::VmHeat;

use crate::vm::far::stores::Stores;
use crate::vm::guest::told::Told;
use crate::vm::lifecycle::Lifecycle;
use crate::vm::mailboxes::Mailboxes;
pub(crate) use crate::vm::memory::Layout;
use crate::vm::memory::Memory;
use crate::vm::pinned::{Pinned, Pins};
use crate::vm::ram::RamFile;
use crate::vm::region::Region;
use crate::vm::region_table::RegionTable;
use crate::vm::stats::{Pressure, Stats};
use crate::vm::view::View;
use ballast_page::page_state::Ticket;

pub(crate) mod account;
mod beside;
pub mod client_peer;
mod discard;
pub(crate) mod discards;
pub mod far;
pub mod guest;
pub(crate) mod huge;
pub mod inspect;
pub mod interval;
pub(crate) mod kept;
pub(crate) mod ledger;
mod lifecycle;
mod mailboxes;
mod memory;
pub mod peer;
pub mod pinned;
pub mod process_peer;
pub mod ram;
pub mod recover;
pub mod refault;
pub mod region;
pub mod region_table;
mod restore;
pub(crate) mod running;
pub mod serve;
pub(crate) mod settle;
pub mod shard;
pub mod stats;
pub(crate) mod table;
pub(crate) mod touches;
pub mod tuning;
pub mod units;
pub mod view;
mod views;
mod write_back;

pub use account::{Census, MemoryBreakdown};
pub use tuning::{Track, Tuning};
pub use write_back::WrittenBack;

/// Kinds of reasons not to reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Hold {
    /// The memory is pinned (locked, VFIO), permanently.
    Pinned,
    /// A process that has not attached maps the RAM.
    Shared,
    /// It is not known yet whether such a process exists.
    Unchecked,
    /// No keeper runs that would replace this engine.
    Orphaned,
    /// An operator wants all of it in memory.
    Kept,
    /// khugepaged may put zeros in the place of far pages.
    HugePages,
    /// A process maps it in which nothing can be zapped.
    NoZap,
    /// RAM is about to be unplugged, and others want its far pages in its file.
    Unplug,
}

impl Hold {
    const COUNT: usize = 8;
}

/// Why a VM with pages of 1 GiB is pinned.
const FIXED: &str = "it has memory in pages of 1 GiB, of which the kernel can neither map nor fill a part";

/// Something an operator should know.
pub type Reporter = Arc<dyn Fn(&str, String) + Send + Sync>;

/// The state of one VM that its workers share.
pub struct Vm {
    /// The part that outlives this engine.
    pub state: StateFile,
    /// The stores of its far pages.
    pub stores: Stores,
    /// Settings.
    pub tuning: Tuning,
    /// Stall averages.
    pub pressure: Pressure,
    /// Which memory is hot.
    pub heat: Arc<VmHeat>,
    /// Regions, address spaces, registration.
    pub(crate) memory: Memory,
    /// Messages between its workers.
    pub(crate) mail: Mailboxes,
    pub(crate) life: Lifecycle,
    epoch: u64,
    tickets: AtomicU64,
    track: AtomicU8,
    /// Why its VMM was told to stop it.
    halted: OnceLock<String>,
    /// Its weight where faults of several VMs wait for a worker.
    shares: AtomicU32,
    /// Why nothing may be reclaimed, by kind of reason.
    holds: Mutex<[Option<String>; Hold::COUNT]>,
    /// See [`Vm::releases`].
    releases: AtomicU64,
    /// May something write to its memory without faulting, for a while?
    may_pin: AtomicBool,
    /// The pin check of the host.
    pub(crate) pins: Arc<Pins>,
    /// Pages that are pinned.
    pub pinned: Pinned,
    /// Far pages whose hole in the file another process had filled.
    filled: AtomicU64,
    report: Reporter,
}

impl std::fmt::Debug for Vm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vm").field("name", &self.state.name()).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

impl Vm {
    /// A VM without workers. `epoch` is what [`StateFile::take_over`] returned.
    pub fn new(state: StateFile, epoch: u64, stores: Stores, tuning: Tuning, report: Reporter) -> Self {
        let pressure = Pressure::new(Stats::of(&state));
        stores.tell(&report);
        Self {
            state,
            stores,
            tuning,
            pressure,
            heat: Arc::new(VmHeat::new(tuning.heat, epoch)),
            memory: Memory::default(),
            mail: Mailboxes::default(),
            life: Lifecycle::default(),
            epoch,
            tickets: AtomicU64::new(0),
            track: AtomicU8::new(tuning.track as u8),
            halted: OnceLock::new(),
            shares: AtomicU32::new(1000),
            holds: Mutex::default(),
            releases: AtomicU64::new(0),
            may_pin: AtomicBool::new(false),
            pins: Arc::default(),
            pinned: Pinned::default(),
            filled: AtomicU64::new(0),
            report,
        }
    }

    /// The same with the pin check of its host.
    pub fn with_pins(self, pins: Arc<Pins>) -> Self {
        Self { pins, ..self }
    }

    /// What its guest's agent says.
    pub fn agent(&self) -> &Told {
        &self.mail.agent
    }

    /// Its counters.
    pub fn stats(&self) -> Stats<'_> {
        Stats::of(&self.state)
    }

    /// The function that tells operators.
    pub fn reporter(&self) -> Reporter {
        self.report.clone()
    }

    /// A ticket for one batch of evictions.
    pub fn ticket(&self) -> Ticket {
        Ticket::new(self.epoch, self.tickets.fetch_add(1, Ordering::Relaxed))
    }

    /// The engine's number among those that have opened the VM.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The regions; index is number.
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.memory.regions()
    }

    /// One region.
    pub fn region(&self, number: u32) -> Option<Arc<Region>> {
        self.memory.region(number)
    }

    /// The views.
    pub fn views(&self) -> Vec<Arc<View>> {
        self.memory.views()
    }

    /// Opens the next region of the state file; they must come in order, each with its files among these. One with
    /// pages of 1 GiB pins the VM.
    pub fn open_region(&self, files: &[RamFile]) -> Result<u32, StateError> {
        let (number, records) = (self.regions().len() as u32, self.state.regions());
        // The keeper has written this one.
        self.state.remember();
        let Some(record) = records.get(number as usize) else {
            return Err(StateError::Invalid(format!("it has no region {number}")));
        };
        // No lock is held: to map a file may wait for a lock of it that its VMM has.
        let region = self.open_record(number, record, files)?;
        if region.is_fixed() {
            self.hold(Hold::Pinned, Some(FIXED.into()));
        }
        match self.memory.add_region(region) {
            true => Ok(number),
            false => Err(StateError::Invalid(format!("region {number} was opened twice at once"))),
        }
    }

    fn open_record(&self, number: u32, record: &RegionRecord, files: &[RamFile]) -> Result<Region, StateError> {
        let table = RegionTable::map(&self.state, record)?;
        Ok(Region::new((self.state.id(), self.stores.not_near()), number, record, files, table)?)
    }

    /// Closes the files of a region that was unplugged: its memory may be the pool's, which asks the kernel whether any
    /// process has the file.
    fn close_files(&self, number: u32) -> Result<(), StateError> {
        let Some(record) = self.state.regions().into_iter().nth(number as usize) else { return Ok(()) };
        self.memory.replace_region(self.open_record(number, &record, &[])?);
        Ok(())
    }

    /// Stops reclaiming, for this reason; `None` takes this kind of reason back.
    pub fn hold(&self, kind: Hold, reason: Option<String>) {
        let mut holds = self.holds.lock().expect("no panic while held");
        let was_held = holds.iter().any(Option::is_some);
        holds[kind as usize] = reason;
        if was_held && holds.iter().all(Option::is_none) {
            self.releases.fetch_add(1, Ordering::AcqRel);
        }
        drop(holds);
        self.notify_reclaim();
    }

    /// How often the last reason to hold it was taken back.
    pub fn releases(&self) -> u64 {
        self.releases.load(Ordering::Acquire)
    }

    /// Why nothing is reclaimed now, if that is so.
    pub fn held(&self) -> Option<String> {
        self.holds.lock().expect("no panic while held").iter().flatten().next().cloned()
    }

    /// Why it is held for this kind of reason; empty if it is not.
    pub fn reason(&self, kind: Hold) -> String {
        self.holds.lock().expect("no panic while held")[kind as usize].clone().unwrap_or_default()
    }

    /// Is it held for this kind of reason?
    pub fn is_held_for(&self, kind: Hold) -> bool {
        self.holds.lock().expect("no panic while held")[kind as usize].is_some()
    }

    /// Sets its weight where faults of several VMs wait for a worker; 1000 is the usual one.
    pub fn set_shares(&self, shares: u32) {
        self.shares.store(shares, Ordering::Relaxed);
    }

    /// Says whether others wait for memory that this VM is above its limit: then none of it is kept to be on the safe
    /// side.
    pub fn set_others_wait(&self, others_wait: bool) {
        self.mail.others_wait.store(others_wait, Ordering::Relaxed);
    }

    pub(crate) fn shares(&self) -> u32 {
        self.shares.load(Ordering::Relaxed)
    }

    /// Sets when to track which memory is hot.
    pub fn set_track(&self, track: Track) {
        self.track.store(track as u8, Ordering::Release);
        self.mail.track.notify();
    }

    /// When to track which memory is hot.
    pub fn track(&self) -> Track {
        match self.track.load(Ordering::Acquire) {
            track if track == Track::Off as u8 => Track::Off,
            track if track == Track::On as u8 => Track::On,
            _ => Track::Auto,
        }
    }

    /// Is the VM tracked? Never while the VM is held: then it is left alone.
    pub fn is_tracked(&self) -> bool {
        let wanted = match self.track() {
            Track::Off => false,
            Track::On => true,
            // Over its limit a VM loses any page it has, and reclaim needs the CPU. A guest that reports its cold
            // memory need not be tracked.
            Track::Auto => {
                let is_over = || self.mail.over_limit.load(Ordering::Relaxed);
                self.effective_limit().is_some() && !is_over() && !self.mail.agent.is_reporting()
            }
        };
        wanted && !self.is_stopping() && self.held().is_none()
    }

    /// Is the class of this VM *pinned*?
    pub fn is_pinned(&self) -> bool {
        self.is_held_for(Hold::Pinned)
    }

    /// From now on a device or the kernel may write to pages that it looked up before they were zapped. After this
    /// returns, no page is evicted that was not zapped for the full quarantine time.
    pub fn set_may_pin(&self) {
        self.may_pin.store(true, Ordering::Release);
        drop(self.memory.change_layout());
    }

    /// Returns whether something may pin pages, so that T is no shorter even above its limit.
    pub(crate) fn may_pin(&self) -> bool {
        self.may_pin.load(Ordering::Acquire)
    }

    /// How long a page must have been zapped before it may be evicted: T, or the shorter time of direct reclaim. The
    /// shorter one is safe if nothing pins pages of this VM, or if each page is checked for pins.
    pub(crate) fn quarantine(&self, direct: Option<Duration>, is_asked: bool) -> Duration {
        let direct = direct.filter(|_| is_asked || !self.may_pin());
        direct.map_or(self.tuning.quarantine, |direct| direct.min(self.tuning.quarantine))
    }

    /// How many times a view was added.
    pub(crate) fn generation(&self) -> u64 {
        self.memory.generation()
    }

    /// Held shared while pages of any region are moved.
    pub(crate) fn layout(&self) -> Layout<'_> {
        self.memory.layout()
    }

    /// The same, unless it is being changed or about to be.
    pub(crate) fn try_layout(&self) -> Option<Layout<'_>> {
        self.memory.try_layout()
    }

    /// Takes over what this engine was told of the VM at its last opening. Call it before [`Vm::start`].
    pub fn take_after(&self, last: &Self) {
        *self.holds.lock().expect("no panic while held") = last.holds.lock().expect("no panic while held").clone();
        self.may_pin.store(last.may_pin(), Ordering::Release);
        self.track.store(last.track.load(Ordering::Acquire), Ordering::Release);
        self.set_shares(last.shares());
        if let Some(reason) = last.halted() {
            let _ = self.halted.set(reason.to_owned());
        }
    }

    /// Pages of its state file that memory errors have cost since it was opened. The VM must then be opened again, with
    /// recovery.
    pub fn lost(&self) -> u64 {
        self.state.lost() + self.regions().iter().map(|region| region.lost()).sum::<u64>()
    }

    /// Losses that were not reported yet, in words.
    pub fn losses(&self) -> Vec<String> {
        let header = self.state.losses();
        let what = |offset: &u64| match *offset {
            0 => "the header of its state file, which was written again".to_owned(),
            offset => format!("counters at {offset:#x} of its state file"),
        };
        let tables = self.regions().into_iter().zip(self.state.regions());
        header.offsets.iter().map(what).chain(tables.flat_map(|(region, record)| region.losses(&record))).collect()
    }

    /// All guest RAM.
    pub fn size(&self) -> PageCount {
        PageCount(self.regions().iter().map(|region| region.pages().0).sum())
    }

    /// Has every process stop its VM, because its memory cannot be kept right.
    pub fn fail_stop(&self, reason: &str) {
        // The first reason led to the others.
        let _ = self.halted.set(reason.to_owned());
        for view in self.views() {
            if let Err(error) = view.peer().stop_vm(reason) {
                tracing::error!(vm = self.state.name(), "Telling a VMM to stop: {error}");
            }
        }
    }

    /// Why this engine had the VM stopped, if it did.
    pub fn halted(&self) -> Option<&str> {
        self.halted.get().map(String::as_str)
    }

    /// The limit that holds, the operator's or the governor's, if it is less than the VM's size.
    pub fn effective_limit(&self) -> Option<Bytes> {
        let caps = [self.state.limit(), self.state.target()];
        caps.into_iter().flatten().min().filter(|limit| *limit < self.size().bytes())
    }
}
