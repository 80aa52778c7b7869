//! `ballast bench`: the numbers, side by side with the kernel's own.
//!
//! Before: `ballastd` lies beside this program. After: a table for people, or one JSON object per row.
//! Promise: a build that was not made for speed says so before anything else.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use ballast_bench::{GuestKind, Options, Which};

use crate::show;

/// What to measure and how.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchArgs {
    /// What to measure
    #[arg(value_enum)]
    what: What,
    /// What touches the memory
    #[arg(long, value_enum, default_value = "native")]
    guest: Guest,
    /// Fewer pages and repetitions
    #[arg(long)]
    quick: bool,
    /// spill: a directory on the disk to measure [default: that for temporary files]
    #[arg(long, value_name = "PATH")]
    dir: Option<PathBuf>,
    /// balance: one of its parts alone [default: all]
    #[arg(long, value_enum)]
    part: Option<Part>,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum What {
    /// How long a touch of a far page takes
    Restore,
    /// How many cold pages per second leave DRAM
    Reclaim,
    /// What a second VM adds to both
    Scale,
    /// What being attached costs a VM that nobody squeezes
    Idle,
    /// What a neighbour's fault storm does to a VM's restores
    Storm,
    /// How fast far pages go to a disk, and how long a touch of one there takes
    Spill,
    /// What a guest on 2 MiB pages gains and loses against 4 KiB
    Huge,
    /// How eight VMs fare in less memory than they want, by policy and by the kernel
    Balance,
    /// How well it is known who is hot, and what knowing costs
    Track,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Part {
    /// Eight VMs at falling levels of memory
    Levels,
    /// A VM whose need jumps
    Jump,
    /// Two VMs that want the same memory all the time
    Pairs,
    /// Two VMs whose needs change
    Stages,
    /// How much of one VM's memory can go
    Memory,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Guest {
    /// A thread
    Native,
    /// A KVM virtual CPU in user mode
    Kvm,
    /// An unmodified Debian kernel in QEMU (needs the guest image of `make demo`)
    Qemu,
}

/// Run it.
pub fn run(args: BenchArgs, json: bool) -> Result<()> {
    if !ballast_bench::is_release() {
        eprintln!(
            "ballast bench: WARNING: this is not a release build; its numbers mean nothing (cargo build --release)"
        );
    }
    let which = match args.what {
        What::Restore => Which::Restore,
        What::Reclaim => Which::Reclaim,
        What::Scale => Which::Scale,
        What::Idle => Which::Idle,
        What::Storm => Which::Storm,
        What::Spill => Which::Spill,
        What::Huge => Which::Huge,
        What::Balance => Which::Balance,
        What::Track => Which::Track,
    };
    let guest = match args.guest {
        Guest::Native => GuestKind::Native,
        Guest::Kvm => GuestKind::Kvm,
        Guest::Qemu => GuestKind::Qemu,
    };
    if args.part.is_some() && which != Which::Balance {
        bail!("--part is for bench balance");
    }
    let part = args.part.map(|part| match part {
        Part::Levels => ballast_bench::Part::Levels,
        Part::Jump => ballast_bench::Part::Jump,
        Part::Pairs => ballast_bench::Part::Pairs,
        Part::Stages => ballast_bench::Part::Stages,
        Part::Memory => ballast_bench::Part::Memory,
    });
    let dir = args.dir.unwrap_or_else(std::env::temp_dir);
    let dir = std::path::absolute(&dir).with_context(|| format!("Finding {}", dir.display()))?;
    let options = Options { which, guest, quick: args.quick, dir, part };
    let mut described = json;
    ballast_bench::run(options, &mut |row, machine| {
        if json {
            show::print(&format!("{}\n", row.json(machine)))?;
            return Ok(());
        }
        if !std::mem::replace(&mut described, true) {
            let Some(machine) = machine.as_object() else { return Ok(()) };
            let line = |(key, value): (&String, &serde_json::Value)| {
                format!("{key} {}\n", value.as_str().map_or_else(|| value.to_string(), str::to_owned))
            };
            show::print(&(machine.iter().map(line).collect::<String>() + "\n"))?;
        }
        show::print(&(row.text() + "\n"))?;
        Ok(())
    })
}
