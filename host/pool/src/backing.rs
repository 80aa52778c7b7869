//! The backing of VMs on demand on each node (the slices that the pool has for them), and what may be promised of it.
//!
//! Each node keeps its own promises, because the page for a touch is of one node. The memory that these VMs can have
//! far is common to all nodes, where stores take the memory of any ([`Far`]): the part that one node needs, because it
//! promised more than its backing, is not there for the others.
//!
//! Slices that are not zeroed yet count for promises that were made, and not for a new one: a process that is no longer
//! the VM's may hold their pages.
//!
//! Before: a VM is to have memory, or some is to be lent. After: `demand`, `reserve` and `lend` know whether all
//! promises would be kept. Threads: the owner's. Units: slices. Promise: where a function here says that promises are
//! kept, each node has enough for the part that its VMs cannot have far, and all VMs can have the rest far at the same
//! time.

use std::collections::BTreeMap;

use crate::map::{Content, SliceIdx, SliceState};
use ballast_base::Bytes;

use crate::error::{During, Error};
use crate::host::Page;
use crate::journal;
use crate::live::Live;
use crate::promises::{Far, Lacks, OnDemand, Overcommitted, TERMS_FILE, Terms};
use crate::reserve::Reserve;

#[derive(Clone, Copy, Debug)]
struct Backed {
    numa: u32,
    now: OnDemand,
    backing: u32,
    /// The part of the backing that is not zeroed yet: a process may hold its pages, for an unknown time.
    unzeroed: u32,
}

impl Backed {
    /// The backing that is there for certain. An old promise counts on all of the backing, a new one on this part.
    fn certain(&self) -> u32 {
        self.backing - self.unzeroed
    }
}

impl Reserve {
    /// Lets the pool promise VMs on demand this percentage of their backing.
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

    /// Checks whether [`set_overcommit`](Self::set_overcommit) would succeed.
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

    /// Checks that no node lacks more than in `before` for its promises.
    ///
    /// # Errors
    /// A node does, by the last [`set_far`](Self::set_far).
    pub fn check_kept(&self, before: &Lacks) -> Result<(), Error> {
        self.live.as_ref().map_or(Ok(()), |live| live.keeps_promises(before))
    }

    /// Sets how much of their promised memory VMs on demand can have far.
    pub fn set_far(&mut self, far: Far) {
        if let Some(live) = &mut self.live {
            live.far = far;
        }
    }

    /// Returns the figures of each node that has promised VMs on demand more than their backing, by its host number.
    pub fn overcommitted(&self) -> Result<BTreeMap<u32, Overcommitted>, Error> {
        let Some(live) = self.live.as_ref().filter(|live| !live.promises.is_empty()) else {
            return Ok(BTreeMap::new());
        };
        let mut found = BTreeMap::new();
        for numa in live.each_node() {
            let now = live.on_demand_of(numa)?;
            // Such a node has enough in any case, and to count its slices takes milliseconds.
            if now.promised <= live.ready(numa) + now.aside {
                continue;
            }
            let (has, size) = (live.backed_of(numa, now).backing, |slices| live.page.size(slices));
            let over = Overcommitted { has: size(has), promised: size(now.promised), touched: size(now.touched) };
            found.extend((now.promised > has).then_some((numa, over)));
        }
        Ok(found)
    }

    /// Returns the memory of this node that VMs on demand have touched of what they were promised.
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
    /// The slices that may be promised to a VM on demand now, by node.
    pub(crate) fn left_for_demand(&self) -> Result<BTreeMap<u32, u32>, Error> {
        let nodes = self.backed()?;
        let left = |(at, node): (usize, &Backed)| {
            (node.numa, self.terms(&nodes, at).most(node.certain()).saturating_sub(node.now.promised))
        };
        Ok(nodes.iter().enumerate().map(left).collect())
    }

    /// Slices of a node that are promised to nobody: free or set aside, less those that promises on demand need.
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

    /// Returns the slices that each node lacks for its promises to VMs on demand, and that cannot be far.
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

    /// Checks that no node lacks more than before for its promises, after another VM got memory (which also keeps the
    /// rest of its last file from others) or a promise.
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

    /// The backing of VMs on demand on all nodes.
    pub(crate) fn backing(&self) -> Result<u32, Error> {
        Ok(self.backed()?.iter().map(|node| node.backing).sum())
    }

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

    /// The terms of the node at this index: the others need far memory for promises beyond their backing.
    fn terms(&self, nodes: &[Backed], at: usize) -> Terms {
        let others = nodes.iter().enumerate().filter(|(other, _)| *other != at);
        let others = others.map(|(_, node)| (node.now.promised, node.backing));
        let here = self.far.nodes.get(&nodes[at].numa).map_or(0, |far| self.slices(*far));
        Terms::of_node(self.percent, here, self.slices(self.far.all), others)
    }

    fn slices(&self, bytes: Bytes) -> u32 {
        u32::try_from(bytes.0 / self.page.bytes()).unwrap_or(u32::MAX)
    }

    /// Slices of a node that VMs on demand can have once they are zeroed: those in no file of which another VM has a
    /// part, without those that wait for a page that a process holds.
    fn unzeroed(&self, numa: u32) -> u32 {
        let aside = self.aside_domain();
        let is_open = |at| self.pool.domain(at).is_none_or(|domain| Some(domain) == aside);
        let is_unzeroed = |at| matches!(self.pool.state(at), SliceState::Free(Content::Dirty | Content::Zeroing));
        let unzeroed = self.count(numa, |at| is_unzeroed(at) && is_open(at));
        unzeroed.saturating_sub(self.waiting_of(numa).filter(|at| is_open(*at)).count() as u32)
    }

    fn ready(&self, numa: u32) -> u32 {
        let stats = self.node(numa).ok().and_then(|node| self.pool.stats(node));
        stats.map_or(0, |stats| stats.ready - stats.fenced)
    }

    pub(crate) fn ready_for_demand(&self, numa: u32) -> u32 {
        self.ready(numa) + self.ready_aside(numa)
    }

    /// Zeroed slices of a node that are in the files of slices set aside: no other VM can have them.
    fn ready_aside(&self, numa: u32) -> u32 {
        let Some(domain) = self.aside_domain() else { return 0 };
        self.count(numa, |at| {
            self.pool.state(at) == SliceState::Free(Content::Zeroed) && self.pool.domain(at) == Some(domain)
        })
    }

    fn count(&self, numa: u32, is_one: impl Fn(SliceIdx) -> bool) -> u32 {
        let here = self.first_slices().filter(|(_, spec)| spec.numa == numa);
        let slices = here.flat_map(|(first, spec)| (first..first + spec.slices).map(SliceIdx));
        slices.filter(|at| is_one(*at)).count() as u32
    }
}
