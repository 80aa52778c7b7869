//! A view: one process's mapping of a VM's RAM, with its userfaultfds. Our client there zaps (`client_peer.rs`).
//!
//! Before: the keeper passes the descriptors on. After: fault workers read and resolve its faults; reclaim zaps through
//! it. Most VMs have one view; a vhost-user back end that attaches, too, is a second view of the same regions.
//! Threads: any.
//! Promise: while a fault on an address is served, the mapping there is not forgotten.

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

use crate::vm::client_peer::ClientPeer;
use crate::vm::kept::Kept;
use crate::vm::region::Region;
use crate::vm::serve::stall::Stall;
use ballast_page::memory::Mapped;

/// One process's view of a VM.
#[derive(Debug)]
pub struct View {
    /// Process ID.
    pub pid: u32,
    uffds: Vec<Uffd>,
    can_poison: bool,
    remote: OnceLock<Option<Remote>>,
    peer: Arc<ClientPeer>,
    /// Mappings of regions, sorted: start, end, region number.
    spans: RwLock<Vec<(Hva, Hva, u32)>>,
    /// Shared by each fault from the look-up of its page until it is served. Faults that wait for a disk share the
    /// other lock, so that no other fault waits for them.
    serving: RwLock<()>,
    serving_from_disk: RwLock<()>,
    pub(crate) kept: Kept,
    pub(crate) stall: Stall,
    closed: AtomicBool,
}

/// A view of one region: [`ballast_page::fault::serve`] works on it.
#[derive(Clone, Debug)]
pub struct RegionView<'a> {
    view: &'a View,
    base: Hva,
    /// `None`: one extent has all pages.
    extents: Option<Extents>,
    /// NUMA nodes to allocate pages from, by file.
    nodes: Option<Arc<[Option<u32>]>>,
    granule: u64,
    stripes: Stripes,
}

impl View {
    /// A view of process `pid`, with at least one userfaultfd, of which `peer` is the client.
    pub fn new(pid: u32, uffds: Vec<Uffd>, uffd_features: u64, peer: Arc<ClientPeer>) -> Self {
        Self {
            pid,
            stall: Stall::new(uffds.len()),
            uffds,
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

    /// The userfaultfds, in the client's order. Each page's faults come through one of them (`ballast_base::stripes`).
    pub fn uffds(&self) -> &[Uffd] {
        &self.uffds
    }

    /// The process's page tables; `None` if it has ended or the kernel refuses. Short of memory, the next call retries.
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

    /// The client in the process.
    pub fn peer(&self) -> &Arc<ClientPeer> {
        &self.peer
    }

    /// User ID of the process; `None` if no client runs in it.
    pub fn user(&self) -> Option<u32> {
        rustix::net::sockopt::socket_peercred(&*self.peer).ok().map(|peer| peer.uid.as_raw())
    }

    /// Adds the mapping of a region.
    pub fn add_span(&self, Span { hva, len }: Span, region: u32) {
        let mut spans = self.spans.write().expect("no panic while held");
        spans.push((hva, hva + len.0, region));
        spans.sort_unstable();
    }

    /// Forgets the mapping of a region, and returns the region's number. When it returns, no fault on that mapping is
    /// being served, so its addresses may become those of other RAM.
    pub fn remove_span(&self, start: Hva) -> Option<u32> {
        let mut spans = self.spans.write().expect("no panic while held");
        let at = spans.iter().position(|span| span.0 == start)?;
        let (_, _, number) = spans.remove(at);
        drop(spans);
        self.kept.forget(number);
        // Each lock is released before the next is taken, so a wait for the second does not block the first.
        for serving in [&self.serving, &self.serving_from_disk] {
            drop(serving.write().expect("no panic while held"));
        }
        Some(number)
    }

    /// While it is held, an address that was looked up in this view keeps its meaning.
    pub(crate) fn serving(&self) -> RwLockReadGuard<'_, ()> {
        self.serving.read().expect("no panic while held")
    }

    /// Like [`View::serving`], for a thread that may wait for a disk.
    pub(crate) fn serving_from_disk(&self) -> RwLockReadGuard<'_, ()> {
        self.serving_from_disk.read().expect("no panic while held")
    }

    /// The region and page at an address.
    pub fn find(&self, addr: Hva) -> Option<(u32, PageIdx)> {
        self.find_mapped(addr).map(|(region, page, _)| (region, page))
    }

    /// The region and page at an address, and the start of the region's mapping.
    pub(crate) fn find_mapped(&self, addr: Hva) -> Option<(u32, PageIdx, Hva)> {
        let spans = self.spans.read().expect("no panic while held");
        let at = spans.partition_point(|span| span.0 <= addr).checked_sub(1)?;
        let (start, end, region) = spans[at];
        (addr < end).then(|| (region, PageIdx::containing(addr.0 - start.0), start))
    }

    /// Start of a region's mapping.
    pub fn base(&self, region: u32) -> Option<Hva> {
        let spans = self.spans.read().expect("no panic while held");
        spans.iter().find(|span| span.2 == region).map(|span| span.0)
    }

    /// This view of a region; `None` if it does not map the region.
    pub fn of_region(&self, region: &Region) -> Option<RegionView<'_>> {
        self.base(region.number).map(|base| self.at(region, base))
    }

    /// This view of a region that is, or will be, mapped at `base`.
    pub fn at(&self, region: &Region, base: Hva) -> RegionView<'_> {
        let granule = PageIdx(region.granule_pages()).offset();
        let extents = Some(region.extents()).filter(|extents| extents.list().len() > 1).cloned();
        let (nodes, stripes) = (region.ram.nodes.clone(), region.stripes(self.uffds.len()));
        RegionView { view: self, base, extents, nodes, granule, stripes }
    }

    /// Wakes the threads that wait in a range, whether it is a region's or not.
    pub(crate) fn wake(&self, start: Hva, len: u64) -> io::Result<()> {
        self.uffds.iter().try_for_each(|uffd| uffd.wake(start, len))
    }

    /// Wakes all threads that wait in this view: they fault again, on the engine that serves by then.
    pub fn wake_all(&self) -> io::Result<()> {
        let spans = self.spans.read().expect("no panic while held");
        spans.iter().try_for_each(|(start, end, _)| self.wake(*start, end.0 - start.0))
    }

    /// Pages in a range of addresses, by region.
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

    /// Returns whether the process has ended, so that its workers must end.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Records that the process has ended: its workers end, and no thread waits for its answers any more.
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

    /// The userfaultfd of a page's faults: only it can wake threads that wait for the page.
    fn uffd(&self, page: PageIdx) -> &Uffd {
        &self.view.uffds[self.stripes.shard(page)]
    }

    /// Parts of a range of pages, each with its userfaultfd: start and length.
    fn parts(&self, pages: PageRange) -> impl Iterator<Item = (&Uffd, Hva, u64)> {
        let split = self.stripes.split(pages);
        split.map(|(shard, part)| (&self.view.uffds[shard], self.addr(part.start()), part.bytes().0))
    }

    /// Number of pages, up to `count` from `first` on, that are in one mapping.
    fn run(&self, first: PageIdx, count: u64) -> u64 {
        self.extents.as_ref().map_or(count, |extents| count.min(extents.run_end(first).0 - first.0))
    }

    /// Registers pages, so that the engine serves their faults. No effect on pages that are registered.
    pub fn register(&self, pages: PageRange) -> io::Result<()> {
        self.parts(pages).try_for_each(|(uffd, start, len)| uffd.register(start, len))
    }

    /// Registers the chunks that are registered for the region's other views. Call it before a page can be far for this
    /// view. Returns the pages that were not registered, because the VMM mapped something else over them or the kernel
    /// refused; and an error if the kernel refused, or such a page is far.
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

    /// Registers those of these pages that are RAM, by bisection; adds the others to `holes`.
    fn register_around(&self, pages: PageRange, holes: &mut Vec<PageRange>) -> io::Result<()> {
        /// Finding one hole takes some twenty system calls.
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

    /// Unregisters pages: the kernel serves their faults.
    pub(crate) fn unregister(&self, pages: PageRange) -> io::Result<()> {
        self.parts(pages).try_for_each(|(uffd, start, len)| uffd.unregister(start, len))
    }

    pub(crate) fn wake_run(&self, pages: PageRange) -> io::Result<()> {
        self.parts(pages).try_for_each(|(uffd, start, len)| uffd.wake(start, len))
    }
}

/// Returns whether the kernel refuses to register pages because of their mapping: none, not shared, or read-only.
pub(crate) fn is_mapped_over(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::PermissionDenied)
}

impl RegionView<'_> {
    /// While the result lives, this thread allocates from the page's NUMA node.
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
        // Each extent is a mapping, and the kernel fills one mapping at a time.
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
        /// The address space may be changing; a thread that needs the pages faults.
        const TRIES: u32 = 8;
        let (mut done, mut tries) = (0, 0);
        while done < pages.count() && tries < TRIES {
            let at = PageIdx(pages.start().0 + done);
            // As in `install_run`.
            let count = self.run(at, pages.count() - done);
            let (mapped, outcome) = self.uffd(at).map_run(self.addr(at), count)?;
            done += mapped;
            match outcome {
                FillOutcome::Done => {}
                FillOutcome::Gone => break,
                // A touch of a page with failed memory faults.
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

    type Guard = fn(&View) -> RwLockReadGuard<'_, ()>;

    #[test]
    fn a_mapping_is_forgotten_only_when_the_fault_that_looked_it_up_is_served() {
        forgotten_after(View::serving, View::serving_from_disk);
    }

    #[test]
    fn a_thread_that_waits_until_a_fault_from_the_disk_is_served_delays_no_other_fault() {
        forgotten_after(View::serving_from_disk, View::serving);
    }

    fn forgotten_after(serving: Guard, other: Guard) {
        let uffd = match Uffd::create(0) {
            Ok((uffd, _)) => uffd,
            Err(error) => return ballast_testkit::skip("native", error),
        };
        let (control, _theirs) = scm::pair().expect("socketpair");
        let view = View::new(1, vec![uffd], 0, Arc::new(ClientPeer::new(control, 1)));
        view.add_span(Span { hva: Hva(1 << 30), len: Bytes(1 << 20) }, 7);
        let is_served = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let serving = serving(&view);
            assert_eq!(view.find(Hva(1 << 30)), Some((7, PageIdx(0))));
            let removed = scope.spawn(|| {
                assert_eq!(view.remove_span(Hva(1 << 30)), Some(7));
                assert!(is_served.load(Ordering::Acquire), "its addresses may have been another region's by then");
            });
            // Later look-ups no longer find the mapping; the other thread then waits.
            while view.find(Hva(1 << 30)).is_some() {
                std::thread::yield_now();
            }
            for _ in 0..1000 {
                std::thread::yield_now();
                // A fault of the other kind does not wait.
                drop(other(&view));
            }
            is_served.store(true, Ordering::Release);
            drop(serving);
            removed.join().expect("it waited");
        });
    }
}
