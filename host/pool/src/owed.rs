//! Surplus huge pages of others that the kernel counts as reserved since the pool grew, until it no longer does.
//!
//! A program may use surplus huge pages, beyond the reserved ones (`nr_overcommit_hugepages`). When the number of
//! reserved pages is raised, the kernel first converts surplus pages to reserved ones, and allocates only the rest. So
//! the pool raises the number by that many more, and *owes* them. When its own pages are in its files, or enough pages
//! are free, the pool lowers the number again. The kernel then frees unused pages, and counts the others as surplus
//! again.
//!
//! The reverse happens, too. While others have surplus pages, the kernel releases the first pages that the pool's VMs
//! free to the host, and counts pages of others as reserved. And a page that something holds (a pipe, a device, or the
//! kernel itself if its memory failed) counts as reserved although it cannot be used. Then slices wait, and the pool
//! reserves other pages (`replenish`), which it owes as well.
//!
//! Before: `reserve` grows. After: the kernel's number is the sum of what others had and what the pool has. Threads:
//! the owner's. Units: huge pages.
//! Promise: a page that the pool or its VMs still need is not given away, even if a change fails or its author dies:
//! the account is written in one piece, and the next owner keeps the number of pages that it has.

use std::collections::BTreeMap;

use ballast_sys::memfd;

use crate::balance::margin;
use crate::error::{During, Error};
use crate::host::Page;
use crate::journal;
use crate::reserve::Reserve;

const FILE: &str = "owed.json";
/// Failed rounds over all waiting slices before the pool reserves other pages for them.
const IN_VAIN: u32 = 3;
/// At most 1/64 of the pool's slices, or 16 MiB or one slice if that is more, are replaced by others. Otherwise a
/// program that holds pages of the pool could take all of the host's memory.
const MOST_PART: u64 = 64;
const MOST: u64 = 16 << 20;

/// Most slices of a pool of `slices` that may be replaced by others while processes hold their pages.
pub(crate) fn most_replaced(slices: u64, page: Page) -> u64 {
    (slices / MOST_PART).max((MOST / page.bytes()).max(1))
}

impl Reserve {
    pub(crate) fn owed(&self) -> Result<BTreeMap<u32, u64>, Error> {
        Ok(journal::load(&self.dir.join(FILE)).during("Reading what the pool owes")?.unwrap_or_default())
    }

    pub(crate) fn owes(&self, numa: u32) -> Result<u64, Error> {
        Ok(self.owed()?.remove(&numa).unwrap_or_default())
    }

    pub(crate) fn owe(&self, numa: u32, by: i64) -> Result<(), Error> {
        let mut owed = self.owed()?;
        let now = owed.remove(&numa).unwrap_or_default().saturating_add_signed(by);
        if now > 0 {
            owed.insert(numa, now);
        }
        if owed.is_empty() {
            return self.owe_nothing();
        }
        journal::store(&self.dir.join(FILE), &owed).during("Writing what the pool owes")
    }

    /// Clears the account: the kernel's number is right.
    pub(crate) fn owe_nothing(&self) -> Result<(), Error> {
        journal::remove(&self.dir.join(FILE)).during("Forgetting what is owed")
    }

    /// Called after each waiting slice was tried once more. If none of them found a page in several rounds, this
    /// reserves other pages, as long as the host keeps its margin.
    ///
    /// # Errors
    /// The kernel does not report its numbers, or refuses.
    pub fn replenish(&mut self, found_a_page: bool) -> Result<(), Error> {
        let Some(live) = &self.live else { return Ok(()) };
        self.in_vain = if found_a_page || live.waiting.is_empty() { 0 } else { self.in_vain + 1 };
        if self.in_vain < IN_VAIN {
            return Ok(());
        }
        self.in_vain = 0;
        let mut wanted = BTreeMap::<u32, u64>::new();
        for dirty in &live.waiting {
            *wanted.entry(live.numa_of(dirty.extent().start)).or_default() += u64::from(dirty.extent().slices);
        }
        let memory = self.host_memory()?;
        let mut room = memory.spare.0.saturating_sub(margin(memory.total).0) / self.host.page().bytes();
        for (numa, wanted) in wanted {
            let most = most_replaced(self.has(numa).into(), self.host.page());
            let beyond = self.host.pages(numa).during("Asking for huge pages")?.surplus + self.owes(numa)?;
            let more = wanted.min(room).min(most.saturating_sub(beyond));
            if more > 0 {
                self.change(|reserve| {
                    let got = reserve.host.change_pages(numa, more as i64).during("Reserving huge pages")?.max(0);
                    room -= (got as u64).min(room);
                    reserve.owe(numa, got)
                })?;
            }
        }
        Ok(())
    }

    /// Returns the number of slices of a node that no VM has because their memory failed. They have no page.
    fn failed(&self, numa: u32) -> u32 {
        let Some(live) = &self.live else { return 0 };
        live.node(numa).ok().and_then(|node| live.pool.stats(node)).map_or(0, |stats| stats.mce)
    }

    /// Gives back as many owed pages as possible.
    pub(crate) fn give_back(&mut self) -> Result<(), Error> {
        for (numa, owed) in self.owed()? {
            let missing = u64::from(self.has(numa) - self.failed(numa)).saturating_sub(self.in_files(numa)?);
            let free = self.host.pages(numa).during("Asking for huge pages")?.free;
            let back = if missing == 0 { owed } else { owed.min(free.saturating_sub(missing)) };
            if back > 0 {
                self.change(|reserve| {
                    reserve.host.change_pages(numa, -(back as i64)).during("Giving huge pages back")?;
                    reserve.owe(numa, -(back as i64))
                })?;
            }
        }
        Ok(())
    }

    /// Returns the number of pages of a node that are in the pool's files.
    fn in_files(&mut self, numa: u32) -> Result<u64, Error> {
        let page = self.host.page().bytes();
        let Some(live) = &mut self.live else { return Ok(0) };
        let brick = live.pool.layout().brick_slices();
        let here = live.first_slices().find(|(_, spec)| spec.numa == numa);
        let Some((first, spec)) = here else { return Ok(0) };
        let mut pages = u64::from(live.on_demand_of(numa)?.touched);
        for number in live.files.numbers().during("Listing the pool's files")? {
            if (first..first + spec.slices).contains(&number.saturating_mul(brick)) {
                let file = live.files.get(number).during("Opening a file of the pool")?;
                pages += memfd::resident(&*file).during("Looking at a file of the pool")?.bytes().0 / page;
            }
        }
        Ok(pages)
    }
}
