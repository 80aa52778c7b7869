//! `ballast-testvm`: run one workload in a test VM and print its outcome as one line.
//!
//! Before: the command line. After: stdout has the outcome, stderr has wrong words (at once) and progress.
//! Threads: one per worker, one that watches for the end, one that reads stdin if asked to.
//! Promise: exit code 0 = right, 1 = wrong bytes or not the model's outcome, 2 = usage, 3 = something needed is missing
//! (KVM), 4 = the run failed.

use std::io::BufRead;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use ballast_base::{Bytes, Hva};
use ballast_client::Client;
use ballast_testvm::park::Parking;
use ballast_testvm::{Error, GuestKind, GuestRam, Moment, Outcome, Placement, Spec, Vm, Workload};
use clap::Parser;

/// Run a workload with a known outcome on guest RAM.
///
/// Exit codes: 0 right, 1 wrong bytes or outcome, 2 usage, 3 KVM missing, 4 the run failed.
#[derive(Debug, Parser)]
#[command(name = "ballast-testvm", version)]
struct Args {
    /// What runs the workload
    #[arg(long, value_enum, default_value = "native")]
    guest: GuestKind,
    /// What it does
    #[arg(long, value_enum, default_value = "hotset")]
    workload: Workload,
    /// Size of guest RAM
    #[arg(long, default_value = "64M")]
    ram: Bytes,
    /// RAM of 2 MiB pages from the host's pool, as with QEMU's hugetlb=on
    #[arg(long)]
    huge_pages: bool,
    /// Operations over all workers; 0 for no end
    #[arg(long, default_value_t = 1_000_000)]
    ops: u64,
    /// Workers: threads or vCPUs
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Decides contents and choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fraction of operations that write
    #[arg(long, default_value_t = 0.5)]
    write_fraction: f64,
    /// The piece of memory one operation takes [default: 4096B, zipf 1K]
    #[arg(long)]
    cell: Option<Bytes>,
    /// Fraction of cells that are all zero
    #[arg(long, default_value_t = 0.0)]
    zero_fraction: f64,
    /// Contents that do not compress, instead of half-compressible ones
    #[arg(long)]
    incompressible: bool,
    /// Check and write every word in every operation, not eight spread over the cell
    #[arg(long)]
    thorough: bool,
    /// Where hot cells are [default: contiguous, zipf scattered]
    #[arg(long, value_enum)]
    placement: Option<Placement>,
    /// `phase`: the operation at which the hot set moves [default: the middle]; `store`: operations with each pattern
    /// [default: a third]
    #[arg(long)]
    move_at: Option<u64>,
    /// Rounds of computing, some 3 ns each, before each operation
    #[arg(long, default_value_t = 0)]
    think: u64,
    /// Measure every operation and report percentiles and the longest stall
    #[arg(long)]
    latency: bool,
    /// End the operations after this many seconds, then verify
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,
    /// End the operations when stdin has a line or ends, then verify
    #[arg(long)]
    until_stdin: bool,
    /// For tests: on the lines "read" and "map" of stdin, hang in the kernel over this file (see `park`); any other
    /// line ends the operations
    #[arg(long, value_name = "FILE", requires = "until_stdin")]
    park_on: Option<PathBuf>,
    /// Print progress to stderr this often
    #[arg(long, value_name = "MS")]
    progress_ms: Option<u64>,
    /// Print the outcome as one line of JSON
    #[arg(long)]
    json: bool,
    /// Have the guest's RAM managed by the ballastd behind this socket, under this name
    #[arg(long, value_name = "NAME")]
    attach: Option<String>,
    /// With --attach: the daemon's attach socket
    #[arg(long, value_name = "PATH", env = "BALLAST_SOCKET", default_value = ballast_client::DEFAULT_SOCKET)]
    attach_socket: PathBuf,
    /// With --attach: the DRAM cap to begin with
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
        spec.write_fraction = self.write_fraction;
        spec.zero_fraction = self.zero_fraction;
        spec.half_compressible = !self.incompressible;
        spec.thorough = self.thorough;
        spec.move_at = self.move_at;
        spec.latency = self.latency;
        spec.think = self.think;
        if let Some(cell) = self.cell {
            spec.cell = cell;
        }
        if let Some(placement) = self.placement {
            spec.placement = placement;
        }
        spec
    }
}

enum End {
    Stop,
    Finished,
}

/// Stop the VM when told to or when its time is over; report progress until it has finished.
fn watch(args: &Args, vm: &Vm, news: Receiver<End>) {
    let start = Instant::now();
    let mut end = args.seconds.map(|seconds| start + Duration::from_secs_f64(seconds));
    let interval = Duration::from_millis(args.progress_ms.unwrap_or(u64::from(u32::MAX)).max(1));
    let mut next = start + interval;
    loop {
        let until = end.map_or(next, |end| end.min(next));
        match news.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(End::Stop) => vm.stop(),
            Ok(End::Finished) | Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                if end.is_some_and(|end| end <= Instant::now()) {
                    vm.stop();
                    end = None;
                }
                if next <= Instant::now() {
                    let progress = serde_json::to_string(&vm.progress()).unwrap_or_default();
                    eprintln!("{{\"elapsed_ms\":{},\"progress\":{progress}}}", start.elapsed().as_millis());
                    next += interval;
                }
            }
        }
    }
}

/// Take what is told on stdin, until it is the end.
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
        // Detached on purpose: it may wait in a read for ever, and has nothing to clean up.
        std::thread::spawn(move || {
            if let Err(error) = listen(parking.as_ref()) {
                eprintln!("Taking a line of stdin: {error}");
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

/// Hand the guest's RAM over before anything touches it. A test guest that should be managed and is not would test
/// nothing, so it ends.
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

fn print(args: &Args, outcome: &Outcome) {
    if args.json {
        println!("{}", serde_json::to_string(outcome).expect("an outcome is plain data"));
        return;
    }
    println!(
        "{} guest={:?} workload={:?} ram={} threads={} ops={} ops_per_s={:.0} touched_pages={} checksum={:#018x} \
         model={:#018x} wrong_bytes={} fill_ms={:.0} run_ms={:.0} verify_ms={:.0}",
        if outcome.is_right() { "RIGHT" } else { "WRONG" },
        outcome.guest,
        outcome.workload,
        Bytes(outcome.ram_bytes),
        outcome.threads,
        outcome.ops,
        outcome.ops_per_s,
        outcome.touched_pages,
        outcome.checksum,
        outcome.model_checksum,
        outcome.wrong_bytes,
        outcome.fill_ms,
        outcome.run_ms,
        outcome.verify_ms,
    );
    if let Some(latency) = &outcome.latency {
        println!(
            "operation_ns p50={} p99={} p999={} max={} max_worker={} max_op={}",
            latency.p50_ns, latency.p99_ns, latency.p999_ns, latency.max_ns, latency.max_worker, latency.max_op
        );
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let endless = args.ops == 0 || args.workload == Workload::Idle;
    if endless && args.seconds.is_none() && !args.until_stdin {
        eprintln!("This run has no end: give --seconds or --until-stdin");
        return ExitCode::from(2);
    }
    if args.seconds.is_some_and(|seconds| Duration::try_from_secs_f64(seconds).is_err()) {
        eprintln!("--seconds must be a number of seconds that is not negative");
        return ExitCode::from(2);
    }
    match run(&args) {
        Ok(outcome) => {
            print(&args, &outcome);
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
