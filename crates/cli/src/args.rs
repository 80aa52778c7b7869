//! The command line: what can be typed. One conversion turns what was typed into what it means.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use ballast_base::Bytes;
use clap::{Args, Parser, Subcommand};

/// Elastic memory for virtual machines.
#[derive(Debug, Parser)]
#[command(name = "ballast", version, arg_required_else_help = true, after_help = AFTER_HELP)]
pub struct Cli {
    /// The daemon's API socket
    #[arg(long, global = true, env = "BALLAST_API", default_value = ballast_api::DEFAULT_SOCKET, value_name = "PATH")]
    pub socket: PathBuf,
    /// Print JSON: sizes in bytes, units in the key names
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

const AFTER_HELP: &str = "Exit codes: 0 done, 1 failed, 2 wrong command line, 3 no such VM, 4 daemon not reachable, \
5 the machine lacks something (see ballast doctor).";

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a VMM so that its guest RAM is managed
    Run(crate::run::RunArgs),
    /// Look at VMs and set their limits
    #[command(subcommand)]
    Vm(VmCommand),
    /// Watch all VMs
    Top(TopArgs),
    /// Show the host and the daemon
    Host,
    /// Show recent events, oldest first
    Events,
    /// Check what this kernel can do; needs no daemon
    Doctor,
    /// Show the main job on two real VMs (needs QEMU and the guest image of `make demo`)
    Demo(crate::demo::DemoArgs),
    /// Measure Ballast against the kernel's own swap, a plain handler and the floor, in one run
    Bench(crate::bench::BenchArgs),
    /// A helper process of the bench
    #[command(hide = true, name = ballast_bench::ROLE_COMMAND)]
    BenchRole {
        /// The role, as JSON
        role: String,
        /// A program to become
        #[arg(last = true)]
        words: Vec<std::ffi::OsString>,
    },
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// What can be done with VMs.
#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// List VMs
    List,
    /// Show one VM on one screen
    Stat {
        /// The VM's name
        name: String,
    },
    /// Show how old a VM's memory is and what its working set is; record, replay and draw it
    Heat(crate::heat::HeatArgs),
    /// Set or remove the DRAM cap of a VM; memory above it goes far
    Limit {
        /// The VM's name
        name: String,
        /// The cap with its unit, such as 512M or 2GiB, or none
        #[arg(value_name = "BYTES|none")]
        limit: LimitArg,
    },
}

/// How to watch.
#[derive(Clone, Copy, Debug, Args)]
pub struct TopArgs {
    /// Print one plain frame and end
    #[arg(long)]
    pub once: bool,
    /// Seconds between looks
    #[arg(long, default_value = "1", value_name = "SECONDS", value_parser = interval)]
    pub interval_s: Duration,
    /// Sort by this column, largest first (name: alphabetically)
    #[arg(long, value_enum, default_value_t)]
    pub sort: crate::top::Sort,
}

fn interval(text: &str) -> Result<Duration, String> {
    const SHORTEST_S: f64 = 0.1;
    const LONGEST_S: f64 = 3600.0;
    match text.parse::<f64>() {
        Ok(seconds) if (SHORTEST_S..=LONGEST_S).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("write a number of seconds from {SHORTEST_S} to {LONGEST_S}")),
    }
}

/// A limit as typed: a size, or `none` to remove it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitArg(pub Option<Bytes>);

impl FromStr for LimitArg {
    type Err = ballast_base::units::ParseBytesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.eq_ignore_ascii_case("none") { Ok(Self(None)) } else { text.parse().map(|bytes| Self(Some(bytes))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_limit_is_a_size_with_a_unit_or_none() {
        assert_eq!("none".parse(), Ok(LimitArg(None)));
        assert_eq!("1G".parse(), Ok(LimitArg(Some(Bytes(ballast_base::GIB)))));
        assert!("512".parse::<LimitArg>().expect_err("no unit").to_string().contains("unit"));
    }

    #[test]
    fn an_interval_is_a_sensible_number_of_seconds() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "NaN", "inf", "1e9", "soon"] {
            assert!(interval(wrong).is_err(), "{wrong} was accepted");
        }
    }
}
