//! The choice of pages for fast memory, simulated. `ballast bench tiers`.
//!
//! Before: nothing; it needs no daemon and no root. After: a row has the CPU time of classifying ranges by either rule,
//! and further rows have the share of accesses that fast memory serves under hot bloat (`host`).
//! Threads: the bench's one. Units: in every key. Promise: rows say that they are simulated. Classifiers, trackers and
//! plans are the product's; memory, samples and moves are modelled; only the CPU time is measured.

mod bloat;
mod host;

use anyhow::Result;
use ballast_base::{GIB, PAGE_SIZE};
use ballast_ranges::{Fitted, Roots, UNIT};
use ballast_testkit::published::{Classifier, Published};

use crate::cpu;
use crate::report::Row;
use crate::stats::random;

/// Samples per second whose cost is measured.
const COST_RATE: usize = 1_000_000;
/// The end of mappings on x86-64, and the bytes below it that mappings may use: the roots are those of a real program.
const MAPPINGS_END: u64 = 0x7fff_f7ff_f000;
const MAPPINGS: u64 = 64 << 40;
const HEAP: (u64, u64) = (0x2000_0000, 0x6000_0000);
/// CPUs of the guest (Demeter §5.1).
const VCPUS: u64 = 4;
/// Ten of eleven accesses are to a hot eighth of memory (Demeter §5.2), which is in this many places.
const HOT_PART: u64 = 8;
const SPOTS: u64 = 64;

/// Runs all simulations. `begin` gets the title of the next row.
pub(crate) fn run(quick: bool, begin: &dyn Fn(&str), each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let row = |what: &str| {
        let mut row = Row::new("tiers", "simulated", what);
        row.fact("simulated", true);
        begin(row.title());
        row
    };
    let mut classifying = row("cost of classifying");
    // The kernel counts CPU time in ticks, so epochs are measured together.
    let (memory, epochs) = if quick { (4 * GIB, 2) } else { (16 * GIB, 40) };
    cost(&mut classifying, memory, epochs)?;
    each(classifying)?;
    host::run(quick, &row, each)
}

/// Offsets of accesses to memory of this size, each to a random word.
fn sample(memory: u64, count: usize, state: &mut u64) -> Vec<u64> {
    let pages = memory / PAGE_SIZE as u64;
    let (part, length) = (pages / SPOTS, pages / HOT_PART / SPOTS);
    // One spot in each equal part of memory, anywhere in it.
    let starts: Vec<u64> = (0..SPOTS).map(|spot| spot * part + random(state) % (part - length)).collect();
    let mut page = || {
        if random(state).is_multiple_of(11) {
            return random(state) % pages * PAGE_SIZE as u64 + random(state) % 512 * 8;
        }
        let start = starts[(random(state) % SPOTS) as usize];
        (start + random(state) % length) * PAGE_SIZE as u64 + random(state) % 512 * 8
    };
    (0..count).map(|_| page()).collect()
}

/// CPU time of a classifier that gets a million samples a second, in percent of one CPU.
fn cost(row: &mut Row, memory: u64, epochs: u64) -> Result<()> {
    row.fact("measures", "classifier_cpu");
    row.fact("samples_per_s", COST_RATE);
    row.fact("memory_bytes", memory);
    let mut state = 1;
    let base = (MAPPINGS_END - memory) / UNIT * UNIT - UNIT;
    let of_guest = sample(memory, COST_RATE / 2, &mut state).into_iter().map(|offset| base + offset).collect();
    // The worst case for a classifier is half a million places in 64 TiB.
    let anywhere = (0..COST_RATE / 2).map(|_| MAPPINGS_END - 1 - random(&mut state) % MAPPINGS).collect();
    let samples: [(Vec<u64>, &str); 2] = [(of_guest, "classifier_cpu_pct"), (anywhere, "classifier_cpu_pct_anywhere")];
    let roots = || Roots::new(&[HEAP, (MAPPINGS_END - MAPPINGS, MAPPINGS_END)]).expect("two ranges apart");
    for (samples, key) in samples {
        let classifiers: [(&str, Box<dyn Classifier>); 2] =
            [("", Box::new(Fitted::new(roots()))), ("_published", Box::new(Published::new(roots(), VCPUS)))];
        for (suffix, mut classifier) in classifiers {
            let mut shares = Vec::new();
            for _ in 0..6 {
                let before = cpu::of_thread()?;
                for _ in 0..epochs {
                    samples.iter().for_each(|address| classifier.record(*address, 1));
                    classifier.end_epoch();
                    std::hint::black_box(ballast_ranges::rank(classifier.ranges()));
                }
                let simulated_us = epochs as f64 * 500_000.0;
                shares.push((cpu::of_thread()? - before) / simulated_us * 100.0);
            }
            row.figure(&format!("{key}{suffix}"), &shares);
        }
    }
    Ok(())
}
