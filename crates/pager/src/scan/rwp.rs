//! RWP scan: the kernel records which base pages are touched (userfaultfd read-write protection, Linux 7.3).
//!
//! Before: [`super::source`] gives it the units that the kernel can watch. After: it has said which of their pages were
//! touched.
//! Threads: one tracking worker per VM; no fault worker and no client takes part.
//! Units: 2 MiB, and pages. Promise: no byte changes, nothing is unmapped, and no thread waits for us: the first touch
//! of a protected page lifts its protection inside the kernel. If an engine dies in the middle of a cycle, the next
//! touch of each protected page costs that once.
//!
//! A page that is not mapped counts as not touched, and any mapping of it as a touch, also by a prefetch. The cost of
//! restoring it is no cost of watching.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ballast_base::stripes::PAGES_PER_CHUNK;
use ballast_base::{PAGES_PER_UNIT, PageIdx, PageRange};
use ballast_heat::source::{Ability, BLOCK, Cost};
use ballast_heat::{PageMap, Seen, UnitId};

use crate::vm::Vm;
use crate::vm::region::Region;
use crate::vm::stats::Counter;
use crate::vm::view::RegionView;

/// Cost of a touch of a protected page for the thread that touches: a fault that the kernel resolves, and for a vCPU an
/// exit. It cannot be seen from outside, so this is an estimate; it was not measured on hardware with such a kernel.
const TOUCH: Duration = Duration::from_micros(2);

/// Most pages protected by one call: meanwhile faults of a KVM guest on them are put off.
const PIECE: u64 = PAGES_PER_CHUNK;

/// Most units that are scanned as one, 1 GiB: until the scan is done no region is added or unplugged.
const MOST_UNITS: usize = 512;

/// The ability of this scan.
pub(crate) const ABILITY: Ability = Ability { name: "rwp-scan" };

/// The scan of one VM.
#[derive(Debug)]
pub(crate) struct RwpScan {
    vm: Arc<Vm>,
    /// The units that the running cycle watches.
    runs: Vec<ProtectedRun>,
    /// Pages that faults and prefetch had mapped before it.
    mapped: u64,
}

/// Neighbouring units that are watched, and which of their pages.
#[derive(Debug)]
pub(crate) struct ProtectedRun {
    region: Arc<Region>,
    /// Number of the first unit.
    first: u32,
    units: Vec<(Option<PageMap>, PageMap)>,
}

impl ProtectedRun {
    /// Adds a unit to runs that are in ascending order. `pages` says which of its pages to watch if not all.
    pub(crate) fn add(runs: &mut Vec<ProtectedRun>, region: Arc<Region>, unit: u32, pages: Option<PageMap>) {
        // A huge page of hugetlbfs is touched as a whole, and part of it cannot be protected.
        let pages = pages.filter(|_| region.granule_pages() == 1);
        match runs.last_mut() {
            Some(run)
                if run.region.number == region.number
                    && run.first + run.units.len() as u32 == unit
                    && run.units.len() < MOST_UNITS =>
            {
                run.units.push((pages, PageMap::NONE));
            }
            _ => runs.push(ProtectedRun { region, first: unit, units: vec![(pages, PageMap::NONE)] }),
        }
    }

    fn start(&self) -> PageIdx {
        PageIdx::first_of_unit(u64::from(self.first))
    }

    fn range(&self) -> PageRange {
        PageRange::of(self.start(), self.units.len() as u64 * PAGES_PER_UNIT)
    }

    /// The parts of it that are protected.
    fn watched(&self) -> Vec<PageRange> {
        let mut parts: Vec<PageRange> = Vec::new();
        for (unit, (pages, _)) in (u64::from(self.first)..).zip(&self.units) {
            for (first, count) in pages.unwrap_or(PageMap::ALL).runs() {
                let first = PageIdx(PageIdx::first_of_unit(unit).0 + first);
                match parts.last_mut() {
                    Some(last) if last.end() == first && last.count() + count <= PIECE => {
                        *last = PageRange::of(last.start(), last.count() + count);
                    }
                    _ => parts.push(PageRange::of(first, count)),
                }
            }
        }
        parts
    }

    /// Notes that these pages were touched.
    fn touch(&mut self, pages: PageRange) {
        let start = self.start().0;
        for page in pages.iter().map(|page| page.0 - start) {
            if let Some((watched, touched)) = self.units.get_mut((page / PAGES_PER_UNIT) as usize)
                && watched.is_none_or(|watched| watched.get(page % PAGES_PER_UNIT))
            {
                touched.set(page % PAGES_PER_UNIT);
            }
        }
    }

    /// The touches seen of each unit.
    fn seen(&self) -> impl Iterator<Item = (UnitId, Seen)> {
        let id = |unit| UnitId { region: self.region.number, unit };
        let huge = self.region.granule_pages() > 1;
        (self.first..).zip(&self.units).map(move |(unit, (watched, touched))| {
            let seen = match watched {
                Some(watched) => Seen::Fine { watched: *watched, touched: *touched },
                None if huge => Seen::Coarse { touched: !touched.is_empty() },
                None => Seen::Blocks { touched: blocks(*touched) },
            };
            (id(unit), seen)
        })
    }
}

/// The eighths of a unit that contain these pages.
fn blocks(touched: PageMap) -> u8 {
    touched.iter().fold(0, |blocks, page| blocks | 1 << (page / BLOCK))
}

impl RwpScan {
    /// A scan for this VM, with no cycle under way.
    pub(crate) fn new(vm: Arc<Vm>) -> Self {
        Self { vm, runs: Vec::new(), mapped: 0 }
    }

    /// Begins a cycle over these units, which are registered for accesses with every view. On an error no cycle runs.
    pub(crate) fn start(&mut self, runs: Vec<ProtectedRun>) -> io::Result<()> {
        (self.runs, self.mapped) = (runs, self.mapped());
        let protected = self.runs.iter().try_for_each(|run| self.protect(run, true));
        if protected.is_err() {
            let _ = self.end();
        }
        protected
    }

    /// Ends the cycle, also on an error. Returns the touches seen, and the cost.
    pub(crate) fn end(&mut self) -> io::Result<(Vec<(UnitId, Seen)>, Cost)> {
        let mut runs = std::mem::take(&mut self.runs);
        self.finish(&mut runs)?;
        let touched = |run: &ProtectedRun| -> u64 {
            let pages: u64 = run.units.iter().map(|(_, touched)| touched.count()).sum();
            pages / run.region.granule_pages()
        };
        let touches: u64 = runs.iter().map(touched).sum();
        // Pages that reclaim took would have faulted without the scan, too.
        let faults = touches.saturating_sub(self.mapped() - self.mapped);
        let guest = TOUCH * u32::try_from(faults).unwrap_or(u32::MAX);
        // The guest's wait is included in the CPU time: here it is the guest's CPU.
        Ok((runs.iter().flat_map(ProtectedRun::seen).collect(), Cost { cpu: guest, guest, faults }))
    }

    /// Does something with a run of units in every view.
    fn in_views(&self, run: &ProtectedRun, mut act: impl FnMut(&RegionView<'_>) -> io::Result<()>) -> io::Result<()> {
        // Held so that the region is not unplugged meanwhile: its addresses may belong to other RAM right afterwards.
        let _layout = self.vm.layout();
        let views = self.vm.views();
        let mapped = views.iter().filter_map(|view| view.of_region(&run.region));
        mapped.filter(|_| !run.region.is_removed()).try_for_each(|memory| act(&memory))
    }

    fn protect(&self, run: &ProtectedRun, protected: bool) -> io::Result<()> {
        let parts = run.watched();
        self.in_views(run, |memory| parts.iter().try_for_each(|part| memory.protect(*part, protected)))
    }

    /// Reads which pages were touched, and lifts the protection. An error of one run leaves no other run protected.
    fn finish(&self, runs: &mut [ProtectedRun]) -> io::Result<()> {
        let mut result = Ok(());
        for run in runs {
            let mut found = Vec::new();
            let read = self.in_views(run, |memory| {
                found.extend(memory.accessed(run.range())?);
                Ok(())
            });
            found.into_iter().for_each(|pages| run.touch(pages));
            result = result.and(read).and(self.protect(run, false));
        }
        result
    }

    /// Pages that our own workers have mapped so far.
    fn mapped(&self) -> u64 {
        use Counter::{FaultFresh, FaultMinor, FaultRestore, FaultZero, Prefetched};
        let stats = self.vm.stats();
        [FaultFresh, FaultMinor, FaultRestore, FaultZero, Prefetched]
            .into_iter()
            .map(|counter| stats.get(counter))
            .sum()
    }
}

impl Drop for RwpScan {
    /// Also when the worker panics in the middle of a cycle.
    fn drop(&mut self) {
        let mut runs = std::mem::take(&mut self.runs);
        let _ = self.finish(&mut runs);
    }
}
