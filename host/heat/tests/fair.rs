//! The benefit of fair promotion (Blowfish, 4.3.1) and of blocks of base pages, in a model: the real tracker and the
//! real picking, for a guest whose pages are touched at random, each at its own rate.
//!
//! Before: a distribution of rates. After: the share of the touches that missed while a limit kept a part of the
//! memory. Units: touches per second; shares of 1.
//! Promise: no clock and no sleep; equal seeds give equal results.
//!
//! In the model, pages are reclaimed once per cycle, quarantine tests nothing, and nothing is prefetched.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use ballast_base::{PAGES_PER_UNIT, PageIdx, PageRange};
use ballast_heat::source::BLOCK;
use ballast_heat::{CycleReport, HeatSource, Pages, Phase, Pick, Seen, Settings, Step, UnitId, VmHeat};
use ballast_testkit::random::Random;

const UNITS: usize = 64;
const PAGES: usize = UNITS * PAGES_PER_UNIT as usize;
/// Cycles before the first eviction, before misses count, and in all.
const CYCLES: [u32; 3] = [8, 14, 34];

/// Every second unit is a huge page, the others are base pages.
fn is_huge(unit: usize) -> bool {
    unit.is_multiple_of(2)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Base {
    /// By 2 MiB, as huge pages are.
    Units,
    /// By 256 KiB.
    Blocks,
}

struct Guest(RefCell<Vec<bool>>);

impl Pages for Guest {
    fn regions(&self) -> u32 {
        1
    }
    fn len(&self, _: u32) -> u64 {
        PAGES as u64
    }
    fn next_present(&self, _: u32, range: PageRange) -> Option<PageRange> {
        let pages = self.0.borrow();
        let until = pages.len().min(range.end().0 as usize);
        let first = (range.start().0 as usize..until).find(|page| pages[*page])?;
        let end = (first..until).find(|page| !pages[*page]).unwrap_or(until);
        Some(PageRange::new(PageIdx(first as u64), PageIdx(end as u64)))
    }
    fn age(&self, _: u32, page: PageIdx) -> Option<u8> {
        self.0.borrow()[page.0 as usize].then_some(0)
    }
    fn set_age(&self, _: u32, _: PageIdx, _: u8) {}
}

fn touches(rates: &[f64], time: Duration, random: &mut Random) -> Vec<bool> {
    let whole = 1u64 << 32;
    let touched = |rate: &f64| (random.below(whole) as f64) < (1.0 - (-rate * time.as_secs_f64()).exp()) * whole as f64;
    rates.iter().map(touched).collect()
}

/// Restores the touched pages. Returns the number that were not present.
fn restore(guest: &Guest, touched: &[bool]) -> usize {
    let mut present = guest.0.borrow_mut();
    let missed = (0..PAGES).filter(|page| touched[*page] && !present[*page]).collect::<Vec<_>>();
    missed.iter().for_each(|page| present[*page] = true);
    missed.len()
}

/// Keeps the guest at `keep` of its memory. Returns the share of the touches that missed.
fn missed(rates: &[f64], keep: f64, base: Base) -> f64 {
    // Fine scans would report base pages, which is not the subject here.
    let settings = Settings { fine_share: 0.0, ..Settings::default() };
    let heat = Arc::new(VmHeat::new(settings));
    let mut source = HeatSource::new(heat.clone());
    let (guest, mut random) = (Guest(RefCell::new(vec![true; PAGES])), Random(7));
    let (mut now, mut missed, mut cycle) = (Duration::ZERO, 0, 0);
    while cycle < CYCLES[2] {
        let step = heat.lock().next(now, &guest);
        let time = match &step {
            Step::Rest(pause) => *pause,
            Step::Watch { window, .. } => *window,
        };
        now += time;
        let touched = touches(rates, time, &mut random);
        let misses = restore(&guest, &touched);
        missed += if cycle >= CYCLES[1] { misses } else { 0 };
        let Step::Watch { watch, .. } = step else { continue };
        let seen = |id: &UnitId| {
            let unit = id.unit as usize;
            let of = &touched[unit * PAGES_PER_UNIT as usize..][..PAGES_PER_UNIT as usize];
            let any = |pages: &[bool]| pages.contains(&true);
            let seen = if is_huge(unit) || base == Base::Units {
                Seen::Coarse { touched: any(of) }
            } else {
                let bits = of.chunks(BLOCK as usize).enumerate().map(|(block, pages)| u8::from(any(pages)) << block);
                Seen::Blocks { touched: bits.sum() }
            };
            (*id, seen)
        };
        let units = watch.coarse.iter().map(seen).collect();
        heat.lock().absorb(now, Phase::Coarse, &CycleReport { units, ..CycleReport::default() });
        cycle += 1;
        if cycle > CYCLES[0] {
            let over = guest.0.borrow().iter().filter(|page| **page).count() as f64 - keep * PAGES as f64;
            let mut picked = Vec::new();
            source.pick(&guest, over.max(0.0) as u64, Pick::Any, &mut picked);
            let mut present = guest.0.borrow_mut();
            for run in picked {
                run.pages.iter().for_each(|page| present[page.0 as usize] = false);
            }
        }
    }
    let time = Settings::default().period.as_secs_f64() * f64::from(CYCLES[2] - CYCLES[1]);
    missed as f64 / (rates.iter().sum::<f64>() * time)
}

/// Zipf's law over pages, popular ones adjacent, with this number of touches per second in all.
fn zipf(per_s: f64) -> Vec<f64> {
    let weights = (0..PAGES).map(|page| (page as f64 + 1.0).powf(-0.99)).collect::<Vec<_>>();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| per_s * weight / sum).collect()
}

fn missed_by_zipf(per_s: f64, keep: f64, base: Base) -> f64 {
    let missed = missed(&zipf(per_s), keep, base);
    println!("{per_s} touches/s, {keep} kept, {base:?}: misses {missed:.3}");
    missed
}

/// The units at the edge of the kept memory are touched about once in 2 s, the blocks about once in 15 s. So a cycle
/// sees a huge page touched that is used less, for its size, than base pages that it sees untouched. Before picks
/// counted the cycles that touched a unit, 19 and 10 % of touches missed here.
#[test]
fn units_touched_in_few_cycles_are_picked_before_those_touched_in_many() {
    for (per_s, keep, most) in [(300.0, 0.3, 0.16), (300.0, 0.5, 0.11), (100.0, 0.3, 0.21)] {
        let missed = missed_by_zipf(per_s, keep, Base::Blocks);
        assert!(missed < most, "{missed}");
    }
}

/// If pages were picked by address, 27 % of touches would miss, because the hottest memory has the lowest addresses.
#[test]
fn where_every_unit_is_touched_in_every_cycle_the_victims_are_random() {
    let missed = missed_by_zipf(3000.0, 0.5, Base::Blocks);
    assert!(missed < 0.13, "{missed}");
}

/// If base pages are reported by 2 MiB, each cycle sees all units touched, so their frequencies do not tell them apart.
#[test]
fn base_pages_reported_by_blocks_miss_less_if_each_cycle_touches_every_unit() {
    let [units, blocks] = [Base::Units, Base::Blocks].map(|base| missed_by_zipf(3000.0, 0.7, base));
    assert!(blocks < 0.8 * units, "{blocks} {units}");
}
