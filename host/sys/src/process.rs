//! Processes and threads in `/proc`, and whether one has ended.
//!
//! Before: the caller has a pid, or the number of a thread. After: it knows which process that is, and what it does.
//! Threads: any; no lock of the other process is taken, but its `mmap_lock` for its command line.
//! Promise: if the kernel could not tell, the result is an error and never a "no".

use std::fs::File;
use std::io::{self, Read};

use rustix::io::Errno;

/// A process, identified by its start time beside its pid, which may be reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Process {
    /// The process.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start: u64,
}

impl Process {
    /// The process that has this pid now; `None` if there is none.
    pub fn find(pid: u32) -> io::Result<Option<Self>> {
        let Some(stat) = read_stat(&format!("/proc/{pid}/stat"))? else { return Ok(None) };
        let start = field(&stat, 19).ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat has no start time")))?;
        Ok(Some(Self { pid, start }))
    }

    /// This process.
    pub fn this() -> io::Result<Self> {
        Self::find(std::process::id())?.ok_or_else(|| io::Error::other("/proc does not show this process"))
    }

    /// Has its first thread ended, or is it exiting? Then all other threads have ended, or will.
    pub fn is_dying(self) -> bool {
        matches!(is_over(&format!("/proc/{}/stat", self.pid)), Ok(true))
    }

    /// Is there no process of this number, or one that is ending?
    pub fn has_ended(pid: u32) -> bool {
        matches!(is_over(&format!("/proc/{pid}/stat")), Ok(true))
    }
}

/// Does the process with this pid have memory? One that has begun to end has none, before its descriptors close. False
/// also if there is no such process, or the kernel could not tell.
pub fn has_memory(pid: u32) -> bool {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm"));
    statm.is_ok_and(|text| text.split_ascii_whitespace().next().is_some_and(|size| size != "0"))
}

/// The words with which a process was started, with a zero byte after each. The first 1 MiB, because a process may name
/// any part of its memory as its command line.
///
/// # Errors
/// There is no such process, or the kernel could not tell.
pub fn command_line(pid: u32) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    File::open(format!("/proc/{pid}/cmdline"))?.take(1 << 20).read_to_end(&mut line)?;
    Ok(line)
}

/// A thread of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Thread {
    /// The process.
    pub pid: u32,
    /// The thread.
    pub thread: u32,
}

impl Thread {
    fn stat(self) -> String {
        format!("/proc/{}/task/{}/stat", self.pid, self.thread)
    }

    /// Is it gone, or has it left its last system call?
    pub fn is_over(self) -> io::Result<bool> {
        is_over(&self.stat())
    }

    /// Is it in an uninterruptible sleep (`D`), or gone? If it is killed meanwhile, it does nothing after that sleep.
    pub fn sleeps(self) -> io::Result<bool> {
        let stat = read_stat(&self.stat())?;
        Ok(stat.is_none_or(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('D'))))
    }
}

/// The `stat` of a process or thread; `None` if it is gone.
fn read_stat(path: &str) -> io::Result<Option<String>> {
    match std::fs::read(path) {
        // The name in it may be any bytes.
        Ok(stat) => Ok(Some(String::from_utf8_lossy(&stat).into_owned())),
        // The process ended before the file was opened, or before it was read.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A field of a `stat`, counted from the state. The state follows a name that may contain anything, including spaces
/// and parentheses; the last closing one ends it.
fn field(stat: &str, number: usize) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(number)?.parse().ok()
}

/// Is the thread with this `stat` gone, or has it left its last system call?
fn is_over(path: &str) -> io::Result<bool> {
    const EXITING: u64 = 0x4;
    /// `PF_SIGNALED`: a signal has killed it, and it will not return from the kernel.
    const SIGNALED: u64 = 0x400;
    let Some(stat) = read_stat(path)? else { return Ok(true) };
    let is_dead = stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X']));
    Ok(is_dead || field(&stat, 6).is_some_and(|flags| flags & (EXITING | SIGNALED) != 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Anon;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    #[test]
    fn of_a_command_line_that_is_much_memory_only_the_start_is_read() {
        const MIB: usize = 1 << 20;
        let memory = Anon::new(16 * MIB).expect("memory");
        let ends =
            [(libc::PR_SET_MM_ARG_START, memory.addr()), (libc::PR_SET_MM_ARG_END, memory.addr() + memory.len() - MIB)];
        for (what, at) in ends {
            let (what, none) = (libc::c_long::from(what), 0 as libc::c_long);
            // SAFETY: this says where `/proc` finds the command line, and nothing of this program reads that.
            let set = unsafe { libc::prctl(libc::PR_SET_MM, what, at, none, none) };
            if set != 0 {
                return ballast_testkit::skip("root", io::Error::last_os_error());
            }
        }
        assert_eq!(std::fs::read("/proc/self/cmdline").expect("read").len(), 15 * MIB);
        assert_eq!(command_line(std::process::id()).expect("read").len(), MIB);
    }

    #[test]
    fn a_process_whose_name_is_no_text_is_found() {
        let script = r#"printf 'a) \377\n' > /proc/$$/comm; echo; read line"#;
        let mut child =
            Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it has its name");
        let name = std::fs::read(format!("/proc/{}/comm", child.id())).expect("comm");
        assert!(String::from_utf8(name).is_err(), "it is no text");
        let found = Process::find(child.id()).expect("readable").expect("running");
        assert_eq!(found.pid, child.id());
        drop(child.stdin.take());
        child.wait().expect("wait");
    }
}
