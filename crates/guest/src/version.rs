//! What this program writes and reads.
//!
//! Promise: a change of a message raises the version; one that an older reader must not ignore, the least reader too.

/// What this program writes.
pub const VERSION: u16 = 1;
/// The oldest version that may read what this program writes.
pub const LEAST_READER: u16 = 1;
/// The oldest version that this program reads.
pub const OLDEST: u16 = 1;
