//! The pool with its memory: it is opened, grown, handed out, and taken back.
//!
//! Before: a directory in a tmpfs, and a [`Host`]. After: VMs have descriptors of bricks, and the host has the rest.
//! Threads: the owner's. Units: slices, or bytes where the name says so.
//! Promise: the pool has one owner at a time. A lock ensures it, and a dead process loses the lock when the last of its
//! threads has left the kernel. A VM gets a slice only after the kernel has allocated its page. The slice comes back
//! when no process has its file any more.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::map::{Extent, FRAME_SLICES, Invalid, Layout, Mode, NodeSpec, Pool, Request, SliceState, VmId};
use ballast_base::pool::Nodes;
use ballast_base::wire::MAX_FILES;
use ballast_base::{Bytes, Extent as FileExtent};

use crate::balance::{self, NodeMemory, Want};
use crate::error::{During, Error};
use crate::failure::Failure;
use crate::files::Files;
use crate::host::{Host, Page};
use crate::journal::{self, Journal};
use crate::live::Live;
use crate::promises::Lacks;
use crate::refill::{Done, Job};
use crate::shared::{self, Shared};

const VMS: u32 = 4096;

/// Memory for a VM.
#[derive(Debug)]
pub struct Grant {
    /// Number of the VM.
    pub vm: u64,
    /// Its memory as extents of the files, in the order of the VM's memory.
    pub extents: Vec<FileExtent>,
    /// The files, each a separate open file. The memory returns to the pool with the last descriptor and mapping.
    pub files: Vec<OwnedFd>,
    /// The slices that nodes lacked for VMs on demand before this grant, for [`Reserve::check_kept`].
    pub lacked: Lacks,
}

/// The pool.
#[derive(Debug)]
pub struct Reserve {
    pub(crate) dir: PathBuf,
    pub(crate) host: Host,
    pub(crate) journal: Journal,
    pub(crate) live: Option<Live>,
    pub(crate) notes: Vec<String>,
    /// The kernel's count of failed pages at the last check of the whole pool.
    pub(crate) failed_pages: u64,
    pub(crate) failures: Vec<Failure>,
    /// Rounds in which no waiting slice found a page although the kernel reported free ones.
    pub(crate) in_vain: u32,
    _lock: File,
}

impl Reserve {
    /// Opens the pool of this directory, which need not exist yet. Undoes or completes a change of the last owner.
    ///
    /// # Errors
    /// Another process owns the pool, or the files cannot be used.
    pub fn open(dir: &Path, host: Host) -> Result<Self, Error> {
        const WHAT: &str = "Opening the pool's directory";
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).during(WHAT)?;
        let lock =
            File::options().write(true).create(true).truncate(false).mode(0o600).open(dir.join("lock")).during(WHAT)?;
        match rustix::fs::fcntl_lock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) => return Err(Error::Taken(dir.into())),
            locked => locked.map_err(io::Error::from).during("Locking the pool's directory")?,
        }
        let mut reserve = Self {
            dir: dir.into(),
            journal: Journal::at(dir),
            host,
            live: None,
            notes: Vec::new(),
            failed_pages: 0,
            failures: Vec::new(),
            in_vain: 0,
            _lock: lock,
        };
        // This comes first: the state of another boot may be unreadable, and its pages may be of a size that is gone.
        reserve.forget_other_boot()?;
        let pool = shared::open(&dir.join("state"))?;
        reserve.live = pool.map(|pool| Live::new(dir, pool, reserve.host.page())).transpose()?;
        reserve.forget_lost_files()?;
        reserve.recover()?;
        reserve.punch_all_aside()?;
        Ok(reserve)
    }

    /// Grows the pool to this part of the host. A pool that is larger does not shrink; use `lend` for that.
    ///
    /// `brick` is the size of a file, if this call creates the pool. A VM has up to [`MAX_FILES`] files of its own.
    ///
    /// # Errors
    /// The kernel refuses, or there is no such node. The notes say if the pool got less than requested.
    pub fn grow(&mut self, want: Want, node: Option<u32>, brick: Option<Bytes>) -> Result<(), Error> {
        let nodes = self.host.nodes().during("Asking for the host's nodes")?;
        if let Some(node) = node.filter(|node| !nodes.contains(node)) {
            return Err(Error::Request(format!("there is no node {node}; the host has {nodes:?}")));
        }
        self.make(&nodes, brick)?;
        let Some(live) = &self.live else { return Ok(()) };
        if let Some(node) = node {
            live.node(node)?;
        }
        // The state has no place for memory that was added to the host after the pool was created.
        let (here, late): (Vec<u32>, Vec<u32>) = nodes.into_iter().partition(|numa| live.node(*numa).is_ok());
        let asked: Vec<u32> = here.into_iter().filter(|numa| node.is_none_or(|node| node == *numa)).collect();
        let room = |numa: &u32| {
            Ok(NodeMemory {
                numa: *numa,
                has: self.has(*numa),
                memory: self.host.memory(*numa).during("Asking for a node's memory")?,
            })
        };
        let rooms = asked.iter().map(room).collect::<Result<Vec<_>, Error>>()?;
        let available = self.host.available().during("Asking for the host's memory")?;
        let shares = balance::divide(want, &rooms, available, self.host.page());
        self.notes = shares.notes;
        let late = late.iter().filter(|_| node.is_none());
        self.notes.extend(late.map(|numa| format!("node {numa} is younger than the pool, and gives it nothing")));
        self.change(|reserve| shares.more.iter().try_for_each(|(numa, more)| reserve.add(*numa, *more)))
    }

    fn make(&mut self, nodes: &[u32], brick: Option<Bytes>) -> Result<(), Error> {
        let page = self.host.page();
        if let Some(live) = &self.live {
            let is = page.size(live.pool.layout().brick_slices());
            return match brick.filter(|brick| *brick != is) {
                Some(brick) => Err(Error::Request(format!("the pool's files have {is}; they cannot become {brick}"))),
                None => Ok(()),
            };
        }
        let spec = |numa: &u32| {
            let memory = self.host.memory(*numa).during("Asking for a node's memory")?;
            Ok(NodeSpec { numa: *numa, slices: (memory.total.0 / page.bytes()) as u32 })
        };
        let specs = nodes.iter().map(spec).collect::<Result<Vec<_>, Error>>()?;
        // A VM with all of the host's memory fits into the number of files that a VM may have, up to files of 1 GiB.
        let all: u64 = specs.iter().map(|spec| u64::from(spec.slices)).sum();
        let default = match page {
            Page::Huge => (all / MAX_FILES as u64).next_power_of_two().clamp(32, FRAME_SLICES.into()),
            Page::Gib => 1,
        };
        let slices = brick.map_or(default, |brick| brick.0 / page.bytes());
        if brick.is_some_and(|brick| !brick.0.is_multiple_of(page.bytes())) {
            let most = page.size(FRAME_SLICES);
            return Err(Error::Request(format!("files of the pool are of {page} to {most}, a power of two")));
        }
        let layout = Layout::new(&specs, u32::try_from(slices).unwrap_or(u32::MAX), VMS);
        let layout = layout.map_err(|error| Error::Request(error.to_string()))?;
        const WHAT: &str = "Making the pool's file system";
        let files = self.dir.join(self.host.page().files());
        Files::open(&files, page, page.size(layout.brick_slices())).during(WHAT)?;
        self.mark_files(&files)?;
        self.live = Some(Live::new(&self.dir, shared::create(&self.dir.join("state"), &layout)?, page)?);
        Ok(())
    }

    /// Makes the kernel reserve more pages of a node, first for slices that were lent.
    pub(crate) fn add(&mut self, numa: u32, more: u32) -> Result<(), Error> {
        let Some(live) = &self.live else { return Ok(()) };
        let node = live.node(numa)?;
        // The kernel first converts surplus pages of others, which the pool cannot use.
        let others = self.host.pages(numa).during("Asking for huge pages")?.surplus;
        let grown = self.host.change_pages(numa, i64::from(more) + others as i64).during("Reserving huge pages")?;
        let taken = (grown.max(0) as u64).min(others);
        if taken > 0 {
            self.owe(numa, taken as i64)?;
        }
        let got = (grown - taken as i64).clamp(0, more.into()) as u32;
        let Some(live) = &mut self.live else { return Ok(()) };
        if got < more {
            let page = self.host.page();
            let (got, more) = (page.size(got), page.size(more));
            let why =
                format!("node {numa}: the kernel found {got} in one piece each of {page}, and {more} were asked for");
            self.notes.push(why);
        }
        let mut left = got;
        for (state, by) in [(SliceState::Borrow, Pool::take_back as Take), (SliceState::Hole, Pool::reserve as Take)] {
            for extent in live.runs(node, state, left) {
                by(&mut live.pool, extent)?;
                left -= extent.slices;
            }
        }
        Ok(())
    }

    pub(crate) fn has(&self, numa: u32) -> u32 {
        let Some(live) = &self.live else { return 0 };
        let stats = live.node(numa).ok().and_then(|node| live.pool.stats(node));
        stats.map_or(0, |stats| stats.slices - stats.holes - stats.lent)
    }

    /// Gives a VM memory of these nodes.
    ///
    /// # Errors
    /// Too little memory is zeroed, or the VM would get too many pieces.
    pub fn grant(&mut self, name: &str, size: Bytes, mode: Mode, nodes: &Nodes) -> Result<Grant, Error> {
        let names = self.dir.join("names.json");
        self.find_failures()?;
        let live = self.live.as_ref().ok_or_else(|| Error::Request("nothing is reserved for VMs".into()))?;
        let page = live.page;
        let slices = u32::try_from(size.0 / page.bytes()).ok().filter(|_| size.0.is_multiple_of(page.bytes()));
        let slices = slices.ok_or_else(|| Error::Request(format!("{size} is no multiple of {page}")))?;
        if !live.promises.is_empty() {
            self.check_promises(slices)?;
        }
        let Some(live) = &mut self.live else { return Err(Error::Request("nothing is reserved for VMs".into())) };
        let (parts, lacked) = (live.parts(slices, nodes)?, live.lacks()?);
        let (id, domain) = live.new_vm().during("Asking for random numbers")?;
        // The name is stored first. A name without a VM is forgotten; a VM without a name would have no known owner.
        live.name(&names, id.get(), name)?;
        let request = Request { vm: VmId(id), domain, mode, parts };
        let given = live.pool.allocate(&request).map_err(|why| Error::Refused(why, page)).and_then(|grant| {
            let cut = live.keeps_promises(&lacked).and_then(|()| live.cut(id.get(), &grant.segments));
            cut.map(|(extents, files)| Grant { vm: id.get(), extents, files, lacked }).inspect_err(|_| {
                // No process has seen the memory.
                let _ = live.pool.release(VmId(id));
                let _ = live.files.close_door(id.get());
            })
        });
        if given.is_err() {
            live.names.remove(&id.get());
            journal::store(&names, &live.names).during("Writing who has what")?;
        }
        given
    }

    /// Takes back the memory of VMs that are gone, because no process has their files. Returns the number of these VMs.
    pub fn tend(&mut self) -> Result<usize, Error> {
        // This comes first: a failed page that killed its VM leaves its file below, and could not be found afterwards.
        self.find_failures()?;
        let Some(live) = &mut self.live else { return Ok(0) };
        let vms = live.pool.tenants().map(|tenant| tenant.vm).filter(|vm| !live.is_aside(*vm));
        let mut gone = 0;
        for vm in vms.collect::<Vec<_>>() {
            if live.files.close_door(vm.0.get()).during("Asking who has a file of the pool")? {
                // The pages are emptied first. After a death in between, the next owner finds the VM gone, too.
                for number in live.numbers(vm) {
                    live.files.replace(number).during("Replacing a file of the pool that a VM had")?;
                }
                live.pool.release(vm)?;
                live.names.remove(&vm.0.get());
                gone += 1;
            }
        }
        if gone > 0 {
            journal::store(&self.dir.join("names.json"), &live.names).during("Writing who has what")?;
        }
        gone += self.tend_on_demand()?;
        self.set_aside()?;
        self.give_back()?;
        Ok(gone)
    }

    /// Returns whether no slice must be checked, zeroed or given back until the next request.
    pub fn is_at_rest(&self) -> bool {
        let is_unused =
            |live: &Live| live.pool.tenants().next().is_none() && live.promises.is_empty() && live.waiting.is_empty();
        self.live.as_ref().is_none_or(is_unused) && !self.has_dirty() && self.owed().is_ok_and(|owed| owed.is_empty())
    }

    /// Returns a job for a worker: a slice to zero.
    pub fn next_job(&mut self) -> Result<Option<Job>, Error> {
        let Some(live) = &mut self.live else { return Ok(None) };
        live.pool.next_dirty(1).map(|dirty| live.job(dirty)).transpose()
    }

    /// Returns jobs for the slices that found no page before. Slices whose file cannot be opened stay in the list.
    pub fn jobs_again(&mut self) -> Vec<Job> {
        let Some(live) = &mut self.live else { return Vec::new() };
        let waiting = std::mem::take(&mut live.waiting);
        waiting.into_iter().filter_map(|dirty| live.job(dirty).ok()).collect()
    }

    /// Takes the result of a job. Returns whether the slice can be handed out.
    pub fn finish(&mut self, done: Done) -> bool {
        let Some(live) = &mut self.live else { return false };
        match done.0 {
            Ok(zeroed) => {
                live.pool.clean(zeroed);
                true
            }
            Err((dirty, error)) => {
                let extent = dirty.extent();
                tracing::debug!("Filling {extent} with zeros: {error}");
                live.waiting.push(dirty);
                false
            }
        }
    }

    /// Returns whether a VM had memory at the last check.
    pub fn has_vms(&self) -> bool {
        self.live.as_ref().is_some_and(|live| !live.names.is_empty() || !live.promises.is_empty())
    }

    /// Returns whether slices wait for a page.
    pub fn waits_for_pages(&self) -> bool {
        self.live.as_ref().is_some_and(|live| !live.waiting.is_empty())
    }

    /// Returns whether slices must be zeroed and do not wait for a page.
    pub fn has_dirty(&self) -> bool {
        let Some(live) = &self.live else { return false };
        let stats = live.pool.layout().nodes().filter_map(|(node, _)| live.pool.stats(node));
        stats.map(|stats| stats.dirty + stats.zeroing).sum::<u32>() > live.waiting.len() as u32
    }

    /// Checks the whole state. The error is the first inconsistency.
    pub fn validate(&self) -> Result<(), crate::map::Damage> {
        self.live.as_ref().map_or(Ok(()), |live| live.pool.validate())
    }
}

/// An operation of the map by which slices become the pool's.
type Take = fn(&mut Pool<Shared>, Extent) -> Result<(), Invalid>;
