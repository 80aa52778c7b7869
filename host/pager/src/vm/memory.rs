//! The memory of one VM: its regions, the views that map them, and the locks to change or register them.
//!
//! Before: the state file names the regions, the keeper passes processes on. After: workers find their pages.
//! Threads: any.
//! Promise: while the layout is held, regions and views do not change; while `registering` is held, the kernel's
//! registrations and the chunk flags do not change.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use std::collections::HashMap;
use std::time::Instant;

use ballast_base::store::{Ends, IoContext};
use ballast_base::{Bytes, PageCount};
use ballast_sys::memfd::FileId;

use super::region::Region;
use super::view::View;

#[derive(Debug, Default)]
pub(crate) struct Memory {
    regions: RwLock<Vec<Arc<Region>>>,
    views: RwLock<Vec<Arc<View>>>,
    /// Grows when a view is added: pages that were quarantined before may be mapped in it.
    generation: AtomicU64,
    /// Held shared by all threads that move pages, exclusively to add a view or to unplug.
    layout: RwLock<()>,
    wanted: AtomicU32,
    /// Held to register memory with userfaultfd or to unregister it.
    registering: Mutex<()>,
    /// Last counts of files of which the VM has a part.
    counted: Mutex<HashMap<FileId, Counted>>,
}

#[derive(Debug)]
pub(crate) struct Layout<'a> {
    _held: RwLockReadGuard<'a, ()>,
    wanted: &'a AtomicU32,
}

impl<'a> Layout<'a> {
    /// The context of a read under the layout: a slow read is given up when a thread wants the layout exclusively.
    pub fn reads(&self, context: IoContext<'a>) -> IoContext<'a> {
        context.ended_by(Ends::Wanted(self.wanted))
    }
}

/// A count of the regions' part of a file, and the DRAM of the whole file at that time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    /// Length of the regions' part.
    pub ours: Bytes,
    pub found: PageCount,
    pub whole: PageCount,
    pub until: Instant,
}

impl Counted {
    /// DRAM that the part uses now, if the whole file uses `whole`.
    pub fn estimate(&self, whole: PageCount) -> PageCount {
        let grown = (self.found.0 + whole.0).saturating_sub(self.whole.0);
        PageCount(grown.min(self.ours.pages_floor().0))
    }
}

impl Memory {
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.regions.read().expect("no panic while held").clone()
    }

    pub fn region(&self, number: u32) -> Option<Arc<Region>> {
        self.regions.read().expect("no panic while held").get(number as usize).cloned()
    }

    /// Adds a region, if its number is the next. Only the VM's worker opens regions.
    pub fn add_region(&self, region: Region) -> bool {
        let mut regions = self.regions.write().expect("no panic while held");
        let is_next = regions.len() == region.number as usize;
        if is_next {
            regions.push(Arc::new(region));
        }
        is_next
    }

    /// Replaces the unplugged region of this number. A thread that still uses the old one keeps its files open.
    pub fn replace_region(&self, region: Region) {
        let mut regions = self.regions.write().expect("no panic while held");
        if let Some(place) = regions.get_mut(region.number as usize) {
            *place = Arc::new(region);
        }
    }

    pub fn counted(&self, file: FileId) -> Option<Counted> {
        self.counted.lock().expect("no panic while held").get(&file).copied()
    }

    pub fn set_counted(&self, file: FileId, counted: Counted) {
        self.counted.lock().expect("no panic while held").insert(file, counted);
    }

    pub fn views(&self) -> Vec<Arc<View>> {
        self.views.read().expect("no panic while held").clone()
    }

    pub fn add_view(&self, view: Arc<View>) {
        self.views.write().expect("no panic while held").push(view);
        self.next_generation();
    }

    pub fn remove_view(&self, pid: u32) {
        self.views.write().expect("no panic while held").retain(|view| {
            if view.pid == pid {
                view.close();
            }
            view.pid != pid
        });
    }

    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// A view maps more: an eviction of a batch that was zapped before must not go on.
    pub fn next_generation(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Shared hold of the layout, for a thread that moves pages.
    pub fn layout(&self) -> Layout<'_> {
        Layout { _held: self.layout.read().expect("no panic while held"), wanted: &self.wanted }
    }

    /// Like [`Memory::layout`]; `None` if a thread holds the layout exclusively or waits for that.
    pub fn try_layout(&self) -> Option<Layout<'_>> {
        Some(Layout { _held: self.layout.try_read().ok()?, wanted: &self.wanted })
    }

    /// Exclusive hold of the layout: no page is being moved.
    pub fn change_layout(&self) -> RwLockWriteGuard<'_, ()> {
        self.wanted.fetch_add(1, Ordering::AcqRel);
        let held = self.layout.write();
        self.wanted.fetch_sub(1, Ordering::AcqRel);
        held.expect("no panic while held")
    }

    pub fn registering(&self) -> MutexGuard<'_, ()> {
        self.registering.lock().expect("no panic while held")
    }
}
