//! `ballast-bench`: the program that `ballast bench` and `ballast demo` execute.
//!
//! Before: `ballastd` and `ballast` are beside this program or on `PATH`. After: it has printed a table for people, or
//! one JSON object per row, and exits with the codes of `ballast`. Promise: a build that is not a release build says so
//! before anything else.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ballast_bench::{GuestKind, Options, Part, RealOptions, RealOrder, RealProgram, RealSide, Which};
use clap::{Parser, Subcommand};

/// The machine lacks something that the command needs: the same code as `ballast`'s.
const MISSING_FEATURE: u8 = 5;

/// The lab of Ballast, which measures and shows it.
#[derive(Debug, Parser)]
#[command(name = "ballast-bench", bin_name = "ballast", version, arg_required_else_help = true)]
struct Cli {
    /// Print JSON: sizes in bytes, units in the key names
    #[arg(long, global = true, overrides_with = "json")]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the main job on two real VMs (needs QEMU and the guest image of `make demo`)
    Demo(ballast_demo::DemoArgs),
    /// Measure Ballast against the kernel's own swap, a plain handler and the floor, in one run
    Bench(BenchArgs),
    /// Draw the headlines from rows of JSON that `ballast bench --json` printed
    Plot(PlotArgs),
    /// A helper process of the bench
    #[command(hide = true, name = ballast_bench::ROLE_COMMAND)]
    BenchRole {
        /// The role, as JSON
        role: String,
        /// A program to become
        #[arg(last = true)]
        words: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Command::Demo(args) => ballast_demo::run(args, cli.json),
        Command::Bench(args) => bench(args, cli.json),
        Command::Plot(args) => plot(&args),
        Command::BenchRole { role, words } => ballast_bench::run_role(&role, &words),
    };
    let Err(error) = result else { return ExitCode::SUCCESS };
    eprintln!("ballast: {error:#}");
    if error.is::<ballast_demo::Missing>() { MISSING_FEATURE.into() } else { ExitCode::FAILURE }
}

/// Print text. A reader that has gone away (`| head`) is not an error.
fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// What to measure and how.
#[derive(Clone, Debug, clap::Args)]
struct BenchArgs {
    /// What to measure
    #[arg(value_enum)]
    what: Which,
    /// What touches the memory
    #[arg(long, value_enum, default_value = "native")]
    guest: GuestKind,
    /// Fewer pages and repetitions
    #[arg(long)]
    quick: bool,
    /// far: a directory on the disk to measure [default: that for temporary files]
    #[arg(long, value_name = "PATH")]
    dir: Option<PathBuf>,
    /// balance, density, pool, guest, real: one of its parts alone [default: all]
    #[arg(long, value_enum)]
    part: Option<Part>,
    /// guest: only which pages are taken, not how much memory can be
    #[arg(long)]
    choices: bool,
    /// density: this number of VMs alone [default: 1 to 1,000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    vms: Option<u16>,
    /// far: a network with this latency in one direction between the cluster's nodes and their clients [default: none]
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    network_us: Option<u32>,
    /// balance, real: these levels of memory alone, in percent [default: 100,75,60,45; real: 90,80,65,50]
    #[arg(long, value_name = "PCT", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(30..=100))]
    levels: Vec<u16>,
    /// real: the program [default: redis]
    #[arg(long, value_enum)]
    program: Option<RealProgram>,
    /// real: the order of its keys alone [default: repeat and random]
    #[arg(long, value_enum)]
    order: Option<RealOrder>,
    /// real: this side alone [default: ballast and kernel, by turns]
    #[arg(long, value_enum)]
    side: Option<RealSide>,
    /// real: time under the limit before its figures are taken [default: 40]
    #[arg(long, value_name = "S")]
    settle: Option<u16>,
    /// real: turns of each side [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: Option<u16>,
}

/// What to draw and where.
#[derive(Clone, Debug, clap::Args)]
struct PlotArgs {
    /// Files with one row a line
    #[arg(required = true)]
    rows: Vec<PathBuf>,
    /// The directory of the SVG files
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
}

/// Draw, and print the name of each file.
fn plot(args: &PlotArgs) -> Result<()> {
    for file in ballast_bench::plot(&args.rows, &args.out)? {
        print(&format!("{}\n", file.display()))?;
    }
    Ok(())
}

/// Measure.
fn bench(args: BenchArgs, json: bool) -> Result<()> {
    if !ballast_bench::is_release() {
        eprintln!(
            "ballast bench: WARNING: this is not a release build; its numbers mean nothing (cargo build --release)"
        );
    }
    if let Some(part) = args.part.filter(|part| part.of() != args.what) {
        bail!("--part {part:?} is for bench {}", part.of().name());
    }
    if args.choices && args.what != Which::Guest {
        bail!("--choices is for bench guest");
    }
    if args.vms.is_some() && args.what != Which::Density {
        bail!("--vms is for bench density");
    }
    if args.network_us.is_some() && args.what != Which::Far {
        bail!("--network-us is for bench far");
    }
    if !args.levels.is_empty() && !matches!(args.part, Some(Part::Levels | Part::Adopted)) && args.what != Which::Real {
        bail!("--levels is for bench balance --part levels or adopted, and for bench real");
    }
    let real = RealOptions {
        program: args.program,
        order: args.order,
        side: args.side,
        settle: args.settle.map(|seconds| Duration::from_secs(seconds.into())),
        rounds: args.rounds.map(usize::from),
    };
    if args.what != Which::Real && real != RealOptions::default() {
        bail!("--program, --order, --side, --settle and --rounds are for bench real");
    }
    let dir = args.dir.unwrap_or_else(std::env::temp_dir);
    let dir = std::path::absolute(&dir).with_context(|| format!("Finding {}", dir.display()))?;
    let options = Options {
        which: args.what,
        guest: args.guest,
        quick: args.quick,
        dir,
        part: args.part,
        choices: args.choices,
        vms: args.vms.map(usize::from),
        latency: Duration::from_micros(args.network_us.unwrap_or(0).into()),
        levels: args.levels.into_iter().map(u64::from).collect(),
        real,
    };
    let mut described = json;
    ballast_bench::run(options, &mut |row, machine| {
        if json {
            print(&format!("{}\n", row.json(machine)))?;
            return Ok(());
        }
        if !std::mem::replace(&mut described, true) {
            let Some(machine) = machine.as_object() else { return Ok(()) };
            let line = |(key, value): (&String, &serde_json::Value)| {
                format!("{key} {}\n", value.as_str().map_or_else(|| value.to_string(), str::to_owned))
            };
            print(&(machine.iter().map(line).collect::<String>() + "\n"))?;
        }
        print(&(row.text() + "\n"))?;
        Ok(())
    })
}
