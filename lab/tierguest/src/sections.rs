//! Lookups of cross sections, as XSBench makes them with its small reactor and a unionised grid: a random energy, a
//! binary search for it, then for each nuclide of a random material its index there, and two rows of its table.
//!
//! Before: memory is empty. After: it has the tables, and lookups read them. Threads: the caller's. Units: words, and
//! halves of words for indices. Promise: pure but for the memory; the same size makes the same tables.
//!
//! ```text
//! memory   for each energy the index of each nuclide | energies | for each nuclide rows of 6 values
//! ```
//!
//! XSBench makes the tables of the nuclides first. Here they are last, so that the hot part is in slow memory at first,
//! as that of the other kinds. Energies are evenly spaced, and the nuclides are numbered in another order.

use std::ops::Range;
use std::sync::atomic::AtomicU64;

use crate::counted::Counted;
use crate::heat::random;

const NUCLIDES: usize = 68;
/// Words of a row: energy, and five cross sections.
const ROW: usize = 6;
/// Materials: chance in thousandths, and nuclides. The nuclides of water are in most of them.
static MATERIALS: [(u64, [Range<usize>; 2]); 12] = [
    (140, [0..34, 0..0]),
    (52, [63..68, 0..0]),
    (275, [34..38, 0..0]),
    (134, [34..38, 0..0]),
    (154, [36..63, 0..0]),
    (64, [34..55, 0..0]),
    (66, [34..55, 0..0]),
    (55, [34..55, 0..0]),
    (8, [34..55, 0..0]),
    (15, [34..55, 0..0]),
    (25, [34..38, 63..68]),
    (13, [34..38, 63..68]),
];

/// Returns the material of a number below the sum of all chances.
fn material(mut number: u64) -> &'static [Range<usize>; 2] {
    for (chance, nuclides) in &MATERIALS {
        match number.checked_sub(*chance) {
            Some(left) => number = left,
            None => return nuclides,
        }
    }
    &MATERIALS[0].1
}

fn chances() -> u64 {
    MATERIALS.iter().map(|(chance, _)| chance).sum()
}

/// Where the tables are.
pub struct Sections {
    /// Rows of a nuclide's table.
    rows: usize,
    chances: u64,
}

impl Sections {
    /// Energies of all nuclides.
    fn energies(&self) -> usize {
        self.rows * NUCLIDES
    }

    /// The word of the first energy.
    fn first_energy(&self) -> usize {
        self.energies() * NUCLIDES / 2
    }

    /// The word of the first table.
    fn first_table(&self) -> usize {
        self.first_energy() + self.energies()
    }

    /// Fills the memory with tables.
    pub fn build<'a, W: Fn(usize) -> &'a AtomicU64>(memory: &Counted<'a, W>) -> Self {
        let this = Self { rows: memory.words / (NUCLIDES * (NUCLIDES / 2 + 1 + ROW)), chances: chances() };
        for energy in 0..this.energies() {
            // Of evenly spaced energies each nuclide has one in turn.
            let index = (energy / NUCLIDES).min(this.rows.saturating_sub(2)) as u64;
            let from = energy * NUCLIDES / 2;
            (from..from + NUCLIDES / 2).for_each(|word| memory.put(word, index << 32 | index));
            memory.put(this.first_energy() + energy, energy as u64);
        }
        let mut state = 3;
        let tables = this.first_table()..this.first_table() + this.energies() * ROW;
        tables.for_each(|word| memory.put(word, random(&mut state)));
        this
    }

    /// Looks up the cross section of a random energy and material. Returns the sum of what it has read of tables.
    pub fn look_up<'a, W: Fn(usize) -> &'a AtomicU64>(&self, memory: &Counted<'a, W>, state: &mut u64) -> u64 {
        let wanted = random(state) % self.energies() as u64;
        let material = material(random(state) % self.chances);
        let (mut low, mut high) = (0, self.energies());
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if memory.get(self.first_energy() + middle) <= wanted { low = middle } else { high = middle }
        }
        let mut sum = 0u64;
        for nuclide in material.iter().cloned().flatten() {
            let row = memory.half(low * NUCLIDES + nuclide) as usize;
            let first = self.first_table() + (nuclide * self.rows + row) * ROW;
            sum = (first..first + 2 * ROW).fold(sum, |sum, word| sum.wrapping_add(memory.get(word)));
        }
        sum
    }
}
