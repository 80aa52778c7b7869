//! Breadth-first searches of a Kronecker graph, as Graph500 makes it: each edge chooses a quarter of the matrix again
//! and again, with unequal chances, and vertices are numbered at random. So a few vertices have most edges, and heat is
//! scattered within each table.
//!
//! Before: memory is empty. After: it has the graph, and searches go over it. Threads: the caller's.
//! Units: halves of words (4 bytes): a vertex, an index of an edge, a number of a search.
//! Promise: pure but for the memory; the same size makes the same graph.
//!
//! ```text
//! memory   first edge of each vertex, and the end | edges | queue | the last search that saw each vertex
//! ```

use std::sync::atomic::AtomicU64;

use crate::counted::Counted;
use crate::heat::random;

/// Least edges of a vertex, counted at both ends: Graph500 has 16 for each vertex.
const LEAST_EDGES: usize = 32;
/// Chances of the four quarters, in percent.
const QUARTERS: [usize; 4] = [57, 19, 19, 5];
/// A number of this many bits chooses two quarters at once.
const CHANCE_BITS: u32 = 12;

/// Where the tables of a graph are.
pub struct Graph {
    /// A power of two.
    vertices: usize,
    edges: usize,
}

/// Makes edges, both ends as numbers of vertices.
struct Edges {
    scale: u32,
    /// Two quarters, as two bits of each end, by a number of [`CHANCE_BITS`].
    choices: Vec<u8>,
    state: u64,
}

impl Edges {
    fn new(scale: u32) -> Self {
        let all = 1usize << CHANCE_BITS;
        let mut choices = Vec::with_capacity(all);
        let mut percents = 0;
        for (at, chance) in (0u8..16).map(|at| (at, QUARTERS[usize::from(at / 4)] * QUARTERS[usize::from(at % 4)])) {
            // A quarter's higher bit is of the first end, its lower bit of the second.
            let ends = (at >> 2 & 2) | (at >> 1 & 1) | (at & 4) << 1 | (at & 1) << 2;
            percents += chance;
            choices.resize(percents * all / 10_000, ends);
        }
        Self { scale, choices, state: 9 }
    }

    /// Returns the next edge.
    fn next(&mut self) -> (usize, usize) {
        let (mut low, mut high, mut bits, mut left) = (0usize, 0usize, 0u64, 0);
        for _ in 0..self.scale.div_ceil(2) {
            if left < CHANCE_BITS {
                (bits, left) = (random(&mut self.state), u64::BITS);
            }
            let ends = usize::from(self.choices[(bits & ((1 << CHANCE_BITS) - 1)) as usize]);
            (bits, left) = (bits >> CHANCE_BITS, left - CHANCE_BITS);
            (low, high) = (low << 2 | ends & 3, high << 2 | ends >> 2);
        }
        (self.number(low), self.number(high))
    }

    /// Numbers vertices anew: one number for each, without order.
    fn number(&self, vertex: usize) -> usize {
        let most = (1 << self.scale) - 1;
        let mixed = (vertex & most).wrapping_mul(0x9E37_79B1) & most;
        let mixed = (mixed ^ mixed >> (self.scale / 2).max(1)).wrapping_mul(0x85EB_CA6B) & most;
        mixed ^ mixed >> (self.scale / 2).max(1)
    }
}

impl Graph {
    fn sized(words: usize) -> Self {
        let halves = words * 2;
        let scale = (halves / (LEAST_EDGES + 3)).max(2).ilog2();
        let vertices = 1 << scale;
        // Each edge twice, and one more half for the end of the last vertex.
        Self { vertices, edges: (halves - 3 * vertices - 1) / 2 * 2 }
    }

    fn first_edge(&self) -> usize {
        self.vertices + 1
    }

    fn queue(&self) -> usize {
        self.first_edge() + self.edges
    }

    fn seen(&self) -> usize {
        self.queue() + self.vertices
    }

    /// Fills the memory with a graph.
    pub fn build<'a, W: Fn(usize) -> &'a AtomicU64>(memory: &Counted<'a, W>) -> Self {
        let this = Self::sized(memory.words);
        let scale = this.vertices.ilog2();
        (0..=this.vertices).for_each(|vertex| memory.put_half(vertex, 0));
        let mut edges = Edges::new(scale);
        for _ in 0..this.edges / 2 {
            let (one, other) = edges.next();
            for end in [one, other] {
                memory.put_half(end, memory.plain_half(end) + 1);
            }
        }
        // How many edges a vertex has becomes where they begin; the queue has where its next one is put.
        let mut sum = 0;
        for vertex in 0..this.vertices {
            let count = memory.plain_half(vertex);
            memory.put_half(vertex, sum);
            memory.put_half(this.queue() + vertex, sum);
            sum += count;
        }
        memory.put_half(this.vertices, sum);
        let mut edges = Edges::new(scale);
        for _ in 0..this.edges / 2 {
            let (one, other) = edges.next();
            for (from, to) in [(one, other), (other, one)] {
                let at = memory.plain_half(this.queue() + from);
                memory.put_half(this.first_edge() + at as usize, to as u32);
                memory.put_half(this.queue() + from, at + 1);
            }
        }
        (0..this.vertices).for_each(|vertex| memory.put_half(this.seen() + vertex, 0));
        this
    }

    /// Visits all vertices that can be reached from one. Returns how many. `search` is not zero and differs from that
    /// of the last search.
    pub fn search<'a, W: Fn(usize) -> &'a AtomicU64>(
        &self,
        memory: &Counted<'a, W>,
        start: usize,
        search: u32,
    ) -> usize {
        let start = start % self.vertices;
        let (queue, seen) = (self.queue(), self.seen());
        memory.set_half(seen + start, search);
        memory.set_half(queue, start as u32);
        let (mut first, mut last) = (0, 1);
        while first < last {
            let vertex = memory.half(queue + first) as usize;
            first += 1;
            for edge in memory.half(vertex)..memory.half(vertex + 1) {
                let end = memory.half(self.first_edge() + edge as usize);
                if memory.half(seen + end as usize) != search {
                    memory.set_half(seen + end as usize, search);
                    memory.set_half(queue + last, end);
                    last += 1;
                }
            }
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counted::tests::Plain;

    #[test]
    fn all_vertices_are_numbered_once_and_quarters_have_their_chances() {
        for scale in [2, 5, 16] {
            let edges = Edges::new(scale);
            let mut numbers: Vec<usize> = (0..1 << scale).map(|vertex| edges.number(vertex)).collect();
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(0..1 << scale), "scale {scale}");
        }
        let edges = Edges::new(4);
        assert_eq!(edges.choices.len(), 1 << CHANCE_BITS);
        // Neither end in the lower half, twice: 57 percent of 57 percent.
        let none = edges.choices.iter().filter(|ends| **ends == 0).count() as f64 / 4096.0;
        let first = edges.choices.iter().filter(|ends| *ends >> 1 & 1 == 1).count() as f64 / 4096.0;
        let second = edges.choices.iter().filter(|ends| *ends >> 3 & 1 == 1).count() as f64 / 4096.0;
        assert!((none - 0.3249).abs() < 0.001 && (first - 0.24).abs() < 0.001 && (second - 0.24).abs() < 0.001);
    }

    #[test]
    fn a_search_reads_each_edge_of_what_it_reaches_once_and_few_vertices_have_most_edges() {
        let plain = Plain::new(512);
        let memory = plain.counted();
        let graph = Graph::build(&memory);
        let all = memory.words;
        assert_eq!(plain.accesses(0..all), 0);
        let mut degrees: Vec<u32> =
            (0..graph.vertices).map(|at| memory.plain_half(at + 1) - memory.plain_half(at)).collect();
        degrees.sort_unstable_by(|a, b| b.cmp(a));
        assert_eq!(degrees.iter().sum::<u32>() as usize, graph.edges);
        let hubs: u32 = degrees[..graph.vertices / 10].iter().sum();
        assert!(f64::from(hubs) > 0.5 * graph.edges as f64, "{hubs} of {}", graph.edges);
        let hub = (0..graph.vertices).max_by_key(|at| memory.plain_half(at + 1) - memory.plain_half(*at));
        let reached = graph.search(&memory, hub.expect("a vertex"), 1);
        let with_edges = degrees.iter().filter(|degree| **degree > 0).count();
        assert!(reached > with_edges * 9 / 10, "{reached} of {with_edges}");
        let seen = |vertex: usize| memory.plain_half(graph.seen() + vertex) == 1;
        let edges_of = |vertex: usize| memory.plain_half(vertex)..memory.plain_half(vertex + 1);
        let reached_edges: usize = (0..graph.vertices).filter(|at| seen(*at)).map(|at| edges_of(at).len()).sum();
        assert!((0..graph.vertices).filter(|at| seen(*at)).count() == reached);
        // Two reads for each edge; for each vertex two reads of its edges' place, and a read and a write of the queue
        // and a write of the search.
        assert_eq!(plain.accesses(0..all), 2 * reached_edges as u64 + 5 * reached as u64);
    }
}
