//! `ballast-testvm`: a test VM attached to a ballastd. It works until it is told to stop, and compares each byte.
//!
//! Before: the command line. After: stdout has the outcome, one line of JSON. Stderr has wrong words, as they are
//! found. Threads: one per worker, one that reads stdin. Promise: exit code 0 = right, 2 = usage, 1 = anything else.

use std::io::BufRead;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use ballast_base::{Bytes, Hva};
use ballast_client::Client;
use ballast_testvm::park::Parking;
use ballast_testvm::{GuestKind, GuestRam, Spec, Vm, Workload};
use clap::Parser;

/// Run a workload with a known outcome on guest RAM until stdin has a line or ends.
#[derive(Debug, Parser)]
#[command(name = "ballast-testvm", version)]
struct Args {
    /// The workload
    #[arg(long, value_enum, default_value = "hotset")]
    workload: Workload,
    /// Size of guest RAM
    #[arg(long, default_value = "64M")]
    ram: Bytes,
    /// Back RAM with 2 MiB pages of the host's hugetlb pool, as QEMU's hugetlb=on does
    #[arg(long)]
    huge_pages: bool,
    /// Workers, which are threads
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Seed of contents and choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fraction of cells that are all zero
    #[arg(long, default_value_t = 0.0)]
    zero_fraction: f64,
    /// Fill with contents that do not compress, instead of half-compressible ones
    #[arg(long)]
    incompressible: bool,
    /// Measure every operation and report percentiles and the longest stall
    #[arg(long)]
    latency: bool,
    /// The lines "read" and "map" on stdin make a thread hang in the kernel on this file (see `park`)
    #[arg(long, value_name = "FILE")]
    park_on: Option<PathBuf>,
    /// The name under which a ballastd gets the guest's RAM
    #[arg(long, value_name = "NAME")]
    attach: String,
    /// The daemon's attach socket
    #[arg(long, value_name = "PATH")]
    attach_socket: PathBuf,
    /// The initial limit
    #[arg(long)]
    limit: Option<Bytes>,
}

impl Args {
    fn spec(&self) -> Spec {
        Spec {
            ops: u64::MAX,
            huge_pages: self.huge_pages,
            threads: self.threads,
            seed: self.seed,
            zero_fraction: self.zero_fraction,
            half_compressible: !self.incompressible,
            latency: self.latency,
            ..Spec::new(self.workload, self.ram)
        }
    }

    /// Attach the guest's RAM, which nothing has touched yet.
    fn attach(&self, ram: &GuestRam) -> Result<Client> {
        let memfd = ram.memfd().try_clone_to_owned().context("Duplicating the memory file")?;
        // Only the guest touches this memory, so a limit may be enforced at once.
        let builder = Client::builder().name(&self.attach).socket(&self.attach_socket).may_pin(false);
        let builder = self.limit.iter().fold(builder, |builder, limit| builder.limit(limit.0));
        let region = builder.region(memfd, Hva(ram.addr() as u64), Bytes(ram.len() as u64), Bytes(0));
        let attached = region.attach();
        attached.map_err(|error| anyhow!("Attaching to {}: {error}", self.attach_socket.display()))
    }
}

/// Carries out lines of stdin until a line ends the operations, or until the end of input.
fn listen(parking: Option<&Parking>) -> std::io::Result<()> {
    // Allocated now: while a thread is parked, an allocation may wait.
    let mut line = String::with_capacity(64);
    loop {
        line.clear();
        std::io::stdin().lock().read_line(&mut line)?;
        match (line.trim_end(), parking) {
            ("read", Some(parking)) => parking.read()?,
            ("map", Some(parking)) => parking.map()?,
            _ => return Ok(()),
        }
    }
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let vm = Vm::new(&args.spec(), GuestKind::Native)?;
    // Opened before the attach: a test that sees this VM may let the file's server hold its replies.
    let parking = args.park_on.as_deref().map(Parking::open).transpose().context("Opening the file to park on")?;
    let _client = args.attach(vm.ram())?;
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            if let Err(error) = listen(parking.as_ref()) {
                eprintln!("Carrying out a line of stdin: {error}");
            }
            vm.stop();
        });
        vm.run(&|_, _| ())
    })?;
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(if outcome.is_right() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
