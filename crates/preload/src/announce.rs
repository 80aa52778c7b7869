//! Messages of the library to the operator: lines on standard error.
//!
//! Threads: any. Promise: a VMM without a standard error is no worse off.

use std::fmt::Display;
use std::io::Write;

/// Print this line.
pub fn announce(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "ballast: {text}");
}
