//! FastMap's look-ups (Vmem, 4.3.2): the slices of a VM in guest order, and the VM of a slice, in O(log n).
//!
//! Before: `table` holds the entries, and nothing else is stored. After: memory errors, zeroing and
//! enumeration look up here instead of walking page tables. Promise: nothing here outlives the process; it is built
//! from the entries when a state is opened. Units: an entry costs 4 bytes in each of two sorted lists.

use std::collections::BTreeMap;

use crate::map::table::{Entry, Table};
use crate::map::unit::{GuestIdx, SliceIdx, VmId};
use crate::map::words::Words;

/// One VM's entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VmIndex {
    pub(crate) slot: u16,
    pub(crate) by_guest: Vec<u32>,
}

/// All entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Index {
    by_pool: Vec<u32>,
    pub(crate) vms: BTreeMap<VmId, VmIndex>,
}

impl Index {
    /// Builds it from a state that was checked.
    pub(crate) fn new<W: Words>(table: &Table<W>) -> Self {
        let mut index = Self::default();
        let mut by_slot: Vec<Vec<u32>> = vec![Vec::new(); table.vm_mark().into()];
        for at in 0..table.entry_mark() {
            let Some(entry) = table.entry(at) else { continue };
            index.by_pool.push(at);
            by_slot[usize::from(entry.slot)].push(at);
        }
        index.by_pool.sort_by_key(|at| entry(table, *at).extent.start);
        for (slot, entries) in (0..).zip(by_slot) {
            if let Ok(Some(vm)) = table.vm(slot) {
                index.vms.insert(vm.id, VmIndex::new(table, slot, entries));
            }
        }
        index
    }

    /// Adds the entries of a VM.
    pub(crate) fn add<W: Words>(&mut self, table: &Table<W>, vm: VmId, slot: u16, entries: Vec<u32>) {
        self.by_pool.extend(&entries);
        // A few runs that are sorted already.
        self.by_pool.sort_by_key(|at| entry(table, *at).extent.start);
        self.vms.insert(vm, VmIndex::new(table, slot, entries));
    }

    /// Removes a VM, whose entries still exist.
    pub(crate) fn remove<W: Words>(&mut self, table: &Table<W>, vm: VmId) -> Option<VmIndex> {
        let gone = self.vms.remove(&vm)?;
        self.by_pool.retain(|at| entry(table, *at).slot != gone.slot);
        Some(gone)
    }

    /// Returns the entry that has this slice.
    pub(crate) fn of_slice<W: Words>(&self, table: &Table<W>, at: SliceIdx) -> Option<Entry> {
        let found = last(&self.by_pool, |of| entry(table, of).extent.start <= at)?;
        Some(entry(table, found)).filter(|entry| entry.extent.end() > at.0)
    }

    /// Returns the memory of the lists.
    pub(crate) fn bytes(&self) -> u64 {
        let lists = self.vms.values().map(|vm| vm.by_guest.capacity()).sum::<usize>();
        // A node of the tree is filled to two thirds on average.
        let tree = self.vms.len() * (size_of::<VmId>() + size_of::<VmIndex>()) * 3 / 2;
        ((lists + self.by_pool.capacity()) * size_of::<u32>() + tree) as u64
    }
}

impl VmIndex {
    fn new<W: Words>(table: &Table<W>, slot: u16, mut entries: Vec<u32>) -> Self {
        entries.sort_by_key(|at| entry(table, *at).guest);
        entries.shrink_to_fit();
        Self { slot, by_guest: entries }
    }
}

/// Returns an entry that the lists name. If it was damaged while the pool was open, it is empty.
fn entry<W: Words>(table: &Table<W>, at: u32) -> Entry {
    let nothing = crate::map::unit::Extent { start: SliceIdx(0), slices: 0 };
    table.entry(at).unwrap_or(Entry { slot: u16::MAX, guest: GuestIdx(0), extent: nothing })
}

/// Returns the last element of a sorted list for which this holds.
fn last(list: &[u32], is: impl Fn(u32) -> bool) -> Option<u32> {
    list.partition_point(|at| is(*at)).checked_sub(1).map(|found| list[found])
}
