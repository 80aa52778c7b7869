//! The backend that stands in for memory of the pool: a memfd with huge pages of the same size.
//!
//! Before: `command_line` has found a backend of guest RAM. After: the preload library maps the pool's memory in place
//! of the memfd. Promise: pure.

use ballast_base::Invalid;
use ballast_base::pool::Pages;

use super::options::Opt;
use super::shared::is_shared;

pub(super) fn check_stand_in(object: &Opt, pages: Pages) -> Result<(), Invalid> {
    let is_of = |size| is_size(size, pages);
    let is_huge = object.is_on("hugetlb") && object.get("hugetlbsize").map_or(pages != Pages::Gib, is_of);
    match object.head == "memory-backend-memfd" && is_huge && is_shared(object) {
        true => Ok(()),
        false => Err(format!(
            "RAM backend {} ({}): memory of the pool takes the place of huge pages; write \
             memory-backend-memfd,...,share=on,hugetlb=on,hugetlbsize={}, or leave the backend out, and it is added",
            object.get("id").unwrap_or_default(),
            object.head,
            huge_size(pages)
        )
        .into()),
    }
}

/// The size of the huge pages that stand in for these, as an option of QEMU.
pub(super) fn huge_size(pages: Pages) -> &'static str {
    if pages == Pages::Gib { "1G" } else { "2M" }
}

/// Whether this is that size, in any of QEMU's spellings.
pub(super) fn is_size(size: &str, pages: Pages) -> bool {
    ballast_adopt::vmm::size(size, 1) == Some(pages.size().0)
}
