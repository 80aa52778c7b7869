//! Workloads that are programs, compiled twice like the parent module: a graph search, a matrix product, a table scan.
//!
//! Before: `guest` has a job with a program. After: the program has run the same phases: fill, operations, verify.
//! Threads: one worker each, on its own share of RAM. Units: *words* of 8 bytes, counted from the start of the share;
//! *slots* are version words in private memory.
//! Promise: control flow depends on seeds and versions, never on the contents of guest RAM, so wrong data is reported
//! and has no other effect. Every word that is read is compared with its expected value, which needs no table except
//! `weights`. Nothing outside `core` is used, and nothing can panic.
//!
//! ```text
//! graph   | state, a word a vertex | offsets | edges ....................................... |
//! matrix  | A (n x n, by rows)            | B                       | C                      |
//! scan    | hash table | table .............................................. recent quarter |
//! ```

use super::{KIND_GRAPH, KIND_MATRIX, Params, below, mix, next_random};

/// Rows and columns of a tile.
pub const TILE: u64 = 64;
/// Words of a slot of the hash table.
const SLOT: u64 = 8;
/// Words of a page of the table.
const PAGE: u64 = 512;
/// A query adds 1/N of the rows, of 8 words each, to groups.
const SELECTED: u64 = 8;
/// Cell number of the first hash-table slot. It is beyond the table's cells, so their contents differ.
const SLOT_CELLS: u64 = 1 << 32;

/// The memory that a program runs on.
pub trait Memory {
    /// Read a word, and compare it with `expected`.
    fn read(&mut self, word: u64, expected: u64);
    /// Write a word.
    fn write(&mut self, word: u64, value: u64);
    /// Returns the version in a slot.
    fn version(&mut self, slot: u64) -> u32;
    /// Set the version in a slot.
    fn set_version(&mut self, slot: u64, version: u32);
    /// Returns an entry of the table that `Spec::weights` made for this kind of workload.
    fn weight(&mut self, index: u64) -> u64;
}

/// A program and its state.
pub enum Program {
    /// See [`Graph`].
    Graph(Graph),
    /// See [`Matrix`].
    Matrix(Matrix),
    /// See [`Scan`].
    Scan(Scan),
}

impl Program {
    /// Returns the program of this job, at its start.
    pub fn new(params: &Params) -> Self {
        match params.kind {
            KIND_GRAPH => Self::Graph(Graph::new(params)),
            KIND_MATRIX => Self::Matrix(Matrix::new(params)),
            _ => Self::Scan(Scan::new(params)),
        }
    }

    /// Write all words of the program, at version 0.
    #[inline]
    pub fn fill<M: Memory>(&self, memory: &mut M, params: &Params) {
        match self {
            Self::Graph(graph) => graph.each(memory, &mut |memory, word, value| memory.write(word, value)),
            Self::Matrix(matrix) => matrix.each(memory, &mut |memory, word, value| memory.write(word, value)),
            Self::Scan(scan) => scan.each(memory, params, &mut |memory, word, value| memory.write(word, value)),
        }
    }

    /// Do one operation.
    #[inline]
    pub fn step<M: Memory>(&mut self, memory: &mut M, params: &Params) {
        match self {
            Self::Graph(graph) => graph.step(memory),
            Self::Matrix(matrix) => matrix.step(memory),
            Self::Scan(scan) => scan.step(memory, params),
        }
    }

    /// Compare all words of the program.
    #[inline]
    pub fn verify<M: Memory>(&self, memory: &mut M, params: &Params) {
        match self {
            Self::Graph(graph) => graph.each(memory, &mut |memory, word, value| memory.read(word, value)),
            Self::Matrix(matrix) => matrix.each(memory, &mut |memory, word, value| memory.read(word, value)),
            Self::Scan(scan) => scan.each(memory, params, &mut |memory, word, value| memory.read(word, value)),
        }
    }
}

/// Breadth-first searches and shortest paths in turns, each from a random root. A search goes by rounds over the whole
/// graph: a round follows the edges of the vertices that the last round reached. An operation follows one edge: it
/// reads the edge, in sequence, and the state of the vertex at its end, at random.
///
/// Degrees and ends of edges are skewed as in the R-MAT graph of graph500 (a bit of an end is set with probability
/// 1/4), but independent of each other. Vertex numbers are scattered. Each has 16 to 32 edges, as many as fit.
pub struct Graph {
    seed: u64,
    /// The logarithm to base 2 of the number of vertices.
    scale: u32,
    room: u64,
    random: u64,
    search: u32,
    round: u32,
    /// The next vertex of this round.
    at: u64,
    /// The remaining edges of the current vertex, and the vertex's distance from the root.
    edge: u64,
    edges_end: u64,
    distance: u32,
    reached: bool,
}

/// A vertex's version has the search, the round and the distance in which it was last reached.
const SEARCHES: u32 = 1 << 11;
const ROUNDS: u32 = 255;
const FARTHEST: u32 = (1 << 12) - 1;

const fn reached(search: u32, round: u32, distance: u32) -> u32 {
    (search & (SEARCHES - 1)) << 20 | round << 12 | distance
}

impl Graph {
    /// Returns the state before the first search of this job.
    pub fn new(params: &Params) -> Self {
        let words = params.cells.wrapping_mul(params.cell_words);
        let scale = (words / 18).max(2).ilog2();
        let room = words.wrapping_sub(2 << scale).wrapping_sub(1);
        let (at, round, reached) = (1 << scale, 0, false);
        let (edge, edges_end, distance, search) = (0, 0, 0, 0);
        let (seed, random) = (params.content_seed, params.pick_seed);
        Self { seed, scale, room, random, search, round, at, edge, edges_end, distance, reached }
    }

    /// Returns the number of vertices.
    pub const fn vertices(&self) -> u64 {
        1 << self.scale
    }

    /// Returns the number of edges of a vertex. The offset of a vertex is the sum of the degrees before it, and the
    /// last offset is the sum of all degrees.
    pub const fn degree(&self, vertex: u64) -> u64 {
        // The share is 3 to the power of the clear bits, divided by 4 to the power of all bits.
        let mut share = 1u128;
        let mut clear = self.scale.wrapping_sub(self.scatter(vertex, INVERSE).count_ones());
        while clear > 0 {
            share = share.wrapping_mul(3);
            clear -= 1;
        }
        ((self.room as u128).wrapping_mul(share) >> self.scale.wrapping_mul(2)) as u64
    }

    const fn scatter(&self, vertex: u64, by: u64) -> u64 {
        vertex.wrapping_mul(by) & ((1 << self.scale) - 1)
    }

    #[inline]
    fn end(&self, edge: u64) -> u64 {
        let bits = mix(edge ^ self.seed);
        self.scatter(bits & mix(bits ^ SPREAD), SPREAD)
    }

    #[inline]
    fn state(&self, vertex: u64, version: u32) -> u64 {
        mix(self.seed.rotate_left(7) ^ mix((vertex << 31) ^ version as u64))
    }

    fn offset_at(&self, vertex: u64) -> u64 {
        self.vertices().wrapping_add(vertex)
    }

    fn edge_at(&self, edge: u64) -> u64 {
        self.vertices().wrapping_mul(2).wrapping_add(1).wrapping_add(edge)
    }

    fn each<M: Memory>(&self, memory: &mut M, each: &mut impl FnMut(&mut M, u64, u64)) {
        let vertices = self.vertices();
        for vertex in 0..vertices {
            let version = memory.version(vertex);
            each(memory, vertex, self.state(vertex, version));
        }
        for vertex in 0..vertices.wrapping_add(1) {
            let offset = memory.weight(vertex);
            each(memory, self.offset_at(vertex), offset);
        }
        for edge in 0..memory.weight(vertices) {
            each(memory, self.edge_at(edge), self.end(edge));
        }
    }

    fn step<M: Memory>(&mut self, memory: &mut M) {
        while self.edge >= self.edges_end {
            if self.at >= self.vertices() {
                self.next_round(memory);
            }
            let vertex = self.at;
            self.at = vertex.wrapping_add(1);
            let version = memory.version(vertex);
            memory.read(vertex, self.state(vertex, version));
            if version >> 12 == reached(self.search, self.round, 0) >> 12 {
                (self.edge, self.edges_end) = (memory.weight(vertex), memory.weight(vertex.wrapping_add(1)));
                memory.read(self.offset_at(vertex), self.edge);
                memory.read(self.offset_at(vertex.wrapping_add(1)), self.edges_end);
                self.distance = version & FARTHEST;
            }
        }
        let end = self.end(self.edge);
        memory.read(self.edge_at(self.edge), end);
        // Every second search finds shortest paths, with edges of length 1 to 16.
        let length = if self.search & 1 == 0 { 1 } else { (mix(self.edge) >> 60) as u32 + 1 };
        self.edge = self.edge.wrapping_add(1);
        let version = memory.version(end);
        memory.read(end, self.state(end, version));
        let distance = self.distance.wrapping_add(length).min(FARTHEST);
        let fresh = version >> 20 != self.search & (SEARCHES - 1);
        if fresh || distance < version & FARTHEST {
            let version = reached(self.search, self.round.wrapping_add(1), distance);
            memory.write(end, self.state(end, version));
            memory.set_version(end, version);
            self.reached = true;
        }
    }

    #[cold]
    fn next_round<M: Memory>(&mut self, memory: &mut M) {
        self.at = 0;
        self.round = self.round.wrapping_add(1);
        if !core::mem::replace(&mut self.reached, false) || self.round >= ROUNDS {
            (self.search, self.round) = (self.search.wrapping_add(1), 0);
            let mut root = below(next_random(&mut self.random), self.vertices());
            // The root must have edges. The vertex that is scattered to 0 has the most, so the loop ends.
            while self.degree(root) == 0 {
                root = root.wrapping_add(1) & (self.vertices() - 1);
            }
            let before = memory.version(root);
            memory.read(root, self.state(root, before));
            let version = reached(self.search, 0, 0);
            memory.write(root, self.state(root, version));
            memory.set_version(root, version);
        }
    }
}

const SPREAD: u64 = super::GOLDEN;
/// The inverse of `SPREAD` modulo 2^64, and so modulo any smaller power of two, by Newton's method.
const INVERSE: u64 = {
    let (mut inverse, mut steps) = (SPREAD, 0);
    while steps < 6 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(SPREAD.wrapping_mul(inverse)));
        steps += 1;
    }
    inverse
};

/// `C += A B`, repeated, with wrapping integers, in tiles of 64 x 64. Rows of tiles are the outermost loop: each round
/// of it uses one panel of A and one of C, and reads all of B. An operation adds one row of a tile of A, times a tile
/// of B, to a piece of a row of C.
///
/// `A[i][k] = u(i) y(k)` and `B[k][j] = p(k) q(j)`, so `C[i][j] = u(i) q(j) S`, where `S` is the sum of `y p` over all
/// `k` added so far. `weights` has this sum for each number of tiles.
pub struct Matrix {
    seed: u64,
    tiles: u64,
    /// Tile of C's row, tile of C's column, tile of the sum, and row in the tile.
    place: [u64; 4],
}

impl Matrix {
    /// Returns the state at the first tile of this job.
    pub fn new(params: &Params) -> Self {
        let words = params.cells.wrapping_mul(params.cell_words);
        let tiles = (words / 3).isqrt() / TILE;
        Self { seed: params.content_seed, tiles: tiles.max(1), place: [0; 4] }
    }

    /// Returns the number of tiles in a row.
    pub const fn tiles(&self) -> u64 {
        self.tiles
    }

    const fn n(&self) -> u64 {
        self.tiles.wrapping_mul(TILE)
    }

    fn u(&self, i: u64) -> u64 {
        mix(self.seed ^ i) | 1
    }

    fn q(&self, j: u64) -> u64 {
        mix(self.seed.rotate_left(21) ^ j) | 1
    }

    const fn y(k: u64) -> u64 {
        (2 * k + 1).wrapping_mul(SPREAD)
    }

    const fn p(k: u64) -> u64 {
        (2 * k + 1).wrapping_mul(INVERSE)
    }

    /// Returns the share of one tile in the sum.
    pub const fn part(tile: u64) -> u64 {
        let (mut sum, mut k) = (0u64, tile.wrapping_mul(TILE));
        let end = k.wrapping_add(TILE);
        while k < end {
            sum = sum.wrapping_add(Self::y(k).wrapping_mul(Self::p(k)));
            k += 1;
        }
        sum
    }

    /// Returns the word of a row and column of matrix 0 (A), 1 (B) or 2 (C).
    fn at(&self, matrix: u64, row: u64, column: u64) -> u64 {
        let n = self.n();
        matrix.wrapping_mul(n).wrapping_add(row).wrapping_mul(n).wrapping_add(column)
    }

    /// Returns the sum after `version` tiles.
    fn sum<M: Memory>(&self, memory: &mut M, version: u32) -> u64 {
        let (times, tiles) = (version as u64 / self.tiles.max(1), version as u64 % self.tiles.max(1));
        memory.weight(self.tiles).wrapping_mul(times).wrapping_add(memory.weight(tiles))
    }

    fn each<M: Memory>(&self, memory: &mut M, each: &mut impl FnMut(&mut M, u64, u64)) {
        let n = self.n();
        for i in 0..n {
            let u = self.u(i);
            for k in 0..n {
                each(memory, self.at(0, i, k), u.wrapping_mul(Self::y(k)));
            }
        }
        for k in 0..n {
            for j in 0..n {
                each(memory, self.at(1, k, j), Self::p(k).wrapping_mul(self.q(j)));
            }
        }
        for i in 0..n {
            for tile in 0..self.tiles {
                let version = memory.version(i.wrapping_mul(self.tiles).wrapping_add(tile));
                let sum = self.sum(memory, version).wrapping_mul(self.u(i));
                for j in tile.wrapping_mul(TILE)..tile.wrapping_add(1).wrapping_mul(TILE) {
                    each(memory, self.at(2, i, j), sum.wrapping_mul(self.q(j)));
                }
            }
        }
    }

    fn step<M: Memory>(&mut self, memory: &mut M) {
        let [down, across, along, row] = self.place;
        let i = down.wrapping_mul(TILE).wrapping_add(row);
        let (first_j, first_k) = (across.wrapping_mul(TILE), along.wrapping_mul(TILE));
        let slot = i.wrapping_mul(self.tiles).wrapping_add(across);
        let version = memory.version(slot);
        let u = self.u(i);
        let sum = self.sum(memory, version).wrapping_mul(u);
        for j in first_j..first_j.wrapping_add(TILE) {
            let q = self.q(j);
            let mut more = 0u64;
            for k in first_k..first_k.wrapping_add(TILE) {
                let b = Self::p(k).wrapping_mul(q);
                memory.read(self.at(1, k, j), b);
                let a = u.wrapping_mul(Self::y(k));
                if j == first_j {
                    // Later columns do not read it: a real program would keep it in registers.
                    memory.read(self.at(0, i, k), a);
                }
                more = more.wrapping_add(a.wrapping_mul(b));
            }
            let c = sum.wrapping_mul(q);
            memory.read(self.at(2, i, j), c);
            memory.write(self.at(2, i, j), c.wrapping_add(more));
        }
        memory.set_version(slot, version.wrapping_add(1));
        self.next();
    }

    fn next(&mut self) {
        let [down, across, along, row] = &mut self.place;
        let mut carry = true;
        for (digit, base) in [(row, TILE), (along, self.tiles), (across, self.tiles), (down, self.tiles)] {
            if carry {
                *digit = digit.wrapping_add(1);
                carry = *digit >= base;
                if carry {
                    *digit = 0;
                }
            }
        }
    }
}

/// Queries over a table. Every fourth query reads all of it, the others its last quarter, which has the recent rows. An
/// operation reads all words of a page of the table, and adds one row in eight to its group in a hash table, whose size
/// is a sixteenth of RAM.
pub struct Scan {
    slots: u64,
    pages: u64,
    query: u64,
    at: u64,
    random: u64,
}

impl Scan {
    /// Returns the state before the first query of this job.
    pub fn new(params: &Params) -> Self {
        let words = params.cells.wrapping_mul(params.cell_words);
        let slots = words / 16 / SLOT;
        let pages = (words.wrapping_sub(slots.wrapping_mul(SLOT)) / PAGE).max(1);
        Self { slots: slots.max(1), pages, query: 0, at: 0, random: params.pick_seed }
    }

    fn page_at(&self, page: u64) -> u64 {
        self.slots.wrapping_mul(SLOT).wrapping_add(page.wrapping_mul(PAGE))
    }

    fn each<M: Memory>(&self, memory: &mut M, params: &Params, each: &mut impl FnMut(&mut M, u64, u64)) {
        for slot in 0..self.slots {
            let version = memory.version(slot);
            let contents = params.contents(SLOT_CELLS.wrapping_add(slot), version);
            for word in 0..SLOT {
                each(memory, slot.wrapping_mul(SLOT).wrapping_add(word), contents.word(word));
            }
        }
        for page in 0..self.pages {
            let contents = params.contents(page, 0);
            for word in 0..PAGE {
                each(memory, self.page_at(page).wrapping_add(word), contents.word(word));
            }
        }
    }

    fn step<M: Memory>(&mut self, memory: &mut M, params: &Params) {
        let contents = params.contents(self.at, 0);
        for word in 0..PAGE {
            memory.read(self.page_at(self.at).wrapping_add(word), contents.word(word));
            if word % (SELECTED * SLOT) == 0 {
                self.add(memory, params);
            }
        }
        self.at = self.at.wrapping_add(1);
        if self.at >= self.pages {
            self.query = self.query.wrapping_add(1);
            self.at = if self.query.is_multiple_of(4) { 0 } else { self.pages.wrapping_sub(self.pages.div_ceil(4)) };
        }
    }

    fn add<M: Memory>(&mut self, memory: &mut M, params: &Params) {
        let slot = below(next_random(&mut self.random), self.slots);
        let version = memory.version(slot);
        let after = version.wrapping_add(1);
        let cell = SLOT_CELLS.wrapping_add(slot);
        let (old, new) = (params.contents(cell, version), params.contents(cell, after));
        for word in 0..SLOT {
            let at = slot.wrapping_mul(SLOT).wrapping_add(word);
            memory.read(at, old.word(word));
            memory.write(at, new.word(word));
        }
        memory.set_version(slot, after);
    }
}
