//! The pool as an operator sees it: per node, per file, per VM.
//!
//! Before: anybody asks. After: the API's answer, and metrics. Units: bytes. Promise: reads only.

use ballast_base::Bytes;
use ballast_pool::unit::slices_to_bytes;
use ballast_pool::{Content, Extent, SliceIdx, SliceState};

use crate::reserve::{Live, Reserve};

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overview {
    /// Size of a file; zero if there is no pool.
    pub brick: Bytes,
    /// The nodes.
    pub nodes: Vec<Node>,
    /// The VMs that have memory.
    pub tenants: Vec<Tenant>,
    /// What the last change came to, and why not more.
    pub notes: Vec<String>,
    /// Slices that wait for a page, because somebody holds theirs.
    pub waiting: Bytes,
    /// What the state and its look-ups occupy.
    pub metadata: Bytes,
    /// `struct page`s that the kernel has freed.
    pub vmemmap_freed: Bytes,
    /// Lent at most while the host is short; zero: by command alone.
    pub lent_when_short: Bytes,
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// What the host calls it.
    pub numa: u32,
    /// What the pool has of it.
    pub reserved: Bytes,
    /// Zeroed, for any VM.
    pub ready: Bytes,
    /// Part of that, in whole GiB.
    pub ready_aligned: Bytes,
    /// VMs have it.
    pub used: Bytes,
    /// Nobody else can have it, because it is in a file of a VM.
    pub fenced: Bytes,
    /// To be zeroed.
    pub dirty: Bytes,
    /// Lent to the host.
    pub lent: Bytes,
    /// Its memory failed.
    pub failed: Bytes,
    /// A letter for each file: `.` none of it is reserved, `-` it is free, `z` some of it is to be zeroed, `U` a VM has
    /// all of it, `u` a part, `l` some of it is lent; `F` before all of these: memory of it failed.
    pub map: String,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// The name under which it asked.
    pub name: String,
    /// Its memory.
    pub size: Bytes,
    /// In how many pieces.
    pub extents: u32,
}

impl Reserve {
    /// Builds it.
    pub fn overview(&self) -> Overview {
        let notes = self.notes.clone();
        let Some(live) = &self.live else { return Overview { notes, ..Overview::default() } };
        let nodes: Vec<Node> = live.nodes();
        // Seven of eight pages of struct pages, of which a huge page has eight.
        const FREED_PER_SLICE: u64 = 28 << 10;
        let slices: u64 = nodes.iter().map(|node| node.reserved.0 / ballast_pool::SLICE_SIZE).sum();
        let freed = if self.host.frees_vmemmap() { slices * FREED_PER_SLICE } else { 0 };
        let tenants = live.pool.tenants().map(|tenant| Tenant {
            name: live.names.get(&tenant.vm.0.get()).cloned().unwrap_or_default(),
            size: slices_to_bytes(tenant.slices),
            extents: live.pool.segments(tenant.vm).map_or(0, |segments| segments.len() as u32),
        });
        Overview {
            brick: slices_to_bytes(live.pool.layout().brick_slices()),
            nodes,
            tenants: tenants.collect(),
            notes,
            waiting: slices_to_bytes(live.waiting.len() as u32),
            metadata: Bytes(live.pool.metadata_bytes()),
            vmemmap_freed: Bytes(freed),
            lent_when_short: self.lending().ok().flatten().map_or(Bytes(0), |lending| lending.most),
        }
    }
}

impl Live {
    fn nodes(&self) -> Vec<Node> {
        let nodes = self.first_slices().zip(self.pool.layout().nodes());
        let brick = self.pool.layout().brick_slices();
        nodes
            .filter_map(|((first, spec), (at, _))| {
                let stats = self.pool.stats(at)?;
                let bricks = (first..first + spec.slices).step_by(brick as usize);
                Some(Node {
                    numa: spec.numa,
                    reserved: slices_to_bytes(stats.slices - stats.holes - stats.lent),
                    ready: slices_to_bytes(stats.ready - stats.fenced),
                    ready_aligned: slices_to_bytes(
                        (stats.ready_aligned + stats.ready_gib) * ballast_pool::FRAME_SLICES,
                    ),
                    used: slices_to_bytes(stats.used + stats.mce_used),
                    fenced: slices_to_bytes(stats.fenced),
                    dirty: slices_to_bytes(stats.dirty + stats.zeroing),
                    lent: slices_to_bytes(stats.lent),
                    failed: slices_to_bytes(stats.mce + stats.mce_used),
                    map: bricks.map(|start| self.letter(Extent { start: SliceIdx(start), slices: brick })).collect(),
                })
            })
            .collect()
    }

    fn letter(&self, brick: Extent) -> char {
        let any = |is: fn(SliceState) -> bool| brick.each().any(|at| is(self.pool.state(at)));
        let all = |is: fn(SliceState) -> bool| brick.each().all(|at| is(self.pool.state(at)));
        match () {
            () if all(|state| state == SliceState::Hole) => '.',
            () if any(|state| matches!(state, SliceState::Mce | SliceState::MceUsed)) => 'F',
            () if all(SliceState::is_owned) => 'U',
            () if any(SliceState::is_owned) => 'u',
            () if any(|state| state == SliceState::Borrow) => 'l',
            () if any(|state| matches!(state, SliceState::Free(Content::Dirty | Content::Zeroing))) => 'z',
            () => '-',
        }
    }
}
