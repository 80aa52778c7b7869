//! The table of a VM's pages that heat sees: the pages that are in DRAM, and the ages in their words.
//!
//! Before: reclaim asks heat for cold pages, or the tracker ends a cycle. After: ages are read and written where no
//! worker moves the page. A page that a view keeps has no age, so it is not proposed.
//! Threads: any.
//! Promise: only the age of a page changes; in a race the other thread's word wins.

use std::sync::Arc;

use ballast_base::{PageIdx, PageRange};
use ballast_heat::Pages;

use crate::vm::Vm;
use crate::vm::region::Region;
use crate::vm::view::View;
use ballast_page::page_state::{State, Word};

pub(crate) struct Table<'a> {
    vm: &'a Vm,
    regions: Vec<Arc<Region>>,
    /// Views with kept parts.
    keep: Vec<Arc<View>>,
}

impl<'a> Table<'a> {
    pub fn of(vm: &'a Vm) -> Self {
        let mut keep = vm.views();
        keep.retain(|view| view.kept.any());
        Self { vm, regions: vm.regions(), keep }
    }
}

impl Pages for Table<'_> {
    fn regions(&self) -> u32 {
        self.regions.len() as u32
    }

    fn len(&self, region: u32) -> u64 {
        self.regions[region as usize].pages().0
    }

    fn next_present(&self, region: u32, pages: PageRange) -> Option<PageRange> {
        // Reading the words of an unplugged region would allocate their memory again.
        if self.regions[region as usize].is_removed() {
            return None;
        }
        self.regions[region as usize].next_present(pages).unwrap_or_else(|error| {
            tracing::warn!(vm = self.vm.state.name(), region, "Looking for present pages: {error}");
            None
        })
    }

    fn granule(&self, region: u32) -> u64 {
        self.regions[region as usize].granule_pages()
    }

    fn age(&self, region: u32, page: PageIdx) -> Option<u8> {
        if self.keep.iter().any(|view| view.kept.contains(region, page.0)) {
            return None;
        }
        // A pinned page would only come back from quarantine.
        if self.vm.pinned.contains(region, page) {
            return None;
        }
        let region = &self.regions[region as usize];
        if region.is_removed() {
            return None;
        }
        let word = region.word(page);
        let can_go = word.state() == State::Resident && !word.is_locked() && !region.is_set_aside(page);
        can_go.then(|| word.age())
    }

    fn set_age(&self, region: u32, page: PageIdx, age: u8) {
        let cell = self.regions[region as usize].granule(page).cell();
        let word = cell.load();
        if word.state() == State::Resident && !word.is_locked() {
            // If the exchange fails, another thread has written a newer word.
            cell.swap(word, Word::new(State::Resident, age));
        }
    }
}
