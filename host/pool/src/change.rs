//! A change of the kernel's number of huge pages: the pages of other users are noted before, and their number stays.
//!
//! Before: `reserve`, `lend` or `owed` is about to change how many pages the kernel reserves. After: the kernel's
//! number is that of the others' pages plus that of the pool's by its state and what the pool owes, whether the change
//! succeeded or not.
//! Threads: the owner's. Units: huge pages.
//! Promise: a change that failed is undone or completed at once. If that fails as well, or if its author died, this is
//! done before the next change, so that a later change never takes pages of the pool for pages of others.

use crate::map::SliceState;

use crate::error::{During, Error};
use crate::journal::Others;
use crate::reserve::Reserve;

impl Reserve {
    /// Changes the number of pages of nodes, and the state.
    pub(crate) fn change(&mut self, change: impl FnOnce(&mut Self) -> Result<(), Error>) -> Result<(), Error> {
        self.begin()?;
        if let Err(error) = change(self) {
            // At once: others may change the number meanwhile, and a later recovery would undo their change as well.
            if let Err(error) = self.recover() {
                tracing::warn!("Undoing a change of the pool that failed: {error}");
            }
            return Err(error);
        }
        self.end()
    }

    /// Notes the number of huge pages that do not belong to the pool.
    pub(crate) fn begin(&mut self) -> Result<(), Error> {
        self.recover()?;
        let nodes = self.host.nodes().during("Asking for the host's nodes")?;
        let other = |numa: u32| {
            let pages = self.host.pages(numa).during("Asking for huge pages")?;
            Ok((numa, pages.total.saturating_sub(u64::from(self.has(numa)) + self.owes(numa)?)))
        };
        let others = Others(nodes.into_iter().map(other).collect::<Result<_, Error>>()?);
        self.journal.begin(&others).during("Writing the pool's journal")
    }

    /// Makes the memory match the state, if a change was begun and did not end.
    pub(crate) fn recover(&mut self) -> Result<(), Error> {
        let Some(others) = self.journal.pending().during("Reading the pool's journal")? else { return Ok(()) };
        if let Some(live) = &mut self.live {
            for number in live.files.numbers().during("Listing the pool's files")? {
                let brick = live.brick(number);
                live.empty(brick, |state| matches!(state, SliceState::Hole | SliceState::Borrow))?;
            }
        }
        for (numa, count) in &others.0 {
            // Slices may still wait for owed pages.
            let total = count + u64::from(self.has(*numa)) + self.owes(*numa)?;
            self.host.set_pages(*numa, total).during("Setting the number of huge pages")?;
        }
        self.end()
    }

    fn end(&mut self) -> Result<(), Error> {
        self.journal.end().during("Ending the pool's journal")
    }
}
