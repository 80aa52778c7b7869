//! RWP scan: has the kernel look who touches base pages, where it can (userfaultfd read-write protection, Linux 7.3).
//!
//! Before: heat's tracker says which units to watch. After: which of their pages were touched.
//! Threads: one tracking lane per VM; no fault lane and no client has part in it.
//! Units: 2 MiB, and pages. Promise: no byte changes, nothing is unmapped, and no thread waits for us: the first touch of
//! a protected page lifts its protection inside the kernel. An engine that dies in the middle of a cycle leaves pages
//! whose next touch costs that once.
//!
//! It takes the units that are registered for accesses, which `Vm::register` decides: chunks of which nothing was seen mapped
//! huge, in processes whose userfaultfds have the features. For the others there is the zap scan, and that is for good:
//! a huge mapping of shared memory that is protected is unmapped by the kernel (seen on 7.3), so that its touch would be a
//! fault for us as with a zap; and memory so registered cannot be mapped huge again.
//!
//! What is not mapped is not touched: whatever maps it counts as a touch, also a prefetch. What it costs to have it back is no
//! cost of watching.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::{PAGES_PER_UNIT, PageIdx};
use ballast_heat::source::{Ability, BLOCK, CostClass, Granularity};
use ballast_heat::{AccessSource, PageMap, Report, Seen, UnitId, Watch};

use crate::region::{Region, Registered};
use crate::state_file::PAGES_PER_CHUNK;
use crate::stats::Counter;
use crate::view::RegionView;
use crate::vm::Vm;
use crate::zap_scan::{ZapScan, cpu_time};

/// What a touch of a protected page costs the thread that touches: a fault that the kernel resolves, and for a vCPU an
/// exit. Nobody can see it from outside, so it is reckoned; no hardware with such a kernel was there to measure it on.
const TOUCH: Duration = Duration::from_micros(2);

/// Pages protected by one call at most: while they are, faults of a KVM guest on them are put off.
const PIECE: u64 = PAGES_PER_CHUNK;

/// Units that are looked at as one at most, 1 GiB: until that is done no region is added or unplugged.
const MOST_UNITS: usize = 512;

/// See above.
#[derive(Debug)]
pub struct RwpScan<'a> {
    vm: &'a Vm,
    /// For whatever else is to be watched.
    zap: ZapScan<'a>,
    running: Option<Cycle>,
    /// The last cycle had units for the kernel to look after.
    is_used: bool,
}

/// Neighbouring units that are watched, with the pages of each that are.
#[derive(Debug)]
struct Run {
    region: Arc<Region>,
    /// Number of the first unit.
    first: u32,
    units: Vec<(Option<PageMap>, PageMap)>,
}

impl Run {
    fn start(&self) -> PageIdx {
        PageIdx::first_of_unit(u64::from(self.first))
    }

    fn pages(&self) -> u64 {
        self.units.len() as u64 * PAGES_PER_UNIT
    }

    /// The parts of it that are protected, as `(first, count)`.
    fn watched(&self) -> Vec<(PageIdx, u64)> {
        let mut parts: Vec<(PageIdx, u64)> = Vec::new();
        for (unit, (pages, _)) in (u64::from(self.first)..).zip(&self.units) {
            for (first, count) in pages.unwrap_or(PageMap::ALL).runs() {
                let first = PageIdx(PageIdx::first_of_unit(unit).0 + first);
                match parts.last_mut() {
                    Some((last, pages)) if last.0 + *pages == first.0 && *pages + count <= PIECE => *pages += count,
                    _ => parts.push((first, count)),
                }
            }
        }
        parts
    }

    /// Note that these pages were touched.
    fn touch(&mut self, first: PageIdx, count: u64) {
        let start = self.start().0;
        for page in first.0 - start..first.0 - start + count {
            if let Some((watched, touched)) = self.units.get_mut((page / PAGES_PER_UNIT) as usize)
                && watched.is_none_or(|watched| watched.get(page % PAGES_PER_UNIT))
            {
                touched.set(page % PAGES_PER_UNIT);
            }
        }
    }

    /// What was seen of each unit.
    fn seen(&self) -> impl Iterator<Item = (UnitId, Seen)> {
        let id = |unit| UnitId { region: self.region.number, unit };
        let huge = self.region.granule_pages() > 1;
        (self.first..).zip(&self.units).map(move |(unit, (watched, touched))| {
            let seen = match watched {
                Some(watched) => Seen::Fine { watched: *watched, touched: *touched, written: None },
                None if huge => Seen::Coarse { touched: !touched.is_empty(), written: None },
                None => Seen::Blocks { touched: blocks(*touched) },
            };
            (id(unit), seen)
        })
    }
}

/// The eighths of a unit that these pages are in.
fn blocks(touched: PageMap) -> u8 {
    touched.iter().fold(0, |blocks, page| blocks | 1 << (page / BLOCK))
}

/// A cycle that runs.
#[derive(Debug)]
struct Cycle {
    began: Instant,
    cpu: Duration,
    runs: Vec<Run>,
    /// What faults and prefetch had mapped before it.
    mapped: u64,
}

impl<'a> RwpScan<'a> {
    /// For this VM. No cycle runs.
    pub fn new(vm: &'a Vm) -> Self {
        Self { vm, zap: ZapScan::new(vm), running: None, is_used: false }
    }

    /// Divide a watch into what the kernel can look after and what has to be zapped.
    fn divide(&self, watch: &Watch) -> io::Result<(Vec<Run>, Watch)> {
        let mut runs: Vec<Run> = Vec::new();
        let mut rest = Watch::default();
        let views = self.vm.views();
        let coarse = watch.coarse.iter().map(|id| (*id, None));
        let mut all: Vec<_> = coarse.chain(watch.fine.iter().map(|fine| (fine.unit, Some(*fine)))).collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        for (id, fine) in all {
            let Some(region) = self.vm.watchable(id)? else { continue };
            let first = PageIdx::first_of_unit(u64::from(id.unit));
            let is_huge = region.granule_pages() > 1;
            let seen = region.registered_as(first) == Registered::Accesses
                && (is_huge || !region.units().any_huge(first, PAGES_PER_UNIT))
                && views.iter().all(|view| view.sees_accesses() || view.base(id.region).is_none());
            // A huge page of hugetlbfs is touched as a whole, and cannot be protected in part.
            let pages = fine.map(|fine| fine.pages).filter(|_| !is_huge);
            match (seen, fine) {
                (false, Some(fine)) => rest.fine.push(fine),
                (false, None) => rest.coarse.push(id),
                (true, _) => match runs.last_mut() {
                    Some(run)
                        if run.region.number == id.region
                            && run.first + run.units.len() as u32 == id.unit
                            && run.units.len() < MOST_UNITS =>
                    {
                        run.units.push((pages, PageMap::NONE));
                    }
                    _ => runs.push(Run { region, first: id.unit, units: vec![(pages, PageMap::NONE)] }),
                },
            }
        }
        Ok((runs, rest))
    }

    /// Do something with a run of units in every view.
    fn in_views(&self, run: &Run, mut act: impl FnMut(&RegionView<'_>) -> io::Result<()>) -> io::Result<()> {
        // Held so that the region is not unplugged meanwhile: its addresses may be other RAM's right afterwards.
        let _layout = self.vm.layout();
        let views = self.vm.views();
        let mapped = views.iter().filter_map(|view| view.of_region(&run.region));
        mapped.filter(|_| !run.region.is_removed()).try_for_each(|memory| act(&memory))
    }

    fn protect(&self, run: &Run, protected: bool) -> io::Result<()> {
        let parts = run.watched();
        self.in_views(run, |memory| {
            parts.iter().try_for_each(|(first, count)| memory.protect(*first, *count, protected))
        })
    }

    /// Read what was touched, and look no longer. An error of one run leaves none of the others protected.
    fn finish(&self, runs: &mut [Run]) -> io::Result<()> {
        let mut result = Ok(());
        for run in runs {
            let mut found = Vec::new();
            let read = self.in_views(run, |memory| {
                found.extend(memory.accessed(run.start(), run.pages())?);
                Ok(())
            });
            found.into_iter().for_each(|(first, count)| run.touch(first, count));
            result = result.and(read).and(self.protect(run, false));
        }
        result
    }

    /// Pages that our own lanes have mapped so far.
    fn mapped(&self) -> u64 {
        use Counter::{FaultFresh, FaultMinor, FaultRestore, FaultZero, Prefetched};
        let stats = self.vm.stats();
        [FaultFresh, FaultMinor, FaultRestore, FaultZero, Prefetched]
            .into_iter()
            .map(|counter| stats.get(counter))
            .sum()
    }
}

impl AccessSource for RwpScan<'_> {
    fn ability(&self) -> Ability {
        if !self.is_used {
            return self.zap.ability();
        }
        Ability {
            name: "rwp-scan",
            granularity: Granularity::Page,
            reads: true,
            writes: false,
            cost: CostClass::FaultInKernel,
        }
    }

    fn start(&mut self, watch: &Watch) -> io::Result<()> {
        if self.running.is_some() {
            return Err(io::Error::other("Starting to watch accesses: a cycle is running already"));
        }
        let before = cpu_time();
        self.vm.keep_registered();
        let (runs, rest) = {
            let _layout = self.vm.layout();
            self.divide(watch).inspect_err(|_| self.vm.touches.set_running(false))?
        };
        self.zap.start(&rest)?;
        self.is_used = !runs.is_empty();
        let cycle = Cycle { began: Instant::now(), cpu: Duration::ZERO, runs, mapped: self.mapped() };
        let protected = cycle.runs.iter().try_for_each(|run| self.protect(run, true));
        self.running = Some(cycle);
        if let Err(error) = protected {
            let _ = self.end();
            return Err(error);
        }
        self.running.as_mut().expect("just begun").cpu = cpu_time().saturating_sub(before);
        Ok(())
    }

    fn end(&mut self) -> io::Result<Report> {
        let Some(mut cycle) = self.running.take() else {
            return Err(io::Error::other("Ending to watch accesses: no cycle is running"));
        };
        let (before, length) = (cpu_time(), cycle.began.elapsed());
        let finished = self.finish(&mut cycle.runs);
        let cpu = cycle.cpu + cpu_time().saturating_sub(before);
        let mut report = self.zap.end()?;
        finished?;
        let touched = |run: &Run| -> u64 {
            let pages: u64 = run.units.iter().map(|(_, touched)| touched.count()).sum();
            pages / run.region.granule_pages()
        };
        let touches: u64 = cycle.runs.iter().map(touched).sum();
        // What reclaim took would have been a fault without us, too.
        let touches = touches.saturating_sub(self.mapped() - cycle.mapped);
        let guest = TOUCH * u32::try_from(touches).unwrap_or(u32::MAX);
        report.units.extend(cycle.runs.iter().flat_map(Run::seen));
        report.units.sort_unstable_by_key(|(unit, _)| *unit);
        report.length = length;
        // As with zaps, what guests wait is in the CPU time as well: here it is theirs.
        report.cost.cpu += cpu + guest;
        report.cost.guest += guest;
        report.cost.faults += touches;
        Ok(report)
    }
}

impl Drop for RwpScan<'_> {
    /// Also when the lane panics in the middle of a cycle.
    fn drop(&mut self) {
        if let Some(mut cycle) = self.running.take() {
            let _ = self.finish(&mut cycle.runs);
        }
    }
}
