//! Versions that this program writes and reads.
//!
//! Promise: a changed message raises the version; a change that older readers must not ignore, the least reader, too.

/// The version that this program writes.
pub const VERSION: u16 = 1;
/// The oldest version that may read what this program writes.
pub const LEAST_READER: u16 = 1;
/// The oldest version that this program reads.
pub const OLDEST: u16 = 1;
