//! Unused slices go to the host, and come back.
//!
//! Before: the host is short of memory, or has it to spare again. After: the kernel has fewer or more pages reserved.
//! Threads: the owner's. Promise: what a VM has stays; the state says that a slice is lent before its page goes.

use ballast_base::Bytes;
use ballast_pool::unit::slices_to_bytes;
use ballast_pool::{Kind, SLICE_SIZE, SliceState};

use crate::reserve::{During, Error, Reserve};

impl Reserve {
    /// So much is lent from now on, in all, or of this node: more goes, or some comes back. What could not be done is
    /// said in the notes.
    ///
    /// # Errors
    /// If there is no pool or no such node, or the kernel refuses.
    pub fn lend(&mut self, bytes: Bytes, node: Option<u32>) -> Result<(), Error> {
        let live = self.live.as_ref().ok_or_else(|| Error::Request("nothing is reserved that could be lent".into()))?;
        if let Some(numa) = node {
            live.node(numa)?;
        }
        let nodes: Vec<_> =
            live.pool.layout().nodes().filter(|(_, spec)| node.is_none_or(|numa| numa == spec.numa)).collect();
        let each = bytes.0.div_ceil(SLICE_SIZE).div_ceil(nodes.len().max(1) as u64);
        let each = u32::try_from(each).map_err(|_| Error::Request(format!("{bytes} is more than the pool can be")))?;
        self.notes.clear();
        self.begin()?;
        for (at, spec) in nodes {
            let Some(live) = &mut self.live else { break };
            let lent = live.pool.stats(at).map_or(0, |stats| stats.lent);
            if lent >= each {
                self.add(spec.numa, lent - each)?;
                continue;
            }
            let extents = live.pool.lend(at, Kind::Hugetlb, each - lent);
            for brick in extents.iter().flat_map(|extent| live.pool.bricks(*extent)).collect::<Vec<_>>() {
                live.empty(brick, |state| state == SliceState::Borrow)?;
            }
            let went: u32 = extents.iter().map(|extent| extent.slices).sum();
            // One that somebody holds goes when it is free.
            self.host.change_pages(spec.numa, -i64::from(went)).during("Lending huge pages")?;
            if went < each - lent {
                let (now, want) = (slices_to_bytes(lent + went), slices_to_bytes(each));
                self.notes.push(format!(
                    "node {}: {now} of {want} are lent: the rest is in use, or in files that VMs use",
                    spec.numa
                ));
            }
        }
        self.end()
    }
}
