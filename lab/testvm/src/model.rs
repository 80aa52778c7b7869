//! The model: it computes the outcome of a workload without guest RAM.
//!
//! Before: `workload` has a plan. After: `vm` compares the workers' results with this.
//! Threads: one per worker, so the model of a long run takes no longer than the run.
//! Promise: nothing here reads guest RAM or a worker's version words. Contents and choices come from the formulas of
//! `law`. The order of reads is implemented a second time on purpose, except for programs.

use std::collections::HashMap;

use crate::guest::programs::{Memory, Program};
use crate::guest::{self, Params};
use crate::workload::Spec;

/// Combine the checksums of all workers.
pub fn combine(checksums: impl IntoIterator<Item = u64>) -> u64 {
    checksums.into_iter().fold(0, guest::fold)
}

/// Returns the combined checksums of `plan` after worker `i` did `ops[i]` operations.
pub fn expect(spec: &Spec, plan: &[Params], ops: &[u64]) -> u64 {
    let parts: Vec<_> = std::thread::scope(|scope| {
        let start = |(worker, params): (usize, &Params)| {
            let (params, ops) = (*params, ops[worker]);
            scope.spawn(move || expect_worker(spec, &params, ops))
        };
        let threads: Vec<_> = plan.iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("the model does not panic")).collect()
    });
    combine(parts)
}

fn expect_worker(spec: &Spec, params: &Params, ops: u64) -> u64 {
    if params.kind >= guest::KIND_GRAPH {
        return expect_program(spec, params, ops);
    }
    let weights = spec.weights(params);
    let mut versions: HashMap<u64, u32> = HashMap::new();
    let mut random = params.pick_seed;
    let mut checksum = 0;
    let ops = if params.kind == guest::KIND_IDLE { 0 } else { ops };
    for op in 0..ops {
        let (local, write) = params.pick(&mut random, op, |rank| weights[rank as usize]);
        let cell = params.first_cell + local;
        let words = params.words_of(cell);
        let version = versions.entry(local).or_default();
        let contents = params.contents(cell, *version);
        let samples = (0..guest::SAMPLES).map(|i| contents.word(guest::sample(i, words)));
        checksum = samples.fold(checksum, guest::fold);
        *version += u32::from(write);
    }
    for local in 0..params.cells {
        let cell = params.first_cell + local;
        let words = params.words_of(cell);
        let (filled, current) =
            (params.contents(cell, 0), params.contents(cell, versions.get(&local).copied().unwrap_or(0)));
        let mut image: Vec<u64> = (0..words).map(|index| filled.word(index)).collect();
        for i in 0..guest::SAMPLES {
            let index = guest::sample(i, words);
            image[index as usize] = current.word(index);
        }
        checksum = image.into_iter().fold(checksum, guest::fold);
    }
    checksum
}

/// Memory for a program in which every read returns the expected value.
struct Right {
    checksum: u64,
    versions: Vec<u32>,
    weights: Vec<u64>,
}

impl Right {
    fn new(spec: &Spec, params: &Params) -> Self {
        Self { checksum: 0, versions: vec![0; params.cells as usize], weights: spec.weights(params) }
    }
}

impl Memory for Right {
    fn read(&mut self, _: u64, expected: u64) {
        self.checksum = guest::fold(self.checksum, expected);
    }

    fn write(&mut self, _: u64, _: u64) {}

    fn version(&mut self, slot: u64) -> u32 {
        self.versions[slot as usize]
    }

    fn set_version(&mut self, slot: u64, version: u32) {
        self.versions[slot as usize] = version;
    }

    fn weight(&mut self, index: u64) -> u64 {
        self.weights[index as usize]
    }
}

/// Run a program over memory that cannot be wrong. Programs have no second implementation.
fn expect_program(spec: &Spec, params: &Params, ops: u64) -> u64 {
    let mut memory = Right::new(spec, params);
    let mut program = Program::new(params);
    (0..ops).for_each(|_| program.step(&mut memory, params));
    program.verify(&mut memory, params);
    memory.checksum
}
