//! Huge pages of others that the kernel counts as reserved ones since the pool grew, until it counts them no more.
//!
//! A program may use huge pages beyond the reserved ones (`nr_overcommit_hugepages`). When more are reserved, the
//! kernel first calls those reserved, and allocates only the rest. So the pool asks for as many more, and *owes* them:
//! when its own pages are in its files, or enough are free, the number goes down again. The kernel then frees pages
//! that nobody uses, and calls the others what they were.
//!
//! The same goes the other way: while others have pages beyond the reserved ones, the first pages that the pool's VMs
//! free go to the host, and pages of others count as reserved from then on. And a page that something holds (a pipe, a
//! device, the kernel itself if its memory failed) counts as reserved, and nobody gets it. Then slices wait, and the
//! pool asks for other pages (`replenish`), which it owes as well.
//!
//! Before: `reserve` grows. After: the kernel's number is what others had and what the pool has.
//! Threads: the owner's. Units: pages of 2 MiB.
//! Promise: a page that the pool or its VMs still want is not given away. If the owner dies over it, the journal has
//! the right number, and nothing is owed any more.

use std::collections::BTreeMap;

use ballast_pool::SLICE_SIZE;
use ballast_sys::memfd;

use crate::journal;
use crate::reserve::{During, Error, Reserve};

const FILE: &str = "owed.json";
/// How often waiting slices are tried in vain before others take the place of their pages.
const IN_VAIN: u32 = 3;
/// No more pages take the place of others than this part of the pool's, or this number: who holds pages of the pool
/// could have all of the host's otherwise.
const MOST_PART: u64 = 64;
const MOST: u64 = 8;
/// This part of the host's memory stays free.
const FREE_PART: u64 = 64;

impl Reserve {
    /// What is owed, by what the host calls a node.
    pub(crate) fn owed(&self) -> Result<BTreeMap<u32, u64>, Error> {
        Ok(journal::load(&self.dir.join(FILE)).during("Reading what the pool owes")?.unwrap_or_default())
    }

    /// What is owed of a node.
    pub(crate) fn owes(&self, numa: u32) -> Result<u64, Error> {
        Ok(self.owed()?.remove(&numa).unwrap_or_default())
    }

    /// This number more is owed, or less.
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

    /// The kernel's number is right.
    pub(crate) fn owe_nothing(&self) -> Result<(), Error> {
        journal::remove(&self.dir.join(FILE)).during("Forgetting what is owed")
    }

    /// All waiting slices were tried once more. If none of them found a page, several times, the kernel is asked for
    /// other pages.
    ///
    /// # Errors
    /// The kernel does not say what it has, or refuses.
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
        let mut room = memory.spare.0.saturating_sub(memory.total.0 / FREE_PART) / SLICE_SIZE;
        for (numa, wanted) in wanted {
            let most = (u64::from(self.has(numa)) / MOST_PART).max(MOST);
            let beyond = self.host.pages(numa).during("Asking for huge pages")?.surplus + self.owes(numa)?;
            let more = wanted.min(room).min(most.saturating_sub(beyond));
            if more > 0 {
                self.begin()?;
                let got = self.host.change_pages(numa, more as i64).during("Reserving huge pages")?.max(0);
                self.owe(numa, got)?;
                self.end()?;
                room -= (got as u64).min(room);
            }
        }
        Ok(())
    }

    /// Slices of a node that are nobody's because their memory failed: there is no page for them.
    fn failed(&self, numa: u32) -> u32 {
        let Some(live) = &self.live else { return 0 };
        live.node(numa).ok().and_then(|node| live.pool.stats(node)).map_or(0, |stats| stats.mce)
    }

    /// Give back what can be.
    pub(crate) fn give_back(&mut self) -> Result<(), Error> {
        for (numa, owed) in self.owed()? {
            let missing = u64::from(self.has(numa) - self.failed(numa)).saturating_sub(self.in_files(numa)?);
            let free = self.host.pages(numa).during("Asking for huge pages")?.free;
            let back = if missing == 0 { owed } else { owed.min(free.saturating_sub(missing)) };
            if back > 0 {
                self.begin()?;
                self.host.change_pages(numa, -(back as i64)).during("Giving huge pages back")?;
                self.owe(numa, -(back as i64))?;
                self.end()?;
            }
        }
        Ok(())
    }

    /// Pages of a node that are in the pool's files.
    fn in_files(&mut self, numa: u32) -> Result<u64, Error> {
        let Some(live) = &mut self.live else { return Ok(0) };
        let brick = live.pool.layout().brick_slices();
        let here = live.first_slices().find(|(_, spec)| spec.numa == numa);
        let Some((first, spec)) = here else { return Ok(0) };
        let mut pages = 0;
        for number in live.files.numbers().during("Listing the pool's files")? {
            if (first..first + spec.slices).contains(&number.saturating_mul(brick)) {
                let file = live.files.get(number).during("Opening a file of the pool")?;
                pages += memfd::resident(&*file).during("Looking at a file of the pool")?.bytes().0 / SLICE_SIZE;
            }
        }
        Ok(pages)
    }
}
