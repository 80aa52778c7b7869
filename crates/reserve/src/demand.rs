//! Memory on demand: a VM has places for all of its memory at once, and a page for a place when it is touched.
//!
//! The places are a file of the VM's own for each node, together as long as its memory and empty. A page for it is
//! allocated by the engine that serves the touch (userfaultfd; `ballast_sys::memfd::is_on_demand` says why it must be),
//! and it is a free huge page of the kernel. So that there is one, the pool *sets slices aside*: it takes them as a VM
//! does, and punches them out of their files. As many are set aside as such VMs have pages, and some more. Slices that
//! are set aside are used ones in the state, under numbers that no VM has (their name is `promises::ASIDE`). So each
//! page has an owner at any moment: after a death the next owner punches what is set aside again, and changes it.
//!
//! Pages and slices have no fixed relation: when a VM ends, or gives memory back, its pages are free, fewer slices need
//! to be set aside, and the others are filled again.
//!
//! What was promised is kept: a promise, to a VM on demand or to one that gets its memory at once, or a loan to the
//! host, is made only if the pool has as many pages beside all other promises. An operator may let it promise VMs on
//! demand more than it has for them, as far as they can have the rest far ([`Terms`]); who owns the pool says how far
//! that is ([`Reserve::set_far`]), and makes room in time ([`Reserve::overcommitted`]).
//!
//! Before: `reserve` has a pool. After: descriptors as of [`Reserve::grant`], and free pages. Threads: the owner's.
//! Units: slices. Promise: as for the crate; what a VM finds at a first touch is zero, because the engine fills it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;

use ballast_base::pool::Nodes;
use ballast_base::{Bytes, Extent as FileExtent};
use ballast_pool::{Content, Domain, GuestIdx, Kind, Mode, Request, SliceIdx, SliceState, VmId, request};
use ballast_sys::memfd::{self, FileId};

use crate::error::{During, Error};
use crate::host::Page;
use crate::journal;
use crate::live::Live;
use crate::promises::{ASIDE, FILE, OnDemand, Overcommitted, Promise, StoredTerms, TERMS_FILE, Terms};
use crate::reserve::{Grant, Reserve};

impl Reserve {
    /// Gives a VM places for this much memory of these nodes, and no page yet.
    ///
    /// # Errors
    /// The pool has fewer pages that are promised to nobody, or pages of 1 GiB.
    pub fn grant_on_demand(&mut self, name: &str, size: Bytes, nodes: &Nodes) -> Result<Grant, Error> {
        let page = self.host.page();
        let live = self.live.as_ref().ok_or_else(|| Error::Request("nothing is reserved for VMs".into()))?;
        if page != Page::Huge {
            return Err(Error::Request(format!("memory comes on demand in pages of 2 MiB, not of {}", page.name())));
        }
        let slices = u32::try_from(size.0 / page.bytes()).ok().filter(|_| size.0.is_multiple_of(page.bytes()));
        let slices = slices.filter(|slices| *slices > 0);
        let slices = slices.ok_or_else(|| Error::Request(format!("{size} is no multiple of {page}")))?;
        let has_nodes = live.pool.layout().nodes().count() > 1;
        let parts = live.demand_parts(slices, nodes)?;
        if (1..parts.len()).any(|at| parts[..at].iter().any(|(numa, _)| *numa == parts[at].0)) {
            return Err(Error::Request("a node is named twice".into()));
        }
        for (numa, slices) in &parts {
            let left = live.left_for_demand(*numa)?;
            if *slices > left {
                let (now, backing) = (live.on_demand_of(*numa)?, live.backing_of(*numa)?);
                let at = if has_nodes { format!(" on node {numa}") } else { String::new() };
                return Err(live.promised_error(now, backing, *slices, left, &at));
            }
        }
        let Some(live) = &mut self.live else { return Err(Error::Request("nothing is reserved for VMs".into())) };
        live.pool.state_on_demand(true);
        let vm = loop {
            let (id, _) = live.new_vm().during("Asking for random numbers")?;
            if !live.promises.contains_key(&id.get()) {
                break id.get();
            }
        };
        // The promise first: a file without one has no known owner.
        live.promises.insert(vm, Promise { name: name.to_owned(), slices, parts: parts.clone() });
        let stored = journal::store(&self.dir.join(FILE), &live.promises).during("Writing what is promised");
        let opened = stored.and_then(|()| {
            const WHAT: &str = "Making a file of the pool for a VM on demand";
            for (part, (numa, slices)) in parts.iter().enumerate() {
                let node = has_nodes.then_some(*numa);
                live.files.make_on_demand(vm, part, page.size(*slices), node).during(WHAT)?;
            }
            live.files.open_door(vm).during(WHAT)?;
            let files = (0..parts.len()).map(|part| live.files.hand_out_on_demand(vm, part));
            files.collect::<std::io::Result<_>>().during(WHAT)
        });
        let files: Vec<OwnedFd> = match opened {
            Ok(files) => files,
            Err(error) => {
                // No process has it: as if it had ended.
                let _ = self.tend_on_demand();
                return Err(error);
            }
        };
        self.set_aside()?;
        let extent =
            |(file, (_, slices)): (u16, &(u32, u32))| FileExtent { file, offset: Bytes(0), len: page.size(*slices) };
        Ok(Grant { vm, extents: (0..).zip(&parts).map(extent).collect(), files })
    }

    /// Whether a VM has memory on demand.
    pub fn has_on_demand(&self) -> bool {
        self.live.as_ref().is_some_and(|live| !live.promises.is_empty() || live.aside().next().is_some())
    }

    /// Lets the pool promise VMs on demand this many percent of what it has for them.
    ///
    /// # Errors
    /// The percents are out of range, memory of this pool does not come on demand, or the directory cannot be written.
    pub fn set_overcommit(&mut self, percent: u32) -> Result<(), Error> {
        self.check_overcommit(percent)?;
        let live = self.live.as_mut().ok_or_else(|| Error::Request("nothing is reserved for VMs".into()))?;
        let stored = journal::store(&self.dir.join(TERMS_FILE), &StoredTerms { percent });
        stored.during("Writing how much may be promised")?;
        live.terms.percent = percent;
        Ok(())
    }

    /// Could [`set_overcommit`](Self::set_overcommit) be done?
    ///
    /// # Errors
    /// As there.
    pub fn check_overcommit(&self, percent: u32) -> Result<(), Error> {
        let range = Terms::PERCENTS;
        if !range.contains(&percent) {
            let (least, most) = (range.start(), range.end());
            return Err(Error::Request(format!("{percent} % of the pool; {least} % to {most} % can be promised")));
        }
        let nodes = self.host.nodes().during("Asking for the host's nodes")?;
        match self.host.page() {
            Page::Huge if nodes.len() == 1 => Ok(()),
            Page::Huge => {
                Err(Error::Request("more than there is can be promised on a host with one node alone".into()))
            }
            page => Err(Error::Request(format!("memory comes on demand in pages of 2 MiB, not of {}", page.name()))),
        }
    }

    /// Says how much of what VMs on demand were promised they can have far, all of them at the same time.
    pub fn set_far(&mut self, far: Bytes) {
        if let Some(live) = &mut self.live {
            live.terms.far = u32::try_from(far.0 / live.page.bytes()).unwrap_or(u32::MAX);
        }
    }

    /// Returns what the pool has for VMs on demand, if it has promised them more.
    ///
    /// # Errors
    /// The kernel does not tell how many pages a VM has.
    pub fn overcommitted(&self) -> Result<Option<Overcommitted>, Error> {
        let Some(live) = self.live.as_ref().filter(|live| !live.promises.is_empty()) else { return Ok(None) };
        let now = live.on_demand()?;
        // It has more in any case, and to look at every slice takes milliseconds.
        if now.promised <= live.ready() + now.aside {
            return Ok(None);
        }
        let (has, size) = (live.backing()?, |slices| live.page.size(slices));
        let over = Overcommitted { has: size(has), promised: size(now.promised), touched: size(now.touched) };
        Ok((now.promised > has).then_some(over))
    }

    /// Returns what VMs on demand have of what they were promised.
    ///
    /// # Errors
    /// The kernel does not tell how many pages a VM has.
    pub fn on_demand_touched(&self) -> Result<Bytes, Error> {
        self.live.as_ref().map_or(Ok(Bytes(0)), |live| Ok(live.page.size(live.on_demand()?.touched)))
    }

    /// Returns the files of VMs on demand, and what was promised in each.
    ///
    /// # Errors
    /// The kernel does not tell which file it is.
    pub fn on_demand_files(&self) -> Result<HashMap<FileId, Bytes>, Error> {
        let Some(live) = &self.live else { return Ok(HashMap::new()) };
        let mut files = HashMap::new();
        for (vm, promise) in &live.promises {
            for (part, (_, slices)) in promise.parts.iter().enumerate() {
                let file = live.files.on_demand_id(*vm, part).during("Looking at a file of the pool")?;
                files.extend(file.map(|file| (file, live.page.size(*slices))));
            }
        }
        Ok(files)
    }

    /// Refuses a promise of this many slices if the pool has fewer beside all other promises.
    pub(crate) fn check_promises(&self, slices: u32) -> Result<(), Error> {
        let Some(live) = &self.live else { return Ok(()) };
        match live.each_node().map(|numa| live.unpromised(numa)).sum::<Result<u32, Error>>()? {
            left if slices <= left => Ok(()),
            left => Err(live.promised_error(live.on_demand()?, live.backing()?, slices, left, "")),
        }
    }

    /// Forgets VMs on demand that are gone, with their pages. Returns their number.
    pub(crate) fn tend_on_demand(&mut self) -> Result<usize, Error> {
        let Some(live) = &mut self.live else { return Ok(0) };
        let vms: Vec<(u64, usize)> = live.promises.iter().map(|(vm, promise)| (*vm, promise.parts.len())).collect();
        let mut gone = 0;
        for (vm, parts) in vms {
            if live.files.close_door(vm).during("Asking who has a file of the pool")? {
                for part in 0..parts {
                    live.files.remove_on_demand(vm, part).during("Removing a file of the pool that a VM had")?;
                }
                live.promises.remove(&vm);
                gone += 1;
            }
        }
        if gone > 0 {
            journal::store(&self.dir.join(FILE), &live.promises).during("Writing what is promised")?;
        }
        Ok(gone)
    }

    /// Sets slices aside, or fewer, so that there are free pages for the next touches. Cheap if nothing is to be done.
    ///
    /// # Errors
    /// The kernel refuses. What is not set aside then, or because no slice is ready, is set aside by the next call.
    pub fn set_aside(&mut self) -> Result<(), Error> {
        let Some(live) = &mut self.live else { return Ok(()) };
        for numa in live.each_node().collect::<Vec<_>>() {
            live.set_aside_of(numa, &self.dir.join("names.json"))?;
        }
        if live.promises.is_empty() {
            let has = live.aside().next().is_some();
            live.pool.state_on_demand(has);
        }
        Ok(())
    }

    /// After an owner that may have died between setting slices aside and punching them.
    pub(crate) fn punch_all_aside(&mut self) -> Result<(), Error> {
        let Some(live) = &mut self.live else { return Ok(()) };
        let aside: Vec<VmId> = live.aside().map(|(vm, _)| vm).collect();
        // A program of before did not say so.
        live.pool.state_on_demand(!aside.is_empty() || !live.promises.is_empty());
        aside.into_iter().try_for_each(|vm| live.punch_aside(vm))
    }
}

impl Live {
    /// Sets slices of a node aside, or fewer.
    fn set_aside_of(&mut self, numa: u32, names: &Path) -> Result<(), Error> {
        let live = self;
        let (now, node) = (live.on_demand_of(numa)?, live.node(numa)?);
        let wanted = now.wanted();
        if now.aside < wanted {
            let mut left = now.lacks(live.ready_for_demand(numa));
            while left > 0 {
                let slices = left.min(now.step());
                let (id, domain) = live.new_vm().during("Asking for random numbers")?;
                // Of one domain, so that they share files, which no process has.
                let domain = live.aside_domain().unwrap_or(domain);
                live.name(names, id.get(), ASIDE)?;
                let parts = request::on_one_node(&[(GuestIdx(0), slices)], node);
                let request = Request { vm: VmId(id), domain, kind: Kind::Hugetlb, mode: Mode::Slices, parts };
                if let Err(why) = live.pool.allocate(&request) {
                    live.names.remove(&id.get());
                    journal::store(names, &live.names).during("Writing who has what")?;
                    return Err(Error::Refused(why, live.page));
                }
                live.punch_aside(VmId(id))?;
                left -= slices;
            }
            return Ok(());
        }
        // Half a step more stays, so that a page that comes and goes moves nothing.
        let mut spare = (now.aside - wanted).saturating_sub(if now.promised == 0 { 0 } else { now.step() / 2 });
        let aside: Vec<(VmId, u32)> = live.aside_of(numa).collect();
        let mut released = false;
        for (vm, slices) in aside.into_iter().rev() {
            if slices <= spare {
                live.pool.release(vm)?;
                live.names.remove(&vm.0.get());
                (spare, released) = (spare - slices, true);
            }
        }
        if released {
            journal::store(names, &live.names).during("Writing who has what")?;
        }
        Ok(())
    }

    /// Is this what was set aside, and no VM?
    pub(crate) fn is_aside(&self, vm: VmId) -> bool {
        self.names.get(&vm.0.get()).is_some_and(|name| name == ASIDE)
    }

    /// What is set aside, and how much.
    fn aside(&self) -> impl Iterator<Item = (VmId, u32)> {
        self.pool.tenants().filter(|tenant| self.is_aside(tenant.vm)).map(|tenant| (tenant.vm, tenant.slices))
    }

    /// The same of a node.
    fn aside_of(&self, numa: u32) -> impl Iterator<Item = (VmId, u32)> {
        let is_there = move |vm: &VmId| {
            let first = self.pool.segments(*vm).and_then(|segments| Some(segments.first()?.extent.start));
            first.is_some_and(|start| self.numa_of(start) == numa)
        };
        self.aside().filter(move |(vm, _)| is_there(vm))
    }

    /// The nodes of the pool, by their numbers on the host.
    pub(crate) fn each_node(&self) -> impl Iterator<Item = u32> {
        self.pool.layout().nodes().map(|(_, spec)| spec.numa)
    }

    /// The parts of a VM's memory, by node.
    fn demand_parts(&self, slices: u32, nodes: &Nodes) -> Result<Vec<(u32, u32)>, Error> {
        let parts = match nodes {
            Nodes::Any => {
                let left = |numa: &u32| self.left_for_demand(*numa).unwrap_or(0);
                // The smallest that is large enough, so that the others stay for larger VMs.
                let fits = self.each_node().filter(|numa| left(numa) >= slices).min_by_key(left);
                match fits {
                    Some(numa) => return Ok(vec![(numa, slices)]),
                    None => self.parts(slices, &Nodes::Balanced(self.each_node().collect()))?,
                }
            }
            nodes => self.parts(slices, nodes)?,
        };
        let numa = |node| self.pool.layout().nodes().find(|(at, _)| *at == node).map_or(0, |(_, spec)| spec.numa);
        Ok(parts.iter().map(|part| (numa(part.node), part.slices)).collect())
    }

    fn aside_domain(&self) -> Option<Domain> {
        self.pool.tenants().find(|tenant| self.is_aside(tenant.vm)).map(|tenant| tenant.domain)
    }

    pub(crate) fn on_demand(&self) -> Result<OnDemand, Error> {
        self.each_node().try_fold(OnDemand::default(), |sum, numa| Ok(sum + self.on_demand_of(numa)?))
    }

    /// Memory on demand of a node.
    pub(crate) fn on_demand_of(&self, numa: u32) -> Result<OnDemand, Error> {
        let (mut promised, mut touched) = (0, 0);
        for (vm, promise) in &self.promises {
            for (part, (_, slices)) in promise.parts.iter().enumerate().filter(|(_, (of, _))| *of == numa) {
                promised += slices;
                touched += self.touched_in(*vm, part)?;
            }
        }
        Ok(OnDemand { promised, touched, aside: self.aside_of(numa).map(|(_, slices)| slices).sum() })
    }

    /// Pages that a VM on demand has.
    pub(crate) fn touched(&self, vm: u64, promise: &Promise) -> Result<u32, Error> {
        (0..promise.parts.len()).map(|part| self.touched_in(vm, part)).sum()
    }

    fn touched_in(&self, vm: u64, part: usize) -> Result<u32, Error> {
        let bytes = self.files.on_demand_bytes(vm, part).during("Looking at a file of the pool")?;
        Ok((bytes.0 / self.page.bytes()) as u32)
    }

    /// Counts slices of a node.
    fn count(&self, numa: u32, is_one: impl Fn(SliceIdx) -> bool) -> u32 {
        let here = self.first_slices().filter(|(_, spec)| spec.numa == numa);
        let slices = here.flat_map(|(first, spec)| (first..first + spec.slices).map(SliceIdx));
        slices.filter(|at| is_one(*at)).count() as u32
    }

    /// Slices of a node, of the files of what is set aside, that are zeroed: only that can get them.
    fn ready_aside(&self, numa: u32) -> u32 {
        let Some(domain) = self.aside_domain() else { return 0 };
        self.count(numa, |at| {
            self.pool.state(at) == SliceState::Free(Content::Zeroed) && self.pool.domain(at) == Some(domain)
        })
    }

    /// Slices that any VM can have.
    fn ready(&self) -> u32 {
        let stats = self.pool.layout().nodes().filter_map(|(node, _)| self.pool.stats(node));
        stats.map(|stats| stats.ready - stats.fenced).sum()
    }

    /// Slices of a node that can be set aside now.
    fn ready_for_demand(&self, numa: u32) -> u32 {
        let stats = self.node(numa).ok().and_then(|node| self.pool.stats(node));
        stats.map_or(0, |stats| stats.ready - stats.fenced) + self.ready_aside(numa)
    }

    /// What the pool has for VMs on demand.
    pub(crate) fn backing(&self) -> Result<u32, Error> {
        self.each_node().map(|numa| self.backing_of(numa)).sum()
    }

    /// Slices of a node for VMs on demand: set aside, or free and in no file of which another VM has a part.
    fn backing_of(&self, numa: u32) -> Result<u32, Error> {
        let aside = self.aside_domain();
        let is_open = |at| self.pool.domain(at).is_none_or(|domain| Some(domain) == aside);
        let is_unzeroed = |at| matches!(self.pool.state(at), SliceState::Free(Content::Dirty | Content::Zeroing));
        let unzeroed = self.count(numa, |at| is_unzeroed(at) && is_open(at));
        let unzeroed = unzeroed.saturating_sub(self.waiting_of(numa).filter(|at| is_open(*at)).count() as u32);
        Ok(self.ready_for_demand(numa) + unzeroed + self.on_demand_of(numa)?.aside)
    }

    /// Slices of a node that VMs on demand can be promised.
    fn left_for_demand(&self, numa: u32) -> Result<u32, Error> {
        Ok(self.terms.most(self.backing_of(numa)?).saturating_sub(self.on_demand_of(numa)?.promised))
    }

    /// Slices of a node that are promised to nobody: free or set aside, less those that are needed for what VMs on
    /// demand were promised.
    pub(crate) fn unpromised(&self, numa: u32) -> Result<u32, Error> {
        Ok(self.backing_of(numa)?.saturating_sub(self.terms.least(self.on_demand_of(numa)?.promised)))
    }

    /// The refusal of this many slices, because fewer are left.
    fn promised_error(&self, now: OnDemand, backing: u32, wanted: u32, left: u32, at: &str) -> Error {
        let size = |slices| self.page.size(slices);
        let Terms { percent, far } = self.terms;
        let terms = match percent {
            100 => at.to_owned(),
            _ => format!(
                "; {} are missing: up to {percent} % of the {} for these VMs may be promised, as far as they can have \
                 the rest far, which is {} now (a VM that starts, is pinned or reserved has none), and a 16th is left \
                 for touches",
                size(wanted - left),
                size(backing),
                size(far.min(now.promised)),
            ),
        };
        Error::Promised { wanted: size(wanted), left: size(left), promised: size(now.promised), terms }
    }

    /// Checks that what VMs on demand were promised is there still, after another VM got memory: it also keeps the rest
    /// of its last file from others.
    pub(crate) fn keeps_promises(&self) -> Result<(), Error> {
        for numa in self.each_node() {
            let now = self.on_demand_of(numa)?;
            let (backing, needed) = (self.backing_of(numa)?, self.terms.least(now.promised));
            if backing < needed {
                return Err(self.promised_error(now, backing, needed - backing, 0, &format!(" on node {numa}")));
            }
        }
        Ok(())
    }

    /// Gives the pages of slices that are set aside to the kernel.
    fn punch_aside(&mut self, vm: VmId) -> Result<(), Error> {
        const WHAT: &str = "Setting memory of the pool aside";
        for extent in self.pool.segments(vm).unwrap_or_default().into_iter().map(|segment| segment.extent) {
            for at in extent.each() {
                let file = self.files.get(at.0 / self.pool.layout().brick_slices()).during(WHAT)?;
                memfd::punch(&*file, self.offset(at), self.page.bytes()).during(WHAT)?;
            }
        }
        Ok(())
    }
}
