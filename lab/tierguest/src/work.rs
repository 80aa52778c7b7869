//! Programs whose heat nobody sets: they count their own accesses, and so know how often each page was accessed.
//!
//! Before: [`crate::gups`] has touched the memory once, in the order of its addresses. After: the program works until
//! its process ends. Threads: the caller's. Units: words of 8 bytes.
//! Promise: no access is left out ([`crate::counted`]).
//!
//! | Kind | Layout, in the order in which memory was touched first | Heat |
//! |---|---|---|
//! | `bfs` ([`crate::graph`]) | first edge of each vertex, edges, queue, what was seen | the last has about half |
//! | `xs` ([`crate::sections`]) | indices by energy, energies, tables of nuclides | the last seventh has most |
//! | `kmeans` | points, centres | points in order, again and again; a page of centres has a ninth |

use std::sync::atomic::AtomicU64;

use crate::clusters::Clusters;
use crate::counted::{Counted, PAGE_WORDS};
use crate::heat::{Kind, random};
use crate::{graph, sections};

/// Words of a point of k-means, and points that are assigned before the centres are read again.
const VALUES: usize = 8;
const POINTS: usize = 64;

/// Works for ever; `ready` is called once, when all of its memory is written. Of a kind without such work it returns.
pub fn run<'a, W: Fn(usize) -> &'a AtomicU64>(kind: Kind, memory: &Counted<'a, W>, ready: &dyn Fn()) {
    match kind {
        Kind::Bfs => {
            let graph = graph::Graph::build(memory);
            ready();
            let mut state = 5;
            for search in 1.. {
                graph.search(memory, random(&mut state) as usize, search);
            }
        }
        Kind::Xs => {
            let sections = sections::Sections::build(memory);
            ready();
            let mut state = 5;
            loop {
                sections.look_up(memory, &mut state);
            }
        }
        Kind::Kmeans => {
            let mut means = Means::build(memory);
            ready();
            loop {
                means.pass(memory);
            }
        }
        Kind::Contiguous | Kind::Scattered | Kind::Moving | Kind::Bloated => {}
    }
}

/// k-means: each pass assigns each point to its nearest centre.
struct Means {
    points: usize,
    clusters: Clusters<VALUES>,
}

impl Means {
    fn build<'a, W: Fn(usize) -> &'a AtomicU64>(memory: &Counted<'a, W>) -> Self {
        // The last page has the centres.
        let points = (memory.words - PAGE_WORDS) / (POINTS * VALUES) * POINTS;
        let mut state = 5;
        let mut value = || (random(&mut state) >> 40) as i32;
        for word in 0..points * VALUES {
            memory.put(word, u64::from(value().cast_unsigned()));
        }
        let this = Self { points, clusters: Clusters::new(std::array::from_fn(|_| std::array::from_fn(|_| value()))) };
        this.centres().for_each(|(at, value)| memory.put(memory.words - PAGE_WORDS + at, value));
        this
    }

    /// The values of all centres, each with its place in their page.
    fn centres(&self) -> impl Iterator<Item = (usize, u64)> {
        self.clusters.centres().iter().flatten().map(|value| u64::from(value.cast_unsigned())).enumerate()
    }

    fn pass<'a, W: Fn(usize) -> &'a AtomicU64>(&mut self, memory: &Counted<'a, W>) {
        let value = |word: usize| (memory.get(word) as u32).cast_signed();
        let last_page = memory.words - PAGE_WORDS;
        for first in (0..self.points).step_by(POINTS) {
            self.clusters.set_centres(std::array::from_fn(|centre| {
                std::array::from_fn(|at| value(last_page + centre * VALUES + at))
            }));
            for point in first..first + POINTS {
                self.clusters.add(&std::array::from_fn(|at| value(point * VALUES + at)));
            }
        }
        self.clusters.end_pass();
        self.centres().for_each(|(at, value)| {
            memory.set(last_page + at, value);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clusters::CLUSTERS;
    use crate::counted::tests::Plain;

    #[test]
    fn a_pass_of_k_means_reads_each_point_once_and_the_centres_for_each_64_points() {
        let plain = Plain::new(9);
        let memory = plain.counted();
        let mut means = Means::build(&memory);
        assert_eq!(means.points, 8 * 64);
        assert_eq!(plain.accesses(0..9 * 512), 0, "its beginning does not count");
        means.pass(&memory);
        assert_eq!(plain.accesses(0..8 * 512), 8 * 512);
        let centres = (CLUSTERS * VALUES) as u64;
        assert_eq!(plain.accesses(8 * 512..9 * 512), 8 * centres + centres);
        let moved: Vec<u64> = means.centres().map(|(_, value)| value).collect();
        assert!((0..64).all(|at| memory.get(8 * 512 + at) == moved[at]), "the next pass has the moved centres");
    }
}
