//! The options of the bench: the words of the command line as types.
//!
//! Before: `main` parses them. After: `rig` and every bench read them.
//! Threads: none. Units: none. Promise: only what a user can ask for is here.

use std::path::PathBuf;

use ballast_realmem::keys::Sequence;

use crate::order::GuestKind;

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Which {
    /// The time of a touch of a far page.
    Restore,
    /// Cold pages per second that leave DRAM.
    Reclaim,
    /// Restore and reclaim of ten VMs at once, and the memory of the engine.
    Scale,
    /// The speed of many small VMs at once, also when the engine is killed.
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
    /// The choice of pages for fast memory, simulated.
    Tiers,
    /// The memory pool: the time until a VM's memory is usable.
    Pool,
    /// Reclaim by the reports of an agent in a guest, and by the host alone; kernel services.
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
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// A part of what [`Which::Balance`], [`Which::Density`], [`Which::Guest`] or [`Which::Real`] measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Which part of a real program's memory can be far for 5 % of its speed.
    Five,
    /// Real servers that come, work, rest and go.
    Day,
    /// What looks hot of a real server by 2 MiB pages and by 4 KiB pages.
    Bloat,
    /// Eight real programs at falling levels of memory, by policy and by the kernel.
    Eight,
    /// Eight VMs at falling levels of memory.
    Levels,
    /// A VM whose need jumps.
    Jump,
    /// Eight adopted VMs at falling levels of memory.
    Adopted,
    /// Many VMs that read, with the kernel beside them.
    Busy,
    /// The engine is killed under many VMs that read.
    Recovery,
    /// A guest's khugepaged works on what is far.
    Services,
    /// A guest runs memcached.
    Memcached,
    /// A guest clusters points.
    Kmeans,
    /// A guest compiles.
    Compiler,
}

impl Part {
    /// The measurement that it is a part of.
    pub fn of(self) -> Which {
        match self {
            Self::Levels | Self::Adopted | Self::Jump => Which::Balance,
            Self::Five | Self::Day | Self::Bloat | Self::Eight => Which::Real,
            Self::Busy | Self::Recovery => Which::Density,
            Self::Services | Self::Memcached | Self::Kmeans | Self::Compiler => Which::Guest,
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
    /// A linear SVM by liblinear, 1.1 GiB.
    Liblinear,
    /// A hash table in a JVM's heap of 1.6 GiB.
    Jvm,
}

impl RealProgram {
    pub(crate) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
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

/// The words of the command line that are only for `real`.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct RealOptions {
    /// real: the program [default: redis]
    #[arg(long, value_enum)]
    pub program: Option<RealProgram>,
    /// real: the order of its keys alone [default: repeat and random]
    #[arg(long, value_enum)]
    pub order: Option<Sequence>,
    /// real: this side alone [default: ballast and kernel, by turns]
    #[arg(long, value_enum)]
    pub side: Option<RealSide>,
    /// real: time under the limit before its figures are taken [default: 40]
    #[arg(long, value_name = "S")]
    pub settle: Option<u16>,
    /// real: turns of each side [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100))]
    pub rounds: Option<u64>,
}

/// What to measure and how.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// What to measure
    #[arg(value_enum, value_name = "WHAT")]
    pub which: Which,
    /// What touches the memory
    #[arg(long, value_enum, default_value = "native")]
    pub guest: GuestKind,
    /// Fewer pages and repetitions
    #[arg(long)]
    pub quick: bool,
    /// far: a directory on the disk to measure
    #[arg(long, value_name = "PATH", default_value_os_t = std::env::temp_dir())]
    pub dir: PathBuf,
    /// balance, density, guest, real: one of its parts alone [default: all]
    #[arg(long, value_enum)]
    pub part: Option<Part>,
    /// density: this number of VMs alone [default: 1 to 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub vms: Option<u16>,
    /// balance, real: these levels of memory alone, in percent [default: 100,75,60,45; real: 90,80,65,50]
    #[arg(long, value_name = "PCT", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(30..=100))]
    pub levels: Vec<u64>,
    /// What runs under `real`, and who pages.
    #[command(flatten)]
    pub real: RealOptions,
}

impl Options {
    /// Why these do not go together, if they do not.
    pub fn problem(&self) -> Option<String> {
        if let Some(part) = self.part.filter(|part| part.of() != self.which) {
            return Some(format!("--part {part:?} is for bench {}", part.of().name()));
        }
        if self.vms.is_some() && self.which != Which::Density {
            return Some("--vms is for bench density".into());
        }
        let has_levels = matches!(self.part, Some(Part::Levels | Part::Adopted)) || self.which == Which::Real;
        if !self.levels.is_empty() && !has_levels {
            return Some("--levels is for bench balance --part levels or adopted, and for bench real".into());
        }
        let is_real = self.which == Which::Real || self.real == RealOptions::default();
        (!is_real).then(|| "--program, --order, --side, --settle and --rounds are for bench real".into())
    }

    /// Does this guest touch the memory?
    pub(crate) fn is(&self, guest: GuestKind) -> bool {
        self.guest == guest
    }
}
