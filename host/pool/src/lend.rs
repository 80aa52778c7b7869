//! Lending: unused slices go to the host and come back, by command or when the host's memory pressure changes.
//!
//! Before: the host is short of memory, or has memory to spare again. After: the kernel has fewer or more pages
//! reserved. Threads: the owner's. Promise: a VM keeps its memory; the state marks a slice as lent before its page is
//! released.

use std::io;

use crate::map::{NodeIdx, NodeSpec, SliceState};
use ballast_base::Bytes;
use serde::{Deserialize, Serialize};

use crate::error::{During, Error};
use crate::host::Memory;
use crate::journal;
use crate::reserve::Reserve;

const FILE: &str = "lending.json";

/// Limits of lending while the host is short of memory. They outlive the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lending {
    /// Amount that is always lent.
    pub least: Bytes,
    /// Amount that is lent at most.
    pub most: Bytes,
}

impl Reserve {
    /// Allows lending up to `most` while the host is short of memory. The amount that is lent now becomes the amount
    /// that is always lent. `None` removes the limits, and the amount that is lent now stays lent.
    ///
    /// # Errors
    /// There is no pool, or the directory cannot be written.
    pub fn set_lending(&mut self, most: Option<Bytes>) -> Result<(), Error> {
        if self.live.is_none() {
            return Err(Error::Request("nothing is reserved that could be lent".into()));
        }
        const WHAT: &str = "Writing what may be lent";
        let file = self.dir.join(FILE);
        match most {
            Some(most) => {
                let most = Bytes(most.0 - most.0 % self.host.page().bytes());
                journal::store(&file, &Lending { least: self.lent(), most }).during(WHAT)
            }
            None => journal::remove(&file).during(WHAT),
        }
    }

    /// Returns the limits that were set.
    pub fn lending(&self) -> Result<Option<Lending>, Error> {
        journal::load(&self.dir.join(FILE)).during("Reading what may be lent")
    }

    /// Returns how much of the pool is lent to the host.
    pub fn lent(&self) -> Bytes {
        let Some(live) = &self.live else { return Bytes(0) };
        let stats = live.pool.layout().nodes().filter_map(|(node, _)| live.pool.stats(node));
        self.host.page().size(stats.map(|stats| stats.lent).sum())
    }

    /// Returns the host's memory, and how much of it programs can still allocate.
    pub fn host_memory(&self) -> Result<Memory, Error> {
        let nodes = self.host.nodes().during("Asking for the host's nodes")?;
        let total = nodes.into_iter().map(|node| Ok(self.host.memory(node)?.total.0)).sum::<io::Result<u64>>();
        let total = Bytes(total.during("Asking for a node's memory")?);
        Ok(Memory { total, spare: self.host.available().during("Asking for the host's memory")? })
    }

    /// Sets the amount that is lent, in all or of this node, and lends or takes back slices. The notes name failures.
    ///
    /// # Errors
    /// There is no pool or no such node, or the kernel refuses.
    pub fn lend(&mut self, bytes: Bytes, node: Option<u32>) -> Result<(), Error> {
        let page = self.host.page();
        let live = self.live.as_ref().ok_or_else(|| Error::Request("nothing is reserved that could be lent".into()))?;
        if let Some(numa) = node {
            live.node(numa)?;
        }
        let nodes: Vec<_> =
            live.pool.layout().nodes().filter(|(_, spec)| node.is_none_or(|numa| numa == spec.numa)).collect();
        let each = bytes.0.div_ceil(page.bytes()).div_ceil(nodes.len().max(1) as u64);
        let each = u32::try_from(each).map_err(|_| Error::Request(format!("{bytes} is more than the pool can be")))?;
        self.notes.clear();
        self.change(|reserve| nodes.iter().try_for_each(|(at, spec)| reserve.lend_of(*at, *spec, each)))
    }

    /// Lends slices of a node until this number is lent, or takes back the surplus.
    fn lend_of(&mut self, at: NodeIdx, spec: NodeSpec, each: u32) -> Result<(), Error> {
        let page = self.host.page();
        let Some(live) = &mut self.live else { return Ok(()) };
        let lent = live.pool.stats(at).map_or(0, |stats| stats.lent);
        if lent >= each {
            return self.add(spec.numa, lent - each);
        }
        let unpromised = live.unpromised(spec.numa)?;
        let extents = live.pool.lend(at, (each - lent).min(unpromised));
        for brick in extents.iter().flat_map(|extent| live.pool.bricks(*extent)).collect::<Vec<_>>() {
            live.empty(brick, |state| state == SliceState::Borrow)?;
        }
        let went: u32 = extents.iter().map(|extent| extent.slices).sum();
        // If another process holds the page, the kernel releases it when the process frees it.
        self.host.change_pages(spec.numa, -i64::from(went)).during("Lending huge pages")?;
        if went < each - lent {
            let (now, want) = (page.size(lent + went), page.size(each));
            self.notes.push(format!(
                "node {}: {now} of {want} are lent: the rest is in use or promised, or in files that VMs use",
                spec.numa
            ));
        }
        Ok(())
    }
}
