//! The last step of an eviction: frees the memory of pages whose words say Far or Zero.
//!
//! Before: `evict` has copied the pages and committed their words. After: the host has the memory; or the kernel did
//! not free it, and the pages are Resident again.
//! Threads: reclaim workers, and recovery. Units: pages of a region.
//! Promise: each page is locked during its punch. A punch that fails, before or after it freed something, costs no
//! byte: if the file still has the page's bytes, they are the page; otherwise its copy is.

use std::io;

use ballast_base::store::{GetOutcome, PageBytes, PageKey};
use ballast_base::{PageIdx, PageRange};

use crate::copies::{StoreOf, free_copies};
use crate::granule::Granule;
use crate::memory::{Backing, Holds, Punched};
use crate::page_state::{Locked, State, Word};

/// The result for a batch of pages that went through `evict`.
#[derive(Debug, Default)]
pub struct Evicted {
    /// Pages whose bytes are in the store now.
    pub far: u64,
    /// Pages found to be all zero.
    pub zero: u64,
    /// Pages that the guest touched during the copying.
    pub aborted: u64,
    /// Pinned granules, by first page. They are Resident again, and were not read.
    pub held: Vec<PageIdx>,
    /// Pages that the store did not take. They are Resident again.
    pub refused: u64,
    /// Pages that the kernel did not free: part of a huge page that is in use. They are Resident again.
    pub stuck: u64,
    /// The store had no space.
    pub store_full: bool,
    /// The store could not answer.
    pub store_busy: bool,
    /// Granules, by first page, whose memory failed. They are Resident again and counted as refused.
    pub unreadable: Vec<PageIdx>,
    /// The error of a read or a punch. Its pages are Resident again and counted as refused.
    pub failed: Option<io::Error>,
}

impl Evicted {
    /// Counts a granule that was freed, or counts as freed: its word says Far or Zero.
    fn went(&mut self, one: &Committed<'_>) {
        let pages = one.granule.pages();
        match one.lock.word().state() {
            State::Zero => self.zero += pages,
            _ => self.far += pages,
        }
    }
}

/// A granule whose word says Far or Zero, about to be punched.
pub(crate) struct Committed<'a> {
    pub(crate) key: PageKey,
    pub(crate) granule: Granule<'a>,
    pub(crate) lock: Locked<'a>,
}

impl Committed<'_> {
    /// It was not freed: its file has its bytes, and its copy is not needed.
    fn is_resident(&mut self, stores: &impl StoreOf) {
        let word = self.lock.word();
        self.lock.publish(Word::new(State::Resident, 0));
        let rest = self.granule.take_rest();
        free_copies(stores, self.key, std::iter::once(word).chain(rest));
    }
}

/// Punches granules whose words say Far or Zero, by runs. They are in ascending order.
pub(crate) fn punch(all: &mut [Committed<'_>], backing: &impl Backing, stores: &impl StoreOf, result: &mut Evicted) {
    for run in all.chunk_by_mut(|one, next| one.key.page.0 + one.granule.pages() == next.key.page.0) {
        let pages = run.iter().map(|one| one.granule.pages()).sum();
        match backing.punch(PageRange::of(run[0].key.page, pages)) {
            Ok(Punched::Stuck) => run.iter_mut().for_each(|one| expel(one, backing, stores, result)),
            Ok(Punched::Gone) => run.iter().for_each(|one| result.went(one)),
            Err(error) => {
                run.iter_mut().for_each(|one| keep(one, backing, stores, result));
                result.failed = Some(error);
            }
        }
    }
}

/// The kernel did not punch a granule, or only a part of it. If its file still has bytes, they are the page; otherwise
/// the copy is, and a touch replaces the zeros by it.
fn keep(one: &mut Committed<'_>, backing: &impl Backing, stores: &impl StoreOf, result: &mut Evicted) {
    if matches!(backing.holds(PageRange::of(one.key.page, one.granule.pages())), Ok(Holds::Bytes)) {
        result.refused += one.granule.pages();
        one.is_resident(stores);
    } else {
        result.went(one);
    }
}

/// Punches a granule that an earlier punch may have left in the file, filled with zeros. If that fails again, its bytes
/// are restored from the copy; until then no thread sees the page, because it is locked and not mapped. If it cannot be
/// restored now, it stays Far, and its next fault restores it.
fn expel(one: &mut Committed<'_>, backing: &impl Backing, stores: &impl StoreOf, result: &mut Evicted) {
    let bring_back = || -> io::Result<bool> {
        if backing.punch(PageRange::of(one.key.page, one.granule.pages()))? == Punched::Gone {
            return Ok(false);
        }
        for (index, page) in (one.key.page.0..one.key.page.0 + one.granule.pages()).map(PageIdx).enumerate() {
            let mut bytes: PageBytes = [0; _];
            let word = if index == 0 { one.lock.word() } else { one.granule.word_of(index) };
            if word.state() == State::Far {
                let copy = stores
                    .store_of(word)
                    .map(|store| store.get(PageKey { page, ..one.key }, word.handle(), &mut bytes));
                if copy != Some(GetOutcome::Found) {
                    return Err(io::Error::other(format!(
                        "the store does not give page {page} of region {}",
                        one.key.region.number
                    )));
                }
            }
            backing.write(page, &bytes)?;
        }
        Ok(true)
    };
    match bring_back() {
        Ok(true) => {
            result.stuck += one.granule.pages();
            one.is_resident(stores);
        }
        Ok(false) => result.went(one),
        Err(error) => {
            result.went(one);
            result.failed = Some(error);
        }
    }
}

/// Finishes the punch of a dead engine: the page's word says Far, and its file may still hold zeros, or failed memory.
/// If that punch fails, the next fault on the page replaces them.
pub fn punch_left(page: PageIdx, granule: Granule<'_>, backing: &impl Backing) -> io::Result<()> {
    let word = granule.cell().load();
    if word.state() == State::Far
        && !word.is_locked()
        && let Some(_lock) = granule.cell().lock(word, word)
        && matches!(backing.holds(PageRange::of(page, granule.pages()))?, Holds::Zeros | Holds::Failed)
    {
        backing.punch(PageRange::of(page, granule.pages()))?;
    }
    Ok(())
}
