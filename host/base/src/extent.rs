//! An extent: neighbouring bytes of a file that are guest RAM, and what a list of them may not be.
//!
//! Before: a VMM maps pieces of files. After: `extents` makes a region of them.
//! Threads: any; a plain value. Units: bytes of files.
//! Promise: a list that is refused is refused with the number of the extent that is wrong, and why.

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// Most extents of a region. In a message with as many, descriptions take 25 of the 64 KiB that a message may have.
pub const MAX_EXTENTS: usize = 1024;

/// Neighbouring bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Extent {
    /// The file: its number in a list that goes with this.
    pub file: u16,
    /// Where it begins in the file.
    pub offset: Bytes,
    /// Its length.
    pub len: Bytes,
}

impl Extent {
    /// The byte after the last one.
    pub const fn end(&self) -> u64 {
        self.offset.0.saturating_add(self.len.0)
    }
}

/// Why a list of extents is invalid. Caused by the VMM that describes its RAM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtentError {
    /// There is none.
    #[error("it has no extents")]
    None,
    /// There are too many.
    #[error("it has {0} extents; at most {MAX_EXTENTS} are allowed")]
    TooMany(usize),
    /// One is empty, not made of whole pages, or ends where no file can.
    #[error(
        "extent {at}, {} bytes from offset {:#x} of file {}, must be whole pages of {page} bytes, and some",
        extent.len.0, extent.offset.0, extent.file
    )]
    Unaligned {
        /// Its place in the list.
        at: usize,
        /// It.
        extent: Extent,
        /// Bytes of a page of its file.
        page: u64,
    },
    /// One ends where no file can, or all are longer than an address space.
    #[error(
        "extent {at}, {} bytes from offset {:#x} of file {}, is too long",
        extent.len.0, extent.offset.0, extent.file
    )]
    TooLong {
        /// Its place in the list.
        at: usize,
        /// It.
        extent: Extent,
    },
    /// Two have bytes in common.
    #[error("two of its extents overlap at offset {at:#x} of file {file}")]
    Overlap {
        /// The file.
        file: u16,
        /// The first byte that both have.
        at: u64,
    },
    /// One names a file that is not there.
    #[error("extent {at} is of file {file}, and there are {files} files")]
    NoFile {
        /// Its place in the list.
        at: usize,
        /// The file it names.
        file: u16,
        /// How many there are.
        files: usize,
    },
    /// One is not all in its file.
    #[error("extent {at} ends at offset {end:#x} of file {file}, which has {size} bytes only")]
    BeyondEnd {
        /// Its place in the list.
        at: usize,
        /// The file.
        file: u16,
        /// Where it ends.
        end: u64,
        /// Length of the file.
        size: u64,
    },
    /// The extents are not as long as the region.
    #[error("its extents have {extents} bytes, and it has {region}")]
    OtherLength {
        /// Bytes of all extents.
        extents: u64,
        /// Bytes of the region.
        region: u64,
    },
}

/// Check that this extent, the one with this number in its list, is some whole pages of this many bytes.
pub(crate) fn check_pages(at: usize, extent: Extent, page: u64) -> Result<(), ExtentError> {
    let whole = extent.len.0 > 0 && [extent.offset.0, extent.len.0].iter().all(|bytes| bytes.is_multiple_of(page));
    if whole { Ok(()) } else { Err(ExtentError::Unaligned { at, extent, page }) }
}
