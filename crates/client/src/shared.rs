//! State shared by VMM threads and the service thread, and the messages to the operator.
//!
//! Before: `builder` has made the userfaultfds. After: `client` and `service` use it as long as the process lives.
//! Threads: any. Units: in the types. Promise: locks are taken in the order link, table; `control` is apart.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ballast_base::PAGE_SIZE;
use ballast_sys::Uffd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::control::ControlSocket;
use crate::link::Link;
use crate::regions::Table;

pub(crate) type FailStop = Arc<dyn Fn(&str) + Send + Sync>;

/// Timeouts and pauses of the client. Tests set shorter ones.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// From the attach message, or new RAM, to its reply. If a part of that RAM is far, an engine must serve faults
    /// first, possibly the one that replaces a hung engine.
    pub handshake: Duration,
    /// From a request or a discard to its reply.
    pub answer: Duration,
    /// Pause before the first reconnect; doubles up to the last.
    pub backoff_first: Duration,
    /// Longest pause between reconnects.
    pub backoff_last: Duration,
    /// Pause after a refused resume.
    pub refused_pause: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(30),
            answer: Duration::from_secs(5),
            backoff_first: Duration::from_millis(10),
            backoff_last: Duration::from_millis(200),
            refused_pause: Duration::from_secs(2),
        }
    }
}

/// State shared by VMM threads and the service thread. Locks are taken in the order link, table; `control` is separate.
pub(crate) struct Shared {
    pub socket: PathBuf,
    pub name: String,
    pub limit: Option<u64>,
    pub vmm: String,
    /// In the same order at each attach: a page belongs to one of them permanently.
    pub uffds: Vec<Uffd>,
    pub features: u64,
    pub table: Mutex<Table>,
    pub link: Link,
    pub control: ControlSocket,
    pub fail_stop: Mutex<FailStop>,
    pub timing: Timing,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("name", &self.name).field("socket", &self.socket).finish_non_exhaustive()
    }
}

/// Print a line for the operator on the VMM's standard error. It is lost if it cannot be written at once: a pipe that
/// nobody reads must not stop a guest.
#[doc(hidden)]
pub fn announce(text: &str) {
    put_line(std::io::stderr().as_fd(), text);
}

fn put_line(to: BorrowedFd<'_>, text: &str) {
    /// A pipe that is ready takes at least a page.
    const LONGEST: usize = PAGE_SIZE;
    let mut line = cut_at(format!("ballast: {text}"), LONGEST - 1);
    line.push('\n');
    let mut fds = [PollFd::from_borrowed_fd(to, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // A pipe without readers is ready, but a write to it raises SIGPIPE.
    if poll(&mut fds, Some(&now)).is_ok() && fds[0].revents() == PollFlags::OUT {
        let _ = rustix::io::write(to, line.as_bytes());
    }
}

/// The longest text that fits into a message, cut at a character border.
pub(crate) fn cut(text: String) -> String {
    cut_at(text, 256)
}

fn cut_at(mut text: String, longest: usize) -> String {
    let mut end = text.len().min(longest);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_line_that_a_full_pipe_does_not_take_is_lost_and_nobody_waits() {
        let (mut reader, mut writer) = std::io::pipe().expect("a pipe");
        rustix::io::ioctl_fionbio(&writer, true).expect("FIONBIO");
        while writer.write(&[0; PAGE_SIZE]).is_ok() {}
        rustix::io::ioctl_fionbio(&writer, false).expect("FIONBIO");
        put_line(writer.as_fd(), "lost");
        let mut filled = vec![0; rustix::io::ioctl_fionread(&reader).expect("FIONREAD") as usize];
        reader.read_exact(&mut filled).expect("read");
        put_line(writer.as_fd(), &"é".repeat(PAGE_SIZE));
        put_line(writer.as_fd(), "and more");
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("characters are whole");
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("ballast: éé") && lines[0].len() < PAGE_SIZE, "{}", lines[0].len());
        assert_eq!(lines[1..], ["ballast: and more"]);
    }

    #[test]
    fn a_line_for_a_pipe_that_nobody_can_read_any_more_is_no_signal() {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        put_line(writer.as_fd(), "lost");
    }
}
