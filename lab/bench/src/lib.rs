//! `ballast bench`: Ballast against the kernel's own swap, a plain userfaultfd handler and the floor.
//!
//! Before: `ballastd` lies beside this program or on `PATH`; the kernel's columns need root and zram. After: the caller
//! has rows, and the machine is as it was.
//! Threads: the caller's; guests, handler, guard and daemon are processes.
//! Units: in every key. Promise: all sides are measured in the same run, on the same data, in the same order of
//! touches, in turns; every page's contents are checked; a missing figure has a reason.
//!
//! ```text
//! bench ── orders, answers ──► guest (ballast) ◄── faults ── keeper, engine     `testhost`
//!   │                     ──► guest (kernel)  ◄── zram, in a cgroup            `guard` puts it back
//!   │                     ──► guest (plain)   ◄── faults ── handler            `plain`
//!   └─────────────────────►   guest (floor)
//! ```

mod adopt;
mod agent;
mod balance;
mod booted;
mod cgroup;
mod choice;
mod cpu;
mod density;
mod end_pool;
mod far;
mod guard;
mod guest;
mod helper;
mod idle;
mod ksm;
mod limit;
mod machine;
mod native;
mod options;
mod order;
mod overhead;
mod pager;
mod plain;
mod plot;
mod pool;
mod probe;
mod progress;
mod real;
mod reclaim;
mod report;
mod restore;
mod rig;
mod role;
mod scale;
mod setting;
mod share;
mod stats;
mod storm;
mod subject;
mod tiers;
mod upgrade;
mod vcpu;
mod waits;
mod worker;
mod workload;
mod zram;

use anyhow::{Result, bail, ensure};
use serde_json::Value;

pub use machine::is_release;
pub use options::Options;
pub use plot::run as plot;
pub use report::Row;
pub use role::run as run_role;
pub use worker::ROLE_COMMAND;

use options::Which;
use order::GuestKind;
use progress::Progress;
use rig::Bench;

/// Measure; `each` gets every row as soon as it is ready, with the description of the machine.
pub fn run(options: Options, each: &mut dyn FnMut(&Row, &Value) -> Result<()>) -> Result<()> {
    if options.which == Which::Tiers {
        // The simulation needs neither a daemon nor a guest.
        let machine = machine::describe();
        let progress = Progress::start();
        return tiers::run(options.quick, &|title| progress.row(title), &mut |row| each(&row, &machine));
    }
    if options.is(GuestKind::Kvm) {
        use Which::{Balance, Idle, Limit, Reclaim, Restore};
        ensure!(
            matches!(options.which, Restore | Reclaim | Idle | Balance | Limit),
            "bench {} has no KVM guests (--guest native)",
            options.which.name()
        );
        if let Some(why) = ballast_testvm::kvm_missing() {
            bail!("no KVM guest can run here: {why} (--guest native needs nothing)");
        }
    }
    let machine = machine::describe();
    let has_swap = !matches!(
        options.which,
        Which::Far | Which::Share | Which::Idle | Which::Limit | Which::Pool | Which::Upgrade | Which::Guest
    );
    let mut bench = Bench::start(options, "", has_swap)?;
    let mut each = |row: Row| each(&row, &machine);
    let result = match bench.options.which {
        Which::Restore => restore::run(&mut bench, &mut each),
        Which::Reclaim => reclaim::run(&mut bench, &mut each),
        Which::Scale => scale::run(&mut bench, &mut each),
        Which::Density => density::run(&mut bench, &mut each),
        Which::Idle => idle::run(&mut bench, &mut each),
        Which::Storm => storm::run(&mut bench, &mut each),
        Which::Far => far::run(&mut bench, &mut each),
        Which::Share => share::run(&mut bench, &mut each),
        Which::Balance => balance::run(&mut bench, &mut each),
        Which::Limit => limit::run(&mut bench, &mut each),
        Which::Guest => agent::run(&mut bench, &mut each),
        Which::Tiers => bail!("tiers runs without a bench"),
        Which::Pool => pool::run(&mut bench, &mut each),
        Which::Upgrade => upgrade::run(&mut bench, &mut each),
        Which::Real => real::run(&mut bench, &mut each),
        Which::Adopt => adopt::run(&mut bench, &mut each),
    };
    if result.is_err() {
        eprintln!("ballast bench: the daemon's log:\n{}", bench.daemon.log());
    }
    result
}
