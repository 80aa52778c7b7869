//! Units: the records of each unit of a VM, and of the pages inside those that had a fine scan.
//!
//! Before: the tracker absorbs a cycle. After: ages, generations and candidates are read from here. Units: times are
//! tenths of a second since tracking began.
//! Promise: 15 bytes for a unit (7.5 MiB for a guest of 1 TiB); 2 KiB more for a unit that had a fine scan, until that
//! is old, and for at most [`Units::most_scans`] units.

use std::collections::HashMap;
use std::time::Duration;

use ballast_base::{PAGES_PER_UNIT, PageCount, PageIdx, PageRange};

use crate::generations::{Blocks, after_cycle};
use crate::moment::Moment;
use crate::scanned::Scanned;
use crate::source::{PageMap, Seen, UnitId};
use crate::{Entry, Pages};

/// The columns of one region; the index is the unit.
#[derive(Clone, Debug, Default)]
pub struct Region {
    pub(crate) pages: u64,
    /// Pages of the unit in memory; 0: the unit is unknown.
    pub(crate) present: Vec<u16>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) seen: Vec<Moment>,
    pub(crate) generations: Vec<u8>,
    pub(crate) blocks: Vec<Blocks>,
}

/// Units of one part of a survey: 8 GiB, some milliseconds of asking the kernel which pages are in memory.
pub(crate) const AT_ONCE: u64 = 4096;

#[derive(Clone, Debug)]
pub struct Surveyed {
    region: u32,
    first: u32,
    /// By unit, from `first` on.
    present: Vec<u16>,
}

/// Counts the pages of all units that are in memory, a part with each step.
pub fn survey(pages: &dyn Pages) -> impl Iterator<Item = Surveyed> {
    (0..pages.regions()).flat_map(move |region| {
        let units = PageCount(pages.len(region)).units_ceil() as u32;
        (0..units).step_by(AT_ONCE as usize).map(move |first| {
            let present = (first..units.min(first + AT_ONCE as u32)).map(|unit| count(pages, region, unit));
            Surveyed { region, first, present: present.collect() }
        })
    })
}

fn count(pages: &dyn Pages, region: u32, unit: u32) -> u16 {
    let (mut present, mut at) = (0, u64::from(unit) * PAGES_PER_UNIT);
    let stop = pages.len(region).min(at + PAGES_PER_UNIT);
    while let Some(run) = pages.next_present(region, PageRange::new(PageIdx(at), PageIdx(stop))) {
        present += run.count() as u16;
        if run.end().0 <= at {
            break;
        }
        at = run.end().0;
    }
    present
}

#[derive(Clone, Debug, Default)]
pub struct Units {
    pub(crate) regions: Vec<Region>,
    scanned: HashMap<UnitId, Scanned>,
}

impl Units {
    /// Sets the sizes of the regions. A region whose size changed was plugged or unplugged: it starts empty.
    pub fn layout(&mut self, pages_of: impl ExactSizeIterator<Item = u64>) {
        self.regions.resize_with(pages_of.len(), Region::default);
        for (number, pages) in pages_of.enumerate() {
            let region = &mut self.regions[number];
            if region.pages != pages {
                let units = PageCount(pages).units_ceil() as usize;
                *region = Region {
                    pages,
                    present: vec![0; units],
                    entries: vec![Entry::default(); units],
                    seen: vec![Moment::default(); units],
                    generations: vec![0; units],
                    blocks: vec![Blocks::default(); units],
                };
                self.scanned.retain(|unit, _| unit.region != number as u32);
            }
        }
    }

    /// Takes in a part of a survey. A new unit starts as touched now; one without pages in memory is forgotten.
    pub fn survey(&mut self, part: &Surveyed, now: Moment) {
        for (unit, count) in (part.first..).zip(&part.present) {
            self.set_present(UnitId { region: part.region, unit }, *count, now);
        }
    }

    pub fn set_present(&mut self, unit: UnitId, count: u16, now: Moment) {
        let Some(region) = self.regions.get_mut(unit.region as usize) else { return };
        let index = unit.unit as usize;
        match (region.present.get(index).copied(), count) {
            (None, _) => return,
            (Some(0), 1..) => {
                region.entries[index] = Entry::default();
                region.seen[index] = now;
                region.generations[index] = 0;
                region.blocks[index] = Blocks::default();
            }
            (Some(1..), 0) => {
                self.scanned.remove(&unit);
            }
            _ => {}
        }
        region.present[index] = count;
    }

    pub fn present(&self) -> impl Iterator<Item = UnitId> {
        self.regions.iter().enumerate().flat_map(|(region, columns)| {
            let known = columns.present.iter().enumerate().filter(|(_, count)| **count > 0);
            known.map(move |(unit, _)| UnitId { region: region as u32, unit: unit as u32 })
        })
    }

    pub fn present_pages(&self, unit: UnitId) -> u64 {
        self.column(unit, |region, index| u64::from(region.present[index])).unwrap_or(0)
    }

    pub fn region_pages(&self) -> impl Iterator<Item = u64> {
        self.regions.iter().map(|region| region.pages)
    }

    /// Number of a unit's pages: 512, or fewer at the end of a region.
    pub fn pages_of(&self, unit: UnitId) -> u64 {
        let first = u64::from(unit.unit) * PAGES_PER_UNIT;
        let pages = self.regions.get(unit.region as usize).map_or(0, |region| region.pages);
        pages.saturating_sub(first).min(PAGES_PER_UNIT)
    }

    /// The access entry of a unit with pages in memory.
    pub fn entry(&self, unit: UnitId) -> Option<Entry> {
        self.column(unit, |region, index| region.entries[index])
    }

    /// Time of its last touch, or else of its first survey.
    pub fn seen(&self, unit: UnitId) -> Option<Moment> {
        self.column(unit, |region, index| region.seen[index])
    }

    /// The generation of a unit with pages in memory: 0 is the youngest.
    pub fn generation(&self, unit: UnitId) -> Option<u8> {
        self.column(unit, |region, index| region.generations[index])
    }

    /// Generations of its blocks, if one of them is not the oldest; `None` for a huge page.
    pub fn blocks(&self, unit: UnitId) -> Option<Blocks> {
        self.column(unit, |region, index| region.blocks[index]).filter(|blocks| *blocks != Blocks::default())
    }

    fn column<T>(&self, unit: UnitId, value: impl Fn(&Region, usize) -> T) -> Option<T> {
        let region = self.regions.get(unit.region as usize)?;
        let index = unit.unit as usize;
        (*region.present.get(index)? > 0).then(|| value(region, index))
    }

    /// Records the touches of a unit in a coarse cycle.
    pub fn push(&mut self, unit: UnitId, seen: &Seen, now: Moment) {
        let Some(generation) = self.generation(unit) else { return };
        let (region, index) = (&mut self.regions[unit.region as usize], unit.unit as usize);
        let touched = seen.touched();
        region.entries[index].push(touched);
        if touched {
            region.seen[index] = now;
        }
        let blocks = region.blocks[index];
        (region.generations[index], region.blocks[index]) = match seen {
            Seen::Blocks { touched: of_blocks } => {
                // It may have been a huge page until now: then its blocks start with its generation.
                let start = if blocks == Blocks::default() { Blocks::all_in(generation) } else { blocks };
                let generation = if touched { 0 } else { after_cycle(generation, false) };
                (generation, start.after_cycle(*of_blocks))
            }
            _ => (after_cycle(generation, touched), Blocks::default()),
        };
    }

    pub fn push_scan(&mut self, unit: UnitId, touched: PageMap, now: Moment) {
        if self.generation(unit).is_none() {
            return;
        }
        // A unit that is watched more often than others must not become younger by it: no entry, no promotion.
        if !touched.is_empty() {
            self.regions[unit.region as usize].seen[unit.unit as usize] = now;
        }
        if !self.scanned.contains_key(&unit) {
            self.make_room();
        }
        self.scanned.entry(unit).or_insert_with(|| Scanned::new(now)).push(now, touched);
    }

    pub fn scanned(&self, unit: UnitId) -> Option<&Scanned> {
        self.scanned.get(&unit)
    }

    pub fn all_scanned(&self) -> impl Iterator<Item = (UnitId, &Scanned)> {
        self.scanned.iter().map(|(unit, scanned)| (*unit, scanned))
    }

    /// Most units with a fine scan: their 2 KiB each are at most 1/4096 of the guest, but 8 MiB are always allowed.
    pub fn most_scans(&self) -> usize {
        let units: usize = self.regions.iter().map(|region| region.present.len()).sum();
        (units / 4).max(4096)
    }

    pub fn forget_old(&mut self, now: Moment, keep: Duration) {
        self.scanned.retain(|_, scanned| now.since(scanned.last()) <= keep);
    }

    /// Makes room for another scan: if there are too many, the oldest quarter is forgotten.
    fn make_room(&mut self) {
        if self.scanned.len() < self.most_scans() {
            return;
        }
        let mut ages: Vec<Moment> = self.scanned.values().map(Scanned::last).collect();
        let quarter = ages.len() / 4;
        let (_, limit, _) = ages.select_nth_unstable(quarter);
        let limit = *limit;
        let mut most = quarter + 1;
        self.scanned.retain(|_, scanned| {
            let goes = most > 0 && scanned.last() <= limit;
            most -= usize::from(goes);
            !goes
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: UnitId = UnitId { region: 0, unit: 0 };

    fn units(count: u64) -> Units {
        let mut units = Units::default();
        units.layout([count * PAGES_PER_UNIT].into_iter());
        (0..count).for_each(|unit| units.set_present(UnitId { unit: unit as u32, ..UNIT }, 512, Moment(0)));
        units
    }

    #[test]
    fn scans_are_bounded_and_the_oldest_are_dropped_first() {
        let mut units = units(5000);
        for unit in 0..5000 {
            let id = UnitId { unit, ..UNIT };
            units.push_scan(id, PageMap::NONE, Moment(unit));
            assert!(units.all_scanned().count() <= units.most_scans());
            assert!(units.scanned(id).is_some());
        }
        assert!(units.scanned(UNIT).is_none());
        units.forget_old(Moment(5000), Duration::from_secs(10));
        assert!(units.all_scanned().all(|(unit, _)| unit.unit >= 4900));
        assert_eq!(units.all_scanned().count(), 100);
    }

    #[test]
    fn a_unit_that_left_memory_is_forgotten() {
        let mut units = units(1);
        units.push(UNIT, &Seen::Coarse { touched: false }, Moment(5));
        units.push_scan(UNIT, PageMap::first(3), Moment(5));
        units.set_present(UNIT, 0, Moment(6));
        assert!(units.entry(UNIT).is_none() && units.scanned(UNIT).is_none());
        units.set_present(UNIT, 7, Moment(8));
        assert_eq!(
            (units.entry(UNIT), units.seen(UNIT), units.generation(UNIT)),
            (Some(Entry(0)), Some(Moment(8)), Some(0))
        );
    }

    #[test]
    fn a_region_of_another_size_is_a_new_one_and_its_last_unit_may_be_short() {
        let mut units = units(2);
        units.layout([2 * PAGES_PER_UNIT, 100].into_iter());
        assert_eq!(units.present().count(), 2);
        assert_eq!(units.pages_of(UnitId { region: 1, unit: 0 }), 100);
        units.layout([PAGES_PER_UNIT + 1, 100].into_iter());
        assert_eq!(units.present().count(), 0);
        assert_eq!(units.pages_of(UnitId { region: 0, unit: 1 }), 1);
        assert_eq!(units.pages_of(UnitId { region: 7, unit: 1 }), 0);
    }
}
