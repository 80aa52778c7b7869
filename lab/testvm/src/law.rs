//! The arithmetic of a guest: the contents of memory, and the cells that operations take.
//!
//! Before: a worker has its [`Params`]. After: `guest` and `programs` have contents of cells, cells of operations,
//! hashes, random numbers and buckets. Threads: none. Units: as in `guest`, the parent module.
//! Promise: every function is pure, uses only `core` and cannot panic, also in a KVM vCPU.

use super::{KIND_HOTSET, KIND_SEQUENTIAL, KIND_STORE, KIND_ZIPF, Params, SAMPLES};

/// 2^64 divided by the golden ratio, odd.
pub const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A bijective hash in which every input bit reaches every output bit.
#[inline]
pub const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x = (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^ (x >> 32)
}

/// The next number of a random sequence.
#[inline]
pub fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(GOLDEN);
    mix(*state)
}

/// `random` scaled to `0..bound`.
#[inline]
pub const fn below(random: u64, bound: u64) -> u64 {
    ((random as u128 * bound as u128) >> 64) as u64
}

/// The sum of the four 16-bit quarters of a word, an 18-bit number.
#[inline]
const fn quarters(word: u64) -> u64 {
    (word & 0xFFFF) + (word >> 16 & 0xFFFF) + (word >> 32 & 0xFFFF) + (word >> 48)
}

/// Returns the cell, below `cells`, that operation number `op` of a store takes in one of its three patterns.
#[inline]
const fn of_store(pattern: u64, op: u64, random: u64, cells: u64) -> u64 {
    match pattern {
        // A bell curve: the sum of four 16-bit numbers. Its standard deviation is a seventh of the cells.
        0 => below(quarters(random) << 46, cells),
        2 if cells > 0 => op % cells,
        _ => below(random, cells),
    }
}

/// Returns the histogram bucket of a value. Buckets are exact below 8, then there are eight per power of two.
#[inline]
pub const fn bucket(value: u64) -> u64 {
    if value < 8 {
        return value;
    }
    let exponent = 63 - value.leading_zeros() as u64;
    (exponent - 2) * 8 + ((value >> (exponent - 3)) & 7)
}

/// The rule for all words of one version of one cell.
#[derive(Clone, Copy, Debug)]
pub struct Contents {
    key: u64,
    zero: bool,
    half: bool,
}

impl Params {
    /// Returns the contents of `cell` (counted from the start of RAM) at `version`.
    #[inline]
    pub fn contents(&self, cell: u64, version: u32) -> Contents {
        let key = mix(self.content_seed ^ mix((cell << 31) ^ version as u64));
        Contents { key, zero: (mix(key ^ GOLDEN) >> 32) < self.zero_below, half: self.half != 0 }
    }

    /// Returns the number of used words of `cell` (counted from the start of RAM).
    #[inline]
    pub fn words_of(&self, cell: u64) -> u64 {
        if self.min_words == 0 {
            return self.cell_words;
        }
        let spread = self.cell_words.wrapping_sub(self.min_words).wrapping_add(1);
        self.min_words.wrapping_add(below(mix(cell ^ self.content_seed.rotate_left(17)), spread))
    }

    /// Returns the cell (counted from the worker's first) that operation number `op` takes, and whether it writes.
    /// `weight(i)` is entry `i` of the worker's table.
    #[inline]
    pub fn pick(&self, random: &mut u64, op: u64, weight: impl Fn(u64) -> u64) -> (u64, bool) {
        let choice = next_random(random);
        let place = next_random(random);
        let write = (choice >> 32) < self.write_below;
        let rank = match self.kind {
            KIND_SEQUENTIAL => op % self.cells.max(1),
            KIND_HOTSET if (choice & 0xFFFF_FFFF) < self.hot_below => below(place, self.hot_cells),
            KIND_HOTSET => {
                let rank = self.hot_cells.wrapping_add(below(place, self.cells.wrapping_sub(self.hot_cells)));
                rank % self.cells.max(1)
            }
            KIND_ZIPF => {
                // The first rank whose cumulative weight exceeds `place`.
                let (mut low, mut high) = (0, self.cells.wrapping_sub(1));
                while low < high {
                    let middle = low.wrapping_add(high) / 2;
                    if weight(middle) > place { high = middle } else { low = middle.wrapping_add(1) }
                }
                low
            }
            KIND_STORE => of_store(op / self.move_at.max(1) % 3, op, place, self.cells),
            _ => below(place, self.cells),
        };
        (self.place(rank), write)
    }

    /// Returns the cell (counted from the worker's first) of this rank.
    #[inline]
    pub fn place(&self, rank: u64) -> u64 {
        rank.wrapping_mul(self.stride) % self.cells.max(1)
    }
}

impl Contents {
    /// Returns word number `index` of the cell.
    #[inline]
    pub fn word(&self, index: u64) -> u64 {
        if self.zero {
            0
        } else if self.half && index & 8 != 0 {
            self.key
        } else {
            mix(self.key.wrapping_add(index.wrapping_mul(GOLDEN)))
        }
    }
}

/// Returns the word number of sample `i` in a cell of `words` words.
#[inline]
pub const fn sample(i: u64, words: u64) -> u64 {
    i.wrapping_mul(words.wrapping_sub(1)) / (SAMPLES - 1)
}
