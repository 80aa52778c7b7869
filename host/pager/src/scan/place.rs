//! Place: keeps a VM's warm memory on a fast node and its cold memory on a slow one, in 4 KiB and in 2 MiB.
//!
//! Before: a cycle of tracking has ended. After: the units that `ballast_heat::placement` names were moved, split
//! before if only a part of them was to be moved, or mapped huge again.
//! Threads: the VM's tracking worker, between two cycles. Units: pages, units of 2 MiB, numbers of nodes.
//! Promise: no word and no byte changes. A page that is far, or on its way, is left alone. A page is mapped again under
//! its lock, so that a touch of what was split or moved is no fault; and it may be touched while it is moved.
//!
//! Where memory lies is known to this engine alone: its successor looks again, a part after each cycle. What the kernel
//! would not move or split (it is pinned, or several processes map it) is left alone for a while.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::{Hva, MIB, PAGE_SIZE, PAGES_PER_UNIT, PageIdx, PageRange};
use ballast_heat::placement::{self, Move, Unit, Warmth};
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

/// Pages that are looked for in each turn, beside those that were never looked for.
const LOOKED_FOR: u64 = 64 * PAGES_PER_UNIT;
/// The same of pages that were never looked for; a unit that is mapped huge counts as one.
const LOOKED_FOR_FIRST: u64 = 128 * PAGES_PER_UNIT;
/// Turns for which a unit that could not be moved is left alone.
const KEPT: u64 = 16;
/// How long a page that does not get mapped is waited for.
const UNMAPPED: Duration = Duration::from_millis(2);
/// How long the worker moves pages in one piece.
const PIECE: Duration = Duration::from_millis(5);
/// Longest time whose moves are made up for, in seconds: so much is moved at once at most.
const LONGEST: f64 = 4.0;

/// Where a unit lies.
#[derive(Clone, Copy, Debug)]
struct Lies {
    /// Pages that were found, and those of them that are on the slow node.
    here: PageMap,
    slow: PageMap,
    /// It is mapped huge.
    huge: bool,
    /// It was, and is not any more: it may be joined.
    torn: bool,
    /// Left alone until this turn.
    kept_until: u64,
}

/// The places of a VM's memory.
#[derive(Debug)]
pub(crate) struct Places {
    vm: Arc<Vm>,
    tiers: HostTiers,
    units: HashMap<UnitId, Lies>,
    /// The unit at which the next look begins.
    next: UnitId,
    turns: u64,
    /// Nothing is moved until this turn.
    rests_until: u64,
    rests: u64,
    /// When a plan was last made, and when it was last time for one.
    last: Instant,
    turned: Instant,
    /// What is still to be done of the last plan.
    moves: VecDeque<Move>,
    joins: VecDeque<UnitId>,
}

/// One unit in the process that maps it.
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

    /// Maps what is resident and not mapped.
    fn map(&self) -> io::Result<()> {
        let Some(memory) = self.view.of_region(self.region) else { return Ok(()) };
        map_resident(self.region, &memory, PageRange::of_unit(self.unit))
    }

    /// Is this page part of a large one, now that it is mapped? `None` if it cannot be mapped: it is in no file, say.
    fn is_large(&self, page: Hva) -> io::Result<Option<bool>> {
        let begun = Instant::now();
        loop {
            self.map()?;
            let found = large_pages::is_large(self.process, page)?;
            // A fault worker that maps its neighbours may have its lock just now.
            if found.is_some() || begun.elapsed() > UNMAPPED {
                return Ok(found);
            }
            pause(begun);
        }
    }

    /// The nodes of these pages: which of them are there, and which are on this node.
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
    /// Nothing is known.
    pub(crate) fn new(vm: Arc<Vm>, tiers: HostTiers) -> Self {
        let next = UnitId { region: 0, unit: 0 };
        let (moves, joins) = Default::default();
        let (turns, rests_until, rests) = (0, 0, 0);
        let (last, turned) = (Instant::now(), Instant::now());
        Self { vm, tiers, units: HashMap::new(), next, turns, rests_until, rests, last, turned, moves, joins }
    }

    /// A cycle has ended. Is it time for [`Self::turn`]? After each cycle over all memory, and where these are too rare
    /// for all moves to be made up for, after others, too.
    pub(crate) fn is_due(&self, is_coarse: bool) -> bool {
        is_coarse || self.turned.elapsed().as_secs_f64() >= LONGEST
    }

    /// Looks and decides. [`Self::work`] moves.
    ///
    /// # Errors
    /// The kernel lets us look at no page.
    pub(crate) fn turn(&mut self) -> io::Result<()> {
        self.turns += 1;
        self.turned = Instant::now();
        if self.turns < self.rests_until {
            return Ok(());
        }
        let vm = self.vm.clone();
        let _registered = vm.keep_registered();
        let warm: Vec<(UnitId, Warmth)> = {
            let tracker = vm.heat.lock();
            tracker.units().present().filter_map(|unit| Some((unit, tracker.warmth(unit)?))).collect()
        };
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
        let was_huge = |id: &UnitId| self.units.get(id).is_some_and(|lies| lies.torn);
        (self.moves, self.joins) = (plan.moves.into(), plan.join.into_iter().filter(was_huge).collect());
        self.count();
        Ok(())
    }

    /// The kernel refused: nothing is moved for some turns. Returns whether that is to be said: the 1st, 2nd, 4th time.
    pub(crate) fn rest(&mut self) -> bool {
        (self.moves, self.joins) = Default::default();
        self.rests_until = self.turns + KEPT;
        self.rests += 1;
        self.rests.is_power_of_two()
    }

    /// Is something of the last plan still to be done?
    pub(crate) fn has_work(&self) -> bool {
        !self.moves.is_empty() || !self.joins.is_empty()
    }

    /// Works on the plan for some milliseconds. An error, a full node, or a hold ends the plan.
    ///
    /// # Errors
    /// The kernel lets us move no page.
    pub(crate) fn work(&mut self) -> io::Result<()> {
        let vm = self.vm.clone();
        let _registered = vm.keep_registered();
        let until = Instant::now() + PIECE;
        let (mut moves, mut joins) = (std::mem::take(&mut self.moves), std::mem::take(&mut self.joins));
        while !vm.is_stopping() && vm.held().is_none() {
            if let Some(one) = moves.pop_front() {
                if !self.carry_out(one)? {
                    break;
                }
            } else if let Some(id) = joins.pop_front() {
                self.join(id)?;
            } else {
                break;
            }
            if Instant::now() >= until {
                (self.moves, self.joins) = (moves, joins);
                break;
            }
        }
        self.count();
        Ok(())
    }

    fn count(&self) {
        let slow = self.units.values().map(|lies| lies.slow.count()).sum();
        self.vm.stats().set(Counter::SlowNode, slow);
    }

    /// Finds out where some units lie: first those that are not known, then some of the others, in turn.
    fn look(&mut self, present: &[(UnitId, Warmth)]) -> io::Result<()> {
        self.units.retain(|id, _| present.binary_search_by_key(id, |(id, _)| *id).is_ok());
        let known = |units: &HashMap<UnitId, Lies>, id| units.contains_key(&id);
        let mut left = LOOKED_FOR_FIRST;
        let new: Vec<UnitId> = present.iter().map(|(id, _)| *id).filter(|id| !known(&self.units, *id)).collect();
        for id in new {
            if left == 0 {
                break;
            }
            left = left.saturating_sub(self.look_at(id)?);
        }
        let mut left = LOOKED_FOR;
        let from = present.partition_point(|(id, _)| *id < self.next);
        for (id, _) in present[from..].iter().chain(&present[..from]) {
            self.next = *id;
            if left == 0 {
                break;
            }
            left = left.saturating_sub(self.look_at(*id)?);
        }
        Ok(())
    }

    /// Finds out where a unit lies. Returns how many pages were asked for.
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

    /// Does something with a unit that can be watched and is mapped; `None` for others. Returns also whether it is
    /// mapped huge.
    fn here<T>(
        &self,
        id: UnitId,
        work: impl FnOnce(&Here<'_>, bool) -> io::Result<T>,
    ) -> io::Result<Option<(T, bool)>> {
        // Held so that the region is not unplugged meanwhile.
        let _layout = self.vm.layout();
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

    /// Moves pages of one unit. Returns false if the node has no room.
    fn carry_out(&mut self, one: Move) -> io::Result<bool> {
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
        // It may be split now.
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

/// Splits the page that these pages are a part of, if they are, and maps the unit again. Returns whether each of them
/// can be moved alone.
fn split(here: &Here<'_>, pages: &PageMap, stats: crate::vm::stats::Stats<'_>) -> io::Result<bool> {
    let Some(first) = pages.iter().next().map(|page| here.address(page)) else { return Ok(false) };
    match here.is_large(first)? {
        Some(false) => return Ok(true),
        None => return Ok(false),
        Some(true) => {}
    }
    let Some(unit) = here.region.units().get(here.unit) else { return Ok(false) };
    // From now on nothing maps it huge again but a plan.
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

/// A huge page was to be moved whole: the kernel may have split it, for want of a free one there, and has unmapped it.
/// Returns whether that is so. It is mapped again.
fn left_split(here: &Here<'_>) -> io::Result<bool> {
    let is_split = here.is_large(here.first)? == Some(false);
    if is_split && let Some(unit) = here.region.units().get(here.unit) {
        unit.give_up();
        unit.tear();
    }
    Ok(is_split)
}
