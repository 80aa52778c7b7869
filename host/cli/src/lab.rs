//! `ballast bench` and `ballast demo`: this process becomes `ballast-bench`, which is a separate program.
//!
//! Before: the operator typed the arguments. After: the program of the lab has them unchanged. Promise: the lab
//! measures and shows the product and is no part of it: nothing of it is linked here.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};
use ballast_sys::program;

use crate::exit::{Coded, Exit};

/// Arguments for the program of the lab.
#[derive(Debug, clap::Args)]
pub struct LabArgs {
    /// Arguments of ballast-bench; --help shows them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    words: Vec<OsString>,
}

/// Executes the program in this process. Returns only if that fails.
pub fn run(command: &str, args: LabArgs, json: bool) -> Result<Infallible> {
    let program = program::find("ballast-bench").map_err(|error| Coded {
        exit: Exit::MissingFeature,
        message: format!(
            "`ballast {command}` needs the program ballast-bench, which is installed apart: {error} (cargo build \
             --release -p ballast-bench makes it)"
        ),
    })?;
    let json = json.then_some("--json");
    Err(Command::new(&program).arg(command).args(json).args(args.words).exec())
        .with_context(|| format!("Starting {}", program.display()))
}
