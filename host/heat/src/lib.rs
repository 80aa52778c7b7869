//! Heat: what a guest touched, how hot its memory is, and which pages are cold enough to be reclaimed.
//!
//! Before: an [`AccessSource`] reports what was touched in a cycle; the pager shows its table of pages through
//! [`Pages`]. After: the reclaim worker quarantines the pages that [`HeatSource::pick`] proposes, and reports the
//! result through the age byte; the API shows ages and the working set.
//! Threads: a VM's tracking worker, its reclaim worker and the API share its [`Tracker`]; fault workers call
//! [`touched`], which is pure.
//! Promise: no I/O outside sources, no unsafe code; proposes only pages that are in the file and Resident.
//!
//! | HugeScope's Figure 5 | here |
//! |---|---|
//! | start and end the coarse path | [`AccessSource`] with a [`Watch`] of coarse units; [`Phase::Coarse`] |
//! | start and end the fine path | [`AccessSource`] with fine units; [`Phase::Fine`] |
//! | hot huge pages and base pages | [`Tracker::units`] |
//! | page-size policy, page placement | [`placement::plan`] |
#![forbid(unsafe_code)]

mod age;
pub mod ages;
mod entry;
pub(crate) mod generations;
pub(crate) mod moment;
mod pick;
pub mod placement;
mod scanned;
#[cfg(test)]
mod scripted;
mod shared;
pub mod source;
mod tracker;
pub(crate) mod units;

use ballast_base::{PageIdx, PageRange};

pub use age::{Age, touched};
pub use ages::{Heat, heat};
pub use entry::Entry;
pub use pick::{HeatSource, is_candidate, push_run};
pub use shared::{Cycle, Turn, VmHeat};
pub use source::{AccessSource, CycleReport, PageMap, Phase, Seen, UnitId, Watch};
pub use tracker::{Settings, Spent, Step, Tracker};

/// A run of candidate pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColdRun {
    /// Number of the region in its VM.
    pub region: u32,
    /// The pages.
    pub pages: PageRange,
}

/// Heat's view of a VM's pages.
pub trait Pages {
    /// Number of regions; an unplugged region has zero pages.
    fn regions(&self) -> u32;

    /// Pages of a region.
    fn len(&self, region: u32) -> u64;

    /// Pages of a region that are reclaimed as one, in one state. Each *granule* begins at a multiple of this number.
    fn granule(&self, _region: u32) -> u64 {
        1
    }

    /// The first run of `pages` that is in the file.
    fn next_present(&self, region: u32, pages: PageRange) -> Option<PageRange>;

    /// The age byte of a page that is Resident and can be reclaimed; `None` for any other page.
    fn age(&self, region: u32, page: PageIdx) -> Option<u8>;

    /// Writes the age byte of a page if it is still Resident and unlocked.
    fn set_age(&self, region: u32, page: PageIdx, age: u8);
}

/// Which pages a pick may propose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// Only cold pages.
    Cold,
    /// The next pages, hot or not: the VM is above its limit.
    Any,
}
