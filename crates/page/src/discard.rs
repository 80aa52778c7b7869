//! Discard: the guest frees pages, and Ballast drops their memory and their copies.
//!
//! Before: a VMM announced that it frees a range. After: the pages' memory and copies are gone, and a touch reads
//! zeros. Threads: client workers. Waits for a worker that holds one of the pages. Units: pages of a region.
//! Promise: no copy is freed before the punch, and a word changes only after it.

use std::io;

use ballast_base::store::{PageKey, RegionKey};
use ballast_base::{PageIdx, PageRange};

use crate::copies::{StoreOf, free_copies};
use crate::granule::Granule;
use crate::page_state::{State, Word};

/// The result of [`discard`] for a run of pages.
#[derive(Debug, Default)]
pub struct Discarded {
    /// Number of discarded pages by their former state (of their granule's word), indexed by `State as usize`.
    pub counts: [u64; State::COUNT],
    /// Why a Poisoned page is still Poisoned, if one is.
    pub not_healed: Option<io::Error>,
}

/// The guest freed these pages: drop their far copies and their memory. The next touch reads zeros.
///
/// All locks of the run are held together for one punch. They are taken in ascending order, and no other worker waits
/// for a lock while it holds one, so there is no deadlock. `pause` is called while another worker holds a page, and may
/// give up. `heal` is called for each Poisoned page, under its lock: the kernel's poison mark outlives the punch and
/// must be replaced.
///
/// # Errors
/// The region's file could not be punched: some of the pages may read as zeros, and their words are as they were.
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
        free_copies(stores, PageKey { region, page: first }, std::iter::once(word).chain(rest));
    }
    Ok(done)
}
