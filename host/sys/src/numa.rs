//! Locates and moves pages of a process among NUMA nodes: `move_pages(2)`.
//!
//! Before: the caller has addresses of another process (`ballast-tier`, inside a guest). After: it knows the result for
//! each page.
//! Threads: any; a call waits for the memory map of the process. Units: addresses of the process, numbers of nodes.
//! Promise: no content changes. The result is given page by page; a page that the kernel did not reach is
//! [`Place::Untried`], and never counts as moved.

use std::io;
use std::ptr;

/// Where a page is after the call, or why it is where it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On this node.
    Node(u32),
    /// There is no page at the address, or it is the page of zeros.
    Absent,
    /// The page is mapped more than once, and it stays.
    Shared,
    /// The page is pinned, or under I/O: a later try may succeed.
    Busy,
    /// The node has no free page for it.
    Full,
    /// The kernel cannot move pages of this kind.
    Never,
    /// The kernel stopped before this page.
    Untried,
}

impl Place {
    fn of(status: i32) -> Self {
        match status {
            node @ 0.. => Self::Node(node.unsigned_abs()),
            UNTRIED => Self::Untried,
            _ => match -status {
                libc::ENOENT | libc::EFAULT => Self::Absent,
                libc::EACCES => Self::Shared,
                libc::EBUSY | libc::EAGAIN => Self::Busy,
                libc::ENOMEM => Self::Full,
                _ => Self::Never,
            },
        }
    }
}

/// The status words before the call: no error that the kernel has.
const UNTRIED: i32 = i32::MIN;
/// `MPOL_MF_MOVE`: pages that this process alone maps.
const OWN_PAGES: libc::c_int = 1 << 1;
/// Most pages in a call; the kernel copies as much as this at a time.
pub const MOST_PAGES: usize = 512;

fn call(pid: u32, pages: &[u64], nodes: Option<&[i32]>) -> io::Result<Option<Vec<Place>>> {
    let mut status = vec![UNTRIED; pages.len()];
    let nodes = nodes.map_or(ptr::null(), <[i32]>::as_ptr);
    // SAFETY: the kernel reads as many addresses and node numbers as there are pages, and writes as many status words;
    // the addresses are the other process's and are not accessed by this one.
    let answer = unsafe {
        let pid = pid as libc::pid_t;
        let (addresses, status) = (pages.as_ptr(), status.as_mut_ptr());
        libc::syscall(libc::SYS_move_pages, pid, pages.len(), addresses, nodes, status, OWN_PAGES)
    };
    // A positive result is how many pages were not moved: they are untried.
    if answer < 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ESRCH) => Ok(None),
            // No page had to be moved, or memory for the call itself is short. The status words say what is known.
            Some(libc::ENOENT | libc::ENOMEM) => Ok(Some(status.into_iter().map(Place::of).collect())),
            _ => Err(error),
        };
    }
    Ok(Some(status.into_iter().map(Place::of).collect()))
}

/// Returns where these pages are; `None` if the process is gone.
pub fn locate(pid: u32, pages: &[u64]) -> io::Result<Option<Vec<Place>>> {
    let mut found = Vec::with_capacity(pages.len());
    for part in pages.chunks(MOST_PAGES) {
        let Some(places) = call(pid, part, None)? else { return Ok(None) };
        found.extend(places);
    }
    Ok(Some(found))
}

/// Move these pages to a node; `None` if the process is gone.
///
/// The kernel moves pages in lists. If a list fails in part, the kernel stops and does not say which pages stayed. So
/// this reads their places afterwards.
///
/// # Errors
/// This user may not move pages of the process, there is no such node, the process may not use it (its cpuset), or the
/// kernel has no NUMA.
pub fn move_pages(pid: u32, pages: &[u64], node: u32) -> io::Result<Option<Vec<Place>>> {
    let to = i32::try_from(node).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut found = Vec::with_capacity(pages.len());
    for part in pages.chunks(MOST_PAGES) {
        let Some(mut places) = call(pid, part, Some(&vec![to; part.len()]))? else { return Ok(None) };
        let open: Vec<usize> = (0..part.len()).filter(|at| places[*at] == Place::Untried).collect();
        if !open.is_empty() {
            let asked: Vec<u64> = open.iter().map(|at| part[*at]).collect();
            let Some(located) = locate(pid, &asked)? else { return Ok(None) };
            for (at, place) in open.into_iter().zip(located) {
                // A page that is elsewhere still counts as untried.
                if place == Place::Node(node) || place == Place::Absent {
                    places[at] = place;
                }
            }
        }
        found.extend(places);
    }
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    use crate::Anon;
    use ballast_base::PAGE_SIZE;

    #[test]
    fn a_status_word_is_a_node_or_a_reason() {
        let words =
            [0, 3, -libc::ENOENT, -libc::EFAULT, -libc::EACCES, -libc::EBUSY, -libc::ENOMEM, -libc::EINVAL, UNTRIED];
        use Place::*;
        let places = [Node(0), Node(3), Absent, Absent, Shared, Busy, Full, Never, Untried];
        assert_eq!(words.map(Place::of), places);
    }

    #[test]
    fn pages_are_located_and_a_move_to_the_node_where_they_are_changes_nothing() {
        let memory = Anon::new(600 * PAGE_SIZE).expect("memory");
        let start = memory.addr() as u64;
        for page in 0..600 {
            memory.word(page * PAGE_SIZE).store(page as u64, Ordering::Relaxed);
        }
        let pages: Vec<u64> = (0..600).map(|page| start + page * PAGE_SIZE as u64).collect();
        let located = match locate(std::process::id(), &pages) {
            Err(error) => return ballast_testkit::skip("numa", error),
            Ok(located) => located.expect("this process"),
        };
        let Place::Node(node) = located[0] else { return ballast_testkit::skip("numa", format!("{:?}", located[0])) };
        assert!(located.iter().all(|place| matches!(place, Place::Node(_))), "{located:?}");
        let moved = move_pages(std::process::id(), &pages, node).expect("permitted").expect("this process");
        assert!(moved.iter().all(|place| *place == Place::Node(node)), "{moved:?}");
        assert!((0..600).all(|page| memory.word(page * PAGE_SIZE).load(Ordering::Relaxed) == page as u64));
    }

    #[test]
    fn a_process_that_is_gone_and_a_node_that_is_not_there_are_told_apart() {
        let memory = Anon::new(PAGE_SIZE).expect("memory");
        memory.word(0).store(1, Ordering::Relaxed);
        let page = [memory.addr() as u64];
        if let Err(error) = locate(std::process::id(), &page) {
            return ballast_testkit::skip("numa", error);
        }
        let mut child = std::process::Command::new("true").spawn().expect("true");
        child.wait().expect("ended");
        assert_eq!(move_pages(child.id(), &page, 0).expect("an outcome"), None);
        assert!(move_pages(std::process::id(), &page, 1000).is_err());
    }
}
