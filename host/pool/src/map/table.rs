//! The state as typed values: slices, owners of bricks, VM slots, and entries of the map.
//!
//! Before: `layout` has the places, `words` the memory. After: `intent` changes it, `plan` and `check` read it.
//! Promise: only [`Table::step`] stores a slice's byte, and it makes only moves of the truth table. Counts for each
//! frame are kept here, beside the state, and change with it.

use std::num::{NonZeroU32, NonZeroU64};

use crate::map::damage::Damage;
use crate::map::layout::{self, ENTRY_WORDS, Layout, VM_WORDS};
use crate::map::state::{Move, SliceState};
use crate::map::unit::{Domain, Extent, FRAME_SLICES, FrameIdx, GuestIdx, Mode, SliceIdx, VmId};
use crate::map::words::Words;

/// Slices of a frame by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FrameCount {
    pub(crate) ready: u16,
    pub(crate) free: u16,
}

impl FrameCount {
    /// Can the whole frame be handed out as one?
    pub(crate) fn is_whole(self) -> bool {
        self.ready == FRAME_SLICES as u16
    }

    /// Are some slices not free, so that the frame cannot be whole?
    pub(crate) fn is_fragmented(self) -> bool {
        self.free < FRAME_SLICES as u16
    }

    fn add(&mut self, state: SliceState, by: i16) {
        let count = |field: &mut u16, is: bool| *field = field.wrapping_add_signed(if is { by } else { 0 });
        count(&mut self.ready, state.is_ready());
        count(&mut self.free, state.is_free());
    }
}

/// A VM as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Vm {
    pub(crate) id: VmId,
    pub(crate) domain: Domain,
    pub(crate) mode: Mode,
    pub(crate) slices: u32,
}

/// An extent of a VM as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) slot: u16,
    pub(crate) guest: GuestIdx,
    pub(crate) extent: Extent,
}

#[derive(Debug)]
pub(crate) struct Table<W> {
    pub(crate) words: W,
    pub(crate) layout: Layout,
    counts: Vec<FrameCount>,
}

impl<W: Words> Table<W> {
    /// Reads words whose header was read: every byte must be a valid state, and the marks must be within their tables.
    pub(crate) fn new(words: W, layout: Layout) -> Result<Self, Damage> {
        let counts = vec![FrameCount::default(); layout.frames as usize];
        let mut table = Self { words, layout, counts };
        for at in (0..table.layout.slices()).map(SliceIdx) {
            let byte = table.byte(table.layout.states, at.0);
            let state = SliceState::from_byte(byte).ok_or(Damage::State { at, byte })?;
            table.counts[at.frame().0 as usize].add(state, 1);
        }
        for (word, most) in [(layout::WORD_VM_MARK, table.layout.vms), (layout::WORD_ENTRY_MARK, table.layout.slices())]
        {
            let mark = table.words.load(word);
            if mark > u64::from(most) {
                return Err(Damage::Header(format!("{mark} VM slots or entries are used, and there are {most}")));
            }
        }
        Ok(table)
    }

    fn byte(&self, start: usize, at: u32) -> u8 {
        (self.words.load(start + at as usize / 8) >> (at % 8 * 8)) as u8
    }

    fn set_byte(&mut self, start: usize, at: u32, byte: u8) {
        let (word, shift) = (start + at as usize / 8, at % 8 * 8);
        let value = self.words.load(word) & !(0xFF << shift) | u64::from(byte) << shift;
        self.words.store(word, value);
    }

    /// Returns the state of a slice. If its byte was damaged while the pool was open, the slice is out of service.
    pub(crate) fn state(&self, at: SliceIdx) -> SliceState {
        SliceState::from_byte(self.byte(self.layout.states, at.0)).unwrap_or(SliceState::Mce)
    }

    pub(crate) fn step(&mut self, at: SliceIdx, by: Move) {
        let from = self.state(at);
        let Some(to) = from.after(by) else { return };
        let count = &mut self.counts[at.frame().0 as usize];
        count.add(from, -1);
        count.add(to, 1);
        self.set_byte(self.layout.states, at.0, to.to_byte());
    }

    pub(crate) fn count(&self, frame: FrameIdx) -> FrameCount {
        self.counts[frame.0 as usize]
    }

    pub(crate) fn owner(&self, at: SliceIdx) -> Option<Domain> {
        let (word, shift) = self.owner_place(at.0 / self.layout.brick);
        NonZeroU32::new((self.words.load(word) >> shift) as u32).map(Domain)
    }

    pub(crate) fn set_owner(&mut self, at: SliceIdx, owner: Option<Domain>) {
        if self.owner(at) != owner {
            let (word, shift) = self.owner_place(at.0 / self.layout.brick);
            let rest = self.words.load(word) & !(0xFFFF_FFFF << shift);
            self.words.store(word, rest | u64::from(owner.map_or(0, |domain| domain.0.get())) << shift);
        }
    }

    fn owner_place(&self, brick: u32) -> (usize, u32) {
        (self.layout.owners + brick as usize / 2, brick % 2 * 32)
    }

    pub(crate) fn brick(&self, at: SliceIdx) -> Extent {
        let slices = self.layout.brick;
        Extent { start: SliceIdx(at.0 / slices * slices), slices }
    }

    /// Does a VM have a slice of this brick?
    pub(crate) fn is_brick_used(&self, brick: Extent) -> bool {
        brick.each().any(|at| self.state(at).is_owned())
    }

    /// Returns the number of slots that were ever used: no later one has a VM.
    pub(crate) fn vm_mark(&self) -> u16 {
        self.words.load(layout::WORD_VM_MARK) as u16
    }

    pub(crate) fn set_vm_mark(&mut self, mark: u16) {
        self.words.store(layout::WORD_VM_MARK, mark.into());
    }

    /// Returns the VM of this slot; an error if the slot is invalid.
    pub(crate) fn vm(&self, slot: u16) -> Result<Option<Vm>, Damage> {
        let word = |at: usize| self.words.load(self.layout.vms_start + usize::from(slot) * VM_WORDS + at);
        let Some(id) = NonZeroU64::new(word(0)) else { return Ok(None) };
        let wrong = |why| Err(Damage::Vm { slot, why });
        let (second, third) = (word(1), word(2));
        let Some(domain) = NonZeroU32::new(second as u32) else { return wrong("it has no trust domain") };
        let mode = match second >> 32 {
            1 => Mode::Slices,
            2 => Mode::Mix,
            _ => return wrong("its memory is handed out in no mode"),
        };
        let Ok(slices) = u32::try_from(third) else { return wrong("it is larger than the pool") };
        Ok(Some(Vm { id: VmId(id), domain: Domain(domain), mode, slices }))
    }

    /// Write a VM; its id comes last.
    pub(crate) fn set_vm(&mut self, slot: u16, vm: &Vm) {
        let start = self.layout.vms_start + usize::from(slot) * VM_WORDS;
        let mode = match vm.mode {
            Mode::Slices => 1,
            Mode::Mix => 2,
        };
        self.words.store(start + 1, u64::from(vm.domain.0.get()) | mode << 32);
        self.words.store(start + 2, vm.slices.into());
        self.words.store(start, vm.id.0.get());
    }

    /// Clear a slot; its id goes first.
    pub(crate) fn clear_vm(&mut self, slot: u16) {
        let start = self.layout.vms_start + usize::from(slot) * VM_WORDS;
        (0..VM_WORDS).for_each(|at| self.words.store(start + at, 0));
    }

    /// Returns the number of entries that were ever used: no later one is used.
    pub(crate) fn entry_mark(&self) -> u32 {
        self.words.load(layout::WORD_ENTRY_MARK) as u32
    }

    pub(crate) fn set_entry_mark(&mut self, mark: u32) {
        self.words.store(layout::WORD_ENTRY_MARK, mark.into());
    }

    pub(crate) fn entry(&self, at: u32) -> Option<Entry> {
        let word = |word: usize| self.words.load(self.layout.entries_start + at as usize * ENTRY_WORDS + word);
        let (first, second) = (word(0), word(1));
        let extent = Extent { start: SliceIdx(second as u32), slices: (first >> 32) as u32 };
        let slot = (second >> 32) as u16;
        (extent.slices != 0).then_some(Entry { slot, guest: GuestIdx(first as u32), extent })
    }

    /// Writes an entry; the word that makes it valid comes last.
    pub(crate) fn set_entry(&mut self, at: u32, entry: &Entry) {
        let start = self.layout.entries_start + at as usize * ENTRY_WORDS;
        self.words.store(start + 1, u64::from(entry.extent.start.0) | u64::from(entry.slot) << 32);
        self.words.store(start, u64::from(entry.guest.0) | u64::from(entry.extent.slices) << 32);
    }

    /// Clears an entry; the word that makes it valid goes first.
    pub(crate) fn clear_entry(&mut self, at: u32) {
        let start = self.layout.entries_start + at as usize * ENTRY_WORDS;
        (0..ENTRY_WORDS).for_each(|word| self.words.store(start + word, 0));
    }

    pub(crate) fn entries_of(&self, slot: u16) -> Vec<(u32, Entry)> {
        let used = (0..self.entry_mark()).filter_map(|at| Some((at, self.entry(at)?)));
        used.filter(|(_, entry)| entry.slot == slot).collect()
    }

    pub(crate) fn is_counted(&self) -> bool {
        (0..self.layout.frames).map(FrameIdx).all(|frame| {
            let mut count = FrameCount::default();
            frame.extent().each().for_each(|at| count.add(self.state(at), 1));
            count == self.count(frame)
        })
    }

    pub(crate) fn counts_bytes(&self) -> u64 {
        size_of_val(&self.counts[..]) as u64
    }
}
