//! How often the agent tries, and how much of a CPU it takes.

use std::time::Duration;

/// What is not there (the port, DAMON, a second tier) is looked for again after this time. Beside tiering, two
/// looks at memory are as far apart.
pub const AGAIN: Duration = Duration::from_secs(30);
/// Reports take at most 1/N of a CPU here, and looks as much in the kernel.
pub const CPU_PART: u32 = 20;
