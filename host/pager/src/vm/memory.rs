//! The memory of one VM: its regions, the address spaces that map them, and the locks to change or register them.
//!
//! Before: the state file names the regions, the keeper hands over processes. After: workers find the pages they move.
//! Threads: any. Promise: while the layout is held, regions and views stay; while a registration is held, the kernel's
//! registrations and the flags of chunks do not change.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use std::collections::HashMap;
use std::time::Instant;

use ballast_base::store::{Ends, IoContext};
use ballast_base::{Bytes, PageCount};
use ballast_sys::memfd::FileId;

use super::region::Region;
use super::view::View;

/// Regions, views, and their locks.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    regions: RwLock<Vec<Arc<Region>>>,
    views: RwLock<Vec<Arc<View>>>,
    /// Grows when a view is added: pages quarantined before may be mapped in it.
    generation: AtomicU64,
    /// Held shared by all threads that move pages, exclusively to add a view or to unplug.
    layout: RwLock<()>,
    /// How many threads want it exclusively.
    wanted: AtomicU32,
    /// Held to register memory with userfaultfd or to unregister it.
    registering: Mutex<()>,
    /// Counts of files that others have a part of.
    counted: Mutex<HashMap<FileId, Counted>>,
}

/// The layout, held shared.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    _held: RwLockReadGuard<'a, ()>,
    wanted: &'a AtomicU32,
}

impl<'a> Layout<'a> {
    /// The context of a read while it is held: one that takes long is given up when the layout is wanted exclusively.
    pub fn reads(&self, context: IoContext<'a>) -> IoContext<'a> {
        context.ended_by(Ends::Wanted(self.wanted))
    }
}

/// A count of a file in part, and of all of it at that time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    /// Bytes of the file that the regions had.
    pub ours: Bytes,
    /// DRAM that these used.
    pub found: PageCount,
    /// DRAM that the whole file used.
    pub whole: PageCount,
    /// Until when the count is good enough.
    pub until: Instant,
}

impl Counted {
    /// Memory that they use now, if the whole file uses `whole`.
    pub fn estimate(&self, whole: PageCount) -> PageCount {
        let grown = (self.found.0 + whole.0).saturating_sub(self.whole.0);
        PageCount(grown.min(self.ours.pages_floor().0))
    }
}

impl Memory {
    /// The regions; index is number.
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.regions.read().expect("no panic while held").clone()
    }

    /// One region.
    pub fn region(&self, number: u32) -> Option<Arc<Region>> {
        self.regions.read().expect("no panic while held").get(number as usize).cloned()
    }

    /// Adds a region, if its number is the next. One thread at a time opens regions: the VM's worker.
    pub fn add_region(&self, region: Region) -> bool {
        let mut regions = self.regions.write().expect("no panic while held");
        let is_next = regions.len() == region.number as usize;
        if is_next {
            regions.push(Arc::new(region));
        }
        is_next
    }

    /// Replaces the unplugged region of the same number by this one. A thread that still works with the old one keeps
    /// its files until it ends.
    pub fn replace_region(&self, region: Region) {
        let mut regions = self.regions.write().expect("no panic while held");
        if let Some(place) = regions.get_mut(region.number as usize) {
            *place = Arc::new(region);
        }
    }

    /// The last count of a file.
    pub fn counted(&self, file: FileId) -> Option<Counted> {
        self.counted.lock().expect("no panic while held").get(&file).copied()
    }

    /// Records a new count.
    pub fn set_counted(&self, file: FileId, counted: Counted) {
        self.counted.lock().expect("no panic while held").insert(file, counted);
    }

    /// The views.
    pub fn views(&self) -> Vec<Arc<View>> {
        self.views.read().expect("no panic while held").clone()
    }

    /// Adds a view.
    pub fn add_view(&self, view: Arc<View>) {
        self.views.write().expect("no panic while held").push(view);
        self.next_generation();
    }

    /// Closes and forgets the views of a process.
    pub fn remove_view(&self, pid: u32) {
        self.views.write().expect("no panic while held").retain(|view| {
            if view.pid == pid {
                view.close();
            }
            view.pid != pid
        });
    }

    /// How many times a view was added, or mapped more.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// A view maps more: batches from before do not count.
    pub fn next_generation(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Held shared while pages of any region are moved.
    pub fn layout(&self) -> Layout<'_> {
        Layout { _held: self.layout.read().expect("no panic while held"), wanted: &self.wanted }
    }

    /// The same, unless it is being changed or about to be.
    pub fn try_layout(&self) -> Option<Layout<'_>> {
        Some(Layout { _held: self.layout.try_read().ok()?, wanted: &self.wanted })
    }

    /// Held while the layout is changed: no pages are being moved.
    pub fn change_layout(&self) -> RwLockWriteGuard<'_, ()> {
        self.wanted.fetch_add(1, Ordering::AcqRel);
        let held = self.layout.write();
        self.wanted.fetch_sub(1, Ordering::AcqRel);
        held.expect("no panic while held")
    }

    /// Held while chunks are registered or unregistered.
    pub fn registering(&self) -> MutexGuard<'_, ()> {
        self.registering.lock().expect("no panic while held")
    }
}
