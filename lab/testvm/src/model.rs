//! The model: it computes the outcome of a workload without guest RAM.
//!
//! Before: `workload` has a plan. After: `vm` compares the workers' results with this.
//! Threads: one per worker, so the model of a long run takes no longer than the run.
//! Promise: nothing here reads guest RAM or a worker's version words. Contents and choices come from the formulas of
//! `law`. The order of reads is implemented a second time on purpose, except for programs.

use std::collections::HashMap;
use std::ops::Range;

use ballast_base::PageIdx;

use crate::guest::programs::{Memory, Program};
use crate::guest::{self, Params};
use crate::pages::PageSet;
use crate::workload::{Spec, SpecError};

/// The outcome by the model.
#[derive(Debug)]
pub struct Expected {
    /// All workers' checksums, combined.
    pub checksum: u64,
    /// Cells that the operations touched.
    pub touched_cells: u64,
    /// Pages that the operations touched.
    pub touched: PageSet,
}

/// Combine the checksums of all workers.
pub fn combine(checksums: impl IntoIterator<Item = u64>) -> u64 {
    checksums.into_iter().fold(0, guest::fold)
}

impl Spec {
    /// Returns the pages that are hot by construction, before the hot set moves or after it (`moved`, for `phase`
    /// only). These are all pages in use for `sequential`, `uniform`, `store`, `stages` and the programs, and none for
    /// `idle`. For `zipf`, they are the pages of the keys that together take `hot_weight` of the accesses.
    pub fn hot_pages(&self, moved: bool) -> Result<PageSet, SpecError> {
        let mut pages = PageSet::new(self.ram);
        for params in self.plan()? {
            if params.kind >= guest::KIND_GRAPH {
                pages.union(&filled(self, &params));
                continue;
            }
            let ranks = match params.kind {
                guest::KIND_IDLE => 0,
                guest::KIND_HOTSET => params.hot_cells,
                guest::KIND_ZIPF => {
                    let limit = (self.hot_weight * 18_446_744_073_709_551_616.0) as u64;
                    (self.weights(&params).partition_point(|sum| *sum < limit) as u64 + 1).min(params.cells)
                }
                _ => params.cells,
            };
            let base = if moved && params.move_at != u64::MAX { params.cells / 2 } else { 0 };
            for rank in 0..ranks {
                let local = params.place((base + rank) % params.cells);
                pages.insert_cell(&params, params.first_cell + local);
            }
        }
        Ok(pages)
    }

    /// Returns the pages that the fill writes.
    pub fn filled_pages(&self) -> Result<PageSet, SpecError> {
        let mut pages = PageSet::new(self.ram);
        for params in self.plan()? {
            if params.kind >= guest::KIND_GRAPH {
                pages.union(&filled(self, &params));
                continue;
            }
            (0..params.cells).for_each(|local| pages.insert_cell(&params, params.first_cell + local));
        }
        Ok(pages)
    }

    /// Returns exactly the pages that the run phase touches if worker `i` does `ops[i]` operations. An empty slice
    /// stands for all operations.
    pub fn touched_pages(&self, ops: &[u64]) -> Result<PageSet, SpecError> {
        Ok(expect(self, &self.plan()?, ops).touched)
    }

    /// Returns how often the run phase touches each page while its one worker does the operations `ops`.
    pub fn touches(&self, ops: std::ops::Range<u64>) -> Result<Vec<u32>, SpecError> {
        let plan = self.plan()?;
        let [params] = &plan[..] else {
            return Err(SpecError { field: "threads", problem: "must be 1 to count operations".to_owned() });
        };
        if params.kind >= guest::KIND_GRAPH {
            return Err(SpecError { field: "workload", problem: "a program's operations are not counted".to_owned() });
        }
        Ok(touches(self, params, ops))
    }
}

/// Returns the outcome of `plan` after worker `i` did `ops[i]` operations, or all if `ops` is empty.
pub fn expect(spec: &Spec, plan: &[Params], ops: &[u64]) -> Expected {
    let parts: Vec<_> = std::thread::scope(|scope| {
        let start = |(worker, params): (usize, &Params)| {
            let (params, ops) = (*params, ops.get(worker).copied().unwrap_or(params.ops));
            scope.spawn(move || expect_worker(spec, &params, ops))
        };
        let threads: Vec<_> = plan.iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("the model does not panic")).collect()
    });
    let mut touched = PageSet::new(spec.ram);
    parts.iter().for_each(|part| touched.union(&part.touched));
    Expected {
        checksum: combine(parts.iter().map(|part| part.checksum)),
        touched_cells: parts.iter().map(|part| part.touched_cells).sum(),
        touched,
    }
}

/// Returns how often each page is touched while the one worker does these operations.
fn touches(spec: &Spec, params: &Params, ops: Range<u64>) -> Vec<u32> {
    let weights = spec.weights(params);
    let mut counts = vec![0u32; spec.ram.pages_floor().0 as usize];
    let mut random = guest::skip_random(params.pick_seed, guest::ROLLS * ops.start);
    let ops = if params.kind == guest::KIND_IDLE { 0..0 } else { ops };
    for op in ops {
        let (local, _) = params.pick(&mut random, op, |rank| weights[rank as usize]);
        let mut last = None;
        params.pages_of_operation(params.first_cell + local, |page| {
            if last.replace(page) != Some(page) {
                counts[page.0 as usize] = counts[page.0 as usize].saturating_add(1);
            }
        });
    }
    counts
}

fn expect_worker(spec: &Spec, params: &Params, ops: u64) -> Expected {
    if params.kind >= guest::KIND_GRAPH {
        return expect_program(spec, params, ops);
    }
    let weights = spec.weights(params);
    let mut versions: HashMap<u64, u32> = HashMap::new();
    let mut touched = PageSet::new(spec.ram);
    let mut random = params.pick_seed;
    let mut checksum = 0;
    let ops = if params.kind == guest::KIND_IDLE { 0 } else { ops };
    for op in 0..ops {
        let (local, write) = params.pick(&mut random, op, |rank| weights[rank as usize]);
        let cell = params.first_cell + local;
        let words = params.words_of(cell);
        let version = versions.entry(local).or_insert_with(|| {
            touched.insert_operation(params, cell);
            0
        });
        let contents = params.contents(cell, *version);
        if params.thorough != 0 {
            checksum = (0..words).fold(checksum, |sum, index| guest::fold(sum, contents.word(index)));
        } else {
            let samples = (0..guest::SAMPLES).map(|i| contents.word(guest::sample(i, words)));
            checksum = samples.fold(checksum, guest::fold);
        }
        *version += u32::from(write);
    }
    for local in 0..params.cells {
        let cell = params.first_cell + local;
        let words = params.words_of(cell);
        let (filled, current) =
            (params.contents(cell, 0), params.contents(cell, versions.get(&local).copied().unwrap_or(0)));
        let mut image: Vec<u64> = (0..words).map(|index| filled.word(index)).collect();
        if params.thorough != 0 {
            image.iter_mut().zip(0..).for_each(|(word, index)| *word = current.word(index));
        } else {
            for i in 0..guest::SAMPLES {
                let index = guest::sample(i, words);
                image[index as usize] = current.word(index);
            }
        }
        checksum = image.into_iter().fold(checksum, guest::fold);
    }
    Expected { checksum, touched_cells: versions.len() as u64, touched }
}

/// Memory for a program in which every read returns the expected value.
struct Right {
    first_word: u64,
    checksum: u64,
    versions: Vec<u32>,
    weights: Vec<u64>,
    touched: PageSet,
}

impl Right {
    fn new(spec: &Spec, params: &Params) -> Self {
        Self {
            first_word: params.first_cell * params.cell_words,
            checksum: 0,
            versions: vec![0; params.cells as usize],
            weights: spec.weights(params),
            touched: PageSet::new(spec.ram),
        }
    }
}

impl Memory for Right {
    fn read(&mut self, word: u64, expected: u64) {
        self.touched.insert(PageIdx::containing((self.first_word + word) * 8));
        self.checksum = guest::fold(self.checksum, expected);
    }

    fn write(&mut self, word: u64, _: u64) {
        self.touched.insert(PageIdx::containing((self.first_word + word) * 8));
    }

    fn version(&mut self, slot: u64) -> u32 {
        self.versions[slot as usize] & !guest::TOUCHED
    }

    fn set_version(&mut self, slot: u64, version: u32) {
        self.versions[slot as usize] = version | guest::TOUCHED;
    }

    fn weight(&mut self, index: u64) -> u64 {
        self.weights[index as usize]
    }
}

/// Returns the pages that a program fills.
fn filled(spec: &Spec, params: &Params) -> PageSet {
    let mut memory = Right::new(spec, params);
    Program::new(params).fill(&mut memory, params);
    memory.touched
}

/// Run a program over memory that cannot be wrong. Programs have no second implementation.
fn expect_program(spec: &Spec, params: &Params, ops: u64) -> Expected {
    let mut memory = Right::new(spec, params);
    let mut program = Program::new(params);
    (0..ops).for_each(|_| program.step(&mut memory, params));
    let touched = std::mem::replace(&mut memory.touched, PageSet::new(spec.ram));
    program.verify(&mut memory, params);
    let touched_cells = memory.versions.iter().filter(|version| **version & guest::TOUCHED != 0).count() as u64;
    Expected { checksum: memory.checksum, touched_cells, touched }
}
