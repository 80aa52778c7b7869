//! Why another process could not do what it was asked.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

/// Why the process at the other end could not do it, in its words: its errors have no type here. A part of messages and
/// records, as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{0}")]
pub struct Failure(String);

impl Failure {
    /// As the other process is told.
    pub fn new(why: impl Display) -> Self {
        Self(why.to_string())
    }
}

impl From<&str> for Failure {
    fn from(why: &str) -> Self {
        Self::new(why)
    }
}
