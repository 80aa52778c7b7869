//! Place: keeps a VM's warm memory on a fast NUMA node and its cold memory on a slow one, by 4 KiB and by 2 MiB.
//!
//! Before: a cycle of tracking has ended. After: the units that `ballast_heat::placement` named were moved, split first
//! if only a part was to be moved, or mapped huge again.
//! Threads: the VM's tracking worker, between two cycles. Units: pages, units of 2 MiB, node numbers.
//! Promise: no word and no byte changes. A page that is far, or being moved by another thread, is left alone. A page is
//! mapped again under its lock, so that a touch of a split or moved page is no fault; it may be touched during the
//! move.
//!
//! Only this engine knows where pages are; the next one looks again, at a part after each cycle. Pages that the kernel
//! did not move or split (pinned, or mapped by several processes) are left alone for a while.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::{Hva, MIB, PAGE_SIZE, PAGES_PER_UNIT, PageIdx, PageRange};
use ballast_heat::placement::{self, Move, Plan, Unit, Warmth};
use ballast_heat::{PageMap, UnitId};
use ballast_sys::numa::{self, Place};
use ballast_sys::remote::Collapsed;
use ballast_sys::{Remote, large_pages};

use crate::run::pool::pause;
use crate::scan::coalesce::coalesce;
use crate::scan::touch::map_resident;
use crate::vm::Vm;
use crate::vm::region::Region;
use crate::vm::stats::Counter;
use crate::vm::tuning::HostTiers;
use crate::vm::view::View;

/// Pages whose place is looked up in each turn, unknown ones first; a unit mapped huge counts as one.
const LOOKED_FOR: u64 = 192 * PAGES_PER_UNIT;
/// Turns for which a unit is left alone after it could not be moved.
const KEPT: u64 = 16;
/// Longest wait for a page to become mapped.
const UNMAPPED: Duration = Duration::from_millis(2);
/// Longest time since the last plan that counts for a plan's number of moves, in seconds.
const LONGEST: f64 = 4.0;

#[derive(Clone, Copy, Debug)]
struct Lies {
    /// Pages that were found; those of them on the slow node.
    here: PageMap,
    slow: PageMap,
    huge: bool,
    /// It was mapped huge before, and may be joined.
    torn: bool,
    kept_until: u64,
}

#[derive(Debug)]
pub(crate) struct Places {
    vm: Arc<Vm>,
    tiers: HostTiers,
    units: HashMap<UnitId, Lies>,
    /// The next unit to look up.
    next: UnitId,
    turns: u64,
    /// No pages are moved until this turn.
    rests_until: u64,
    rests: u64,
    /// Times of the last plan, and of the last turn.
    last: Instant,
    turned: Instant,
}

struct Here<'a> {
    region: &'a Region,
    view: &'a View,
    process: &'a Remote,
    first: Hva,
    unit: u64,
}

impl Here<'_> {
    fn address(&self, page: u64) -> Hva {
        self.first + PageIdx(page).offset()
    }

    fn map(&self) -> io::Result<()> {
        let Some(memory) = self.view.of_region(self.region) else { return Ok(()) };
        map_resident(self.region, &memory, PageRange::of_unit(self.unit))
    }

    /// Maps the page, and returns whether it is part of a large one. `None` if it cannot be mapped: it may be a hole.
    fn is_large(&self, page: Hva) -> io::Result<Option<bool>> {
        let begun = Instant::now();
        loop {
            self.map()?;
            let found = large_pages::is_large(self.process, page)?;
            // A fault worker that maps its neighbours may hold its lock.
            if found.is_some() || begun.elapsed() > UNMAPPED {
                return Ok(found);
            }
            pause(begun);
        }
    }

    /// Those of `pages` that are mapped, and those of them on `node`.
    fn locate(&self, pages: PageMap, node: u32) -> io::Result<(PageMap, PageMap)> {
        let addresses: Vec<u64> = pages.iter().map(|page| self.address(page).0).collect();
        let found = numa::locate(self.view.pid, &addresses)?.unwrap_or_default();
        let (mut here, mut there) = (PageMap::NONE, PageMap::NONE);
        for (page, place) in pages.iter().zip(found) {
            if let Place::Node(at) = place {
                here.set(page);
                if at == node {
                    there.set(page);
                }
            }
        }
        Ok((here, there))
    }
}

impl Places {
    pub(crate) fn new(vm: Arc<Vm>, tiers: HostTiers) -> Self {
        let next = UnitId { region: 0, unit: 0 };
        let (turns, rests_until, rests) = (0, 0, 0);
        let (last, turned) = (Instant::now(), Instant::now());
        Self { vm, tiers, units: HashMap::new(), next, turns, rests_until, rests, last, turned }
    }

    /// Returns whether [`Self::turn`] is due after a cycle: after each coarse one; also after others if the last turn
    /// is so long ago that moves would be lost.
    pub(crate) fn is_due(&self, is_coarse: bool) -> bool {
        is_coarse || self.turned.elapsed().as_secs_f64() >= LONGEST
    }

    /// Looks pages up, makes a plan, and carries it out. A full node or a hold ends the plan. Fails if the kernel
    /// refuses to tell where pages are, or to move them.
    pub(crate) fn turn(&mut self) -> io::Result<()> {
        self.turns += 1;
        self.turned = Instant::now();
        if self.turns < self.rests_until {
            return Ok(());
        }
        let vm = self.vm.clone();
        let _registered = vm.keep_registered();
        let warm = vm.heat.lock().warmth();
        self.look(&warm)?;
        let seconds = std::mem::replace(&mut self.last, Instant::now()).elapsed().as_secs_f64().min(LONGEST);
        let most = (self.tiers.mib_per_s as f64 * seconds) as u64 * MIB / PAGE_SIZE as u64;
        let size: u64 = vm.regions().iter().filter(|region| !region.is_removed()).map(|region| region.pages().0).sum();
        let mut limit = size * u64::from(self.tiers.fast_percent) / 100;
        let mut units = Vec::with_capacity(warm.len());
        for (id, warmth) in warm {
            let Some(lies) = self.units.get(&id) else { continue };
            if lies.kept_until > self.turns {
                limit = limit.saturating_sub(lies.here.without(lies.slow).count());
                continue;
            }
            units.push(Unit { id, here: lies.here, slow: lies.slow, huge: lies.huge, warmth });
        }
        let plan = placement::plan(&units, limit, most);
        let done = self.carry_out(plan);
        let slow = self.units.values().map(|lies| lies.slow.count()).sum();
        vm.stats().set(Counter::SlowNode, slow);
        done
    }

    fn carry_out(&mut self, plan: Plan) -> io::Result<()> {
        let vm = self.vm.clone();
        let goes_on = || !vm.is_stopping() && vm.held().is_none();
        for one in plan.moves {
            if !goes_on() || !self.make(one)? {
                return Ok(());
            }
        }
        for id in plan.join {
            if goes_on() && self.units.get(&id).is_some_and(|lies| lies.torn) {
                self.join(id)?;
            }
        }
        Ok(())
    }

    /// The kernel refused: no pages move for some turns. Returns whether to report it: the 1st, 2nd, 4th ... time.
    pub(crate) fn rest(&mut self) -> bool {
        self.rests_until = self.turns + KEPT;
        self.rests += 1;
        self.rests.is_power_of_two()
    }

    /// Looks up the place of some units: first of those that are unknown, then of some others, in turn.
    fn look(&mut self, present: &[(UnitId, Warmth)]) -> io::Result<()> {
        self.units.retain(|id, _| present.binary_search_by_key(id, |(id, _)| *id).is_ok());
        let (new, known): (Vec<UnitId>, Vec<UnitId>) =
            present.iter().map(|(id, _)| *id).partition(|id| !self.units.contains_key(id));
        let from = known.partition_point(|id| *id < self.next);
        let mut left = LOOKED_FOR;
        for id in new.iter().chain(&known[from..]).chain(&known[..from]) {
            if left == 0 {
                self.next = *id;
                break;
            }
            left = left.saturating_sub(self.look_at(*id)?);
        }
        Ok(())
    }

    /// Looks up the place of a unit. Returns how many pages were queried.
    fn look_at(&mut self, id: UnitId) -> io::Result<u64> {
        let slow_node = self.tiers.slow_node;
        let found = self.here(id, |here, huge| {
            if huge {
                let (found, slow) = here.locate(PageMap::first(1), slow_node)?;
                let all = |pages: PageMap| if pages.is_empty() { PageMap::NONE } else { PageMap::ALL };
                return Ok((all(found), all(slow), 1));
            }
            here.map()?;
            let (found, slow) = here.locate(PageMap::ALL, slow_node)?;
            Ok((found, slow, PAGES_PER_UNIT))
        })?;
        let Some(((here, slow, asked), huge)) = found else {
            self.units.remove(&id);
            return Ok(1);
        };
        let (kept_until, torn) = self.units.get(&id).map_or((0, false), |it| (it.kept_until, it.torn || it.huge));
        self.units.insert(id, Lies { here, slow, huge, torn: torn && !huge, kept_until });
        Ok(asked)
    }

    /// Calls `work` with a mapped unit that can be tracked, and whether it is mapped huge; `None` for other units.
    fn here<T>(
        &self,
        id: UnitId,
        work: impl FnOnce(&Here<'_>, bool) -> io::Result<T>,
    ) -> io::Result<Option<(T, bool)>> {
        // Held so that the region cannot be unplugged.
        let _layout = self.vm.memory.layout();
        let Some(region) = self.vm.watchable(id)?.filter(|region| region.granule_pages() == 1) else { return Ok(None) };
        let unit = u64::from(id.unit);
        let huge = region.units().get(unit).is_some_and(|unit| unit.is_huge());
        for view in self.vm.views() {
            let Some((base, process)) = view.base(region.number).zip(view.remote()) else { continue };
            let first = base + PageIdx::first_of_unit(unit).offset();
            let here = Here { region: &region, view: &view, process, first, unit };
            return Ok(Some((work(&here, huge)?, huge)));
        }
        Ok(None)
    }

    /// Moves pages of one unit. Returns false if the node is full.
    fn make(&mut self, one: Move) -> io::Result<bool> {
        let node = if one.down { self.tiers.slow_node } else { self.tiers.fast_node };
        let Some(lies) = self.units.get(&one.unit).copied() else { return Ok(true) };
        let stats = self.vm.stats();
        let outcome = self.here(one.unit, |here, huge| {
            let whole = huge && lies.huge && one.pages == lies.here;
            let pages = if whole { PageMap::first(1) } else { one.pages };
            if !whole && !split(here, &pages, self.vm.stats())? {
                return Ok((0, true));
            }
            let addresses: Vec<u64> = pages.iter().map(|page| here.address(page).0).collect();
            let places = numa::move_pages(here.view.pid, &addresses, node)?.unwrap_or_default();
            let has_room = !places.contains(&Place::Full);
            let (_, there) = here.locate(pages, node)?;
            let there = match whole {
                false => there,
                true if left_split(here)? => here.locate(PageMap::ALL, node)?.1,
                true if there.is_empty() => PageMap::NONE,
                true => PageMap::ALL,
            };
            Ok((there.count(), has_room))
        })?;
        let Some(((moved, has_room), _)) = outcome else { return Ok(true) };
        stats.add(if one.down { Counter::MovedDown } else { Counter::MovedUp }, moved);
        let failed = one.pages.count().saturating_sub(moved);
        if failed > 0 && has_room {
            stats.add(Counter::MoveFailed, failed);
        }
        // The unit may be split now.
        self.look_at(one.unit)?;
        if let Some(lies) = self.units.get_mut(&one.unit).filter(|_| moved == 0 && has_room) {
            lies.kept_until = self.turns + KEPT;
        }
        Ok(has_room)
    }

    /// Maps a unit huge whose pages are all on the fast node.
    fn join(&mut self, id: UnitId) -> io::Result<()> {
        let Some(region) = self.vm.region(id.region) else { return Ok(()) };
        let outcome = coalesce(&self.vm, &region, u64::from(id.unit))?;
        if outcome == Some(Collapsed::Done) {
            self.vm.stats().add(Counter::Joined, 1);
        } else if let Some(lies) = self.units.get_mut(&id) {
            lies.kept_until = self.turns + KEPT;
        }
        self.look_at(id).map(drop)
    }
}

/// Splits the large page of these pages, if any, and maps the unit again. Returns whether they can be moved alone.
fn split(here: &Here<'_>, pages: &PageMap, stats: crate::vm::stats::Stats<'_>) -> io::Result<bool> {
    let Some(first) = pages.iter().next().map(|page| here.address(page)) else { return Ok(false) };
    match here.is_large(first)? {
        Some(false) => return Ok(true),
        None => return Ok(false),
        Some(true) => {}
    }
    let Some(unit) = here.region.units().get(here.unit) else { return Ok(false) };
    // From now on only a plan maps it huge again.
    unit.give_up();
    unit.tear();
    if let Err(error) = large_pages::split(here.process, first) {
        unit.seen_huge();
        return Err(error);
    }
    let is_large = here.is_large(first)?;
    let done = is_large == Some(false);
    stats.add(if done { Counter::Split } else { Counter::SplitFailed }, 1);
    if is_large == Some(true) {
        unit.seen_huge();
        unit.tear();
    }
    Ok(done)
}

/// To be called after a huge page was moved as a whole: if the target node has no free huge page, the kernel splits it,
/// and unmaps it. Returns whether that happened. The unit is mapped again.
fn left_split(here: &Here<'_>) -> io::Result<bool> {
    let is_split = here.is_large(here.first)? == Some(false);
    if is_split && let Some(unit) = here.region.units().get(here.unit) {
        unit.give_up();
        unit.tear();
    }
    Ok(is_split)
}
