//! A VM that tests continuously whether an engine serves its faults: one thread unmaps a page and touches it.
//!
//! Before: `upgrade` starts it as a process. After: it returns the time of each fault, and each time between two served
//! faults. They are measured from outside: neither keeper nor engine takes part.
//! clock; slices of [`SLICE_NS`].
//! Promise: every touch was a fault, by the kernel's count, and an engine served it, by the engines' count; the page
//! had the number that was written last. A time without an engine shows as a touch, and as a gap between two served
//! faults, of at least that length.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ballast_base::units::MIB;
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_sys::clock::monotonic_ns;
use ballast_testhost::until;
use ballast_testvm::GuestRam;
use rustix::mm::{Advice, madvise};

use crate::order::{Answer, Backing, Order, Probed, Role, Slice};
use crate::pager::Pager;
use crate::rig::Bench;
use crate::worker::Worker;

/// Length of a slice of a turn, whose faults are counted separately: 20 ms.
const SLICE_NS: u64 = 20_000_000;
/// Bytes of RAM. Half of it goes far, so that all of it is under userfaultfd.
const RAM: u64 = 32 * MIB;
const PAGES: usize = 64;
/// Time from the order to the turn, in which guest and bench get ready.
const LEAD: Duration = Duration::from_millis(50);
/// Time of faults before an upgrade begins.
const BEFORE: Duration = Duration::from_millis(100);
/// Length of a turn. One upgrade and the end of the old engine take less, unless the host is crowded.
const TIME: Duration = Duration::from_millis(1000);
/// Time after an upgrade that also counts: the old engine ends, and the keeper becomes another program.
const AFTER: Duration = Duration::from_millis(100);
const SQUEEZE: Duration = Duration::from_secs(60);

pub(crate) struct Prober {
    backing: Backing,
    ram: GuestRam,
    pager: Option<Pager>,
    touches: [u64; PAGES],
}

impl Prober {
    pub(crate) fn new(backing: Backing) -> Result<Self> {
        let ram = GuestRam::new(Bytes(RAM)).context("Making guest RAM")?;
        Ok(Self { backing, ram, pager: None, touches: [0; PAGES] })
    }

    pub(crate) fn obey(&mut self, order: &Order) -> Result<Answer> {
        match order {
            Order::Fill => {
                self.pager = Some(Pager::attach(&self.backing, &self.ram)?);
                // With their numbers these pages are not zero pages; the pages that are touched begin at 0.
                for page in PAGES..self.ram.len() / PAGE_SIZE {
                    self.ram.word(page * PAGE_SIZE).store(page as u64, Relaxed);
                }
                (0..PAGES).for_each(|page| self.ram.word(page * PAGE_SIZE).store(0, Relaxed));
                Ok(Answer::Done)
            }
            Order::Read { from_ns, until_ns } => self.probe(*from_ns, *until_ns).map(Answer::Probed),
            Order::Compute { from_ns, until_ns } => Ok(Answer::Probed(compute(*from_ns, *until_ns))),
            other => bail!("a prober cannot do {other:?}"),
        }
    }

    fn probe(&mut self, from_ns: u64, until_ns: u64) -> Result<Probed> {
        let slices = (until_ns.saturating_sub(from_ns) / SLICE_NS) as usize + 1;
        let mut probed = Probed { slices: vec![Slice::default(); slices], ..Probed::default() };
        std::thread::sleep(Duration::from_nanos(from_ns.saturating_sub(monotonic_ns())));
        // No page may be far when the turn begins.
        (0..PAGES).for_each(|page| {
            self.ram.word(page * PAGE_SIZE).load(Relaxed);
        });
        let faulted = faults()?;
        let mut last = monotonic_ns();
        for page in (0..PAGES).cycle() {
            let at = (self.ram.addr() + page * PAGE_SIZE) as *mut libc::c_void;
            // SAFETY: the page is in this guest's RAM, a shared mapping of a file: its bytes stay there, and no Rust
            // reference is made into guest RAM but to atomics, which live as long as the mapping.
            unsafe { madvise(at, PAGE_SIZE, Advice::LinuxDontNeed) }.context("Unmapping a page")?;
            let begin = monotonic_ns();
            let found = self.ram.word(page * PAGE_SIZE).fetch_add(1, Relaxed);
            let now = monotonic_ns();
            ensure!(found == self.touches[page], "WRONG DATA: page {page} holds {found:#x}");
            self.touches[page] += 1;
            probed.touches += 1;
            let slice = &mut probed.slices[(((now - from_ns) / SLICE_NS) as usize).min(slices - 1)];
            slice.faults.add(now - begin);
            slice.gaps.add(now - last);
            last = now;
            if now >= until_ns {
                break;
            }
        }
        probed.faulted = faults()? - faulted;
        Ok(probed)
    }
}

/// Reads the clock without a pause and without a fault. In a gap between two readings the thread had no CPU.
fn compute(from_ns: u64, until_ns: u64) -> Probed {
    let slices = (until_ns.saturating_sub(from_ns) / SLICE_NS) as usize + 1;
    let mut probed = Probed { slices: vec![Slice::default(); slices], ..Probed::default() };
    std::thread::sleep(Duration::from_nanos(from_ns.saturating_sub(monotonic_ns())));
    let mut last = monotonic_ns();
    while last < until_ns {
        let now = monotonic_ns();
        probed.slices[(((now - from_ns) / SLICE_NS) as usize).min(slices - 1)].gaps.add(now - last);
        last = now;
    }
    probed
}

fn faults() -> Result<u64> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call fills the structure, which is all integers.
    let usage = unsafe {
        ensure!(libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) == 0, "getrusage failed");
        usage.assume_init()
    };
    Ok((usage.ru_minflt + usage.ru_majflt) as u64)
}

pub(crate) struct Probe {
    worker: Worker,
    name: String,
}

/// The slices in which an upgrade was under way, and whether it outlasted the turn.
pub(crate) struct Window {
    slices: std::ops::Range<usize>,
    pub(crate) is_cut: bool,
}

impl Window {
    /// The faults of a turn in these slices.
    pub(crate) fn of(&self, probed: &Probed) -> Slice {
        let mut sum = Slice::default();
        for slice in &probed.slices[self.slices.clone()] {
            sum.faults.merge(&slice.faults);
            sum.gaps.merge(&slice.gaps);
        }
        sum
    }
}

impl Probe {
    pub(crate) fn start(bench: &mut Bench) -> Result<Self> {
        let name = bench.vm_name();
        let backing = Backing::Ballast { socket: bench.daemon.attach_socket(), name: name.clone() };
        let mut probe = Self { worker: Worker::start(&Role::Prober(backing))?, name };
        probe.worker.ask(&Order::Fill)?;
        bench.daemon.wait_for_vm(&probe.name)?;
        let api = bench.daemon.api();
        api.set_limit(&probe.name, Some(RAM / 2))?;
        until("the prober's pages do not go", SQUEEZE, || {
            Ok((api.vm(&probe.name)?.resident_bytes <= RAM / 2 + MIB).then_some(()))
        })?;
        Ok(probe)
    }

    /// Lets the VM fault for one turn, during `meanwhile`. Returns the faults, the window of `meanwhile`, and its
    /// result.
    pub(crate) fn turn<T>(
        &mut self,
        bench: &Bench,
        meanwhile: impl FnOnce() -> Result<T>,
    ) -> Result<(Probed, Window, T)> {
        let name = self.name.clone();
        let served = || Ok::<_, anyhow::Error>(bench.daemon.api().vm(&name)?.faults.total());
        let before = served()?;
        let turn = self.run(|from_ns, until_ns| Order::Read { from_ns, until_ns }, meanwhile)?;
        let served = served()? - before;
        let Probed { touches, faulted, .. } = turn.0;
        ensure!(faulted >= touches, "of {touches} touches of the prober only {faulted} were faults");
        ensure!(served >= touches, "of {touches} touches of the prober engines served only {served}");
        Ok(turn)
    }

    /// As `turn`, but the thread only reads the clock.
    pub(crate) fn compute<T>(&mut self, meanwhile: impl FnOnce() -> Result<T>) -> Result<(Probed, Window, T)> {
        self.run(|from_ns, until_ns| Order::Compute { from_ns, until_ns }, meanwhile)
    }

    fn run<T>(
        &mut self,
        order: impl FnOnce(u64, u64) -> Order,
        meanwhile: impl FnOnce() -> Result<T>,
    ) -> Result<(Probed, Window, T)> {
        let from_ns = monotonic_ns() + LEAD.as_nanos() as u64;
        self.worker.tell(&order(from_ns, from_ns + TIME.as_nanos() as u64))?;
        std::thread::sleep(LEAD + BEFORE);
        let slice = || (monotonic_ns().saturating_sub(from_ns) / SLICE_NS) as usize;
        let first = slice();
        let meanwhile = meanwhile()?;
        let end = slice() + 1 + (AFTER.as_nanos() as u64 / SLICE_NS) as usize;
        let Answer::Probed(probed) = self.worker.answer()? else { bail!("a prober does not probe") };
        let most = probed.slices.len();
        let window = Window { slices: first.min(most - 1)..end.min(most), is_cut: end > most };
        Ok((probed, window, meanwhile))
    }
}
