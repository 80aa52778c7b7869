//! Who is hot: what a guest touched, how hot its memory is, and which pages look cold enough to be taken.
//!
//! Before: an [`AccessSource`] says what was touched in a cycle; the pager shows its table of pages through [`Pages`].
//! After: its reclaim lane quarantines what [`HeatSource::pick`] proposes, and tells what happened through the age byte;
//! the API shows ages and the working set; tiering and sharing ask for skew.
//! Threads: a VM's [`Tracker`] is shared by its tracking lane, its reclaim lane and the API; [`touched`] is pure and called
//! by fault lanes.
//! Promise: no I/O but in sources, no unsafe; proposes only pages that are in the file and Resident.
//!
//! | HugeScope's Figure 5 | here |
//! |---|---|
//! | start and end the coarse path | [`AccessSource`] with a [`Watch`] of coarse units; [`Phase::Coarse`] |
//! | start and end the fine path | the same with fine units; [`Phase::Fine`] |
//! | hot huge pages and base pages | [`Tracker::generation`], [`Tracker::units`] |
//! | page-size policy | [`size_policy::plan`] |
//! | custom candidate set | its `candidates` |
#![forbid(unsafe_code)]

mod age;
pub mod ages;
pub mod chance;
pub mod damon;
mod entry;
pub mod generations;
pub mod inside;
pub mod pace;
mod pick;
mod quota;
pub mod record;
pub mod sample;
pub mod scripted;
mod shared;
pub mod size_policy;
pub mod source;
pub mod subpage;
mod tracker;
pub mod units;

use ballast_base::PageIdx;

pub use age::{Age, touched};
pub use ages::{Heat, heat};
pub use entry::Entry;
pub use pick::{HeatSource, push_run};
pub use shared::VmHeat;
pub use source::{AccessSource, PageMap, Report, Seen, UnitId, Watch};
pub use tracker::{Phase, RECENT, Settings, Step, Tracker};

/// A run of candidate pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColdRun {
    /// Number of the region in its VM.
    pub region: u32,
    /// First page.
    pub first: PageIdx,
    /// How many pages.
    pub count: u64,
}

/// What a source may know about a VM's pages.
pub trait Pages {
    /// Regions the VM has; numbers of regions that were unplugged have zero pages.
    fn regions(&self) -> u32;

    /// Pages in a region.
    fn len(&self, region: u32) -> u64;

    /// Pages of a region that are taken as one: each such *granule* begins at a multiple of this many pages, and is taken
    /// whole or not at all. What is true of one of its pages is true of all.
    fn granule(&self, _region: u32) -> u64 {
        1
    }

    /// The first run of pages in `from..until` that are in the file, as `(first, end)`, cut at `until`.
    fn next_present(&self, region: u32, from: PageIdx, until: PageIdx) -> Option<(PageIdx, PageIdx)>;

    /// The age byte of a page that is Resident and free to take; `None` for any other page.
    fn age(&self, region: u32, page: PageIdx) -> Option<u8>;

    /// Write the age byte of a page if it is still Resident and free.
    fn set_age(&self, region: u32, page: PageIdx, age: u8);
}

/// How choosy a pick is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// Only pages that look cold.
    Cold,
    /// The next pages whatever they look like: the VM is over its limit and some must go.
    Any,
}
