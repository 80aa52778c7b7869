//! The pin check: does anything but its file hold a page of guest RAM?
//!
//! Before: the page is zapped in every process and that was acknowledged, so nobody comes to hold it without a fault.
//! After: `pager` copies and frees what is [`Pin::Free`] or [`Pin::Absent`], and leaves all else where it is.
//! Threads: any; up to 8 look at once, and others wait for them. Units: pages of 4 KiB, counted from the start of the
//! file. Promise: a page that somebody holds for the whole time of the look is never called free, whatever else the
//! kernel does with it meanwhile; and nothing of the kernel's is written.
//!
//! The kernel counts who holds a page: one for the page cache, one for each mapping, one for everybody else (a device,
//! direct I/O, a system call that has not returned, the list of a CPU on which new pages wait to be sorted). It does
//! not tell these counts to user space, so a BPF program reads them (`pins/program.rs`). It starts from this process's
//! own descriptor and goes the way the kernel goes: the file's tree of pages, the page, its counts. Where in its
//! structures these lie, the kernel itself says ([`Btf`]). All of it happens within one run, under RCU: what the
//! program came by is not freed before it ends.
//!
//! Why a held page is never called free. Such a page cannot be moved, swapped out or taken from the file's tree by
//! anything but a punch: all of these first make sure that nobody holds it. So the program finds this very page, and
//! its count holds the holder's part each time it is read. For a page of 4 KiB that is the whole argument: its count
//! must be 1, and with the page cache's part and the holder's it is 2 at least. A large folio has one count for all its
//! pages, and one for all mappings of any of them. If nobody has any of them mapped, the first count is as many as it
//! has pages, and the same argument holds. Else the two must agree, and they cannot be read in one instant; they are
//! read in turn, six readings of some 20 ns, and all must agree. A holder could hide behind that only if the folio were
//! mapped and unmapped again as many times, and each time within one of those gaps.
//!
//! What is found held though nobody holds it (a CPU's list, a migration that just tries) only stays, and is looked at
//! again later.

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
    /// The kernel does not describe its types, or they are not as this code knows them.
    #[error("the kernel's layout is not known: {0}")]
    Layout(String),
    /// The kernel does not let this process.
    #[error("{0}")]
    Refused(String),
    /// It ran, and did not see what was there to be seen.
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
    /// Load the program, and see that it tells pages of this process that are held from those that are not: of 4 KiB,
    /// and, where the kernel makes them, large ones. Takes some tens of milliseconds.
    ///
    /// # Errors
    /// Why it cannot be used here. What this machine lacks only for now (memory for a huge page, say) is
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

    /// Who holds these pages of a file of this process, by their numbers; returns as many as there are pages.
    ///
    /// What a page holds is not to be read before this returns: else it may change between the two.
    ///
    /// # Errors
    /// If the kernel does not run the program any more, or it does not find the file.
    pub fn look(&self, file: impl AsFd, pages: &[u64]) -> io::Result<Vec<Pin>> {
        self.check.look(file, pages, self.knows_large)
    }

    /// Have every CPU sort the pages on its lists, unless that was done within the last second: each list holds up to
    /// 31 pages that were filled, or found touched, on its CPU last, and counts as one that holds them. It takes some
    /// tens of microseconds on each CPU that has any. To be called when pages look held that are probably only there;
    /// returns whether it was done, so that another look may say something else.
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

    /// Can it tell of large folios? Else their pages are all [`Pin::Unknown`].
    pub fn knows_large(&self) -> bool {
        self.knows_large
    }
}

/// What to say of a kernel that does not let us.
fn why_refused(error: &io::Error) -> String {
    let lockdown = std::fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default();
    if lockdown.contains("[confidentiality]") {
        return "the kernel is locked down for confidentiality: nobody may read its memory".into();
    }
    match error.kind() {
        io::ErrorKind::PermissionDenied => format!("CAP_BPF and CAP_PERFMON (or CAP_SYS_ADMIN) are needed: {error}"),
        _ if error.raw_os_error() == Some(libc::ENOSYS) => "the kernel has no BPF (CONFIG_BPF_SYSCALL)".into(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests;
