//! Shift: moves a far page's copy from one store to another, while the guest may touch the page at any time.
//!
//! Before: `spill` has read the copy without a lock and put it into the other store. After: the word names the new copy
//! and the old one is freed; or the page was touched, and the new copy is freed.
//! Threads: the spill worker; a fault or a discard that meets the lock waits for this one page, about a microsecond.
//! Promise: at any time one complete copy is named by the word. A death leaks one copy, which `recover` sweeps.

use ballast_base::store::{NearStore, PageBytes, PageKey, Store};

use crate::granule::Granule;
use crate::page_state::{State, Word};

/// Changes the word `from` of page `index` of the granule to `to`, if the word is unchanged and its copy is still the
/// one that was put under `to` (`bytes` and `blob`, as [`NearStore::get_blob`] returned them). Returns whether it was.
/// Frees the copy that no word names then.
///
/// The bytes are compared because stores reuse handles: a page that was restored, written and evicted again may have
/// the old word. Under the lock, the copy that the word names is authoritative.
pub fn commit(
    (granule, index): (Granule<'_>, usize),
    key: PageKey,
    (from, old): (Word, &dyn NearStore),
    (to, new): (Word, &dyn Store),
    (bytes, blob): (&PageBytes, &[u8]),
) -> bool {
    let word = if index == 0 { from } else { granule.cell().load() };
    let is_far = word.state() == State::Far && !word.is_locked();
    let moved = is_far
        && granule.cell().lock(word, word).is_some_and(|mut lock| {
            let same = (index == 0 || granule.word_of(index) == from) && old.still_has(key, from.handle(), bytes, blob);
            if same && index == 0 {
                lock.set(to);
            } else if same {
                granule.set_word_of(index, to);
            }
            same
        });
    if moved {
        old.free(key, from.handle())
    } else {
        new.free(key, to.handle())
    }
    moved
}
