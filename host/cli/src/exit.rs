//! Exit codes, and the code of each error.

use std::process::ExitCode;

use ballast_api::ClientError;

/// The meaning of the command's exit code. Scripts rely on these; `docs/cli.md` lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    Ok = 0,
    /// The command tried and failed, or `doctor` found that a required feature is missing.
    Failure = 1,
    /// The command line is wrong. The value is clap's own.
    Usage = 2,
    NoSuchVm = 3,
    /// The daemon does not respond, or this user may not connect.
    Unreachable = 4,
    /// The kernel or the machine lacks something the command needs; `ballast doctor` says more.
    MissingFeature = 5,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// An error that ends the command with a code other than 1.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Coded {
    pub exit: Exit,
    pub message: String,
}

pub fn code_of(error: &anyhow::Error) -> Exit {
    for cause in error.chain() {
        if let Some(coded) = cause.downcast_ref::<Coded>() {
            return coded.exit;
        }
        match cause.downcast_ref::<ClientError>() {
            Some(ClientError::Unreachable { .. } | ClientError::Broken { .. }) => return Exit::Unreachable,
            Some(error) if error.is_no_such_vm() => return Exit::NoSuchVm,
            _ => {}
        }
    }
    Exit::Failure
}

/// The whole chain of causes on one line, each cause once.
pub fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !text.contains(&cause) {
            let separator = if text.is_empty() { "" } else { ": " };
            text.push_str(separator);
            text.push_str(&cause);
        }
    }
    text
}
