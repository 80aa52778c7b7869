//! The agent's pauses, and its share of a CPU.

use std::time::Duration;

/// A missing port, DAMON or second tier is looked for this often. With tiering, two looks at memory are this far apart.
pub const AGAIN: Duration = Duration::from_secs(30);
/// Reports take at most 1/N of a CPU here, and looks as much in the kernel.
pub const CPU_PART: u32 = 20;
