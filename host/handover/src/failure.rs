//! Why another process could not carry out a request.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

/// Why the process at the other end failed, in its own words, because the types of its errors are unknown here.
/// Messages and records have it as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{0}")]
pub struct Failure(String);

impl Failure {
    /// A failure with the text of an error.
    pub fn new(why: impl Display) -> Self {
        Self(why.to_string())
    }
}

impl From<&str> for Failure {
    fn from(why: &str) -> Self {
        Self::new(why)
    }
}
