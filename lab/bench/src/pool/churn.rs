//! VMs arrive and leave, as many as a host holds: the share of memory that VMs can get, and the free memory in whole
//! GiB.
//!
//! Before: an occupancy is given. After: there is a row. Units: slices; shares in percent. Promise: all allocators see
//! the same VMs on the same nodes in the same order. This is a model: no memory is reserved, and zeroing takes no time.

use anyhow::{Context, Result, bail};
use ballast_pool::map::FRAME_SLICES;

use super::allocators::{Allocator, Buddy, FirstFit, Got, Ours};
use super::sizes;
use crate::report::Row;
use crate::stats::random;

/// The host of Vmem's Figure 5: 384 GB in two nodes, of which 189 GB each are for sale.
const NODES: u8 = 2;
const FRAMES: u32 = 189;
const NODE_SLICES: u32 = FRAMES * FRAME_SLICES;
const MOST_VMS: u32 = 1024;

/// One allocator's figures, a value for each round.
#[derive(Default)]
struct Figures {
    /// Share of all memory that VMs have when the host is full, plus the share that one more VM then gets.
    sellable: Vec<f64>,
    /// Share of free memory in whole and aligned GiB.
    whole: Vec<f64>,
    /// Number of whole frames of the VMs, in percent of those that fit their sizes.
    given: Vec<f64>,
    extents: Vec<f64>,
}

/// VMs of one round.
struct Host {
    allocator: Box<dyn Allocator>,
    used: [u32; NODES as usize],
    vms: Vec<(u64, u8, u32, Got)>,
    ids: u64,
}

impl Host {
    /// Let a VM arrive at the node with less used memory, if it fits below this number of slices of the node.
    fn arrive(&mut self, slices: u32, most: u32) -> Result<bool> {
        let node = u8::from(self.used[1] < self.used[0]);
        if self.used[usize::from(node)] + slices > most || self.vms.len() + 2 >= MOST_VMS as usize {
            return Ok(false);
        }
        let id = self.ids;
        self.ids += 1;
        let Some(got) = self.allocator.allocate(id, node, slices)? else { return Ok(false) };
        self.used[usize::from(node)] += slices;
        self.vms.push((id, node, slices, got));
        Ok(true)
    }

    fn depart(&mut self, which: usize) -> Result<()> {
        let (id, node, slices, _) = self.vms.swap_remove(which);
        self.used[usize::from(node)] -= slices;
        self.allocator.release(id)
    }

    fn measure(&mut self, figures: &mut Figures) -> Result<()> {
        let free = u32::from(NODES) * NODE_SLICES - self.used.iter().sum::<u32>();
        let whole: u32 = (0..NODES).map(|node| self.allocator.whole(node)).sum();
        figures.whole.push(100.0 * f64::from(whole * FRAME_SLICES) / f64::from(free.max(1)));
        let sum = |of: fn(&(u64, u8, u32, Got)) -> u32| f64::from(self.vms.iter().map(of).sum::<u32>());
        figures.given.push(100.0 * sum(|vm| vm.3.frames) / sum(|vm| vm.2 / FRAME_SLICES));
        figures.extents.push(sum(|vm| vm.3.extents) / self.vms.len().max(1) as f64);
        Ok(())
    }

    /// Let VMs arrive until not even the smallest fits; then give the rest of each node to one VM.
    fn fill(&mut self, seed: &mut u64, figures: &mut Figures) -> Result<()> {
        while self.arrive(sizes::draw(seed), NODE_SLICES)? {}
        while self.arrive(sizes::SMALLEST, NODE_SLICES)? {}
        for node in 0..NODES {
            let left = NODE_SLICES - self.used[usize::from(node)];
            if left > 0 && self.allocator.allocate(self.ids + u64::from(node), node, left)?.is_some() {
                self.used[usize::from(node)] += left;
            }
        }
        let used: u32 = self.used.iter().sum();
        figures.sellable.push(100.0 * f64::from(used) / f64::from(u32::from(NODES) * NODE_SLICES));
        Ok(())
    }
}

/// The row of a host that is kept this full.
pub(super) fn row(mut row: Row, occupancy_pct: u32, rounds: u64, steps: u32) -> Result<Row> {
    let most = NODE_SLICES / 100 * occupancy_pct;
    row.fact("measures", "churn");
    row.fact("modelled", true);
    row.fact("occupancy_pct", occupancy_pct);
    row.fact("nodes", NODES);
    row.fact("gib", u32::from(NODES) * FRAMES);
    row.fact("sizes", "AzurePublicDatasetV1");
    row.fact("steps", steps);
    let mut all: [Figures; 4] = Default::default();
    for round in 0..rounds {
        for (side, figures) in all.iter_mut().enumerate() {
            let allocator: Box<dyn Allocator> = match side {
                0 => Box::new(FirstFit::new(NODES, FRAMES)),
                1 => Box::new(Buddy::new(NODES, FRAMES)),
                // Every VM is a trust domain; files have 64 MiB.
                2 => Box::new(Ours::new(NODES, FRAMES, 32, MOST_VMS, false)?),
                _ => Box::new(Ours::new(NODES, FRAMES, FRAME_SLICES, MOST_VMS, true)?),
            };
            let mut host = Host { allocator, used: [0; NODES as usize], vms: Vec::new(), ids: 0 };
            let mut seed = round;
            run(&mut host, &mut seed, most, steps)?;
            host.measure(figures)?;
            host.fill(&mut seed, figures)?;
        }
    }
    let [first_fit, buddy, fenced, ours] = &all;
    for (name, figures) in [("", ours), ("fenced_", fenced), ("first_fit_", first_fit), ("buddy_", buddy)] {
        row.figure(&format!("{name}sellable_pct"), &figures.sellable);
        row.figure(&format!("{name}sellable_1g_pct"), &figures.whole);
        row.figure(&format!("{name}given_1g_pct"), &figures.given);
        row.figure(&format!("{name}extents_per_vm"), &figures.extents);
    }
    Ok(row)
}

/// Fill the host up to `most`, then `steps` times let a random VM leave and others arrive.
fn run(host: &mut Host, seed: &mut u64, most: u32, steps: u32) -> Result<()> {
    while host.arrive(sizes::draw(seed), most)? {}
    for _ in 0..steps {
        let which = random(seed) as usize % host.vms.len().max(1);
        if host.vms.is_empty() {
            bail!("no VM fits this host");
        }
        host.depart(which).context("a VM goes")?;
        while host.arrive(sizes::draw(seed), most)? {}
    }
    Ok(())
}
