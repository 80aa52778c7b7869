//! Breadth-first searches of a Kronecker graph, with the address of every access.
//!
//! Before: a seed and a size are given. After: each epoch has the accesses of each page, and all accesses in order.
//! The graph is made as Graph500 makes it (A 0.57, B 0.19, C 0.19, 16 edges a vertex, names shuffled) and is searched
//! from one vertex after the other. Memory is laid out as a program would: offsets of 8 bytes, edges of 8, vertex
//! records of 64, the queue. Units: offsets in bytes. Promise: an access to the same line of 64 bytes as the last
//! access to that array is a cache hit and does not count.

use ballast_base::{HUGE_SIZE, PAGE_SIZE};

use crate::stats::random;

const EDGES_PER_VERTEX: u64 = 16;
/// Bytes that a vertex needs: its offset, both ends of its edges, its record, its place in the queue.
const BYTES_PER_VERTEX: u64 = 8 + 2 * 8 * EDGES_PER_VERTEX + 64 + 8;

/// The arrays, in the order of their addresses.
#[derive(Clone, Copy)]
enum Array {
    Offsets,
    Edges,
    Records,
    Queue,
}

/// A search that can be stopped after any number of accesses.
pub(crate) struct Search {
    offsets: Vec<u32>,
    edges: Vec<u32>,
    /// The search in which each vertex was seen last.
    seen: Vec<u32>,
    queue: Vec<u32>,
    /// The vertex whose edges are followed, as a position in the queue, and its next edge.
    head: usize,
    edge: usize,
    searches: u32,
    seed: u64,
    starts: [u64; 4],
    bytes: u64,
    lines: [u64; 4],
}

impl Search {
    /// A search of the largest graph that fits into this much memory.
    pub(crate) fn new(memory: u64, mut seed: u64) -> Self {
        let scale = (memory / BYTES_PER_VERTEX).max(2).ilog2();
        let vertices = 1u64 << scale;
        let name = |vertex: u64| (vertex.wrapping_mul(0x9E37_79B1) ^ vertex >> (scale / 2 + 1)) & (vertices - 1);
        let mut pairs = Vec::with_capacity((vertices * EDGES_PER_VERTEX) as usize);
        for _ in 0..vertices * EDGES_PER_VERTEX {
            let (mut from, mut to) = (0, 0);
            for _ in 0..scale {
                let at = random(&mut seed) % 100;
                (from, to) = (from << 1 | u64::from(at >= 76), to << 1 | u64::from((57..76).contains(&at) || at >= 95));
            }
            pairs.push((name(from) as u32, name(to) as u32));
        }
        let mut offsets = vec![0u32; vertices as usize + 1];
        pairs.iter().flat_map(|(from, to)| [from, to]).for_each(|vertex| offsets[*vertex as usize + 1] += 1);
        (0..vertices as usize).for_each(|vertex| offsets[vertex + 1] += offsets[vertex]);
        let (mut next, mut edges) = (offsets.clone(), vec![0; 2 * pairs.len()]);
        for (from, to) in pairs.into_iter().flat_map(|(from, to)| [(from, to), (to, from)]) {
            edges[next[from as usize] as usize] = to;
            next[from as usize] += 1;
        }
        let sizes = [8 * (vertices + 1), 8 * edges.len() as u64, 64 * vertices, 8 * vertices];
        let mut bytes = 0;
        let starts = sizes.map(|size| {
            let start = bytes;
            bytes += size.next_multiple_of(PAGE_SIZE as u64);
            start
        });
        let seen = vec![0; vertices as usize];
        let bytes = bytes.next_multiple_of(HUGE_SIZE as u64);
        let lines = [u64::MAX; 4];
        Self { offsets, edges, seen, queue: Vec::new(), head: 0, edge: 0, searches: 0, seed, starts, bytes, lines }
    }

    /// The next `accesses`: their number for each page, and all of them.
    pub(crate) fn epoch(&mut self, accesses: u64) -> (Vec<f64>, Vec<u64>) {
        let mut pages = vec![0.0; (self.bytes / PAGE_SIZE as u64) as usize];
        let mut all = Vec::with_capacity(accesses as usize + 8);
        while (all.len() as u64) < accesses {
            self.step(&mut all);
        }
        all.iter().for_each(|offset| pages[(offset / PAGE_SIZE as u64) as usize] += 1.0);
        (pages, all)
    }

    fn access(&mut self, array: Array, offset: u64, all: &mut Vec<u64>) {
        let offset = self.starts[array as usize] + offset;
        if std::mem::replace(&mut self.lines[array as usize], offset / 64) != offset / 64 {
            all.push(offset);
        }
    }

    /// Follow one edge, or continue with the next vertex, or begin the next search.
    fn step(&mut self, all: &mut Vec<u64>) {
        let Some(&vertex) = self.queue.get(self.head) else {
            let start = (random(&mut self.seed) % self.seen.len() as u64) as u32;
            self.searches += 1;
            self.queue.clear();
            (self.head, self.edge) = (0, self.offsets[start as usize] as usize);
            self.reach(start, all);
            return;
        };
        if self.edge < self.offsets[vertex as usize + 1] as usize {
            let to = self.edges[self.edge];
            self.access(Array::Edges, 8 * self.edge as u64, all);
            self.access(Array::Records, 64 * u64::from(to), all);
            self.edge += 1;
            if self.seen[to as usize] != self.searches {
                self.reach(to, all);
            }
            return;
        }
        self.head += 1;
        if let Some(&next) = self.queue.get(self.head) {
            self.access(Array::Queue, 8 * self.head as u64, all);
            self.access(Array::Offsets, 8 * u64::from(next), all);
            self.edge = self.offsets[next as usize] as usize;
        }
    }

    fn reach(&mut self, vertex: u32, all: &mut Vec<u64>) {
        self.seen[vertex as usize] = self.searches;
        self.access(Array::Queue, 8 * self.queue.len() as u64, all);
        self.queue.push(vertex);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_reaches_all_that_can_be_reached_and_stays_in_its_memory() {
        let mut search = Search::new(1 << 20, 3);
        let (pages, all) = search.epoch(300_000);
        assert!(all.len() >= 300_000 && all.iter().all(|offset| *offset < search.bytes));
        assert_eq!(pages.iter().sum::<f64>(), all.len() as f64);
        assert!(search.searches > 1, "it goes on");
        // Nearly every vertex with an edge is in one connected component.
        let linked = search.offsets.windows(2).filter(|pair| pair[0] < pair[1]).count();
        let reached = search.seen.iter().filter(|seen| **seen > 0).count();
        assert!(reached * 10 > linked * 9, "{reached} of {linked}");
    }

    #[test]
    fn the_records_of_few_vertices_are_most_of_what_is_accessed() {
        let mut search = Search::new(4 << 20, 3);
        let (pages, _) = search.epoch(1_000_000);
        let mut sorted = pages.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let tenth: f64 = sorted[..sorted.len() / 10].iter().sum();
        assert!(tenth > 0.3 * pages.iter().sum::<f64>(), "{tenth}");
    }
}
