//! The pool: its operations and their results.
//!
//! Before: the owner has words, new or with the state of a pool. After: VMs have memory, and the host has memory that
//! no VM needs.
//! Threads: one, the owner's; a worker that zeroes holds slices with old bytes and needs no pool. Units: slices.
//! Promise: no I/O and no clock. After every operation, and after a death in the middle of one, [`Pool::validate`]
//! finds nothing. The state comes first: memory is mapped, punched or given to the host after the operation has
//! returned, and a program that opens the pool after a death makes the memory match the state.

use std::collections::BTreeSet;

use crate::map::check;
use crate::map::damage::Damage;
use crate::map::intent::{self, Intent, check_extent};
use crate::map::layout::{self, Layout};
use crate::map::plan;
use crate::map::request::{Grant, Refused, Request, Segment};
use crate::map::state::{Content, Move, SliceState};
use crate::map::stats::NodeStats;
use crate::map::table::{Entry, Table, Vm};
use crate::map::unit::{Domain, Extent, FrameIdx, GuestIdx, Mode, NodeIdx, SliceIdx, VmId};
use crate::map::words::Words;
use crate::map::zero::ZeroRun;

/// An operation that is invalid in this state. Caused by the owner of the pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub String);

/// The owner of failed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hit {
    /// The slice is never handed out again.
    Free,
    /// A VM has the slice, and must be told. The slice is never handed out again when the VM is gone.
    Owned {
        /// The VM.
        vm: VmId,
        /// Its place in guest memory.
        guest: GuestIdx,
    },
    /// The failure was known.
    Known,
    /// The pool has no memory there: the host has it.
    NotOurs,
}

/// A VM that has memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// The VM.
    pub vm: VmId,
    /// The VMs with which it may share a file.
    pub domain: Domain,
    /// Its alignment.
    pub mode: Mode,
    /// Amount of memory.
    pub slices: u32,
}

/// The pool.
#[derive(Debug)]
pub struct Pool<W> {
    pub(crate) table: Table<W>,
    pub(crate) run: ZeroRun,
    /// Slices that a worker is zeroing and that a VM, now gone, may have written to meanwhile, because it had the file.
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

    /// Opens the state of a pool that another process may have left in the middle of an operation. Returns whether an
    /// operation was repeated. Slices that were being zeroed are dirty.
    ///
    /// # Errors
    /// The words are not the state of a pool, are of another version, or are damaged. Then they are useless.
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
        Ok((Self { table, run: ZeroRun::next(), exposed: BTreeSet::new() }, redone))
    }

    /// Returns the words.
    pub fn into_words(self) -> W {
        self.table.words
    }

    /// Returns the layout.
    pub fn layout(&self) -> &Layout {
        &self.table.layout
    }

    /// Adds memory that the host has given. It is dirty until it was zeroed.
    ///
    /// # Errors
    /// If the node has no such slices, or some are there already.
    pub fn reserve(&mut self, extent: Extent) -> Result<(), Invalid> {
        self.change("Reserving", extent, Move::Reserve)
    }

    /// Gives a VM memory: all of it or none.
    pub fn allocate(&mut self, request: &Request) -> Result<Grant, Refused> {
        let vm = request.vm;
        if self.slot_of(vm).is_some() {
            return Err(Refused::Request { vm, why: "it has memory already".into() });
        }
        let most = self.table.layout.vms;
        // Slots and entries beyond the marks were never used.
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
        let stored = Vm { id: vm, domain: request.domain, mode: request.mode, slices };
        intent::admit(&mut self.table, slot, &stored, &entries, &places);
        Ok(Grant { segments: entries.iter().map(segment).collect() })
    }

    /// Releases the memory of a VM that is gone, with every mapping and descriptor of its files. It is dirty, or out of
    /// service where it failed; unused slices of bricks without a VM become dirty, too. Returns the memory's places.
    ///
    /// # Errors
    /// If there is no such VM.
    pub fn release(&mut self, vm: VmId) -> Result<Vec<Segment>, Invalid> {
        let segments = self.segments(vm).ok_or_else(|| Invalid(format!("Releasing VM {}: it has no memory", vm.0)))?;
        if let Some(slot) = self.slot_of(vm) {
            intent::run(&mut self.table, Intent::Release(slot));
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
    /// the strategy would use first, and none of them is in a file of a trust domain.
    pub fn lend(&mut self, node: NodeIdx, slices: u32) -> Vec<Extent> {
        if usize::from(node.0) >= self.table.layout.nodes.len() {
            return Vec::new();
        }
        let mut chosen = Vec::new();
        for frame in plan::for_slices(&self.table, node) {
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
            intent::run(&mut self.table, Intent::Range { by: Move::Lend, extent: *extent });
        }
        extents
    }

    /// Takes back memory from the host. It is dirty until it was zeroed.
    ///
    /// # Errors
    /// If not all of it was lent.
    pub fn take_back(&mut self, extent: Extent) -> Result<(), Invalid> {
        self.change("Taking back", extent, Move::TakeBack)
    }

    /// Makes a move of all slices of an extent, or of none.
    fn change(&mut self, what: &str, extent: Extent, by: Move) -> Result<(), Invalid> {
        let wrong = |why: String| Err(Invalid(format!("{what} {extent}: {why}")));
        if let Err(why) = check_extent(&self.table, extent) {
            return wrong(why.into());
        }
        if let Some(at) = extent.each().find(|at| self.table.state(*at).after(by).is_none()) {
            return wrong(format!("{at} is {:?}", self.table.state(at)));
        }
        intent::run(&mut self.table, Intent::Range { by, extent });
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
        let hit = self.owner_of(at).map_or(Hit::Free, |(vm, guest)| Hit::Owned { vm, guest });
        intent::run(&mut self.table, Intent::Range { by: Move::Poison, extent });
        Ok(hit)
    }

    /// Returns the VM of a slice, and its place in the guest.
    pub fn owner_of(&self, at: SliceIdx) -> Option<(VmId, GuestIdx)> {
        let entry = self.entries().find(|entry| (entry.extent.start.0..entry.extent.end()).contains(&at.0))?;
        let vm = self.table.vm(entry.slot).ok().flatten()?.id;
        let within = at.0 - entry.extent.start.0;
        Some((vm, GuestIdx(entry.guest.0 + within)))
    }

    /// Returns all memory of a VM in guest order, in as few pieces as possible.
    pub fn segments(&self, vm: VmId) -> Option<Vec<Segment>> {
        let slot = self.slot_of(vm)?;
        let mut segments: Vec<_> = self.entries().filter(|entry| entry.slot == slot).map(|of| segment(&of)).collect();
        segments.sort_by_key(|segment| segment.guest);
        Some(segments)
    }

    /// Returns the bricks that an extent touches: each is a file with a mapping of its own.
    pub fn bricks(&self, extent: Extent) -> Vec<Extent> {
        let bricks = extent.start.0 / self.table.layout.brick..extent.end().div_ceil(self.table.layout.brick);
        bricks.map(|at| self.table.brick(SliceIdx(at * self.table.layout.brick))).collect()
    }

    /// Returns every VM that has memory.
    pub fn tenants(&self) -> impl Iterator<Item = Tenant> {
        self.vms().map(|(_, Vm { id, domain, mode, slices })| Tenant { vm: id, domain, mode, slices })
    }

    fn vms(&self) -> impl Iterator<Item = (u16, Vm)> {
        (0..self.table.vm_mark()).filter_map(|slot| Some((slot, self.table.vm(slot).ok().flatten()?)))
    }

    fn slot_of(&self, vm: VmId) -> Option<u16> {
        self.vms().find(|(_, of)| of.id == vm).map(|(slot, _)| slot)
    }

    fn entries(&self) -> impl Iterator<Item = Entry> {
        (0..self.table.entry_mark()).filter_map(|at| self.table.entry(at))
    }

    /// Returns the state of a slice.
    pub fn state(&self, at: SliceIdx) -> SliceState {
        if self.table.layout.has(at) { self.table.state(at) } else { SliceState::Hole }
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
        state.0 + self.table.counts_bytes()
    }

    /// Checks the whole state. The error is the first that is found.
    pub fn validate(&self) -> Result<(), Damage> {
        let intent = self.table.words.load(layout::WORD_INTENT);
        if intent != 0 {
            return Err(Damage::Intent(intent));
        }
        check::all(&self.table)?;
        if !self.table.is_counted() {
            return Err(Damage::Counts);
        }
        Ok(())
    }
}

fn segment(entry: &Entry) -> Segment {
    Segment { guest: entry.guest, extent: entry.extent }
}
