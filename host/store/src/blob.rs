//! A page as bytes that can leave the host: header and compressed payload, for stores on other machines.
//!
//! Before: a store on another machine has a page to send, or received bytes. After: it has the bytes, or the page.
//! Threads: any. Units: a blob is at most [`BLOB_MAX`] bytes.
//! Promise: [`open`] accepts any bytes, and returns true only if they are the page that was sealed under that key *and*
//! handle. An older copy of a page is refused like a damaged one.

use ballast_base::PAGE_SIZE;
use ballast_base::wire::VmId;

use crate::codec::{self, BlobHeader, Codec, HEADER_BYTES};
use crate::{Handle, PageBytes, PageKey, RegionKey};

/// Bytes of the largest blob.
pub const BLOB_MAX: usize = HEADER_BYTES + PAGE_SIZE;

/// Mixes the handle into the VM's id, which is 128 random bits, so that the checksum's seed depends on the handle.
fn sealed_as(key: PageKey, handle: Handle) -> PageKey {
    let VmId(mut id) = key.region.vm;
    id.iter_mut().zip(handle.bits().to_le_bytes()).for_each(|(id, bits)| *id ^= bits);
    RegionKey { vm: VmId(id), ..key.region }.page(key.page)
}

/// Appends the blob of a page.
pub fn seal(key: PageKey, handle: Handle, bytes: &PageBytes, codec: Codec, blob: &mut Vec<u8>) {
    codec::seal(sealed_as(key, handle), bytes, codec::fill_pattern(bytes), codec, |header, payload| {
        blob.extend_from_slice(&header.to_bytes());
        blob.extend_from_slice(payload);
    });
}

/// Appends the blob of a page, of which another store of this crate has the blob `kept`, read together with `bytes`
/// ([`NearStore::get_blob`](crate::NearStore::get_blob)). The payload is copied, and the checksum becomes that of this
/// key and handle. With an empty `kept`, the page is compressed.
pub fn reseal(key: PageKey, handle: Handle, bytes: &PageBytes, kept: &[u8], codec: Codec, blob: &mut Vec<u8>) {
    let Some((kept, payload)) = kept.split_first_chunk() else { return seal(key, handle, bytes, codec, blob) };
    let encoding = BlobHeader::from_bytes(*kept).encoding;
    let header = codec::header(sealed_as(key, handle), bytes, encoding, payload.len());
    blob.extend_from_slice(&header.to_bytes());
    blob.extend_from_slice(payload);
}

/// Restores the page. If this returns false, the contents of `out` are unspecified.
pub fn open(key: PageKey, handle: Handle, blob: &[u8], out: &mut PageBytes) -> bool {
    let Some((header, payload)) = blob.split_first_chunk::<HEADER_BYTES>() else { return false };
    let header = BlobHeader::from_bytes(*header);
    payload.len() == usize::from(header.len)
        && codec::open(sealed_as(key, handle), header, out, |buffer| buffer.copy_from_slice(payload))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::PageIdx;
    use ballast_testkit::pages;
    use proptest::prelude::*;

    const KEY: PageKey = RegionKey { vm: VmId([7; 16]), number: 1 }.page(PageIdx(2));

    fn handle(bits: u64) -> Handle {
        Handle::new(bits).expect("40 bits")
    }

    proptest! {
        #[test]
        fn a_page_is_restored_only_under_its_own_key_and_handle(seed: u64, bits in 1..Handle::MAX, zstd: bool) {
            let (page, mut blob, mut out) = (pages::mixed(seed), Vec::new(), [0; PAGE_SIZE]);
            let codec = if zstd { Codec::Zstd { level: 1 } } else { Codec::Lz4 };
            seal(KEY, handle(bits), &page, codec, &mut blob);
            prop_assert!(blob.len() <= BLOB_MAX);
            prop_assert!(open(KEY, handle(bits), &blob, &mut out));
            prop_assert!(out == page);
            let other = KEY.region.page(PageIdx(3));
            prop_assert!(!open(KEY, handle(bits ^ 1), &blob, &mut out) && !open(other, handle(bits), &blob, &mut out));
        }

        #[test]
        fn a_resealed_page_keeps_its_payload_and_opens_only_under_its_new_key_and_handle(
            seed: u64, bits in 1..Handle::MAX, zstd: bool
        ) {
            let (page, mut out) = (pages::mixed(seed), [0; PAGE_SIZE]);
            let (mut kept, mut blob) = (Vec::new(), b"before".to_vec());
            let codec = if zstd { Codec::Zstd { level: 1 } } else { Codec::Lz4 };
            let here = KEY.region.page(PageIdx(3));
            seal(here, handle(1), &page, codec, &mut kept);
            reseal(KEY, handle(bits), &page, &kept, Codec::Lz4, &mut blob);
            prop_assert!(blob.starts_with(b"before"));
            let blob = &blob[6..];
            prop_assert_eq!(&blob[HEADER_BYTES..], &kept[HEADER_BYTES..]);
            prop_assert!(open(KEY, handle(bits), blob, &mut out) && out == page);
            prop_assert!(!open(KEY, handle(bits ^ 1), blob, &mut out) && !open(here, handle(bits), blob, &mut out));
            let (mut whole, mut made) = (Vec::new(), Vec::new());
            reseal(KEY, handle(bits), &page, &[], codec, &mut made);
            seal(KEY, handle(bits), &page, codec, &mut whole);
            prop_assert_eq!(made, whole);
        }

        #[test]
        fn any_bytes_may_be_opened_and_are_refused(mut blob: Vec<u8>, encoding in 0u8..6) {
            blob.get_mut(14).into_iter().for_each(|byte| *byte = encoding);
            prop_assert!(!open(KEY, handle(1), &blob, &mut [0; PAGE_SIZE]));
        }
    }
}
