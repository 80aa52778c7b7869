//! One VM: its regions, its views, its stores, and the state that its workers share.
//!
//! Before: the engine opens it from the keeper's descriptors. After: workers run until the VM or the engine ends.
//! Threads: public methods may be called from any thread; [`Vm::start`] and [`Vm::add_view`] start the workers.
//! Promise: no fault is served before [`Vm::start`], and by then `recover` has repaired the last engine's words.
//!
//! A VM has its memory (`memory`: regions, views, registration), its mailboxes (`mailboxes`), and its settings. Its
//! work is in `views` (who maps it, and which chunks are registered), `discard`, `restore` (restores all pages),
//! `write_back` (into files that outlive the VM), `ledger` and `account` (the counters).
//!
//! # Lock order
//!
//! A thread that holds one of these takes only those below it. ARCHITECTURE.md has the order of the whole engine: the
//! locks of the governor and of a visit come first, those of stores and notifiers last.
//!
//! | | Lock | Held for |
//! |---|---|---|
//! | 1 | `Memory::layout` | moving pages (shared), adding a view, unplugging (exclusive) |
//! | 2 | `Memory::registering` | registering a chunk, giving chunks back, beginning a cycle of tracking |
//! | 3 | `View::serving`, `View::serving_from_disk` | serving a fault (shared), forgetting a mapping (exclusive) |
//! | 4 | stage of a unit: Mapping | mapping 2 MiB at once; disturbing waits for it, without page locks |
//! | 5 | page locks: the lock bits of words | a move of a granule; ascending where several are held |
//! | 6 | the tracker of heat (`VmHeat`), an agent's hints | planning and absorbing a cycle, picking |
//! | 7 | `Memory::{regions, views}`, `Kept`, `Pinned`, `Region::unreadable`, spans of a view | looking up |
//!
//! A fault worker holds 3 and only *tries* 1. Only a discard waits for a page lock while it holds one, in ascending
//! order; every other thread skips a locked page and retries it later. No lock is held while a worker waits for a
//! client's reply (`ClientPeer::zap`) or for another worker. During a read from a disk, [`Vm::restore`] holds 1 shared;
//! a slow worker holds `View::serving_from_disk`, for which no other fault waits.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use ballast_base::{Bytes, PageCount};
use ballast_handover::state_file::{RegionRecord, StateError, StateFile};
use ballast_heat::VmHeat;

use crate::run::queue::USUAL_SHARES;
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
pub(crate) mod interval;
pub(crate) mod kept;
pub(crate) mod ledger;
mod lifecycle;
mod mailboxes;
mod memory;
pub mod pinned;
pub mod ram;
pub mod recover;
pub(crate) mod refault;
pub mod region;
pub mod region_table;
mod restore;
pub(crate) mod running;
pub(crate) mod serve;
pub(crate) mod settle;
pub mod stats;
pub(crate) mod table;
pub(crate) mod touches;
pub mod tuning;
pub(crate) mod units;
pub mod view;
mod views;
mod write_back;

pub use account::MemoryBreakdown;
pub use tuning::Tuning;
pub use write_back::WrittenBack;

/// A kind of reason not to reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hold {
    /// The memory is pinned (locked, VFIO), permanently.
    Pinned,
    /// A process that has not attached maps the RAM.
    Shared,
    /// It is not known yet whether a process that has not attached maps the RAM.
    Unchecked,
    /// No keeper runs that could replace this engine.
    Orphaned,
    /// An operator wants all of it in memory.
    Kept,
    /// khugepaged may put zeros in the place of far pages.
    HugePages,
    /// RAM is about to be unplugged, and other processes need its far pages in its file.
    Unplug,
}

/// Reports an event to operators: kind and text.
pub type Reporter = Arc<dyn Fn(&str, String) + Send + Sync>;

/// The state of one VM that its workers share.
pub struct Vm {
    /// State that outlives this engine.
    pub state: StateFile,
    /// Stores of far pages.
    pub stores: Stores,
    /// Settings.
    pub tuning: Tuning,
    /// Stall averages.
    pub pressure: Pressure,
    /// Access tracking.
    pub heat: Arc<VmHeat>,
    pub(crate) memory: Memory,
    pub(crate) mail: Mailboxes,
    pub(crate) life: Lifecycle,
    epoch: u64,
    tickets: AtomicU64,
    track: AtomicBool,
    /// Reason for which the VMM was told to stop the VM.
    halted: OnceLock<String>,
    /// Weight of its faults when several VMs wait for a worker.
    shares: AtomicU32,
    holds: Mutex<BTreeMap<Hold, String>>,
    releases: AtomicU64,
    /// Whether a device or the kernel may hold references to pages, and write without faulting.
    may_pin: AtomicBool,
    /// See [`Vm::set_loads`].
    loads: AtomicBool,
    pub(crate) pins: Arc<Pins>,
    /// Pages that are pinned.
    pub pinned: Pinned,
    /// Number of far pages whose hole in the file another process had filled.
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
            heat: Arc::new(VmHeat::new(tuning.heat)),
            memory: Memory::default(),
            mail: Mailboxes::default(),
            life: Lifecycle::default(),
            epoch,
            tickets: AtomicU64::new(0),
            track: AtomicBool::new(tuning.track),
            halted: OnceLock::new(),
            shares: AtomicU32::new(USUAL_SHARES),
            holds: Mutex::default(),
            releases: AtomicU64::new(0),
            may_pin: AtomicBool::new(false),
            loads: AtomicBool::new(false),
            pins: Arc::default(),
            pinned: Pinned::default(),
            filled: AtomicU64::new(0),
            report,
        }
    }

    /// Sets the host's pin check.
    pub fn with_pins(self, pins: Arc<Pins>) -> Self {
        Self { pins, ..self }
    }

    /// Reports of the guest's agent.
    pub fn agent(&self) -> &Told {
        &self.mail.agent
    }

    /// Its counters.
    pub fn stats(&self) -> Stats<'_> {
        Stats::of(&self.state)
    }

    /// The function that reports events to operators.
    pub fn reporter(&self) -> Reporter {
        self.report.clone()
    }

    /// A new ticket, for one batch of zapped pages.
    pub fn ticket(&self) -> Ticket {
        Ticket::new(self.epoch, self.tickets.fetch_add(1, Ordering::Relaxed))
    }

    /// Number of this engine among those that have opened the VM.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The regions, by number.
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.memory.regions()
    }

    /// The region of this number.
    pub fn region(&self, number: u32) -> Option<Arc<Region>> {
        self.memory.region(number)
    }

    /// The views.
    pub fn views(&self) -> Vec<Arc<View>> {
        self.memory.views()
    }

    /// Opens the next region of the state file, with files of `files`. Pages of 1 GiB pin the VM. Returns its number.
    ///
    /// # Errors
    /// There is no further region, another thread opened it, or the table or a file could not be opened.
    pub fn open_region(&self, files: &[RamFile]) -> Result<u32, StateError> {
        let (number, records) = (self.regions().len() as u32, self.state.regions());
        // The keeper has written this record.
        self.state.remember();
        let Some(record) = records.get(number as usize) else {
            return Err(StateError::Invalid(format!("it has no region {number}")));
        };
        // No lock is held here: mapping a file may wait for a lock of the file that its VMM holds.
        let region = self.open_record(number, record, files)?;
        if region.is_fixed() {
            let why = "it has memory in pages of 1 GiB, of which the kernel can neither map nor fill a part";
            self.hold(Hold::Pinned, Some(why.into()));
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

    /// Closes the files of an unplugged region: the pool may own them, and asks the kernel whether a process has them.
    fn close_files(&self, number: u32) -> Result<(), StateError> {
        let Some(record) = self.state.regions().into_iter().nth(number as usize) else { return Ok(()) };
        self.memory.replace_region(self.open_record(number, &record, &[])?);
        Ok(())
    }

    /// Holds reclaim for this reason; `None` withdraws the reason of this kind.
    pub fn hold(&self, kind: Hold, reason: Option<String>) {
        let mut holds = self.holds.lock().expect("no panic while held");
        let withdrawn = holds.remove(&kind).is_some() && reason.is_none();
        holds.extend(reason.map(|reason| (kind, reason)));
        if withdrawn && holds.is_empty() {
            self.releases.fetch_add(1, Ordering::AcqRel);
        }
        drop(holds);
        self.notify_reclaim();
    }

    /// Number of times that the last reason to hold reclaim was withdrawn.
    pub fn releases(&self) -> u64 {
        self.releases.load(Ordering::Acquire)
    }

    /// A reason to hold reclaim, if there is one.
    pub fn held(&self) -> Option<String> {
        self.holds.lock().expect("no panic while held").values().next().cloned()
    }

    /// The reason of this kind; empty if there is none.
    pub fn reason(&self, kind: Hold) -> String {
        self.holds.lock().expect("no panic while held").get(&kind).cloned().unwrap_or_default()
    }

    /// Returns whether there is a reason of this kind.
    pub fn is_held_for(&self, kind: Hold) -> bool {
        self.holds.lock().expect("no panic while held").contains_key(&kind)
    }

    /// Sets the weight of its faults when several VMs wait for a worker; the default is 1000.
    pub fn set_shares(&self, shares: u32) {
        self.shares.store(shares, Ordering::Relaxed);
    }

    /// Records whether other VMs wait for memory that this VM has above its limit: reclaim then keeps no safety margin.
    pub fn set_others_wait(&self, others_wait: bool) {
        self.mail.others_wait.store(others_wait, Ordering::Relaxed);
    }

    pub(crate) fn shares(&self) -> u32 {
        self.shares.load(Ordering::Relaxed)
    }

    /// Sets whether accesses are tracked.
    pub fn set_track(&self, track: bool) {
        self.track.store(track, Ordering::Release);
        self.mail.track.notify();
    }

    /// The setting for access tracking.
    pub fn track(&self) -> bool {
        self.track.load(Ordering::Acquire)
    }

    /// Returns whether accesses are tracked now. Tracking stops while reclaim is held.
    pub fn is_tracked(&self) -> bool {
        self.track() && !self.is_stopping() && self.held().is_none()
    }

    /// Returns whether the class of this VM is *pinned*.
    pub fn is_pinned(&self) -> bool {
        self.is_held_for(Hold::Pinned)
    }

    /// From now on a device or the kernel may write to pages that it looked up before they were zapped. After this
    /// returns, each evicted page was in quarantine for the full T.
    pub fn set_may_pin(&self) {
        self.may_pin.store(true, Ordering::Release);
        drop(self.memory.change_layout());
    }

    pub(crate) fn may_pin(&self) -> bool {
        self.may_pin.load(Ordering::Acquire)
    }

    /// The VMM is about to fill the RAM from a file or from another host. Call it before the first view is added: all
    /// base pages are registered then, so that each page that comes is a fault, which waits at the VM's limit.
    pub fn set_loads(&self) {
        self.loads.store(true, Ordering::Release);
    }

    /// Returns whether all of a region is to be registered, whatever is reclaimed of it.
    pub(crate) fn is_registered_whole(&self, region: &Region) -> bool {
        region.is_on_demand() || self.loads.load(Ordering::Acquire) && region.granule_pages() == 1
    }

    /// Shortest quarantine: T, or the shorter time of direct reclaim. The shorter time is safe only if nothing pins
    /// pages of this VM, or if the pin check is asked about each page (`is_asked`).
    pub(crate) fn quarantine(&self, direct: Option<Duration>, is_asked: bool) -> Duration {
        let direct = direct.filter(|_| is_asked || !self.may_pin());
        direct.map_or(self.tuning.quarantine, |direct| direct.min(self.tuning.quarantine))
    }

    /// Takes over the holds and settings of the VM's last opening by this engine. Call it before [`Vm::start`].
    pub fn take_after(&self, last: &Self) {
        *self.holds.lock().expect("no panic while held") = last.holds.lock().expect("no panic while held").clone();
        self.may_pin.store(last.may_pin(), Ordering::Release);
        self.track.store(last.track.load(Ordering::Acquire), Ordering::Release);
        self.set_shares(last.shares());
        if let Some(reason) = last.halted() {
            let _ = self.halted.set(reason.to_owned());
        }
    }

    /// Pages of its state file lost to memory errors. If there are any, the VM must be opened again, with recovery.
    pub fn lost(&self) -> u64 {
        self.state.lost() + self.regions().iter().map(|region| region.lost()).sum::<u64>()
    }

    /// Descriptions of losses that were not reported yet.
    pub fn losses(&self) -> Vec<String> {
        let header = self.state.losses();
        let what = |offset: &u64| match *offset {
            0 => "the header of its state file, which was written again".to_owned(),
            offset => format!("counters at {offset:#x} of its state file"),
        };
        let tables = self.regions().into_iter().zip(self.state.regions());
        header.offsets.iter().map(what).chain(tables.flat_map(|(region, record)| region.losses(&record))).collect()
    }

    /// Size of all its RAM.
    pub fn size(&self) -> PageCount {
        PageCount(self.regions().iter().map(|region| region.pages().0).sum())
    }

    /// Tells every process to stop the VM, because its memory can no longer be kept right.
    pub fn fail_stop(&self, reason: &str) {
        // Only the first reason is kept: it caused the others.
        let _ = self.halted.set(reason.to_owned());
        for view in self.views() {
            if let Err(error) = view.peer().stop_vm(reason) {
                tracing::error!(vm = self.state.name(), "Telling a VMM to stop: {error}");
            }
        }
    }

    /// The reason for which this engine had the VM stopped, if it did.
    pub fn halted(&self) -> Option<&str> {
        self.halted.get().map(String::as_str)
    }

    /// The lower of the operator's limit and the governor's target, if it is below the VM's size.
    pub fn effective_limit(&self) -> Option<Bytes> {
        let caps = [self.state.limit(), self.state.target()];
        caps.into_iter().flatten().min().filter(|limit| *limit < self.size().bytes())
    }
}
