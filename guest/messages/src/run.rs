//! Pages in a row, and their content.
//!
//! Before: an agent has looked at the guest's memory. After: the host knows the pages, and how cheap they are to lose.
//! Units: pages of 4 KiB, numbered by guest-physical address.
//! Promise: a run that was read holds at least one page and ends below the end of physical addresses.

use crate::bytes::{Reader, Refused, Writer};

/// Pages end here: 2^52 bytes of guest-physical addresses.
pub const PAGES_END: u64 = 1 << 40;
/// Bytes of a run in a message.
pub const RUN_BYTES: usize = 16;

/// Contents of pages, the cheapest to lose first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Nothing: the kernel's allocator has them.
    Free = 0,
    /// Bytes that are in a file, too.
    FileClean = 1,
    /// Bytes of a file that are not written yet.
    FileDirty = 2,
    /// A program's memory.
    Anon = 3,
    /// Anything else.
    #[default]
    Other = 4,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Free, Self::FileClean, Self::FileDirty, Self::Anon, Self::Other];
}

/// The coldest level: no access was seen for long.
pub const COLD: u8 = 0;
/// The hottest level.
pub const HOTTEST: u8 = 15;

/// Neighbouring pages with the same kind of content and the same heat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// The first page.
    pub page: u64,
    /// Number of pages.
    pub count: u32,
    /// Their content.
    pub kind: Kind,
    /// Their heat, from [`COLD`] to [`HOTTEST`].
    pub level: u8,
}

impl Run {
    /// Returns the page after the last.
    pub fn end(&self) -> u64 {
        self.page + u64::from(self.count)
    }

    /// Pages without content and heat.
    pub fn of(page: u64, count: u32) -> Self {
        Self { page, count, kind: Kind::Other, level: 0 }
    }

    pub(crate) fn put(writer: &mut Writer, run: &Self) {
        writer.u64(run.page);
        writer.u32(run.count);
        writer.u8(run.kind as u8);
        writer.u8(run.level);
        writer.u16(0);
    }

    pub(crate) fn get(reader: &mut Reader<'_>) -> Result<Self, Refused> {
        let (page, count) = (reader.u64()?, reader.u32()?);
        let (kind, level, _) = (reader.u8()?, reader.u8()?, reader.u16()?);
        // A kind that this reader does not know counts as other.
        let kind = Kind::ALL.get(usize::from(kind)).copied().unwrap_or_default();
        let fits = count > 0 && page < PAGES_END && page + u64::from(count) <= PAGES_END && level <= HOTTEST;
        if fits { Ok(Self { page, count, kind, level }) } else { Err(Refused) }
    }
}

/// Adds a run; extends the last one if it is adjacent and has the same content and heat.
pub fn push(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last)
            if last.end() == run.page
                && (last.kind, last.level) == (run.kind, run.level)
                && last.count.checked_add(run.count).is_some() =>
        {
            last.count += run.count;
        }
        _ => runs.push(run),
    }
}
