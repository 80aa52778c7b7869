//! The `ballastd` program: without a subcommand the keeper, which starts `ballastd engine` itself.

use std::path::PathBuf;
use std::process::ExitCode;

use ballast_daemon::config::Config;
use ballast_keeper::Follow;
use ballast_sys::log_line::StandardError;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(version, about = "Elastic memory for virtual machines: the daemon")]
struct Args {
    /// Read settings from this TOML file; without it every setting has its default
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    /// Directory for the sockets (overrides `runtime_dir`)
    #[arg(long, value_name = "DIR", global = true)]
    runtime_dir: Option<PathBuf>,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Subcommand)]
enum Role {
    /// Started by the keeper with a socket as standard input
    #[command(hide = true)]
    Engine,
    /// The program that becomes the keeper in an upgrade
    #[command(hide = true)]
    Keeper {
        /// The descriptor of the last keeper's record
        kept: i32,
        /// The program to become if this one cannot be the keeper
        #[arg(long)]
        back: Option<PathBuf>,
        /// Why this program is the keeper again
        #[arg(long)]
        because: Option<String>,
    },
    /// Check the configuration, print the effective values, and exit
    Check,
}

fn main() -> ExitCode {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_env("BALLAST_LOG").unwrap_or_else(|_| "info".into()))
        // A full log must not stop a thread that writes to it, because a guest may wait for that thread.
        .with_writer(|| StandardError)
        .log_internal_errors(false)
        .with_ansi(false)
        .init();
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ballastd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    let mut config = Config::load(args.config.as_deref())?;
    if let Some(dir) = args.runtime_dir {
        config.runtime_dir = dir;
    }
    match args.role {
        None => ballast_keeper::run(ballast_daemon::settings::for_keeper(&config)?),
        Some(Role::Engine) => ballast_daemon::engine::run(),
        Some(Role::Keeper { kept, back, because }) => ballast_keeper::follow(&Follow { kept, back, because }),
        Some(Role::Check) => {
            // Groups and users that this host does not have are errors at the start, too.
            ballast_daemon::settings::for_keeper(&config)?;
            print!("{}", config.to_toml()?);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_refuses_a_group_that_this_host_does_not_have() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "attach_group = \"ballast-no-such-group\"\n").expect("write");
        let args = Args { config: Some(file.path().into()), runtime_dir: None, role: Some(Role::Check) };
        let error = run(args).expect_err("no such group");
        assert!(format!("{error:#}").contains("attach_group"), "{error:#}");
    }

    #[test]
    fn options_may_stand_before_or_after_the_subcommand() {
        for line in ["ballastd --config F --runtime-dir D check", "ballastd check --config F --runtime-dir D"] {
            let args = Args::try_parse_from(line.split(' ')).unwrap_or_else(|error| panic!("{line}: {error}"));
            let paths = (args.config, args.runtime_dir);
            assert_eq!(paths, (Some(PathBuf::from("F")), Some(PathBuf::from("D"))), "{line}");
            assert!(matches!(args.role, Some(Role::Check)), "{line}");
        }
    }
}
