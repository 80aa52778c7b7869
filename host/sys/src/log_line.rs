//! Lines for people on a descriptor that may be full, closed or broken.
//!
//! Before: a thread has a line to write, and a guest may wait for the thread. After: the line is written, or lost.
//! Threads: any. Units: bytes. Promise: nobody waits, gets a signal or panics: neither for a pipe that nobody reads,
//! nor for a disk that is full. A line that cannot be written at once is lost.

use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;

use ballast_base::PAGE_SIZE;
use ballast_base::text::shown;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};

use crate::lock::Lock;

/// A pipe that is ready takes at least a page.
const LONGEST: usize = PAGE_SIZE;

/// One thread writes at a time: a second one would find the pipe ready, too, and then wait.
static WRITES: Mutex<()> = Mutex::new(());

/// Write this line, without its end, if that is possible at once. Control characters are escaped. The line is cut after
/// a page, at a character border.
pub fn put(to: BorrowedFd<'_>, line: &str) {
    let mut line = cut_at(shown(line).into_owned(), LONGEST - 1);
    line.push('\n');
    let _alone = WRITES.locked();
    if !may_wait(to) || is_ready(to) {
        let _ = rustix::io::write(to, line.as_bytes());
    }
}

fn may_wait(to: BorrowedFd<'_>) -> bool {
    let kind = fstat(to).map(|stat| FileType::from_raw_mode(stat.st_mode));
    matches!(kind, Ok(FileType::Fifo | FileType::Socket)) || to.is_terminal()
}

fn is_ready(to: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(to, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // A pipe without readers is ready, but a write to it raises SIGPIPE.
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents() == PollFlags::OUT
}

/// The text, cut at a character border.
pub fn cut_at(mut text: String, longest: usize) -> String {
    let mut end = text.len().min(longest);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

/// Standard error as a log: each write is a line, as [`put`] writes it.
#[derive(Clone, Copy, Debug)]
pub struct StandardError;

impl Write for StandardError {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        put(io::stderr().as_fd(), String::from_utf8_lossy(line).trim_end_matches('\n'));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    #[test]
    fn a_line_that_a_full_pipe_does_not_take_is_lost_and_nobody_waits() {
        let (mut reader, mut writer) = std::io::pipe().expect("a pipe");
        rustix::io::ioctl_fionbio(&writer, true).expect("FIONBIO");
        while writer.write(&[0; PAGE_SIZE]).is_ok() {}
        rustix::io::ioctl_fionbio(&writer, false).expect("FIONBIO");
        put(writer.as_fd(), "lost");
        let mut filled = vec![0; rustix::io::ioctl_fionread(&reader).expect("FIONREAD") as usize];
        reader.read_exact(&mut filled).expect("read");
        put(writer.as_fd(), &"é".repeat(PAGE_SIZE));
        put(writer.as_fd(), "and more");
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("characters are whole");
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("éé") && lines[0].len() < PAGE_SIZE, "{}", lines[0].len());
        assert_eq!(lines[1..], ["and more"]);
    }

    #[test]
    fn a_line_for_a_pipe_that_nobody_can_read_any_more_is_no_signal() {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        put(writer.as_fd(), "lost");
    }
}
