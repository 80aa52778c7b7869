//! The keys under which a cluster stores pages.
//!
//! Before: a page and its generation. After: the bytes of a key; a sweep parses them back.
//! Threads: any; pure. Units: pages; a chunk is 512 of them, 2 MiB.
//! Promise: the hash tag (the part in braces) is the chunk. So all pages of a chunk are on one node, and one command
//! covers a run of them. Only a key that has exactly the form of `key` is parsed.
//!
//! `b{VM:region:chunk}page:generation`, in hexadecimal; the page is its index in the chunk. `bl{VM}` is the VM's lease;
//! `bl{cluster:0}` and so on have the cluster's identity.

use ballast_base::PageIdx;
use ballast_base::store::{Handle, PageKey, RegionKey};
use ballast_base::wire::VmId;

pub const CHUNK_PAGES: u64 = 512;

pub fn key(page: PageKey, generation: Handle) -> Vec<u8> {
    let (chunk, within) = (page.page.0 / CHUNK_PAGES, page.page.0 % CHUNK_PAGES);
    let PageKey { region, .. } = page;
    format!("b{{{}:{:x}:{chunk:x}}}{within:x}:{:x}", region.vm, region.number, generation.bits()).into_bytes()
}

/// Returns the keys of these pages. Parts of a key that equal those of the previous key are not formatted again,
/// because sending a page takes a few microseconds only.
pub fn keys(pages: impl Iterator<Item = (PageKey, Handle)>) -> Vec<Vec<u8>> {
    let (mut of, mut before, mut after) = (None, Vec::new(), Vec::new());
    let one = |(page, generation): (PageKey, Handle)| {
        let (chunk, within) = (page.page.0 / CHUNK_PAGES, (page.page.0 % CHUNK_PAGES) as u32);
        if of != Some((page.region, chunk, generation)) {
            let name = key(page.region.page(PageIdx(chunk * CHUNK_PAGES)), generation);
            let digit = name.iter().position(|byte| *byte == b'}').map_or(0, |brace| brace + 1);
            (before, after) = (name[..digit].to_vec(), name[digit + 1..].to_vec());
            of = Some((page.region, chunk, generation));
        }
        let mut name = Vec::with_capacity(before.len() + 3 + after.len());
        name.extend_from_slice(&before);
        let digits = [8, 4, 0].map(|shift| b"0123456789abcdef"[(within >> shift & 15) as usize]);
        name.extend_from_slice(&digits[digits.iter().position(|digit| *digit != b'0').unwrap_or(2)..]);
        name.extend_from_slice(&after);
        name
    };
    pages.map(one).collect()
}

/// Returns the page and the generation that this key names, or `None` if it is not the key of a page.
pub fn parse(bytes: &[u8]) -> Option<(PageKey, Handle)> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (tag, rest) = text.strip_prefix("b{")?.split_once('}')?;
    let (within, generation) = rest.split_once(':')?;
    let mut parts = tag.split(':');
    let (vm, region, chunk) = (parts.next()?, parts.next()?, parts.next()?);
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let page = number(chunk)?.checked_mul(CHUNK_PAGES)?.checked_add(number(within)?)?;
    let region = RegionKey { vm: vm_id(vm)?, number: u32::from_str_radix(region, 16).ok()? };
    let found = (region.page(PageIdx(page)), Handle::new(number(generation)?)?);
    (key(found.0, found.1) == bytes).then_some(found)
}

fn vm_id(text: &str) -> Option<VmId> {
    let number = u128::from_str_radix(text, 16).ok()?;
    (text.len() == 32).then(|| VmId(number.to_be_bytes()))
}

/// Returns a pattern that matches the keys of all pages of this VM, and of no other VM.
pub fn pattern(vm: VmId) -> Vec<u8> {
    format!("b{{{vm}:*").into_bytes()
}

/// Pattern that matches the keys of all pages of all VMs.
pub const EVERY_PAGE: &[u8] = b"b{*";

pub fn lease(vm: VmId) -> Vec<u8> {
    format!("bl{{{vm}}}").into_bytes()
}

pub fn identity(number: usize) -> Vec<u8> {
    format!("bl{{cluster:{number:x}}}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::slot_of;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_key_says_its_page_and_a_chunk_is_one_slot(
            vm: [u8; 16],
            number: u32,
            page in 0u64..1 << 40,
            bits in 0..=Handle::MAX,
        ) {
            let page = RegionKey { vm: VmId(vm), number }.page(PageIdx(page));
            let generation = Handle::new(bits).expect("40 bits");
            let bytes = key(page, generation);
            prop_assert_eq!(parse(&bytes), Some((page, generation)));
            prop_assert!(bytes.starts_with(pattern(page.region.vm).strip_suffix(b"*").expect("a pattern")));
            let first = PageKey { page: PageIdx(page.page.0 / CHUNK_PAGES * CHUNK_PAGES), ..page };
            prop_assert_eq!(slot_of(&key(first, generation)), slot_of(&bytes));
        }

        #[test]
        fn keys_that_are_made_together_are_those_that_are_made_alone(
            pages in proptest::collection::vec((0u64..2000, 0u32..2, 1u64..3), 0..40)
        ) {
            let pages = pages.into_iter().map(|(page, number, bits)| {
                let region = RegionKey { vm: VmId([7; 16]), number };
                (region.page(PageIdx(page)), Handle::new(bits).expect("40 bits"))
            });
            let alone: Vec<Vec<u8>> = pages.clone().map(|(page, generation)| key(page, generation)).collect();
            prop_assert_eq!(keys(pages), alone);
        }

        #[test]
        fn bytes_that_are_no_key_are_refused(bytes: Vec<u8>, text in "b?\\{[0-9a-f:+]{0,40}\\}[0-9a-f:]{0,6}") {
            prop_assert_eq!(parse(&bytes), None);
            if let Some((page, generation)) = parse(text.as_bytes()) {
                prop_assert_eq!(key(page, generation), text.into_bytes());
            }
        }
    }
}
