//! The processes that map a VM's RAM, and which of it is registered with their userfaultfds.
//!
//! Before: the keeper handed over a process. After: its faults are served, before any page of it can be far.
//! Threads: any; the kernel's registrations and the flags of chunks change under one lock.
//! Promise: no page is zapped in a chunk that is not registered with every view.

use std::io;
use std::sync::Arc;

use ballast_base::wire::{self, Span};
use ballast_base::{Hva, PageIdx, PageRange};
use ballast_heat::UnitId;
use ballast_sys::process::Process;

use super::{Hold, Vm};
use crate::vm::huge::learn;
use crate::vm::region::{Region, is_registered, set_registered};
use crate::vm::stats::Counter;
use crate::vm::touches::KeepRegistered;
use crate::vm::view::{View, is_mapped_over};
use ballast_page::page_state::{State, Word};

/// Will the kernel not register a chunk because of what the process has mapped: something over its RAM, or so much that
/// it may have no more mappings? A registered chunk is a mapping of its own.
fn is_of_its_mappings(error: &io::Error) -> bool {
    is_mapped_over(error) || error.kind() == io::ErrorKind::OutOfMemory
}

/// What fails when the processes of a VM are killed: reported of living ones only.
const COMES_WITH_AN_END: [&str; 6] =
    ["client-error", "discard-failed", "fault-failed", "reclaim-failed", "restore-failed", "view-incomplete"];

impl Vm {
    /// Tells operators something; also logged.
    pub fn report(&self, kind: &str, message: String) {
        if COMES_WITH_AN_END.contains(&kind) && self.has_ended() {
            tracing::info!(vm = self.state.name(), kind, "{message} (its processes have ended)");
            return;
        }
        tracing::warn!(vm = self.state.name(), kind, "{message}");
        self.reporter()(kind, message);
    }

    /// Have all of its processes ended?
    fn has_ended(&self) -> bool {
        let views = self.views();
        !views.is_empty() && views.iter().all(|view| Process::has_ended(view.pid))
    }

    /// A process that is a view already maps one more region.
    ///
    /// # Errors
    /// It is served, but not all of it is registered that must be: no page of it may be far.
    pub fn add_span(&self, view: &View, span: Span, number: u32) -> io::Result<()> {
        let _layout = self.memory.change_layout();
        view.add_span(span, number);
        self.memory.next_generation();
        self.region(number).map_or(Ok(()), |region| {
            region.set_unplugged(false);
            self.register_as_flagged(&region, view)
        })
    }

    /// Registers what is registered of this region with a view that is new, but for what the VMM has mapped over it. Of
    /// a region whose pages come on demand, that is all.
    pub(crate) fn register_as_flagged(&self, region: &Region, view: &View) -> io::Result<()> {
        let Some(memory) = view.of_region(region) else { return Ok(()) };
        if region.is_on_demand() {
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

    /// A process that mapped this VM's RAM is gone.
    pub fn remove_view(&self, pid: u32) {
        self.memory.remove_view(pid);
        self.forget_gone();
        self.mail.track.notify();
        self.hold_for_peers(None);
    }

    /// Forgets processes that the engine itself sees to have ended.
    pub(crate) fn forget_ended(&self) {
        for view in self.views().iter().filter(|view| view.peer().has_ended()) {
            self.report("gone", format!("process {} has ended", view.pid));
            self.remove_view(view.pid);
        }
    }

    /// While a process maps the VM in which nothing can be zapped, nothing is reclaimed.
    pub(crate) fn hold_for_peers(&self, new: Option<&Arc<View>>) {
        let why = self.views().iter().chain(new).find_map(|view| view.peer().cannot_zap());
        if why.is_some() || self.is_held_for(Hold::NoZap) {
            self.hold(Hold::NoZap, why);
        }
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
        // Last, because flags that were lost say "registered" without knowledge.
        region.check_table()
    }

    /// The same, if the kernel can. Returns false if the VMM has mapped something in these chunks that is no RAM and
    /// that the kernel will not register, or has as many mappings as it may have: then the chunks are kept. Also if no
    /// process is known to map the region.
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
            // If none refuses any more, it is tried again when its pages are picked again.
            let refuses =
                |view: &&Arc<View>| view.of_region(region).is_some_and(|memory| memory.register(chunk).is_err());
            views.iter().filter(refuses).for_each(|view| self.keep(view, region, chunk));
        }
        Ok(false)
    }

    /// The client of this view could not zap these parts of its RAM. Returns their pages, whole granules; from now on
    /// reclaim does not propose them.
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

    /// The region of a unit that is to be watched, registered: in other memory the kernel serves touches, and nobody
    /// sees them. `None` if it is gone, or only a partial unit at its end, which is not watched.
    pub(crate) fn watchable(&self, id: UnitId) -> io::Result<Option<Arc<Region>>> {
        let region = self.region(id.region).filter(|region| !region.is_removed());
        let Some(region) = region.filter(|region| region.units().get(u64::from(id.unit)).is_some()) else {
            return Ok(None);
        };
        let registered = self.register_or_keep(&region, PageRange::of_unit(u64::from(id.unit)))?;
        Ok(registered.then_some(region))
    }

    /// Begins a cycle of tracking: no chunk is unregistered until the returned value is dropped.
    pub(crate) fn keep_registered(&self) -> KeepRegistered {
        let _one = self.memory.registering();
        self.mail.touches.begin_cycle()
    }

    /// Returns chunks without far, zero or quarantined pages to the kernel, unless a cycle of tracking runs.
    pub(crate) fn unregister_settled(&self, region: &Region) -> io::Result<()> {
        // The kernel's registrations and the flags change together.
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
                // A zero page is a hole, and an unregistered hole reads as zeros.
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
                // The flag first: a registered chunk that is not known to be registered costs a little, the reverse
                // costs bytes.
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
