//! An LZ4 block decoder for one page, without unsafe code.
//!
//! Before: `codec` copied a payload out of the arena. After: the page is in the caller's buffer, or the payload is
//! refused.
//! Threads: any; no state. Units: bytes.
//! Promise: any payload is decoded to exactly one page or refused; nothing outside the two slices is touched, and no
//! payload costs more than the copy of a page.
//!
//! Why not a library: a restore waits for the decoder. The safe decoder of `lz4_flex` copies overlapping matches (runs
//! of zeros, the most common) byte by byte: 3.3 us for a half-compressible page, against 2.1 us here, in one run on one
//! machine. The tests compare the two.

use crate::PageBytes;
use crate::lz4::{CONTINUED, MATCH_MIN};

/// A copy of up to this many bytes is done whole if there is space: one load and one store.
const STRIDE: usize = 16;
/// Matches from this length on are copied in pieces of growing length.
const LONG: usize = 256;

/// Decodes `block` into `out`; true if it was one page of a sound block.
pub(crate) fn decode(block: &[u8], out: &mut PageBytes) -> bool {
    sequences(block, out) == Some(out.len())
}

fn sequences(block: &[u8], out: &mut [u8]) -> Option<usize> {
    let (mut read, mut written) = (0, 0);
    loop {
        let token = usize::from(*block.get(read)?);
        read += 1;
        let literals = length(token >> 4, block, &mut read)?;
        let (read_end, written_end) = (read + literals, written + literals);
        if literals <= STRIDE && read + STRIDE <= block.len() && written + STRIDE <= out.len() {
            out[written..written + STRIDE].copy_from_slice(&block[read..read + STRIDE]);
        } else {
            out.get_mut(written..written_end)?.copy_from_slice(block.get(read..read_end)?);
        }
        (read, written) = (read_end, written_end);
        if read == block.len() {
            return Some(written);
        }
        let offset = usize::from(u16::from_le_bytes([*block.get(read)?, *block.get(read + 1)?]));
        read += 2;
        let repeated = length(token & 15, block, &mut read)? + MATCH_MIN;
        if offset == 0 || offset > written || repeated > out.len() - written {
            return None;
        }
        repeat(out, written, offset, repeated);
        written += repeated;
    }
}

/// A length, from its nibble and the bytes after it. No overflow: a byte adds 255, and a block is less than a page.
fn length(nibble: usize, block: &[u8], read: &mut usize) -> Option<usize> {
    let mut length = nibble;
    if nibble == CONTINUED {
        loop {
            let more = *block.get(*read)?;
            *read += 1;
            length += usize::from(more);
            if more != u8::MAX {
                break;
            }
        }
    }
    Some(length)
}

/// Writes `len` bytes at `at`, each equal to the one `offset` before it. The caller checked `1 <= offset <= at` and
/// that `at + len` is inside. Whole strides may pass `at + len` inside the page, where later sequences write anyway.
fn repeat(out: &mut [u8], at: usize, offset: usize, len: usize) {
    let (mut to, end) = (at, at + len);
    if len >= LONG {
        // The source grows with each copy, so each copy is as long as everything before it.
        while to < end {
            let step = (to - (at - offset)).min(end - to);
            out.copy_within(at - offset..at - offset + step, to);
            to += step;
        }
    } else if offset >= STRIDE {
        while to < end && to + STRIDE <= out.len() {
            out.copy_within(to - offset..to - offset + STRIDE, to);
            to += STRIDE;
        }
    } else {
        // A short period: unrolled into a pattern, so that no load waits for the preceding store.
        let mut pattern = [0; STRIDE];
        let mut phase = 0;
        for byte in &mut pattern {
            *byte = out[at - offset + phase];
            phase = if phase + 1 == offset { 0 } else { phase + 1 };
        }
        let whole_periods = STRIDE - STRIDE % offset;
        while to < end && to + STRIDE <= out.len() {
            out[to..to + STRIDE].copy_from_slice(&pattern);
            to += whole_periods;
        }
    }
    // At the end of the page, no whole stride fits.
    while to < end {
        out[to] = out[to - offset];
        to += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::PAGE_SIZE;
    use ballast_testkit::pages;
    use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};
    use proptest::prelude::*;

    fn reference(block: &[u8]) -> Option<PageBytes> {
        let mut out = [0; PAGE_SIZE];
        decompress_into(block, &mut out).is_ok_and(|len| len == PAGE_SIZE).then_some(out)
    }

    fn ours(block: &[u8]) -> Option<PageBytes> {
        let mut out = [0; PAGE_SIZE];
        decode(block, &mut out).then_some(out)
    }

    fn compressed(page: &PageBytes) -> Vec<u8> {
        let mut block = vec![0; get_maximum_output_size(PAGE_SIZE)];
        let len = compress_into(page, &mut block).expect("compress");
        block.truncate(len);
        block
    }

    /// Pages of short repeats, at each distance: the part of the format where errors are likely.
    fn repetitive(seed: u64, period: usize) -> PageBytes {
        let mut page = pages::incompressible(seed);
        for index in period..PAGE_SIZE {
            if page[index] > 8 {
                page[index] = page[index - period];
            }
        }
        page
    }

    /// One match as long as the page, at each distance.
    fn periodic(seed: u64, period: usize) -> PageBytes {
        let noise = pages::incompressible(seed);
        std::array::from_fn(|index| noise[index % period])
    }

    #[test]
    fn unsound_blocks_are_refused() {
        for block in
            [&[][..], &[0], &[0x10], &[0xf0], &[0xf0, 255], &[0x10, 7, 0, 0], &[0x10, 7, 2, 0], &[0x1f, 7, 1, 0]]
        {
            assert_eq!(ours(block), None, "{block:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn a_compressed_page_is_decoded(seed: u64, period in 1usize..100) {
            let random = [pages::mixed(seed), pages::half_compressible(seed)];
            for page in random.into_iter().chain([repetitive(seed, period), periodic(seed, period)]) {
                prop_assert!(ours(&compressed(&page)) == Some(page));
            }
        }

        #[test]
        fn a_damaged_block_is_decoded_or_refused_as_by_the_reference(
            seed: u64, period in 1usize..100,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            cut in any::<prop::sample::Index>(), do_cut: bool
        ) {
            let mut block = compressed(&repetitive(seed, period));
            for (at, byte) in changes {
                let at = at.index(block.len());
                block[at] = byte;
            }
            if do_cut {
                block.truncate(cut.index(block.len()));
            }
            if let Some(expected) = reference(&block) {
                prop_assert!(ours(&block) == Some(expected));
            } else if let Some(page) = ours(&block) {
                // The reference also refuses blocks that end too near a match. Here, the checksum catches those.
                prop_assert_eq!(page.len(), PAGE_SIZE);
            }
        }
    }
}
