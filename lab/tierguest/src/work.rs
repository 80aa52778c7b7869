//! Programs whose heat nobody sets: they count their own accesses.
//!
//! Before: [`crate::gups`] has touched the memory once, in the order of its addresses. After: the program works until
//! its process ends, and each read and write of its memory is counted by block. Threads: the caller's. Units: words of
//! 8 bytes, blocks of 64 pages.
//!
//! | Kind | Layout, in the order in which such programs touch memory first | Heat |
//! |---|---|---|
//! | `bfs` | edges, queue, the search that has seen each vertex | a sixth of memory is touched for each edge |
//! | `xs` | cross sections of all nuclides; grid of energies with indices | a sixteenth has most of the accesses |
//! | `kmeans` | points | none: each pass reads all points in order |

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clusters::Clusters;
use crate::heat::{Kind, random};

/// Edges of a vertex, two in a word.
const DEGREE: usize = 8;
/// Nuclides read for one cross section, and words read of each.
const NUCLIDES: usize = 12;
const SECTIONS: usize = 6;
/// Words of a point of k-means.
const VALUES: usize = 8;

/// Memory whose accesses are counted.
pub struct Counted<'a> {
    /// Returns the word at this offset in bytes.
    pub word: &'a (dyn Fn(usize) -> &'a AtomicU64 + Sync),
    /// How many words there are.
    pub words: usize,
    /// Accesses of each block.
    pub blocks: &'a [AtomicU64],
    /// Accesses.
    pub count: &'a AtomicU64,
}

impl Counted<'_> {
    fn at(&self, word: usize) -> &AtomicU64 {
        self.blocks[word / (self.words / self.blocks.len())].fetch_add(1, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
        (self.word)(word * 8)
    }

    fn get(&self, word: usize) -> u64 {
        self.at(word).load(Ordering::Relaxed)
    }

    fn set(&self, word: usize, value: u64) {
        self.at(word).store(value, Ordering::Relaxed);
    }
}

/// Works for ever; `ready` is called once, when all of its memory is written. Of a kind without such work it returns.
pub fn run(kind: Kind, memory: &Counted<'_>, ready: &dyn Fn()) {
    match kind {
        Kind::Bfs => searches(memory, ready),
        Kind::Xs => lookups(memory, ready),
        Kind::Kmeans => passes(memory, ready),
        Kind::Contiguous | Kind::Scattered | Kind::Moving | Kind::Bloated => {}
    }
}

/// Breadth-first searches of a graph whose vertices are sorted by how many edges lead to them.
fn searches(memory: &Counted<'_>, ready: &dyn Fn()) {
    let edge_words = DEGREE / 2;
    let vertices = memory.words / (edge_words + 2);
    let (queue, seen) = (vertices * edge_words, vertices * (edge_words + 1));
    let mut state = 5;
    for word in 0..queue {
        let mut end = || {
            let part = (random(&mut state) >> 11) as f64 / (1u64 << 53) as f64;
            // Half of the edges lead to an eighth of the vertices.
            (part.powi(3) * vertices as f64) as u64
        };
        (memory.word)(word * 8).store(end() << 32 | end(), Ordering::Relaxed);
    }
    for word in queue..memory.words {
        (memory.word)(word * 8).store(0, Ordering::Relaxed);
    }
    ready();
    for search in 1.. {
        let start = random(&mut state) % vertices as u64;
        memory.set(seen + start as usize, search);
        memory.set(queue, start);
        let (mut first, mut last) = (0, 1);
        while first < last {
            let vertex = memory.get(queue + first) as usize;
            first += 1;
            for word in vertex * edge_words..(vertex + 1) * edge_words {
                let ends = memory.get(word);
                for end in [ends >> 32, ends & 0xffff_ffff] {
                    if memory.get(seen + end as usize) != search {
                        memory.set(seen + end as usize, search);
                        memory.set(queue + last, end);
                        last += 1;
                    }
                }
            }
        }
    }
}

/// Lookups of cross sections, as XSBench makes them: a binary search in the grid, and words of some nuclides.
fn lookups(memory: &Counted<'_>, ready: &dyn Fn()) {
    let nuclides = memory.words / 16;
    // A row of the grid has an energy and the indices of its nuclides, four in a word.
    let row = 1 + NUCLIDES.div_ceil(4);
    let rows = (memory.words - nuclides) / row;
    let energy = |at: usize| nuclides + at * row;
    for at in 0..rows {
        (memory.word)(energy(at) * 8).store(at as u64, Ordering::Relaxed);
    }
    ready();
    let mut state = 5;
    loop {
        let wanted = random(&mut state) % rows as u64;
        let (mut low, mut high) = (0, rows);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if memory.get(energy(middle)) <= wanted { low = middle } else { high = middle }
        }
        for index in 1..row {
            memory.get(energy(low) + index);
        }
        for nuclide in 0..NUCLIDES {
            let mut seed = (low * NUCLIDES + nuclide) as u64;
            let first = random(&mut seed) as usize % (nuclides - SECTIONS);
            for word in first..first + SECTIONS {
                memory.get(word);
            }
        }
    }
}

/// k-means: each pass assigns each point to its nearest cluster.
fn passes(memory: &Counted<'_>, ready: &dyn Fn()) {
    let points = memory.words / VALUES;
    let mut state = 5;
    let value = |state: &mut u64| random(state) >> 40;
    for word in 0..points * VALUES {
        (memory.word)(word * 8).store(value(&mut state), Ordering::Relaxed);
    }
    let centres = std::array::from_fn(|_| std::array::from_fn(|_| value(&mut state) as f32));
    let mut clusters = Clusters::<VALUES>::new(centres);
    ready();
    loop {
        for point in 0..points {
            clusters.add(&std::array::from_fn(|at| memory.get(point * VALUES + at) as f32));
        }
        clusters.end_pass();
    }
}
