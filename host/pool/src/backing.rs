//! What the pool has for VMs on demand on each node, and how much of that may be promised.
//!
//! Each node keeps its own promises, because a page for a touch is of one node. What these VMs can have far is of all
//! nodes together, where stores take the memory of any ([`Far`]): what one node has promised beyond what it has is no
//! more there for the others.
//!
//! What is not zeroed yet counts for promises that were made, and for no new one: a process that is not the VM's any
//! more may hold its pages.
//!
//! Before: a VM is to have memory, or some is to be lent. After: `demand`, `reserve` and `lend` know whether all
//! promises are kept then. Threads: the owner's. Units: slices. Promise: where a function here says that promises are
//! kept, each node has enough for what its VMs cannot have far, and all VMs can have the rest far at the same time.

use std::collections::BTreeMap;

use crate::map::{Content, SliceIdx, SliceState};
use ballast_base::Bytes;

use crate::error::{During, Error};
use crate::host::Page;
use crate::journal;
use crate::live::Live;
use crate::promises::{Far, Lacks, OnDemand, Overcommitted, TERMS_FILE, Terms};
use crate::reserve::Reserve;

/// Memory on demand of a node, and what the pool has for it.
#[derive(Clone, Copy, Debug)]
struct Backed {
    numa: u32,
    now: OnDemand,
    backing: u32,
    /// How much of that is not zeroed yet: a process may hold its pages, for how long nobody knows.
    unzeroed: u32,
}

impl Backed {
    /// What is there for certain. A promise that was made counts on all, a new one on this.
    fn certain(&self) -> u32 {
        self.backing - self.unzeroed
    }
}

impl Reserve {
    /// Lets the pool promise VMs on demand this many percent of what it has for them.
    ///
    /// # Errors
    /// The percents are out of range, memory of this pool does not come on demand, or the directory cannot be written.
    pub fn set_overcommit(&mut self, percent: u32) -> Result<(), Error> {
        self.check_overcommit(percent)?;
        let live = self.live.as_mut().ok_or_else(|| Error::Request("nothing is reserved for VMs".into()))?;
        let terms = Terms { percent, ..Terms::default() };
        journal::store(&self.dir.join(TERMS_FILE), &terms).during("Writing how much may be promised")?;
        live.percent = percent;
        Ok(())
    }

    /// Could [`set_overcommit`](Self::set_overcommit) be done?
    ///
    /// # Errors
    /// As there.
    pub fn check_overcommit(&self, percent: u32) -> Result<(), Error> {
        let range = Terms::PERCENTS;
        match self.host.page() {
            Page::Huge if range.contains(&percent) => Ok(()),
            Page::Huge => {
                let (least, most) = (range.start(), range.end());
                Err(Error::Request(format!("{percent} % of the pool; {least} % to {most} % can be promised")))
            }
            page => Err(Error::Request(format!("memory comes on demand in pages of 2 MiB, not of {}", page.name()))),
        }
    }

    /// Checks that no node lacks more than this for what it has promised.
    ///
    /// # Errors
    /// It does, by what was last said of what VMs on demand can have far.
    pub fn check_kept(&self, before: &Lacks) -> Result<(), Error> {
        self.live.as_ref().map_or(Ok(()), |live| live.keeps_promises(before))
    }

    /// Says how much of what VMs on demand were promised they can have far.
    pub fn set_far(&mut self, far: Far) {
        if let Some(live) = &mut self.live {
            live.far = far;
        }
    }

    /// Returns what the pool has for VMs on demand on each node that has promised them more, by its number on the host.
    ///
    /// # Errors
    /// The kernel does not tell how many pages a VM has.
    pub fn overcommitted(&self) -> Result<BTreeMap<u32, Overcommitted>, Error> {
        let Some(live) = self.live.as_ref().filter(|live| !live.promises.is_empty()) else {
            return Ok(BTreeMap::new());
        };
        let mut found = BTreeMap::new();
        for numa in live.each_node() {
            let now = live.on_demand_of(numa)?;
            // It has more in any case, and to look at every slice takes milliseconds.
            if now.promised <= live.ready(numa) + now.aside {
                continue;
            }
            let (has, size) = (live.backed_of(numa, now).backing, |slices| live.page.size(slices));
            let over = Overcommitted { has: size(has), promised: size(now.promised), touched: size(now.touched) };
            found.extend((now.promised > has).then_some((numa, over)));
        }
        Ok(found)
    }

    /// Returns what VMs on demand have of what they were promised of this node.
    ///
    /// # Errors
    /// The kernel does not tell how many pages a VM has.
    pub fn on_demand_touched(&self, numa: u32) -> Result<Bytes, Error> {
        self.live.as_ref().map_or(Ok(Bytes(0)), |live| Ok(live.page.size(live.on_demand_of(numa)?.touched)))
    }

    /// Refuses a promise of this many slices if the pool has fewer beside all other promises.
    pub(crate) fn check_promises(&self, slices: u32) -> Result<(), Error> {
        let Some(live) = &self.live else { return Ok(()) };
        let nodes = live.backed()?;
        let left = (0..nodes.len()).map(|at| live.unpromised_at(&nodes, at)).sum();
        if slices <= left {
            return Ok(());
        }
        let sum = nodes.iter().fold((OnDemand::default(), 0), |sum, node| (sum.0 + node.now, sum.1 + node.backing));
        let terms = Terms { percent: live.percent, far: live.slices(live.far.all) };
        Err(live.promised_error(sum, terms, slices, left, ""))
    }
}

impl Live {
    /// What may be promised to a VM on demand now, by node.
    pub(crate) fn left_for_demand(&self) -> Result<BTreeMap<u32, u32>, Error> {
        let nodes = self.backed()?;
        let left = |(at, node): (usize, &Backed)| {
            (node.numa, self.terms(&nodes, at).most(node.certain()).saturating_sub(node.now.promised))
        };
        Ok(nodes.iter().enumerate().map(left).collect())
    }

    /// Slices of a node that are promised to nobody: free or set aside, less those that are needed for what VMs on
    /// demand were promised.
    pub(crate) fn unpromised(&self, numa: u32) -> Result<u32, Error> {
        let nodes = self.backed()?;
        let at = nodes.iter().position(|node| node.numa == numa);
        Ok(at.map_or(0, |at| self.unpromised_at(&nodes, at)))
    }

    fn unpromised_at(&self, nodes: &[Backed], at: usize) -> u32 {
        let node = &nodes[at];
        let has = if self.promises.is_empty() { node.backing } else { node.certain() };
        has.saturating_sub(self.terms(nodes, at).least(node.now.promised))
    }

    /// Returns what each node lacks for what it has promised to VMs on demand: it is not there, and cannot be far.
    pub(crate) fn lacks(&self) -> Result<Lacks, Error> {
        if self.promises.is_empty() {
            return Ok(Lacks::new());
        }
        let nodes = self.backed()?;
        Ok((0..nodes.len()).map(|at| (nodes[at].numa, self.lacks_at(&nodes, at))).collect())
    }

    fn lacks_at(&self, nodes: &[Backed], at: usize) -> u32 {
        self.terms(nodes, at).least(nodes[at].now.promised).saturating_sub(nodes[at].backing)
    }

    /// Checks that no node lacks more than before for what it has promised, after another VM got memory (it also keeps
    /// the rest of its last file from others), or was promised some.
    pub(crate) fn keeps_promises(&self, before: &Lacks) -> Result<(), Error> {
        if self.promises.is_empty() {
            return Ok(());
        }
        let nodes = self.backed()?;
        for (at, Backed { numa, now, backing, .. }) in nodes.iter().copied().enumerate() {
            let lacks = self.lacks_at(&nodes, at);
            if lacks > before.get(&numa).copied().unwrap_or(0) {
                let place = self.place(numa);
                return Err(self.promised_error((now, backing), self.terms(&nodes, at), lacks, 0, &place));
            }
        }
        Ok(())
    }

    /// The refusal of this many slices of a node, because fewer are left.
    pub(crate) fn promised_error_of(&self, numa: u32, wanted: u32, left: u32) -> Result<Error, Error> {
        let nodes = self.backed()?;
        let at = nodes.iter().position(|node| node.numa == numa).unwrap_or(0);
        let Backed { now, backing, .. } = nodes[at];
        Ok(self.promised_error((now, backing), self.terms(&nodes, at), wanted, left, &self.place(numa)))
    }

    fn promised_error(&self, of: (OnDemand, u32), terms: Terms, wanted: u32, left: u32, at: &str) -> Error {
        let ((now, backing), size) = (of, |slices| self.page.size(slices));
        let Terms { percent, far } = terms;
        let terms = match percent {
            100 => at.to_owned(),
            _ => format!(
                "{at}; {} are missing: up to {percent} % of the {} for these VMs may be promised, as far as they can \
                 have the rest far, which is {} now (a VM that starts, is pinned or reserved has none), and a 16th is \
                 left for touches",
                size(wanted - left),
                size(backing),
                size(far.min(now.promised)),
            ),
        };
        Error::Promised { wanted: size(wanted), left: size(left), promised: size(now.promised), terms }
    }

    /// What the pool has for VMs on demand.
    pub(crate) fn backing(&self) -> Result<u32, Error> {
        Ok(self.backed()?.iter().map(|node| node.backing).sum())
    }

    /// How a refusal names a node, if there are several.
    fn place(&self, numa: u32) -> String {
        if self.each_node().count() > 1 { format!(" on node {numa}") } else { String::new() }
    }

    fn backed(&self) -> Result<Vec<Backed>, Error> {
        self.each_node().map(|numa| Ok(self.backed_of(numa, self.on_demand_of(numa)?))).collect()
    }

    fn backed_of(&self, numa: u32, now: OnDemand) -> Backed {
        let unzeroed = self.unzeroed(numa);
        Backed { numa, now, backing: self.ready_for_demand(numa) + unzeroed + now.aside, unzeroed }
    }

    /// The terms of one of these nodes: the others need what they have promised beyond what they have.
    fn terms(&self, nodes: &[Backed], at: usize) -> Terms {
        let others = nodes.iter().enumerate().filter(|(other, _)| *other != at);
        let others = others.map(|(_, node)| (node.now.promised, node.backing));
        let here = self.far.nodes.get(&nodes[at].numa).map_or(0, |far| self.slices(*far));
        Terms::of_node(self.percent, here, self.slices(self.far.all), others)
    }

    fn slices(&self, bytes: Bytes) -> u32 {
        u32::try_from(bytes.0 / self.page.bytes()).unwrap_or(u32::MAX)
    }

    /// Slices of a node that VMs on demand can have once they are zeroed: in no file of which another VM has a part.
    /// What waits for a page that a process holds is not among them.
    fn unzeroed(&self, numa: u32) -> u32 {
        let aside = self.aside_domain();
        let is_open = |at| self.pool.domain(at).is_none_or(|domain| Some(domain) == aside);
        let is_unzeroed = |at| matches!(self.pool.state(at), SliceState::Free(Content::Dirty | Content::Zeroing));
        let unzeroed = self.count(numa, |at| is_unzeroed(at) && is_open(at));
        unzeroed.saturating_sub(self.waiting_of(numa).filter(|at| is_open(*at)).count() as u32)
    }

    /// Slices of a node that any VM can have.
    fn ready(&self, numa: u32) -> u32 {
        let stats = self.node(numa).ok().and_then(|node| self.pool.stats(node));
        stats.map_or(0, |stats| stats.ready - stats.fenced)
    }

    /// Slices of a node that can be set aside now.
    pub(crate) fn ready_for_demand(&self, numa: u32) -> u32 {
        self.ready(numa) + self.ready_aside(numa)
    }

    /// Slices of a node, of the files of what is set aside, that are zeroed: only that can get them.
    fn ready_aside(&self, numa: u32) -> u32 {
        let Some(domain) = self.aside_domain() else { return 0 };
        self.count(numa, |at| {
            self.pool.state(at) == SliceState::Free(Content::Zeroed) && self.pool.domain(at) == Some(domain)
        })
    }

    /// Counts slices of a node.
    fn count(&self, numa: u32, is_one: impl Fn(SliceIdx) -> bool) -> u32 {
        let here = self.first_slices().filter(|(_, spec)| spec.numa == numa);
        let slices = here.flat_map(|(first, spec)| (first..first + spec.slices).map(SliceIdx));
        slices.filter(|at| is_one(*at)).count() as u32
    }
}
