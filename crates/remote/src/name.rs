//! The keys under which a cluster has pages.
//!
//! Before: a page and its generation. After: bytes for a command, and back for a sweep.
//! Threads: any; pure. Units: pages; a chunk is 512 of them, 2 MiB.
//! Promise: what is in braces is the chunk, so all pages of a chunk are on one node and a run of them is one command;
//! a key is read back only if we would have written it just so.
//!
//! `b{VM:region:chunk}page:generation`, in hexadecimal; the page is counted in its chunk. `bl{VM}` is the VM's lease.

use ballast_base::PageIdx;
use ballast_base::store::{Handle, PageKey, RegionKey};
use ballast_base::wire::VmId;

/// Pages of a chunk.
pub const CHUNK_PAGES: u64 = 512;

/// The key of this page in this generation.
pub fn key(page: PageKey, generation: Handle) -> Vec<u8> {
    let (chunk, within) = (page.page.0 / CHUNK_PAGES, page.page.0 % CHUNK_PAGES);
    let PageKey { region, .. } = page;
    format!("b{{{}:{:x}:{chunk:x}}}{within:x}:{:x}", region.vm, region.number, generation.bits()).into_bytes()
}

/// Which page of which generation this key names; `None` if it is none of ours.
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

/// What all keys of a VM's pages match, and no other VM's.
pub fn pattern(vm: VmId) -> Vec<u8> {
    format!("b{{{vm}:*").into_bytes()
}

/// What the keys of all pages of all VMs match.
pub const EVERY_PAGE: &[u8] = b"b{*";

/// The key of a VM's lease.
pub fn lease(vm: VmId) -> Vec<u8> {
    format!("bl{{{vm}}}").into_bytes()
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
        fn nothing_else_is_a_key(bytes: Vec<u8>, text in "b?\\{[0-9a-f:+]{0,40}\\}[0-9a-f:]{0,6}") {
            prop_assert_eq!(parse(&bytes), None);
            if let Some((page, generation)) = parse(text.as_bytes()) {
                prop_assert_eq!(key(page, generation), text.into_bytes());
            }
        }
    }
}
