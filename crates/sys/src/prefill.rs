//! Shared memory that is filled before any VM has it: by huge pages where the kernel finds them.
//!
//! Before: a part of a file in a tmpfs, with holes. After: all of its pages are in the file, and zero.
//! Threads: any; pages come from the nodes that the calling thread's policy allows. Units: bytes.
//! Promise: nothing here reads or writes the memory. What the kernel refuses is an error, and no signal, also if
//! another process cuts the file meanwhile.

use std::io;
use std::os::fd::AsFd;

use ballast_base::{HUGE_SIZE, PAGE_SIZE};

use crate::Mapping;

/// Fill `len` bytes from `offset` on, both multiples of 2 MiB. Returns how many units of 2 MiB are one huge page each.
///
/// # Errors
/// There is not enough memory, or the file is shorter.
pub fn fill(file: impl AsFd, offset: u64, len: usize) -> io::Result<usize> {
    let map = Mapping::shared(file, offset, len)?;
    let mut huge = 0;
    for at in (0..len).step_by(HUGE_SIZE) {
        // The kernel collapses what has a page. It clears the rest of the huge page, so that no other page is made.
        map.populate(at, PAGE_SIZE)?;
        huge += usize::from(map.collapse(at));
        // Whatever is not there by that.
        map.populate(at, HUGE_SIZE)?;
    }
    Ok(huge)
}

/// Is this how the kernel refuses to map a page whose memory failed?
pub fn is_failure(error: &io::Error) -> bool {
    rustix::io::Errno::from_io_error(error) == Some(rustix::io::Errno::HWPOISON)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::memfd;
    use ballast_base::{Bytes, PageCount};

    #[test]
    fn all_of_a_file_that_is_filled_has_memory_and_is_zero_and_one_that_is_too_short_is_an_error() {
        let size = 4 * HUGE_SIZE;
        let file = memfd::create("ballast-test", Bytes(size as u64)).expect("memfd");
        let huge = fill(&file, 0, 2 * HUGE_SIZE).expect("fill");
        assert!(huge <= 2);
        assert_eq!(memfd::resident(&file).expect("stat"), PageCount(1024));
        fill(&file, 0, size).expect("fill");
        assert_eq!(memfd::resident(&file).expect("stat"), PageCount(2048));
        let map = Mapping::shared(&file, 0, size).expect("map");
        assert!(map.words(0, size / 8).iter().all(|word| word.load(Ordering::Relaxed) == 0));
        assert!(fill(&file, size as u64, HUGE_SIZE).is_err(), "there is nothing");
    }
}
