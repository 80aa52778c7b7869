//! `ballast-testvm`: runs one workload in a test VM and prints its outcome as one line of JSON.
//!
//! Before: the command line. After: stdout has the outcome. Stderr has wrong words, as they are found.
//! Threads: one per worker, one that watches for the end, one that reads stdin if an option needs it.
//! Promise: exit code 0 = right, 1 = wrong bytes or another outcome than the model's, 2 = usage, 3 = KVM is missing,
//! 4 = the run failed.

use std::io::BufRead;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use ballast_base::{Bytes, Hva};
use ballast_client::Client;
use ballast_testvm::park::Parking;
use ballast_testvm::{Error, GuestKind, GuestRam, Moment, Outcome, Spec, Vm, Workload};
use clap::Parser;

/// Run a workload with a known outcome on guest RAM.
///
/// Exit codes: 0 right, 1 wrong bytes or outcome, 2 usage, 3 KVM missing, 4 the run failed.
#[derive(Debug, Parser)]
#[command(name = "ballast-testvm", version)]
struct Args {
    /// The kind of guest that runs the workload
    #[arg(long, value_enum, default_value = "native")]
    guest: GuestKind,
    /// The workload
    #[arg(long, value_enum, default_value = "hotset")]
    workload: Workload,
    /// Size of guest RAM
    #[arg(long, default_value = "64M")]
    ram: Bytes,
    /// Back RAM with 2 MiB pages of the host's hugetlb pool, as QEMU's hugetlb=on does
    #[arg(long)]
    huge_pages: bool,
    /// Operations over all workers; 0 for no limit
    #[arg(long, default_value_t = 1_000_000)]
    ops: u64,
    /// Workers, which are threads or vCPUs
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
    /// End the operations after this many seconds, then verify
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,
    /// End the operations when stdin has a line or ends, then verify
    #[arg(long)]
    until_stdin: bool,
    /// For tests: the lines "read" and "map" on stdin make a thread hang in the kernel on this file (see `park`); any
    /// other line ends the operations
    #[arg(long, value_name = "FILE", requires = "until_stdin")]
    park_on: Option<PathBuf>,
    /// Attach the guest's RAM to a ballastd under this name
    #[arg(long, value_name = "NAME")]
    attach: Option<String>,
    /// With --attach: the daemon's attach socket
    #[arg(long, value_name = "PATH", env = "BALLAST_SOCKET", default_value = ballast_client::DEFAULT_SOCKET)]
    attach_socket: PathBuf,
    /// With --attach: the initial limit
    #[arg(long, requires = "attach")]
    limit: Option<Bytes>,
}

impl Args {
    fn spec(&self) -> Spec {
        let mut spec = Spec::new(self.workload, self.ram);
        spec.ops = if self.ops == 0 { u64::MAX } else { self.ops };
        spec.huge_pages = self.huge_pages;
        spec.threads = self.threads;
        spec.seed = self.seed;
        spec.zero_fraction = self.zero_fraction;
        spec.half_compressible = !self.incompressible;
        spec.latency = self.latency;
        spec
    }
}

enum End {
    Stop,
    Finished,
}

/// Stop the VM on `news` or when its time is over.
fn watch(args: &Args, vm: &Vm, news: Receiver<End>) {
    let mut time = args.seconds.map_or(Duration::MAX, Duration::from_secs_f64);
    loop {
        match news.recv_timeout(time) {
            Ok(End::Finished) | Err(RecvTimeoutError::Disconnected) => return,
            Ok(End::Stop) | Err(RecvTimeoutError::Timeout) => vm.stop(),
        }
        time = Duration::MAX;
    }
}

/// Carry out lines of stdin until one ends the operations, or until the end of input.
fn listen(parking: Option<&Parking>) -> std::io::Result<()> {
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

fn run(args: &Args) -> Result<Outcome, Error> {
    let vm = Vm::new(&args.spec(), args.guest)?;
    let (sender, news) = channel();
    if args.until_stdin {
        let sender: Sender<End> = sender.clone();
        let parking = args.park_on.as_deref().map(Parking::open).transpose().unwrap_or_else(|error| {
            eprintln!("Opening the file to park on: {error}");
            std::process::exit(4)
        });
        // The thread is detached on purpose: it may wait in a read forever, and has nothing to clean up.
        std::thread::spawn(move || {
            if let Err(error) = listen(parking.as_ref()) {
                eprintln!("Carrying out a line of stdin: {error}");
            }
            let _ = sender.send(End::Stop);
        });
    }
    std::thread::scope(|scope| {
        let vm = &vm;
        scope.spawn(move || watch(args, vm, news));
        let attached = OnceLock::new();
        let outcome = vm.run(&|moment, ram| {
            if moment == Moment::Fill
                && let Some(name) = &args.attach
            {
                attached.get_or_init(|| attach(args, name, ram));
            }
        });
        let _ = sender.send(End::Finished);
        outcome
    })
}

/// Attach the guest's RAM before anything touches it. Exits on failure, because an unmanaged guest would test nothing.
fn attach(args: &Args, name: &str, ram: &GuestRam) -> Client {
    let memfd = ram.memfd().try_clone_to_owned().map_err(|error| error.to_string());
    let attached = memfd.and_then(|memfd| {
        // Only the guest touches this memory, so a limit may be enforced at once.
        let builder = Client::builder().name(name).socket(&args.attach_socket).may_pin(false);
        let builder = args.limit.iter().fold(builder, |builder, limit| builder.limit(limit.0));
        let region = builder.region(memfd, Hva(ram.addr() as u64), Bytes(ram.len() as u64), Bytes(0));
        region.attach().map_err(|error| error.to_string())
    });
    attached.unwrap_or_else(|error| {
        eprintln!("Attaching to {}: {error}", args.attach_socket.display());
        std::process::exit(4)
    })
}

fn main() -> ExitCode {
    let args = Args::parse();
    let endless = args.ops == 0 || args.workload == Workload::Idle;
    if endless && args.seconds.is_none() && !args.until_stdin {
        eprintln!("This run has no end: use --seconds or --until-stdin");
        return ExitCode::from(2);
    }
    if args.seconds.is_some_and(|seconds| Duration::try_from_secs_f64(seconds).is_err()) {
        eprintln!("--seconds must be a number of seconds that is not negative");
        return ExitCode::from(2);
    }
    match run(&args) {
        Ok(outcome) => {
            println!("{}", serde_json::to_string(&outcome).expect("an outcome is plain data"));
            if outcome.is_right() { ExitCode::SUCCESS } else { ExitCode::from(1) }
        }
        Err(error) => {
            let mut chain = error.to_string();
            let mut source = std::error::Error::source(&error);
            while let Some(cause) = source {
                chain.push_str(&format!(": {cause}"));
                source = cause.source();
            }
            eprintln!("{chain}");
            ExitCode::from(match error {
                Error::Spec(_) => 2,
                Error::NoKvm(_) => 3,
                _ => 4,
            })
        }
    }
}
