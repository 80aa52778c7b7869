//! Finds threads in uninterruptible sleep, and the kernel function in which each sleeps.
//!
//! Before: a VM waits for a thread. After: an operator learns which thread it is, and which process of the VM
//! causes it.
//! Threads: any; a read of these files takes no lock of the other process.
//! Promise: a hint for people. Unreadable values are left out.

use std::fmt::Write;

use rustix::path::Arg;

/// Name of the event that a VM waits for a thread in uninterruptible sleep.
pub const STUCK: &str = "vm-stuck";

/// A thread in uninterruptible sleep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sleeper {
    /// Its thread id.
    pub thread: u32,
    name: String,
    /// The kernel function in which it sleeps; empty if we may not read that.
    at: String,
    /// Its CPU time: while that does not change, the thread sleeps.
    pub ran_ns: u64,
}

impl Sleeper {
    /// This thread of this process, if it is in uninterruptible sleep.
    pub fn find(pid: u32, thread: u32) -> Option<Self> {
        let read = |what: &str| std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/{what}")).ok();
        let stat = read("stat")?;
        let (name, rest) = stat.split_once('(')?.1.rsplit_once(") ")?;
        rest.starts_with('D').then_some(())?;
        let ran_ns = read("schedstat").and_then(|text| text.split_ascii_whitespace().next()?.parse().ok());
        let at = read("wchan").filter(|at| at != "0").unwrap_or_default();
        Some(Self { thread, name: name.to_owned(), at, ran_ns: ran_ns.unwrap_or_default() })
    }

    /// Whether it waits for a userfault: then it is not the cause.
    fn is_guest(&self) -> bool {
        self.at.starts_with("handle_userfault")
    }

    fn text(&self) -> String {
        let at = if self.at.is_empty() { "the kernel" } else { &self.at };
        format!("thread {} ({}) sleeps in {at}", self.thread, self.name)
    }
}

/// Why a VM waits for these threads of an engine, as far as another process can tell. `views` are the VM's processes.
pub fn reason(sleepers: &[Sleeper], engine: u32, views: &[u32]) -> String {
    const MOST: usize = 5;
    let mut text = format!("of engine {engine}");
    for sleeper in sleepers.iter().take(MOST) {
        let _ = write!(text, ", {}", sleeper.text());
    }
    for pid in views {
        let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        let numbers = threads.filter_map(|thread| thread.ok()?.file_name().as_str().ok()?.parse().ok());
        let sleepers: Vec<String> = numbers
            .filter_map(|thread| Sleeper::find(*pid, thread).filter(|sleeper| !sleeper.is_guest()))
            .take(MOST)
            .map(|sleeper| sleeper.text())
            .collect();
        if !sleepers.is_empty() {
            let what = sleepers.join(", ");
            let _ = write!(text, "; it may want the memory map (mmap_lock) of process {pid}, of which {what}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeping_threads_are_named_with_their_function_as_far_as_it_can_be_read() {
        let sleeper = |at: &str| Sleeper { thread: 7, name: "orders".into(), at: at.into(), ran_ns: 1 };
        assert!(sleeper("handle_userfault").is_guest() && !sleeper("__folio_lock").is_guest());
        let text = |at| reason(&[sleeper(at)], 6, &[u32::MAX]);
        assert_eq!(text("x"), "of engine 6, thread 7 (orders) sleeps in x");
        assert_eq!(text(""), "of engine 6, thread 7 (orders) sleeps in the kernel");
    }
}
