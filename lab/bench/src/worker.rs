//! The bench's side of a helper process.
//!
//! Before: the bench needs a [`Role`]. After: `ballast-bench bench-role` plays it in a process of its own, which ends
//! with the bench.
//! Threads: the one that started the helper. Promise: a drop ends and reaps the helper.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::order::{Answer, Order, Role};

/// The hidden subcommand that plays a role.
pub const ROLE_COMMAND: &str = "bench-role";

pub fn command(role: &Role) -> Result<Command> {
    command_of(&std::env::current_exe().context("Finding this program's own file")?, role)
}

fn command_of(program: &Path, role: &Role) -> Result<Command> {
    let mut command = Command::new(program);
    command.arg(ROLE_COMMAND).arg(serde_json::to_string(role)?);
    Ok(command)
}

#[derive(Debug)]
pub struct Worker {
    child: Child,
    // Closed with the worker: for the guard, the end of its input is the signal to restore everything.
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    /// The helper is the guard: it ends by itself when its input ends, and must not be killed.
    is_guard: bool,
}

impl Worker {
    pub fn start(role: &Role) -> Result<Self> {
        Self::run(role, command(role)?)
    }

    /// As [`Self::start`], from this copy of the program.
    pub fn start_as(program: &Path, role: &Role) -> Result<Self> {
        Self::run(role, command_of(program, role)?)
    }

    fn run(role: &Role, mut command: Command) -> Result<Self> {
        let is_guard = matches!(role, Role::Guard);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if is_guard {
            // The terminal's interrupt key must not reach it.
            command.process_group(0);
        }
        let mut child = command.spawn().context("Starting a helper of the bench")?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take().context("a helper has no output")?);
        Ok(Self { child, orders, answers: BufReader::new(answers), is_guard })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.pid().cast_signed()).context("a helper has no process id")?;
        kill_process(pid, signal).context("Stopping or continuing a helper")
    }

    /// Give an order; [`Worker::answer`] must follow.
    pub fn tell(&mut self, order: &Order) -> Result<()> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        let orders = self.orders.as_mut().context("a helper has no input")?;
        orders.write_all(&line).with_context(|| format!("Telling a helper of the bench: {order:?}"))
    }

    pub fn answer(&mut self) -> Result<Answer> {
        let mut line = String::new();
        self.answers.read_line(&mut line).context("Reading a helper's answer")?;
        if line.is_empty() {
            bail!("a helper of the bench ended ({})", self.child.wait()?);
        }
        match serde_json::from_str(&line).with_context(|| format!("Understanding a helper's answer {line:?}"))? {
            Answer::Failed(why) => bail!("{why}"),
            answer => Ok(answer),
        }
    }

    pub fn ask(&mut self, order: &Order) -> Result<Answer> {
        self.tell(order)?;
        self.answer()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.orders = None;
        if !self.is_guard {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}
