//! The bench's orders to its helper processes, and their answers: one line of JSON each, over their standard input and
//! output.
//!
//! Before: `worker` starts `ballast bench-role ROLE`. After: [`crate::role::run`] plays the role until its input ends.
//! Units: in the names. Promise: every order has one answer; a helper that fails returns [`Answer::Failed`] with the
//! reason.

use std::path::PathBuf;
use std::time::Duration;

pub use ballast_testvm::GuestKind;
use ballast_testvm::Spec;
use serde::{Deserialize, Serialize};

use crate::stats::Summary;
use crate::waits::Waits;

/// The role of a helper process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Role {
    /// A guest whose pages go out and are restored.
    Guest(GuestConfig),
    /// A VM that runs a workload of `testvm`, slice by slice.
    Workload(WorkloadConfig),
    /// A VM that does nothing but fault.
    Prober(Backing),
    /// Becomes the program that the words after it name, and ends with the process that started it.
    Become,
    /// A VMM that was started without Ballast, with private memory.
    Plain { ram_bytes: u64 },
    /// The plain userfaultfd handler; its standard input is a socket to its guest.
    Handler,
    /// Changes settings of the machine and restores them, whatever happens to the bench.
    Guard,
}

/// The contents of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Data {
    /// 64 bytes of noise and 64 bytes of zeros, by turns.
    HalfCompressible,
    /// Noise.
    Incompressible,
}

impl Data {
    /// Those that have a row each.
    pub const BOTH: [Self; 2] = [Self::HalfCompressible, Self::Incompressible];

    pub fn name(self) -> &'static str {
        match self {
            Self::HalfCompressible => "half_compressible",
            Self::Incompressible => "incompressible",
        }
    }

    pub fn page(self, page: u64) -> ballast_base::store::PageBytes {
        match self {
            Self::HalfCompressible => ballast_testkit::pages::half_compressible(page),
            Self::Incompressible => ballast_testkit::pages::incompressible(page),
        }
    }
}

/// The side that takes a guest's pages.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Backing {
    /// A ballastd.
    Ballast { socket: PathBuf, name: String },
    /// The kernel's swap.
    Kernel {
        /// The file of a memory cgroup that takes a process id.
        procs: PathBuf,
    },
    /// A handler of our own: one thread, one page at a time.
    Plain,
    /// The same on the CPU of the guest's thread, which stays there.
    Near,
    /// No side: pages are unmapped and stay in memory.
    Floor,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GuestConfig {
    /// The side that takes its pages.
    pub backing: Backing,
    pub kind: GuestKind,
    pub ram_bytes: u64,
    /// Pages with data.
    pub pages: u64,
    pub data: Data,
    /// Tells its data from that of others.
    pub number: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkloadConfig {
    /// Its workload; its operations have no end.
    pub spec: Spec,
    pub kind: GuestKind,
    /// The side that may take its memory: a ballastd, once [`Order::Attach`] was given, or the kernel, from the start.
    pub backing: Backing,
}

/// How pages are touched.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Pace {
    /// Most touches.
    pub most: u64,
    /// Time of computing between two touches.
    pub think_us: u32,
    /// The thread stays on its CPU, as a pinned vCPU does.
    pub pinned: bool,
    /// Touch pages in the order of their addresses (native guests only). Otherwise the seed decides the order.
    pub in_order: bool,
}

impl Pace {
    /// All of them, as fast as possible.
    pub const ALL: Self = Self { most: u64::MAX, think_us: 0, pinned: false, in_order: false };
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Fill memory (and attach it).
    Fill,
    /// Page everything out. On Ballast's side the limit does that instead.
    PageOut,
    /// Touch pages that are out, in an order that the seed decides.
    Touch { seed: u64, pace: Pace },
    /// Touch random pages as fast as possible until [`Order::Pause`].
    Storm,
    /// End the storm. The answer counts its touches.
    Pause,
    /// Compare every byte. A workload ends with it.
    Verify,
    /// Attach the workload's VM, as it is: before it is filled, or later.
    Attach,
    /// A plain VMM: touch one page of each 2 MiB.
    TouchSparsely,
    /// Read all of memory over and over until the second time; count and time the touches from the first time on. A
    /// prober begins with the first time, and each of its touches is a fault. Both are of the monotonic clock.
    Read { from_ns: u64, until_ns: u64 },
    /// A prober: read the clock over and over instead, without a fault.
    Compute { from_ns: u64, until_ns: u64 },
    /// Return the number of operations that the workload has done so far.
    Progress,
    /// Run the workload for this long.
    Slice { ms: u64 },
    /// From now on the workload computes for this number of rounds, some 3 ns each, before each operation.
    Think(u64),
    /// Guard: add this number of huge pages to the host's pool.
    HugePages(u64),
    /// Guard: take away all that were added.
    NoHugePages,
    /// Guard: at its own end, return the memory of the pool of a daemon, which ends before that.
    EndPool { dir: PathBuf, keeper: u32 },
    /// Guard: a memory cgroup of this name.
    Cgroup(String),
    /// Guard: kill this process at its own end.
    EndProcess(u32),
    /// Guard: remove this directory of ours at its own end.
    RemoveDir(PathBuf),
}

/// The answer to an order.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    Done,
    Filled {
        /// Guest RAM, if it is a file.
        ram: Option<PathBuf>,
    },
    /// Pages are out.
    Out(Out),
    /// Pages were touched.
    Touched(Touched),
    /// Memory was read.
    Read(Reads),
    /// Every touch was a fault.
    Probed(Probed),
    /// A slice, or a storm, is over.
    Sliced {
        ops: u64,
        wall_us: f64,
        /// CPU time of all threads of the helper meanwhile.
        cpu_us: f64,
    },
    /// Operations done so far.
    Progress {
        ops: u64,
    },
    /// Guard: the path of the cgroup.
    Path(PathBuf),
    /// It could not be done.
    Failed(String),
}

/// The faults of a prober in one turn.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Probed {
    /// Equal parts of the turn, one after the other.
    pub slices: Vec<Slice>,
    pub touches: u64,
    /// Number of faults, by the kernel's count.
    pub faulted: u64,
}

/// The faults that ended in one part of a turn.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Slice {
    /// Time of each.
    pub faults: Waits,
    /// The times from the end of one to the end of the next.
    pub gaps: Waits,
}

/// The result of paging out.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Out {
    pub pages: u64,
    pub wall_us: f64,
    /// CPU time of all threads that had a part in it.
    pub cpu_us: f64,
    /// Ballast only: from the order until the first page was seen to be gone.
    pub first_us: f64,
    /// Ballast only: from when all of them were zapped until the first was seen to be gone; quarantine alone.
    pub waited_us: f64,
}

/// The result of a guest's reads.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Reads {
    /// Pages whose touch began and ended in time. The time of one that ended later is among `waits` nevertheless.
    pub touches: u64,
    /// How long each touch took.
    pub waits: Waits,
}

/// A touch that is quicker than this raised no fault: a minor one with nothing else takes longer.
pub const FAULT_NS: u32 = 700;

/// Times of touches.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Touched {
    /// Time per touch.
    pub summary: Summary,
    /// The same without those quicker than [`FAULT_NS`]: their pages were mapped already.
    pub faults: Summary,
    /// All touches, from the first to the last.
    pub wall_us: f64,
    /// Touches that found wrong bytes.
    pub wrong: u64,
}

impl Touched {
    /// From the time of each touch in nanoseconds, and the time of all together.
    pub fn of(times: &mut [u32], wall: Duration, wrong: u64) -> Self {
        let summary = Summary::of(times);
        // Sorted now.
        let mapped = times.partition_point(|time| *time < FAULT_NS);
        Self { summary, faults: Summary::of(&mut times[mapped..]), wall_us: wall.as_secs_f64() * 1e6, wrong }
    }
}
