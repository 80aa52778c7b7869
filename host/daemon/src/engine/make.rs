//! Makes the file store of a VM: on its own thread, because its disk may not respond, and in the engine, so that no
//! thread of the keeper ever waits for that disk.
//!
//! Before: a process attaches as a VM that should have a file store and has none. After: the keeper has the store's
//! descriptors, from which an engine can open it.
//! Threads: two for each store that is made; the one that calls the disk ends when the disk responds.
//! Promise: a hung disk costs attaching processes [`MAKE_TIMEOUT`] once: while a store is overdue, no other is begun.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::Context;
use ballast_base::{Bytes, wire};
use ballast_handover::failure::Failure;
use ballast_handover::orders::Report;
use ballast_store::{Budget, FileOptions, FileStore};
use ballast_sys::scm;
use rustix::fs::Mode;

use super::shared::{Engine, Made};
use crate::config::Spill;

/// How long an attach waits for the disk. A healthy disk takes milliseconds, a loaded one seconds; and a VM that gets
/// no file store now never gets one. The keeper waits a second longer.
const MAKE_TIMEOUT: Duration = Duration::from_secs(4);

impl Engine {
    pub(super) fn make_file_store(self: &Arc<Self>, seq: u64) -> anyhow::Result<()> {
        let engine = self.clone();
        let body = move || {
            let no_spill = || Err("this engine was started without [spill]".into());
            let made = engine.settings().spill.as_ref().map_or_else(no_spill, |spill| engine.make_file(spill));
            let report = Report::Made { seq, result: made.as_ref().map(|_| ()).map_err(Failure::clone) };
            let fds: Vec<_> = made.iter().flatten().map(AsFd::as_fd).collect();
            if let Err(error) = scm::send(&*engine.keeper, &wire::encode(&report), &fds) {
                tracing::error!("Reporting to the keeper: {error}");
            }
        };
        std::thread::Builder::new().name("stores".into()).spawn(body).context("Starting a thread")?;
        Ok(())
    }

    fn make_file(&self, spill: &Spill) -> Made {
        if self.overdue.is_any() {
            let dir = spill.dir.display();
            return Err(Failure::new(format_args!("the disk of {dir} has not answered for a while")));
        }
        let (says, made) = mpsc::channel();
        let (dir, max_bytes) = (spill.dir.clone(), spill.budget());
        let body = move || drop(says.send(make(&dir, max_bytes)));
        std::thread::Builder::new()
            .name("make".into())
            .spawn(body)
            .map_err(|error| Failure::new(format_args!("no thread: {error}")))?;
        match made.recv_timeout(MAKE_TIMEOUT) {
            Ok(made) => made,
            Err(RecvTimeoutError::Timeout) => {
                self.overdue.add(made);
                Err(Failure::new(format_args!("its disk did not answer within {MAKE_TIMEOUT:?}")))
            }
            Err(RecvTimeoutError::Disconnected) => Err("a thread ended".into()),
        }
    }
}

fn make(dir: &Path, max_bytes: Bytes) -> Made {
    // The store is opened again later, with the real budget.
    let options = FileOptions { max_bytes, ..FileOptions::new(Budget::new(Bytes(0))) };
    let (_, file, index) = FileStore::create(dir, options).map_err(Failure::new)?;
    // Only the owner may open the index for writing: clients keep a descriptor of it.
    rustix::fs::fchmod(&index, Mode::RUSR | Mode::WUSR).map_err(Failure::new)?;
    Ok([file, index])
}
