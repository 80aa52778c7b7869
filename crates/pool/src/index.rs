//! FastMap's look-ups (Vmem, 4.3.2): guest-physical, pool and VMM addresses, each from the other, in O(log n).
//!
//! Before: `table` holds the entries, and nothing else is stored. After: memory errors, mapping, zeroing and
//! enumeration look up here instead of walking page tables. Promise: nothing here outlives the process; it is built
//! from the entries when a state is opened. Units: an entry costs 4 bytes in each of three sorted lists.

use std::collections::BTreeMap;

use crate::table::{Entry, Table};
use crate::unit::{GuestIdx, SLICE_SIZE, SliceIdx, VmId};
use crate::words::Words;

/// One VM's entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VmIndex {
    pub(crate) slot: u16,
    pub(crate) by_guest: Vec<u32>,
    /// Mapped entries only.
    by_hva: Vec<u32>,
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

    /// Updates the addresses of a VM's entries.
    pub(crate) fn mapped<W: Words>(&mut self, table: &Table<W>, vm: VmId) {
        if let Some(of) = self.vms.get_mut(&vm) {
            of.by_hva = sorted_by_hva(table, &of.by_guest);
        }
    }

    /// Returns the entry that has this slice.
    pub(crate) fn of_slice<W: Words>(&self, table: &Table<W>, at: SliceIdx) -> Option<Entry> {
        let found = last(&self.by_pool, |of| entry(table, of).extent.start <= at)?;
        Some(entry(table, found)).filter(|entry| entry.extent.end() > at.0)
    }

    /// Returns the entry that has this guest address.
    pub(crate) fn of_guest<W: Words>(&self, table: &Table<W>, vm: VmId, guest: GuestIdx) -> Option<Entry> {
        let found = last(&self.vms.get(&vm)?.by_guest, |at| entry(table, at).guest <= guest)?;
        Some(entry(table, found)).filter(|entry| guest.0 - entry.guest.0 < entry.extent.slices)
    }

    /// Returns the entry that is mapped at this address.
    pub(crate) fn of_hva<W: Words>(&self, table: &Table<W>, vm: VmId, hva: u64) -> Option<Entry> {
        let found = last(&self.vms.get(&vm)?.by_hva, |at| entry(table, at).hva <= hva)?;
        Some(entry(table, found)).filter(|entry| hva - entry.hva < u64::from(entry.extent.slices) * SLICE_SIZE)
    }

    /// Returns the memory of the lists.
    pub(crate) fn bytes(&self) -> u64 {
        let lists = self.vms.values().map(|vm| vm.by_guest.capacity() + vm.by_hva.capacity()).sum::<usize>();
        // A node of the tree is filled to two thirds on average.
        let tree = self.vms.len() * (size_of::<VmId>() + size_of::<VmIndex>()) * 3 / 2;
        ((lists + self.by_pool.capacity()) * size_of::<u32>() + tree) as u64
    }
}

impl VmIndex {
    fn new<W: Words>(table: &Table<W>, slot: u16, mut entries: Vec<u32>) -> Self {
        entries.sort_by_key(|at| entry(table, *at).guest);
        entries.shrink_to_fit();
        Self { slot, by_hva: sorted_by_hva(table, &entries), by_guest: entries }
    }
}

fn sorted_by_hva<W: Words>(table: &Table<W>, entries: &[u32]) -> Vec<u32> {
    let mut mapped: Vec<u32> = entries.iter().copied().filter(|at| entry(table, *at).hva != 0).collect();
    mapped.sort_by_key(|at| entry(table, *at).hva);
    mapped
}

/// Returns an entry that the lists name. If it was damaged while the pool was open, it is empty.
fn entry<W: Words>(table: &Table<W>, at: u32) -> Entry {
    let nothing = crate::unit::Extent { start: SliceIdx(0), slices: 0 };
    table.entry(at).unwrap_or(Entry { slot: u16::MAX, guest: GuestIdx(0), extent: nothing, whole: false, hva: 0 })
}

/// Returns the last element of a sorted list for which this holds.
fn last(list: &[u32], is: impl Fn(u32) -> bool) -> Option<u32> {
    list.partition_point(|at| is(*at)).checked_sub(1).map(|found| list[found])
}
