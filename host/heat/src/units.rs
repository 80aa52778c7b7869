//! Units: what is kept of each unit of a VM, and of the pages inside those that had a fine scan.
//!
//! Before: the tracker absorbs a cycle. After: ages, generations and candidates are read from here.
//! Units: times are tenths of a second since tracking began. Promise: 18 bytes for a unit (9 MiB for a guest of 1 TiB,
//! 2 MiB of them access entries); 2 KiB more for a unit that had a full scan, until that is old, and of at most
//! [`Units::most_scans`] units.

use std::collections::HashMap;
use std::time::Duration;

use ballast_base::{PAGES_PER_UNIT, PageCount, PageIdx, PageRange};

use crate::generations::Blocks;
use crate::inside::{Inside, Sampled, Scanned};
use crate::moment::Moment;
use crate::sample::Estimate;
use crate::source::{PageMap, UnitId};
use crate::tally::Tally;
use crate::{Entry, Pages, RECENT};

/// The columns of one region; the index is the unit.
#[derive(Clone, Debug, Default)]
pub struct Region {
    pub(crate) pages: u64,
    /// Pages of the unit that are in memory; 0: nothing else is known of it.
    pub(crate) present: Vec<u16>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) seen: Vec<Moment>,
    pub(crate) births: Vec<u32>,
    pub(crate) blocks: Vec<Blocks>,
}

/// Units of a part of a survey: 8 GiB, some milliseconds of asking the kernel which pages are in memory.
const PART: usize = 4096;

/// Pages in memory of neighbouring units.
#[derive(Clone, Debug)]
pub struct Surveyed {
    region: u32,
    /// The first unit.
    first: u32,
    /// Pages of this unit and of those after it.
    present: Vec<u16>,
}

/// Counts which pages of all units are in memory, a part with each step.
pub fn survey(pages: &dyn Pages) -> impl Iterator<Item = Surveyed> {
    (0..pages.regions()).flat_map(move |region| {
        let units = PageCount(pages.len(region)).units_ceil() as u32;
        (0..units).step_by(PART).map(move |first| {
            let present = (first..units.min(first + PART as u32)).map(|unit| count(pages, region, unit));
            Surveyed { region, first, present: present.collect() }
        })
    })
}

/// Counts the pages of a unit that are in memory.
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

/// All units of a VM.
#[derive(Clone, Debug, Default)]
pub struct Units {
    pub(crate) regions: Vec<Region>,
    inside: HashMap<UnitId, Inside>,
}

impl Units {
    /// Set the sizes of the regions. A region whose size changed was plugged or unplugged: it starts empty.
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
                    births: vec![0; units],
                    blocks: vec![Blocks::default(); units],
                };
                self.inside.retain(|unit, _| unit.region != number as u32);
            }
        }
    }

    /// Take in a part of a survey. A new unit starts as touched now, with `birth`; one that left memory is forgotten.
    pub fn survey(&mut self, part: &Surveyed, now: Moment, birth: u32) {
        for (unit, count) in (part.first..).zip(&part.present) {
            self.set_present(UnitId { region: part.region, unit }, *count, now, birth);
        }
    }

    /// Set how many pages of a unit are in memory.
    pub fn set_present(&mut self, unit: UnitId, count: u16, now: Moment, birth: u32) {
        let Some(region) = self.regions.get_mut(unit.region as usize) else { return };
        let index = unit.unit as usize;
        match (region.present.get(index).copied(), count) {
            (None, _) => return,
            (Some(0), 1..) => {
                region.entries[index] = Entry::default();
                region.seen[index] = now;
                region.births[index] = birth;
                region.blocks[index] = Blocks::default();
            }
            (Some(1..), 0) => {
                self.inside.remove(&unit);
            }
            _ => {}
        }
        region.present[index] = count;
    }

    /// The units that have pages in memory, ascending.
    pub fn present(&self) -> impl Iterator<Item = UnitId> {
        self.regions.iter().enumerate().flat_map(|(region, columns)| {
            let known = columns.present.iter().enumerate().filter(|(_, count)| **count > 0);
            known.map(move |(unit, _)| UnitId { region: region as u32, unit: unit as u32 })
        })
    }

    /// Pages of a unit that are in memory.
    pub fn present_pages(&self, unit: UnitId) -> u64 {
        self.column(unit, |region, index| u64::from(region.present[index])).unwrap_or(0)
    }

    /// Pages of each region.
    pub fn region_pages(&self) -> impl Iterator<Item = u64> {
        self.regions.iter().map(|region| region.pages)
    }

    /// Pages a unit has: 512, or fewer at the end of a region.
    pub fn pages_of(&self, unit: UnitId) -> u64 {
        let first = u64::from(unit.unit) * PAGES_PER_UNIT;
        let pages = self.regions.get(unit.region as usize).map_or(0, |region| region.pages);
        pages.saturating_sub(first).min(PAGES_PER_UNIT)
    }

    /// The access entry of a unit that has pages in memory.
    pub fn entry(&self, unit: UnitId) -> Option<Entry> {
        self.column(unit, |region, index| region.entries[index])
    }

    /// When it was last seen touched, or else when it was first seen.
    pub fn seen(&self, unit: UnitId) -> Option<Moment> {
        self.column(unit, |region, index| region.seen[index])
    }

    /// Its birth: see [`crate::generations`].
    pub fn birth(&self, unit: UnitId) -> Option<u32> {
        self.column(unit, |region, index| region.births[index])
    }

    /// The generations of its blocks, if one of them is not of the oldest; `None` for a huge page.
    pub fn blocks(&self, unit: UnitId) -> Option<Blocks> {
        self.column(unit, |region, index| region.blocks[index]).filter(|blocks| *blocks != Blocks::default())
    }

    /// Record the blocks that a cycle saw touched; `None` if it saw one huge page. `generation` is the unit's before
    /// this touch: if it was a huge page until now, its blocks start with that.
    pub fn push_blocks(&mut self, unit: UnitId, touched: Option<u8>, generation: usize) {
        let aged = self.blocks(unit).map_or(Blocks::all_in(generation), Blocks::aged);
        if self.column(unit, |_, _| ()).is_some() {
            self.regions[unit.region as usize].blocks[unit.unit as usize] =
                touched.map_or(Blocks::default(), |touched| aged.touched(touched));
        }
    }

    fn column<T>(&self, unit: UnitId, value: impl Fn(&Region, usize) -> T) -> Option<T> {
        let region = self.regions.get(unit.region as usize)?;
        let index = unit.unit as usize;
        (*region.present.get(index)? > 0).then(|| value(region, index))
    }

    /// Record what a cycle saw of a unit. Returns false if it has no pages in memory.
    pub fn push(&mut self, unit: UnitId, touched: bool, now: Moment) -> bool {
        if self.column(unit, |_, _| ()).is_none() {
            return false;
        }
        let (region, index) = (&mut self.regions[unit.region as usize], unit.unit as usize);
        region.entries[index].push(touched);
        if touched {
            region.seen[index] = now;
        }
        true
    }

    /// Record a touch that a fine cycle saw.
    pub fn touch(&mut self, unit: UnitId, now: Moment) {
        if self.column(unit, |_, _| ()).is_some() {
            self.regions[unit.region as usize].seen[unit.unit as usize] = now;
        }
    }

    /// Record a full scan.
    pub fn push_scan(&mut self, unit: UnitId, now: Moment, watched: PageMap, touched: PageMap) {
        if self.column(unit, |_, _| ()).is_none() {
            return;
        }
        if !matches!(self.inside.get(&unit), Some(Inside::Scanned(_))) {
            self.make_room();
            self.inside.insert(unit, Inside::Scanned(Scanned::new(now)));
        }
        if let Some(Inside::Scanned(scanned)) = self.inside.get_mut(&unit) {
            scanned.push(now, watched, touched);
        }
    }

    /// Record a sample. Full scans are kept instead, unless the sample contradicts them.
    pub fn push_sample(&mut self, unit: UnitId, now: Moment, watched: PageMap, touched: PageMap) {
        let of = self.pages_of(unit);
        let estimate = Estimate::new(touched.count(), watched.count(), of);
        let holds =
            |scanned: &Scanned| scanned.touched_within(RECENT).count() as f64 / of.max(1) as f64 >= estimate.low;
        let scanned = matches!(self.inside.get(&unit), Some(Inside::Scanned(scanned)) if holds(scanned));
        if !scanned && self.column(unit, |_, _| ()).is_some() {
            let mut tally = match self.inside.get(&unit) {
                Some(Inside::Sampled(sampled)) => sampled.tally,
                _ => Tally::default(),
            };
            tally.push(watched, touched);
            self.inside.insert(unit, Inside::Sampled(Sampled { estimate, at: now, watched, touched, tally }));
        }
    }

    /// What is known of its pages.
    pub fn inside(&self, unit: UnitId) -> Option<&Inside> {
        self.inside.get(&unit)
    }

    /// The full scans of a unit, to be marked.
    pub fn scanned_mut(&mut self, unit: UnitId) -> Option<&mut Scanned> {
        match self.inside.get_mut(&unit) {
            Some(Inside::Scanned(scanned)) => Some(scanned),
            _ => None,
        }
    }

    /// The units that had a fine scan.
    pub fn insides(&self) -> impl Iterator<Item = (UnitId, &Inside)> {
        self.inside.iter().map(|(unit, inside)| (*unit, inside))
    }

    /// Most units with a fine scan at a time: their 2 KiB each are within 1/4096 of the guest, but 8 MiB may always be
    /// used.
    pub fn most_scans(&self) -> usize {
        let units: usize = self.regions.iter().map(|region| region.present.len()).sum();
        (units / 4).max(4096)
    }

    /// Forget fine scans that are older than `keep`.
    pub fn forget_old(&mut self, now: Moment, keep: Duration) {
        self.inside.retain(|_, inside| now.since(inside.last()) <= keep);
    }

    /// Make room for one more scan: if there are too many, the oldest quarter is forgotten.
    fn make_room(&mut self) {
        if self.inside.len() < self.most_scans() {
            return;
        }
        let mut ages: Vec<Moment> = self.inside.values().map(Inside::last).collect();
        let quarter = ages.len() / 4;
        let (_, limit, _) = ages.select_nth_unstable(quarter);
        let limit = *limit;
        let mut most = quarter + 1;
        self.inside.retain(|_, inside| {
            let goes = most > 0 && inside.last() <= limit;
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
        (0..count).for_each(|unit| units.set_present(UnitId { unit: unit as u32, ..UNIT }, 512, Moment(0), 0));
        units
    }

    #[test]
    fn the_entries_of_a_guest_of_1_tib_take_2_mib_and_all_columns_9() {
        let units = units((1 << 40) / ballast_base::HUGE_SIZE as u64);
        let region = &units.regions[0];
        assert_eq!(size_of_val(&region.entries[..]), 2 << 20);
        let rest = size_of_val(&region.present[..]) + size_of_val(&region.seen[..]) + size_of_val(&region.births[..]);
        assert_eq!(rest + size_of_val(&region.blocks[..]), 7 << 20);
    }

    #[test]
    fn scans_are_bounded_and_the_oldest_are_dropped_first() {
        let mut units = units(5000);
        for unit in 0..5000 {
            let id = UnitId { unit, ..UNIT };
            units.push_scan(id, Moment(unit), PageMap::ALL, PageMap::NONE);
            assert!(units.insides().count() <= units.most_scans());
            assert!(units.inside(id).is_some());
        }
        assert!(units.inside(UNIT).is_none());
        units.forget_old(Moment(5000), Duration::from_secs(10));
        assert!(units.insides().all(|(unit, _)| unit.unit >= 4900));
        assert_eq!(units.insides().count(), 100);
    }

    #[test]
    fn a_unit_that_left_memory_is_forgotten() {
        let mut units = units(1);
        units.push(UNIT, true, Moment(5));
        units.push_scan(UNIT, Moment(5), PageMap::ALL, PageMap::first(3));
        units.set_present(UNIT, 0, Moment(6), 9);
        assert!(units.entry(UNIT).is_none() && units.inside(UNIT).is_none());
        assert!(!units.push(UNIT, true, Moment(7)));
        units.set_present(UNIT, 7, Moment(8), 9);
        assert_eq!(
            (units.entry(UNIT), units.seen(UNIT), units.birth(UNIT)),
            (Some(Entry(0)), Some(Moment(8)), Some(9))
        );
    }

    #[test]
    fn a_sample_that_finds_more_than_the_scans_replaces_them() {
        let mut units = units(1);
        units.push_scan(UNIT, Moment(5), PageMap::ALL, PageMap::first(10));
        let sample = PageMap::first(32);
        units.push_sample(UNIT, Moment(6), sample, PageMap::first(1));
        assert!(matches!(units.inside(UNIT), Some(Inside::Scanned(_))), "what a scan knows is more");
        units.push_sample(UNIT, Moment(7), sample, PageMap::first(31));
        let Some(Inside::Sampled(sampled)) = units.inside(UNIT) else { panic!("sampled") };
        assert!(sampled.at == Moment(7) && sampled.estimate.share > 0.9, "{sampled:?}");
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
