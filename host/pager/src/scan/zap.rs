//! Zap scan: finds touched memory by unmapping it and counting the minor faults.
//!
//! Before: [`super::source`] gives it units to watch. After: it has reported which of them, or their pages, were
//! touched.
//! Threads: a tracking worker per VM; it waits for the client's zaps, and no fault waits for it. Units: 2 MiB; pages.
//! Promise: no byte changes. Words stay Resident, so an engine that dies during a cycle leaves only minor faults.
//!
//! | Watched | A touch | At the end of the cycle |
//! |---|---|---|
//! | a unit mapped huge, as a whole | maps it huge again by one fault (5.6 us) | an untouched unit is mapped huge |
//! | such a unit, page by page | maps that page; the huge page is not split | it is mapped huge, without copying |
//! | a unit of base pages, or with far pages | maps and reports its block of 64 pages | the rest stays unmapped |
//! | a huge page of hugetlbfs | maps it | an untouched page is mapped |
//!
//! `unit.rs` ensures that a unit may be mapped as a whole without its pages' locks: a watched unit becomes Plain when
//! reclaim or a discard takes pages of it, and its later touches are served page by page.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use ballast_base::wire::Range;
use ballast_base::{HUGE_SIZE, PageIdx};
use ballast_heat::source::Cost;
use ballast_heat::{Seen, UnitId};

use crate::run::pool::pause;
use crate::scan::coalesce::is_resident;
use crate::scan::touch::map_huge;
use crate::vm::Vm;
use crate::vm::region::Region;
use crate::vm::units::UnitState;
use ballast_page::memory::Mapped;
use ballast_page::page_state::State;
use ballast_page::unit::{Mapping, Stage};

/// Units mapped huge by one call at the end of a cycle: faults on them are put aside for some 100 us.
const RUN: usize = 32;

#[derive(Debug)]
pub(crate) struct ZapScan {
    vm: Arc<Vm>,
    units: Vec<Watched>,
}

#[derive(Debug)]
pub(crate) struct Watched {
    id: UnitId,
    region: Arc<Region>,
    huge: bool,
    is_fine: bool,
}

impl Watched {
    /// A whole unit of this region, to be watched page by page or as a whole.
    pub(crate) fn new(region: Arc<Region>, unit: u32, is_fine: bool) -> Self {
        let id = UnitId { region: region.number, unit };
        let huge = region.units().get(u64::from(unit)).is_some_and(UnitState::is_huge);
        // A huge page of hugetlbfs can only be watched as a whole.
        let is_fine = is_fine && region.granule_pages() == 1;
        Self { id, region, huge, is_fine }
    }

    fn unit(&self) -> &UnitState {
        self.region.units().get(u64::from(self.id.unit)).expect("looked at when it was chosen")
    }

    fn number(&self) -> u64 {
        u64::from(self.id.unit)
    }

    fn first(&self) -> PageIdx {
        PageIdx::first_of_unit(self.number())
    }

    /// Returns whether it is mapped by one PMD and watched as a whole.
    fn is_whole(&self) -> bool {
        self.huge && !self.is_fine
    }

    /// Has the next touch map the whole unit.
    fn watch_whole(&self) {
        if !self.unit().as_whole().watch(|| is_resident(&self.region, self.number())) {
            // Some of its pages are far, or reclaim is about to take some.
            self.unit().tear();
        }
    }
}

impl ZapScan {
    pub(crate) fn new(vm: Arc<Vm>) -> Self {
        Self { vm, units: Vec::new() }
    }

    /// Begins a cycle over these registered units, in ascending order. After an error no cycle runs.
    pub(crate) fn start(&mut self, units: Vec<Watched>) -> io::Result<()> {
        self.units = units;
        let begun = self.begin(&self.units);
        if begun.is_err() {
            self.end();
        }
        begun
    }

    /// Ends the cycle. Returns the touches, and the time for which guest threads waited.
    pub(crate) fn end(&mut self) -> (Vec<(UnitId, Seen)>, Cost) {
        let guest = self.vm.mail.touches.cost();
        let units = std::mem::take(&mut self.units);
        let seen = self.finish(&units);
        // While a guest thread waits for a fault, a worker serves it: both times are equal.
        (seen, Cost { cpu: guest, guest })
    }

    fn begin(&self, units: &[Watched]) -> io::Result<()> {
        let vm = &self.vm;
        let views = vm.views();
        vm.mail.touches.begin(units.iter().filter(|watched| watched.is_fine).map(|watched| watched.id));
        for watched in units {
            let unit = watched.unit();
            unit.track();
            if watched.is_whole() {
                watched.watch_whole();
            } else if !watched.huge && watched.region.granule_pages() == 1 {
                unit.zap();
            }
        }
        for view in &views {
            let mut ranges: Vec<Range> = Vec::new();
            for watched in units {
                let Some(base) = view.base(watched.id.region) else { continue };
                let start = base + watched.first().offset();
                match ranges.last_mut() {
                    Some((first, len)) if *first + *len == start => *len += HUGE_SIZE as u64,
                    _ => ranges.push((start, HUGE_SIZE as u64)),
                }
            }
            let kept = view.peer().clone().zap(&ranges)?;
            vm.keep_parts(view, &kept);
        }
        // A fault raised before the zap may have been served after the unit was watched: the unit was mapped, and the
        // zap has unmapped it. It must be watched again, or it would stay unmapped.
        for watched in units.iter().filter(|watched| watched.is_whole()) {
            let unit = watched.unit();
            let begun = Instant::now();
            while unit.as_whole().is_mapping() {
                pause(begun);
            }
            if unit.is_huge() && unit.as_whole().stage() == Stage::Plain {
                watched.watch_whole();
            }
        }
        Ok(())
    }

    /// Ends the watch, and maps huge units huge again. Returns the touches.
    fn finish(&self, units: &[Watched]) -> Vec<(UnitId, Seen)> {
        let _layout = self.vm.memory.layout();
        let mut seen = Vec::with_capacity(units.len());
        let mut run: Vec<(u64, Mapping<'_>)> = Vec::with_capacity(RUN);
        let mut of: Option<&Watched> = None;
        for watched in units {
            let unit = watched.unit();
            let mapping = match watched.is_fine {
                true if watched.huge => {
                    let mapping = unit.as_whole().map(|| is_resident(&watched.region, watched.number()));
                    if mapping.is_none() {
                        unit.tear();
                    }
                    mapping
                }
                true => {
                    unit.zap();
                    None
                }
                false => unit.as_whole().enter(),
            };
            let touched = unit.untrack();
            seen.push((watched.id, self.seen(watched, touched)));
            if watched.region.granule_pages() > 1 && touched == 0 {
                self.map_granule(watched);
            }
            let Some(mapping) = mapping else { continue };
            let follows = of.is_some_and(|last| last.id.region == watched.id.region)
                && run.last().is_some_and(|(last, _)| last + 1 == watched.number());
            if !follows || run.len() == RUN {
                self.map_run(of, &mut run);
            }
            of = Some(watched);
            run.push((watched.number(), mapping));
        }
        self.map_run(of, &mut run);
        self.vm.mail.became_resident();
        self.vm.mail.touches.begin(std::iter::empty());
        seen
    }

    fn seen(&self, watched: &Watched, touched: u8) -> Seen {
        match watched.is_fine {
            // In a unit mapped huge, only the first touch faults.
            false if watched.huge || watched.region.granule_pages() > 1 => Seen::Coarse { touched: touched != 0 },
            false => Seen::Blocks { touched },
            true => Seen::Fine { touched: self.vm.mail.touches.pages(watched.id) },
        }
    }

    /// Maps neighbouring units huge in each view that maps their region.
    fn map_run(&self, of: Option<&Watched>, run: &mut Vec<(u64, Mapping<'_>)>) {
        let Some(region) = of.map(|watched| &watched.region).filter(|region| !region.is_removed()) else {
            return run.clear();
        };
        for view in self.vm.views().iter().filter(|view| view.base(region.number).is_some()) {
            if map_huge(view, region, run) {
                continue;
            }
            // One of them cannot be mapped: try each alone.
            for one in run.chunks(1).filter(|one| !map_huge(view, region, one)) {
                if let Some(unit) = region.units().get(one[0].0) {
                    unit.tear();
                }
            }
        }
        run.clear();
    }

    /// Maps a huge page of hugetlbfs that was not touched.
    fn map_granule(&self, watched: &Watched) {
        let cell = watched.region.granule(watched.first()).cell();
        let word = cell.load();
        let free = word.state() == State::Resident && !word.is_locked() && !watched.region.is_removed();
        let Some(_lock) = free.then(|| cell.lock(word, word)).flatten() else { return };
        for view in self.vm.views() {
            if let Some(memory) = view.of_region(&watched.region) {
                // After a failure, a touch maps it.
                let _ = memory.map(watched.first());
            }
        }
    }
}

impl Drop for ZapScan {
    /// Also after a panic of the worker during a cycle.
    fn drop(&mut self) {
        self.finish(&self.units);
    }
}
