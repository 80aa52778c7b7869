//! A VM's pages as heat sees them: which are in DRAM, and the ages in their words.
//!
//! Before: reclaim asks heat for cold pages, or the tracker ends a cycle. After: ages are read, and written, where no
//! worker is at work. A page that a view keeps has no age, so it is not proposed. Threads: any. Promise: nothing but
//! the age of a page changes, and in a race the other thread's word stays.

use std::sync::Arc;

use ballast_base::{PageIdx, PageRange};
use ballast_heat::Pages;

use crate::vm::Vm;
use crate::vm::region::Region;
use crate::vm::view::View;
use ballast_page::page_state::{State, Word};

/// The VM's pages as heat sees them.
pub(crate) struct Table<'a> {
    vm: &'a Vm,
    regions: Vec<Arc<Region>>,
    /// Views that keep some pages.
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
        // To read the words of one that was unplugged would allocate their memory again.
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
        // Quarantine would only return a pinned page.
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
            // If the exchange fails, another thread has a newer word.
            cell.swap(word, Word::new(State::Resident, age));
        }
    }
}
