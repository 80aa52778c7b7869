//! Pages whose content is known: for tests and measurements, here and in other crates.
//!
//! Before: a test picks a seed. After: a store keeps the page and the test compares the returned bytes.
//! Threads: any. Units: one page of 4096 bytes.
//! Promise: the same seed makes the same bytes, on every machine and in every version.

use ballast_base::PAGE_SIZE;

use ballast_base::store::PageBytes;

use crate::random::{STEP, mix};

/// Noise that no codec shortens.
pub fn incompressible(seed: u64) -> PageBytes {
    let mut page = [0; PAGE_SIZE];
    let mut state = mix(seed);
    for chunk in page.chunks_exact_mut(8) {
        state = state.wrapping_add(STEP);
        chunk.copy_from_slice(&mix(state).to_le_bytes());
    }
    page
}

/// 64 bytes of noise, 64 bytes of zeros, and so on: lz4 compresses it to a little over half a page.
pub fn half_compressible(seed: u64) -> PageBytes {
    let mut page = incompressible(seed);
    for stretch in page.chunks_exact_mut(128) {
        stretch[64..].fill(0);
    }
    page
}

/// A page that repeats a 64-bit pattern. With equal halves it is a 32-bit pattern; 0 is the zero page.
pub fn filled(pattern: u64) -> PageBytes {
    let mut page = [0; PAGE_SIZE];
    page.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&pattern.to_le_bytes()));
    page
}

/// One of the kinds above, chosen by the seed: a mixture for histories of puts and frees.
pub fn mixed(seed: u64) -> PageBytes {
    let choice = mix(seed ^ STEP);
    let mut page = match choice % 8 {
        0 => return [0; PAGE_SIZE],
        1 => return filled(choice >> 32 << 32 | choice >> 32),
        2 => return filled(choice),
        3 => incompressible(seed),
        _ => half_compressible(seed),
    };
    // Zeros at the end, of any length, reach every size class.
    if choice.is_multiple_of(2) {
        let noise = (choice >> 8) as usize % PAGE_SIZE;
        page[noise..].fill(0);
        page[0] = 1;
    }
    page
}
