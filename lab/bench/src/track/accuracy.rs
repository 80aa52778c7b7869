//! The accuracy of tracking, page by page.
//!
//! Before: a guest runs a workload whose every operation can be computed again. After: rows have precision, recall and
//! F1 of the pages that the tracker calls hot.
//! Threads: the bench's one. Units: fractions. Promise: there are three ground truths, and none depends on tracking.
//!
//! - *Touched*: the pages that the guest touched from the beginning of the third last cycle to the end of the last.
//! - *By rate*: those that the workload touches in that time with a chance of at least half. HugeScope's average over
//!   many intervals (§4.2.2) would tend to it.
//! - *By weight*: the pages that take nine tenths of all accesses.
//!
//! Of the pages touched once in ten seconds, chance decides which are touched in six. Only a tracker that watches all
//! of them all the time can know. `f1_knowing_rates` is the bound for other trackers: the F1, against the touched
//! pages, of the best set that the true rates of all pages allow.
//!
//! The other ways of tracking replay the same recording. *Huge only* sees no fine scan, so one touch makes 512 pages
//! hot. *Sampled* sees the fine scans of 1/20 of the units, as Thermostat splits 5 % of the huge pages.

use anyhow::{Context, Result};
use ballast_base::{Bytes, MIB, PAGES_PER_UNIT, PageCount, PageIdx};
use ballast_heat::record::{Frame, Recording};
use ballast_heat::{Phase, Settings, Tracker, UnitId};
use ballast_testvm::{PageSet, Placement, Spec, Workload};

use super::guest::{THINK_TICKS, Tracked, Watched};
use crate::report::Row;
use crate::rig::Bench;

/// Sizes of RAM, cycles before the hot set is compared, and repetitions. The budget is too small for fine scans of all
/// huge pages of the larger one within three cycles.
const SIZES: [(u64, usize, usize); 2] = [(128 * MIB, 3, 3), (512 * MIB, 10, 1)];
/// *Sampled* sees 1/N of the units.
const SAMPLED: u32 = 20;

type Sees = fn(UnitId) -> bool;

/// A key for each way, and the units whose fine scans it sees.
const WAYS: [(&str, Sees); 3] =
    [("4k", |_| true), ("huge_only", |_| false), ("sampled_5pct", |unit| unit.unit % SAMPLED == SAMPLED / 2)];

pub(super) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let quick = bench.options.quick;
    for workload in [Workload::Hotset, Workload::Zipf] {
        for (ram, cycles, repetitions) in if quick { &SIZES[..1] } else { &SIZES[..] } {
            let repetitions = if quick { 1 } else { *repetitions };
            let spec = spec(workload, Bytes(*ram));
            let what = format!("the hot set after {cycles} cycles, {}, {} MiB", name(workload), ram / MIB);
            let mut row = bench.row(&what);
            row.fact("measures", "accuracy");
            row.fact("workload", name(workload));
            row.fact("ram_bytes", *ram);
            row.fact("cycles", *cycles);
            row.fact("repetitions", repetitions);
            let mut scores = Scores::default();
            for _ in bench.progress.over("guest", 0..repetitions) {
                let mut guest = Tracked::start(bench, spec.clone())?;
                scores.add(&spec, &guest.watch(bench, *cycles)?)?;
            }
            scores.finish(&mut row);
            each(row)?;
        }
    }
    Ok(())
}

/// With the hot set, a tenth of memory is hot, spread over every huge page, and nothing else is touched (HugeScope
/// §2.2). With Zipf's law, every page has a popularity of its own.
fn spec(workload: Workload, ram: Bytes) -> Spec {
    let mut spec = Spec::new(workload, ram);
    (spec.placement, spec.think_ticks) = (Placement::Scattered, THINK_TICKS);
    if workload == Workload::Hotset {
        spec.hot_weight = 1.0;
    }
    spec
}

fn name(workload: Workload) -> &'static str {
    if workload == Workload::Zipf { "zipf" } else { "hotset" }
}

/// The figures of a row.
#[derive(Default)]
struct Scores {
    /// For each way: precision, recall, F1 against the touched pages; F1 by weight; F1 by rate.
    ways: [[Vec<f64>; 5]; WAYS.len()],
    knowing_rates: Vec<f64>,
    wss_error_pct: Vec<f64>,
    seconds: Vec<f64>,
    ops_per_s: Vec<f64>,
    /// Pages, and how many of them were touched.
    pages: (u64, u64),
    guest_pct: Vec<f64>,
}

impl Scores {
    fn add(&mut self, spec: &Spec, watched: &Watched) -> Result<()> {
        let (recording, begin, end) = watched.whole_cycles()?;
        let ops = watched.ops_at(begin)..watched.ops_at(end);
        let seconds = (end - begin).as_secs_f64();
        self.seconds.push(seconds);
        self.ops_per_s.push((ops.end - ops.start) as f64 / seconds);
        let recent = recording.cycles().filter(|cycle| cycle.begun >= begin);
        let waited: f64 = recent.map(|cycle| cycle.cost.guest.as_secs_f64()).sum();
        self.guest_pct.push(100.0 * waited / seconds);
        let by_weight = if spec.workload == Workload::Zipf {
            spec.hot_pages(false)?
        } else {
            // All its accesses are to the hot set, whatever their share would be.
            Spec { hot_weight: 0.9, ..spec.clone() }.hot_pages(false)?
        };
        let touches = spec.touches(ops.clone())?;
        let chances = chances(&spec.touch_rates()?, ops.end - ops.start);
        self.knowing_rates.push(best_f1(&chances));
        let by_rate = set(spec.ram, chances.iter().map(|chance| *chance >= 0.5));
        let touched = set(spec.ram, touches.iter().map(|count| *count > 0));
        self.pages = (touches.len() as u64, touched.len());
        for ((_, sees), figures) in WAYS.iter().zip(&mut self.ways) {
            let found = hot(&replay(&recording, *sees), spec.ram);
            let [precision, recall, f1] = score(&found, &touched);
            let all = [precision, recall, f1, score(&found, &by_weight)[2], score(&found, &by_rate)[2]];
            figures.iter_mut().zip(all).for_each(|(figures, figure)| figures.push(figure));
        }
        let heat = ballast_heat::heat(&replay(&recording, |_| true), end, 0);
        let last =
            recording.cycles().rev().find(|cycle| cycle.phase == Phase::Coarse).context("no cycle was recorded")?;
        let ops = watched.ops_at(last.ended.saturating_sub(heat.wss_span))..watched.ops_at(last.ended);
        let truth = spec.touches(ops)?.iter().filter(|count| **count > 0).count() as u64;
        let error = heat.wss_bytes as f64 / PageCount(truth).bytes().0 as f64 - 1.0;
        self.wss_error_pct.push(100.0 * error.abs());
        Ok(())
    }

    fn finish(&self, row: &mut Row) {
        row.fact("pages", self.pages.0);
        row.fact("pages_touched", self.pages.1);
        for ((way, _), [precision, recall, f1, by_weight, by_rate]) in WAYS.iter().zip(&self.ways) {
            row.figure(&format!("f1_{way}"), f1);
            row.figure(&format!("precision_{way}"), precision);
            row.figure(&format!("recall_{way}"), recall);
            row.figure(&format!("f1_by_weight_{way}"), by_weight);
            row.figure(&format!("f1_by_rate_{way}"), by_rate);
        }
        row.figure("f1_knowing_rates", &self.knowing_rates);
        row.figure("wss_error_pct", &self.wss_error_pct);
        row.figure("cycles_s", &self.seconds);
        row.figure("ops_per_s", &self.ops_per_s);
        row.figure("guest_waited_pct", &self.guest_pct);
    }
}

/// A tracker that saw only the fine scans that `sees` selects.
fn replay(recording: &Recording, sees: impl Fn(UnitId) -> bool) -> Tracker {
    let mut recording = recording.clone();
    for frame in &mut recording.frames {
        if let Frame::Cycle(cycle) = frame
            && cycle.phase == Phase::Fine
        {
            cycle.lines.retain(|line| sees(line.unit));
        }
    }
    recording.replay(Settings::default(), |_, _| ())
}

/// The pages that it calls hot.
fn hot(tracker: &Tracker, ram: Bytes) -> PageSet {
    let mut pages = PageSet::new(ram);
    for (unit, map) in tracker.hot_pages() {
        map.iter().for_each(|page| pages.insert(PageIdx(u64::from(unit.unit) * PAGES_PER_UNIT + page)));
    }
    pages
}

/// The pages for which this is true.
fn set(ram: Bytes, of: impl Iterator<Item = bool>) -> PageSet {
    let mut pages = PageSet::new(ram);
    (0..).map(PageIdx).zip(of).filter(|(_, is)| *is).for_each(|(page, _)| pages.insert(page));
    pages
}

/// The chance of each page to be touched by `ops` operations.
fn chances(rates: &[f64], ops: u64) -> Vec<f64> {
    rates.iter().map(|rate| 1.0 - (-rate * ops as f64).exp()).collect()
}

/// The best expected F1 of a set of pages that are touched with these chances. That set consists of the likeliest
/// pages, up to the best count.
fn best_f1(chances: &[f64]) -> f64 {
    let mut chances = chances.to_vec();
    chances.sort_unstable_by(|a, b| b.total_cmp(a));
    let truth: f64 = chances.iter().sum();
    let mut hits = 0.0;
    let f1 = chances.iter().zip(1..).map(|(chance, named)| {
        hits += chance;
        2.0 * hits / (f64::from(named) + truth)
    });
    f1.fold(0.0, f64::max)
}

/// Precision, recall and F1.
fn score(found: &PageSet, truth: &PageSet) -> [f64; 3] {
    let both = found.iter().filter(|page| truth.contains(*page)).count() as f64;
    let of = |pages: u64| if pages == 0 { 0.0 } else { both / pages as f64 };
    let (precision, recall) = (of(found.len()), of(truth.len()));
    let f1 = if both == 0.0 { 0.0 } else { 2.0 * precision * recall / (precision + recall) };
    [precision, recall, f1]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(numbers: std::ops::Range<u64>) -> PageSet {
        let mut pages = PageSet::new(Bytes(MIB));
        numbers.for_each(|page| pages.insert(PageIdx(page)));
        pages
    }

    #[test]
    fn a_score_is_one_for_the_truth_itself_and_zero_for_a_disjoint_set() {
        assert_eq!(score(&pages(0..10), &pages(0..10)), [1.0, 1.0, 1.0]);
        assert_eq!(score(&pages(0..10), &pages(10..20)), [0.0, 0.0, 0.0]);
        assert_eq!(score(&pages(0..0), &pages(0..0)), [0.0, 0.0, 0.0]);
        let [precision, recall, f1] = score(&pages(0..100), &pages(0..50));
        assert_eq!((precision, recall), (0.5, 1.0));
        assert!((f1 - 2.0 / 3.0).abs() < 1e-9, "{f1}");
    }

    #[test]
    fn the_best_set_has_the_certain_pages_and_those_that_are_likely_enough() {
        assert!((best_f1(&[1.0, 0.0, 1.0]) - 1.0).abs() < 1e-9);
        // The best set has all of them: half are hits, and nothing is missed.
        assert!((best_f1(&[0.5; 100]) - 2.0 / 3.0).abs() < 1e-9);
        // An unlikely page would lower the score.
        let few = best_f1(&[1.0, 1.0, 0.1]);
        assert!((few - 4.0 / 4.1).abs() < 1e-9, "{few}");
        let chances = chances(&[0.0, 0.1, 5.0], 10);
        assert!(chances[0] == 0.0 && (chances[1] - 0.632).abs() < 1e-3 && chances[2] > 0.999, "{chances:?}");
    }
}
