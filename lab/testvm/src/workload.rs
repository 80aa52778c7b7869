//! Workloads and their parameters, and the plan of each worker.
//!
//! Before: the operator or a test writes a [`Spec`]. After: `vm` runs its plan.
//! Threads: none. Units: operations are counted over all workers unless a comment says otherwise.
//! Promise: a plan depends only on the spec, so the same spec gives the same operations in every kind of guest.

use anyhow::{Result, bail};
use ballast_base::{Bytes, HUGE_SIZE, PAGE_SIZE};
use serde::{Deserialize, Serialize};

use crate::guest::programs::{Graph, Matrix};
use crate::guest::{self, Params};

/// The pattern of a workload: the order in which operations take cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Workload {
    /// All cells in turn, scattered over memory, again and again.
    Sequential,
    /// All cells with the same chance.
    Uniform,
    /// 90 % of the operations take a hot set of 10 % of the cells.
    Hotset,
    /// A key-value store: gets and puts of values of mixed sizes, with keys by a Zipf law of exponent 0.99.
    Zipf,
    /// No operations: it fills RAM, and waits until it is stopped.
    Idle,
    /// A key-value store under changing load: keys by a bell curve, then uniformly, then in sequence.
    Store,
    /// Breadth-first searches and shortest paths in a graph in which few vertices have many edges, as in graph500.
    Graph,
    /// Dense matrix products, in tiles.
    Matrix,
    /// Queries that scan a table, most often its recent quarter, and sum groups in a small hash table.
    Scan,
}

const ZIPF: f64 = 0.99;

/// A workload and its parameters. `Vm::new` refuses those that no memory can hold.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Spec {
    /// The pattern.
    pub workload: Workload,
    /// Size of guest RAM.
    pub ram: Bytes,
    /// Use huge pages of hugetlbfs. The size of RAM is then a multiple of 2 MiB.
    pub huge_pages: bool,
    /// Operations over all workers. `u64::MAX` means no limit.
    pub ops: u64,
    /// Workers, which are threads or vCPUs. Each owns an equal share of RAM.
    pub threads: usize,
    /// Seed of contents and choices.
    pub seed: u64,
    /// Fraction of operations that write. All operations read and check first.
    pub write_fraction: f64,
    /// Contents compress to about half. Otherwise they do not compress.
    pub half_compressible: bool,
    /// Fraction of cells that are all zero, after the fill and after every full write.
    pub zero_fraction: f64,
    /// Fraction of the cells that is hot (`hotset`).
    pub hot_fraction: f64,
    /// Fraction of operations that take a hot cell.
    pub hot_weight: f64,
    /// `store`: operations with each pattern, over all workers; `None` means a third.
    pub move_at: Option<u64>,
    /// Measure every operation.
    pub latency: bool,
    /// Initial rounds of computing before each operation, about 3 ns each, for the cost of a request beside its
    /// accesses.
    pub think: u64,
}

impl Spec {
    /// Returns the defaults of a workload on `ram` bytes: a million operations, half of them writes, and one worker.
    pub fn new(workload: Workload, ram: Bytes) -> Self {
        Self {
            workload,
            ram,
            huge_pages: false,
            ops: 1_000_000,
            threads: 1,
            seed: 1,
            write_fraction: 0.5,
            half_compressible: true,
            zero_fraction: 0.0,
            hot_fraction: 0.1,
            hot_weight: 0.9,
            move_at: None,
            latency: false,
            think: 0,
        }
    }

    /// Returns the size of the piece of memory that one operation takes, in bytes.
    fn cell(&self) -> u64 {
        match self.workload {
            Workload::Zipf | Workload::Store => 1024,
            // Programs do not take cells: these sizes give them as many version words as they need.
            Workload::Matrix | Workload::Scan => 1024,
            Workload::Graph => 128,
            _ => PAGE_SIZE as u64,
        }
    }

    /// Returns the problem if the memory of this spec is not enough for its workers, or is not in whole pages.
    fn problem(&self) -> Option<String> {
        let page = if self.huge_pages { HUGE_SIZE } else { PAGE_SIZE } as u64;
        if self.ram.0 == 0 || !self.ram.0.is_multiple_of(page) {
            return Some(format!("ram: {} is not a positive multiple of {page} bytes", self.ram.0));
        }
        let least = match self.workload {
            Workload::Graph => 64 << 10,
            Workload::Matrix | Workload::Scan => 128 << 10,
            _ => 2 * self.cell(),
        };
        let is_enough = (1..=64).contains(&self.threads) && self.ram.0 / self.threads as u64 >= least;
        (!is_enough).then(|| format!("threads: {} workers; 1 to 64, each with {}", self.threads, Bytes(least)))
    }

    /// Returns the parameters of each worker. Addresses are still zero.
    pub(crate) fn plan(&self) -> Result<Vec<Params>> {
        if let Some(problem) = self.problem() {
            bail!("{problem}");
        }
        let threads = self.threads as u64;
        let cells = self.ram.0 / self.cell();
        let has_values = matches!(self.workload, Workload::Zipf | Workload::Store);
        let is_scattered = matches!(self.workload, Workload::Zipf | Workload::Sequential);
        let start = |worker: u64| cells * worker / threads;
        let share = |total: u64, worker: u64| match total {
            u64::MAX => u64::MAX,
            total => total / threads + u64::from(worker < total % threads),
        };
        let plan = (0..threads).map(|worker| {
            let cells = start(worker + 1) - start(worker);
            let hot_cells = ((cells as f64 * self.hot_fraction) as u64).clamp(1, cells);
            let ops = share(self.ops, worker);
            Params {
                first_cell: start(worker),
                cells,
                cell_words: self.cell() / 8,
                min_words: if has_values { guest::SAMPLES } else { 0 },
                ops,
                content_seed: guest::mix(self.seed),
                pick_seed: guest::mix(self.seed.wrapping_add(guest::mix(worker + 1))),
                write_below: threshold(self.write_fraction),
                zero_below: threshold(self.zero_fraction),
                hot_below: threshold(self.hot_weight),
                hot_cells,
                move_at: self.move_at.map_or(ops / 3, |at| share(at, worker)),
                stride: if is_scattered { stride(cells) } else { 1 },
                kind: match self.workload {
                    Workload::Sequential => guest::KIND_SEQUENTIAL,
                    Workload::Uniform => guest::KIND_UNIFORM,
                    Workload::Hotset => guest::KIND_HOTSET,
                    Workload::Zipf => guest::KIND_ZIPF,
                    Workload::Idle => guest::KIND_IDLE,
                    Workload::Store => guest::KIND_STORE,
                    Workload::Graph => guest::KIND_GRAPH,
                    Workload::Matrix => guest::KIND_MATRIX,
                    Workload::Scan => guest::KIND_SCAN,
                },
                half: self.half_compressible.into(),
                latency: self.latency.into(),
                ..Params::default()
            }
        });
        Ok(plan.collect())
    }

    /// Returns the table of a worker: cumulative weights of the ranks, scaled to 64 bits (`zipf`), offsets of vertices
    /// (`graph`), or sums over the first tiles (`matrix`). It is empty for other workloads.
    pub(crate) fn weights(&self, params: &Params) -> Vec<u64> {
        let cumulate = |parts: &mut dyn Iterator<Item = u64>| {
            let sums = parts.scan(0u64, |sum, part| {
                *sum = sum.wrapping_add(part);
                Some(*sum)
            });
            std::iter::once(0).chain(sums).collect()
        };
        match params.kind {
            guest::KIND_GRAPH => {
                let graph = Graph::new(params);
                return cumulate(&mut (0..graph.vertices()).map(|vertex| graph.degree(vertex)));
            }
            guest::KIND_MATRIX => return cumulate(&mut (0..Matrix::new(params).tiles()).map(Matrix::part)),
            guest::KIND_ZIPF => {}
            _ => return Vec::new(),
        }
        let cells = params.cells;
        let mut sum = 0.0;
        let sums: Vec<f64> = (1..=cells)
            .map(|rank| {
                sum += (rank as f64).powf(-ZIPF);
                sum
            })
            .collect();
        // The cast saturates, so the last entries may be u64::MAX.
        sums.into_iter().map(|partial| (partial / sum * 18_446_744_073_709_551_616.0) as u64).collect()
    }
}

fn threshold(fraction: f64) -> u64 {
    (fraction * 4_294_967_296.0) as u64
}

/// Returns a step near the golden section of `cells` with which a walk visits every cell.
fn stride(cells: u64) -> u64 {
    fn gcd(a: u64, b: u64) -> u64 {
        if b == 0 { a } else { gcd(b, a % b) }
    }
    let start = (cells as f64 * 0.618) as u64;
    (start.max(1)..=cells).find(|step| gcd(*step, cells) == 1).unwrap_or(1)
}
