//! The pin check: tells whether anything but its file holds a page of guest RAM.
//!
//! Before: the page is zapped in every process and that was acknowledged, so no process can pin it without a fault.
//! After: `pager` copies and frees pages that are [`Pin::Free`] or [`Pin::Absent`], and leaves all others.
//! Threads: any; up to 8 check at once, and others wait for them. Units: pages of 4 KiB, counted from the start of the
//! file. Promise: a page that is held for the whole time of the check is never called free, whatever else the kernel
//! does with it meanwhile; and the check writes to no memory of the kernel.
//!
//! The kernel counts references to a page: one for the page cache, one for each mapping, one for each other holder (a
//! device, direct I/O, a system call that has not returned, a CPU's batch of pages on their way to the LRU lists). It
//! does not export these counts to user space, so a BPF program reads them (`pins/program.rs`). The program starts from
//! this process's own descriptor and follows the kernel's pointers: the file's tree of pages, the page, its counts. The
//! kernel itself describes the offsets in its structures ([`Btf`]). All of it happens within one run, under RCU: memory
//! that the program reached is not freed before it ends.
//!
//! Why a held page is never called free: such a page cannot be moved, swapped out or taken from the file's tree by
//! anything but a punch, because all of these first make sure that it has no holder. So the program finds this very
//! page, and its count includes the holder's reference each time it is read. For a page of 4 KiB that is the whole
//! argument: its count must be 1, and with the references of page cache and holder it is at least 2. A large folio has
//! one count for all its pages, and one for all mappings of any of them. If no page of it is mapped, the first count
//! equals the number of its pages, and the same argument holds. Otherwise the two must agree, and they cannot be read
//! in one instant; they are read in turn, six readings of some 20 ns, and all must agree. A holder could escape only if
//! the folio were mapped and unmapped again as many times, and each time within one of those gaps.
//!
//! A page that looks held and is not (a CPU's batch, a migration under way) only stays, and is checked again later.

use std::io;
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::btf::Btf;

mod check;
mod found;
mod own;
mod program;
mod slot;

use check::Check;
use own::Drain;
use program::Layout;

pub use found::Pin;

/// Why there is no pin check.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// The kernel does not describe its types, or they differ from what this code knows.
    #[error("the kernel's layout is not known: {0}")]
    Layout(String),
    /// The kernel does not let this process load it.
    #[error("{0}")]
    Refused(String),
    /// The program ran, and did not give the right results.
    #[error("its self-test failed: {0}")]
    SelfTest(String),
}

/// The pin check.
#[derive(Debug)]
pub struct PinCheck {
    check: Check,
    drain: Drain,
    drained_at: Mutex<Option<Instant>>,
    /// The self-test saw a large folio.
    knows_large: bool,
}

impl PinCheck {
    /// Load the program, and check that it tells held pages of this process from free ones: pages of 4 KiB and, if the
    /// kernel makes them, large ones. Takes some 10 ms, of which the kernel's verifier has one.
    ///
    /// # Errors
    /// The reason why it cannot be used here. A temporary lack, for example of memory for a huge page, is
    /// [`Unavailable::SelfTest`].
    pub fn new() -> Result<Self, Unavailable> {
        let btf = Btf::of_kernel().map_err(|error| Unavailable::Layout(error.to_string()))?;
        let layout = Layout::of(&btf).map_err(Unavailable::Layout)?;
        drop(btf);
        let loaded = Check::load(&layout).and_then(|check| Ok((check, Drain::new()?)));
        let (check, drain) = loaded.map_err(|error| Unavailable::Refused(why_refused(&error)))?;
        own::test_pages(&check, &drain).map_err(Unavailable::SelfTest)?;
        let knows_large = own::test_large(&check, &drain).map_err(Unavailable::SelfTest)?;
        Ok(Self { check, drain, drained_at: Mutex::default(), knows_large })
    }

    /// Returns the pin of each of these pages of a file of this process, given by their numbers.
    ///
    /// The caller must not read the bytes of a page before this returns: else they may change between the two.
    ///
    /// # Errors
    /// The kernel does not run the program any more, or the program does not find the file.
    pub fn pins(&self, file: impl AsFd, pages: &[u64]) -> io::Result<Vec<Pin>> {
        self.check.pins(file, pages, self.knows_large)
    }

    /// Drain the batches of every CPU (`lru_add_drain_all`), unless that was done within the last second. Each batch
    /// has up to 31 pages that were last filled, or found touched, on its CPU, and holds a reference to each. A drain
    /// takes some tens of microseconds on each CPU that has any. Call it when pages look held that are probably only in
    /// a batch. Returns whether it drained, so that another check may give another result.
    pub fn drain_if_due(&self) -> bool {
        const EVERY: Duration = Duration::from_secs(1);
        let Ok(mut last) = self.drained_at.try_lock() else { return false };
        if last.is_some_and(|last| last.elapsed() < EVERY) {
            return false;
        }
        *last = Some(Instant::now());
        self.drain.drain();
        true
    }

    /// Can it check large folios? If not, all their pages are [`Pin::Unknown`].
    pub fn knows_large(&self) -> bool {
        self.knows_large
    }
}

fn why_refused(error: &io::Error) -> String {
    let lockdown = std::fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default();
    if lockdown.contains("[confidentiality]") {
        return "the kernel is locked down for confidentiality: its memory may not be read".into();
    }
    match error.kind() {
        io::ErrorKind::PermissionDenied => format!("CAP_BPF and CAP_PERFMON (or CAP_SYS_ADMIN) are needed: {error}"),
        _ if error.raw_os_error() == Some(libc::ENOSYS) => "the kernel has no BPF (CONFIG_BPF_SYSCALL)".into(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests;
