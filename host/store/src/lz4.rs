//! An LZ4 block encoder for one page.
//!
//! Before: `codec` has a page that is not same-filled. After: the block is in the caller's buffer, or would be too
//! long; `unlz4` (or any LZ4 decoder) reads it.
//! Threads: any; each has its own table. Units: positions and lengths are bytes; a position in a page fits 16 bits.
//! Promise: a block decodes to exactly the page, and depends on nothing else. No content costs more than one lookup per
//! position and a copy.
//!
//! Why not a library: reclaim waits for the encoder, and a page is a special case. Positions fit 16 bits, the table
//! fits the L1 cache, and content without a match in the first 16 bytes is searched with growing steps. A page half of
//! noise and half of zeros takes 0.9 us here and 2.2 us in `lz4_flex`, machine code 4.4 and 5.2 us, for blocks at most
//! 1.5 % longer on the measured pages; one run on one machine, each the best of 15. `examples/store_speed.rs` compares
//! them on any file.

use ballast_base::PAGE_SIZE;

use crate::PageBytes;

pub(crate) const MATCH_MIN: usize = 4;
/// Rules of the format: no match begins in the last 12 bytes, and the last 5 bytes are literals.
const LAST_MATCH: usize = PAGE_SIZE - 12;
const MATCH_END_MAX: usize = PAGE_SIZE - 5;
/// A length nibble of this value is continued in the bytes that follow.
pub(crate) const CONTINUED: usize = 15;

/// After this number of rounds of [`ROUND`] positions without a match, the step grows by one, to pass noise quickly.
/// Measured: twice the number makes blocks of machine code 1 % shorter, and takes a third longer for a page half of
/// noise.
const ROUNDS_PER_STEP: usize = 4;
const ROUND: usize = 4;

const SLOT_BITS: u32 = 12;
const SLOTS: usize = 1 << SLOT_BITS;

/// Literals are copied in pieces of this size; the last piece is copied whole.
const PIECE: usize = 32;

/// The longest block: the page as literals, their length, and the surplus of the last piece.
pub(crate) const BLOCK_MAX: usize = PAGE_SIZE + PAGE_SIZE / 255 + 16 + PIECE;

pub(crate) struct Table([u16; SLOTS]);

impl Table {
    pub(crate) const fn new() -> Self {
        Self([0; SLOTS])
    }
}

/// The 8 bytes at `at`; each lookup and comparison reads through this.
#[inline(always)]
fn read8(page: &PageBytes, at: usize) -> u64 {
    debug_assert!(at + 8 <= PAGE_SIZE, "8 bytes at {at} of a page");
    // SAFETY: `at + 8 <= PAGE_SIZE`. The callers: `encode` reads at positions up to LAST_MATCH (12 bytes before the
    // end), at positions it took out of the table, which holds only positions read before in this page (or 0), at
    // `at - 8 >= 0` below such a position, and 2 bytes before a match's end that is at most LAST_MATCH; `same_bytes`
    // reads where it checked `to + 8 <= MATCH_END_MAX`, and at `from < to`. A checked read makes the whole encoder 1.5
    // times slower.
    u64::from_le_bytes(unsafe { page.as_ptr().add(at).cast::<[u8; 8]>().read() })
}

#[inline(always)]
fn slot(word: u64) -> usize {
    // Knuth's multiplier, as in every LZ4.
    ((word as u32).wrapping_mul(2_654_435_761) >> (u32::BITS - SLOT_BITS)) as usize
}

/// Number of equal bytes from `from` and from `to` on (`from < to`), up to where a match must end.
#[inline(always)]
fn same_bytes(page: &PageBytes, from: usize, to: usize) -> usize {
    let mut len = 0;
    while to + len + 8 <= MATCH_END_MAX {
        let difference = read8(page, from + len) ^ read8(page, to + len);
        if difference != 0 {
            return len + (difference.trailing_zeros() / 8) as usize;
        }
        len += 8;
    }
    while to + len < MATCH_END_MAX && page[from + len] == page[to + len] {
        len += 1;
    }
    len
}

/// Number of equal bytes just before `from` and `to`, at most `max`.
#[inline(always)]
fn same_bytes_before(page: &PageBytes, from: usize, to: usize, max: usize) -> usize {
    if from >= 8 {
        // One comparison of 8 bytes: a longer match was found earlier, or is not worth a loop.
        let difference = read8(page, from - 8) ^ read8(page, to - 8);
        return ((difference.leading_zeros() / 8) as usize).min(max);
    }
    let mut len = 0;
    while len < max && len < from && page[from - len - 1] == page[to - len - 1] {
        len += 1;
    }
    len
}

/// The growing block. Each write is bounds-checked.
struct Block<'a> {
    bytes: &'a mut [u8; BLOCK_MAX],
    len: usize,
}

impl Block<'_> {
    #[inline(always)]
    fn push(&mut self, byte: u8) {
        self.bytes[self.len] = byte;
        self.len += 1;
    }

    /// Appends the part of a length that its nibble does not hold.
    #[inline(always)]
    fn push_rest(&mut self, length: usize) {
        if length >= CONTINUED {
            let mut rest = length - CONTINUED;
            while rest >= 255 {
                self.push(255);
                rest -= 255;
            }
            self.push(rest as u8);
        }
    }

    /// Appends token, length and bytes of the literals `page[start..end]`; `match_nibble` is half of the token.
    #[inline(always)]
    fn push_literals(&mut self, page: &PageBytes, start: usize, end: usize, match_nibble: usize) {
        let count = end - start;
        self.push((count.min(CONTINUED) << 4 | match_nibble) as u8);
        self.push_rest(count);
        if end + PIECE <= PAGE_SIZE {
            // The next write overwrites the surplus of the last piece.
            let pieces = self.bytes[self.len..].chunks_exact_mut(PIECE).zip(page[start..].chunks_exact(PIECE));
            for (to, from) in pieces.take(count.div_ceil(PIECE)) {
                to.copy_from_slice(from);
            }
        } else {
            self.bytes[self.len..self.len + count].copy_from_slice(&page[start..end]);
        }
        self.len += count;
    }
}

/// Writes `page` as one block to the start of `block`. Returns its length; `None` if it would exceed `max`.
pub(crate) fn encode(page: &PageBytes, table: &mut Table, block: &mut [u8; BLOCK_MAX], max: usize) -> Option<usize> {
    let table = &mut table.0;
    // Each entry is position 0, as if it had been seen. Entries of an earlier page would be harmless, since each
    // candidate is compared, but the block would depend on that page.
    table.fill(0);
    let mut block = Block { bytes: block, len: 0 };
    // Literals not yet written begin at `anchor`; `at` is the next position to look up.
    let (mut anchor, mut at) = (0, 1);
    'page: while at <= LAST_MATCH {
        let mut rounds = ROUNDS_PER_STEP;
        let (mut to, mut from);
        'search: loop {
            let step = rounds / ROUNDS_PER_STEP;
            rounds += 1;
            if at + (ROUND - 1) * step > LAST_MATCH {
                break 'page;
            }
            for _ in 0..ROUND {
                let word = read8(page, at);
                let seen = &mut table[slot(word)];
                (from, to) = (usize::from(*seen), at);
                *seen = at as u16;
                if read8(page, from) as u32 == word as u32 {
                    break 'search;
                }
                at += step;
            }
        }
        let end = to + MATCH_MIN + same_bytes(page, from + MATCH_MIN, to + MATCH_MIN);
        let back = same_bytes_before(page, from, to, to - anchor);
        (from, to) = (from - back, to - back);
        // The first byte of a run is the best match for the next run of that byte.
        table[slot(read8(page, to))] = to as u16;
        if block.len + (to - anchor) > max {
            return None;
        }
        let repeated = end - to - MATCH_MIN;
        block.push_literals(page, anchor, to, repeated.min(CONTINUED));
        for byte in ((to - from) as u16).to_le_bytes() {
            block.push(byte);
        }
        block.push_rest(repeated);
        (anchor, at) = (end, end);
        if end <= LAST_MATCH {
            table[slot(read8(page, end - 2))] = (end - 2) as u16;
        }
    }
    if block.len + (PAGE_SIZE - anchor) > max {
        return None;
    }
    block.push_literals(page, anchor, PAGE_SIZE, 0);
    (block.len <= max).then_some(block.len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unlz4;
    use ballast_testkit::pages;
    use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};
    use proptest::prelude::*;

    /// The block of a page, which two decoders have decoded to the page; `None` for a raw page.
    fn checked(page: &PageBytes) -> Option<Vec<u8>> {
        checked_with(page, &mut Table::new())
    }

    fn checked_with(page: &PageBytes, table: &mut Table) -> Option<Vec<u8>> {
        let mut block = [0xee; BLOCK_MAX];
        let len = encode(page, table, &mut block, BLOCK_MAX - PIECE).expect("this bound fits any page");
        let mut out = [0; PAGE_SIZE];
        assert_eq!(decompress_into(&block[..len], &mut out).expect("a sound block"), PAGE_SIZE);
        assert!(out == *page, "lz4_flex decodes another page");
        out.fill(0xdd);
        assert!(unlz4::decode(&block[..len], &mut out) && out == *page, "our decoder decodes another page");
        for max in [len - 1, len] {
            let bounded = encode(page, table, &mut block, max);
            assert_eq!(bounded, (max == len).then_some(len), "the bound {max} for a block of {len}");
        }
        (len < PAGE_SIZE).then(|| block[..len].to_vec())
    }

    fn reference_len(page: &PageBytes) -> usize {
        let mut block = vec![0; get_maximum_output_size(PAGE_SIZE)];
        compress_into(page, &mut block).expect("compress")
    }

    /// Words as in an executable: few different ones, some with a changed byte.
    fn wordy(seed: u64, words: u64, noise: u64) -> PageBytes {
        let mut page = pages::incompressible(seed);
        for (index, chunk) in page.chunks_exact_mut(8).enumerate() {
            let random = u64::from_le_bytes(*chunk.first_chunk().expect("8 bytes"));
            let mut word = (random % words).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
            if noise > 0 && (random >> 20).is_multiple_of(noise) {
                word[(random >> 40) as usize % 8] ^= index as u8;
            }
            chunk.copy_from_slice(&word);
        }
        page
    }

    #[test]
    fn every_length_of_literals_and_of_matches_is_restored() {
        let noise = pages::incompressible(1);
        for literals in 0..PAGE_SIZE {
            // Noise, then one repeated byte; and noise, then that noise again.
            let mut page = noise;
            page[literals..].fill(7);
            checked(&page);
            let again = PAGE_SIZE.saturating_sub(literals).min(literals);
            page = noise;
            page.copy_within(..again, literals);
            checked(&page);
            // A run, then noise.
            page = noise;
            page[..literals].fill(0);
            checked(&page);
        }
    }

    #[test]
    fn every_distance_and_every_period_is_restored() {
        let noise = pages::incompressible(2);
        for period in 1..PAGE_SIZE {
            checked(&std::array::from_fn(|index| noise[index % period]));
            let mut page = noise;
            page.copy_within(..8.min(PAGE_SIZE - period), period);
            checked(&page);
        }
    }

    #[test]
    fn a_match_is_found_where_the_format_still_allows_one_and_none_later() {
        for zeros in 1..40 {
            let mut page = pages::incompressible(3);
            page[PAGE_SIZE - zeros..].fill(0);
            checked(&page);
        }
    }

    #[test]
    fn noise_is_given_up_and_a_page_of_one_byte_is_short() {
        assert_eq!(encode(&pages::incompressible(5), &mut Table::new(), &mut [0; BLOCK_MAX], 3568), None);
        assert!(checked(&[7; PAGE_SIZE]).is_some_and(|block| block.len() < 40));
    }

    #[test]
    fn blocks_are_hardly_longer_than_those_of_lz4_flex() {
        let compare = |kind: &str, page: &dyn Fn(u64) -> PageBytes| {
            let (mut ours, mut reference) = (0, 0);
            for page in (0..200).map(page) {
                ours += checked(&page).map_or(PAGE_SIZE, |block| block.len());
                reference += reference_len(&page).min(PAGE_SIZE);
            }
            assert!(ours * 100 <= reference * 104, "{kind}: {ours} bytes, lz4_flex needs {reference}");
        };
        compare("half compressible", &pages::half_compressible);
        compare("mixed", &pages::mixed);
        compare("12 words", &|seed| wordy(seed, 12, 0));
        compare("300 words with noise", &|seed| wordy(seed, 300, 3));
        compare("40 words with noise", &|seed| wordy(seed, 40, 5));
    }

    #[test]
    fn a_block_depends_on_its_page_alone() {
        let mut used = Table::new();
        for seed in 0..50 {
            assert!(checked_with(&pages::mixed(seed), &mut used) == checked(&pages::mixed(seed)));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn any_page_is_restored(
            seed: u64, words in 1u64..500, noise in 0u64..6,
            changes in prop::collection::vec((0..PAGE_SIZE, 1..600usize, any::<u8>()), 0..20),
            copies in prop::collection::vec((0..PAGE_SIZE, 0..PAGE_SIZE, 1..600usize), 0..20)
        ) {
            for mut page in [wordy(seed, words, noise), pages::mixed(seed), pages::incompressible(seed)] {
                checked(&page);
                for &(at, len, byte) in &changes {
                    page[at..PAGE_SIZE.min(at + len)].fill(byte);
                }
                checked(&page);
                for &(from, to, len) in &copies {
                    page.copy_within(from..PAGE_SIZE.min(from + len.min(PAGE_SIZE - to)), to);
                }
                checked(&page);
            }
        }
    }
}
