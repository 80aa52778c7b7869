//! The workloads, policy, sizes and times that all parts of this bench share.
//!
//! Before: `mod` knows which part runs. After: a part starts its VMs.
//! Threads: the caller's. Units: bytes, time.

use std::time::Duration;

use ballast_base::MIB;
use ballast_policy::Kind;
use ballast_testvm::Workload;

use crate::rig::Bench;

/// The software that takes the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Ballast, by its limits.
    Ballast,
    /// The kernel: a memory cgroup and swap.
    Kernel,
    /// Ballast's policies with the kernel's swap, for adopted VMs.
    Adopted,
}

pub(super) const CAST: [Workload; 4] = [Workload::Store, Workload::Graph, Workload::Matrix, Workload::Scan];

/// The policy that divides the memory on Ballast's side, unless a key names another one.
pub(super) const POLICY: Kind = Kind::Gain;

#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    pub(super) ram_bytes: u64,
    pub(super) settle: Duration,
    pub(super) window: Duration,
    pub(super) windows: usize,
    /// Operations of the store with each pattern: some seconds among eight VMs on two CPUs.
    pub(super) store_ops: u64,
}

impl Scale {
    pub(super) fn of(bench: &Bench) -> Self {
        let s = Duration::from_secs;
        if bench.options.quick {
            Self {
                ram_bytes: 32 * MIB,
                settle: s(1),
                window: Duration::from_millis(500),
                windows: 2,
                store_ops: 10_000,
            }
        } else {
            Self { ram_bytes: 64 * MIB, settle: s(12), window: s(6), windows: 4, store_ops: 100_000 }
        }
    }
}
