//! Regions of a resumed VM that no process has brought: they were unplugged while no keeper ran, or another process
//! maps them.
//!
//! Before: a process of a VM attached again without all the regions of the state file. After: the missing regions are
//! there, or no process maps them any more. Only then does the engine get the VM: its recovery needs all or none of
//! them.
//! Threads: the search reads `/proc` on a thread of its own, because a read there may never end.
//! Promise: the keeper waits for a region that some process maps; guests wait too, as they do without a keeper. If the
//! region is still missing after [`LONGEST_WAIT`], the VM is served without it, and the state file records that its
//! pages are lost.

use std::collections::HashSet;
use std::sync::mpsc::{self, TryRecvError};
use std::time::{Duration, Instant};

use ballast_handover::mappers;
use ballast_sys::memfd::FileId;
use ballast_sys::priority::run_first;

const EVERY: Duration = Duration::from_secs(1);
/// Longest wait for a process. A client reconnects several times a second; a process that does not may be stopped, or
/// never was a client.
pub const LONGEST_WAIT: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub struct Search {
    /// Time in which clients could find the keeper: time while the keeper or the host stood still does not count.
    waited: Duration,
    asked: Instant,
    scanned: Instant,
    answer: Option<mpsc::Receiver<Seen>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    Waiting,
    /// No process maps the regions: they were unplugged.
    Nobody,
    /// A process may map them, and has not attached for [`LONGEST_WAIT`].
    NobodyCame,
}

impl Search {
    pub fn begin(files: HashSet<FileId>) -> Self {
        let now = Instant::now();
        Self { waited: Duration::ZERO, asked: now, scanned: now, answer: scan(files) }
    }

    /// The state of the search. `files` are those that are still missing.
    pub fn ask(&mut self, files: impl FnOnce() -> HashSet<FileId>) -> Found {
        let now = Instant::now();
        self.waited += now.duration_since(self.asked).min(EVERY);
        self.asked = now;
        match self.answer.as_ref().map(mpsc::Receiver::try_recv) {
            Some(Ok(Seen::Nobody)) => return Found::Nobody,
            Some(Err(TryRecvError::Empty)) => {}
            Some(Ok(Seen::Somebody) | Err(TryRecvError::Disconnected)) | None => {
                self.answer = None;
                if self.scanned.elapsed() > EVERY {
                    self.scanned = Instant::now();
                    self.answer = scan(files());
                }
            }
        }
        if self.waited > LONGEST_WAIT { Found::NobodyCame } else { Found::Waiting }
    }
}

enum Seen {
    Nobody,
    /// A process maps one of the files, or cannot be examined.
    Somebody,
}

fn scan(files: HashSet<FileId>) -> Option<mpsc::Receiver<Seen>> {
    let (sender, answer) = mpsc::channel();
    let body = move || {
        // A guest waits for this thread.
        run_first();
        let scan = mappers::scan(&files);
        let nobody = !scan.failed && scan.mapping.is_empty() && scan.unreadable.is_empty();
        let seen = if nobody { Seen::Nobody } else { Seen::Somebody };
        let _ = sender.send(seen);
    };
    match std::thread::Builder::new().name("lost".into()).spawn(body) {
        Ok(_) => Some(answer),
        Err(error) => {
            tracing::error!("Starting a thread that looks for processes: {error}");
            None
        }
    }
}
