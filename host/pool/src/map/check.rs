//! The consistency checks of a pool's state.
//!
//! Before: a state was opened, or a check was requested. After: it may be used, or the first error is named.
//! Promise: reads only. [`bounds`] comes before recovery and makes it safe to follow an entry; [`all`] comes after it.

use std::collections::BTreeSet;

use crate::map::damage::Damage;
use crate::map::intent::check_extent;
use crate::map::table::{Entry, Table};
use crate::map::unit::{FrameIdx, SliceIdx};
use crate::map::words::Words;

/// Every VM slot is valid, and every entry names slices of one node and a slot. A half-written entry does not count.
pub(crate) fn bounds<W: Words>(table: &Table<W>) -> Result<(), Damage> {
    for slot in 0..table.vm_mark() {
        table.vm(slot)?;
    }
    for at in 0..table.entry_mark() {
        let Some(entry) = table.entry(at) else { continue };
        let wrong = |why| Damage::Entry { entry: at, extent: entry.extent, slot: entry.slot, why };
        if entry.slot >= table.vm_mark() {
            return Err(wrong("there is no such slot"));
        }
        check_extent(table, entry.extent).map_err(wrong)?;
        if entry.guest.0.checked_add(entry.extent.slices).is_none() {
            return Err(wrong("the guest has no such memory"));
        }
    }
    Ok(())
}

pub(crate) fn all<W: Words>(table: &Table<W>) -> Result<(), Damage> {
    bounds(table)?;
    vms(table)?;
    let entries = entries(table)?;
    slices(table, &entries)?;
    (0..table.layout.frames).try_for_each(|frame| one_frame(table, FrameIdx(frame)))
}

/// No two VMs have one id; each VM has the memory that it requested, and no guest address twice.
fn vms<W: Words>(table: &Table<W>) -> Result<(), Damage> {
    let mut ids = BTreeSet::new();
    let mut by_slot: Vec<Vec<(u32, Entry)>> = vec![Vec::new(); table.vm_mark().into()];
    for at in 0..table.entry_mark() {
        let Some(entry) = table.entry(at) else { continue };
        by_slot[usize::from(entry.slot)].push((at, entry));
    }
    for (slot, entries) in (0..).zip(by_slot) {
        let wrong = |why| Err(Damage::Vm { slot, why });
        let mut own: Vec<Entry> = entries.iter().map(|(_, entry)| *entry).collect();
        let Some(vm) = table.vm(slot)? else {
            if own.is_empty() {
                continue;
            }
            return wrong("it has memory and no VM");
        };
        if !ids.insert(vm.id) {
            return wrong("another slot has the same VM");
        }
        own.sort_by_key(|entry| entry.guest);
        if own.iter().map(|entry| u64::from(entry.extent.slices)).sum::<u64>() != u64::from(vm.slices) {
            return wrong("its extents are not as much as it has");
        }
        if own.windows(2).any(|two| two[0].guest.0 + two[0].extent.slices > two[1].guest.0) {
            return wrong("a guest address is there twice");
        }
        for (at, entry) in entries {
            let wrong = |why| Err(Damage::Entry { entry: at, extent: entry.extent, slot, why });
            if entry.extent.each().any(|at| table.owner(at) != Some(vm.domain)) {
                return wrong("its brick is of another trust domain");
            }
        }
    }
    Ok(())
}

/// Returns the entries ordered by their slices. No slice is in two entries.
fn entries<W: Words>(table: &Table<W>) -> Result<Vec<(u32, Entry)>, Damage> {
    let mut all: Vec<(u32, Entry)> = (0..table.entry_mark()).filter_map(|at| Some((at, table.entry(at)?))).collect();
    all.sort_by_key(|(_, entry)| entry.extent.start);
    match all.windows(2).find(|two| two[0].1.extent.end() > two[1].1.extent.start.0) {
        None => Ok(all),
        Some(two) => {
            let (entry, Entry { extent, slot, .. }) = two[1];
            Err(Damage::Entry { entry, extent, slot, why: "another entry has some of it" })
        }
    }
}

/// A slice is used if and only if an entry has it.
fn slices<W: Words>(table: &Table<W>, entries: &[(u32, Entry)]) -> Result<(), Damage> {
    let mut entries = entries.iter().map(|(_, entry)| entry.extent).peekable();
    for at in (0..table.layout.slices()).map(SliceIdx) {
        while entries.peek().is_some_and(|extent| extent.end() <= at.0) {
            entries.next();
        }
        let has_entry = entries.peek().is_some_and(|extent| extent.start <= at);
        match (table.state(at).is_owned(), has_entry) {
            (true, false) => return Err(Damage::Slice { at, why: "it is used, and no VM has it" }),
            (false, true) => return Err(Damage::Slice { at, why: "a VM has it, and it is not used" }),
            _ => {}
        }
    }
    Ok(())
}

/// Checks the owners of a frame's bricks, and the slices that its node does not have.
fn one_frame<W: Words>(table: &Table<W>, frame: FrameIdx) -> Result<(), Damage> {
    let wrong = |at, why| Err(Damage::Slice { at, why });
    let mut at = frame.first();
    while at.0 < frame.extent().end() {
        let brick = table.brick(at);
        match (table.owner(at).is_some(), table.is_brick_used(brick)) {
            (true, false) => return wrong(at, "its brick has an owner and is unused"),
            (false, true) => return wrong(at, "its brick is used, and has no owner"),
            _ => {}
        }
        at = SliceIdx(brick.end());
    }
    let beyond = frame.extent().each().filter(|at| !table.layout.has(*at));
    match beyond.into_iter().find(|at| table.state(*at) != crate::map::state::SliceState::Hole) {
        Some(at) => wrong(at, "its node ends before it"),
        None => Ok(()),
    }
}
