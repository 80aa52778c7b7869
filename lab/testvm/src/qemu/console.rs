//! The serial console: copies it to a file, and finds the marker words that /init prints.
//!
//! Before: QEMU writes the console to standard output. After: `wait_ready`, `wait_run` and `answer` read [`Said`].
//! Threads: one reader per guest; waiters sleep on `changed`.
//! Units: lines.
//! Promise: `closed` is set only after every written line has been read.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::process::ChildStdout;
use std::sync::{Condvar, Mutex, MutexGuard};

use ballast_sys::lock::Lock;

/// Console lines kept for error messages.
pub(super) const TAIL_LINES: usize = 30;

#[derive(Debug, Default)]
pub(super) struct Console {
    said: Mutex<Said>,
    pub(super) changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct Said {
    pub(super) tail: VecDeque<String>,
    /// `BALLAST-READY` was among the lines.
    pub(super) ready: bool,
    pub(super) exit: Option<i32>,
    /// The text after `BALLAST-SAYS` in each such line that was not fetched yet.
    pub(super) answers: VecDeque<String>,
    /// The other end of the console is closed.
    pub(super) closed: bool,
    /// The process had ended at the last check, and no line has come since.
    pub(super) quiet_since_death: bool,
}

impl Console {
    pub(super) fn lock(&self) -> MutexGuard<'_, Said> {
        self.said.locked()
    }

    pub(super) fn follow(&self, from: ChildStdout, mut to: File) {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        loop {
            line.clear();
            let more = matches!(from.read_until(b'\n', &mut line), Ok(read) if read > 0);
            let _ = to.write_all(&line);
            let mut said = self.lock();
            if more {
                said.hear(String::from_utf8_lossy(&line).trim_end());
            } else {
                said.closed = true;
            }
            drop(said);
            self.changed.notify_all();
            if !more {
                return;
            }
        }
    }
}

impl Said {
    fn hear(&mut self, line: &str) {
        self.quiet_since_death = false;
        self.ready |= line.contains("BALLAST-READY");
        if let Some((_, rest)) = line.split_once("BALLAST-EXIT ") {
            self.exit = rest.split_whitespace().next().and_then(|status| status.parse().ok());
        }
        if let Some((_, answer)) = line.split_once("BALLAST-SAYS ") {
            self.answers.push_back(answer.to_owned());
        }
        self.tail.push_back(line.to_string());
        if self.tail.len() > TAIL_LINES {
            self.tail.pop_front();
        }
    }
}
