//! A pool that exists: its state beside its files, and where a slice lies in them.
//!
//! Before: [`Reserve`](crate::Reserve) has opened or created a pool. After: it knows which slices a request can have,
//! in which files they are, and which must be zeroed.
//! Threads: the owner's. Units: slices.
//! Promise: only this file computes the file and the offset of a slice. No VM gets more files or extents than it may
//! have.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::num::{NonZeroU32, NonZeroU64};
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::map::{
    Dirty, Domain, Extent, FRAME_SLICES, NodeIdx, NodeSpec, Part, Pool, Segment, SliceIdx, SliceState, VmId, request,
};
use ballast_base::extent::MAX_EXTENTS;
use ballast_base::pool::Nodes;
use ballast_base::wire::MAX_FILES;
use ballast_base::{Bytes, Extent as FileExtent};

use crate::error::{During, Error};
use crate::files::Files;
use crate::host::Page;
use crate::journal;
use crate::promises::{self, Far, Promises, Terms};
use crate::refill::Job;
use crate::shared::Shared;

/// Directory of the pool's files with pages of 2 MiB, which is a mount point.
pub const FILES: &str = Page::Huge.files();

#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) pool: Pool<Shared>,
    /// The size of a page: each slice is one page.
    pub(crate) page: Page,
    pub(crate) files: Files,
    pub(crate) names: BTreeMap<u64, String>,
    /// VMs on demand. They have no slices.
    pub(crate) promises: Promises,
    /// Failed pages of VMs on demand that were reported: VM and page.
    pub(crate) told: BTreeSet<(u64, u32)>,
    /// Percentage of their backing that may be promised to VMs on demand.
    pub(crate) percent: u32,
    /// The memory that VMs on demand can have far.
    pub(crate) far: Far,
    /// Slices for which the kernel had no page, because another process still holds their old page.
    pub(crate) waiting: Vec<Dirty>,
}

impl Live {
    pub(crate) fn new(dir: &Path, pool: Pool<Shared>, page: Page) -> Result<Self, Error> {
        let brick = page.size(pool.layout().brick_slices());
        let files = Files::open(&dir.join(page.files()), page, brick).during("Opening the pool's file system")?;
        let mut names: BTreeMap<u64, String> =
            journal::load(&dir.join("names.json")).during("Reading who has what")?.unwrap_or_default();
        // The last owner died before this VM got memory, so the name belongs to no VM.
        names.retain(|id, _| pool.tenants().any(|tenant| tenant.vm.0.get() == *id));
        for vm in files.doors().during("Listing the pool's files")? {
            if !names.contains_key(&vm) {
                files.close_door(vm).during("Forgetting a VM that is gone")?;
            }
        }
        let promises: Promises =
            journal::load(&dir.join(promises::FILE)).during("Reading what is promised")?.unwrap_or_default();
        let terms: Option<Terms> =
            journal::load(&dir.join(promises::TERMS_FILE)).during("Reading how much may be promised")?;
        let Terms { percent, .. } = terms.unwrap_or_default();
        let (told, far, waiting) = (BTreeSet::new(), Far::default(), Vec::new());
        Ok(Self { pool, page, files, names, promises, told, percent, far, waiting })
    }

    pub(crate) fn node(&self, numa: u32) -> Result<NodeIdx, Error> {
        let found = self.pool.layout().nodes().find(|(_, spec)| spec.numa == numa);
        found.map(|(node, _)| node).ok_or_else(|| Error::Request(format!("the pool has no node {numa}")))
    }

    pub(crate) fn brick(&self, number: u32) -> Extent {
        let slices = self.pool.layout().brick_slices();
        Extent { start: SliceIdx(number.saturating_mul(slices)), slices }
    }

    fn number(&self, at: SliceIdx) -> u32 {
        at.0 / self.pool.layout().brick_slices()
    }

    pub(crate) fn offset(&self, at: SliceIdx) -> u64 {
        self.page.size(at.0 % self.pool.layout().brick_slices()).0
    }

    /// Returns runs of up to this number of slices of a node in this state, lowest first.
    pub(crate) fn runs(&self, node: NodeIdx, state: SliceState, most: u32) -> Vec<Extent> {
        let Some((first, spec)) = self.first_slices().nth(node.0.into()) else { return Vec::new() };
        let is = |at: &SliceIdx| self.pool.state(*at) == state;
        let found: Vec<SliceIdx> = (first..first + spec.slices).map(SliceIdx).filter(is).take(most as usize).collect();
        let runs = found.chunk_by(|one, next| one.0 + 1 == next.0);
        runs.map(|run| Extent { start: run[0], slices: run.len() as u32 }).collect()
    }

    /// Returns each node and its first slice.
    pub(crate) fn first_slices(&self) -> impl Iterator<Item = (u32, NodeSpec)> {
        self.pool.layout().nodes().scan(0, |first, (_, spec)| {
            let here = *first;
            *first += spec.slices.next_multiple_of(FRAME_SLICES);
            Some((here, spec))
        })
    }

    /// Returns the slices of a node that wait for a page: a process holds their old page.
    pub(crate) fn waiting_of(&self, numa: u32) -> impl Iterator<Item = SliceIdx> {
        let slices = self.waiting.iter().flat_map(|dirty| dirty.extent().each());
        slices.filter(move |at| self.numa_of(*at) == numa)
    }

    /// Gives the pages of the brick's slices in a matching state back to the kernel.
    pub(crate) fn empty(&mut self, brick: Extent, is: impl Fn(SliceState) -> bool) -> Result<(), Error> {
        let file = self.files.get(self.number(brick.start)).during("Opening a file of the pool")?;
        for at in brick.each().filter(|at| is(self.pool.state(*at))) {
            ballast_sys::memfd::punch(&*file, self.offset(at), self.page.bytes()).during("Giving huge pages back")?;
        }
        Ok(())
    }

    pub(crate) fn parts(&self, slices: u32, nodes: &Nodes) -> Result<Vec<Part>, Error> {
        match nodes {
            Nodes::Any => {}
            Nodes::One(numa) => return Ok(request::on_one_node(slices, self.node(*numa)?)),
            Nodes::Balanced(nodes) if nodes.is_empty() => {
                return Err(Error::Request("no node is named that the memory is to be of".into()));
            }
            Nodes::Balanced(nodes) => {
                let nodes = nodes.iter().map(|numa| self.node(*numa)).collect::<Result<Vec<_>, _>>()?;
                return Ok(request::balanced(slices, &nodes));
            }
            Nodes::Split(parts) => {
                let part = |(numa, size): &(u32, Bytes)| {
                    let page = self.page;
                    if !size.0.is_multiple_of(page.bytes()) {
                        return Err(Error::Request(format!("{size} of node {numa} is no multiple of {page}")));
                    }
                    Ok((self.node(*numa)?, u32::try_from(size.0 / page.bytes()).unwrap_or(u32::MAX)))
                };
                let shares = parts.iter().map(part).collect::<Result<Vec<_>, _>>()?;
                let sum: u64 = shares.iter().map(|(_, share)| u64::from(*share)).sum();
                if sum != u64::from(slices) {
                    let (parts, all) = (Bytes(sum.saturating_mul(self.page.bytes())), self.page.size(slices));
                    return Err(Error::Request(format!("the parts by nodes are {parts}; the VM wants {all}")));
                }
                return Ok(request::split(&shares));
            }
        }
        let ready = |(node, spec): (NodeIdx, NodeSpec)| {
            let ready = self.pool.stats(node).map_or(0, |stats| stats.ready - stats.fenced);
            // The slices that are ready include those that promises to VMs on demand need.
            let free =
                if self.promises.is_empty() { ready } else { self.unpromised(spec.numa).unwrap_or(0).min(ready) };
            (node, free)
        };
        let nodes: Vec<(NodeIdx, u32)> = self.pool.layout().nodes().map(ready).collect();
        // Takes the smallest node that is large enough, so that the others stay for larger VMs.
        let fits = nodes.iter().filter(|(_, free)| *free >= slices).min_by_key(|(_, free)| *free);
        Ok(match fits {
            Some((node, _)) => request::on_one_node(slices, *node),
            None => request::balanced(slices, &nodes.iter().map(|(node, _)| *node).collect::<Vec<_>>()),
        })
    }

    /// Returns a number that no VM has, and a trust domain that no other VM has.
    pub(crate) fn new_vm(&self) -> io::Result<(NonZeroU64, Domain)> {
        loop {
            let mut bytes = [0; 8];
            rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
            let id = u64::from_le_bytes(bytes);
            if let (Some(id), Some(domain)) = (NonZeroU64::new(id), NonZeroU32::new(id as u32))
                && self.pool.tenants().all(|tenant| tenant.vm.0 != id && tenant.domain.0 != domain)
            {
                return Ok((id, Domain(domain)));
            }
        }
    }

    /// Stores the name of a VM that is to have memory. A failure drops it, so that repeated failures leave no names.
    pub(crate) fn name(&mut self, names: &Path, vm: u64, name: &str) -> Result<(), Error> {
        self.names.insert(vm, name.to_owned());
        let stored = journal::store(names, &self.names).during("Writing who has what");
        stored.inspect_err(|_| drop(self.names.remove(&vm)))
    }

    /// Divides a VM's memory into extents of files, and opens the files.
    pub(crate) fn cut(&mut self, vm: u64, segments: &[Segment]) -> Result<(Vec<FileExtent>, Vec<OwnedFd>), Error> {
        let mut numbers: Vec<u32> = Vec::new();
        let mut extents = Vec::new();
        for segment in segments {
            for brick in self.pool.bricks(segment.extent) {
                let start = SliceIdx(segment.extent.start.0.max(brick.start.0));
                let len = self.page.size(segment.extent.end().min(brick.end()) - start.0);
                let number = self.number(start);
                let file = numbers.iter().position(|other| *other == number).unwrap_or(numbers.len());
                if file == numbers.len() {
                    numbers.push(number);
                }
                extents.push(FileExtent { file: file as u16, offset: Bytes(self.offset(start)), len });
            }
        }
        if numbers.len() > MAX_FILES || extents.len() > MAX_EXTENTS {
            return Err(Error::Request(format!(
                "its memory would be {} pieces of {} files of the pool; a VM has at most {MAX_EXTENTS} of {MAX_FILES}",
                extents.len(),
                numbers.len()
            )));
        }
        const WHAT: &str = "Opening a file of the pool for a VM";
        self.files.open_door(vm).during(WHAT)?;
        let files = numbers.into_iter().map(|number| self.files.hand_out(number, vm)).collect::<io::Result<_>>();
        Ok((extents, files.during(WHAT)?))
    }

    pub(crate) fn numbers(&self, vm: VmId) -> Vec<u32> {
        let segments = self.pool.segments(vm).unwrap_or_default();
        let bricks = segments.iter().flat_map(|segment| self.pool.bricks(segment.extent));
        let mut numbers: Vec<u32> = bricks.map(|brick| self.number(brick.start)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    pub(crate) fn job(&mut self, dirty: Dirty) -> Result<Job, Error> {
        let Extent { start, slices } = dirty.extent();
        let node = Some(self.numa_of(start)).filter(|_| self.pool.layout().nodes().count() > 1);
        let brick = self.page.size(self.pool.layout().brick_slices());
        let (offset, len) = (self.offset(start), self.page.size(slices).0);
        match self.files.get(self.number(start)) {
            Ok(file) => Ok(Job { dirty, file, brick, offset, len, node }),
            Err(error) => {
                self.waiting.push(dirty);
                Err(error).during("Opening a file of the pool")
            }
        }
    }
}
