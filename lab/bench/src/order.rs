//! The bench's orders to its helper processes, and their answers: lines of JSON over standard input and output.
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

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Role {
    /// A guest whose pages go out and are restored.
    Guest(GuestConfig),
    /// A VM that runs a workload of `testvm`, slice by slice.
    Workload(WorkloadConfig),
    /// A VM that does nothing but raise faults.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Data {
    /// 64 bytes of noise and 64 bytes of zeros, in turn.
    HalfCompressible,
    Incompressible,
}

impl Data {
    /// The data that have a row each.
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

/// The software that takes a guest's pages.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Backing {
    /// A ballastd.
    Ballast { socket: PathBuf, name: String },
    Kernel {
        /// The file of a memory cgroup that takes a process id.
        procs: PathBuf,
    },
    /// The plain handler: one thread, one page at a time.
    Plain,
    /// The plain handler on the CPU of the guest's thread, which stays there.
    Near,
    /// None: pages are unmapped and stay in memory.
    Floor,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GuestConfig {
    pub backing: Backing,
    pub kind: GuestKind,
    pub ram_bytes: u64,
    pub pages: u64,
    pub data: Data,
    /// The number that makes its data different from that of other guests.
    pub number: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkloadConfig {
    /// The workload; its operations have no end.
    pub spec: Spec,
    pub kind: GuestKind,
    /// The software that may take its memory: a ballastd, after [`Order::Attach`], or the kernel, from the start.
    pub backing: Backing,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Pace {
    pub most: u64,
    /// Computing time between two touches.
    pub think_us: u32,
    /// The thread stays on its CPU, as a pinned vCPU does.
    pub pinned: bool,
    /// Touch pages in the order of their addresses (native guests only). Otherwise the seed decides the order.
    pub in_order: bool,
}

impl Pace {
    pub const ALL: Self = Self { most: u64::MAX, think_us: 0, pinned: false, in_order: false };
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Fill memory (and attach it).
    Fill,
    /// Page out all memory. On Ballast's side the limit does that instead.
    PageOut,
    /// Touch pages that are out, in an order that the seed determines.
    Touch { seed: u64, pace: Pace },
    /// Touch random pages as fast as possible until [`Order::Pause`].
    Storm,
    /// End the storm. The answer counts its touches.
    Pause,
    /// Compare every byte. A workload ends with it.
    Verify,
    /// Attach the workload's VM, before or after it is filled.
    Attach,
    /// A plain VMM: touch one page of each 2 MiB.
    TouchSparsely,
    /// Read all of memory over and over until `until_ns`; count and time the touches from `from_ns` on. A prober begins
    /// at `from_ns`, and each of its touches is a fault. Both times are of the monotonic clock.
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
    /// Guard: remove all huge pages that were added.
    NoHugePages,
    /// Guard: at its own end, return the memory of the pool of a daemon, which is killed before that.
    EndPool { dir: PathBuf, keeper: u32 },
    /// Guard: a memory cgroup of this name.
    Cgroup(String),
    /// Guard: kill this process at its own end.
    EndProcess(u32),
    /// Guard: remove this directory of ours at its own end.
    RemoveDir(PathBuf),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    Done,
    Filled {
        ram: Option<PathBuf>,
    },
    Out(Out),
    Touched(Touched),
    Read(Reads),
    Probed(Probed),
    /// A slice, or a storm, is over.
    Sliced {
        ops: u64,
        wall_us: f64,
        /// CPU time of all threads of the helper during the slice.
        cpu_us: f64,
    },
    Progress {
        ops: u64,
    },
    Path(PathBuf),
    Failed(String),
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Probed {
    /// Equal parts of the turn, in order.
    pub slices: Vec<Slice>,
    pub touches: u64,
    /// By the kernel's count.
    pub faulted: u64,
}

/// The faults that ended in one part of a turn.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Slice {
    pub faults: Waits,
    /// Times from the end of a fault to the end of the next.
    pub gaps: Waits,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Out {
    pub pages: u64,
    pub wall_us: f64,
    /// CPU time of all threads that took part.
    pub cpu_us: f64,
    /// Ballast only: time from the order until the first page was seen to be gone.
    pub first_us: f64,
    /// Ballast only: quarantine alone, from the time at which all pages were zapped until the first was seen to be
    /// gone.
    pub waited_us: f64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Reads {
    /// Pages whose touch began and ended in time. A touch that ended later is included in `waits`, too.
    pub touches: u64,
    pub waits: Waits,
}

/// A touch quicker than this raised no fault: even a minor fault takes longer.
pub const FAULT_NS: u32 = 700;

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Touched {
    pub summary: Summary,
    /// As `summary`, without the touches quicker than [`FAULT_NS`]: their pages were mapped already.
    pub faults: Summary,
    /// Time from the first touch to the end of the last.
    pub wall_us: f64,
    pub wrong: u64,
}

impl Touched {
    /// The figures of touches that took these times, in nanoseconds, in `wall` together.
    pub fn of(times: &mut [u32], wall: Duration, wrong: u64) -> Self {
        let summary = Summary::of(times);
        let mapped = times.partition_point(|time| *time < FAULT_NS);
        Self { summary, faults: Summary::of(&mut times[mapped..]), wall_us: wall.as_secs_f64() * 1e6, wrong }
    }
}
