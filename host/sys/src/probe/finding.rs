//! The result of trying a feature.
//!
//! Before: a probe made a call. After: `doctor` prints it. Promise: an error that does not concern the feature leaves
//! it unknown.

use std::io;

/// Is a feature there?
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Tried, and it works.
    Yes,
    /// There, and the detail is for operators, who may have to change a setting.
    Warn,
    /// Tried, and it does not.
    No,
    /// Could not be tried; the text says why.
    Unknown(String),
}

pub(super) type Finding = (Presence, String);

pub(super) fn yes(detail: impl Into<String>) -> Finding {
    (Presence::Yes, detail.into())
}

pub(super) fn warn(detail: impl Into<String>) -> Finding {
    (Presence::Warn, detail.into())
}

pub(super) fn no(detail: impl Into<String>) -> Finding {
    (Presence::No, detail.into())
}

pub(super) fn unknown(why: impl Into<String>) -> Finding {
    (Presence::Unknown(why.into()), String::new())
}

/// An error of the kernel as a finding: absent if the error says so, unknown for any other error.
pub(super) fn refused(what: &str, error: &io::Error) -> Finding {
    match error.raw_os_error() {
        Some(libc::ENOSYS | libc::ENOTTY | libc::EOPNOTSUPP | libc::EINVAL | libc::ENOENT | libc::ENODEV) => {
            no(format!("{what}: {error}"))
        }
        _ => unknown(format!("{what}: {error}")),
    }
}
