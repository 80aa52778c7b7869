//! Evict: quarantine, copy out, commit, punch. And discard, which is an eviction to nowhere.
//!
//! Before: `reclaim` picked runs of pages that look cold. After: the host has the memory back and the words say Far or
//! Zero; or the guest touched first and nothing happened.
//! Threads: reclaim lanes; discard comes from the control lane. Waits for the store, never for a fault.
//! Promise: the copy is complete before the word says Far, the word says Far before the punch, and the punch happens
//! under the page's lock (invariants 2 and 3).

use std::io;

use ballast_base::PageIdx;
use ballast_store::{Handle, PageBytes, PageKey, PutOutcome, Store};

use crate::memory::Backing;
use crate::page_state::{Cell, Locked, State, Ticket, Word};
use crate::stores::StoreOf;

/// A run of pages of one region: first page and count.
pub type Run = (PageIdx, u64);

/// What became of a batch of pages that went through [`evict`].
#[derive(Debug, Default)]
pub struct Evicted {
    /// Pages whose bytes are in the store now.
    pub far: u64,
    /// Pages found to be all zero.
    pub zero: u64,
    /// Pages the guest touched while they were copied.
    pub aborted: u64,
    /// Pages the store would not take. They are Resident again.
    pub refused: u64,
    /// True if the store had no room.
    pub store_full: bool,
    /// True if the store could not answer.
    pub store_busy: bool,
    /// Why some pages could not be read or punched. They are Resident again and counted as refused.
    pub failed: Option<io::Error>,
}

/// Resident to Quarantine. False if the page is in any other state or a lane works on it.
///
/// The caller zaps the page next. From the acknowledgement of that zap on, an unchanged word means an unchanged page.
pub fn quarantine(cell: Cell<'_>, ticket: Ticket) -> bool {
    let word = cell.load();
    let free = word.state() == State::Resident && !word.is_locked();
    free && cell.swap(word, Word::quarantine(ticket, word.age()))
}

/// Take the pages of `run` that are still in Quarantine under `ticket` back to Resident; answers how many. They stay
/// unmapped until they are touched.
pub fn release<'a>(run: Run, ticket: Ticket, cell_of: impl Fn(PageIdx) -> Cell<'a>) -> u64 {
    let pages = (run.0.0..run.0.0 + run.1).map(PageIdx);
    let released = pages.filter(|page| {
        let word = cell_of(*page).load();
        let resident = Word::new(State::Resident, word.age());
        word == Word::quarantine(ticket, word.age()) && cell_of(*page).swap(word, resident)
    });
    released.count() as u64
}

/// Evict the pages of `run` that are still in Quarantine under `ticket`. They are read through `buffer`, as many at a time
/// as it holds (at least one). All locks of the run are held while it is punched. Whatever fails, nothing is lost.
pub fn evict<'a>(
    region: u32,
    run: Run,
    cell_of: impl Fn(PageIdx) -> Cell<'a>,
    ticket: Ticket,
    backing: &impl Backing,
    (store_number, store): (u8, &dyn Store),
    buffer: &mut [PageBytes],
) -> Evicted {
    let mut result = Evicted::default();
    // From here on a touch is seen: the word changes, and the commit below fails.
    let mut claimed: Vec<(PageIdx, Word)> = Vec::with_capacity(run.1 as usize);
    for page in (run.0.0..run.0.0 + run.1).map(PageIdx) {
        let word = cell_of(page).load();
        // Not in this quarantine any more: the guest touched it, and the fault that rescued it has counted it.
        if word == Word::quarantine(ticket, word.age()) && cell_of(page).swap(word, word.in_state(State::Evicting)) {
            claimed.push((page, word.in_state(State::Evicting)));
        }
    }
    let mut committed: Vec<(PageKey, Locked<'a>)> = Vec::with_capacity(claimed.len());
    let mut left = &claimed[..];
    'stretches: while let Some((first, _)) = left.first() {
        let adjacent = left.iter().zip(first.0..).take_while(|((page, _), expected)| page.0 == *expected).count();
        let stretch = adjacent.min(buffer.len());
        if let Err(error) = backing.read(*first, &mut buffer[..stretch]) {
            result.failed = Some(error);
            break;
        }
        for bytes in &buffer[..stretch] {
            let (page, evicting) = left[0];
            let key = PageKey { region, page };
            let to = if is_zero(bytes) {
                Word::new(State::Zero, evicting.age())
            } else {
                match store.put(key, bytes) {
                    PutOutcome::Stored(handle) => Word::far(store_number, handle, evicting.age()),
                    refused => {
                        result.store_full |= refused == PutOutcome::Full;
                        result.store_busy |= refused == PutOutcome::Busy;
                        break 'stretches;
                    }
                }
            };
            left = &left[1..];
            match cell_of(page).lock(evicting, to) {
                Some(lock) => committed.push((key, lock)),
                None => {
                    result.aborted += 1;
                    free_copy(store, key, to);
                }
            }
        }
    }
    for (page, evicting) in left {
        let resident = Word::new(State::Resident, evicting.age());
        result.refused += u64::from(cell_of(*page).swap(*evicting, resident));
    }
    for group in committed.chunk_by_mut(|a, b| a.0.page.0 + 1 == b.0.page.0) {
        let (first, pages) = (group[0].0.page, group.len() as u64);
        match backing.punch(first, pages) {
            Ok(()) => {
                let far = group.iter().filter(|(_, lock)| lock.word().state() == State::Far).count() as u64;
                result.far += far;
                result.zero += pages - far;
            }
            Err(error) => {
                // Nothing is lost: the bytes are still in the file, and a page in its file is the one that counts.
                for (key, lock) in group {
                    free_copy(store, *key, lock.word());
                    lock.set(Word::new(State::Resident, lock.word().age()));
                }
                result.refused += pages;
                result.failed = Some(error);
            }
        }
    }
    result
}

fn free_copy(store: &dyn Store, key: PageKey, word: Word) {
    if word.state() == State::Far {
        store.free(key, word.handle());
    }
}

/// What became of a run of pages that went through [`discard`].
#[derive(Debug, Default)]
pub struct Discarded {
    /// How many of the pages given up had been in each state, indexed by `State as usize`.
    pub counts: [u64; State::COUNT],
    /// Why a Poisoned page stays Poisoned, if one does.
    pub not_healed: Option<io::Error>,
}

/// The guest gave these pages up: drop their far copies and their memory. The next touch reads zeros.
///
/// All locks of the run are held together for one punch. They are taken in ascending order, and no other lane waits for a
/// lock while it holds one, so nothing can wait in a circle. `pause` is called while another lane works on a page, `heal`
/// for each page that was Poisoned, under its lock: the kernel's poison mark outlives the punch and must be replaced.
///
/// # Errors
/// The region's file could not be punched; the pages are as they were.
pub fn discard<'a>(
    region: u32,
    run: Run,
    cell_of: impl Fn(PageIdx) -> Cell<'a>,
    backing: &impl Backing,
    stores: &impl StoreOf,
    pause: impl Fn(),
    heal: impl Fn(PageIdx) -> io::Result<()>,
) -> io::Result<Discarded> {
    let mut locks = Vec::with_capacity(run.1 as usize);
    for page in (run.0.0..run.0.0 + run.1).map(PageIdx) {
        locks.push(loop {
            let word = cell_of(page).load();
            if !word.is_locked()
                && let Some(lock) = cell_of(page).lock(word, word)
            {
                break lock;
            }
            pause();
        });
    }
    backing.punch(run.0, run.1)?;
    let mut done = Discarded::default();
    for (mut lock, page) in locks.into_iter().zip(run.0.0..) {
        let word = lock.word();
        if word.state() == State::Poisoned
            && let Err(error) = heal(PageIdx(page))
        {
            done.not_healed = Some(error);
            continue;
        }
        lock.set(Word::INITIAL);
        drop(lock);
        done.counts[word.state() as usize] += 1;
        if let Some(handle) = live_handle(word)
            && let Some(store) = stores.store_of(word)
        {
            store.free(PageKey { region, page: PageIdx(page) }, handle);
        }
    }
    Ok(done)
}

/// The handle a word keeps alive in its store, if any: what `recover` tells the store not to sweep.
pub fn live_handle(word: Word) -> Option<Handle> {
    matches!(word.state(), State::Far | State::Restoring).then(|| word.handle())
}

fn is_zero(bytes: &PageBytes) -> bool {
    // Compared in chunks the compiler turns into vector instructions.
    bytes.chunks_exact(64).all(|chunk| chunk.iter().fold(0, |acc, byte| acc | byte) == 0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicU64;

    use ballast_base::Bytes;
    use ballast_store::NullStore;

    use super::*;

    /// RAM whose third page cannot be read: a memory error of the host, say.
    struct Broken;

    impl Backing for Broken {
        fn read(&self, first: PageIdx, out: &mut [PageBytes]) -> io::Result<()> {
            out.fill([7; _]);
            if first.0 + out.len() as u64 > 2 { Err(io::Error::other("a bad page")) } else { Ok(()) }
        }

        fn punch(&self, _: PageIdx, _: u64) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn pages_before_a_bad_one_are_evicted_and_counted_and_the_others_are_given_back() {
        let ticket = Ticket::new(1, 1);
        let words: [AtomicU64; 4] = Default::default();
        let cell_of = |page: PageIdx| Cell::new(&words[page.0 as usize]);
        assert!((0..4).all(|page| quarantine(cell_of(PageIdx(page)), ticket)));
        let (store, mut buffer) = (NullStore::new(Bytes(1 << 20)), [[0; _]; 2]);
        let done = evict(0, (PageIdx(0), 4), cell_of, ticket, &Broken, (1, &store), &mut buffer);
        assert_eq!((done.far, done.zero, done.aborted, done.refused), (2, 0, 0, 2));
        assert!(done.failed.is_some_and(|error| error.to_string() == "a bad page"));
        let states = [0, 1, 2, 3].map(|page| cell_of(PageIdx(page)).load().state());
        assert_eq!(states, [State::Far, State::Far, State::Resident, State::Resident]);
    }
}
