//! The error of the estimated working set, and the time until a change of it is seen.
//!
//! Before: the hot set of a guest moves to another place at a known operation. After: a row has the error of the
//! working set before that, and the time from the move until the new hot set is known and the old one forgotten.
//! Threads: the bench's one. Units: percent of the truth; seconds. Promise: the true working set is what the guest
//! touched in the span that the tracker's estimate covers.

use std::time::Duration;

use anyhow::Result;
use ballast_base::{Bytes, MIB, PAGES_PER_UNIT, PageCount, PageIdx};
use ballast_heat::{Settings, Tracker};
use ballast_testvm::{PageSet, Spec, Workload};

use super::guest::{THINK_TICKS, Tracked};
use crate::report::Row;
use crate::rig::Bench;

/// The new hot set is known when this part of it is hot. The old one is forgotten when at most one minus this part is.
const MOST: f64 = 0.9;
/// The first cycles, whose working set means nothing yet.
const WARM: u64 = 3;

pub(super) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    // The move is some 7 or 12 s after the start, at 100,000 operations a second.
    let (ram, move_at, cycles, repetitions) =
        if bench.options.quick { (64 * MIB, 700_000, 9, 1) } else { (128 * MIB, 1_200_000, 12, 2) };
    let mut spec = Spec::new(Workload::Phase, Bytes(ram));
    (spec.hot_weight, spec.think_ticks, spec.move_at) = (1.0, THINK_TICKS, Some(move_at));
    spec.ops = u64::MAX;
    let mut row = bench.row("the working set, and a move of it");
    row.fact("measures", "phase");
    row.fact("ram_bytes", ram);
    row.fact("repetitions", repetitions);
    let (mut errors, mut delays, mut forgets) = (Vec::new(), Vec::new(), Vec::new());
    for _ in bench.progress.over("guest", 0..repetitions) {
        let mut guest = Tracked::start(bench, spec.clone())?;
        let watched = guest.watch(bench, cycles)?;
        // With a slow guest there is no figure for the move, but for the time before it.
        let moved = watched.time_of(move_at).unwrap_or(Duration::MAX);
        let (before, after) = (spec.hot_pages(false)?, spec.hot_pages(true)?);
        let (mut known, mut forgotten) = (None, None);
        let mut sizes = Vec::new();
        watched.recording.replay(Settings::default(), |tracker, cycle| {
            if cycle.ended < moved {
                if tracker.cycles().0 >= WARM {
                    let heat = ballast_heat::heat(tracker, cycle.ended, 0);
                    sizes.push((cycle.ended, heat.wss_span, heat.wss_bytes));
                }
                return;
            }
            let since = (cycle.ended - moved).as_secs_f64();
            if share(tracker, &after) >= MOST {
                known.get_or_insert(since);
            }
            if share(tracker, &before) <= 1.0 - MOST {
                forgotten.get_or_insert(since);
            }
        });
        for (end, span, said) in sizes {
            let touches = spec.touches(watched.ops_at(end.saturating_sub(span))..watched.ops_at(end))?;
            let truth = PageCount(touches.iter().filter(|count| **count > 0).count() as u64).bytes().0 as f64;
            errors.push(100.0 * (said as f64 / truth - 1.0).abs());
        }
        delays.extend(known);
        forgets.extend(forgotten);
    }
    row.figure("wss_error_pct", &errors);
    row.figure("phase_delay_s", &delays);
    row.figure("phase_forget_s", &forgets);
    if delays.len() < repetitions || forgets.len() < repetitions {
        row.because("the move was not seen to its end in every repetition");
    }
    each(row)
}

/// The part of a set that the tracker calls hot.
fn share(tracker: &Tracker, set: &PageSet) -> f64 {
    let hot: u64 = tracker
        .hot_pages()
        .map(|(unit, map)| {
            let first = u64::from(unit.unit) * PAGES_PER_UNIT;
            map.iter().filter(|page| set.contains(PageIdx(first + page))).count() as u64
        })
        .sum();
    hot as f64 / set.len().max(1) as f64
}
