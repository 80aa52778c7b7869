//! A view: one process's mapping of a VM's RAM and its userfaultfds. Its peer zaps there (`peer.rs`).
//!
//! Before: the keeper hands over the descriptors. After: fault workers read and resolve its faults; reclaim zaps
//! through it. Most VMs have one view; a vhost-user back end that attaches too is a second view of the same regions.
//! Threads: any. Promise: while an address is being served, what is mapped there is not forgotten.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, RwLock, RwLockReadGuard};

use ballast_base::stripes::Stripes;
use ballast_base::wire::{self, Span};
use ballast_base::{Extents, Hva, PAGE_SIZE, PageIdx, PageRange};
use ballast_store::PageBytes;
use ballast_sys::huge_files::OnNode;
use ballast_sys::uffd::{FillOutcome, feature};
use ballast_sys::{Remote, Uffd};
use rustix::io::Errno;

use crate::vm::kept::Kept;
use crate::vm::peer::Peer;
use crate::vm::region::Region;
use crate::vm::serve::stall::Stall;
use crate::vm::shard::Shards;
use ballast_page::memory::Mapped;

/// One process's view of a VM.
#[derive(Debug)]
pub struct View {
    /// The process.
    pub pid: u32,
    shards: Shards,
    can_poison: bool,
    remote: OnceLock<Option<Remote>>,
    peer: Arc<dyn Peer>,
    /// Where each region is mapped: start, end, region number; sorted by start.
    spans: RwLock<Vec<(Hva, Hva, u32)>>,
    /// Shared by each fault from the look-up of its page until it is served. Faults that wait for a disk share another
    /// one, so that no other fault waits for them.
    serving: RwLock<()>,
    serving_from_disk: RwLock<()>,
    /// Parts that the client could not zap.
    pub(crate) kept: Kept,
    /// Threads that wait here.
    pub(crate) stall: Stall,
    closed: AtomicBool,
}

/// A view of one region: what [`ballast_page::fault::serve`] works on.
#[derive(Clone, Debug)]
pub struct RegionView<'a> {
    view: &'a View,
    base: Hva,
    /// `None` if there is one extent, which has all pages.
    extents: Option<Extents>,
    /// The nodes that pages are to be of, by file.
    nodes: Option<Arc<[Option<u32>]>>,
    /// Bytes paged as one.
    granule: u64,
    stripes: Stripes,
}

impl View {
    /// A view of process `pid`, in which this peer acts for us.
    pub fn new(pid: u32, shards: Shards, uffd_features: u64, peer: Arc<dyn Peer>) -> Self {
        Self {
            pid,
            stall: Stall::new(shards.count()),
            shards,
            can_poison: uffd_features & feature::POISON != 0,
            remote: OnceLock::new(),
            peer,
            spans: RwLock::default(),
            serving: RwLock::default(),
            serving_from_disk: RwLock::default(),
            kept: Kept::default(),
            closed: AtomicBool::new(false),
        }
    }

    /// The userfaultfds.
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// The process's page tables; `None` if it is gone or the kernel does not let us. Where descriptors or memory are
    /// short, the next call tries again.
    pub(crate) fn remote(&self) -> Option<&Remote> {
        if let Some(opened) = self.remote.get() {
            return opened.as_ref();
        }
        let opened = Remote::open(self.pid);
        if let Err(error) = &opened {
            let errno = Errno::from_io_error(error);
            if matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM)) {
                return None;
            }
            tracing::warn!(pid = self.pid, "Opening a VMM's page tables: {error}");
        }
        self.remote.get_or_init(|| opened.ok()).as_ref()
    }

    /// Acts for the engine in its process.
    pub fn peer(&self) -> &Arc<dyn Peer> {
        &self.peer
    }

    /// The user of its process; `None` if no client runs in that.
    pub fn user(&self) -> Option<u32> {
        rustix::net::sockopt::socket_peercred(self.peer.input()).ok().map(|peer| peer.uid.as_raw())
    }

    /// Add a region's mapping.
    pub fn add_span(&self, Span { hva, len }: Span, region: u32) {
        let mut spans = self.spans.write().expect("no panic while held");
        spans.push((hva, hva + len.0, region));
        spans.sort_unstable();
    }

    /// Forgets a region's mapping; returns its number. No fault on it is being served afterwards, so that its addresses
    /// may become other RAM's.
    pub fn remove_span(&self, start: Hva) -> Option<u32> {
        let mut spans = self.spans.write().expect("no panic while held");
        let at = spans.iter().position(|span| span.0 == start)?;
        let (_, _, number) = spans.remove(at);
        drop(spans);
        self.kept.forget(number);
        // One after the other: while this waits for the second, the first is free.
        for serving in [&self.serving, &self.serving_from_disk] {
            drop(serving.write().expect("no panic while held"));
        }
        Some(number)
    }

    /// While this is held, the addresses that are looked up in this view do not change.
    pub(crate) fn serving(&self) -> RwLockReadGuard<'_, ()> {
        self.serving.read().expect("no panic while held")
    }

    /// The same for a thread that may wait for a disk.
    pub(crate) fn serving_from_disk(&self) -> RwLockReadGuard<'_, ()> {
        self.serving_from_disk.read().expect("no panic while held")
    }

    /// The region and page at an address.
    pub fn find(&self, addr: Hva) -> Option<(u32, PageIdx)> {
        self.find_mapped(addr).map(|(region, page, _)| (region, page))
    }

    /// The region and page at an address, and where the region is mapped here.
    pub(crate) fn find_mapped(&self, addr: Hva) -> Option<(u32, PageIdx, Hva)> {
        let spans = self.spans.read().expect("no panic while held");
        let at = spans.partition_point(|span| span.0 <= addr).checked_sub(1)?;
        let (start, end, region) = spans[at];
        (addr < end).then(|| (region, PageIdx::containing(addr.0 - start.0), start))
    }

    /// Where a region begins in this view.
    pub fn base(&self, region: u32) -> Option<Hva> {
        let spans = self.spans.read().expect("no panic while held");
        spans.iter().find(|span| span.2 == region).map(|span| span.0)
    }

    /// This view of one region; `None` if the region is not mapped here.
    pub fn of_region(&self, region: &Region) -> Option<RegionView<'_>> {
        self.base(region.number).map(|base| self.at(region, base))
    }

    /// The same of a region that is, or is going to be, mapped at `base`.
    pub fn at(&self, region: &Region, base: Hva) -> RegionView<'_> {
        let granule = PageIdx(region.granule_pages()).offset();
        {
            let extents = Some(region.extents()).filter(|extents| extents.list().len() > 1).cloned();
            let (nodes, stripes) = (region.nodes().cloned(), region.stripes(self.shards.count()));
            RegionView { view: self, base, extents, nodes, granule, stripes }
        }
    }

    /// Wakes the threads that wait in a range, whatever is mapped there.
    pub(crate) fn wake(&self, start: Hva, len: u64) -> io::Result<()> {
        self.shards.iter().try_for_each(|uffd| uffd.wake(start, len))
    }

    /// Wakes all threads that wait in this view: they fault again, on an engine that listens.
    pub fn wake_all(&self) -> io::Result<()> {
        let spans = self.spans.read().expect("no panic while held");
        spans.iter().try_for_each(|(start, end, _)| self.wake(*start, end.0 - start.0))
    }

    /// Pages in this range of addresses, region by region.
    pub(crate) fn pages_in(&self, (start, len): wire::Range) -> Vec<(u32, PageRange)> {
        let end = Hva(start.0.saturating_add(len));
        let spans = self.spans.read().expect("no panic while held");
        let touched = spans.iter().filter(|(from, to, _)| *from < end && start < *to);
        let page = |at: Hva, from: Hva| PageIdx::containing(at.0 - from.0);
        touched
            .map(|(from, to, region)| {
                let last = Hva(end.min(*to).0 - 1);
                (*region, PageRange::new(page(start.max(*from), *from), PageIdx(page(last, *from).0 + 1)))
            })
            .collect()
    }

    /// Is the process gone? Then its workers end.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The process is gone: its workers may end, and no thread need wait for an answer any more.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.peer.disconnect();
    }
}

impl RegionView<'_> {
    /// The address of a page.
    pub fn addr(&self, page: PageIdx) -> Hva {
        self.base + page.offset()
    }

    /// The userfaultfd through which a page's faults come: only this one can wake threads that wait for the page.
    fn uffd(&self, page: PageIdx) -> &Uffd {
        self.view.shards.get(self.stripes.shard(page))
    }

    /// The same for a range of pages, part by part: userfaultfd, start and length.
    fn parts(&self, pages: PageRange) -> impl Iterator<Item = (&Uffd, Hva, u64)> {
        let split = self.stripes.split(pages);
        split.map(|(shard, part)| (self.view.shards.get(shard), self.addr(part.start()), part.bytes().0))
    }

    /// How many of `count` pages from this one on are in one mapping.
    fn run(&self, first: PageIdx, count: u64) -> u64 {
        self.extents.as_ref().map_or(count, |extents| count.min(extents.run_end(first).0 - first.0))
    }

    /// From now on the engine serves faults on these pages. A repeated call changes nothing.
    pub fn register(&self, pages: PageRange) -> io::Result<()> {
        self.parts(pages).try_for_each(|(uffd, start, len)| uffd.register(start, len))
    }

    /// Registers what is registered for the region's other views: before any page of it can be far for this one.
    /// Returns the pages that it did not register, because the VMM has mapped something over them or the kernel
    /// refused, and why that matters: no page may be far there.
    pub fn register_as_flagged(&self, region: &Region) -> (Vec<PageRange>, io::Result<()>) {
        let (mut holes, mut refused) = (Vec::new(), Ok(()));
        for chunk in region.registered_chunks() {
            let registered = self.register_around(chunk, &mut holes);
            refused = refused.and(registered);
        }
        let is_far = holes.iter().any(|pages| pages.iter().any(|page| region.is_far(page)));
        let far = if is_far { Err(io::Error::other("something else is mapped where pages are far")) } else { Ok(()) };
        (holes, refused.and(far))
    }

    /// Registers those of these pages that are RAM, by halves; adds the others to `holes`.
    fn register_around(&self, pages: PageRange, holes: &mut Vec<PageRange>) -> io::Result<()> {
        /// Each costs some twenty calls.
        const MOST_HOLES: usize = 4096;
        let Err(error) = self.register(pages) else { return Ok(()) };
        let granules = pages.count() * PAGE_SIZE as u64 / self.granule;
        if !is_mapped_over(&error) || holes.len() >= MOST_HOLES || granules <= 1 {
            holes.push(pages);
            return if is_mapped_over(&error) { Ok(()) } else { Err(error) };
        }
        let middle = PageIdx(pages.start().0 + granules / 2 * self.granule / PAGE_SIZE as u64);
        let lower = self.register_around(PageRange::new(pages.start(), middle), holes);
        lower.and(self.register_around(PageRange::new(middle, pages.end()), holes))
    }

    /// From now on the kernel serves them.
    pub(crate) fn unregister(&self, pages: PageRange) -> io::Result<()> {
        self.parts(pages).try_for_each(|(uffd, start, len)| uffd.unregister(start, len))
    }

    /// Wakes the threads that wait for these pages.
    pub(crate) fn wake_run(&self, pages: PageRange) -> io::Result<()> {
        self.parts(pages).try_for_each(|(uffd, start, len)| uffd.wake(start, len))
    }
}

/// Does the kernel refuse to register pages for what is mapped there: nothing or no shared memory, or a file that may
/// not be written?
pub(crate) fn is_mapped_over(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::PermissionDenied)
}

impl RegionView<'_> {
    /// This thread allocates where this page is to be, while the result lives.
    fn on_its_node(&self, page: PageIdx) -> Option<OnNode> {
        let file = self.extents.as_ref().map_or(0, |extents| extents.place(page).0);
        OnNode::of(self.nodes.as_ref()?.get(usize::from(file)).copied().flatten())
    }
}

impl Mapped for RegionView<'_> {
    fn install(&self, page: PageIdx, bytes: &[PageBytes]) -> io::Result<FillOutcome> {
        debug_assert_eq!(size_of_val(bytes) as u64, self.granule);
        let _there = self.on_its_node(page);
        self.uffd(page).copy(self.addr(page), bytes.as_flattened())
    }

    fn install_run(&self, first: PageIdx, bytes: &[PageBytes]) -> io::Result<usize> {
        debug_assert_eq!(self.granule, PAGE_SIZE as u64);
        // Each extent is a mapping of its own, and the kernel fills one mapping at a time.
        let count = self.run(first, bytes.len() as u64) as usize;
        Ok(self.uffd(first).copy_pages(self.addr(first), &bytes[..count])?.0)
    }

    fn install_zero(&self, page: PageIdx) -> io::Result<FillOutcome> {
        if self.granule == PAGE_SIZE as u64 {
            return self.uffd(page).zero_page(self.addr(page));
        }
        let _there = self.on_its_node(page);
        self.uffd(page).zero_huge_page(self.addr(page))
    }

    fn map(&self, page: PageIdx) -> io::Result<FillOutcome> {
        self.uffd(page).map_existing(self.addr(page), self.granule)
    }

    /// Base pages of one unit.
    fn map_run(&self, pages: PageRange) -> io::Result<()> {
        /// The address space changes: a thread that wants the pages will fault.
        const TRIES: u32 = 8;
        let (mut done, mut tries) = (0, 0);
        while done < pages.count() && tries < TRIES {
            let at = PageIdx(pages.start().0 + done);
            // Each extent is a mapping of its own, and the kernel fills one mapping at a time.
            let count = self.run(at, pages.count() - done);
            let (mapped, outcome) = self.uffd(at).map_run(self.addr(at), count)?;
            done += mapped;
            match outcome {
                FillOutcome::Done => {}
                FillOutcome::Gone => break,
                // A touch of a page whose memory failed will fault.
                FillOutcome::AlreadyThere | FillOutcome::NotInFile | FillOutcome::Failed => done += 1,
                FillOutcome::Retry if mapped == 0 => tries += 1,
                FillOutcome::Retry => {}
            }
        }
        Ok(())
    }

    fn zero_run(&self, pages: PageRange) -> io::Result<u64> {
        debug_assert_eq!(self.granule, PAGE_SIZE as u64);
        let count = self.run(pages.start(), pages.count());
        self.uffd(pages.start()).zero_pages(self.addr(pages.start()), count)
    }

    fn poison(&self, page: PageIdx) -> io::Result<FillOutcome> {
        if self.view.can_poison {
            let outcome = self.uffd(page).poison(self.addr(page), self.granule)?;
            if outcome == FillOutcome::AlreadyThere {
                self.wake(page)?;
            }
            return Ok(outcome);
        }
        let reason = format!("the page at {} is lost and this kernel cannot poison it", self.addr(page));
        self.view.peer.stop_vm(&reason)?;
        Ok(FillOutcome::Done)
    }

    fn wake(&self, page: PageIdx) -> io::Result<()> {
        self.uffd(page).wake(self.addr(page), self.granule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::Bytes;
    use ballast_sys::scm;

    use crate::vm::client_peer::ClientPeer;

    type Guard = fn(&View) -> RwLockReadGuard<'_, ()>;

    #[test]
    fn a_mapping_is_forgotten_only_when_the_fault_that_looked_it_up_is_served() {
        forgotten_after(View::serving, View::serving_from_disk);
    }

    #[test]
    fn who_waits_for_a_fault_from_the_disk_to_be_served_keeps_no_other_fault_waiting() {
        forgotten_after(View::serving_from_disk, View::serving);
    }

    fn forgotten_after(serving: Guard, other: Guard) {
        let uffd = match Uffd::create(0) {
            Ok((uffd, _)) => uffd,
            Err(error) => return ballast_testkit::skip("native", error),
        };
        let (control, _theirs) = scm::pair().expect("socketpair");
        let view = View::new(1, Shards::new(vec![uffd]).expect("one"), 0, Arc::new(ClientPeer::new(control, 1)));
        view.add_span(Span { hva: Hva(1 << 30), len: Bytes(1 << 20) }, 7);
        let is_served = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let serving = serving(&view);
            assert_eq!(view.find(Hva(1 << 30)), Some((7, PageIdx(0))));
            let removed = scope.spawn(|| {
                assert_eq!(view.remove_span(Hva(1 << 30)), Some(7));
                assert!(is_served.load(Ordering::Acquire), "its addresses may have been another region's by then");
            });
            // The mapping is forgotten for later look-ups; the other thread gets no further than that.
            while view.find(Hva(1 << 30)).is_some() {
                std::thread::yield_now();
            }
            for _ in 0..1000 {
                std::thread::yield_now();
                // A fault of the other kind does not wait, or not for long.
                drop(other(&view));
            }
            is_served.store(true, Ordering::Release);
            drop(serving);
            removed.join().expect("it waited");
        });
    }
}
