//! The parts of the pool, one for each size of pages: their directories, their work, and their figures for the API.
//!
//! Before: `pool` opens the pool. After: `pool` uses the part whose pages a request is about. Threads: the lock of
//! `pool` is held, except for jobs, which run without it.
//! Promise: a part that cannot be opened does not keep the others from VMs. Pages of 2 MiB are zeroed first: to zero a
//! page of 1 GiB takes 100 ms or more, and a VM on pages of 2 MiB waits for that at most once.

use std::collections::VecDeque;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ballast_api::{PoolNode, PoolPages, PoolStat, PoolVm};
use ballast_base::Invalid;
use ballast_base::pool::Pages;
use ballast_pool::map::Mode;
use ballast_pool::{Error, Host, Job, Page, Reserve};
use ballast_sys::memfd::FileId;

#[derive(Debug)]
pub(super) struct Parts(Vec<(Page, Part)>);

/// A part, or why it cannot be used.
type Part = Result<Reserve, Invalid>;

/// Slices to zero; those that found no page before come first.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    jobs: VecDeque<(Page, Job)>,
    /// For each part: its remaining jobs for slices that found no page before, and whether one of these jobs found a
    /// page.
    again: [(usize, bool); 2],
}

impl Parts {
    pub fn dir(pool: &Path, page: Page) -> PathBuf {
        match page {
            Page::Huge => pool.into(),
            Page::Gib => pool.join("gib"),
        }
    }

    /// Opens all parts, or those that can be used. Fails if another engine has a part, or none can be used.
    pub fn open(pool: &Path) -> Result<Self, Error> {
        let (mut parts, mut first) = (Vec::new(), None);
        for page in Page::ALL {
            let part = match open(pool, page) {
                Err(taken @ Error::Taken(_)) => return Err(taken),
                Err(error) => {
                    let why = why(page, &error);
                    first.get_or_insert(error);
                    Err(why)
                }
                Ok(part) => Ok(part),
            };
            parts.push((page, part));
        }
        match first.filter(|_| parts.iter().all(|(_, part)| part.is_err())) {
            Some(error) => Err(error),
            None => Ok(Self(parts)),
        }
    }

    /// Tries again to open an unusable part. Returns why it still cannot be used.
    pub fn complete(&mut self, pool: &Path) -> Option<String> {
        for (page, part) in self.0.iter_mut().filter(|(_, part)| part.is_err()) {
            *part = open(pool, *page).map_err(|error| why(*page, &error));
        }
        self.0.iter().find_map(|(_, part)| part.as_ref().err().map(ToString::to_string))
    }

    pub fn of(&mut self, page: Page) -> Result<&mut Reserve, Invalid> {
        self.0[page as usize].1.as_mut().map_err(|why| why.clone())
    }

    pub fn each(&mut self) -> impl Iterator<Item = (Page, &mut Reserve)> {
        self.0.iter_mut().filter_map(|(page, part)| Some((*page, part.as_mut().ok()?)))
    }

    /// Whether nothing must be checked, zeroed or lent until the next request. Fails if the amount that may be lent
    /// cannot be read.
    pub fn is_at_rest(&self) -> Result<bool, Error> {
        let mut parts = self.0.iter().filter_map(|(_, part)| part.as_ref().ok());
        parts.try_fold(true, |rest, part| Ok(rest && part.is_at_rest() && part.lending()?.is_none()))
    }

    /// The slices to zero: one, and with `again`, all that found no page before. Fails if the only slices to zero are
    /// some whose file cannot be opened.
    pub fn jobs(&mut self, again: bool) -> Result<Jobs, Error> {
        let (mut all, mut failed) = (Jobs::default(), Ok(()));
        for (page, part) in self.each().filter(|_| again) {
            let jobs = part.jobs_again();
            all.again[page as usize].0 = jobs.len();
            all.jobs.extend(jobs.into_iter().map(|job| (page, job)));
        }
        for (page, part) in self.each() {
            match part.next_job() {
                Ok(None) => {}
                Ok(Some(job)) => {
                    all.jobs.push_back((page, job));
                    break;
                }
                Err(error) => failed = failed.and(Err(error)),
            }
        }
        // Jobs that are due are run in any case, because a job that is dropped is never done.
        match all.jobs.is_empty() {
            true => failed.map(|()| all),
            false => Ok(all),
        }
    }

    pub fn stat(&self) -> PoolStat {
        let of = |page| stat(&self.0[page as usize].1);
        let other = |page| Some(of(page)).filter(|part| !part.nodes.is_empty() || !part.notes.is_empty()).map(Box::new);
        PoolStat { gib: other(Page::Gib), ..of(Page::Huge) }
    }
}

impl Jobs {
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub fn next(&mut self) -> Option<(Page, Job)> {
        self.jobs.pop_front()
    }

    /// Notes that a job with these pages was done. If it was its part's last one for slices that had found no page
    /// before, returns whether any of these jobs found one now.
    pub fn done(&mut self, page: Page, is_ready: bool) -> Option<bool> {
        let (left, found) = &mut self.again[page as usize];
        if *left == 0 {
            return None;
        }
        *left -= 1;
        *found |= is_ready;
        (*left == 0).then_some(*found)
    }
}

/// The part for a VM's memory, and the mode of the grant; `None` is on demand. In the part of 1 GiB pages, a slice is
/// one page.
pub(super) fn for_vm(pages: Pages) -> (Page, Option<Mode>) {
    match pages {
        Pages::Slices => (Page::Huge, Some(Mode::Slices)),
        Pages::Mix => (Page::Huge, Some(Mode::Mix)),
        Pages::Gib => (Page::Gib, Some(Mode::Slices)),
        Pages::OnDemand => (Page::Huge, None),
    }
}

pub(super) fn for_operator(pages: PoolPages) -> Page {
    match pages {
        PoolPages::Huge => Page::Huge,
        PoolPages::Gib => Page::Gib,
    }
}

pub(super) fn has(pool: &Path, file: FileId) -> bool {
    let device = |path: &Path| std::fs::metadata(path).map(|entry| entry.dev()).ok();
    Page::ALL.into_iter().any(|page| {
        let dir = Parts::dir(pool, page);
        let files = device(&dir.join(page.files()));
        // A folder without a mount has the device of its parent.
        files == Some(file.dev) && files != device(&dir)
    })
}

fn open(pool: &Path, page: Page) -> Result<Reserve, Error> {
    Reserve::open(&Parts::dir(pool, page), Host::default().with(page))
}

fn why(page: Page, error: &Error) -> Invalid {
    format!("the pool's part of pages of {} cannot be used: {error}", page.name()).into()
}

fn stat(part: &Part) -> PoolStat {
    let reserve = match part {
        Ok(reserve) => reserve,
        Err(why) => return PoolStat { notes: vec![why.to_string()], ..PoolStat::default() },
    };
    let overview = reserve.overview();
    let node = |node: ballast_pool::Node| PoolNode {
        numa: node.numa,
        reserved_bytes: node.reserved.0,
        ready_bytes: node.ready.0,
        ready_gib_bytes: node.ready_aligned.0,
        used_bytes: node.used.0,
        fenced_bytes: node.fenced.0,
        dirty_bytes: node.dirty.0,
        lent_bytes: node.lent.0,
        failed_bytes: node.failed.0,
        map: node.map,
    };
    let vm = |vm: ballast_pool::Tenant| PoolVm {
        name: vm.name,
        bytes: vm.size.0,
        extents: vm.extents,
        touched_bytes: vm.touched.map(|bytes| bytes.0),
    };
    let [promised, touched, aside] = overview.on_demand.map(|bytes| bytes.0);
    PoolStat {
        file_bytes: overview.brick.0,
        nodes: overview.nodes.into_iter().map(node).collect(),
        vms: overview.tenants.into_iter().map(vm).collect(),
        notes: overview.notes,
        waiting_bytes: overview.waiting.0,
        metadata_bytes: overview.metadata.0,
        vmemmap_freed_bytes: overview.vmemmap_freed.0,
        lent_when_short_bytes: overview.lent_when_short.0,
        promised_bytes: promised,
        touched_bytes: touched,
        aside_bytes: aside,
        for_demand_bytes: overview.for_demand.0,
        overcommit_percent: overview.overcommit,
        gib: None,
    }
}
