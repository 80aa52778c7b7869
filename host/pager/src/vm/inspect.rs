//! Inspect: checks whether this program could serve a VM that another engine serves now.
//!
//! Before: a hand-over to an engine of this program begins. After: nothing has changed, and the caller knows whether
//! recovery would understand each word, or which one it would not.
//! Threads: any, beside the other engine's workers, which change words all the time.
//! Promise: it only reads, with `pread`, through a read-only descriptor.

use std::os::fd::OwnedFd;

use ballast_base::PageRange;
use ballast_base::stripes::PAGES_PER_CHUNK;
use ballast_handover::state_file::{RegionRecord, StateError, StateFile};
use ballast_page::page_state::{State, Word};
use ballast_sys::memfd;

/// Counts of the words that were read. While another engine serves the VM, they are no consistent snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inspected {
    /// Words that were ever written.
    pub words: u64,
    /// Pages in stores.
    pub far: u64,
    /// Pages in quarantine, being evicted, or locked: the state that a death of the other engine would leave half done.
    pub moving: u64,
}

/// Reads all words of a VM. `stores` has the numbers of the stores that this program has for it.
///
/// # Errors
/// A word of an unknown kind, or a page in a store that is not among `stores`, with its region and page; or words could
/// not be read.
pub fn inspect(state: &StateFile, stores: &[u8]) -> Result<Inspected, StateError> {
    let file = memfd::reopen(state.fd(), false)?;
    let mut seen = Inspected::default();
    for (number, record) in state.regions().iter().enumerate().filter(|(_, record)| !record.removed) {
        for written in state.written_words(record)? {
            for pages in written.pieces(PAGES_PER_CHUNK) {
                inspect_region(&file, record, pages, stores, &mut seen)
                    .map_err(|(page, what)| StateError::Invalid(format!("region {number}, page {page:#x}: {what}")))?;
            }
        }
    }
    Ok(seen)
}

fn inspect_region(
    file: &OwnedFd,
    record: &RegionRecord,
    pages: PageRange,
    stores: &[u8],
    seen: &mut Inspected,
) -> Result<(), (u64, String)> {
    let first = pages.start().0;
    let mut bytes = vec![0; (pages.end().0 - first) as usize * 8];
    memfd::read_exact_at(file, record.words_at() + first * 8, &mut bytes)
        .map_err(|error| (first, error.to_string()))?;
    for (page, bytes) in (first..).zip(bytes.as_chunks().0) {
        let word = Word::from_bits(u64::from_le_bytes(*bytes));
        if !word.is_known() {
            return Err((page, format!("the word {:#x} is of a kind that this program does not know", word.bits())));
        }
        seen.words += 1;
        if word.is_lost() {
            continue;
        }
        seen.moving += u64::from(word.is_locked() || matches!(word.state(), State::Quarantine | State::Evicting));
        if matches!(word.state(), State::Far | State::Restoring) {
            seen.far += 1;
            if !stores.contains(&word.store()) {
                let have = stores.iter().map(u8::to_string).collect::<Vec<_>>().join(", ");
                return Err((page, format!("it is in store {}, and this program has stores {have}", word.store())));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::store::{FILE_STORE, Handle, RAM_STORE};
    use ballast_base::wire::VmId;
    use ballast_base::{Bytes, Extents, PAGE_SIZE};
    use ballast_page::page_state::Ticket;

    const PAGES: u64 = 1024;

    /// The state file of a VM of one region, which begins with these words.
    fn state(words: &[Word]) -> StateFile {
        let state = StateFile::create(VmId([3; 16]), "test").expect("state");
        let ram = memfd::create("ballast-test", Bytes(PAGES * PAGE_SIZE as u64)).expect("memfd");
        let extents = Extents::one(Bytes(0), Bytes(PAGES * PAGE_SIZE as u64)).expect("good");
        state.add_region(&[memfd::file_id(&ram).expect("an id")], &extents, None).expect("a region");
        let at = state.regions()[0].words_at();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.bits().to_le_bytes()).collect();
        rustix::io::pwrite(state.fd(), &bytes, at).expect("written");
        state
    }

    fn far(store: u8) -> Word {
        Word::far(store, Handle::new(5).expect("in range"), 1)
    }

    #[test]
    fn what_an_engine_is_busy_with_is_seen_and_left_as_it_is() {
        let evicting = Word::quarantine(Ticket::new(1, 2), 3).in_state(State::Evicting);
        let words = [Word::INITIAL, far(RAM_STORE), far(FILE_STORE).locked(), evicting, Word::LOST];
        let state = state(&words);
        let seen = inspect(&state, &[RAM_STORE, FILE_STORE]).expect("all is known");
        assert_eq!(seen, Inspected { words: 512, far: 2, moving: 2 });
        let mut bytes = vec![0; words.len() * 8];
        rustix::io::pread(state.fd(), &mut bytes, state.regions()[0].words_at()).expect("read");
        assert_eq!(bytes, words.iter().flat_map(|word| word.bits().to_le_bytes()).collect::<Vec<u8>>());
    }

    #[test]
    fn a_word_that_is_not_understood_is_named_with_its_place() {
        let newer = Word::from_bits(9);
        let said = inspect(&state(&[Word::INITIAL, newer]), &[RAM_STORE]).expect_err("too new").to_string();
        assert!(said.contains("region 0, page 0x1: the word 0x9"), "{said}");
        let said = inspect(&state(&[far(FILE_STORE)]), &[RAM_STORE]).expect_err("no such store").to_string();
        assert!(said.contains("region 0, page 0x0: it is in store 2"), "{said}");
    }
}
