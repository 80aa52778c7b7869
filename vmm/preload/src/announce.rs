//! Messages of the library to the operator: lines on standard error.
//!
//! Threads: any. Promise: a VMM without a standard error, or whose standard error takes no more, is no worse off.

use std::fmt::Display;

/// Print this line.
pub fn announce(text: impl Display) {
    ballast_client::announce(&text.to_string());
}
