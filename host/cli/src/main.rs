//! `ballast`: the command for operators.
//!
//! Before: `ballastd` listens on its API socket (`doctor`, `run`, `demo`, `bench` and `completions` do not need it).
//! After: people have text, programs have JSON, and scripts have an exit code. Units: people see KiB and larger with
//! their names; JSON has bytes. Promise: an error is one line that says what was tried, what went wrong, and what to
//! do.

mod adopt;
mod advise;
mod agent;
mod args;
mod complete;
mod doctor;
mod emulator;
mod events;
mod exit;
mod heat;
mod host;
mod lab;
mod libvirt;
mod names;
mod policy;
mod pool;
mod run;
mod show;
mod top;
mod upgrade;
mod vm;
mod web;

use std::process::ExitCode;

use anyhow::{Context, Result};
use ballast_api::Client;
use clap::{CommandFactory, Parser};

use args::{Cli, Command};
use exit::Exit;
use libvirt::LibvirtCommand;

fn main() -> ExitCode {
    complete::answer();
    let done = emulator::command_line(std::env::args_os()).and_then(|words| run(Cli::parse_from(words)));
    done.unwrap_or_else(|error| {
        show::say(&exit::chain(&error));
        exit::code_of(&error).into()
    })
}

fn run(cli: Cli) -> Result<ExitCode> {
    let socket = args::api_socket(cli.socket);
    let client = || Client::new(&socket).context("Starting the API client");
    match cli.command {
        Command::Run(args) => match run::run(args)? {},
        Command::Demo(args) => match lab::run("demo", args, cli.json)? {},
        Command::Bench(args) => match lab::run("bench", args, cli.json)? {},
        Command::Vm(command) => vm::run(&client()?, &command, cli.json)?,
        Command::Adopt(args) => adopt::adopt(&client()?, &args, cli.json)?,
        Command::Libvirt(LibvirtCommand::Status) => libvirt::status(&client()?, cli.json)?,
        Command::Release(args) => adopt::release(&client()?, &args, cli.json)?,
        Command::Top(args) => top::run(client()?, &args, cli.json)?,
        Command::Policy(command) => policy::run(&client()?, &command, cli.json)?,
        Command::Pool(command) => pool::run(&client()?, &command, cli.json)?,
        Command::Plan { policy } => policy::plan(&client()?, policy, cli.json)?,
        Command::Advise(args) => advise::advise(&client()?, &args, cli.json)?,
        Command::Explain(args) => policy::explain(&client()?, &args, cli.json)?,
        Command::Upgrade { program } => upgrade::run(client()?, program, cli.json)?,
        Command::Host => host::host(&client()?, cli.json)?,
        Command::Events(args) => events::run(&client()?, &args, cli.json)?,
        Command::Web(args) => web::run(&socket, &args)?,
        Command::Doctor { store: true } => return Ok(doctor::store(&client()?.host()?, cli.json)?.into()),
        Command::Doctor { store: false } => return Ok(doctor::run(client().ok(), cli.json)?.into()),
        Command::Man { dir } => {
            clap_mangen::generate_to(Cli::command(), &dir)
                .with_context(|| format!("Writing into {}", dir.display()))?;
        }
        Command::Completions { shell } => complete::script(shell)?,
    }
    Ok(Exit::Ok.into())
}
