//! The pool as an operator sees it: by node, by file, by VM.
//!
//! Before: the overview is requested. After: the API's reply, and metrics. Units: bytes. Promise: only reads.

use crate::map::{Content, Extent, FRAME_SLICES, SliceIdx, SliceState};
use ballast_base::Bytes;

use crate::host::Page;
use crate::live::Live;
use crate::reserve::Reserve;

/// Overview of the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overview {
    /// Size of a file; zero if there is no pool.
    pub brick: Bytes,
    /// The nodes.
    pub nodes: Vec<Node>,
    /// VMs that have memory.
    pub tenants: Vec<Tenant>,
    /// Result of the last change, and the reasons why it did less than requested.
    pub notes: Vec<String>,
    /// Slices that wait for a page, because another process still holds their old page.
    pub waiting: Bytes,
    /// Memory that the state and its lookup tables occupy.
    pub metadata: Bytes,
    /// Memory of `struct page`s that the kernel has freed.
    pub vmemmap_freed: Bytes,
    /// Memory on demand: promised, touched, and set aside.
    pub on_demand: [Bytes; 3],
    /// Backing of VMs on demand, and the percentage of it that may be promised.
    pub for_demand: Bytes,
    /// The percentage of `for_demand` that may be promised.
    pub overcommit: u32,
    /// Limit of lending while the host is short of memory; zero: slices are lent by command only.
    pub lent_when_short: Bytes,
}

/// A node of the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Number of the node on the host.
    pub numa: u32,
    /// Memory that the pool has of this node.
    pub reserved: Bytes,
    /// Zeroed memory that any VM can get.
    pub ready: Bytes,
    /// Part of `ready` that is in whole GiB.
    pub ready_aligned: Bytes,
    /// Memory that VMs have, or that is set aside for those on demand.
    pub used: Bytes,
    /// Memory that only one VM can get, because it is in that VM's file.
    pub fenced: Bytes,
    /// Memory that must be zeroed.
    pub dirty: Bytes,
    /// Memory that is lent to the host.
    pub lent: Bytes,
    /// Memory that failed.
    pub failed: Bytes,
    /// A letter for each file: `.` not reserved, `-` free, `z` a part must be zeroed, `U` a VM has all of it, `u` a VM
    /// has a part of it, `l` a part is lent. `F` takes precedence: memory of it failed.
    pub map: String,
}

/// A VM that has memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Name of the VM in its request.
    pub name: String,
    /// Size of its memory.
    pub size: Bytes,
    /// Number of its extents.
    pub extents: u32,
    /// Memory that it has touched, if it is a VM on demand.
    pub touched: Option<Bytes>,
}

impl Reserve {
    /// Builds the overview.
    pub fn overview(&self) -> Overview {
        let notes = self.notes.clone();
        let Some(live) = &self.live else { return Overview { notes, ..Overview::default() } };
        let nodes: Vec<Node> = live.nodes();
        let page = self.host.page();
        let pages: u64 = nodes.iter().map(|node| node.reserved.0 / page.bytes()).sum();
        let freed = if self.host.frees_vmemmap() { pages * page.vmemmap_freed() } else { 0 };
        let tenants = live.pool.tenants().filter(|tenant| !live.is_aside(tenant.vm)).map(|tenant| Tenant {
            name: live.names.get(&tenant.vm.0.get()).cloned().unwrap_or_default(),
            size: page.size(tenant.slices),
            extents: live.pool.segments(tenant.vm).map_or(0, |segments| segments.len() as u32),
            touched: None,
        });
        let on_demand = live.promises.iter().map(|(vm, promise)| Tenant {
            name: promise.name.clone(),
            size: page.size(promise.slices),
            extents: promise.parts.len() as u32,
            touched: live.touched(*vm, promise).ok().map(|slices| page.size(slices)),
        });
        let now = live.on_demand().unwrap_or_default();
        Overview {
            brick: page.size(live.pool.layout().brick_slices()),
            nodes,
            tenants: tenants.chain(on_demand).collect(),
            notes,
            on_demand: [now.promised, now.touched, now.aside].map(|slices| page.size(slices)),
            for_demand: page.size(if page == Page::Huge { live.backing().unwrap_or(0) } else { 0 }),
            overcommit: live.percent,
            waiting: page.size(live.waiting.len() as u32),
            metadata: Bytes(live.pool.metadata_bytes()),
            vmemmap_freed: Bytes(freed),
            lent_when_short: self.lending().ok().flatten().map_or(Bytes(0), |lending| lending.most),
        }
    }
}

impl Live {
    fn nodes(&self) -> Vec<Node> {
        let nodes = self.first_slices().zip(self.pool.layout().nodes());
        let (brick, page) = (self.pool.layout().brick_slices(), self.page);
        nodes
            .filter_map(|((first, spec), (at, _))| {
                let stats = self.pool.stats(at)?;
                let bricks = (first..first + spec.slices).step_by(brick as usize);
                Some(Node {
                    numa: spec.numa,
                    reserved: page.size(stats.slices - stats.holes - stats.lent),
                    ready: page.size(stats.ready - stats.fenced),
                    ready_aligned: match page {
                        Page::Huge => page.size(stats.ready_frames * FRAME_SLICES),
                        Page::Gib => page.size(stats.ready - stats.fenced),
                    },
                    used: page.size(stats.used + stats.mce_used),
                    fenced: page.size(stats.fenced),
                    dirty: page.size(stats.dirty + stats.zeroing),
                    lent: page.size(stats.lent),
                    failed: page.size(stats.mce + stats.mce_used),
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
