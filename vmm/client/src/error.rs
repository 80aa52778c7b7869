//! Errors of attachments and of requests to the keeper.
//!
//! Before: the keeper, the kernel or a check refused. After: the VMM, and C code through `ffi`, report the error.
//! Promise: each error is text for an operator, with advice where there is any.

use std::io;
use std::path::PathBuf;

use ballast_base::Invalid;
use ballast_base::wire::WireError;

/// Attaching failed; the VMM is not managed, and nothing in it was changed.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Caused by the VMM: its description is invalid.
    #[error("Attaching to Ballast: {0}")]
    Config(Invalid),
    /// The kernel refuses to create a userfaultfd.
    #[error(
        "Attaching to Ballast: creating a userfaultfd (the keeper has no /dev/userfaultfd to give, which Linux 6.1 \
         has; without it this process needs CAP_SYS_PTRACE, or vm.unprivileged_userfaultfd=1)"
    )]
    Userfault(#[source] io::Error),
    /// The kernel's userfaultfd cannot do what Ballast needs.
    #[error("Attaching to Ballast: this kernel lacks userfaultfd features {0:#x}; run `ballast doctor`")]
    Features(u64),
    /// The keeper does not respond at its socket.
    #[error("Attaching to Ballast: connecting to the keeper at {path} ({})", advice(.source))]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The error of `connect`.
        #[source]
        source: io::Error,
    },
    /// The keeper refuses this VM.
    #[error("Attaching to Ballast: the keeper refused: {0}")]
    Refused(String),
    /// The keeper is not ready for this RAM. Not returned by the first attach, which waits.
    #[error("Attaching to Ballast: the keeper asks to wait: {0}")]
    Later(String),
    /// The keeper hung up or did not reply in time.
    #[error("Attaching to Ballast: the keeper {0}")]
    NoAnswer(&'static str),
    /// The keeper's reply is invalid.
    #[error("Attaching to Ballast: the keeper's reply is invalid")]
    Protocol(#[from] WireError),
    /// A resource of this process ran out.
    #[error("Attaching to Ballast: {what}")]
    System {
        /// The failed operation.
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// What an operator should check if a connection failed in this way.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "may this user attach? See attach_group in ballastd.toml",
        _ => "is ballastd running?",
    }
}

/// A request to the keeper did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// Caused by the VMM: the request is invalid.
    #[error("{0}")]
    Invalid(Invalid),
    /// The keeper refused, for this reason.
    #[error("the keeper refused: {0}")]
    Refused(String),
    /// The keeper is not ready for this RAM, for this reason: pages of it may be far, so it must not be used.
    #[error("the keeper asks to wait: {0}")]
    Later(String),
    /// The keeper is gone or silent.
    #[error("the keeper did not answer in time")]
    NoAnswer,
}

/// The error and its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text.push_str(": ");
        text.push_str(&source.to_string());
        cause = source.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_who_may_not_attach_is_told_the_setting() {
        let connect = |kind: io::ErrorKind| chain(&AttachError::Connect { path: "/s".into(), source: kind.into() });
        assert!(connect(io::ErrorKind::PermissionDenied).contains("attach_group"));
        assert!(connect(io::ErrorKind::NotFound).contains("is ballastd running?"));
    }
}
