//! Discard: the guest frees pages, and their memory and their copies are dropped.
//!
//! Before: a VMM announced that it frees a range. After: memory and copies are freed, and a touch reads zeros.
//! Threads: discard workers; waits for a worker that holds one of the pages. Units: pages of a region.
//! Promise: no copy is freed before the punch, and a word changes only after it. No page is locked while copies are
//! freed, because a store may have to wait for its own locks.

use std::io;

use ballast_base::store::{PageKey, RegionKey};
use ballast_base::{PageIdx, PageRange};

use crate::copies::{StoreOf, free_copies};
use crate::granule::Granule;
use crate::page_state::{State, Word};

/// The result of [`discard`] for a run of pages.
#[derive(Debug, Default)]
pub struct Discarded {
    /// Discarded pages by the former state of their granule's word, indexed by `State as usize`.
    pub counts: [u64; State::COUNT],
    /// The reason why a Poisoned page is still Poisoned, if one is.
    pub not_healed: Option<io::Error>,
}

/// Discards pages: frees their memory and copies. The next touch reads zeros.
///
/// All locks of the run are held together for one punch. They are taken in ascending order, and no other worker waits
/// for a lock while it holds one, so there is no deadlock. `pause` is called while another worker holds a page, and may
/// give up. `heal` is called for each Poisoned page, under its lock: the kernel's poison marker outlives the punch and
/// must be replaced.
///
/// # Errors
/// The region's file could not be punched: some of the pages may read as zeros, and their words are unchanged.
pub fn discard<'a>(
    region: RegionKey,
    run: PageRange,
    granule_of: impl Fn(PageIdx) -> Granule<'a>,
    punch: impl FnOnce(PageRange) -> io::Result<()>,
    stores: &impl StoreOf,
    pause: impl Fn() -> io::Result<()>,
    heal: impl Fn(PageIdx) -> io::Result<()>,
) -> io::Result<Discarded> {
    let size = granule_of(run.start()).pages();
    let mut locks = Vec::with_capacity((run.count() / size) as usize);
    for page in run.step_by(size) {
        let granule = granule_of(page);
        locks.push(loop {
            let word = granule.cell().load();
            if !word.is_locked()
                && let Some(lock) = granule.cell().lock(word, word)
            {
                break (page, granule, lock);
            }
            pause()?;
        });
    }
    punch(run)?;
    let mut done = Discarded::default();
    let mut freed = Vec::new();
    for (first, granule, mut lock) in locks {
        let word = lock.word();
        if word.state() == State::Poisoned
            && let Err(error) = heal(first)
        {
            done.not_healed = Some(error);
            continue;
        }
        lock.publish(Word::INITIAL);
        let rest = granule.take_rest();
        drop(lock);
        done.counts[word.state() as usize] += size;
        freed.push((first, word, rest));
    }
    for (first, word, rest) in freed {
        free_copies(stores, PageKey { region, page: first }, std::iter::once(word).chain(rest));
    }
    Ok(done)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::AtomicU64;

    use ballast_base::store::Handle;
    use ballast_base::wire::VmId;

    use super::*;
    use crate::copies::Source;

    #[test]
    fn no_page_of_a_run_is_locked_while_a_copy_is_freed() {
        struct Freed<F>(F);
        impl<F: Fn()> StoreOf for Freed<F> {
            fn store_of(&self, _: Word) -> Option<Source<'_>> {
                (self.0)();
                None
            }
        }
        let far = |page| Word::far(1, Handle::new(page + 1).expect("in range"), 0);
        let words: Vec<AtomicU64> = (0..8).map(|_| AtomicU64::default()).collect();
        let granule_of = |page: PageIdx| Granule::new(std::slice::from_ref(&words[page.0 as usize]));
        (0..8).for_each(|page| granule_of(PageIdx(page)).cell().reset(far(page)));
        let freed = Cell::new(0);
        let stores = Freed(|| {
            freed.set(freed.get() + 1);
            let is_locked = |page| granule_of(PageIdx(page)).cell().load().is_locked();
            assert!(!(0..8).any(is_locked), "a page is locked");
        });
        let region = RegionKey { vm: VmId([0; 16]), number: 0 };
        let run = PageRange::of(PageIdx(0), 8);
        let done = discard(region, run, granule_of, |_| Ok(()), &stores, || panic!("locked"), |_| Ok(()));
        assert_eq!((done.expect("punched").counts[State::Far as usize], freed.get()), (8, 8));
    }
}
