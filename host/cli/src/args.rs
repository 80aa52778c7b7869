//! The command line and its conversion into values.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use ballast_api::policy::Kind;
use ballast_api::policy::settings::{HIGH_SHARES, LOW_SHARES, NORMAL_SHARES};
use ballast_api::{NodeBalloon, VmClass};
use ballast_base::{Bytes, Invalid};
use clap::{Args, Parser, Subcommand};

/// Elastic memory for virtual machines.
#[derive(Debug, Parser)]
#[command(name = "ballast", version, arg_required_else_help = true, after_help = AFTER_HELP)]
pub struct Cli {
    /// The daemon's API socket [default: BALLAST_API, else /run/ballast/api.sock]
    #[arg(long, global = true, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Print JSON: sizes in bytes, units in the key names
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The API socket: the one named on the command line, else `BALLAST_API` unless it is empty, else the default.
pub fn api_socket(named: Option<PathBuf>) -> PathBuf {
    let of_environment = || std::env::var_os("BALLAST_API").filter(|path| !path.is_empty()).map(PathBuf::from);
    named.or_else(of_environment).unwrap_or_else(|| ballast_api::DEFAULT_SOCKET.into())
}

const AFTER_HELP: &str = "Exit codes: 0 done, 1 failed, 2 wrong command line, 3 no such VM, 4 daemon not reachable, \
5 the machine lacks something (see ballast doctor).";

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a VMM so that its guest RAM is managed
    Run(crate::run::RunArgs),
    /// Show VMs and set their limits
    #[command(subcommand)]
    Vm(VmCommand),
    /// Give VMs that run already limits and policies, without a restart: the kernel's swap moves their pages
    Adopt(crate::adopt::AdoptArgs),
    /// Leave an adopted VM to the kernel again
    Release(crate::adopt::ReleaseArgs),
    /// Show which of libvirt's domains are paged, and what is missing for the others
    #[command(subcommand)]
    Libvirt(crate::libvirt::LibvirtCommand),
    /// Watch all VMs
    Top(TopArgs),
    /// Show or change the policy that decides how much memory each VM may have
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Show memory that is reserved for VMs; reserve, lend and take back
    #[command(subcommand)]
    Pool(crate::pool::PoolCommand),
    /// Show what the policy, or another one, would change now; changes nothing
    Plan {
        /// Another policy: maestro, pressure or gain
        #[arg(long)]
        policy: Option<Kind>,
    },
    /// Say where a VM's settings come from, and why a policy gives it what it has
    Explain(ExplainArgs),
    /// Say how much memory VMs needed over the last day for little stall; changes nothing
    Advise(crate::advise::AdviseArgs),
    /// Replace the engine and the keeper by those of another ballastd, under running VMs
    Upgrade {
        /// The new ballastd [default: the file that engines are started from]
        #[arg(value_name = "BALLASTD")]
        program: Option<PathBuf>,
    },
    /// Show the host and the daemon
    Host,
    /// Show recent events, oldest first
    Events(EventsArgs),
    /// Show the host and its VMs in a browser on this machine: serves a page until it is ended; read-only
    Web(WebArgs),
    /// Check what this kernel can do; needs no daemon
    Doctor {
        /// Check the settings of the remote store's servers instead; asks the daemon
        #[arg(long)]
        store: bool,
    },
    /// Show the main job on two real VMs (needs ballast-bench, QEMU and the guest image of `make demo`)
    #[command(disable_help_flag = true)]
    Demo(crate::lab::LabArgs),
    /// Measure Ballast against the kernel's own swap, a plain handler and the floor, in one run (needs ballast-bench)
    #[command(disable_help_flag = true)]
    Bench(crate::lab::LabArgs),
    /// Write the manual pages of this command and its subcommands into a directory
    #[command(hide = true)]
    Man {
        /// The directory
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// List VMs
    List,
    /// Show one VM on one screen
    Stat {
        /// The VM's name
        name: String,
    },
    /// Show how old a VM's memory is and what its working set is
    Heat(crate::heat::HeatArgs),
    /// Set or remove the limit of a VM, of several or of all; memory above it goes far
    #[command(allow_missing_positional = true)]
    Limit {
        /// The VMs' names
        #[arg(value_name = "NAME", required_unless_present = "all", conflicts_with = "all")]
        names: Vec<String>,
        /// Every VM
        #[arg(long)]
        all: bool,
        /// The limit with its unit, such as 512M or 2GiB, or none
        #[arg(value_name = "BYTES|none")]
        limit: Word<Bytes>,
    },
    /// Restore all of a VM and keep it in memory, whatever its limit: before a core dump
    Restore {
        /// The VM's name
        name: String,
        /// End the restore: its limit counts again
        #[arg(long)]
        end: bool,
    },
    /// Have the agent in the guest hold memory of its nodes, as far as the guest can spare it (needs ballast-agent)
    Balloon {
        /// The VM's name
        name: String,
        /// How much of which node: 0=512M,1=1G; a node that is not named stays as it is
        #[arg(value_name = "NODE=SIZE", value_delimiter = ',', required = true, value_parser = node_balloon)]
        nodes: Vec<NodeBalloon>,
    },
    /// Change the settings of a VM that policies obey; options that are not named stay
    Set(SetArgs),
    /// List what is kept of VMs for the next time that they attach
    Kept,
    /// Forget what is kept of a VM; one that runs keeps its settings until it ends
    Forget {
        /// The VM's name or UUID
        #[arg(value_name = "NAME|UUID")]
        vm: String,
    },
}

fn node_balloon(text: &str) -> Result<NodeBalloon, Invalid> {
    let (node, size) = text.split_once('=').ok_or_else(|| format!("{text:?} is no NODE=SIZE"))?;
    let node = node.parse().map_err(|_| format!("{node:?} is no number of a node"))?;
    let size: Bytes = size.parse().map_err(|error| format!("{error}"))?;
    Ok(NodeBalloon { node, bytes: size.0 })
}

/// Settings of a VM beside its limit.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("word").multiple(true).required(true)
    .args(["class", "reservation", "protect", "shares", "headroom"]))]
pub struct SetArgs {
    /// The VM's name
    pub name: String,
    /// guaranteed (all its memory is reserved), burstable, besteffort (low shares), or none for the default
    #[arg(long, value_name = "CLASS|none")]
    pub class: Option<Word<VmClass>>,
    /// DRAM that is never taken, such as 512M, or none
    #[arg(long, value_name = "BYTES|none")]
    pub reservation: Option<Word<Bytes>>,
    /// DRAM that is taken only when every VM is down to its own protected DRAM, or none
    #[arg(long, value_name = "BYTES|none")]
    pub protect: Option<Word<Bytes>>,
    /// Weight: low (500), normal (1000), high (2000) or a number; 0 means hands off; none for the default
    #[arg(long, value_name = "SHARES|none", value_parser = shares)]
    pub shares: Option<Word<u32>>,
    /// Memory wanted beyond the working set, in percent of it, or none
    #[arg(long, value_name = "PERCENT|none")]
    pub headroom: Option<Word<u32>>,
}

/// A value as typed, or `none` to remove it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word<T>(pub Option<T>);

impl<T: FromStr<Err: std::fmt::Display>> FromStr for Word<T> {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        if text.eq_ignore_ascii_case("none") {
            return Ok(Self(None));
        }
        text.parse().map(|value| Self(Some(value))).map_err(|error: T::Err| error.to_string().into())
    }
}

fn shares(text: &str) -> Result<Word<u32>, Invalid> {
    Ok(Word(Some(match text.to_ascii_lowercase().as_str() {
        "low" => LOW_SHARES,
        "normal" => NORMAL_SHARES,
        "high" => HIGH_SHARES,
        _ => return text.parse().map_err(|_| "write low, normal, high, a number from 0 to 100000, or none".into()),
    })))
}

#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Show it
    Show,
    /// Change it, until ballastd is restarted; options that are not named stay
    Set {
        /// none, maestro, pressure or gain
        policy: Kind,
        /// Milliseconds between decisions
        #[arg(long)]
        tick_ms: Option<u64>,
        /// DRAM for all guests together, or none: as much as the host can spare
        #[arg(long, value_name = "BYTES|none")]
        budget: Option<Word<Bytes>>,
        /// pressure: the share of time a VM may stall, 0 to 1
        #[arg(long)]
        threshold: Option<f64>,
    },
}

#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The VM's name
    pub name: String,
    /// How many decisions, at most
    #[arg(long, default_value_t = 3, value_name = "COUNT")]
    pub last: usize,
}

#[derive(Debug, Args)]
pub struct TopArgs {
    /// Print one plain frame and end
    #[arg(long)]
    pub once: bool,
    /// Seconds between two frames
    #[arg(long, default_value = "1", value_name = "SECONDS", value_parser = interval)]
    pub interval_s: Duration,
    /// Sort by this column, largest first (name: alphabetically)
    #[arg(long, value_enum, default_value_t)]
    pub sort: Sort,
}

#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Go on as events come, until it is ended; with --json one object a line
    #[arg(long)]
    pub follow: bool,
    /// Also decisions of the policy that differ from the ones before, with their reasons
    #[arg(long)]
    pub decisions: bool,
    /// Only events of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Only events of the last 90s, 10m, 2h or 1d
    #[arg(long, value_name = "TIME", value_parser = time_span)]
    pub since: Option<Duration>,
}

#[derive(Debug, Args)]
pub struct WebArgs {
    /// Port of the loopback interface; 0: any that is free
    #[arg(long, default_value_t = 0)]
    pub port: u16,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Sort {
    /// Alphabetically
    Name,
    /// All guest RAM
    Size,
    /// In DRAM
    #[default]
    Resident,
    /// Limit
    Limit,
    /// In a store
    Far,
    /// Stalled in the last 10 seconds
    Stall,
    /// 99th percentile of fault time
    Fault,
}

fn time_span(text: &str) -> Result<Duration, Invalid> {
    let (number, unit) = text.split_at(text.len() - text.chars().next_back().map_or(0, char::len_utf8));
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => 0,
    };
    match number.parse::<u64>().ok().and_then(|number| number.checked_mul(seconds)) {
        Some(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds)),
        _ => Err("write a number and s, m, h or d, such as 10m".into()),
    }
}

fn interval(text: &str) -> Result<Duration, Invalid> {
    const SHORTEST_S: f64 = 0.1;
    const LONGEST_S: f64 = 3600.0;
    match text.parse::<f64>() {
        Ok(seconds) if (SHORTEST_S..=LONGEST_S).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("write a number of seconds from {SHORTEST_S} to {LONGEST_S}").into()),
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
        assert_eq!("none".parse(), Ok(Word::<Bytes>(None)));
        assert_eq!("1G".parse(), Ok(Word(Some(Bytes(ballast_base::GIB)))));
        assert!("512".parse::<Word<Bytes>>().expect_err("no unit").to_string().contains("unit"));
    }

    #[test]
    fn shares_are_a_word_a_number_or_none() {
        assert_eq!(
            ["low", "normal", "HIGH", "0", "77"].map(shares),
            [500, 1000, 2000, 0, 77].map(|n| Ok(Word(Some(n))))
        );
        assert_eq!(shares("none"), Ok(Word(None)));
        assert!(shares("much").is_err() && shares("-1").is_err());
    }

    #[test]
    fn a_time_span_has_a_number_and_a_unit() {
        assert_eq!(time_span("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(time_span("2h"), Ok(Duration::from_secs(7200)));
        for wrong in ["", "0s", "10", "m", "-1m", "1.5h", "3µ", "99999999999999999999d"] {
            assert!(time_span(wrong).is_err(), "{wrong} was accepted");
        }
    }

    #[test]
    fn an_interval_is_a_sensible_number_of_seconds() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "NaN", "inf", "1e9", "soon"] {
            assert!(interval(wrong).is_err(), "{wrong} was accepted");
        }
    }
}
