//! The options of the bench: the words of the command line as types.
//!
//! Before: `main` has parsed them. After: `rig` and every bench read them.
//! Threads: none. Units: none. Promise: only what a user can ask for is here.

use std::path::PathBuf;
use std::time::Duration;

use crate::order::{Data, GuestKind};

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Which {
    /// The time of a touch of a far page.
    Restore,
    /// Cold pages per second that leave DRAM.
    Reclaim,
    /// Restore and reclaim with more VMs.
    Scale,
    /// The speed of many small VMs at once, and the cost of the service for each.
    Density,
    /// The cost of the attachment for a VM without a limit.
    Idle,
    /// The effect of a neighbour's fault storm on a VM's restores.
    Storm,
    /// Far pages on other machines beside those in RAM and on a disk, and beside bare connections.
    Far,
    /// The memory that equal pages of several VMs save in a group, beside compression alone and KSM.
    Share,
    /// The slowdown of eight VMs in less memory than they want, by policy and by the kernel.
    Balance,
    /// One VM before, under and after a limit, over time.
    Limit,
    /// The choice of pages for fast memory: classifiers against an oracle, simulated.
    Tiers,
    /// The memory pool: its metadata, the memory that it can give to VMs, and the time until that memory is usable.
    Pool,
    /// Reclaim by the reports of an agent in a guest, and by the host alone; free memory; kernel services.
    Guest,
    /// The effect on VMs when another engine replaces the serving one.
    Upgrade,
    /// A real program at full speed with part of its memory far, beside the kernel's swap.
    Real,
    /// VMs that were started without Ballast and are adopted: what leaves, what comes back, what it costs.
    Adopt,
}

impl Which {
    /// Its name in JSON and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Restore => "restore",
            Self::Reclaim => "reclaim",
            Self::Scale => "scale",
            Self::Density => "density",
            Self::Idle => "idle",
            Self::Storm => "storm",
            Self::Far => "far",
            Self::Share => "share",
            Self::Balance => "balance",
            Self::Limit => "limit",
            Self::Tiers => "tiers",
            Self::Pool => "pool",
            Self::Guest => "guest",
            Self::Upgrade => "upgrade",
            Self::Real => "real",
            Self::Adopt => "adopt",
        }
    }
}

/// A part of what [`Which::Balance`], [`Which::Density`], [`Which::Pool`], [`Which::Guest`] or [`Which::Real`]
/// measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Which part of a real program's memory can be far for 5 % of its speed.
    Five,
    /// Real servers that come, work, rest and go.
    Day,
    /// Eight VMs at falling levels of memory.
    Levels,
    /// A VM whose need jumps.
    Jump,
    /// Eight adopted VMs at falling levels of memory.
    Adopted,
    /// Two VMs that want the same memory all the time.
    Pairs,
    /// Two VMs whose needs change.
    Stages,
    /// How much of one VM's memory can be taken.
    Memory,
    /// Many VMs that read, with the kernel beside them.
    Busy,
    /// The engine is killed under many VMs that read.
    Recovery,
    /// Many idle VMs.
    Idle,
    /// A VM's start on the daemon's pool.
    Start,
    /// Memory of the pool that comes as it is touched.
    OnDemand,
    /// The largest pool, beside what the kernel finds by one write.
    Largest,
    /// A guest's disk and network on the daemon's pool.
    Devices,
    /// The speed of a guest on the daemon's pool.
    Guest,
    /// The memory that a VM of the daemon's pool costs.
    Cost,
    /// A program of a guest ends.
    Free,
    /// A program of a guest frees memory here and there.
    Scattered,
    /// A guest's khugepaged works on what is far.
    Services,
    /// A guest reads files.
    Files,
    /// A guest runs Redis.
    Redis,
    /// A guest runs memcached.
    Memcached,
    /// A guest searches a graph.
    Bfs,
    /// A guest clusters points.
    Kmeans,
    /// A guest compiles.
    Compiler,
    /// A guest writes files and swaps.
    Written,
    /// Two guests with tiers, whose shares of fast memory change.
    Shares,
}

impl Part {
    /// The measurement that it is a part of.
    pub fn of(self) -> Which {
        match self {
            Self::Levels | Self::Adopted | Self::Jump | Self::Pairs | Self::Stages | Self::Memory => Which::Balance,
            Self::Five | Self::Day => Which::Real,
            Self::Busy | Self::Recovery | Self::Idle => Which::Density,
            Self::Start | Self::OnDemand | Self::Largest => Which::Pool,
            Self::Devices | Self::Guest | Self::Cost => Which::Pool,
            Self::Free | Self::Scattered | Self::Services | Self::Written | Self::Shares => Which::Guest,
            Self::Files | Self::Redis | Self::Memcached | Self::Bfs | Self::Kmeans | Self::Compiler => Which::Guest,
        }
    }
}

/// The program whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RealProgram {
    /// Redis, 1 KiB values, Zipf 0.99, 1 write in 20.
    Redis,
    /// memcached with the Redis load.
    Memcached,
    /// TPC-H, scale factor 1, in DuckDB.
    Tpch,
    /// BFS and PageRank on a Kronecker graph.
    Graph,
    /// A product of matrices that streams over 1 GiB.
    Dgemm,
    /// k-means in mini-batches over 1 GiB.
    Kmeans,
    /// Triangles of a Kronecker graph.
    Triangles,
    /// GUPS on 1 GiB with a hot tenth.
    Gups,
    /// Lookups as XSBench makes them, in 1.2 GiB of tables.
    Lookups,
}

/// The side that pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RealSide {
    /// Ballast.
    Ballast,
    /// Ballast, the program adopted: its memory is private, and the kernel's swap moves the pages.
    Adopted,
    /// The kernel, the program's memory private.
    Kernel,
    /// The kernel, the program's memory in one shared memfd, as that of a VM.
    Shared,
}

impl RealSide {
    pub(crate) fn needs_swap(self) -> bool {
        self != Self::Ballast
    }

    /// Is it without Ballast?
    pub(crate) fn is_kernel(self) -> bool {
        matches!(self, Self::Kernel | Self::Shared)
    }

    pub(crate) fn end_of_keys(self) -> &'static str {
        match self {
            Self::Ballast => "",
            Self::Adopted => "_adopted",
            Self::Kernel => "_kernel",
            Self::Shared => "_kernel_shared",
        }
    }
}

/// The order of the keys, on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RealOrder {
    /// Fresh random numbers for ever.
    Random,
    /// One sequence again and again, which never names a quarter of the pages.
    Repeat,
    /// Other keys become popular each minute.
    Moving,
    /// A tenth of the requests reads all keys in order.
    ScanBeside,
}

/// The words of the command line that are only for this bench.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RealOptions {
    /// The program; Redis if none is named.
    pub program: Option<RealProgram>,
    /// The order of a server's keys; all but the slow ones if none is named.
    pub order: Option<RealOrder>,
    /// One side alone.
    pub side: Option<RealSide>,
    /// Seconds under the limit before its figures are taken.
    pub settle: Option<Duration>,
    /// Rounds.
    pub rounds: Option<usize>,
}

/// The options.
#[derive(Clone, Debug)]
pub struct Options {
    /// The measurement.
    pub which: Which,
    /// What touches the memory.
    pub guest: GuestKind,
    /// Fewer pages and repetitions.
    pub quick: bool,
    /// Spill: a directory on the disk.
    pub dir: PathBuf,
    /// Balance, density, pool, guest, real: this part alone.
    pub part: Option<Part>,
    /// Guest: which pages are taken alone, not how much memory can be.
    pub choices: bool,
    /// Density: this number of VMs alone.
    pub vms: Option<usize>,
    /// Far: the latency of a network between the cluster and its clients, in one direction.
    pub latency: Duration,
    /// Balance, real: the levels of memory, in percent; the bench's own if there is none.
    pub levels: Vec<u64>,
    /// Real: what runs, and who pages.
    pub real: RealOptions,
}

impl Options {
    /// Does this guest touch the memory?
    pub(crate) fn is(&self, guest: GuestKind) -> bool {
        self.guest == guest
    }

    /// The kinds of data in guest memory, one row each. A quick run of QEMU guests, which boot slowly, has one.
    pub(crate) fn data(&self) -> Vec<Data> {
        let all = [Data::HalfCompressible, Data::Incompressible];
        all.into_iter().take(if self.quick && self.is(GuestKind::Qemu) { 1 } else { 2 }).collect()
    }

    /// The name of what touches the memory.
    pub(crate) fn guest(&self) -> &'static str {
        self.guest.name()
    }
}
