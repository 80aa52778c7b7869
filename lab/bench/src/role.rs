//! The roles of a helper process, and the orders that each takes.
//!
//! Before: `worker` started this process. After: it exits when the orders end, or when the bench dies.
//! Promise: all roles but the guard's end with the bench.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

use crate::guest::Guest;
use crate::helper::obey;
use crate::order::{Order, Role};
use crate::probe::Prober;
use crate::workload::Runner;
use crate::{adopt, guard, plain};

/// Plays a role, given as JSON, until standard input ends. `words` is a program to execute, with its arguments.
pub fn run(role: &str, words: &[OsString]) -> Result<()> {
    let role: Role = serde_json::from_str(role).context("This command is for the bench alone; its role")?;
    if !matches!(role, Role::Guard) {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    }
    match role {
        Role::Handler => plain::serve(),
        Role::Guard => guard::run(),
        Role::Plain { ram_bytes } => {
            let mut plain = adopt::Plain::new(ram_bytes)?;
            obey(|order| plain.obey(&order))
        }
        Role::Become => turn_into(words),
        Role::Guest(config) => {
            let mut guest = Guest::new(config)?;
            obey(|order| guest.obey(order))
        }
        Role::Prober(backing) => {
            let mut prober = Prober::new(backing)?;
            obey(|order| prober.obey(&order))
        }
        Role::Workload(config) => {
            let mut runner = Runner::new(config)?;
            obey(|order| match order {
                Order::Fill => runner.fill(),
                Order::Attach => runner.attach(),
                Order::Progress => runner.progress(),
                Order::Slice { ms } => runner.slice(ms),
                Order::Verify => runner.verify(),
                Order::Think(rounds) => runner.think(rounds),
                other => bail!("a workload cannot do {other:?}"),
            })
        }
    }
}

/// Executes another program. The setting that this process ends with its parent survives the exec.
fn turn_into(words: &[OsString]) -> Result<()> {
    let (program, words) = words.split_first().context("there is no program to become")?;
    let error = Command::new(program).args(words).exec();
    Err(error).with_context(|| format!("Becoming {}", program.display()))
}
