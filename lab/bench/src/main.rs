//! `ballast-bench`: the program that `ballast bench` and `ballast demo` execute.
//!
//! Before: `ballastd` and `ballast` are beside this program or on `PATH`. After: it has printed a table for people, or
//! one JSON object per row, and exits with the codes of `ballast`. Promise: a build that is not a release build says so
//! before anything else.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use ballast_bench::Options;
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
    Bench(Options),
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
        Command::Demo(_) if cli.json => Err(anyhow!("the demo prints a table, and no JSON")),
        Command::Demo(args) => ballast_demo::run(args),
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
fn bench(mut options: Options, json: bool) -> Result<()> {
    if !ballast_bench::is_release() {
        eprintln!(
            "ballast bench: WARNING: this is not a release build; its numbers mean nothing (cargo build --release)"
        );
    }
    if let Some(problem) = options.problem() {
        bail!("{problem}");
    }
    options.dir = std::path::absolute(&options.dir).with_context(|| format!("Finding {}", options.dir.display()))?;
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
