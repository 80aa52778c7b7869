//! Messages of the library to the operator: lines on standard error.
//!
//! Threads: any.
//! Promise: no harm if the VMM has no standard error, or nobody reads it.

use std::fmt::Display;

pub fn announce(text: impl Display) {
    ballast_client::announce(&text.to_string());
}
