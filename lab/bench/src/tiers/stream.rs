//! Access streams whose truth is known: the share of a program's accesses to each part of its memory.
//!
//! Before: a seed is given. After: there are samples for classifiers, and the truth by which they are judged.
//! Units: offsets in memory in bytes, shares of 1; an epoch is 500 ms. Promise: the same seed gives the same stream;
//! truth is computed and not sampled, except for the graph, whose every access is counted.

use ballast_base::{HUGE_SIZE, PAGE_SIZE, PAGES_PER_UNIT};

use crate::stats::{random, shuffle};
use crate::tiers::graph::Search;

const UNIT: u64 = HUGE_SIZE as u64;
/// Share of all accesses to the hot set: ten times as many as to the rest (Demeter §5.2).
const HOT_SHARE: f64 = 10.0 / 11.0;
/// 1/N of memory is hot.
const HOT_PART: u64 = 8;
/// Epochs between two moves of the hot set: 20 s.
const MOVES_EVERY: u64 = 40;
/// Exponent of the Zipf law.
const ZIPF: f64 = 0.99;

/// The program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One hot eighth (GUPS).
    Contiguous,
    /// The same heat in this number of places.
    Scattered(u64),
    /// A hot eighth that jumps every 20 s.
    Moving,
    /// Zipf's law, with popular pages anywhere in memory, like hashed keys.
    Zipf,
    /// Breadth-first searches of a Kronecker graph.
    Graph,
}

impl Kind {
    pub(crate) const ALL: [Self; 6] =
        [Self::Contiguous, Self::Scattered(16), Self::Scattered(64), Self::Moving, Self::Zipf, Self::Graph];

    pub(crate) fn name(self) -> String {
        match self {
            Self::Contiguous => "gups_contiguous".into(),
            Self::Scattered(spots) => format!("gups_scattered_{spots}"),
            Self::Moving => "gups_moving".into(),
            Self::Zipf => "zipf_pages".into(),
            Self::Graph => "graph_bfs".into(),
        }
    }
}

/// A stream, epoch by epoch.
pub(crate) struct Stream {
    source: Source,
    /// Share of the accesses of this epoch that goes to each unit.
    units: Vec<f64>,
    /// Cumulative shares of the pages, and of the units, the hottest first.
    best_pages: Vec<f64>,
    best_units: Vec<f64>,
}

enum Source {
    Law { draw: Draw, moves: bool, shift: u64, epoch: u64, seed: u64 },
    Graph { search: Box<Search>, samples: Vec<u64>, next: usize, accesses: u64 },
}

impl Stream {
    /// A program with this much memory; the graph's has as much as the graph needs.
    pub(crate) fn new(kind: Kind, memory: u64, seed: u64, accesses_per_epoch: u64) -> Self {
        let of = |source| Self { source, units: Vec::new(), best_pages: Vec::new(), best_units: Vec::new() };
        if kind == Kind::Graph {
            let search = Box::new(Search::new(memory, seed));
            let mut stream = of(Source::Graph { search, samples: Vec::new(), next: 0, accesses: accesses_per_epoch });
            stream.advance();
            return stream;
        }
        let law = law(kind, memory / UNIT * PAGES_PER_UNIT, seed);
        let draw = Draw::new(&law);
        let mut stream = of(Source::Law { draw, moves: kind == Kind::Moving, shift: 0, epoch: 0, seed });
        stream.tell(&law);
        stream
    }

    fn tell(&mut self, pages: &[f64]) {
        let all: f64 = pages.iter().sum();
        self.units = pages.chunks(PAGES_PER_UNIT as usize).map(|unit| unit.iter().sum::<f64>() / all).collect();
        self.best_pages = added_up(pages.iter().map(|share| share / all).collect());
        self.best_units = added_up(self.units.clone());
    }

    /// Begin the next epoch.
    pub(crate) fn advance(&mut self) {
        match &mut self.source {
            Source::Law { moves, shift, epoch, seed, .. } => {
                *epoch += 1;
                if *moves && epoch.is_multiple_of(MOVES_EVERY) {
                    let units = self.units.len() as u64;
                    let by = random(seed) % units;
                    *shift = (*shift + by) % units;
                    self.units.rotate_right(by as usize);
                }
            }
            Source::Graph { search, samples, next, accesses } => {
                let (pages, all) = search.epoch(*accesses);
                (*samples, *next) = (all, 0);
                self.tell(&pages);
            }
        }
    }

    /// The share of this epoch's accesses to each unit.
    pub(crate) fn units(&self) -> &[f64] {
        &self.units
    }

    /// The largest share that a tier of this number of units can serve, with pages of 4 KiB and of 2 MiB, if this epoch
    /// is known and moves are free.
    pub(crate) fn oracle(&self, fast: usize) -> (f64, f64) {
        let best = |sums: &[f64], count: usize| sums.get(count.min(sums.len()).wrapping_sub(1)).copied().unwrap_or(0.0);
        (best(&self.best_pages, fast * PAGES_PER_UNIT as usize), best(&self.best_units, fast))
    }

    /// Offsets of `count` accesses of this epoch.
    pub(crate) fn sample(&mut self, count: usize, state: &mut u64) -> Vec<u64> {
        match &mut self.source {
            Source::Law { draw, shift, .. } => {
                let bytes = self.units.len() as u64 * UNIT;
                let mut one =
                    || (draw.page(state) * PAGE_SIZE as u64 + random(state) % 512 * 8 + *shift * UNIT) % bytes;
                (0..count).map(|_| one()).collect()
            }
            Source::Graph { samples, next, .. } => {
                let step = (samples.len() / count.max(1)).max(1);
                let from = *next % step;
                *next += 1;
                samples.iter().skip(from).step_by(step).take(count).copied().collect()
            }
        }
    }
}

fn added_up(mut shares: Vec<f64>) -> Vec<f64> {
    shares.sort_unstable_by(|a, b| b.total_cmp(a));
    let mut sum = 0.0;
    for share in &mut shares {
        sum += *share;
        *share = sum;
    }
    shares
}

/// The relative rate of accesses to each page.
fn law(kind: Kind, pages: u64, mut seed: u64) -> Vec<f64> {
    let spots = match kind {
        Kind::Zipf => {
            let mut shares: Vec<f64> = (1..=pages).map(|rank| (rank as f64).powf(-ZIPF)).collect();
            shuffle(&mut shares, seed);
            return shares;
        }
        Kind::Scattered(spots) => spots,
        _ => 1,
    };
    // One spot in each equal part of memory, anywhere in it.
    let (part, length) = (pages / spots, pages / HOT_PART / spots);
    let hot = HOT_SHARE / (length * spots) as f64;
    let mut shares = vec![(1.0 - HOT_SHARE) / (pages - length * spots) as f64; pages as usize];
    for spot in 0..spots {
        // The order of first touch is not the order of heat.
        let least = if spots == 1 { part / 2 } else { 0 };
        let start = spot * part + least + random(&mut seed) % (part - least - length);
        shares[start as usize..(start + length) as usize].fill(hot);
    }
    shares
}

/// Draws pages by their shares in constant time (Vose's alias method).
struct Draw {
    /// For each slot: the share of its own page, and the page that has the rest.
    slots: Vec<(f32, u32)>,
}

impl Draw {
    fn new(shares: &[f64]) -> Self {
        let scale = shares.len() as f64 / shares.iter().sum::<f64>();
        let mut left: Vec<f64> = shares.iter().map(|share| share * scale).collect();
        let mut slots = vec![(1.0, 0); shares.len()];
        let (mut small, mut large): (Vec<u32>, Vec<u32>) =
            (0..shares.len() as u32).partition(|page| left[*page as usize] < 1.0);
        while let (Some(page), Some(giver)) = (small.pop(), large.pop()) {
            slots[page as usize] = (left[page as usize] as f32, giver);
            left[giver as usize] -= 1.0 - left[page as usize];
            if left[giver as usize] < 1.0 { small.push(giver) } else { large.push(giver) }
        }
        Self { slots }
    }

    fn page(&self, state: &mut u64) -> u64 {
        let slot = ((u128::from(random(state)) * self.slots.len() as u128) >> 64) as usize;
        let (own, other) = self.slots[slot];
        let at = (random(state) >> 40) as f32 / (1 << 24) as f32;
        if at < own { slot as u64 } else { u64::from(other) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: u64 = 64 * UNIT;

    #[test]
    fn samples_follow_the_truth() {
        for kind in [Kind::Contiguous, Kind::Scattered(16), Kind::Moving, Kind::Zipf, Kind::Graph] {
            let mut stream = Stream::new(kind, MEMORY, 5, 400_000);
            let mut state = 9;
            for _ in 0..2 * MOVES_EVERY / if kind == Kind::Graph { 20 } else { 1 } {
                stream.advance();
            }
            let mut seen = vec![0.0; stream.units().len()];
            let samples = stream.sample(100_000, &mut state);
            samples.iter().for_each(|offset| seen[(offset / UNIT) as usize] += 1.0 / samples.len() as f64);
            let apart: f64 = seen.iter().zip(stream.units()).map(|(seen, truth)| (seen - truth).abs()).sum();
            assert!(apart < 0.04, "{kind:?}: {apart}");
            assert!((stream.units().iter().sum::<f64>() - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn the_oracle_has_the_hottest_and_small_pages_are_never_worse() {
        let stream = Stream::new(Kind::Contiguous, MEMORY, 1, 0);
        let (small, huge) = stream.oracle(8);
        assert!((small - HOT_SHARE).abs() < 1e-6 && huge <= small && huge > 0.8, "{small} {huge}");
        assert_eq!(stream.oracle(0), (0.0, 0.0));
        assert!(stream.oracle(1000).1 > 0.999);
        let zipf = Stream::new(Kind::Zipf, MEMORY, 1, 0);
        assert!(zipf.oracle(8).0 > zipf.oracle(8).1 + 0.2, "hashed keys need small pages");
    }
}
