//! Ages: a VM's heat for the API and the CLI.
//!
//! Before: the tracker absorbed cycles. After: the API and `ballast vm heat` show this.
//! Units: bytes of memory that is present (far memory does not count); ages since the last touch seen.
//! Promise: the buckets add up to `present_bytes`.

use std::time::Duration;

use ballast_base::{PAGES_PER_UNIT, PageCount};

use crate::moment::Moment;
use crate::source::UnitId;
use crate::tracker::Tracker;

/// Upper ends of the age buckets, in seconds. One more bucket has older memory.
pub const BUCKETS_S: [u64; 11] = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600];

/// One cell of the strip.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cell {
    /// Share of it in memory.
    pub present: f64,
    /// Share of it touched in the recent cycles, as far as is known.
    pub hot: f64,
    /// Time since the youngest touch in it; `None` if none of it is in memory.
    pub age: Option<Duration>,
}

/// Heat at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Heat {
    /// Coarse cycles so far; with 0 the other fields mean nothing.
    pub cycles: u64,
    /// Fine cycles so far.
    pub fine_cycles: u64,
    /// Memory that is tracked.
    pub present_bytes: u64,
    /// Memory touched in the recent cycles. A touched unit without a fine scan counts with the average share of others.
    pub wss_bytes: u64,
    /// Memory touched if each touched unit counted as a whole: the result of tracking huge pages alone.
    pub wss_huge_bytes: u64,
    /// Length of the recent cycles.
    pub wss_span: Duration,
    /// Share of the touched units with a fine scan, which measured their own share.
    pub known_share: f64,
    /// Bytes by age: one for each of [`BUCKETS_S`], and one for older memory.
    pub ages: [u64; BUCKETS_S.len() + 1],
    /// Hot units with hardly any hot page.
    pub bloated_units: u64,
    /// Their cold pages.
    pub bloat_bytes: u64,
    /// Time from one coarse cycle to the next.
    pub period: Duration,
    /// Share of one CPU that tracking uses.
    pub cpu_share: f64,
    /// Share of the time for which guest threads wait for tracking.
    pub guest_share: f64,
    /// The guest's address space in equal parts, region after region.
    pub strip: Vec<Cell>,
}

/// Computes the heat. `cells` is the number of cells of the strip.
pub fn heat(tracker: &Tracker, now: Duration, cells: usize) -> Heat {
    let at = Moment::at(now);
    let units = tracker.units();
    let (cycles, fine_cycles) = tracker.cycles();
    let spent = tracker.spent();
    let mut sum = Sum { strip: Strip::new(tracker, cells), ..Sum::default() };
    let mut heat = Heat {
        cycles,
        fine_cycles,
        wss_span: tracker.recent_span(),
        period: tracker.period(),
        cpu_share: spent.cpu,
        guest_share: spent.guest,
        ..Heat::default()
    };
    for unit in units.present() {
        let (present, of) = (units.present_pages(unit), units.pages_of(unit));
        let age = at.since(units.seen(unit).unwrap_or(at));
        let (touched, scanned) = (tracker.is_recent(unit), units.scanned(unit));
        let hot = match scanned {
            _ if !touched => Some(0),
            Some(scanned) => Some(scanned.hot().count().min(present)),
            None => None,
        };
        if touched {
            sum.touched += present;
            sum.known_hot += hot.unwrap_or(0);
            sum.known += if hot.is_some() { present } else { 0 };
        }
        if let Some(bloat) = scanned.filter(|_| touched).and_then(|scanned| scanned.bloat(of)) {
            heat.bloated_units += 1;
            heat.bloat_bytes += PageCount(bloat.count().min(present)).bytes().0;
        }
        match scanned {
            Some(scanned) if of > 0 => {
                // It is not known which of its pages are present: each age gets its share.
                for page in 0..of {
                    let weight = present * (page + 1) / of - present * page / of;
                    let age = if scanned.is_touched(page) { age } else { at.since(scanned.seen(page)).max(age) };
                    match sum.ages.last_mut() {
                        Some((last, pages)) if *last == age => *pages += weight,
                        _ => sum.ages.push((age, weight)),
                    }
                }
            }
            _ => sum.ages.push((age, present)),
        }
        sum.strip.add(unit, present, hot, touched, age);
    }
    sum.finish(&mut heat);
    heat
}

#[derive(Default)]
struct Sum {
    ages: Vec<(Duration, u64)>,
    touched: u64,
    known: u64,
    known_hot: u64,
    strip: Strip,
}

impl Sum {
    fn finish(self, heat: &mut Heat) {
        let density = if self.known == 0 { 1.0 } else { self.known_hot as f64 / self.known as f64 };
        let unknown = (self.touched - self.known) as f64 * density;
        let bytes = |pages: u64| PageCount(pages).bytes().0;
        heat.wss_bytes = bytes(self.known_hot + unknown.round() as u64);
        heat.wss_huge_bytes = bytes(self.touched);
        heat.known_share = if self.touched == 0 { 1.0 } else { self.known as f64 / self.touched as f64 };
        for (age, pages) in &self.ages {
            let bucket = BUCKETS_S.iter().position(|end| *age <= Duration::from_secs(*end)).unwrap_or(BUCKETS_S.len());
            heat.ages[bucket] += bytes(*pages);
            heat.present_bytes += bytes(*pages);
        }
        heat.strip = self.strip.finish(density);
    }
}

/// The strip while it is summed up, in pages.
#[derive(Default)]
struct Strip {
    /// First page of each region, and the end of the last one.
    starts: Vec<u64>,
    cells: Vec<StripCell>,
}

#[derive(Clone, Default)]
struct StripCell {
    present: f64,
    hot: f64,
    unknown: f64,
    age: Option<Duration>,
}

impl Strip {
    fn new(tracker: &Tracker, cells: usize) -> Self {
        let mut starts = vec![0];
        for region in tracker.units().region_pages() {
            starts.push(starts[starts.len() - 1] + region);
        }
        Self { starts, cells: vec![StripCell::default(); cells] }
    }

    fn total(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    fn add(&mut self, unit: UnitId, present: u64, hot: Option<u64>, touched: bool, age: Duration) {
        let (count, total) = (self.cells.len() as u64, self.total());
        if count == 0 || total == 0 {
            return;
        }
        let start = self.starts[unit.region as usize] + u64::from(unit.unit) * PAGES_PER_UNIT;
        let end = (start + PAGES_PER_UNIT).min(self.starts[unit.region as usize + 1]);
        let cell_at = |page: u64| (u128::from(page) * u128::from(count) / u128::from(total)) as u64;
        let (first, last) = (cell_at(start), cell_at(end - 1));
        for cell in first..=last {
            let share = 1.0 / (last - first + 1) as f64;
            let cell = &mut self.cells[cell as usize];
            cell.present += present as f64 * share;
            match hot {
                Some(hot) => cell.hot += hot as f64 * share,
                None if touched => cell.unknown += present as f64 * share,
                None => {}
            }
            cell.age = Some(cell.age.map_or(age, |youngest| youngest.min(age)));
        }
    }

    fn finish(self, density: f64) -> Vec<Cell> {
        let pages = self.total() as f64 / self.cells.len().max(1) as f64;
        // Without a region there is no memory.
        let share = |value: f64| if pages > 0.0 { (value / pages).clamp(0.0, 1.0) } else { 0.0 };
        let cell = |cell: StripCell| Cell {
            present: share(cell.present),
            hot: share(cell.hot + cell.unknown * density),
            age: cell.age,
        };
        self.cells.into_iter().map(cell).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Phase;
    use crate::source::{CycleReport, PageMap, Seen};
    use crate::tracker::Settings;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn unit(unit: u32) -> UnitId {
        UnitId { region: 0, unit }
    }

    fn tracker(units: u32) -> Tracker {
        let mut tracker = Tracker::new(Settings::default());
        tracker.units.layout([u64::from(units) * PAGES_PER_UNIT].into_iter());
        (0..units).for_each(|index| tracker.units.set_present(unit(index), 512, Moment(0)));
        tracker
    }

    fn coarse(tracker: &mut Tracker, at_s: u64, touched: impl Fn(u32) -> bool) {
        let units: Vec<_> =
            tracker.units().present().map(|unit| (unit, Seen::Coarse { touched: touched(unit.unit) })).collect();
        tracker.absorb(Duration::from_secs(at_s), Phase::Coarse, &CycleReport { units, ..CycleReport::default() });
    }

    #[test]
    fn ages_working_set_and_strip_of_a_guest_with_a_hot_quarter() {
        let mut tracker = tracker(8);
        for second in 1..=100 {
            coarse(&mut tracker, second, |unit| unit < 2);
        }
        let report = CycleReport {
            units: vec![(unit(0), Seen::Fine { touched: PageMap::first(64) })],
            ..CycleReport::default()
        };
        (0..2).for_each(|_| tracker.absorb(Duration::from_secs(100), Phase::Fine, &report));
        let heat = heat(&tracker, Duration::from_secs(100), 4);
        let unit_bytes = ballast_base::HUGE_SIZE as u64;
        assert_eq!(heat.present_bytes, 8 * unit_bytes);
        assert_eq!(heat.wss_huge_bytes, 2 * unit_bytes);
        // One of the two units is hot in an eighth; the other has no scan and counts like the first.
        assert_eq!(heat.wss_bytes, 2 * unit_bytes / 8);
        assert_eq!((heat.known_share, heat.bloated_units, heat.bloat_bytes), (0.5, 1, unit_bytes * 7 / 8));
        // Unit 1 and the touched pages of unit 0 are fresh. So are its cold pages, after only one scan.
        assert_eq!(heat.ages[0], 2 * unit_bytes);
        assert_eq!(heat.ages[6], 6 * unit_bytes);
        assert_eq!(heat.strip[0], Cell { present: 1.0, hot: 0.125, age: Some(Duration::ZERO) });
        assert_eq!(heat.strip[3], Cell { present: 1.0, hot: 0.0, age: Some(Duration::from_secs(100)) });
    }

    #[test]
    fn a_vm_of_unknown_heat_has_an_empty_strip() {
        let heat = heat(&Tracker::new(Settings::default()), Duration::from_secs(5), 3);
        assert_eq!((heat.strip, heat.present_bytes, heat.known_share), (vec![Cell::default(); 3], 0, 1.0));
    }

    proptest! {
        #[test]
        fn buckets_add_up_for_all_reports(
            present in vec(0u16..=512, 1..20),
            cycles in vec((any::<u32>(), vec((0u32..20, 0u64..=512), 0..6)), 0..12),
            cells in 0usize..50,
        ) {
            let mut tracker = Tracker::new(Settings::default());
            tracker.units.layout([present.len() as u64 * PAGES_PER_UNIT - 3].into_iter());
            for (index, count) in present.iter().enumerate() {
                let id = unit(index as u32);
                let count = u64::from(*count).min(tracker.units().pages_of(id)) as u16;
                tracker.units.set_present(id, count, Moment(0));
            }
            for (turn, (bits, fine)) in cycles.into_iter().enumerate() {
                let at = turn as u64 * 7 + 1;
                coarse(&mut tracker, at, |unit| bits >> unit & 1 == 1);
                let mut units: Vec<_> = fine.into_iter().map(|(index, touched)| (unit(index), Seen::Fine {
                    touched: PageMap::first(touched),
                })).collect();
                units.sort_unstable_by_key(|(unit, _)| *unit);
                units.dedup_by_key(|(unit, _)| *unit);
                tracker.absorb(Duration::from_secs(at), Phase::Fine, &CycleReport { units, ..CycleReport::default() });
            }
            let heat = heat(&tracker, Duration::from_secs(90), cells);
            prop_assert_eq!(heat.ages.iter().sum::<u64>(), heat.present_bytes);
            prop_assert!(heat.wss_bytes <= heat.wss_huge_bytes && heat.wss_huge_bytes <= heat.present_bytes);
            prop_assert!(heat.bloat_bytes <= heat.present_bytes);
            prop_assert_eq!(heat.strip.len(), cells);
            prop_assert!(heat.strip.iter().all(|cell| cell.hot <= cell.present + 1e-9));
        }
    }
}
