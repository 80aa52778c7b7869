//! Errors of a guest in QEMU. Each names in brackets who caused it.

use std::io;

use super::qmp::QmpError;

/// An error of a guest.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine lacks something that a guest needs (operator).
    #[error("No QEMU guest can run here: {0}")]
    Missing(String),
    /// A file or process call failed (kernel).
    #[error("{doing} guest {guest}")]
    Io {
        /// The activity.
        doing: &'static str,
        /// The guest's name.
        guest: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The process ended while a caller waited for it (guest, or the author of its command line).
    #[error("Guest {guest} ended early ({status}); its last output:\n{tail}")]
    Ended {
        /// The guest's name.
        guest: String,
        /// The exit status, or the fact that it closed its console.
        status: String,
        /// Last lines of the console and of QEMU's error output.
        tail: String,
    },
    /// The console did not print the awaited word in time (guest).
    #[error("Guest {guest} did not print {want} within {waited_s} s; its last output:\n{tail}")]
    Timeout {
        /// The guest's name.
        guest: String,
        /// The awaited word.
        want: &'static str,
        /// The waiting time, in seconds.
        waited_s: u64,
        /// Last lines of the console and of QEMU's error output.
        tail: String,
    },
    /// The monitor refused a command, or the connection failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}
