//! Memory on demand: a VM has places for all of its memory at once, and gets a page for a place at its first touch.
//!
//! The places are a file of the VM's own for each node, together as long as its memory, and empty. The engine that
//! serves a touch (userfaultfd; `ballast_sys::memfd::is_on_demand` says why it must) allocates the page for it, a free
//! huge page of the kernel. So that there is a free page, the pool *sets slices aside*: it takes them as for a VM, and
//! punches them out of their files. As many are set aside as such VMs have pages, and some more. Slices that are set
//! aside are used ones in the state, under numbers that no VM has (their name is `promises::ASIDE`). So each page has
//! an owner at any moment: after a death the next owner of the pool punches them again, and adapts their number.
//!
//! Pages and slices have no fixed relation: when a VM ends, or gives memory back, its pages are free, fewer slices need
//! to be set aside, and the others are filled again.
//!
//! A promise is kept: one to a VM on demand or to a VM that gets its memory at once, or a loan to the host, is made
//! only if the pool has as many pages beside all other promises (`backing`). An operator may let the pool promise VMs
//! on demand more than it has for them, as far as they can have the rest far. The owner of the pool says how much that
//! is ([`Reserve::set_far`]), and makes room in time ([`Reserve::overcommitted`]).
//!
//! Before: `reserve` has a pool. After: descriptors as of [`Reserve::grant`], and free pages. Threads: the owner's.
//! Units: slices. Promise: as for the crate; a page is zero at its first touch, because the engine fills it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::map::{Domain, Mode, Request, VmId, request};
use ballast_base::pool::Nodes;
use ballast_base::{Bytes, Extent as FileExtent};
use ballast_sys::memfd::{self, FileId};

use crate::error::{During, Error};
use crate::host::Page;
use crate::journal;
use crate::live::Live;
use crate::promises::{ASIDE, FILE, OnDemand, Promise};
use crate::reserve::{Grant, Reserve};

impl Reserve {
    /// Gives a VM places for this much memory of these nodes, and no page yet.
    ///
    /// # Errors
    /// The pool has fewer pages that are promised to nobody, or it has pages of 1 GiB.
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
        let left = live.left_for_demand()?;
        for (numa, slices) in &parts {
            let left = left.get(numa).copied().unwrap_or(0);
            if *slices > left {
                return Err(live.promised_error_of(*numa, *slices, left)?);
            }
        }
        let Some(live) = &mut self.live else { return Err(Error::Request("nothing is reserved for VMs".into())) };
        let vm = loop {
            let (id, _) = live.new_vm().during("Asking for random numbers")?;
            if !live.promises.contains_key(&id.get()) {
                break id.get();
            }
        };
        let lacked = live.lacks()?;
        // The promise comes first: a file without a promise has no known owner.
        live.promises.insert(vm, Promise { name: name.to_owned(), slices, parts: parts.clone() });
        // Each of the VM's nodes may have counted on the same room in the far stores.
        if parts.len() > 1
            && let Err(error) = live.keeps_promises(&lacked)
        {
            live.promises.remove(&vm);
            return Err(error);
        }
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
                // No process has its files, so this forgets it like a VM that ended.
                let _ = self.tend_on_demand();
                return Err(error);
            }
        };
        self.set_aside()?;
        let extent =
            |(file, (_, slices)): (u16, &(u32, u32))| FileExtent { file, offset: Bytes(0), len: page.size(*slices) };
        Ok(Grant { vm, extents: (0..).zip(&parts).map(extent).collect(), files, lacked })
    }

    /// Whether a VM has memory on demand.
    pub fn has_on_demand(&self) -> bool {
        self.live.as_ref().is_some_and(|live| !live.promises.is_empty() || live.aside().next().is_some())
    }

    /// Returns the files of VMs on demand, with the node of each and the memory that was promised in it.
    pub fn on_demand_files(&self) -> Result<HashMap<FileId, (u32, Bytes)>, Error> {
        let Some(live) = &self.live else { return Ok(HashMap::new()) };
        let mut files = HashMap::new();
        for (vm, promise) in &live.promises {
            for (part, (numa, slices)) in promise.parts.iter().enumerate() {
                let file = live.files.on_demand_id(*vm, part).during("Looking at a file of the pool")?;
                files.extend(file.map(|file| (file, (*numa, live.page.size(*slices)))));
            }
        }
        Ok(files)
    }

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
                live.told.retain(|(other, _)| *other != vm);
                gone += 1;
            }
        }
        if gone > 0 {
            journal::store(&self.dir.join(FILE), &live.promises).during("Writing what is promised")?;
        }
        Ok(gone)
    }

    /// Sets slices aside, or releases some, so that the next touches find free pages. Cheap if nothing must be done.
    ///
    /// # Errors
    /// The kernel refuses. The next call sets aside the slices that are missing then, or because none was ready.
    pub fn set_aside(&mut self) -> Result<(), Error> {
        let Some(live) = &mut self.live else { return Ok(()) };
        for numa in live.each_node().collect::<Vec<_>>() {
            live.set_aside_of(numa, &self.dir.join("names.json"))?;
        }
        Ok(())
    }

    /// Punches all slices set aside: the last owner may have died between setting slices aside and punching them.
    pub(crate) fn punch_all_aside(&mut self) -> Result<(), Error> {
        let Some(live) = &mut self.live else { return Ok(()) };
        let aside: Vec<VmId> = live.aside().map(|(vm, _)| vm).collect();
        aside.into_iter().try_for_each(|vm| live.punch_aside(vm))
    }
}

impl Live {
    fn set_aside_of(&mut self, numa: u32, names: &Path) -> Result<(), Error> {
        let (now, node) = (self.on_demand_of(numa)?, self.node(numa)?);
        let wanted = now.wanted();
        if now.aside < wanted {
            let mut left = now.lacks(self.ready_for_demand(numa));
            while left > 0 {
                let slices = left.min(now.step());
                let (id, domain) = self.new_vm().during("Asking for random numbers")?;
                // All in one trust domain, so that they share files. No process has these.
                let domain = self.aside_domain().unwrap_or(domain);
                self.name(names, id.get(), ASIDE)?;
                let parts = request::on_one_node(slices, node);
                let request = Request { vm: VmId(id), domain, mode: Mode::Slices, parts };
                if let Err(why) = self.pool.allocate(&request) {
                    self.names.remove(&id.get());
                    journal::store(names, &self.names).during("Writing who has what")?;
                    return Err(Error::Refused(why, self.page));
                }
                self.punch_aside(VmId(id))?;
                left -= slices;
            }
            return Ok(());
        }
        // Half a step more stays, so that a page that comes and goes moves no slices.
        let mut spare = (now.aside - wanted).saturating_sub(if now.promised == 0 { 0 } else { now.step() / 2 });
        let aside: Vec<(VmId, u32)> = self.aside_of(numa).collect();
        let mut released = false;
        for (vm, slices) in aside.into_iter().rev() {
            if slices <= spare {
                self.pool.release(vm)?;
                self.names.remove(&vm.0.get());
                (spare, released) = (spare - slices, true);
            }
        }
        if released {
            journal::store(names, &self.names).during("Writing who has what")?;
        }
        Ok(())
    }

    /// Is this the number of slices set aside, and not a VM?
    pub(crate) fn is_aside(&self, vm: VmId) -> bool {
        self.names.get(&vm.0.get()).is_some_and(|name| name == ASIDE)
    }

    /// The numbers and sizes of the slices set aside.
    fn aside(&self) -> impl Iterator<Item = (VmId, u32)> {
        self.pool.tenants().filter(|tenant| self.is_aside(tenant.vm)).map(|tenant| (tenant.vm, tenant.slices))
    }

    /// As [`Self::aside`], of one node.
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

    fn demand_parts(&self, slices: u32, nodes: &Nodes) -> Result<Vec<(u32, u32)>, Error> {
        let parts = match nodes {
            Nodes::Any => {
                // The smallest node that is large enough, so that the others stay for larger VMs.
                let left = self.left_for_demand()?.into_iter().filter(|(_, left)| *left >= slices);
                match left.min_by_key(|(_, left)| *left) {
                    Some((numa, _)) => return Ok(vec![(numa, slices)]),
                    None => self.parts(slices, &Nodes::Balanced(self.each_node().collect()))?,
                }
            }
            nodes => self.parts(slices, nodes)?,
        };
        let numa = |node| self.pool.layout().nodes().find(|(at, _)| *at == node).map_or(0, |(_, spec)| spec.numa);
        Ok(parts.iter().map(|part| (numa(part.node), part.slices)).collect())
    }

    pub(crate) fn aside_domain(&self) -> Option<Domain> {
        self.pool.tenants().find(|tenant| self.is_aside(tenant.vm)).map(|tenant| tenant.domain)
    }

    pub(crate) fn on_demand(&self) -> Result<OnDemand, Error> {
        self.each_node().try_fold(OnDemand::default(), |sum, numa| Ok(sum + self.on_demand_of(numa)?))
    }

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

    pub(crate) fn touched(&self, vm: u64, promise: &Promise) -> Result<u32, Error> {
        (0..promise.parts.len()).map(|part| self.touched_in(vm, part)).sum()
    }

    fn touched_in(&self, vm: u64, part: usize) -> Result<u32, Error> {
        let bytes = self.files.on_demand_bytes(vm, part).during("Looking at a file of the pool")?;
        Ok((bytes.0 / self.page.bytes()) as u32)
    }

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
