//! The ledger of a worker process: memory that outlives the worker and says which pages it had put.
//!
//! Before: the worker put a page. After: the parent finds the page's handle and seed here, also after a kill.
//! Threads: each page has one writer. Units: two words per page: handle (with a bit for "valid") and seed.

use std::sync::atomic::{AtomicU64, Ordering};

use ballast_store::Handle;

const VALID: u64 = 1 << 63;

/// Writes a page's new handle and seed. Returns the handle that it had.
pub fn replace(ledger: &[AtomicU64], page: u64, handle: Handle, seed: u64) -> Option<Handle> {
    let [handle_word, seed_word] = &ledger[page as usize * 2..][..2] else { unreachable!("a pair") };
    let old = handle_word.load(Ordering::Acquire);
    // Invalid between the two stores: after a kill there, the page's content is unknown.
    handle_word.store(0, Ordering::Release);
    seed_word.store(seed, Ordering::Release);
    handle_word.store(handle.bits() | VALID, Ordering::Release);
    (old & VALID != 0).then(|| Handle::new(old & !VALID).expect("40 bits"))
}

/// The valid pages: number, handle, seed.
pub fn live(ledger: &[AtomicU64]) -> Vec<(u64, Handle, u64)> {
    (0..)
        .zip(ledger.as_chunks::<2>().0)
        .filter_map(|(page, [handle, seed])| {
            let word = handle.load(Ordering::Acquire);
            let handle = Handle::new(word & !VALID).filter(|_| word & VALID != 0)?;
            Some((page, handle, seed.load(Ordering::Acquire)))
        })
        .collect()
}
