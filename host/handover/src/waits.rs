//! How long a process is waited for that is always slow to be examined.
//!
//! Before: the reading of a process's map was late, and was over later. After: the next scan waits longer for it.
//! Threads: any. Units: time.
//! Promise: a process that can be examined within [`LONGEST`] is, at the second try. What a late reading found is not
//! used: the process may have mapped more since, and memory is given up because nobody has it.

use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ballast_sys::process::Process;

/// Longest wait for one process.
const LONGEST: Duration = Duration::from_secs(3);
/// Slow processes that are remembered, the last ones.
const KEPT: usize = 256;

/// Processes that were late, and how long their reading took.
static SLOW: LazyLock<Mutex<Vec<(Process, Duration)>>> = LazyLock::new(Mutex::default);

fn slow() -> MutexGuard<'static, Vec<(Process, Duration)>> {
    SLOW.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The reading of this process was late, and is over.
pub fn was_late(process: Process, took: Duration) {
    let mut slow = slow();
    slow.retain(|(other, _)| *other != process);
    let surplus = (slow.len() + 1).saturating_sub(KEPT);
    slow.drain(..surplus);
    slow.push((process, took));
}

/// Returns how long to wait for a process, `least` or longer.
pub fn wait_for(process: Option<Process>, least: Duration) -> Duration {
    let took = slow().iter().find(|(slow, _)| Some(*slow) == process).map(|(_, took)| *took);
    took.map_or(least, |took| least.max((took * 2).min(LONGEST)))
}

/// Where descriptors are short, many processes cannot be examined: there is one line a scan, before that has failed.
pub(crate) fn say_first(failed: bool, pid: u32, what: &str, error: &std::io::Error) {
    if !failed {
        tracing::warn!(pid, "{what}: {error}");
    }
}
