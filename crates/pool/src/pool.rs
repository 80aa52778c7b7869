//! The pool: its operations and their results.
//!
//! Before: its owner has words, new ones or those of a pool. After: VMs have memory, and the host has memory that no VM
//! needs.
//! Threads: one, the owner's; a worker that zeroes holds a [`Dirty`] and needs no pool. Units: slices.
//! Promise: no I/O and no clock. After every operation, and after a death in the middle of one, [`Pool::validate`]
//! finds nothing. The state comes first: memory is mapped, punched or given to the host after the operation has
//! returned, and a program that opens the pool after a death makes the memory match the state.

use std::collections::BTreeSet;

use crate::check;
use crate::damage::Damage;
use crate::index::Index;
use crate::intent::{self, Intent, check_extent};
use crate::layout::{self, Layout};
use crate::plan;
use crate::request::{Grant, Refused, Request, Segment};
use crate::state::{Content, Move, SliceState};
use crate::stats::NodeStats;
use crate::table::{Entry, Table, Vm};
use crate::unit::{Class, Domain, Extent, FrameIdx, GuestIdx, Kind, Mode, NodeIdx, SLICE_SIZE, SliceIdx, VmId};
use crate::words::Words;
use crate::zero::ZeroRun;

/// An operation that is invalid in this state. Caused by the owner of the pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub String);

/// The owner of failed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hit {
    /// The slice is never handed out again.
    Free,
    /// A VM, which must be told. The slice is never handed out again when the VM is gone.
    Owned {
        /// Which VM.
        vm: VmId,
        /// Where the guest has it.
        guest: GuestIdx,
        /// Where the VMM has mapped it.
        hva: Option<u64>,
    },
    /// The failure was known.
    Known,
    /// The host: the pool has no memory there.
    NotOurs,
}

/// A VM that has memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Which.
    pub vm: VmId,
    /// The VMs with which it may share a file.
    pub domain: Domain,
    /// Class of its memory.
    pub kind: Kind,
    /// Its alignment.
    pub mode: Mode,
    /// Amount of memory.
    pub slices: u32,
}

/// The pool.
#[derive(Debug)]
pub struct Pool<W> {
    pub(crate) table: Table<W>,
    index: Index,
    pub(crate) run: ZeroRun,
    /// Slices that workers have and that a VM, now gone, may have written since, because it had the file.
    pub(crate) exposed: BTreeSet<SliceIdx>,
}

impl<W: Words> Pool<W> {
    /// Makes a pool of holes in these words, which are zero and at least as many as the layout has.
    ///
    /// # Errors
    /// If the words are too few or not zero.
    pub fn create(mut words: W, layout: &Layout) -> Result<Self, Damage> {
        if words.count() < layout.words() {
            return Err(Damage::Header(format!("{} words; {} are needed", words.count(), layout.words())));
        }
        if words.load(layout::WORD_MAGIC) != 0 {
            return Err(Damage::Header("something is there already".into()));
        }
        layout.write(&mut words);
        Self::open(words).map(|(pool, _)| pool)
    }

    /// Opens the state of a pool that another process may have left in the middle of an operation. Returns whether one
    /// was repeated. Slices that were being zeroed are dirty.
    ///
    /// # Errors If it is not the state of a pool, is of another version, or is damaged. Then the words are useless.
    pub fn open(words: W) -> Result<(Self, bool), Damage> {
        let layout = Layout::read(&words)?;
        let mut table = Table::new(words, layout)?;
        check::bounds(&table)?;
        let redone = intent::recover(&mut table)?;
        for frame in (0..table.layout.frames).map(FrameIdx) {
            if table.count(frame).free > table.count(frame).ready {
                frame.extent().each().for_each(|at| table.step(at, Move::Stop));
            }
        }
        check::all(&table)?;
        layout::raise(&mut table.words);
        let index = Index::new(&table);
        Ok((Self { table, index, run: ZeroRun::next(), exposed: BTreeSet::new() }, redone))
    }

    /// Returns the words.
    pub fn into_words(self) -> W {
        self.table.words
    }

    /// Returns its layout.
    pub fn layout(&self) -> &Layout {
        &self.table.layout
    }

    /// Adds memory that the host has given. It is dirty until it was zeroed.
    ///
    /// # Errors
    /// If the node has no such slices, some are there already, or a frame would be of two classes.
    pub fn reserve(&mut self, extent: Extent, class: Class) -> Result<(), Invalid> {
        self.change("Reserving", extent, Move::Reserve, Some(class))
    }

    /// Gives a VM memory: all of it or none.
    ///
    /// # Errors The request is invalid, or there is too little memory.
    pub fn allocate(&mut self, request: &Request) -> Result<Grant, Refused> {
        let vm = request.vm;
        if self.index.vms.contains_key(&vm) {
            return Err(Refused::Request { vm, why: "it has memory already".into() });
        }
        let most = self.table.layout.vms;
        // What is beyond the marks was never used.
        let (slots, used) = (u32::from(self.table.vm_mark()), self.table.entry_mark());
        let free = (0..most).find(|slot| *slot >= slots || matches!(self.table.vm(*slot as u16), Ok(None)));
        let Some(slot) = free.map(|slot| slot as u16) else { return Err(Refused::TooManyVms { vm, most }) };
        let entries = plan::plan(&self.table, request, slot)?;
        let free = (0..self.table.layout.slices()).filter(|at| *at >= used || self.table.entry(*at).is_none());
        let places: Vec<u32> = free.take(entries.len()).collect();
        let end = places.iter().max().map_or(0, |last| *last as usize + 1);
        let layout = &self.table.layout;
        for words in [layout.vm_words(usize::from(slot) + 1), layout.entry_words(end)] {
            let why = |error| format!("the pool's state cannot grow: {error}");
            self.table.words.back(words).map_err(|error| Refused::Request { vm, why: why(error) })?;
        }
        let slices = entries.iter().map(|entry| entry.extent.slices).sum();
        let demoted = self.demoted(&entries);
        let stored = Vm { id: vm, domain: request.domain, kind: request.kind, mode: request.mode, slices };
        intent::admit(&mut self.table, slot, &stored, &entries, &places);
        self.index.add(&self.table, vm, slot, places);
        Ok(Grant { segments: entries.iter().map(|entry| self.segment(entry)).collect(), demoted })
    }

    /// Returns the frames of 1 GiB of which these entries have parts.
    fn demoted(&self, entries: &[Entry]) -> Vec<Extent> {
        let slices = entries.iter().filter(|entry| !entry.whole);
        let frames = slices.flat_map(|entry| entry.extent.frames());
        let mut gib: Vec<FrameIdx> = frames.filter(|frame| self.table.class(*frame) == Some(Class::Gib)).collect();
        gib.sort_unstable();
        gib.dedup();
        gib.into_iter().map(FrameIdx::extent).collect()
    }

    /// Releases the memory of a VM that is gone, with every mapping and descriptor of its files. Its memory is dirty,
    /// or out of service where it failed; so are the unused slices of bricks that no VM has any more. Returns its
    /// places.
    ///
    /// # Errors
    /// If there is no such VM.
    pub fn release(&mut self, vm: VmId) -> Result<Vec<Segment>, Invalid> {
        let segments = self.segments(vm).ok_or_else(|| Invalid(format!("Releasing VM {}: it has no memory", vm.0)))?;
        if let Some(gone) = self.index.remove(&self.table, vm) {
            intent::run(&mut self.table, Intent::Release(gone.slot));
        }
        for brick in segments.iter().flat_map(|segment| self.bricks(segment.extent)).collect::<Vec<_>>() {
            if self.table.owner(brick.start).is_none() {
                let is_at_work = |at: &SliceIdx| self.table.state(*at) == SliceState::Free(Content::Zeroing);
                self.exposed.extend(brick.each().filter(is_at_work));
            }
        }
        Ok(segments)
    }

    /// Lends up to this number of slices of a node to the host, and returns them. They are those that rules 2 and 3 of
    /// the strategy would use first; none is in a file that a trust domain has. A page of 1 GiB goes whole if it can.
    pub fn lend(&mut self, node: NodeIdx, kind: Kind, slices: u32) -> Vec<Extent> {
        if usize::from(node.0) >= self.table.layout.nodes.len() {
            return Vec::new();
        }
        let mut chosen = Vec::new();
        for frame in plan::for_slices(&self.table, kind, node) {
            let is_lendable =
                |at: &SliceIdx| self.table.state(*at).after(Move::Lend).is_some() && self.table.owner(*at).is_none();
            let left = slices as usize - chosen.len();
            chosen.extend(frame.extent().each().rev().filter(is_lendable).take(left));
            if chosen.len() == slices as usize {
                break;
            }
        }
        chosen.sort_unstable();
        let extents = plan::join(&chosen);
        for extent in &extents {
            intent::run(&mut self.table, Intent::Range { by: Move::Lend, class: None, extent: *extent });
        }
        extents
    }

    /// Takes back memory from the host, which is of this class now. It is dirty until it was zeroed.
    ///
    /// # Errors
    /// If not all of it was lent, or a frame would be of two classes.
    pub fn take_back(&mut self, extent: Extent, class: Class) -> Result<(), Invalid> {
        self.change("Taking back", extent, Move::TakeBack, Some(class))
    }

    /// Forgets memory that was lent, or is out of service after [`Pool::fail`].
    ///
    /// # Errors
    /// If some of it is anything else.
    pub fn retire(&mut self, extent: Extent) -> Result<(), Invalid> {
        self.change("Retiring", extent, Move::Retire, None)
    }

    /// Makes a move of all of an extent or of none.
    fn change(&mut self, what: &str, extent: Extent, by: Move, class: Option<Class>) -> Result<(), Invalid> {
        let wrong = |why: String| Err(Invalid(format!("{what} {extent}: {why}")));
        if let Err(why) = check_extent(&self.table, extent) {
            return wrong(why.into());
        }
        if let Some(at) = extent.each().find(|at| self.table.state(*at).after(by).is_none()) {
            return wrong(format!("{at} is {:?}", self.table.state(at)));
        }
        if class == Some(Class::Gib) && !extent.is_whole_frames() {
            return wrong("pages of 1 GiB are whole frames".into());
        }
        // What stays in a frame must be of the class that the rest becomes.
        let in_part = |frame: &FrameIdx| extent.within(*frame) != frame.extent();
        let kept = |frame: FrameIdx| Some((frame, self.table.class(frame)?));
        let fits = |has: Class, gets: Class| has == gets || (has, gets) == (Class::Gib, Class::Huge);
        let mut kept = extent.frames().filter(in_part).filter_map(kept);
        if let Some((frame, has)) = kept.find(|(_, has)| class.is_some_and(|gets| !fits(*has, gets))) {
            return wrong(format!("the rest of frame {} is of class {has:?}", frame.0));
        }
        intent::run(&mut self.table, Intent::Range { by, class, extent });
        Ok(())
    }

    /// Marks a slice whose memory has failed. It is never handed out again.
    ///
    /// # Errors
    /// If the pool has no such slice.
    pub fn poison(&mut self, at: SliceIdx) -> Result<Hit, Invalid> {
        let extent = Extent { start: at, slices: 1 };
        check_extent(&self.table, extent).map_err(|why| Invalid(format!("Poisoning {at}: {why}")))?;
        let before = self.table.state(at);
        if before.after(Move::Poison).is_none() {
            let is_known = matches!(before, SliceState::Mce | SliceState::MceUsed);
            return Ok(if is_known { Hit::Known } else { Hit::NotOurs });
        }
        let hit = self.owner_of(at).map_or(Hit::Free, |(vm, guest, hva)| Hit::Owned { vm, guest, hva });
        intent::run(&mut self.table, Intent::Range { by: Move::Poison, class: None, extent });
        Ok(hit)
    }

    /// Records that the VMM has mapped these slices of the guest at `hva`, or unmapped them. A VM may be mapped in
    /// pieces.
    ///
    /// # Errors
    /// If the VM has no such memory, a piece begins or ends in the middle of an extent, or the address is taken.
    pub fn map(&mut self, vm: VmId, guest: GuestIdx, slices: u32, hva: Option<u64>) -> Result<(), Invalid> {
        let wrong = |why: String| Err(Invalid(format!("Mapping VM {} at {:#x}: {why}", vm.0, guest.address())));
        let Some(of) = self.index.vms.get(&vm) else { return wrong("it has no memory".into()) };
        let end = u64::from(guest.0) + u64::from(slices);
        let is_address = |hva: u64| hva != 0 && hva.is_multiple_of(SLICE_SIZE);
        let fits = |hva: u64| hva.checked_add(u64::from(slices) * SLICE_SIZE).is_some();
        if let Some(hva) = hva.filter(|hva| !is_address(*hva) || !fits(*hva)) {
            return wrong(format!("{hva:#x} is no address of a slice"));
        }
        let mut places = Vec::new();
        for at in &of.by_guest {
            let Some(entry) = self.table.entry(*at) else { continue };
            let (from, to) = (u64::from(entry.guest.0), u64::from(entry.guest.0) + u64::from(entry.extent.slices));
            if from >= u64::from(guest.0) && to <= end {
                places.push((*at, hva.map_or(0, |hva| hva + (from - u64::from(guest.0)) * SLICE_SIZE)));
            } else if from < end && to > u64::from(guest.0) {
                return wrong(format!("an extent is from {:#x} on, and only a part is mapped", entry.guest.address()));
            } else if let Some(hva) = hva.filter(|_| entry.hva != 0) {
                let last = hva + u64::from(slices) * SLICE_SIZE;
                if entry.hva < last && hva < entry.hva + (to - from) * SLICE_SIZE {
                    return wrong(format!("{:#x} is mapped there already", entry.guest.address()));
                }
            }
        }
        if places.is_empty() {
            return wrong("it has no memory there".into());
        }
        places.into_iter().for_each(|(at, hva)| self.table.set_hva(at, hva));
        self.index.mapped(&self.table, vm);
        Ok(())
    }

    /// Returns the VM of a slice, and its guest-physical and VMM addresses.
    pub fn owner_of(&self, at: SliceIdx) -> Option<(VmId, GuestIdx, Option<u64>)> {
        let entry = self.index.of_slice(&self.table, at)?;
        let vm = self.table.vm(entry.slot).ok().flatten()?.id;
        let within = at.0 - entry.extent.start.0;
        let hva = (entry.hva != 0).then(|| entry.hva + u64::from(within) * SLICE_SIZE);
        Some((vm, GuestIdx(entry.guest.0 + within), hva))
    }

    /// Returns the slice of this memory of a guest.
    pub fn slice_of(&self, vm: VmId, guest: GuestIdx) -> Option<SliceIdx> {
        let entry = self.index.of_guest(&self.table, vm, guest)?;
        Some(SliceIdx(entry.extent.start.0 + (guest.0 - entry.guest.0)))
    }

    /// Returns the VMM's address of this memory of a guest.
    pub fn hva_of(&self, vm: VmId, guest: GuestIdx) -> Option<u64> {
        let entry = self.index.of_guest(&self.table, vm, guest).filter(|entry| entry.hva != 0)?;
        Some(entry.hva + u64::from(guest.0 - entry.guest.0) * SLICE_SIZE)
    }

    /// Returns the memory of the guest that the VMM has mapped at this address.
    pub fn guest_at(&self, vm: VmId, hva: u64) -> Option<GuestIdx> {
        let entry = self.index.of_hva(&self.table, vm, hva)?;
        Some(GuestIdx(entry.guest.0 + ((hva - entry.hva) / SLICE_SIZE) as u32))
    }

    /// Returns all memory of a VM in guest order, in as few pieces as possible.
    pub fn segments(&self, vm: VmId) -> Option<Vec<Segment>> {
        let entries = self.index.vms.get(&vm)?.by_guest.iter().filter_map(|at| self.table.entry(*at));
        Some(entries.map(|entry| self.segment(&entry)).collect())
    }

    fn segment(&self, entry: &Entry) -> Segment {
        let Entry { guest, extent, hva, .. } = *entry;
        let classes = extent.frames().filter_map(|frame| self.table.class(frame));
        let class = classes.reduce(|one, other| if one == Class::Gib { other } else { one });
        Segment { guest, extent, class: class.unwrap_or(Class::Huge), hva: (hva != 0).then_some(hva) }
    }

    /// Returns the bricks that an extent touches: each is a file, and is mapped by itself.
    pub fn bricks(&self, extent: Extent) -> Vec<Extent> {
        let bricks = extent.start.0 / self.table.layout.brick..extent.end().div_ceil(self.table.layout.brick);
        bricks.map(|at| self.table.brick(SliceIdx(at * self.table.layout.brick))).collect()
    }

    /// Returns every VM that has memory.
    pub fn tenants(&self) -> impl Iterator<Item = Tenant> {
        let vms = self.index.vms.values().filter_map(|of| self.table.vm(of.slot).ok().flatten());
        vms.map(|Vm { id, domain, kind, mode, slices }| Tenant { vm: id, domain, kind, mode, slices })
    }

    /// Returns the state of a slice.
    pub fn state(&self, at: SliceIdx) -> SliceState {
        if self.table.layout.has(at) { self.table.state(at) } else { SliceState::Hole }
    }

    /// Returns the class of a slice's memory.
    pub fn class(&self, at: SliceIdx) -> Option<Class> {
        if self.table.layout.has(at) { self.table.class(at.frame()) } else { None }
    }

    /// Returns the trust domain that has the file of this slice.
    pub fn domain(&self, at: SliceIdx) -> Option<Domain> {
        if self.table.layout.has(at) { self.table.owner(at) } else { None }
    }

    /// Returns the numbers of a node; `None` if there is no such node.
    pub fn stats(&self, node: NodeIdx) -> Option<NodeStats> {
        (usize::from(node.0) < self.table.layout.nodes.len()).then(|| NodeStats::of(&self.table, node))
    }

    /// Returns the memory of the used part of the state, and of this process's tables.
    pub fn metadata_bytes(&self) -> u64 {
        let state = self.table.layout.used_bytes(self.table.vm_mark().into(), self.table.entry_mark());
        state.0 + self.table.counts_bytes() + self.index.bytes()
    }

    /// Checks the whole state.
    ///
    /// # Errors The first error.
    pub fn validate(&self) -> Result<(), Damage> {
        let intent = self.table.words.load(layout::WORD_INTENT);
        if intent != 0 {
            return Err(Damage::Intent(intent));
        }
        check::all(&self.table)?;
        if !self.table.is_counted() {
            return Err(Damage::Index("the slices of a frame are not those that were counted"));
        }
        if self.index != Index::new(&self.table) {
            return Err(Damage::Index("the look-ups are not those of the map"));
        }
        Ok(())
    }
}
