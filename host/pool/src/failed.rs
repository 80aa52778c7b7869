//! Memory of the pool that failed: it is found, never handed out again, and reported with its owner.
//!
//! The kernel counts pages whose memory failed (`HardwareCorrupted` in `/proc/meminfo`). When that number changes,
//! every page of the pool is checked. The kernel keeps a failed page in its file, and `UFFDIO_CONTINUE` reports it
//! without touching it (`ballast_sys::hugetlb`). The slice is then marked, and the mark outlives the owner. The page
//! still counts as the pool's. The kernel gives a failed page to no process, wherever it is. So the number of huge
//! pages and the number of slices stay the same, and other users of huge pages do not lose a page.
//!
//! A VM keeps a failed slice that belongs to it. It learns of the failure as of any other failed page. When it touches
//! the page, the kernel sends the VMM the SIGBUS of a machine check, or the engine sends it if the page is not mapped.
//!
//! A page that a VM has on demand is no slice. It stays in the VM's file until the VM ends, and is named once by each
//! owner of the pool.
//!
//! A VM may punch its failed page out of its file before it is checked. The kernel keeps such a page and counts it as
//! used, and the pool has a slice without a page; see [`Reserve::replenish`].
//!
//! Before: `reserve` is about to hand out memory, or looks for VMs that are gone. After: events, and the overview.
//! Threads: the owner's. Units: slices; pages of 4 KiB as the kernel counts them.
//! Promise: a VM never gets memory whose failure was counted before the VM requested memory.

use crate::map::{Content, Extent, Hit, SliceIdx, SliceState};
use ballast_sys::Mapping;
use ballast_sys::hugetlb::{Place, Presence};

use crate::error::{During, Error};
use crate::failure::Failure;
use crate::live::Live;
use crate::reserve::Reserve;

impl Reserve {
    /// Checks every page of the pool, if the kernel's count of failures has changed since the last check.
    pub fn find_failures(&mut self) -> Result<(), Error> {
        let pages = self.host.failed_pages().during("Asking how much memory has failed")?;
        if pages == self.failed_pages {
            return Ok(());
        }
        let Some(live) = &mut self.live else { return Ok(()) };
        let mut found = Vec::new();
        for number in live.files.numbers().during("Listing the pool's files")? {
            // A file that cannot be checked (a VM made it shorter, say) does not prevent the check of the others.
            match live.failed_in(live.brick(number)) {
                Ok(failed) => found.extend(failed),
                Err(error) => tracing::warn!("Looking for failed memory in file {number} of the pool: {error}"),
            }
        }
        self.failures.extend(live.failed_on_demand());
        self.failed_pages = pages;
        self.mark(&found)
    }

    /// Marks these slices, so that they are never handed out again, and records them for a report.
    fn mark(&mut self, slices: &[SliceIdx]) -> Result<(), Error> {
        let Some(live) = &mut self.live else { return Ok(()) };
        for at in slices {
            let owner = match live.pool.poison(*at)? {
                Hit::Known | Hit::NotOurs => continue,
                Hit::Free => {
                    // So no file has a page of a failed slice without an owner (see `owed.rs`).
                    live.empty(Extent { start: *at, slices: 1 }, |_| true)?;
                    None
                }
                Hit::Owned { vm, guest, .. } => {
                    Some((live.names.get(&vm.0.get()).cloned().unwrap_or_default(), live.page.size(guest.0)))
                }
            };
            self.failures.push(Failure { numa: live.numa_of(*at), slice: Some(at.0), page: live.page, owner });
        }
        Ok(())
    }

    /// Returns failures since the last call.
    pub fn take_failures(&mut self) -> Vec<Failure> {
        std::mem::take(&mut self.failures)
    }
}

impl Live {
    pub(crate) fn numa_of(&self, at: SliceIdx) -> u32 {
        let node = self.first_slices().filter(|(first, _)| *first <= at.0).last();
        node.map_or(0, |(_, spec)| spec.numa)
    }

    /// Returns unmarked slices of this brick whose memory failed. The page of a slice to be zeroed does not matter.
    fn failed_in(&mut self, brick: Extent) -> Result<Vec<SliceIdx>, Error> {
        const WHAT: &str = "Looking for memory that failed";
        let has_page =
            |at: &SliceIdx| matches!(self.pool.state(*at), SliceState::Used | SliceState::Free(Content::Zeroed));
        let slices: Vec<SliceIdx> = brick.each().filter(has_page).collect();
        if slices.is_empty() {
            return Ok(Vec::new());
        }
        let file = self.files.get(brick.start.0 / brick.slices).during(WHAT)?;
        let len = self.page.size(brick.slices).0 as usize;
        let map = Mapping::shared(&*file, 0, len).during(WHAT)?;
        let presence = Presence::new(map, self.page.bytes() as usize).during(WHAT)?;
        let fails = |at: &SliceIdx| Ok(presence.place(self.offset(*at) as usize)? == Place::Failed);
        let failed = slices.into_iter().filter_map(|at| fails(&at).map(|fails| fails.then_some(at)).transpose());
        failed.collect::<std::io::Result<_>>().during(WHAT)
    }

    /// Returns failed pages of VMs on demand that were not returned before.
    fn failed_on_demand(&mut self) -> Vec<Failure> {
        let mut found = Vec::new();
        for (vm, promise) in &self.promises {
            let mut start = 0;
            for (part, (numa, slices)) in promise.parts.iter().enumerate() {
                let failed = self.files.failed_on_demand(*vm, part, self.page, *slices);
                let failed = failed.unwrap_or_else(|error| {
                    tracing::warn!("Looking for failed memory of VM {}: {error}", promise.name);
                    Vec::new()
                });
                for at in failed.into_iter().map(|at| start + at).filter(|at| self.told.insert((*vm, *at))) {
                    let owner = Some((promise.name.clone(), self.page.size(at)));
                    found.push(Failure { numa: *numa, slice: None, page: self.page, owner });
                }
                start += slices;
            }
        }
        found
    }
}
