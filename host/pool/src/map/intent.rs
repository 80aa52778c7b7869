//! Atomic changes of many words: a journal (*intent*) is written first.
//!
//! Before: an operation is planned. After: it is complete, even if its writer was killed in the middle.
//! Threads: one writer. Promise: each change below can be repeated from any of its steps, with the same result. A
//! writer stores the operand, then the intent in one word, then the changes, then an intent of zero. A program that
//! opens the state and finds an intent repeats that change. So after [`recover`] the state is as before the intent was
//! stored, or as after it was cleared, and never in between.
//!
//! | Intent | Done again |
//! |---|---|
//! | prepare a slot | its entries and the slot are cleared: nothing was handed out yet |
//! | apply a slot | its slices are taken, and their bricks get its domain |
//! | release a slot | its slices, and the rest of bricks that it leaves, become dirty; then its entries are cleared |
//! | a move of an extent | every slice of which the truth table has that move makes it, then its frames are settled |

use crate::map::damage::Damage;
use crate::map::layout::{WORD_INTENT, WORD_OPERAND};
use crate::map::state::Move;
use crate::map::table::{Entry, Table, Vm};
use crate::map::unit::{Extent, FrameIdx, SliceIdx};
use crate::map::words::Words;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Intent {
    Prepare(u16),
    Apply(u16),
    Release(u16),
    Range { by: Move, extent: Extent },
}

const PREPARE: u8 = 0x0F;
const APPLY: u8 = 0x33;
const RELEASE: u8 = 0x55;
const RANGE: u8 = 0x69;

impl Intent {
    fn to_words(self) -> (u64, u64) {
        let slot = |op: u8, slot: u16| (u64::from(op) | u64::from(slot) << 32, 0);
        match self {
            Self::Prepare(of) => slot(PREPARE, of),
            Self::Apply(of) => slot(APPLY, of),
            Self::Release(of) => slot(RELEASE, of),
            Self::Range { by, extent } => {
                let by = Move::ALL.iter().position(|other| *other == by).expect("ALL has every move") as u64;
                (u64::from(RANGE) | by << 8, u64::from(extent.start.0) | u64::from(extent.slices) << 32)
            }
        }
    }

    fn from_words<W: Words>(table: &Table<W>, word: u64) -> Result<Option<Self>, Damage> {
        let wrong = Err(Damage::Intent(word));
        let slot = (word >> 32) as u16;
        let is_slot = word >> 8 & 0xFF_FFFF == 0 && word >> 48 == 0 && u32::from(slot) < table.layout.vms;
        Ok(Some(match word as u8 {
            0 if word == 0 => return Ok(None),
            PREPARE if is_slot => Self::Prepare(slot),
            APPLY if is_slot => Self::Apply(slot),
            RELEASE if is_slot => Self::Release(slot),
            RANGE if word >> 16 == 0 => {
                let operand = table.words.load(WORD_OPERAND);
                let extent = Extent { start: SliceIdx(operand as u32), slices: (operand >> 32) as u32 };
                let Some(by) = Move::ALL.get((word >> 8) as usize) else { return wrong };
                if check_extent(table, extent).is_err() {
                    return wrong;
                }
                Self::Range { by: *by, extent }
            }
            _ => return wrong,
        }))
    }
}

pub(crate) fn check_extent<W: Words>(table: &Table<W>, extent: Extent) -> Result<(), &'static str> {
    let Some(end) = extent.start.0.checked_add(extent.slices) else { return Err("it ends nowhere") };
    if extent.slices == 0 {
        return Err("it is empty");
    }
    let last = SliceIdx(end - 1);
    let node = |at: SliceIdx| table.layout.node_of(at.frame());
    if !table.layout.has(extent.start) || !table.layout.has(last) || node(extent.start) != node(last) {
        return Err("its node has no such slices");
    }
    Ok(())
}

pub(crate) fn run<W: Words>(table: &mut Table<W>, intent: Intent) {
    begin(table, intent);
    apply(table, intent);
    table.words.store(WORD_INTENT, 0);
}

fn begin<W: Words>(table: &mut Table<W>, intent: Intent) {
    let (word, operand) = intent.to_words();
    if operand != 0 {
        table.words.store(WORD_OPERAND, operand);
    }
    table.words.store(WORD_INTENT, word);
}

/// Adds a VM, atomically. Returns the places of its entries.
pub(crate) fn admit<W: Words>(table: &mut Table<W>, slot: u16, vm: &Vm, entries: &[Entry], places: &[u32]) {
    begin(table, Intent::Prepare(slot));
    if slot >= table.vm_mark() {
        table.set_vm_mark(slot + 1);
    }
    let end = places.iter().max().map_or(0, |last| last + 1);
    if end > table.entry_mark() {
        table.set_entry_mark(end);
    }
    for (at, entry) in places.iter().zip(entries) {
        table.set_entry(*at, entry);
    }
    table.set_vm(slot, vm);
    run(table, Intent::Apply(slot));
}

/// Repeats the change under way, if there is one. Returns whether there was one.
pub(crate) fn recover<W: Words>(table: &mut Table<W>) -> Result<bool, Damage> {
    let Some(intent) = Intent::from_words(table, table.words.load(WORD_INTENT))? else { return Ok(false) };
    apply(table, intent);
    table.words.store(WORD_INTENT, 0);
    Ok(true)
}

/// Makes the change. Entries of this run come from a plan; `check::bounds` has checked those of an earlier run.
fn apply<W: Words>(table: &mut Table<W>, intent: Intent) {
    match intent {
        Intent::Prepare(slot) => clear(table, slot),
        Intent::Apply(slot) => {
            let Ok(Some(vm)) = table.vm(slot) else { return };
            for (_, entry) in table.entries_of(slot) {
                take(table, &vm, &entry);
            }
        }
        Intent::Release(slot) => {
            for (at, entry) in table.entries_of(slot) {
                entry.extent.each().for_each(|at| table.step(at, Move::Release));
                entry.extent.frames().for_each(|frame| settle(table, frame, entry.extent));
                table.clear_entry(at);
            }
            clear(table, slot);
        }
        Intent::Range { by, extent } => {
            extent.each().for_each(|at| table.step(at, by));
            extent.frames().for_each(|frame| settle(table, frame, extent));
        }
    }
}

fn take<W: Words>(table: &mut Table<W>, vm: &Vm, entry: &Entry) {
    for at in entry.extent.each() {
        table.set_owner(at, Some(vm.domain));
        table.step(at, Move::Take);
    }
}

/// Clears this slot, and lowers the marks to the used part.
fn clear<W: Words>(table: &mut Table<W>, slot: u16) {
    table.entries_of(slot).into_iter().for_each(|(at, _)| table.clear_entry(at));
    table.clear_vm(slot);
    let entries = (0..table.entry_mark()).rev().find(|at| table.entry(*at).is_some()).map_or(0, |last| last + 1);
    if entries < table.entry_mark() {
        table.set_entry_mark(entries);
    }
    let is_used = |slot: &u16| !matches!(table.vm(*slot), Ok(None));
    let vms = (0..table.vm_mark()).rev().find(is_used).map_or(0, |last| last + 1);
    if vms < table.vm_mark() {
        table.set_vm_mark(vms);
    }
}

/// Removes the owners of the frame's bricks that are unused after the slices in `changed` changed.
fn settle<W: Words>(table: &mut Table<W>, frame: FrameIdx, changed: Extent) {
    let mut at = changed.within(frame).start;
    while at.0 < changed.within(frame).end() {
        let brick = table.brick(at);
        if table.owner(at).is_some() && !table.is_brick_used(brick) {
            // The VMs of the brick had the whole file, so they could also write to its unused slices.
            brick.each().for_each(|at| table.step(at, Move::Expose));
            table.set_owner(at, None);
        }
        at = SliceIdx(brick.end());
    }
}
