//! Completion in a shell: commands, options, and the names of VMs that `ballastd` knows at that moment.
//!
//! Before: the shell has sourced the script of `ballast completions SHELL`. After: on each Tab the script starts this
//! program with [`VAR`] set, which answers and ends. Promise: without a daemon no name is suggested, and nothing is
//! printed.

use std::time::Duration;

use anyhow::{Context, Result};
use ballast_api::Client;
use clap::{Command, CommandFactory};
use clap_complete::env::Shells;
use clap_complete::{ArgValueCandidates, CompleteEnv, CompletionCandidate, Shell};

use crate::args::{Cli, api_socket};
use crate::show;

/// Set by the script.
const VAR: &str = "BALLAST_COMPLETE";

pub fn answer() {
    CompleteEnv::with_factory(command).var(VAR).complete();
}

pub fn script(shell: Shell) -> Result<()> {
    let shells = Shells::builtins();
    let shell = shells.completer(&shell.to_string()).context("clap_complete has lost a shell")?;
    let mut script = Vec::new();
    shell.write_registration(VAR, "ballast", "ballast", "ballast", &mut script)?;
    show::print_as_it_is(&String::from_utf8_lossy(&script))?;
    Ok(())
}

fn command() -> Command {
    with_names(Cli::command())
}

/// Completes names of known VMs wherever one must be named.
fn with_names(command: Command) -> Command {
    command
        .mut_args(|arg| match arg.get_id().as_str() {
            "name" | "names" if arg.is_positional() => arg.add(ArgValueCandidates::new(names)),
            _ => arg,
        })
        .mut_subcommands(with_names)
}

fn names() -> Vec<CompletionCandidate> {
    let client = Client::new(api_socket(None)).map(|client| client.retry_for(Duration::ZERO));
    let vms = client.ok().and_then(|client| client.vms().ok()).unwrap_or_default();
    vms.into_iter().map(|vm| CompletionCandidate::new(vm.name)).collect()
}
