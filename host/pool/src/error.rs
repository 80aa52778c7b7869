//! Reasons why a request to the pool fails.
//!
//! Before: a step of the pool failed. After: the API's reply, or an event. Promise: each error names the step, and says
//! who can cause it.

use std::io;
use std::path::PathBuf;

use crate::map::{Invalid, Refused};
use ballast_base::Bytes;

use crate::host::Page;
use crate::shared::StateError;

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process owns the pool.
    #[error("another process has the pool in {0}")]
    Taken(PathBuf),
    /// The state cannot be used. Caused by a newer program, a bug, or memory that failed.
    #[error("the state of the pool: {0}")]
    State(#[from] StateError),
    /// The kernel refused. Caused by the configuration.
    #[error("{what}: {source}")]
    Io {
        /// The attempted activity.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// There is too little memory, or the request is impossible. Caused by the caller.
    #[error("{0}; a slice is {1}")]
    Refused(Refused, Page),
    /// The pool has less than this beside its promises to VMs on demand. Caused by the caller.
    #[error(
        "{wanted} more cannot be promised: of what no VM has, {promised} are promised to VMs on demand, and {left} are \
         left{terms}"
    )]
    Promised {
        /// The request.
        wanted: Bytes,
        /// Memory that is promised to nobody.
        left: Bytes,
        /// Memory that is promised to VMs on demand.
        promised: Bytes,
        /// If the pool may promise more than it has: the percentage, and what is missing.
        terms: String,
    },
    /// The request is impossible. Caused by the caller.
    #[error("{0}")]
    Request(String),
    /// A step that the state does not allow. Caused by a bug.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

pub(crate) trait During<T> {
    fn during(self, what: &'static str) -> Result<T, Error>;
}

impl<T> During<T> for io::Result<T> {
    fn during(self, what: &'static str) -> Result<T, Error> {
        self.map_err(|source| Error::Io { what, source })
    }
}
