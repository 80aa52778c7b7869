//! How much of the host a pool of base pages may take: the kernel reserves none for it, so it takes what it fills.
//!
//! What the pool was granted and has not filled yet counts as taken. A slice is filled only while the host keeps its
//! margin: between the end of a VM and the filling of its slices, the host may have used the memory. So a pool of base
//! pages promises no more than the host could spare when it was asked, and never takes more than it can spare now.
//!
//! Before: `reserve` grows, `lend` takes back, or a worker asks for a slice to fill. After: less is granted, or nothing
//! is filled yet, and the overview says so. Threads: the owner's. Units: slices, or bytes where the name says so.
//! Promise: of huge pages, which the kernel reserves, nothing here takes anything away.

use ballast_base::Bytes;
use ballast_pool::NodeIdx;

use crate::balance::margin;
use crate::error::{During, Error};
use crate::host::{Memory, Page};
use crate::reserve::Reserve;

impl Reserve {
    /// Slices of a node that have no memory yet, although the pool has them.
    fn unfilled(&self, numa: u32) -> u32 {
        let Some(live) = self.live.as_ref().filter(|live| live.page == Page::Base) else { return 0 };
        let stats = live.node(numa).ok().and_then(|node| live.pool.stats(node));
        stats.map_or(0, |stats| stats.dirty + stats.zeroing)
    }

    fn all_unfilled(&self) -> u32 {
        let Some(live) = &self.live else { return 0 };
        live.pool.layout().nodes().map(|(_, spec)| self.unfilled(spec.numa)).sum()
    }

    /// A node's memory, less what the pool is still to take of it.
    pub(crate) fn memory_to_take(&self, numa: u32) -> Result<Memory, Error> {
        let Memory { total, spare } = self.host.memory(numa).during("Asking for a node's memory")?;
        Ok(Memory { total, spare: self.less(spare, self.unfilled(numa)) })
    }

    /// What programs can still allocate, less what the pool is still to take.
    pub(crate) fn available_to_take(&self) -> Result<Bytes, Error> {
        Ok(self.less(self.host.available().during("Asking for the host's memory")?, self.all_unfilled()))
    }

    fn less(&self, bytes: Bytes, slices: u32) -> Bytes {
        Bytes(bytes.0.saturating_sub(self.host.page().size(slices).0))
    }

    /// How many of these slices of a node can be taken now. If it is not all of them, a note says why.
    pub(crate) fn most_to_take(&mut self, numa: u32, more: u32) -> Result<u32, Error> {
        if self.host.page() != Page::Base {
            return Ok(more);
        }
        let (margin, count) = self.margin()?;
        let node = self.memory_to_take(numa)?.spare.0.saturating_sub(margin / count);
        let all = self.available_to_take()?.0.saturating_sub(margin);
        let page = self.host.page();
        let room = u32::try_from(node.min(all) / page.bytes()).unwrap_or(u32::MAX);
        if room < more {
            let (room, more, margin) = (page.size(room), page.size(more), Bytes(margin));
            self.notes.push(format!("node {numa}: the host can spare {room} of {more}, and {margin} stay with it"));
        }
        Ok(more.min(room))
    }

    /// The memory that stays with the host, and the number of its nodes.
    fn margin(&self) -> Result<(u64, u64), Error> {
        let nodes = self.host.nodes().during("Asking for the host's nodes")?;
        let memory = nodes.iter().map(|numa| Ok(self.host.memory(*numa)?.total.0)).sum::<std::io::Result<u64>>();
        Ok((margin(Bytes(memory.during("Asking for a node's memory")?)).0, nodes.len().max(1) as u64))
    }

    /// The nodes of which a slice can be filled with zeros now. The kernel reserves huge pages, so these always can be.
    pub(crate) fn nodes_to_fill(&self) -> Result<Vec<NodeIdx>, Error> {
        let Some(live) = &self.live else { return Ok(Vec::new()) };
        let nodes = live.pool.layout().nodes();
        if live.page != Page::Base {
            return Ok(nodes.map(|(node, _)| node).collect());
        }
        let mut fills: Vec<(NodeIdx, u32)> = nodes.map(|(node, spec)| (node, spec.numa)).collect();
        fills.retain(|(_, numa)| self.unfilled(*numa) > 0);
        if fills.is_empty() || self.all_unfilled() <= self.held_beyond() {
            return Ok(Vec::new());
        }
        let ((margin, count), slice) = (self.margin()?, live.page.bytes());
        if self.host.available().during("Asking for the host's memory")?.0 < margin + slice {
            return Ok(Vec::new());
        }
        // An allocation from a node that has nothing left would end programs.
        let spare = |numa: u32| self.host.memory(numa).is_ok_and(|memory| memory.spare.0 >= margin / count + slice);
        Ok(fills.into_iter().filter(|(_, numa)| spare(*numa)).map(|(node, _)| node).collect())
    }

    /// Why slices are not filled, if they could be.
    pub(crate) fn why_not_filled(&self) -> Option<String> {
        let unfilled = self.all_unfilled();
        let waits = unfilled > 0 && self.nodes_to_fill().is_ok_and(|nodes| nodes.is_empty());
        let (size, held) = (self.host.page().size(unfilled), self.held);
        waits.then(|| match unfilled <= self.held_beyond() {
            true => format!(
                "{size} are not filled: processes still hold {held} of memory that was filled and that no file has any \
                 more, in pipes or devices (of VMs that ended)"
            ),
            false => format!("{size} are not filled: the host has no memory to spare now"),
        })
    }
}
