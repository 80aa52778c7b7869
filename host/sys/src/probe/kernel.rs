//! Probes of kernel features, on memory and descriptors of our own.
//!
//! Before: nothing. After: [`super::probe`] lists the findings. Threads: any.
//! Promise: memory and descriptors of a probe are released when its function returns.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use ballast_base::{Bytes, HUGE_SIZE, Hva, PAGE_SIZE};

use super::finding::{Finding, no, refused, unknown, yes};

use crate::pins::{PinCheck, Unavailable};
use crate::remote::{Collapsed, MADV_COLLAPSE, PAGE_IS_PRESENT, scan};
use crate::uffd::{FillOutcome, REQUIRED_FEATURES};
use crate::{Mapping, Remote, Uffd, memfd};

pub(super) fn userfaultfd(offered: &io::Result<u64>) -> Finding {
    match offered {
        Ok(features) => yes(format!("features {features:#x}")),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            no("not permitted: run as root, open /dev/userfaultfd to your group, or set vm.unprivileged_userfaultfd=1")
        }
        Err(error) => refused("userfaultfd", error),
    }
}

/// A memfd of one page that is present.
fn one_page() -> io::Result<OwnedFd> {
    let fd = memfd::create("ballast-probe", Bytes(PAGE_SIZE as u64))?;
    Mapping::shared(&fd, 0, PAGE_SIZE)?.copy_in(0, &[1]);
    Ok(fd)
}

/// Zap a present page under userfaultfd and map it again as the handler of a minor fault would.
pub(super) fn minor_round_trip() -> Finding {
    let tried = one_page().and_then(|fd| {
        let map = Mapping::shared(&fd, 0, PAGE_SIZE)?;
        let (uffd, granted) = Uffd::create(REQUIRED_FEATURES)?;
        if granted != REQUIRED_FEATURES {
            return Ok(None);
        }
        let addr = Hva(map.addr() as u64);
        uffd.register(addr, PAGE_SIZE as u64)?;
        map.zap(0, PAGE_SIZE)?;
        Ok(Some(uffd.map_existing(addr, PAGE_SIZE as u64)?))
    });
    match tried {
        Ok(Some(FillOutcome::Done)) => yes(""),
        Ok(Some(outcome)) => no(format!("UFFDIO_CONTINUE returned {outcome:?}")),
        Ok(None) => no("required userfaultfd features are missing"),
        Err(error) => unknown(format!("trying it: {error}")),
    }
}

/// A shared mapping of one aligned huge page's size.
struct HugeSpot {
    fd: OwnedFd,
    map: Mapping,
}

impl HugeSpot {
    /// A mapping where a collapse is possible: file offset and address are aligned alike, and one page is present.
    fn new() -> io::Result<Self> {
        let fd = memfd::create("ballast-probe", Bytes(HUGE_SIZE as u64))?;
        let map = Mapping::shared(&fd, 0, HUGE_SIZE)?;
        map.copy_in(0, &[1]);
        Ok(Self { fd, map })
    }

    fn addr(&self) -> usize {
        self.map.addr()
    }

    fn collapse(&self) -> io::Result<()> {
        // Calls before the last error counts: the kernel returns EAGAIN when a page was busy for a moment.
        const TRIES: usize = 5;
        let start = self.map.ptr(0, HUGE_SIZE);
        let mut error = io::Error::from_raw_os_error(libc::EAGAIN);
        for _ in 0..TRIES {
            // SAFETY: the range is inside our own shared mapping (checked by `ptr`); a collapse changes neither its
            // bytes nor its bounds.
            if unsafe { libc::madvise(start.cast(), HUGE_SIZE, MADV_COLLAPSE) } == 0 {
                return Ok(());
            }
            error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EAGAIN) {
                break;
            }
        }
        Err(error)
    }
}

/// The kernel must not collapse a range with holes that is registered for missing faults: a hole may be a far page.
pub(super) fn collapse_spares_holes() -> Finding {
    let tried = || -> io::Result<(io::Result<()>, u64)> {
        let spot = HugeSpot::new()?;
        let (uffd, _) = Uffd::create(REQUIRED_FEATURES)?;
        uffd.register(Hva(spot.addr() as u64), HUGE_SIZE as u64)?;
        let answer = spot.collapse();
        Ok((answer, memfd::resident(&spot.fd)?.0))
    };
    match tried() {
        Ok((Ok(()), 1)) => yes("the call succeeded and left the holes"),
        Ok((Err(error), 1)) if error.raw_os_error() == Some(libc::EAGAIN) => unknown(format!("trying it: {error}")),
        Ok((Err(error), 1)) => yes(format!("refused, as it must: {error}")),
        Ok((_, pages)) => no(format!("holes were filled: 1 page became {pages}")),
        Err(error) => unknown(format!("trying it: {error}")),
    }
}

pub(super) fn process_collapse() -> Finding {
    let tried = || -> io::Result<Collapsed> {
        let spot = HugeSpot::new()?;
        Remote::open(std::process::id())?.collapse(Hva(spot.addr() as u64), HUGE_SIZE as u64)
    };
    match tried() {
        Ok(Collapsed::Done) => yes(""),
        Ok(Collapsed::Busy) => unknown("a page was busy"),
        Ok(outcome) => no(format!("process_madvise returned {outcome:?}")),
        Err(error) => refused("process_madvise", &error),
    }
}

pub(super) fn pagemap_scan() -> Finding {
    let tried = || -> io::Result<bool> {
        let fd = memfd::create("ballast-probe", Bytes(4 * PAGE_SIZE as u64))?;
        let map = Mapping::shared(&fd, 0, 4 * PAGE_SIZE)?;
        map.copy_in(2 * PAGE_SIZE, &[1]);
        let pagemap = fs::File::open("/proc/self/pagemap")?;
        let start = map.addr() as u64;
        let page = start + 2 * PAGE_SIZE as u64;
        let found = scan(&pagemap, (start, start + map.len() as u64), PAGE_IS_PRESENT)?;
        Ok(found == [(page, page + PAGE_SIZE as u64)])
    };
    match tried() {
        Ok(true) => yes(""),
        Ok(false) => no("it did not return the one page that is present"),
        Err(error) => refused("ioctl", &error),
    }
}

pub(super) fn io_uring() -> Finding {
    let Err(error) = io_uring::IoUring::new(1) else { return yes("") };
    let hint = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    match hint.trim() {
        hint @ ("1" | "2") => no(format!("kernel.io_uring_disabled={hint}")),
        _ => refused("io_uring_setup", &error),
    }
}

pub(super) fn pin_check() -> Finding {
    match PinCheck::new() {
        Ok(check) if check.knows_large() => yes(""),
        Ok(_) => yes("for pages of 4 KiB; no huge page was available to test it"),
        Err(error @ Unavailable::SelfTest(_)) => unknown(error.to_string()),
        Err(error) => no(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_testkit::skip;

    #[test]
    fn a_collapse_without_userfaultfd_fills_holes_so_the_probe_can_fail() {
        let spot = HugeSpot::new().expect("an aligned place");
        assert_eq!(memfd::resident(&spot.fd).expect("stat").0, 1);
        match spot.collapse() {
            Ok(()) => assert_eq!(memfd::resident(&spot.fd).expect("stat").0, (HUGE_SIZE / PAGE_SIZE) as u64),
            Err(error) => skip("collapse", error),
        }
    }
}
