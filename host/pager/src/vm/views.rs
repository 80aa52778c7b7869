//! The processes that map a VM's RAM, and the chunks that are registered with their userfaultfds.
//!
//! Before: the keeper passed a process on. After: its faults are served, before any page can be far for it.
//! Threads: any; the kernel's registrations and the chunk flags change under one lock.
//! Promise: no page is zapped in a chunk that is not registered with every view.

use std::io;
use std::sync::Arc;

use ballast_base::wire::{self, Span};
use ballast_base::{Hva, PageIdx, PageRange};
use ballast_heat::UnitId;
use ballast_sys::process::Process;

use super::Vm;
use crate::vm::huge::learn;
use crate::vm::region::{Region, is_registered, set_registered};
use crate::vm::stats::Counter;
use crate::vm::touches::KeepRegistered;
use crate::vm::view::{View, is_mapped_over};
use ballast_page::page_state::{State, Word};

/// Returns whether the kernel refuses to register a chunk because of the process's mappings: something else is mapped
/// over its RAM, or it has as many mappings as it may have. A registered chunk is a mapping of its own.
fn is_of_its_mappings(error: &io::Error) -> bool {
    is_mapped_over(error) || error.kind() == io::ErrorKind::OutOfMemory
}

/// Events that are not reported once all processes of the VM have ended, because their end causes them.
const COMES_WITH_AN_END: [&str; 6] =
    ["client-error", "discard-failed", "fault-failed", "reclaim-failed", "restore-failed", "view-incomplete"];

impl Vm {
    /// Reports an event to operators, and logs it.
    pub fn report(&self, kind: &str, message: String) {
        if COMES_WITH_AN_END.contains(&kind) && self.has_ended() {
            tracing::info!(vm = self.state.name(), kind, "{message} (its processes have ended)");
            return;
        }
        tracing::warn!(vm = self.state.name(), kind, "{message}");
        self.reporter()(kind, message);
    }

    fn has_ended(&self) -> bool {
        let views = self.views();
        !views.is_empty() && views.iter().all(|view| Process::has_ended(view.pid))
    }

    /// Adds a region to a view: the process maps it, too.
    ///
    /// # Errors
    /// The region is served, but not every chunk could be registered: none of its pages may be far.
    pub fn add_span(&self, view: &View, span: Span, number: u32) -> io::Result<()> {
        let _layout = self.memory.change_layout();
        view.add_span(span, number);
        self.memory.next_generation();
        self.region(number).into_iter().for_each(|region| region.set_unplugged(false));
        // While less RAM was known, the VM may have had no limit, so that its other regions were unregistered.
        let regions = self.regions();
        let changed = regions.iter().filter(|region| region.number == number || self.is_registered_whole(region));
        changed.map(|region| self.register_as_flagged(region, view)).fold(Ok(()), Result::and)
    }

    /// Registers with a new view the chunks of a region that are registered, except where the VMM has mapped something
    /// else. Of a region whose pages come on demand, or are loaded, it registers all, unless another process maps it:
    /// a chunk that is registered with one view only must not have the flag.
    pub(crate) fn register_as_flagged(&self, region: &Region, view: &View) -> io::Result<()> {
        let Some(memory) = view.of_region(region) else { return Ok(()) };
        let is_other = |other: &Arc<View>| !std::ptr::eq(&**other, view) && other.base(region.number).is_some();
        if self.is_registered_whole(region) && !self.views().iter().any(is_other) {
            let _one = self.memory.registering();
            let new = region.chunks(region.range()).filter(|(_, flag)| !is_registered(flag));
            new.for_each(|(chunk, flag)| {
                set_registered(flag, true);
                self.stats().add(Counter::RegisteredBytes, chunk.bytes().0);
            });
        }
        let (holes, registered) = memory.register_as_flagged(region);
        holes.into_iter().for_each(|pages| self.keep(view, region, pages));
        registered
    }

    /// Removes the view of a process that has ended.
    pub fn remove_view(&self, pid: u32) {
        self.memory.remove_view(pid);
        self.forget_gone();
        self.mail.track.notify();
    }

    /// Registers the chunks that cover these pages with every view. A chunk is registered when its first page is about
    /// to be zapped or watched: memory that is not reclaimed costs nothing.
    pub(crate) fn register(&self, region: &Region, pages: PageRange) -> io::Result<()> {
        for (chunk, flag) in region.chunks(pages) {
            if is_registered(flag) {
                continue;
            }
            let _one = self.memory.registering();
            if is_registered(flag) {
                continue;
            }
            let views = self.views();
            let mapped: Vec<_> = views.iter().filter_map(|view| Some((view, view.of_region(region)?))).collect();
            if mapped.is_empty() {
                return Err(io::Error::other(format!("no process is known to map region {}", region.number)));
            }
            mapped.iter().for_each(|(view, _)| learn(view, region, chunk));
            mapped.iter().try_for_each(|(_, memory)| memory.register(chunk))?;
            set_registered(flag, true);
            self.stats().add(Counter::RegisteredBytes, chunk.bytes().0);
        }
        // Checked last, because lost flags read as registered.
        region.check_table()
    }

    /// Like [`Vm::register`], where the kernel allows it. Returns false if a chunk could not be registered, because the
    /// VMM mapped something there that is no RAM, or has as many mappings as it may have: such chunks are kept from now
    /// on. Also returns false if no process is known to map the region.
    pub(crate) fn register_or_keep(&self, region: &Region, pages: PageRange) -> io::Result<bool> {
        if self.views().iter().all(|view| view.base(region.number).is_none()) {
            return Ok(false);
        }
        let Err(error) = self.register(region, pages) else { return Ok(true) };
        if !is_of_its_mappings(&error) {
            return Err(error);
        }
        for (chunk, _) in region.chunks(pages) {
            let Err(error) = self.register(region, chunk) else { continue };
            let views = self.views();
            if !is_of_its_mappings(&error) {
                return Err(error);
            }
            // If no view refuses any more, the chunk is tried again when its pages are picked again.
            let refuses =
                |view: &&Arc<View>| view.of_region(region).is_some_and(|memory| memory.register(chunk).is_err());
            views.iter().filter(refuses).for_each(|view| self.keep(view, region, chunk));
        }
        Ok(false)
    }

    /// The client could not zap these parts of its RAM: reclaim no longer proposes them. Returns the pages of these
    /// parts, widened to whole granules.
    pub(crate) fn keep_parts(&self, view: &View, parts: &[wire::Range]) -> Vec<(Arc<Region>, PageRange)> {
        let pages = parts.iter().flat_map(|part| view.pages_in(*part));
        let kept = pages.filter_map(|(number, pages)| {
            let region = self.region(number).filter(|region| !region.is_removed())?;
            let end = PageIdx(pages.end().0.next_multiple_of(region.granule_pages()));
            let pages = PageRange::new(region.first_of(pages.start()), end.min(region.range().end()));
            self.keep(view, &region, pages);
            Some((region, pages))
        });
        kept.collect()
    }

    fn keep(&self, view: &View, region: &Region, pages: PageRange) {
        let first = !view.kept.any();
        let at = view.base(region.number).map_or(Hva(0), |base| base + pages.start().offset());
        let len = pages.bytes();
        if view.kept.add(region.number, pages) && first {
            let why = "it has mapped something over them, or locked them, or has too many mappings (vm.max_map_count)";
            let text =
                format!("process {} cannot unmap all of its RAM ({len} at {at} and perhaps more): {why}", view.pid);
            self.report("ram-kept", format!("{text}. These pages stay in memory; the rest is reclaimed"));
        }
    }

    /// Registers a unit that is to be tracked, and returns its region: the kernel serves touches of unregistered memory
    /// by itself. `None` if the unit does not exist, or is a partial one, or could not be registered.
    pub(crate) fn watchable(&self, id: UnitId) -> io::Result<Option<Arc<Region>>> {
        let region = self.region(id.region).filter(|region| !region.is_removed());
        let Some(region) = region.filter(|region| region.units().get(u64::from(id.unit)).is_some()) else {
            return Ok(None);
        };
        let registered = self.register_or_keep(&region, PageRange::of_unit(u64::from(id.unit)))?;
        Ok(registered.then_some(region))
    }

    /// Begins a cycle of tracking: no chunk is unregistered until the returned guard is dropped.
    pub(crate) fn keep_registered(&self) -> KeepRegistered {
        let _one = self.memory.registering();
        self.mail.touches.begin_cycle()
    }

    /// Unregisters chunks without far, zero or quarantined pages, unless a cycle of tracking runs.
    pub(crate) fn unregister_settled(&self, region: &Region) -> io::Result<()> {
        let _one = self.memory.registering();
        if self.mail.touches.is_running() || region.is_on_demand() {
            return Ok(());
        }
        for (chunk, flag) in region.chunks(region.range()) {
            if !is_registered(flag) {
                continue;
            }
            let mut settled = true;
            for page in region.granules(chunk) {
                let granule = region.granule(page);
                let word = granule.cell().load();
                // A zero page is a hole, which reads as zeros in an unregistered chunk, too.
                if word.state() == State::Zero
                    && !word.is_locked()
                    && granule.cell().swap(word, Word::new(State::Resident, 0))
                {
                    self.ledger().moved(State::Zero, State::Resident, granule.pages());
                } else if word.state() != State::Resident || word.is_locked() {
                    settled = false;
                    break;
                }
            }
            if settled {
                // The flag first: registered without a flag costs a little time, a flag without registration costs
                // bytes.
                set_registered(flag, false);
                self.stats().sub(Counter::RegisteredBytes, chunk.bytes().0);
                for view in self.views() {
                    if let Some(memory) = view.of_region(region) {
                        memory.unregister(chunk)?;
                    }
                }
            }
        }
        Ok(())
    }
}
