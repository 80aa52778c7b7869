//! Encodes a page into a blob and decodes it: same-filled detection, checksum, compression.
//!
//! Before: `ram` has a page to store, or a copy of a blob. After: it has header and payload, or the page.
//! Threads: any; each thread has its own buffers, so that no page costs an allocation. Units: lengths are bytes; a page
//! has 4096.
//! Promise: `open` accepts any bytes, and returns true only if they are the page that was sealed under that key.

use std::cell::RefCell;

use ballast_base::PAGE_SIZE;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::slab::{CLASS_BYTES, CLASSES};
use crate::{PageBytes, PageKey, lz4, unlz4};

/// Compression of new pages. Pages stored before stay readable after a change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Codec {
    /// LZ4 blocks: the fastest.
    #[default]
    Lz4,
    /// Zstandard: denser, several times slower.
    Zstd {
        /// 1 to 22 as the `zstd` program counts; negative levels are faster.
        level: i32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Encoding {
    Raw = 1,
    /// One LZ4 block without a frame.
    Lz4 = 2,
    /// One Zstandard frame.
    Zstd = 3,
    /// Eight bytes that the page repeats.
    Fill64 = 4,
}

pub(crate) const HEADER_BYTES: usize = 16;
const _: () = assert!(CLASS_BYTES[CLASSES - 1] == HEADER_BYTES + PAGE_SIZE);

/// A longer compressed payload (87 % of a page) would need a raw page's slot: raw, the page is faster to read.
const COMPRESSED_MAX: usize = CLASS_BYTES[CLASSES - 2] - HEADER_BYTES;

/// Precedes each payload: checksum (8 bytes), key check (4), length (2), encoding (1), tag (1), little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobHeader {
    /// xxh3 of the uncompressed page, seeded with the key.
    pub(crate) checksum: u64,
    /// A digest of the key, so that `free` can tell whose blob this is without the payload.
    pub(crate) key_check: u32,
    pub(crate) len: u16,
    /// An `Encoding`, once checked.
    pub(crate) encoding: u8,
    /// Counts the uses of the slot; the handle has it, too. Never 0.
    pub(crate) tag: u8,
}

impl BlobHeader {
    pub(crate) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.checksum.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.key_check.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.len.to_le_bytes());
        bytes[14] = self.encoding;
        bytes[15] = self.tag;
        bytes
    }

    pub(crate) fn from_bytes(bytes: [u8; HEADER_BYTES]) -> Self {
        let [c0, c1, c2, c3, c4, c5, c6, c7, k0, k1, k2, k3, l0, l1, encoding, tag] = bytes;
        Self {
            checksum: u64::from_le_bytes([c0, c1, c2, c3, c4, c5, c6, c7]),
            key_check: u32::from_le_bytes([k0, k1, k2, k3]),
            len: u16::from_le_bytes([l0, l1]),
            encoding,
            tag,
        }
    }
}

/// A bijection of 64-bit words that spreads every bit (the finalizer of SplitMix64).
pub(crate) fn mix(mut word: u64) -> u64 {
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// The checksum seed of a key: different for any two keys of a VM with pages below 2^32 (regions below 16 TiB), and
/// with high probability for different VMs.
fn seed(key: PageKey) -> u64 {
    let [low, high] = [0, 8].map(|at| u64::from_le_bytes(std::array::from_fn(|byte| key.region.vm.0[at + byte])));
    mix(key.page.0.rotate_left(32) ^ u64::from(key.region.number) ^ mix(low ^ mix(high)))
}

/// 32 bits that tell keys apart, and hardly depend on the checksum's seed.
pub(crate) fn key_check(key: PageKey) -> u32 {
    mix(seed(key) ^ 0x5bd1_e995_9e37_79b9) as u32
}

pub(crate) fn checksum(key: PageKey, bytes: &PageBytes) -> u64 {
    xxh3_64_with_seed(bytes, seed(key))
}

pub(crate) fn fill_pattern(bytes: &PageBytes) -> Option<u64> {
    const WORD: usize = 8;
    // A page that repeats 8 bytes equals itself moved by 8 bytes. Other pages mostly differ within the first bytes.
    if bytes[WORD..] != bytes[..PAGE_SIZE - WORD] {
        return None;
    }
    bytes.first_chunk().map(|first| u64::from_le_bytes(*first))
}

pub(crate) fn fill(out: &mut PageBytes, pattern: u64) {
    for chunk in out.chunks_exact_mut(8) {
        chunk.copy_from_slice(&pattern.to_le_bytes());
    }
}

struct Scratch {
    table: lz4::Table,
    buffer: [u8; lz4::BLOCK_MAX],
    compressor: Option<(i32, zstd::bulk::Compressor<'static>)>,
    decompressor: Option<zstd::bulk::Decompressor<'static>>,
}

thread_local! {
    static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Box::new(Scratch {
        table: lz4::Table::new(),
        buffer: [0; lz4::BLOCK_MAX],
        compressor: None,
        decompressor: None,
    }));
}

impl Scratch {
    /// Compresses into the buffer. `None` if the result is too long, or the codec gets no memory.
    fn compress(&mut self, codec: Codec, bytes: &PageBytes) -> Option<usize> {
        let len = match codec {
            Codec::Lz4 => lz4::encode(bytes, &mut self.table, &mut self.buffer, COMPRESSED_MAX)?,
            Codec::Zstd { level } => {
                if self.compressor.as_ref().is_none_or(|(of, _)| *of != level) {
                    self.compressor = Some((level, zstd::bulk::Compressor::new(level).ok()?));
                }
                let (_, compressor) = self.compressor.as_mut()?;
                // The compressor stops early if the result would not fit: the page is then stored raw.
                compressor.compress_to_buffer(bytes, &mut self.buffer[..COMPRESSED_MAX]).ok()?
            }
        };
        (len <= COMPRESSED_MAX).then_some(len)
    }

    fn unzstd(&mut self, len: usize, out: &mut PageBytes) -> bool {
        if self.decompressor.is_none() {
            self.decompressor = zstd::bulk::Decompressor::new().ok();
        }
        let Some(decompressor) = self.decompressor.as_mut() else { return false };
        decompressor.decompress_to_buffer(&self.buffer[..len], &mut out[..]).is_ok_and(|written| written == PAGE_SIZE)
    }
}

/// The header of a page with this payload; the tag is not set yet (0).
pub(crate) fn header(key: PageKey, bytes: &PageBytes, encoding: u8, len: usize) -> BlobHeader {
    BlobHeader { checksum: checksum(key, bytes), key_check: key_check(key), len: len as u16, encoding, tag: 0 }
}

/// The header of a page stored raw; the tag is not set yet (0).
pub(crate) fn raw_header(key: PageKey, bytes: &PageBytes) -> BlobHeader {
    header(key, bytes, Encoding::Raw as u8, PAGE_SIZE)
}

/// Whether this is the page that was stored raw with that header under `key`.
pub(crate) fn is_raw_page(key: PageKey, header: BlobHeader, bytes: &PageBytes) -> bool {
    header == BlobHeader { tag: header.tag, ..raw_header(key, bytes) }
}

/// Makes the blob of a page, and passes its header (tag still 0) and payload to `keep`.
pub(crate) fn seal<R>(
    key: PageKey,
    bytes: &PageBytes,
    fill: Option<u64>,
    codec: Codec,
    keep: impl FnOnce(BlobHeader, &[u8]) -> R,
) -> R {
    let header = |encoding: Encoding, len: usize| header(key, bytes, encoding as u8, len);
    if let Some(pattern) = fill {
        return keep(header(Encoding::Fill64, 8), &pattern.to_le_bytes());
    }
    SCRATCH.with_borrow_mut(|scratch| match scratch.compress(codec, bytes) {
        None => keep(header(Encoding::Raw, PAGE_SIZE), bytes),
        Some(len) => {
            let encoding = match codec {
                Codec::Lz4 => Encoding::Lz4,
                Codec::Zstd { .. } => Encoding::Zstd,
            };
            keep(header(encoding, len), &scratch.buffer[..len])
        }
    })
}

/// Restores a page from its header and its payload, which `read` copies out of the arena. Returns true if `out`
/// contains the page that was sealed under `key`.
pub(crate) fn open(key: PageKey, header: BlobHeader, out: &mut PageBytes, read: impl FnOnce(&mut [u8])) -> bool {
    let len = usize::from(header.len);
    let decoded = match header.encoding {
        raw if raw == Encoding::Raw as u8 && len == PAGE_SIZE => {
            read(out);
            true
        }
        fill64 if fill64 == Encoding::Fill64 as u8 && len == 8 => {
            let mut pattern = [0; 8];
            read(&mut pattern);
            fill(out, u64::from_le_bytes(pattern));
            true
        }
        // The payload is copied before it is decoded, because another process may write to the arena.
        lz4 if lz4 == Encoding::Lz4 as u8 && len <= COMPRESSED_MAX => SCRATCH.with_borrow_mut(|scratch| {
            let payload = &mut scratch.buffer[..len];
            read(payload);
            unlz4::decode(payload, out)
        }),
        zstd if zstd == Encoding::Zstd as u8 && len <= COMPRESSED_MAX => SCRATCH.with_borrow_mut(|scratch| {
            read(&mut scratch.buffer[..len]);
            scratch.unzstd(len, out)
        }),
        _ => false,
    };
    decoded && header.key_check == key_check(key) && checksum(key, out) == header.checksum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RegionKey;
    use ballast_base::PageIdx;
    use ballast_base::wire::VmId;
    use ballast_testkit::pages;
    use proptest::prelude::*;

    const KEY: PageKey = RegionKey { vm: VmId([7; 16]), number: 1 }.page(PageIdx(2));

    fn sealed(bytes: &PageBytes, codec: Codec) -> (BlobHeader, Vec<u8>) {
        let fill = fill_pattern(bytes);
        seal(KEY, bytes, fill, codec, |header, payload| (header, payload.to_vec()))
    }

    #[test]
    fn each_kind_of_page_gets_its_encoding_and_is_restored() {
        let zstd = Codec::Zstd { level: 1 };
        for (page, codec, expected) in [
            (pages::half_compressible(1), Codec::Lz4, Encoding::Lz4),
            (pages::half_compressible(1), zstd, Encoding::Zstd),
            (pages::incompressible(1), Codec::Lz4, Encoding::Raw),
            (pages::incompressible(1), zstd, Encoding::Raw),
            (pages::filled(0x0102_0304_0506_0708), Codec::Lz4, Encoding::Fill64),
        ] {
            let (header, payload) = sealed(&page, codec);
            assert_eq!(header.encoding, expected as u8);
            let mut out = [0; PAGE_SIZE];
            let read = |buffer: &mut [u8]| buffer.copy_from_slice(&payload);
            assert!(open(KEY, BlobHeader::from_bytes(header.to_bytes()), &mut out, read));
            assert!(out == page);
        }
    }

    #[test]
    fn a_page_is_same_filled_only_if_every_word_is() {
        let mut page = pages::filled(7);
        assert_eq!(fill_pattern(&page), Some(7));
        page[PAGE_SIZE - 1] ^= 1;
        assert_eq!(fill_pattern(&page), None);
        page = pages::filled(7);
        page[0] ^= 1;
        assert_eq!(fill_pattern(&page), None);
    }

    proptest! {
        #[test]
        fn any_bytes_may_be_opened_and_are_refused(header: [u8; 16], seed: u64, encoding in 0u8..6, len in 0u16..4200) {
            let mut header = BlobHeader::from_bytes(header);
            (header.encoding, header.len) = (encoding, len);
            let noise = pages::incompressible(seed);
            let mut out = [0; PAGE_SIZE];
            prop_assert!(!open(KEY, header, &mut out, |buffer| buffer.copy_from_slice(&noise[..buffer.len()])));
        }

        #[test]
        fn one_flipped_bit_of_a_blob_is_noticed(seed: u64, flip: prop::sample::Index, zstd: bool) {
            let page = pages::half_compressible(seed);
            let codec = if zstd { Codec::Zstd { level: 1 } } else { Codec::Lz4 };
            let (header, mut payload) = sealed(&page, codec);
            let bit = flip.index(payload.len() * 8);
            payload[bit / 8] ^= 1 << (bit % 8);
            let mut out = [0; PAGE_SIZE];
            let opened = open(KEY, header, &mut out, |buffer| buffer.copy_from_slice(&payload));
            prop_assert!(!opened || out == page, "a flipped bit changed the page unnoticed");
        }
    }
}
