//! Three allocators of slices: the pool, first fit, and a buddy allocator.
//!
//! Before: `churn` has VMs arrive and leave. After: it knows what is free, and in which pieces. No allocator keeps a VM
//! in one piece: each gives it any slices, so that all of them can give away every slice. They differ in the memory
//! that stays whole.
//! Units: slices, and frames of 1 GiB. Promise: the two others work on the same nodes, one VM at a time, and zero
//! nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::num::{NonZeroU32, NonZeroU64};

use anyhow::{Context, Result};
use ballast_pool::map::request::on_one_node;
use ballast_pool::map::{
    Domain, Extent, FRAME_SLICES, GuestIdx, Layout, Mode, NodeIdx, NodeSpec, Pool, Request, SliceIdx, VmId,
};

/// The memory of a VM.
#[derive(Clone, Copy, Debug)]
pub(super) struct Got {
    /// Number of its pieces.
    pub(super) extents: u32,
    /// Number of frames that are whole and aligned, in pool and guest.
    pub(super) frames: u32,
}

pub(super) trait Allocator {
    /// Give a VM memory of a node, if there is enough.
    fn allocate(&mut self, id: u64, node: u8, slices: u32) -> Result<Option<Got>>;
    /// Take back the memory of a VM that is gone.
    fn release(&mut self, id: u64) -> Result<()>;
    /// Number of frames of a node that are free as a whole.
    fn whole(&self, node: u8) -> u32;
}

/// The pool.
pub(super) struct Ours {
    pub(super) pool: Pool<Vec<u64>>,
    is_one_domain: bool,
}

impl Ours {
    /// A pool of nodes with whole frames, all of them zeroed.
    pub(super) fn new(nodes: u8, frames: u32, brick: u32, vms: u32, is_one_domain: bool) -> Result<Self> {
        let slices = frames * FRAME_SLICES;
        let specs: Vec<NodeSpec> = (0..nodes).map(|numa| NodeSpec { numa: numa.into(), slices }).collect();
        let layout = Layout::new(&specs, brick, vms)?;
        let mut pool = Pool::create(vec![0; layout.words()], &layout)?;
        for node in 0..u32::from(nodes) {
            pool.reserve(Extent { start: SliceIdx(node * slices), slices })?;
        }
        let mut ours = Self { pool, is_one_domain };
        ours.zero();
        Ok(ours)
    }

    /// This model has no memory: a dirty slice is zero at once.
    fn zero(&mut self) {
        while let Some(dirty) = self.pool.next_dirty(u32::MAX) {
            let Ok(zeroed) = dirty.zero(|_| Ok::<_, Infallible>(()));
            self.pool.clean(zeroed);
        }
    }
}

/// Number of frames of an extent that are also aligned in the guest.
fn aligned_frames(extent: Extent, guest: GuestIdx) -> u32 {
    let is_aligned = |at: u32| at.is_multiple_of(FRAME_SLICES);
    let guest_of = |at: SliceIdx| guest.0 + (at.0 - extent.start.0);
    let is_frame = |at: &SliceIdx| is_aligned(at.0) && is_aligned(guest_of(*at)) && at.0 + FRAME_SLICES <= extent.end();
    extent.each().filter(is_frame).count() as u32
}

impl Allocator for Ours {
    fn allocate(&mut self, id: u64, node: u8, slices: u32) -> Result<Option<Got>> {
        let vm = VmId(NonZeroU64::new(id + 1).context("an id")?);
        let domain = if self.is_one_domain { 1 } else { id as u32 + 1 };
        let domain = Domain(NonZeroU32::new(domain).context("a domain")?);
        let parts = on_one_node(&[(GuestIdx(0), slices)], NodeIdx(node));
        let Ok(grant) = self.pool.allocate(&Request { vm, domain, mode: Mode::Mix, parts }) else {
            return Ok(None);
        };
        let frames = grant.segments.iter().map(|piece| aligned_frames(piece.extent, piece.guest)).sum();
        Ok(Some(Got { extents: grant.segments.len() as u32, frames }))
    }

    fn release(&mut self, id: u64) -> Result<()> {
        self.pool.release(VmId(NonZeroU64::new(id + 1).context("an id")?))?;
        self.zero();
        Ok(())
    }

    fn whole(&self, node: u8) -> u32 {
        self.pool.stats(NodeIdx(node)).map_or(0, |stats| stats.ready_frames)
    }
}

/// First fit: a VM gets the lowest free slices.
pub(super) struct FirstFit {
    /// For each node and slice: is it free?
    free: Vec<Vec<bool>>,
    vms: BTreeMap<u64, (u8, Vec<u32>)>,
}

impl FirstFit {
    pub(super) fn new(nodes: u8, frames: u32) -> Self {
        let free = vec![vec![true; (frames * FRAME_SLICES) as usize]; nodes.into()];
        Self { free, vms: BTreeMap::new() }
    }
}

/// Pieces and aligned frames of a VM that has these slices in this order.
fn got(slices: &[u32]) -> Got {
    let breaks = slices.windows(2).filter(|two| two[0] + 1 != two[1]).count() as u32;
    let frames = slices
        .chunks_exact(FRAME_SLICES as usize)
        .filter(|frame| frame[0].is_multiple_of(FRAME_SLICES) && frame.windows(2).all(|two| two[0] + 1 == two[1]));
    Got { extents: breaks + 1, frames: frames.count() as u32 }
}

/// Frames of which every slice is free.
fn whole(free: &[bool]) -> u32 {
    free.chunks_exact(FRAME_SLICES as usize).filter(|frame| frame.iter().all(|is_free| *is_free)).count() as u32
}

impl Allocator for FirstFit {
    fn allocate(&mut self, id: u64, node: u8, slices: u32) -> Result<Option<Got>> {
        let free = &mut self.free[usize::from(node)];
        let lowest = free.iter().enumerate().filter(|(_, is_free)| **is_free).map(|(at, _)| at as u32);
        let chosen: Vec<u32> = lowest.take(slices as usize).collect();
        if chosen.len() < slices as usize {
            return Ok(None);
        }
        chosen.iter().for_each(|at| free[*at as usize] = false);
        let got = got(&chosen);
        self.vms.insert(id, (node, chosen));
        Ok(Some(got))
    }

    fn release(&mut self, id: u64) -> Result<()> {
        let (node, slices) = self.vms.remove(&id).context("no such VM")?;
        slices.into_iter().for_each(|at| self.free[usize::from(node)][at as usize] = true);
        Ok(())
    }

    fn whole(&self, node: u8) -> u32 {
        whole(&self.free[usize::from(node)])
    }
}

/// A buddy allocator with blocks of 2 MiB to 1 GiB. A VM gets the largest block that it still needs, split off the
/// smallest free one that holds it, the lowest first.
pub(super) struct Buddy {
    /// For each node and order: the starts of free blocks.
    free: Vec<[BTreeSet<u32>; ORDERS]>,
    vms: BTreeMap<u64, (u8, Vec<(u32, usize)>)>,
}

/// Number of orders: from one slice to a frame.
const ORDERS: usize = FRAME_SLICES.trailing_zeros() as usize + 1;

impl Buddy {
    pub(super) fn new(nodes: u8, frames: u32) -> Self {
        let mut one: [BTreeSet<u32>; ORDERS] = Default::default();
        one[ORDERS - 1].extend((0..frames).map(|frame| frame * FRAME_SLICES));
        Self { free: vec![one; nodes.into()], vms: BTreeMap::new() }
    }

    /// A block of this order, split off a larger one if necessary.
    fn take(free: &mut [BTreeSet<u32>; ORDERS], order: usize) -> Option<u32> {
        let from = (order..ORDERS).find(|order| !free[*order].is_empty())?;
        let at = free[from].pop_first()?;
        for (above, blocks) in free[order..from].iter_mut().enumerate() {
            blocks.insert(at + (1 << (order + above)));
        }
        Some(at)
    }

    fn give(free: &mut [BTreeSet<u32>; ORDERS], mut at: u32, mut order: usize) {
        while order + 1 < ORDERS && free[order].remove(&(at ^ 1 << order)) {
            at &= !(1 << order);
            order += 1;
        }
        free[order].insert(at);
    }
}

impl Allocator for Buddy {
    fn allocate(&mut self, id: u64, node: u8, slices: u32) -> Result<Option<Got>> {
        let free = &mut self.free[usize::from(node)];
        let (mut blocks, mut left) = (Vec::new(), slices);
        while left > 0 {
            let wanted = (left.ilog2() as usize).min(ORDERS - 1);
            let Some((order, at)) = (0..=wanted).rev().find_map(|order| Some((order, Self::take(free, order)?))) else {
                blocks.into_iter().for_each(|(at, order)| Self::give(free, at, order));
                return Ok(None);
            };
            blocks.push((at, order));
            left -= 1 << order;
        }
        let slices: Vec<u32> = blocks.iter().flat_map(|(at, order)| *at..at + (1 << order)).collect();
        self.vms.insert(id, (node, blocks));
        Ok(Some(got(&slices)))
    }

    fn release(&mut self, id: u64) -> Result<()> {
        let (node, blocks) = self.vms.remove(&id).context("no such VM")?;
        blocks.into_iter().for_each(|(at, order)| Self::give(&mut self.free[usize::from(node)], at, order));
        Ok(())
    }

    fn whole(&self, node: u8) -> u32 {
        self.free[usize::from(node)][ORDERS - 1].len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_allocator_gives_all_slices_away_and_gets_them_back() {
        let mut all: Vec<Box<dyn Allocator>> = vec![
            Box::new(Ours::new(1, 4, 512, 16, true).expect("a pool")),
            Box::new(FirstFit::new(1, 4)),
            Box::new(Buddy::new(1, 4)),
        ];
        for allocator in &mut all {
            let sizes = [700, 1, 512, 300, 535];
            let frames: u32 = (0..)
                .zip(sizes)
                .map(|(id, slices)| allocator.allocate(id, 0, slices).expect("work").expect("room").frames)
                .sum();
            assert!(frames >= 1 && allocator.allocate(9, 0, 1).expect("work").is_none());
            assert_eq!(allocator.whole(0), 0);
            (0..5).for_each(|id| allocator.release(id).expect("release"));
            assert_eq!(allocator.whole(0), 4);
        }
    }
}
