//! What the library says to the operator: a line on standard error.
//!
//! Threads: any. Promise: a VMM without a standard error is no worse off.

use std::fmt::Display;
use std::io::Write;

/// Say this.
pub fn announce(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "ballast: {text}");
}
