//! What can go wrong with a guest in QEMU, and who caused it.

use std::io;

use super::qmp::QmpError;

/// What can go wrong with a guest.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine lacks something a guest needs (operator).
    #[error("No QEMU guest can run here: {0}")]
    Missing(String),
    /// A file or process call failed (kernel).
    #[error("{doing} guest {guest}")]
    Io {
        /// The activity.
        doing: &'static str,
        /// The guest's name.
        guest: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The process ended while something was expected of it (guest, or the author of its command line).
    #[error("Guest {guest} ended early ({status}); its last words:\n{tail}")]
    Ended {
        /// The guest's name.
        guest: String,
        /// Exit status, or that the console was closed.
        status: String,
        /// Last lines of the console and of QEMU's error output.
        tail: String,
    },
    /// The console did not say what was waited for in time (guest).
    #[error("Guest {guest} did not say {want} within {waited_s} s; its last words:\n{tail}")]
    Timeout {
        /// The guest's name.
        guest: String,
        /// The awaited word.
        want: &'static str,
        /// How long it was waited.
        waited_s: u64,
        /// Last lines of the console and of QEMU's error output.
        tail: String,
    },
    /// The monitor refused or broke off.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}
