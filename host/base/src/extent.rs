//! An extent: neighbouring bytes of a file that are guest RAM, and the checks of a list of extents.
//!
//! Before: a VMM maps pieces of files. After: `extents` makes a region of them.
//! Threads: any; a plain value. Units: bytes of files.
//! Promise: a list that is refused is refused with the number of the extent that is wrong, and why.

use serde::{Deserialize, Serialize};

use crate::{Bytes, Invalid};

/// Most extents of a region. In a message with as many, descriptions take 25 of the 64 KiB that a message may have.
pub const MAX_EXTENTS: usize = 1024;

/// Neighbouring bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Extent {
    /// The file, by its number in the list that accompanies the extents.
    pub file: u16,
    /// Where it begins in the file.
    pub offset: Bytes,
    /// Its length.
    pub len: Bytes,
}

impl Extent {
    /// Offset of the byte after the last one.
    pub const fn end(&self) -> u64 {
        self.offset.0.saturating_add(self.len.0)
    }
}

/// Check that this extent consists of whole pages of `page` bytes. `at`, its number in its list, is for the error.
pub(crate) fn check_pages(at: usize, extent: Extent, page: u64) -> Result<(), Invalid> {
    let whole = extent.len.0 > 0 && [extent.offset.0, extent.len.0].iter().all(|bytes| bytes.is_multiple_of(page));
    let (len, offset, file) = (extent.len.0, extent.offset.0, extent.file);
    match whole {
        true => Ok(()),
        false => Err(format!(
            "extent {at}, {len} bytes from offset {offset:#x} of file {file}, must be whole pages of {page} bytes, and \
             some"
        )
        .into()),
    }
}
